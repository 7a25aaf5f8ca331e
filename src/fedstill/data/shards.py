"""What simulated clients hold: index lists into one data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.data import sources
from fedstill.records import Records

Indices = NDArray[np.int64]


@dataclass
class Shards:
    """The records of every simulated client.

    Pickled without the records when ``source`` names them: a worker process maps the decoded cache itself.

    Attributes:
        source: what `fedstill.data.sources.load` takes, or the records themselves.
        parts: the train and the local test indices of each client.
        load_public: gives the public records (see `fedstill.data.public.load`); None when there are none.
    """

    source: str | Records
    parts: Sequence[tuple[Indices, Indices]]
    load_public: Callable[[], Records] | None = None
    _held: Records | None = field(default=None, init=False, repr=False, compare=False)
    _public: Records | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_held": None, "_public": None}

    def public(self) -> Records | None:
        """The public records, which everybody holds, or None."""
        if self._public is None and self.load_public is not None:
            self._public = self.load_public()
        return self._public

    def records(self, client: int) -> tuple[Records, Records]:
        """The train and the local test records of ``client``, copied out of the data set."""
        if self._held is None:
            self._held = sources.load(self.source).train if isinstance(self.source, str) else self.source
        train, test = self.parts[client]
        return self._held[torch.from_numpy(train)], self._held[torch.from_numpy(test)]

"""Records of simulated clients: index lists into one data set."""

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

    If ``source`` is a name, the records are not pickled: each worker process maps the decoded cache itself.

    Attributes:
        source: an argument of `fedstill.data.sources.load`, or the records themselves.
        parts: train and local test indices of each client.
        size: height and width to which images of a named source are resized, or None.
        load_public: function that loads the public records (`fedstill.data.public.load`); None if there are none.
    """

    source: str | Records
    parts: Sequence[tuple[Indices, Indices]]
    load_public: Callable[[], Records] | None = None
    size: int | None = None
    _records: Records | None = field(default=None, init=False, repr=False, compare=False)
    _public: Records | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_records": None, "_public": None}

    def public(self) -> Records | None:
        """The public records, or None."""
        if self._public is None and self.load_public is not None:
            self._public = self.load_public()
        return self._public

    def records(self, client: int) -> tuple[Records, Records]:
        """Copies of the train and the local test records of ``client``."""
        if self._records is None:
            source = self.source
            self._records = sources.load(source, size=self.size).train if isinstance(source, str) else source
        train, test = self.parts[client]
        return self._records[torch.from_numpy(train)], self._records[torch.from_numpy(test)]

"""What simulated clients hold: index lists into one data set."""

from collections.abc import Sequence
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
    """

    source: str | Records
    parts: Sequence[tuple[Indices, Indices]]
    _held: Records | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_held": None}

    def records(self, client: int) -> tuple[Records, Records]:
        """The train and the local test records of ``client``, copied out of the data set."""
        if self._held is None:
            self._held = sources.load(self.source).train if isinstance(self.source, str) else self.source
        train, test = self.parts[client]
        return self._held[torch.from_numpy(train)], self._held[torch.from_numpy(test)]

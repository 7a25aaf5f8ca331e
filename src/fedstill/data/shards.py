"""Records of simulated clients, which each process loads itself and which stay those of the run.

A run is long, and a file may change meanwhile: what a process loads later is compared with what the run began with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base.errors import Changed
from fedstill.base.records import Records
from fedstill.data.places import AS_IT_IS, Reading
from fedstill.data.sources import load


def unchanged(source: str | Records, reading: Reading, fingerprint: str) -> Records:
    """The training records of a source, if they are still those of the ``fingerprint``.

    Raises:
        ValueError: they are others now, or can't be read any more.
    """
    if not isinstance(source, str):
        return source
    data = load(source, reading)
    if data.fingerprint != fingerprint:
        raise Changed(changed(source))
    return data.train


def changed(source: str) -> str:
    """Words on data that changed during a run."""
    remedy = "bring the former records back, or start anew with another --out"
    return f"{source!r} changed while the run was going on; {remedy}"


@dataclass
class Shards:
    """The records of every simulated client.

    If ``source`` is a name, the records are not pickled: each worker process maps the decoded cache itself.

    Attributes:
        source: an argument of `fedstill.data.sources.load`, or the records themselves.
        parts: train and local test indices of each client.
        reading: how a named source is read.
        load_public: function that loads the public records (`fedstill.data.public.load`); None if there are none.
        loaded: the public records once they are loaded; other processes load their own.
        fingerprint: that of the data set of a named source, which must stay the same.
    """

    source: str | Records
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
    load_public: Callable[[], Records] | None = None
    reading: Reading = AS_IT_IS
    loaded: Records | None = field(default=None, repr=False, compare=False)
    fingerprint: str = ""
    _records: Records | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_records": None, "loaded": None}

    def public(self) -> Records | None:
        """The public records, or None."""
        if self.loaded is None and self.load_public is not None:
            self.loaded = self.load_public()
        return self.loaded

    def records(self, client: int) -> tuple[Records, Records]:
        """Copies of the train and the local test records of ``client``.

        Raises:
            ValueError: the source has changed since the run began.
        """
        if self._records is None:
            self._records = unchanged(self.source, self.reading, self.fingerprint)
        train, test = self.parts[client]
        return self._records[torch.from_numpy(train)], self._records[torch.from_numpy(test)]

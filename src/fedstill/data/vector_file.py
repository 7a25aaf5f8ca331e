"""Vectors that take long to compute, in a file: memory stays flat, and a stopped computation goes on."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

SECONDS = 5.0
"""Seconds between two notes of how far the computation is: as much is computed again after a kill."""


class VectorFile:
    """Rows of float32 that are written in a fixed order of groups.

    Args:
        path: the ``.npy`` file; the note of the groups that are done lies beside it. None keeps the rows in memory.
        groups: places of the rows of each group, in the order in which they are computed.
    """

    def __init__(self, path: Path | None, groups: Sequence[Sequence[int]]) -> None:
        self._path, self._groups = path, groups
        self._count = sum(map(len, groups))
        self._noted = time.monotonic()
        self._rows, self._done = self._opened()

    def _opened(self) -> tuple[NDArray[np.float32] | None, int]:
        """The rows of an earlier start and the number of its groups; none if there are no such rows."""
        if self._path is None:
            return None, 0
        try:
            done, count = map(int, json.loads(_note(self._path).read_bytes()))
            rows = np.load(self._path, mmap_mode="r+", allow_pickle=False)
        except (OSError, ValueError, TypeError):
            return None, 0
        if (
            rows.dtype != np.float32
            or rows.ndim != 2
            or len(rows) != self._count
            or done < 0
            or count != self._length(done)
        ):
            return None, 0
        return rows, done

    def _length(self, done: int) -> int:
        return sum(map(len, self._groups[:done]))

    @property
    def count(self) -> int:
        """Number of rows that are there."""
        return self._length(self._done)

    @property
    def left(self) -> Sequence[Sequence[int]]:
        """The groups that are still to be computed."""
        return self._groups[self._done :]

    def put(self, rows: Float32[np.ndarray, "m d"]) -> None:
        """Write the rows of the next group."""
        if self._rows is None:
            shape = (self._count, rows.shape[1])
            self._rows = np.empty(shape, np.float32) if self._path is None else _created(self._path, shape)
        self._rows[self._groups[self._done]] = rows
        self._done += 1
        if time.monotonic() > self._noted + SECONDS:
            self.note()

    def note(self) -> None:
        """Write down which groups are on disk."""
        if self._path is None or not isinstance(self._rows, np.memmap):
            return
        self._rows.flush()
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps([self._done, self.count]))
        os.replace(new, _note(self._path))
        self._noted = time.monotonic()

    def rows(self) -> NDArray[np.float32]:
        """All rows, ``(count, d)``; ``d`` is 1 if there are none."""
        return np.empty((0, 1), np.float32) if self._rows is None else self._rows


def _note(path: Path) -> Path:
    return path.with_suffix(".done")


def _created(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A file of zeros, mapped; an earlier note, which is about another file, is gone first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _note(path).unlink(missing_ok=True)
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)

"""Noise for ``tests/vectors/noise.json``: from words that everybody can repeat to released numbers.

Word i of a case is the first 8 bytes, little-endian, of SHA-256 of ``"NAME i"``, with NAME the case's name.
"""

import hashlib
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base import seeds
from fedstill.privacy import lattice


def word(name: str, i: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {i}".encode()).digest()[:8], "little")


class Words(seeds.Entropy):
    """Noise from a case's words, in their order."""

    def __init__(self, name: str) -> None:
        self._name, self._next = name, count()

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.array([word(self._name, next(self._next)) for _ in range(count)], dtype=np.uint64)


GRIDS = [
    ("unit noise", 1.0, [0.0, 1.0, -1.0, 1 / 3, 1e-9, 12345.678]),
    ("a standard deviation that is no power of 2", 0.3, [0.1, 0.2, 0.30000000000000004, -7.5]),
    ("large noise", 2.0**40 + 1, [0.0, 1e12, -3.0]),
    ("tiny noise", 1e-12, [1e-13, -1e-12, 0.001]),
    ("values beyond float64's exact sums", 1.0, [1e300, -1e300]),
]
LATTICE = [("least variance", 1.0, 24), ("smooth", 9.0, 24), ("a fraction", 137.9, 24), ("wide", 2.0**60, 24)]
REFUSED = [0.0, 0.5, -3.0, 2.0**81, "inf", "nan"]
"""Variances out of range."""


def added(name: str, std: float, exact: list[float]) -> list[float]:
    """What `seeds.Entropy.added` releases if the words of the case come from the operating system."""
    return Words(name).added(torch.tensor(exact, dtype=torch.float64), std).tolist()


def discrete(name: str, variance: float, many: int) -> list[int]:
    return lattice.discrete_gaussian((many,), variance, Words(name)).tolist()


def as_file() -> dict[str, Any]:
    """The content of ``noise.json``; floats are hexadecimal, so that no digit is lost."""
    grids = []
    for name, std, exact in GRIDS:
        released = added(name, std, exact)
        case = {"name": name, "std": std.hex(), "exact": [x.hex() for x in exact]}
        grids.append({**case, "good": True, "released": [x.hex() for x in released]})
    _, std, exact = GRIDS[0]
    released = added("unit noise", std, exact)
    case = {"name": "unit noise", "std": std.hex(), "exact": [x.hex() for x in exact], "good": False}
    off = [released[0] + 2.0**-30, *released[1:]]
    other = [released[0], released[1] + 2.0**-10, *released[2:]]
    bare = [x for x in exact]
    for why, values in (("off the grid", off), ("one cell away", other), ("without noise", bare)):
        grids.append({**case, "why": why, "released": [x.hex() for x in values]})
    lattices: list[dict[str, Any]] = [
        {"name": name, "variance": v, "good": True, "values": discrete(name, v, many)} for name, v, many in LATTICE
    ]
    lattices += [{"name": f"variance {v}", "variance": v, "good": False} for v in REFUSED]
    return {"format": 1, "grid": grids, "lattice": lattices}

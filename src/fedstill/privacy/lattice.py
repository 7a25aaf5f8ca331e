"""Discrete Gaussian noise: exact samples on the integers, and the theorem by which sums of them are Gaussian releases.

The discrete Gaussian of variance parameter v has ``P[k]`` proportional to ``exp(-k^2 / 2v)`` over all integers k.

**Theorem.** Let x be integers, ``Z_1 ... Z_h`` independent discrete Gaussians of parameters ``v_i >= 9``, with
``v_1 + ... + v_h >= s^2 + 9``. Then ``x + Z_1 + ... + Z_h`` is, up to factors within ``exp(+-1e-30)`` of each
probability, a function of ``x + N(0, s^2)`` and of randomness that depends on nothing else. So it costs what that
continuous Gaussian release costs, for any number of coordinates and with a variance of its own in each.

*Proof.* By Poisson summation, ``sum_j exp(-(j - y)^2 / 2v) = sqrt(2 pi v) (1 + e)`` with ``|e| <= 2.1 exp(-2 pi^2 v)``
for every real y. (1) The convolution of two discrete Gaussians at k is ``exp(-k^2 / 2(v + w))`` times such a sum with
the parameter ``v w / (v + w) >= 4.5``, so a sum of h of them is the discrete Gaussian of the sum of their parameters up
to a factor within ``(1 +- 2.1 exp(-9 pi^2))^(2h)``, and ``exp(-9 pi^2) < 1e-38``. (2) Round y, drawn from
``N(x, v - 9)``, to k with probability proportional to ``exp(-(k - y)^2 / 18)``: by the same sum with the parameter 9,
k has ``N(x, v)``'s density at the integers up to a factor within ``1 +- 2.2 exp(-18 pi^2)``, which is the discrete
Gaussian around x up to one more such factor. Rounding so is post-processing. (3) More variance than ``s^2 + 9`` is one
more independent Gaussian before the rounding. For d coordinates and h adders the exponent is below ``1e-37 d h``.

Exact samples: ``|k| = B q + r`` with B a power of two near the standard deviation. q comes from a table of
probabilities ``exp(-(B q)^2 / 2v)`` to 128 bits, r and a sign are fair bits, and the candidate stays with probability
``exp(-(2 B q r + r^2) / 2v)``. Comparisons are in float64, and those that its rounding could decide are made again with
60 decimal digits (one in 2^42), so each probability is right to 2^-120. Values end at 13 standard deviations, beyond
which less than 2^-120 lies.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from fedstill.base.seeds import Noise

SMOOTH = 9.0
"""Least variance parameter of one client's noise, and the part of a sum's variance that rounding takes (theorem)."""
_DIGITS = Context(prec=60)
_TAIL = 89.0
"""-log of the probability beyond which nothing is drawn: exp(-89) < 2^-128."""
_MOST = 2.0**80
"""Largest variance parameter: B keeps its place in a word of 64 bits, and sums theirs."""
_UNSURE = 2.0**20
"""Distance of a uniform word from a threshold, both below 2^64, within which float64 may err: by less than 2^-46 p."""


class Table(NamedTuple):
    """Constants for one variance parameter.

    Attributes:
        block: log2 of B.
        thresholds: 2^128 times the cumulative probabilities of q, rounded down.
        high: their upper 64 bits.
        variance: the parameter.
    """

    block: int
    thresholds: tuple[int, ...]
    high: NDArray[np.uint64]
    variance: float

    def blocks(self, words: NDArray[np.uint64], noise: Noise) -> NDArray[np.int64]:
        """Q for each uniform word; one that equals a threshold's upper half draws the lower half too."""
        q = np.searchsorted(self.high, words, side="right").astype(np.int64)
        for i in np.flatnonzero(np.isin(words, self.high)):
            whole = int(words[i]) << 64 | int(noise.words(1)[0])
            q[i] = sum(threshold <= whole for threshold in self.thresholds)
        return np.minimum(q, len(self.thresholds) - 1)

    def stays(self, q: int, r: int, word: int, noise: Noise) -> bool:
        """Whether a candidate stays whose uniform ``word`` lies too near to its probability for float64."""
        with localcontext(_DIGITS):
            exponent = Decimal(r) * (2 * (1 << self.block) * q + r) / (2 * Decimal(self.variance))
            limit = int((-exponent).exp() * 2**128)
        return (word << 64 | int(noise.words(1)[0])) < limit


@lru_cache(maxsize=64)
def table(variance: float) -> Table:
    """The constants for ``variance``."""
    block = max(0, math.frexp(math.sqrt(variance))[1] - 1)
    size = 1 << block
    last = math.ceil(math.sqrt(2 * _TAIL * variance) / size)
    with localcontext(_DIGITS):
        weights = [(-(Decimal(size * q) ** 2) / (2 * Decimal(variance))).exp() for q in range(last + 1)]
        total, so_far, thresholds = sum(weights), Decimal(0), []
        for weight in weights:
            so_far += weight
            thresholds.append(int(so_far / total * 2**128))
    high = np.array([min(threshold >> 64, 2**64 - 1) for threshold in thresholds], dtype=np.uint64)
    return Table(block, tuple(thresholds), high, variance)


def share(std: float, adders: int) -> float:
    """The variance parameter of each client's noise so that ``adders`` of them make ``N(0, std^2)`` (theorem)."""
    return max(SMOOTH, (std**2 + SMOOTH) / adders) * (1 + 1e-12)


def alone(std: float, adders: int) -> float:
    """The standard deviation of the continuous Gaussian that one client's `share` costs no more than, by itself."""
    return math.sqrt(max(share(std, adders) - SMOOTH, 0.0))


def discrete_gaussian(shape: Sequence[int], variance: float, noise: Noise) -> Int64[Tensor, "..."]:
    """Independent samples of the discrete Gaussian.

    Args:
        shape: shape of the result.
        variance: the parameter v, from 1 to 2^80.
        noise: the source of fair bits.

    Raises:
        ValueError: ``variance`` is out of its range.
    """
    if not 1 <= variance <= _MOST:
        raise ValueError(f"the variance of discrete noise is {variance:g}; it must be from 1 to {_MOST:g}")
    constants, wanted = table(float(variance)), math.prod(shape)
    found: list[NDArray[np.int64]] = []
    while wanted:
        some = _accepted(constants, min(wanted + wanted // 2 + 64, 1 << 20), noise)[:wanted]
        found.append(some)
        wanted -= len(some)
    flat = np.concatenate(found) if found else np.empty(0, np.int64)
    return torch.from_numpy(flat).reshape(tuple(shape))


def _accepted(constants: Table, count: int, noise: Noise) -> NDArray[np.int64]:
    """The values that stay of ``count`` candidates."""
    words = noise.words(3 * count).reshape(3, count)
    q = constants.blocks(words[0], noise).astype(np.float64)
    r = (words[1] & np.uint64((1 << constants.block) - 1)).astype(np.float64)
    negative = (words[1] >> np.uint64(63)).astype(bool)
    size = 2.0**constants.block
    with np.errstate(under="ignore"):
        limit = np.exp(-(r * (2 * size * q + r)) / (2 * constants.variance)) * 2.0**64
    uniform = words[2].astype(np.float64)
    stays = uniform < limit
    for i in np.flatnonzero(np.abs(uniform - limit) <= _UNSURE):
        stays[i] = constants.stays(int(q[i]), int(r[i]), int(words[2][i]), noise)
    value = (size * q + r).astype(np.int64)  # below 2^53, so exact
    stays &= ~(negative & (value == 0))  # 0 has one sign
    signed = np.where(negative, -value, value)
    kept: NDArray[np.int64] = signed[stays]
    return kept

"""Means and covariances of classes with the noise of FedPFT's theorem, which no epsilon bounds here.

Beitollahi et al. 2024 (arXiv:2402.01862), theorem on differential privacy for one Gaussian of a class with a full
covariance, for rows of length at most 1 (docs/methods/fedpft.md says which form of it this is).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy.mechanisms import Mechanism, check_positive, clipped
from fedstill.privacy.releases import Event, Unbounded
from fedstill.privacy.second_moments import Labelled

COUNTS = (
    "the noise is a multiple of 1 / n, and n, the client's number of records of a class, is sent without noise, as is "
    "the list of its classes; a record more or less shows in both"
)


def claimed_noise(records: int, epsilon: float, delta: float) -> float:
    """``4 / (n epsilon) sqrt(5 ln(4 / delta))``, the standard deviation of FedPFT's noise for n records of a class.

    It is ``sqrt(2 ln(4 / delta)) / epsilon`` times ``sqrt(2^2 + 6^2) / n``, and no mean and covariance of n rows move
    further together if one row is replaced: the mean by 2 / n, the covariance by 6 / n.
    """
    return 4 / (records * epsilon) * math.sqrt(5 * math.log(4 / delta))


@dataclass(frozen=True)
class ClassGaussians:
    """Gaussians of the m classes that a client has.

    Attributes:
        classes: ``(m,)``, ascending.
        counts: ``(m,)``, exact numbers of records.
        means: ``(m, d)``.
        covariances: ``(m, d, d)``, symmetric; noise may make eigenvalues negative.
    """

    classes: Int64[Tensor, " m"]
    counts: Int64[Tensor, " m"]
    means: Float64[Tensor, "m d"]
    covariances: Float64[Tensor, "m d d"]


@dataclass(frozen=True, kw_only=True)
class PublishedGaussians(Mechanism[Labelled, ClassGaussians]):
    """The mean and the covariance of each of a client's classes, with FedPFT's noise.

    If one record is replaced by another of its class, and n is public, the release is (epsilon, delta)-DP for the
    epsilons for which the classic Gaussian formula holds. Where records are added or removed, nothing bounds it.

    Attributes:
        radius: length to which rows are clipped; they are divided by it.
        epsilon: epsilon in the paper's formula.
        delta: delta in the paper's formula.
    """

    theorems, reasons = (f"none holds: {COUNTS}",), (COUNTS,)

    radius: float
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name in ("radius", "epsilon", "delta"):
            check_positive(name, getattr(self, name))
        if self.delta >= 1:
            raise ValueError(f"delta is {self.delta}; it must lie between 0 and 1")

    @property
    @override
    def event(self) -> Event:
        return Unbounded(reason=COUNTS)

    def __call__(self, rows: Labelled, noise: Noise) -> ClassGaussians:
        """The Gaussians of features ``(n, d)`` with classes ``(n,)``."""
        features, labels = rows
        x = clipped(features, self.radius) / self.radius
        counts = torch.bincount(labels)
        present = counts.nonzero().flatten()
        found = [self._noisy(x[labels == label], noise) for label in present]
        dims = features.shape[1]
        means = torch.stack([mean for mean, _ in found]) if found else x.new_zeros(0, dims)
        covariances = torch.stack([matrix for _, matrix in found]) if found else x.new_zeros(0, dims, dims)
        return ClassGaussians(present, counts[present], means, covariances)

    def _noisy(self, x: Float64[Tensor, "n d"], noise: Noise) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        std = claimed_noise(len(x), self.epsilon, self.delta)
        mean, matrix = x.mean(0), x.T.cov(correction=0).reshape(x.shape[1], -1)
        wide = noise.added(matrix, std)
        return noise.added(mean, std), (wide + wide.T) / 2

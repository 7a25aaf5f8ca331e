"""The server's side of the methods with sums of features and of their products: totals over clients, and heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from fedstill.methods.moments import MomentSums, Sums, noise_of
from fedstill.privacy.second_moments import unpacked

Spectrum = Literal["clamped", "cleaned"]


@dataclass(frozen=True)
class Total:
    """The sums over all clients, in float64.

    Attributes:
        second: upper triangle of G, row by row, ``(1, entries)``; or of each class's own G, ``(classes, entries)``.
        first: H, ``(classes, p)``, whose last column counts records, times ``bias``.
        bias: value of the constant feature, b.
        std: standard deviation of the noise in a diagonal entry of G; 0 without noise.
        first_std: the same in H.
    """

    second: Float64[Tensor, "groups entries"]
    first: Float64[Tensor, "classes p"]
    bias: float
    std: float
    first_std: float

    def matrix(self, group: int = 0) -> Float64[Tensor, "p p"]:
        """G of all classes, or of one."""
        return unpacked(self.second[group], self.first.shape[1])

    @property
    def noise(self) -> float:
        """The expected spectral norm of the noise in G, ``std sqrt(2 p)``.

        A random symmetric ``(p, p)`` matrix whose entries above the diagonal have the standard deviation t has
        eigenvalues within about 2 t sqrt(p); here ``t = std / sqrt(2)``.
        """
        return self.std * math.sqrt(2 * self.first.shape[1])


def add_up(replies: Sequence[Sums], settings: MomentSums, delta: float, device: torch.device) -> Total:
    """The sums of all replies, of which one is in memory at a time."""
    second = torch.zeros(replies[0].second.value.shape, dtype=torch.float64)
    first = torch.zeros(replies[0].first.value.shape, dtype=torch.float64)
    for reply in replies:
        second += reply.second.value
        first += reply.first.value
    std, first_std = noise_of(settings, delta)
    many = math.sqrt(len(replies))
    return Total(
        second.div_(settings.scale).to(device),
        first.div_(settings.scale).to(device),
        settings.bias,
        many * std,
        many * first_std,
    )


def solve(
    matrix: Float64[Tensor, "p p"],
    right: Float64[Tensor, "p m"],
    ridge: float,
    *,
    noise: float = 0.0,
    spectrum: Spectrum = "clamped",
) -> Float64[Tensor, "p m"]:
    """``(A + ridge I)^-1 B`` by one factorisation.

    Args:
        matrix: A, symmetric.
        right: B.
        ridge: multiple of the identity.
        noise: the expected spectral norm of the noise in A (`Total.noise`); 0 for none.
        spectrum: what becomes of the eigenvalues of a noisy A: negative ones count as 0, or all are cleaned before.

    Raises:
        ValueError: A without noise is not positive definite with this ridge.
    """
    if noise:
        values, vectors = torch.linalg.eigh(matrix)
        values = cleaned(values, noise) if spectrum == "cleaned" else values
        solution: Tensor = vectors @ ((vectors.T @ right) / (values.clamp_min(0) + ridge)[:, None])
        return solution
    factor, failed = torch.linalg.cholesky_ex(matrix + ridge * torch.eye(len(matrix)).to(matrix))
    if int(failed):
        raise ValueError(
            f"the sums of products plus a ridge of {ridge:g} are not positive definite; take a larger ridge or fewer "
            "directions (--space.dims)"
        )
    return torch.cholesky_solve(right, factor)


def cleaned(values: Float64[Tensor, " p"], noise: float) -> Float64[Tensor, " p"]:
    """Eigenvalues of A that its noisy eigenvectors ask for: ``v^T A v`` for each eigenvector v of A plus noise.

    Noise spreads eigenvalues and pushes them apart. ``lambda - 2 s^2 h(lambda)`` with the Hilbert transform
    ``h(lambda) = mean_j (lambda - lambda_j) / ((lambda - lambda_j)^2 + w^2)`` undoes this for many entries (Bun, Allez,
    Bouchaud, Potters 2016, arXiv:1502.06736, the case of additive Gaussian noise).

    Args:
        values: eigenvalues of the noisy matrix.
        noise: 2 s, the expected spectral norm of the noise; the width w is a sixteenth of it.
    """
    gaps = values[:, None] - values
    hilbert = (gaps / (gaps.square() + (noise / 16) ** 2)).mean(1)
    return values - noise**2 / 2 * hilbert

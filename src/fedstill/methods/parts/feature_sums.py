"""Sums of features, and totals of them that a server solves.

A client subtracts a public centre from its rows of features, appends a constant that counts them, and sums them by
class; `ClassSums` adds the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Float64, Num
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill import models
from fedstill.base.settings import Epsilon, Settings, Share
from fedstill.distill.embedding import embed
from fedstill.methods.parts.moments import WHOLE_STEPS, MomentSums, Sums, mechanism_facts, noise_of
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import MOST_STEPS, IntegerClassSums, IntegerMoments, constant_steps
from fedstill.privacy.mechanisms import ClassSums
from fedstill.privacy.second_moments import Moments, diagonal_places, unpacked
from fedstill.privacy.sum_ranges import check_length, check_moments
from fedstill.protocol import Client, Federation, Public, Records, Reply, Summation, Summed

Centre = Annotated[Float32[Tensor, " dims"], Public()]


class FeatureSums(Reply):
    """Noisy sums, by class, of unit features and of a constant."""

    sums: Summed[Num[Tensor, "classes dims"]]


_ALIKE = 1e-6
"""Largest difference of rows, relative to the longest, that is rounding."""


class Summing(Settings):
    """Settings of the sums of features and their release."""

    images_only: ClassVar[bool] = True
    protects: ClassVar[str] = "record"
    epsilon: Epsilon = 1.0
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    nets: PositiveInt = 16
    """Random networks whose features are summed."""
    count_share: Share = 0.01
    """Share of a row's squared length for the constant that counts records."""


def public_ball(nets: Sequence[nn.Module], public: Records | None) -> tuple[Tensor, float]:
    """Centre and radius to clip rows: the public rows' mean and 90 % quantile of distances; 0 and 1 without any."""
    if public is None:
        return torch.zeros(1), 1.0
    rows = embed(nets, public[:5000])
    centre = rows.mean(0)
    radius = float((rows - centre).norm(dim=1).quantile(0.9))
    if radius <= _ALIKE * float(rows.norm(dim=1).max()):
        raise ValueError("all public images have the same features, which bound no row; name others with --public")
    return centre.cpu(), radius


def row_size(fed: Federation, nets: Sequence[nn.Module]) -> dict[str, int]:
    """Length of a row for `Federation.ask`: the features of all networks, and the constant."""
    return {"dims": sum(models.feature_width(net, fed.like.shape) for net in nets) + 1}


def release_sums(client: Client, rows: Tensor, centre: Tensor, radius: float, settings: Summing) -> FeatureSums:
    """Release A_k, the class sums of a client's rows ``(n, d)`` relative to ``centre`` and of a constant."""
    relative, classes = rows - centre.to(client.device), client.train.num_classes
    whole = _whole(settings, client.delta, classes, radius, client.adders) if client.masked else None
    constant = relative.new_full((len(relative), 1), _constant(settings, radius, whole))
    labelled = torch.cat([relative * math.sqrt(1 - settings.count_share), constant], 1), client.train.labels
    if whole is not None:
        return FeatureSums(sums=client.release(whole, labelled).map(Tensor.cpu))
    sums = client.release(ClassSums(classes, radius, release_noise(settings.epsilon, client.delta)), labelled)
    return FeatureSums(sums=sums.map(Tensor.float))


def _whole(settings: Summing, delta: float, classes: int, radius: float, adders: int) -> IntegerClassSums:
    """The mechanism of masked sums, the same at clients and server."""
    noise = release_noise(settings.epsilon, delta)
    return IntegerClassSums(num_classes=classes, radius=radius, noise_multiplier=noise, steps=MOST_STEPS, adders=adders)


def _constant(settings: Summing, radius: float, whole: IntegerClassSums | None) -> float:
    """The entry of a row that counts it; of whole numbers a whole number of steps, as any other would be rounded."""
    share = math.sqrt(settings.count_share)
    return radius * (share if whole is None else constant_steps(share, whole.steps) / whole.steps)


def class_means(
    fed: Federation, summed: Summation[FeatureSums], centre: Tensor, radius: float, settings: Summing
) -> Float[Tensor, "classes d"]:
    """Each class's mean row over all clients, from their releases."""
    total = summed.total.sums.value  # A = sum_k A_k
    sums, whole = total.double().to(fed.device), None
    if not total.is_floating_point():
        whole = _whole(settings, fed.delta, len(total), radius, summed.adders)
        if summed.records is not None:
            check_length(whole, total, summed.records, whole.steps, len(summed.clients), "records")
        sums *= radius / whole.steps
    counts = (sums[:, -1:] / _constant(settings, radius, whole)).clamp_min(1.0)
    means: Tensor = sums[:, :-1] / (math.sqrt(1 - settings.count_share) * counts) + centre.to(fed.device)
    return means


Spectrum = Literal["clamped", "cleaned"]
_KNOWN = 4.0
"""Standard deviations of its noise from which a count is known well enough to divide by it."""


@dataclass(frozen=True)
class Total:
    """The sums over all clients, in float64.

    Attributes:
        second: upper triangle of G, row by row, ``(1, entries)``; or of each class's own G, ``(classes, entries)``.
        first: H, ``(classes, p)``, whose last column counts records, times ``bias``.
        bias: value of the constant feature, b.
        std: standard deviation of the noise in a diagonal entry of G; 0 without noise.
        first_std: the same in H.
        rescaled: factor by which the constant of rows of whole numbers, and the noise of its sums, was changed to b.
    """

    second: Float64[Tensor, "groups entries"]
    first: Float64[Tensor, "classes p"]
    bias: float
    std: float
    first_std: float
    rescaled: float = 1.0

    @property
    def count_std(self) -> float:
        """Standard deviation of the noise in a class's number of records, ``first[:, -1] / bias``."""
        return self.first_std * self.rescaled / self.bias

    def matrix(self, group: int = 0) -> Float64[Tensor, "p p"]:
        """G of all classes, or of one."""
        return unpacked(self.second[group], self.first.shape[1])

    @property
    def middle(self) -> float:
        """The mean of a number over all records, to which its head is pulled, within its public range [-1, 1].

        It is the sum in H by the count in G, both with their noise; 0, the middle of the range, for classes, without
        any records, and where the noise of the count is a quarter of it or more.
        """
        counted = float(self.second[0, -1])  # the last entry of G
        if len(self.first) > 1 or counted <= _KNOWN * self.std * self.rescaled**2:
            return 0.0
        return min(1.0, max(-1.0, self.bias * float(self.first[0, -1]) / counted))

    @property
    def noise(self) -> float:
        """The expected spectral norm of the noise in G, ``std sqrt(2 p)``.

        A random symmetric ``(p, p)`` matrix whose entries above the diagonal have the standard deviation t has
        eigenvalues within about 2 t sqrt(p); here ``t = std / sqrt(2)``.
        """
        return self.std * math.sqrt(2 * self.first.shape[1])


def add_up(sums: Summation[Sums], settings: MomentSums, delta: float, device: torch.device) -> Total:
    """The clients' total in real numbers, with the noise in it.

    Raises:
        OutOfRange: whole numbers that no records and no noise give.
    """
    second, first, rescaled = sums.total.second.value, sums.total.first.value, 1.0
    of_second, of_first = settings.scale, settings.scale
    if not second.is_floating_point():
        steps = settings.steps or WHOLE_STEPS
        classes, dims, by_class = len(first), first.shape[1] - 1, len(second) > 1
        # in the sums rows have the length 1
        facts = mechanism_facts(settings, delta, num_classes=classes, dims=dims, radius=1.0, by_class=by_class)
        mechanism = IntegerMoments(**facts, steps=steps, adders=sums.adders)
        check_moments(mechanism, Moments(second, first), len(sums.clients), sums.records)
        rescaled = mechanism.bias * mechanism.steps / mechanism.constant
        second, first = _with_constant(second.double(), first.double(), rescaled)
        of_second, of_first = float(steps**2), float(mechanism.unit_of_first)
    std, first_std = noise_of(settings, delta)
    return Total(
        second.double().div_(of_second).to(device),
        first.double().div_(of_first).to(device),
        settings.bias,
        sums.spread * std,
        sums.spread * first_std,
        rescaled,
    )


def _with_constant(
    second: Float64[Tensor, "groups entries"], first: Float64[Tensor, "classes p"], ratio: float
) -> tuple[Tensor, Tensor]:
    """The sums, changed in place, as those of rows whose last entry is ``ratio`` times what it is."""
    width = first.shape[1]
    first[:, -1] *= ratio
    second[:, diagonal_places(width, second.device) + torch.arange(width - 1, -1, -1, device=second.device)] *= ratio
    second[:, -1] *= ratio
    return second, first


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
            f"the sums of products plus a ridge of {ridge:g} are not positive definite; take a larger ridge, fewer "
            "directions (--space.dims) or, of open sums, --precision double"
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

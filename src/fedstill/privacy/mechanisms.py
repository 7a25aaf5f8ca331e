"""Mechanisms: each takes records, bounds their influence itself, and says what it costs and why.

No caller can break a mechanism's claim: clipping happens inside, noise comes with it, and the event that is charged is
computed from the same numbers. Neighbouring data sets differ by one record that is added or removed, unless a
mechanism's unit is "label". A noise multiplier is noise by sensitivity; 0 is allowed, adds none and guarantees nothing.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.privacy.events import Event, Gaussian, Unbounded, Unit
from fedstill.seeds import Noise

Rows = TypeVar("Rows", contravariant=True)
Value = TypeVar("Value", covariant=True)


class Mechanism(ABC, Generic[Rows, Value]):
    """A randomised function of records.

    Attributes:
        unit: what its guarantee protects.
    """

    unit: ClassVar[Unit] = "record"

    @property
    @abstractmethod
    def event(self) -> Event:
        """What one release costs."""

    @property
    @abstractmethod
    def theorem(self) -> str:
        """One sentence: the sensitivity, and the theorem that the cost rests on."""

    @abstractmethod
    def __call__(self, rows: Rows, noise: Noise) -> Value:
        """Release: bound every record's influence, add noise."""


@dataclass(frozen=True, eq=False)
class UnprotectedLabels(Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]]):
    """Labels that no theorem covers, and why: as they are, or through ``inner``.

    Attributes:
        reason: what a guarantee says in place of an epsilon.
        inner: what is done to the labels; None leaves them as they are.
    """

    unit: ClassVar[Unit] = "label"
    reason: str
    inner: Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]] | None = None

    @property
    @override
    def event(self) -> Event:
        return Unbounded(reason=self.reason)

    @property
    @override
    def theorem(self) -> str:
        return "none"

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Int64[Tensor, " n"]:
        """Labels ``(n,)`` to labels."""
        return rows if self.inner is None else self.inner(rows, noise)


def gaussian_event(noise_multiplier: float, sampling: float = 1.0, count: int = 1) -> Event:
    """What Gaussian noise costs, ``count`` times on Poisson samples; none at all costs everything."""
    if noise_multiplier > 0:
        return Gaussian(noise_multiplier=noise_multiplier, sampling=sampling, count=count)
    return Unbounded(reason="the release carries no noise")


def check_noise(noise_multiplier: float) -> None:
    """Raise ValueError unless ``noise_multiplier`` is a finite number from 0."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier is {noise_multiplier}; it must be a finite number from 0")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a positive number")


class GaussianMechanism(Mechanism[Rows, Value]):
    """A mechanism with Gaussian noise of ``noise_multiplier`` times its sensitivity; 0 adds none.

    Attributes:
        noise_multiplier: standard deviation of the noise by `sensitivity`.
    """

    noise_multiplier: float

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """How far neighbouring data sets move the release at most, in Euclidean length."""

    @property
    @override
    def event(self) -> Event:
        return gaussian_event(self.noise_multiplier)

    def noised(self, exact: Tensor, noise: Noise) -> Tensor:
        """``exact`` with the noise that the event charges for."""
        return exact + self.noise_multiplier * self.sensitivity * noise.gaussian(exact.shape).to(exact.device)


def clipped(rows: Float[Tensor, "n d"], radius: float) -> Float64[Tensor, "n d"]:
    """Rows in float64, scaled down to length ``radius`` where they are longer.

    Lengths are at most ``radius`` up to rounding, which `ROUNDING` covers. A row that is not finite becomes 0: it must
    neither spoil a release nor show in it.
    """
    wide = rows.to(torch.float64)
    wide = torch.where(torch.isfinite(wide).all(1, keepdim=True), wide, 0.0)
    short: Tensor = wide * (radius / wide.norm(dim=1, keepdim=True).clamp_min(radius))
    return short


ROUNDING = 1 + 1e-9
"""Sensitivities are multiplied by this, so that rounding in float64 can't exceed them."""


@dataclass(frozen=True)
class NoisySum(GaussianMechanism[Float[Tensor, "n d"], Float64[Tensor, " d"]]):
    """The sum of rows clipped to length ``radius``, with Gaussian noise.

    Attributes:
        radius: largest length of a row; longer ones are scaled down. Positive, public.
        noise_multiplier: standard deviation of the noise by ``radius``.
    """

    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """One row's largest length."""
        return self.radius * ROUNDING

    @property
    @override
    def theorem(self) -> str:
        return (
            f"one record adds one row of length at most {self.radius:g}, the sensitivity; Gaussian mechanism "
            "(Balle, Wang 2018, theorem 8)"
        )

    def __call__(self, rows: Float[Tensor, "n d"], noise: Noise) -> Float64[Tensor, " d"]:
        """``(n, d)`` to ``(d,)``."""
        return self.noised(clipped(rows, self.radius).sum(0), noise)


@dataclass(frozen=True)
class ClassSums(GaussianMechanism[tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], Float64[Tensor, "classes d"]]):
    """For each class the sum of its rows clipped to length ``radius``, with Gaussian noise.

    The class list is public: every class has its row in the release, whether it occurs or not.

    Attributes:
        num_classes: rows of the release.
        radius: largest length of a row; longer ones are scaled down. Positive, public.
        noise_multiplier: standard deviation of the noise by ``radius``.
    """

    num_classes: int
    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """One row's largest length; it enters one class."""
        return self.radius * ROUNDING

    @property
    @override
    def theorem(self) -> str:
        return (
            f"one record adds one row of length at most {self.radius:g} to one class, the sensitivity; Gaussian "
            "mechanism (Balle, Wang 2018, theorem 8)"
        )

    def __call__(
        self, rows: tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], noise: Noise
    ) -> Float64[Tensor, "classes d"]:
        """Rows ``(n, d)`` and their classes ``(n,)`` to ``(num_classes, d)``."""
        values, labels = rows
        total = torch.zeros(self.num_classes, values.shape[1], dtype=torch.float64, device=values.device)
        total.index_add_(0, labels, clipped(values, self.radius))
        return self.noised(total, noise)


@dataclass(frozen=True)
class Histogram(GaussianMechanism[Int64[Tensor, " n"], Float64[Tensor, " classes"]]):
    """How many records each class has, with Gaussian noise.

    Attributes:
        num_classes: entries of the release.
        noise_multiplier: standard deviation of the noise; the sensitivity is 1.
    """

    num_classes: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)

    @property
    def sensitivity(self) -> float:
        """One count changes by 1."""
        return 1.0

    @property
    @override
    def theorem(self) -> str:
        return "one record changes one count by 1, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)"

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Float64[Tensor, " classes"]:
        """Classes ``(n,)`` to counts ``(num_classes,)``, which may be fractional or negative."""
        return self.noised(torch.bincount(rows, minlength=self.num_classes).to(torch.float64), noise)

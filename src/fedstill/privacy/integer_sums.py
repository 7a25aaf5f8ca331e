"""Sums of whole numbers with discrete Gaussian noise, of which each client adds a share: the mechanisms of `fed.sum`.

A record is clipped and rounded to whole numbers of public steps, of no greater length, before it is multiplied and
added, so that a client's sums are exact whole numbers with an exact sensitivity. They are equal to the bit for any
split and order of the records, and no rounding argument is needed.

``adders`` is the number of honest clients whose noise the guarantee counts on (`fedstill.sums`); 1 where each upload is
seen. The noise of one client is that of the sum divided by the square root of it.

``docs/proofs.md`` and ``docs/sums.md`` have the proofs.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy import lattice
from fedstill.privacy.logistic import LogisticHead
from fedstill.privacy.mechanisms import (
    ROUNDING,
    GaussianMechanism,
    check_noise,
    check_positive,
    clipped,
    gaussian_event,
)
from fedstill.privacy.releases import Event
from fedstill.privacy.second_moments import Labelled, Moments, SecondMoments, diagonal_places

Rows = TypeVar("Rows", contravariant=True)
Value = TypeVar("Value", covariant=True)
_NUMBERS = 2**22
"""Numbers of rows that are in memory in float64 at a time."""
LEAST_STEPS, MOST_STEPS = 8, 4096
"""Bounds of the steps of a row's largest length; their square times 2^28 records stays below 2^53, exact in float64."""


class IntegerSum(GaussianMechanism[Rows, Value]):
    """A mechanism whose value is whole numbers, with a share of the noise; subclasses are data classes.

    Attributes:
        adders: number of honest clients whose noise the event counts on, from 1.
    """

    adders: int

    @property
    def scales(self) -> tuple[float, ...]:
        """Standard deviations of the sum's noise by kind of coordinate, per noise multiplier; here all are of one."""
        return (self.sensitivity,)

    @abstractmethod
    def reach(self, records: int, clients: int) -> float:
        """The largest magnitude of a number in the exact total of this many records and clients."""

    def largest(self, records: int, clients: int) -> float:
        """The largest magnitude in a total with noise; less than 1e-40 of a number lies beyond."""
        std = self.noise_multiplier * max(self.scales) * math.sqrt(clients / self.adders)
        return self.reach(records, clients) + 14 * math.sqrt(std**2 + lattice.SMOOTH * clients)

    @property
    def alone(self) -> Event:
        """The cost of one client's own share of the noise, if everybody else works together."""
        if not self.noise_multiplier:
            return self.event
        of_one = min(lattice.alone(self.noise_multiplier * scale, self.adders) / scale for scale in self.scales)
        return gaussian_event(max(of_one, 1e-9))

    def integers(self, exact: Int64[Tensor, "..."], scale: float, noise: Noise) -> Int64[Tensor, "..."]:
        """The exact whole numbers plus this client's share of the noise."""
        if not self.noise_multiplier:
            return exact
        variance = lattice.share(self.noise_multiplier * scale, self.adders)
        return exact + lattice.discrete_gaussian(exact.shape, variance, noise).to(exact.device)

    def _check(self, steps: int | None = None) -> None:
        check_noise(self.noise_multiplier)
        if steps is not None and not LEAST_STEPS <= steps <= MOST_STEPS:
            raise ValueError(f"steps is {steps}; it must be from {LEAST_STEPS} to {MOST_STEPS}")
        if self.adders < 1:
            raise ValueError(f"adders is {self.adders}; at least one client must add noise")


@dataclass(frozen=True, kw_only=True)
class IntegerMoments(SecondMoments, IntegerSum[Iterable[Labelled], Moments]):
    """The sums G and H of `SecondMoments` in whole numbers: of rows r with ``|r| <= steps``.

    A row's constant is `constant` steps, b L as a whole number; its features are the nearest whole numbers that leave
    it no longer than L (`whole_steps`).

    Theorem: one record adds ``(r r^T, r)``, which moves ``v = (D, sqrt(2) U, a L H)`` by at most
    ``L^2 sqrt(1 + a^2)`` with L the steps, exactly. With a number, T is the whole number of steps nearest to it, from
    -L to L, and the record adds T r in place of r, of length at most L^2, so that ``v = (D, sqrt(2) U, a H)``. Then
    ``H = R^T T`` has the rows R of ``G = R^T R``: what rounding leaves is a regression of T on R, however many records
    there are. Discrete Gaussian noise with the parameters of ``N(0, s^2)`` on D, ``N(0, s^2 / 2)`` on U and
    ``N(0, (s / w)^2)`` on H, with w its factor in v, costs no more than ``N(0, s^2)`` on v (`lattice`).
    """

    theorems = (
        "one record adds its row r of whole numbers, |r| <= {0.steps}, to one class and r r^T, so that the sums, H "
        "times {0.weight_of_first:.4g}, move by at most {0.sensitivity:.6g}, the sensitivity; discrete Gaussian noise "
        "of {0.adders} honest clients (docs/sums.md, theorem 1); Gaussian mechanism (Balle, Wang 2018, theorem 8)",
        "one record adds its row r of whole numbers, |r| <= {0.steps}, times its number, of [-1, 1] in steps of "
        "1/{0.steps}, and r r^T, so that the sums, H times {0.weight_of_first:.4g}, move by at most "
        "{0.sensitivity:.6g}, the sensitivity; discrete Gaussian noise of {0.adders} honest clients (docs/sums.md, "
        "theorem 1); Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    )

    steps: int = 256
    adders: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(self.steps)

    @property
    def constant(self) -> int:
        """A row's last entry, which counts records."""
        return constant_steps(self.bias, self.steps)

    @property
    def unit_of_first(self) -> int:
        """The whole number in H that is 1: L steps, or L^2 with numbers."""
        return self.steps**2 if self.num_classes == 1 else self.steps

    @property
    def weight_of_first(self) -> float:
        """The factor of H in v: a L, or a with numbers."""
        return self.weight * self.steps**2 / self.unit_of_first

    @override
    def rows(self, features: Float[Tensor, "n d"], out: Float64[Tensor, "n d+1"]) -> Float64[Tensor, "n d+1"]:
        found = super().rows(features, out)
        found[:, :-1] = whole_steps(found[:, :-1], self.steps, self.constant)
        found[:, -1] = self.constant
        return found

    @override
    def numbers(self, targets: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        return super().numbers(targets).mul_(self.steps).round_()

    @property
    @override
    def sensitivity(self) -> float:
        return self.steps**2 * math.sqrt(1 + self.weight**2)

    @property
    @override
    def scales(self) -> tuple[float, float, float]:
        whole = self.sensitivity
        return whole, whole / math.sqrt(2), whole / self.weight_of_first

    @override
    def reach(self, records: int, clients: int) -> float:
        return records * self.steps**2

    @override
    def __call__(self, rows: Iterable[Labelled], noise: Noise) -> Moments:
        """The sums of batches of features ``(n, d)`` with classes or numbers ``(n,)``, one at a time, as int64.

        Raises:
            ValueError: there are more records than float64 sums exactly.
        """
        products, first = (part.to(torch.int64) for part in self.exact(rows))
        if (records := int(products[:, -1].sum()) // self.constant**2) * self.steps**2 >= 2**53:
            raise ValueError(
                f"{records} records in steps of {self.steps}; sums of at most {2**53 // self.steps**2 - 1} are exact"
            )
        diagonal, above, of_first = self.scales
        places = diagonal_places(self.dims + 1, products.device)
        second = self.integers(products, above, noise)
        second[:, places] = self.integers(products[:, places], diagonal, noise)
        return Moments(second, self.integers(first, of_first, noise))


@dataclass(frozen=True, kw_only=True)
class IntegerClassSums(IntegerSum[tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], Int64[Tensor, "classes d"]]):
    """For each class the sum of its rows, clipped to length ``radius`` and rounded to steps of it (`whole_steps`).

    Attributes:
        num_classes: number of classes, public: each has a row of the sums, even if it is absent.
        radius: length to which rows are clipped, positive and public; ``steps`` of the whole numbers make it.
    """

    theorems = (
        "one record adds one row of whole numbers of length at most {0.steps}, the sensitivity, to one class; discrete "
        "Gaussian noise of {0.adders} honest clients (docs/sums.md, theorem 1); Gaussian mechanism (Balle, Wang 2018, "
        "theorem 8)",
    )

    num_classes: int
    radius: float
    noise_multiplier: float
    steps: int = 256
    adders: int = 1

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        self._check(self.steps)

    @property
    @override
    def sensitivity(self) -> float:
        return float(self.steps)

    @override
    def reach(self, records: int, clients: int) -> float:
        return records * self.steps

    @override
    def __call__(
        self, rows: tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], noise: Noise
    ) -> Int64[Tensor, "classes d"]:
        """The sums ``(num_classes, d)`` of rows ``(n, d)`` with classes ``(n,)``."""
        values, labels = rows
        total = torch.zeros(self.num_classes, values.shape[1], dtype=torch.int64, device=values.device)
        blocks = 1 + values.numel() // _NUMBERS
        for some, of in zip(values.tensor_split(blocks), labels.tensor_split(blocks), strict=True):
            total.index_add_(0, of, whole_steps(clipped(some, self.radius) / self.radius, self.steps).long())
        return self.integers(total, self.sensitivity, noise)


@dataclass(frozen=True, kw_only=True)
class IntegerUpdate(IntegerSum[Float[Tensor, " d"], Int64[Tensor, " d"]]):
    """A client's whole vector, such as a model's change, clipped to length ``radius`` and rounded (`whole_steps`).

    The unit is the client: neighbours differ in all records of one client.
    """

    theorems = (
        "the clipped update is whole numbers of length at most {0.steps} whatever the records, so that other records, "
        "one or all, move it by at most {0.sensitivity:g}, the sensitivity; discrete Gaussian noise of {0.adders} "
        "honest clients (docs/sums.md, theorem 1); Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    )

    radius: float
    noise_multiplier: float
    steps: int = 4096
    adders: int = 1

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        self._check(self.steps)

    @property
    @override
    def sensitivity(self) -> float:
        return 2.0 * self.steps

    @override
    def reach(self, records: int, clients: int) -> float:
        return clients * self.steps

    @override
    def __call__(self, rows: Float[Tensor, " d"], noise: Noise) -> Int64[Tensor, " d"]:
        """The clipped vector ``(d,)`` in whole numbers with noise; one that is not finite counts as 0."""
        exact = whole_steps(clipped(rows[None], self.radius) / self.radius, self.steps)[0].long()
        return self.integers(exact, self.sensitivity, noise)


@dataclass(frozen=True, kw_only=True)
class IntegerHead(IntegerSum[tuple[Float[Tensor, "n p"], Int64[Tensor, " n"]], Int64[Tensor, "classes p+1"]]):
    """A class head rounded to whole steps of a public length, of which many clients' sum is released.

    Attributes:
        head: the head before it is rounded, without noise.
        features: p, the number of features.
        noise_multiplier: standard deviation of the sum's noise divided by ``sensitivity``.
    """

    theorems = (
        "one record moves the head's exact coefficients by at most {0.head.sensitivity:.4g} (strong convexity; "
        "Chaudhuri, Monteleoni, Sarwate 2011, lemma 7), which is {0.steps} whole steps, and their rounding by at most "
        "one step in each of {0.entries} coefficients, so that the sum moves by at most {0.sensitivity:.6g} steps, the "
        "sensitivity; discrete Gaussian noise of {0.adders} honest clients (docs/sums.md, theorem 1); Gaussian "
        "mechanism (Balle, Wang 2018, theorem 8)",
    )

    head: LogisticHead
    features: int
    noise_multiplier: float
    adders: int = 1

    def __post_init__(self) -> None:
        self._check()
        if self.head.noise_multiplier:
            raise ValueError(
                f"the head's own noise multiplier is {self.head.noise_multiplier}; the sum has the noise: make it 0"
            )

    @property
    def entries(self) -> int:
        """The number of coefficients."""
        return self.head.num_classes * (self.features + 1)

    @property
    def steps(self) -> int:
        """Steps in which a record moves the exact head: so many that rounding adds a hundredth to the sensitivity."""
        return math.ceil(100 * math.sqrt(self.entries))

    @property
    def step(self) -> float:
        """The length of a step."""
        return self.head.sensitivity / self.steps

    @property
    @override
    def sensitivity(self) -> float:
        return (self.steps + math.sqrt(self.entries)) * ROUNDING

    @override
    def reach(self, records: int, clients: int) -> float:
        """The largest length of the exact total, in steps.

        At 0 the objective is n log C, so that a minimiser has ``penalty/2 |beta|^2 <= n log C``; the lengths of K
        clients' minimisers add up to at most ``sqrt(2 K N log C / penalty)`` (Cauchy-Schwarz), N records in all. Nor
        are they longer than the sum of all gradients, ``sqrt(2) N``, over the penalty.
        """
        by_value = math.sqrt(2 * clients * records * math.log(self.head.num_classes) / self.head.penalty)
        exact = min(by_value, math.sqrt(2) * records / self.head.penalty)
        inexact = clients * self.head.residual / self.head.penalty
        return ((exact + inexact) / self.step + clients * math.sqrt(self.entries) / 2) * ROUNDING

    @override
    def __call__(
        self, rows: tuple[Float[Tensor, "n p"], Int64[Tensor, " n"]], noise: Noise
    ) -> Int64[Tensor, "classes p+1"]:
        """Coefficients ``(num_classes, p + 1)`` in whole steps, from features ``(n, p)`` and classes ``(n,)``."""
        return self.integers((self.head.exact(rows) / self.step).round().to(torch.int64), self.sensitivity, noise)


def constant_steps(bias: float, steps: int) -> int:
    """The whole number of steps nearest to a row's constant b, from 1 to ``steps - 1``."""
    return min(max(round(bias * steps), 1), steps - 1)


def whole_steps(rows: Float[Tensor, "n d"], steps: int, constant: int = 0) -> Float64[Tensor, "n d"]:
    """Rows of length at most 1 as whole numbers, each with a squared length of at most ``steps^2 - constant^2``.

    They are the nearest whole numbers to ``steps`` times the row, so that the errors of different numbers cancel. A row
    that these make too long is scaled to a step less than the largest length, and less by what rounding adds to it,
    ``d/12`` of its square, in the mean, though not below half of it; if even that is too long when rounded, it is
    rounded toward zero, which lengthens nothing. A row whose numbers are all below half a step becomes 0: there should
    be more steps than the square root of d.
    """
    exact = rows.double() * steps
    most = steps**2 - constant**2
    found = exact.round()
    if (long := found.square().sum(1) > most).any():
        target = max((math.sqrt(most) - 1) ** 2 - rows.shape[1] / 12, most / 4)
        short = exact[long]
        short *= math.sqrt(target) / short.norm(dim=1, keepdim=True)
        nearest = short.round()
        still = nearest.square().sum(1) > most
        nearest[still] = short[still].trunc()
        found[long] = nearest
    return found

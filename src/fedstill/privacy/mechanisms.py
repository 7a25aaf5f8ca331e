"""Privacy mechanisms; ``docs/proofs.md`` has the proof of each.

Formal guarantees:

* A mechanism clips its input itself and computes its noise and its event from the same numbers, so a caller can't
  break its claim.
* Neighbouring data sets differ by one record that is added or removed, unless the mechanism's unit is "label".
* A noise multiplier is the noise's standard deviation divided by the sensitivity; 0 adds no noise and has no guarantee.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy.ledger import Charge
from fedstill.privacy.releases import Event, Gaussian, Unbounded, Unit

Rows = TypeVar("Rows", contravariant=True)
Value = TypeVar("Value", covariant=True)


NO_NOISE = "the release carries no noise"


class Mechanism(ABC, Generic[Rows, Value]):
    """A randomised function of records; ``unit`` is the unit that its guarantee protects."""

    unit: ClassVar[Unit] = "record"
    theorems: ClassVar[tuple[str, ...]]
    """Sentences on the sensitivity and the theorem that the cost rests on, with its numbers as ``{0.radius:g}``."""
    reasons: ClassVar[tuple[str, ...]] = ()
    """Reasons that an `Unbounded` cost may have."""

    @property
    @abstractmethod
    def event(self) -> Event:
        """The cost of one release."""

    @property
    def theorem(self) -> str:
        """The sentence on this release."""
        return self.theorems[0].format(self)

    @abstractmethod
    def __call__(self, rows: Rows, noise: Noise) -> Value:
        """The release: bounds every record's influence and adds noise."""


@dataclass(frozen=True, eq=False)
class UnprotectedLabels(Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]]):
    """Labels without a guarantee.

    Attributes:
        reason: reason why there is no guarantee.
        inner: mechanism that changes the labels; None leaves them unchanged.
    """

    unit: ClassVar[Unit] = "label"
    theorems = ("none",)
    reasons = (
        "labels are not randomised",
        "its images were made with the true labels, so that randomising their tags hides nothing",
    )
    reason: str
    inner: Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]] | None = None

    @property
    @override
    def event(self) -> Event:
        return Unbounded(reason=self.reason)

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Int64[Tensor, " n"]:
        """The labels, through ``inner`` if there is one."""
        return rows if self.inner is None else self.inner(rows, noise)


def gaussian_event(noise_multiplier: float, sampling: float = 1.0, count: int = 1) -> Event:
    """The cost of ``count`` releases with Gaussian noise on Poisson samples; unbounded without noise."""
    if noise_multiplier > 0:
        return Gaussian(noise_multiplier=noise_multiplier, sampling=sampling, count=count)
    return Unbounded(reason=NO_NOISE)


def check_noise(noise_multiplier: float) -> None:
    """Raise ValueError unless ``noise_multiplier`` is finite and at least 0."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier is {noise_multiplier}; it must be a finite number from 0")


LEAST, MOST = 1e-20, 1e20
"""Bounds of public lengths, rates and penalties: within them, no product of a mechanism leaves the range of normal
floating-point numbers, so that relative rounding errors stay as small as `ROUNDING` assumes."""


def check_positive(name: str, value: float, least: float = LEAST) -> None:
    """Raise ValueError unless ``value`` lies between ``least`` and `MOST`."""
    if not least <= value <= MOST:
        raise ValueError(f"{name} is {value}; it must be a positive number, from {least:g} to {MOST:g}")


class GaussianMechanism(Mechanism[Rows, Value]):
    """A mechanism with Gaussian noise, whose standard deviation is ``noise_multiplier`` times the sensitivity."""

    noise_multiplier: float

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Largest Euclidean distance between the exact values on neighbouring data sets."""

    @property
    @override
    def event(self) -> Event:
        return gaussian_event(self.noise_multiplier)

    def noised(self, exact: Tensor, noise: Noise) -> Tensor:
        """The exact value plus the noise that the event charges for."""
        return noise.added(exact, self.noise_multiplier * self.sensitivity)


def clipped(rows: Float[Tensor, "n d"], radius: float) -> Float64[Tensor, "n d"]:
    """Rows in float64; longer ones are scaled down to length ``radius``, up to rounding, which `ROUNDING` covers.

    A row that is not finite, or longer than `LONGEST`, becomes 0, so that it neither spoils a release nor shows in it:
    the quotient of radius and length is a normal number, so that its rounding can't lengthen a row.

    Raises:
        ValueError: ``radius`` is out of its bounds; for subnormal ones, rounding would double a row's length.
    """
    check_positive("radius", radius)
    wide = rows.to(torch.float64)
    lengths = wide.norm(dim=1, keepdim=True)
    short: Tensor = wide * (radius / lengths.clamp_min(radius))
    short[~(lengths[:, 0] <= LONGEST)] = 0.0  # these rows alone, so that the time does not tell whether there is one
    return short


LONGEST = 1e200
"""Largest length of a row that is scaled down."""
ROUNDING = 1 + 2.0**-20
"""Factor of sensitivities, so that rounding in float64 can't exceed them: that of a sum of n rows is at most
``n^2 2^-52`` of one row, so up to 2^16 records whatever they are. For more, roundings that all go the same way would
exceed it: they are in the order of ``n 2^-52`` unless records are made for it."""


@dataclass(frozen=True)
class NoisySum(GaussianMechanism[Float[Tensor, "n d"], Float64[Tensor, " d"]]):
    """The sum of rows clipped to length ``radius`` (positive, public), with Gaussian noise."""

    theorems = (
        "one record adds one row of length at most {0.radius:g}, the sensitivity; Gaussian mechanism (Balle, Wang "
        "2018, theorem 8)",
    )

    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """The largest length of one row."""
        return self.radius * ROUNDING

    def __call__(self, rows: Float[Tensor, "n d"], noise: Noise) -> Float64[Tensor, " d"]:
        """The sum ``(d,)`` of rows ``(n, d)``."""
        return self.noised(clipped(rows, self.radius).sum(0), noise)


@dataclass(frozen=True)
class ClassSums(GaussianMechanism[tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], Float64[Tensor, "classes d"]]):
    """For each class the sum of its rows clipped to length ``radius`` (positive, public), with Gaussian noise.

    The class list is public: the release has a row for each of ``num_classes`` classes, even for absent ones.
    """

    theorems = (
        "one record adds one row of length at most {0.radius:g} to one class, the sensitivity; Gaussian mechanism "
        "(Balle, Wang 2018, theorem 8)",
    )

    num_classes: int
    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """The largest length of one row, which enters one class."""
        return self.radius * ROUNDING

    def __call__(
        self, rows: tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], noise: Noise
    ) -> Float64[Tensor, "classes d"]:
        """The sums ``(num_classes, d)`` of rows ``(n, d)`` with classes ``(n,)``."""
        values, labels = rows
        total = torch.zeros(self.num_classes, values.shape[1], dtype=torch.float64, device=values.device)
        total.index_add_(0, labels, clipped(values, self.radius))
        return self.noised(total, noise)


@dataclass(frozen=True)
class ClippedUpdate(GaussianMechanism[Float[Tensor, " d"], Float64[Tensor, " d"]]):
    """A vector that depends on all records, such as a model update, clipped to length ``radius``, with Gaussian noise.

    ``radius`` is the paper's S, positive and public.
    """

    theorems = (
        "the clipped update has length at most {0.radius:g} whatever the records, so that other records, one or all, "
        "move it by at most {0.sensitivity:g}, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    )

    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """2S: the vector lies in a ball of radius S whatever the records are, even if all of them change."""
        return 2 * self.radius * ROUNDING

    def __call__(self, rows: Float[Tensor, " d"], noise: Noise) -> Float64[Tensor, " d"]:
        """The clipped vector ``(d,)`` with noise; a vector that is not finite counts as 0."""
        return self.noised(clipped(rows[None], self.radius)[0], noise)


@dataclass(frozen=True)
class Histogram(GaussianMechanism[Int64[Tensor, " n"], Float64[Tensor, " classes"]]):
    """The number of records of each class, with Gaussian noise; a class that is not in the list counts nowhere.

    Otherwise such a record would show without noise: in the length of the release, or in its failure.
    """

    theorems = ("one record changes one count by 1, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)",)

    num_classes: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)

    @property
    def sensitivity(self) -> float:
        """One count changes by 1."""
        return 1.0

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Float64[Tensor, " classes"]:
        """Counts ``(num_classes,)`` of classes ``(n,)``; noise may make them fractional or negative."""
        within = rows[(rows >= 0) & (rows < self.num_classes)]
        return self.noised(torch.bincount(within, minlength=self.num_classes).to(torch.float64), noise)


UNKNOWN = "UnknownMechanism"
NO_THEOREM = "no theorem is known here for this mechanism; its cost is the client's own word"
NO_REASON = "the client says that no epsilon bounds it"
"""Words in place of those of a client."""
_NUMBER = r"(?:-?\d{1,12}(?:\.\d{1,20})?(?:e[-+]\d{1,3})?|inf|nan)"


def own_words(entry: Charge) -> Charge:
    """A release as a client lists it, with the words of the mechanism's class here in place of the client's own.

    These words stand in guarantees and reports. Numbers in a sentence stay the client's. A mechanism's name stays if
    this process has imported a class of that name, as everybody has who runs the method that releases by it.
    """
    kinds = [kind for kind in _below(Mechanism) if kind.__name__ == entry.mechanism]
    known = [words for kind in kinds for words in getattr(kind, "theorems", ())]
    reasons = {NO_NOISE}.union(*(getattr(kind, "reasons", ()) for kind in kinds))
    event = entry.event
    if isinstance(event, Unbounded) and event.reason not in reasons:
        event = Unbounded(reason=NO_REASON)
    words = {
        "mechanism": entry.mechanism if kinds else UNKNOWN,
        "theorem": entry.theorem if any(_pattern(one).fullmatch(entry.theorem) for one in known) else NO_THEOREM,
        "event": event,
    }
    return entry.model_copy(update=words)


def _below(kind: type) -> set[type]:
    return {kind}.union(*map(_below, kind.__subclasses__()))


@cache
def _pattern(sentence: str) -> re.Pattern[str]:
    """The sentence with any number in place of each of its fields."""
    parts = Formatter().parse(sentence)
    return re.compile("".join(re.escape(text) + _NUMBER * (field is not None) for text, field, *_ in parts), re.ASCII)

"""Sums of a table's columns and of their squares, and counts of classes: what a scale is made of.

Columns have a public range, mapped to [-1, 1]. A value x is clipped to it and rounded to the nearest of L whole steps,
q; its square goes as ``t = 2 q^2 / L - L``, rounded, which lies in [-L, L] like q and has half the largest value of
``2 q^2 / L``, whose sum the number of records gives back. Rounding to the nearest passes no bound that is a whole
number, so that no value grows.

`Scale` is post-processing: mean and standard deviation of each column, never below what the noise lets one tell.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy import lattice
from fedstill.privacy.integer_sums import IntegerSum

WEIGHT = math.sqrt(0.5)
"""Factor of the squares in a record's length: a larger one gives them less noise, and values more."""
OF_COUNTS = 1 / 8
"""Squared factor of the counts, for each column: every mean needs the number of records."""
_BATCH = 10_000
"""Records that are rounded at a time."""
_CLEAR = 4.0
"""Standard deviations of its noise that the number of records must have to be used."""
_DIGITS = 6
"""Significant digits of a scale, which the description of a run has as text."""


class ColumnTotals(NamedTuple):
    """Sums over records, int64: of values q and squares t, ``(d,)``, and for each class L a record, ``(C,)``."""

    values: Int64[Tensor, " d"]
    squares: Int64[Tensor, " d"]
    counts: Int64[Tensor, " classes"]


@dataclass(frozen=True, kw_only=True)
class ColumnSums(IntegerSum[tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], ColumnTotals]):
    """`ColumnTotals` with discrete Gaussian noise, of which each client adds a share.

    Theorem: one record adds ``(q, t)`` of each column, whole numbers of [-L, L], and L to one class, which moves
    ``v = (q, w t, c counts)`` by at most ``L sqrt(d (1 + w^2) + c^2)``, and by exactly that if all its values are at an
    end of their range. Noise with the parameters of ``N(0, s^2)`` on q, ``N(0, (s / w)^2)`` on t and
    ``N(0, (s / c)^2)`` on counts costs no more than ``N(0, s^2)`` on v (`lattice`). With ``c^2 = 1 + d / 8`` a count's
    noise is below four noise multipliers of records, however many columns there are.

    Attributes:
        num_classes: number of classes, public; 1 counts records.
        columns: number d of columns, public.
        steps: L.
    """

    theorems = (
        "one record adds, in each of {0.columns} columns, a whole number of at most {0.steps} and one for its square, "
        "and {0.steps} to one class, so that the sums, squares times {0.weight:.4g} and counts times "
        "{0.weight_of_counts:.4g}, move by at most {0.sensitivity:.6g}, the sensitivity; discrete Gaussian noise of "
        "{0.adders} honest clients (docs/sums.md, theorem 1); Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    )

    num_classes: int
    columns: int
    noise_multiplier: float
    steps: int = 4096
    adders: int = 1

    def __post_init__(self) -> None:
        if min(self.num_classes, self.columns) < 1:
            raise ValueError(f"num_classes is {self.num_classes} and columns is {self.columns}; there is one at least")
        self._check(self.steps)

    @property
    def weight(self) -> float:
        """The factor w of squares."""
        return WEIGHT

    @property
    def weight_of_counts(self) -> float:
        """The factor c of counts."""
        return math.sqrt(1 + OF_COUNTS * self.columns)

    @property
    @override
    def sensitivity(self) -> float:
        return self.steps * math.sqrt(self.columns * (1 + self.weight**2) + self.weight_of_counts**2)

    @property
    @override
    def scales(self) -> tuple[float, float, float]:
        whole = self.sensitivity
        return whole, whole / self.weight, whole / self.weight_of_counts

    @override
    def reach(self, records: int, clients: int) -> float:
        return records * self.steps

    @override
    def __call__(self, rows: tuple[Float[Tensor, "n d"], Int64[Tensor, " n"]], noise: Noise) -> ColumnTotals:
        """The sums of rows ``(n, d)`` in [-1, 1], to which they are clipped, with classes ``(n,)``; NaN counts as 0."""
        of_values, of_squares, of_counts = self.scales
        values, labels = rows
        exact = [torch.zeros(values.shape[1], dtype=torch.int64, device=values.device) for _ in range(2)]
        for start in range(0, len(values), _BATCH):
            some = values[start : start + _BATCH]
            whole = (some.to(torch.float64).nan_to_num(0.0).clamp(-1, 1) * self.steps).round().to(torch.int64)
            exact[0] += whole.sum(0)
            exact[1] += ((4 * whole * whole + self.steps) // (2 * self.steps) - self.steps).sum(0)
        listed = labels[(labels >= 0) & (labels < self.num_classes)]  # others would show in the length
        counts = torch.bincount(listed, minlength=self.num_classes) * self.steps
        return ColumnTotals(
            self.integers(exact[0], of_values, noise),
            self.integers(exact[1], of_squares, noise),
            self.integers(counts, of_counts, noise),
        )

    def spreads(self, clients: int) -> tuple[float, float, float]:
        """Standard deviations of the noise of all ``clients`` in a total's values, squares and counts."""
        if not self.noise_multiplier:
            return 0.0, 0.0, 0.0
        shares = (lattice.share(self.noise_multiplier * scale, self.adders) for scale in self.scales)
        of_values, of_squares, of_counts = (math.sqrt(clients * share) for share in shares)
        return of_values, of_squares, of_counts


class Scale(NamedTuple):
    """The scale of d columns, from `ColumnTotals`.

    Attributes:
        mean: mean of each column, in [-1, 1].
        std: standard deviation of each column, from a step to 1; for one that varies less than the noise tells, that of
            the noise.
        counts: records of each class, which noise may make negative.
        clear: whether there are more records than noise in their number; if not, the mean is 0 and the deviation 1,
            which leaves the public range as it is.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: tuple[int, ...]
    clear: bool


def scale_of(mechanism: ColumnSums, total: ColumnTotals, clients: int) -> Scale:
    """The scale that the total of ``clients`` tells, by public numbers and the total alone.

    With the standard deviations e of the noise of a mean m, f of that of a mean square and r of the relative one of the
    number of records, the noise of the variance ``square - m^2`` is, in first order and with that of m^2 itself, below
    ``sqrt(f^2 + (2 m e)^2 + 2 e^4 + ((square - 1/2 - 2 m^2) r)^2)``. A variance below it is set to it, so that noise is
    never scaled up to the size of a column that varies.
    """
    of_values, of_squares, of_counts = mechanism.spreads(clients)
    counts = tuple(round(count / mechanism.steps) for count in total.counts.tolist())
    number, columns = int(total.counts.sum()) / mechanism.steps, len(total.values)
    of_number = of_counts / mechanism.steps * math.sqrt(len(counts))
    if number <= max(_CLEAR * of_number, 0):
        return Scale((0.0,) * columns, (1.0,) * columns, counts, clear=False)
    unit = number * mechanism.steps
    mean: Float64[Tensor, " d"] = (total.values.double() / unit).clamp(-1, 1)
    square = ((total.squares.double() / unit + 1) / 2).clamp(0, 1)
    e, f, r = of_values / unit, of_squares / (2 * unit), of_number / number
    least = (f**2 + (2 * mean * e) ** 2 + 2 * e**4 + ((square - 0.5 - 2 * mean**2) * r) ** 2).sqrt()
    variance = torch.maximum(square - (mean**2 - e**2).clamp_min(0), least).clamp(mechanism.steps**-2, 1)
    rounded = ([float(f"{value:.{_DIGITS}g}") for value in each.tolist()] for each in (mean, variance.sqrt()))
    means, stds = map(tuple, rounded)
    return Scale(means, stds, counts, clear=True)

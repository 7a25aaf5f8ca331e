"""Randomised response for labels: among all classes, the k likeliest (RRTop-k), or the best k (RRWithPrior).

Ghazi, Golowich, Kumar, Manurangsi, Zhang, "Deep learning with label differential privacy", NeurIPS 2021
(arXiv:2102.06062), algorithms 1 (RRTop-k) and 2 (RRWithPrior).

Differs from the paper:

* ties are broken without looking at a label: of equally likely classes the smaller index comes first, of equally good
  k the largest wins (equal up to `_TIE`, so that rounding does not decide);
* ``e^-epsilon`` is never below `_TINY`, so every label that may stay may also change.

Differs from the authors' code: ``w_k`` has the paper's denominator. Theirs counts k from 0, which for a uniform prior
and small epsilon gives the same output for every label.

Formal guarantees:

* The release is epsilon-DP for neighbours that differ by one record's label.
* It holds if the prior depends on public features and earlier releases of other records only, not on the label.

``docs/proofs.md`` has the proof beside those of the other mechanisms.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.releases import Pure, Unit

_TIE = 1e-12
_TINY = 1e-300

_ONCE = "one record's label is replaced by another; each label is randomised once, independently of all others"
_SOURCE = "Ghazi et al. 2021, arXiv:2102.06062"
_PRIOR = f"and a prior that no label of these records entered, which is {{0.epsilon:g}}-DP ({_SOURCE}"


def top_k(priors: Float[Tensor, "n classes"], epsilon: float) -> Int64[Tensor, " n"]:
    """The best k for each prior: ``argmax_k w_k`` (algorithm 2, step 2), in ``1 .. classes``.

    ``w_k = e^epsilon / (e^epsilon + k - 1) * (sum of the k largest priors)`` is the probability that RRTop-k keeps a
    label drawn from the prior; no epsilon-DP randomiser keeps it more often than the best k does (theorem 3).

    Args:
        priors: entries of at least 0; each row is divided by its sum, which must be positive.
        epsilon: above 0.

    Raises:
        ValueError: an argument is out of its range.
    """
    sums = _normalised(priors).sort(dim=1, descending=True).values.cumsum(1)
    sizes = torch.arange(1, sums.shape[1] + 1, device=sums.device)
    w = sums / (1 + _odds(sizes, epsilon))
    return torch.where(w >= w.amax(1, keepdim=True) * (1 - _TIE), sizes, 0).amax(1)


def probabilities(
    priors: Float[Tensor, "n classes"], epsilon: float, k: Int64[Tensor, " n"] | int | None = None
) -> Float64[Tensor, "n input output"]:
    """The output distribution of RRTop-k for every true label (algorithm 1), exact up to float64's rounding.

    ``k`` is in ``1 .. classes``, one for all rows or one for each; None for each row's `top_k`. Other arguments and
    errors are those of `top_k`.
    """
    size = _sizes(priors, epsilon, k)[:, None, None]
    rank = _order(priors).argsort(1)
    inside = rank < size[:, 0]
    keep = 1 / (1 + _odds(size, epsilon))
    same = torch.eye(priors.shape[1], dtype=torch.bool, device=priors.device)
    known = torch.where(same, keep, keep * _inverse(epsilon))
    return torch.where(inside[:, None, :], torch.where(inside[:, :, None], known, 1 / size.to(known)), 0.0)


@dataclass(frozen=True)
class RandomizedResponse(Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]]):
    """A label stays with probability ``e^epsilon / (e^epsilon + num_classes - 1)``, else becomes any other, evenly."""

    theorems = (
        f"{_ONCE}, by {{0.num_classes}}-ary randomised response, which is {{0.epsilon:g}}-DP ({_SOURCE}, algorithm 1 "
        "and lemma 1 with k = K; parallel composition over records)",
    )

    unit: ClassVar[Unit] = "label"
    num_classes: int
    epsilon: float

    def __post_init__(self) -> None:
        _inverse(self.epsilon)
        if self.num_classes < 1:
            raise ValueError(f"num_classes is {self.num_classes}; it must be at least 1")

    @property
    @override
    def event(self) -> Pure:
        return Pure(epsilon=self.epsilon)

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Int64[Tensor, " n"]:
        """The randomised labels; ValueError for a label outside ``0 .. num_classes - 1``."""
        _check_labels(rows, (rows.numel(), self.num_classes))
        order = torch.arange(self.num_classes, device=rows.device).expand(len(rows), -1)
        return _drawn(rows, order, torch.full_like(rows, self.num_classes), self.epsilon, noise)


@dataclass(frozen=True, eq=False)
class RRWithPrior(Mechanism[Int64[Tensor, " n"], Int64[Tensor, " n"]]):
    """Randomised response among each record's k likeliest classes; any other label becomes one of them, uniformly.

    Attributes:
        epsilon: above 0.
        prior: ``(n, classes)``, a row for each record, as in `top_k`. Must not depend on the labels.
        k: in ``1 .. classes``, the same for all records (RRTop-k); None for each record's `top_k` (RRWithPrior). With 1
            the release is the prior's likeliest class and does not depend on the label.
    """

    theorems = (
        f"{_ONCE}, by RRWithPrior {_PRIOR}, algorithms 1-2, lemma 1 and corollary 2; parallel composition over "
        "records)",
        f"{_ONCE}, by RRTop-k with k = {{0.k}} {_PRIOR}, algorithm 1 and lemma 1; parallel composition over records)",
    )

    unit: ClassVar[Unit] = "label"
    epsilon: float
    prior: Float[Tensor, "n classes"] = field(repr=False)
    k: int | None = None

    def __post_init__(self) -> None:
        _sizes(self.prior, self.epsilon, self.k)

    @property
    @override
    def event(self) -> Pure:
        return Pure(epsilon=self.epsilon)

    @property
    @override
    def theorem(self) -> str:
        return self.theorems[self.k is not None].format(self)

    def __call__(self, rows: Int64[Tensor, " n"], noise: Noise) -> Int64[Tensor, " n"]:
        """The randomised labels; ValueError unless there is one in ``0 .. classes - 1`` for each row of the prior."""
        _check_labels(rows, self.prior.shape)
        return _drawn(rows, _order(self.prior), _sizes(self.prior, self.epsilon, self.k), self.epsilon, noise)


def _drawn(
    labels: Int64[Tensor, " n"],
    order: Int64[Tensor, "n classes"],
    k: Int64[Tensor, " n"],
    epsilon: float,
    noise: Noise,
) -> Int64[Tensor, " n"]:
    """RRTop-k with the first ``k`` classes of ``order``; two draws for each record, whatever its label.

    The first draw decides whether the label changes, the second picks uniformly among the classes it can change to. An
    output that is impossible for one label is impossible for all: outputs come from the first k ranks. A draw u on the
    53-bit grid is below the probability of a change at least as often as it should be, so rounding can only make the
    release more private.
    """
    first, second = noise.uniform((2, len(labels))).to(labels.device)
    rank = (order == labels[:, None]).to(torch.int64).argmax(1)  # every class is in its row once
    inside = rank < k
    odds = _odds(k, epsilon)
    changed = ~inside | (first < odds / (1 + odds))
    others = torch.where(inside, k - 1, k)
    pick = torch.minimum((second * others).to(torch.int64), (others - 1).clamp_min(0))
    pick = pick + (inside & (pick >= rank))  # step over the label itself
    return order.gather(1, torch.where(changed, pick, rank)[:, None])[:, 0]


def _order(priors: Float[Tensor, "n classes"]) -> Int64[Tensor, "n classes"]:
    """Classes from the largest prior to the smallest; among equal ones, the smaller index first."""
    return _normalised(priors).sort(dim=1, descending=True, stable=True).indices


def _normalised(priors: Float[Tensor, "n classes"]) -> Float64[Tensor, "n classes"]:
    """Rows with sum 1 in float64."""
    if priors.ndim != 2 or priors.shape[1] == 0:
        raise ValueError(f"priors have shape {tuple(priors.shape)}; they must be (records, classes), with a class")
    wide = priors.detach().to(torch.float64)
    largest = wide.amax(1, keepdim=True)
    wrong = ~(torch.isfinite(wide) & (wide >= 0)).all(1) | (largest[:, 0] == 0)
    if wrong.any():
        record = int(wrong.to(torch.int64).argmax())
        raise ValueError(
            f"the prior of record {record} has entries from {float(wide[record].amin())} to "
            f"{float(largest[record])}; they must be finite, from 0 and not all 0, as softmax gives them"
        )
    wide = wide / largest  # sums of huge or tiny entries stay in range
    return wide / wide.sum(1, keepdim=True)


def _sizes(priors: Float[Tensor, "n classes"], epsilon: float, k: Int64[Tensor, " n"] | int | None) -> Tensor:
    """``k`` for each row, within ``1 .. classes``."""
    best = top_k(priors, epsilon)
    if k is None:
        return best
    given = torch.as_tensor(k, device=best.device)
    if given.dtype != torch.int64 or given.shape not in (best.shape, ()):
        raise ValueError(f"k is {k} and the priors have {len(best)} rows; k must be one integer, or one for each row")
    wrong = (given < 1) | (given > priors.shape[1])
    if wrong.any():
        value = int(given[wrong].flatten()[0])
        raise ValueError(f"k is {value}; it must lie between 1 and the number of classes, {priors.shape[1]}")
    return given.expand_as(best)


def _odds(k: Int64[Tensor, "*shape"], epsilon: float) -> Float64[Tensor, "*shape"]:
    """The odds that a label among the k likeliest classes changes: ``(k - 1) e^-epsilon``."""
    return (k - 1).to(torch.float64) * _inverse(epsilon)


def _inverse(epsilon: float) -> float:
    """``e^-epsilon``, at least `_TINY`."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon is {epsilon}; it must be a finite number above 0")
    return max(math.exp(-epsilon), _TINY)


def _check_labels(labels: Int64[Tensor, " n"], prior: tuple[int, ...]) -> None:
    """Raise ValueError unless ``labels`` are one class for each row of a prior with shape ``prior``."""
    records, classes = prior
    if labels.shape != (records,):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}; they must have shape ({records},): one label for each record"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}; they must be torch.int64")
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        record = int(wrong.to(torch.int64).argmax())
        raise ValueError(
            f"label {int(labels[record])} of record {record} is outside 0..{classes - 1}; count classes from 0 and "
            "give every class a place in the prior"
        )

"""The likelihood-ratio attack on membership: tell whether a model was trained on a record.

Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership inference attacks from first principles", IEEE S&P 2022
(arXiv:2112.03570), Algorithm 1 (online) and its offline form.

Differs from the paper:

* the means of the Gaussians are medians, as in the authors' code;
* with few shadow models one standard deviation stands for all records, pooled over their deviations from their own
  means; of members and of others apart, where the authors' code takes that of members for both;
* scores of a record's views are averaged, not fitted together.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.stats import beta
from torch import Tensor

PER_RECORD = 64
"""Fewest shadow models with which every record has standard deviations of its own."""
_LEAST = 1e-6
"""Lower bound of a standard deviation."""


def phi(logits: Float[Tensor, "*views n classes"], labels: Int64[Tensor, " n"]) -> Float64[Tensor, "*views n"]:
    """``ln p_y - ln(1 - p_y)`` (section VI.A), from logits as ``z_y - ln sum_{c != y} e^{z_c}``, which never overflows.

    Average it over views of the records: ``phi(...).mean(0)``.
    """
    z = logits.double()
    y = labels.expand(z.shape[:-1])[..., None]
    return z.gather(-1, y)[..., 0] - z.scatter(-1, y, -math.inf).logsumexp(-1)


class Gaussian(NamedTuple):
    """Scores of each record in one kind of world; both ``(n,)``."""

    mean: Float64[Tensor, " n"]
    std: Float64[Tensor, " n"]

    def log_density(self, score: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """The log-density, without the constant ``-ln(2 pi) / 2``."""
        return -(((score - self.mean) / self.std) ** 2) / 2 - self.std.log()


class Fitted(NamedTuple):
    """Scores of records in worlds with them and without them."""

    present: Gaussian
    absent: Gaussian


def fit(scores: Float64[Tensor, "worlds n"], member: Bool[Tensor, "worlds n"]) -> Fitted:
    """Gaussians from shadow models.

    Args:
        scores: of each record under each shadow model.
        member: whether the model had the record; each record in half of the models.

    Raises:
        ValueError: a record is not in just half of the models, or these are fewer than 4.
    """
    worlds = len(scores)
    if worlds < 4 or not (2 * member.sum(0) == worlds).all():
        raise ValueError(f"{worlds} shadow models; there must be 4 or more, with each record in just half of them")
    return Fitted(_gaussian(_where(scores, member)), _gaussian(_where(scores, ~member)))


def _where(scores: Tensor, chosen: Tensor) -> Float64[Tensor, "half n"]:
    return scores.T[chosen.T].view(scores.shape[1], -1).T


def _gaussian(scores: Float64[Tensor, "half n"]) -> Gaussian:
    half = len(scores)
    ordered, variance = scores.sort(0).values, scores.var(0)
    if 2 * half < PER_RECORD:
        variance = variance.mean().expand_as(variance)
    return Gaussian((ordered[(half - 1) // 2] + ordered[half // 2]) / 2, variance.sqrt().clamp_min(_LEAST))


def online(score: Float64[Tensor, " n"], fitted: Fitted) -> Float64[Tensor, " n"]:
    """The logarithm of Lambda in Algorithm 1: larger for records that look like members."""
    return fitted.present.log_density(score) - fitted.absent.log_density(score)


def offline(score: Float64[Tensor, " n"], absent: Gaussian) -> Float64[Tensor, " n"]:
    """``-ln P[N(mu_out, sigma_out^2) > score]``: as ``online``, but needs no model with the record (section VI.B)."""
    result: Tensor = -torch.special.log_ndtr((absent.mean - score) / absent.std)
    return result


# --- how good an attack is


def roc(scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Rates of false and of true positives at every threshold, ``(t,)`` each, from (0, 0) to (1, 1); ties as one step.

    Raises:
        ValueError: there are no members, or nobody else.
    """
    false, true = _counts(scores, member)
    return false.double() / false[-1], true.double() / true[-1]


def _counts(scores: Tensor, member: Tensor) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " t"]]:
    members, n = int(member.sum()), len(member)
    if not 0 < members < n:
        raise ValueError(f"{members} of {n} records are members; there must be members and others")
    order = scores.argsort(descending=True, stable=True)
    last = torch.cat([scores[order].diff() != 0, torch.ones(1, dtype=torch.bool)])  # of equal ones
    true = member[order].cumsum(0)
    false = torch.arange(1, n + 1) - true
    start = torch.zeros(1, dtype=torch.int64)
    return torch.cat([start, false[last]]), torch.cat([start, true[last]])


def auc(scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"]) -> float:
    """Area under the curve of `roc`: how often a member scores higher than another record, ties counting half."""
    fpr, tpr = roc(scores, member)
    return float(torch.trapezoid(tpr, fpr))


class Rate(NamedTuple):
    """Rate of true positives at a given rate of false ones.

    Attributes:
        fpr: the rate asked for; the threshold is the lowest that keeps it on these records.
        tpr: share of the members found.
        low: of the interval of ``tpr``.
        high: likewise.
        fpr_high: the largest rate of false positives that this threshold may have in truth.
    """

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


def tpr_at(fpr: float, scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"], *, confidence: float = 0.95) -> Rate:
    """True positives among members where at most ``fpr`` of the others are taken for members.

    Intervals are those of Clopper and Pearson, as if records were independent; ``low`` and ``fpr_high`` hold together
    with ``confidence``.
    """
    false, true = _counts(scores, member)
    at = int((false <= fpr * int(false[-1]) + 1e-9).sum()) - 1
    found, members, accused, others = (int(count) for count in (true[at], true[-1], false[at], false[-1]))
    low, high = interval(found, members, confidence)
    return Rate(fpr, found / members, low, high, interval(accused, others, confidence)[1])


def interval(successes: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) for a probability; numbers need not be whole."""
    rest = (1 - confidence) / 2
    low = float(beta.ppf(rest, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - rest, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def bound(fpr: float, epsilon: float, delta: float) -> float:
    """Largest rate of true positives that (epsilon, delta)-DP allows any test at ``fpr``.

    ``min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR))`` and at most 1: Kairouz, Oh, Viswanath 2015
    (arXiv:1311.0776), theorem 2.1. The region below is convex, so it holds for means over records too.
    """
    factor = math.exp(min(epsilon, 700.0))
    return min(factor * fpr + delta, 1 - (1 - delta - fpr) / factor, 1.0)

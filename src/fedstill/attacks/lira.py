"""The likelihood-ratio attack: infer whether a model was trained on a record.

Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership inference attacks from first principles", IEEE S&P 2022
(arXiv:2112.03570), Algorithm 1 (online) and its offline form.

Differs from the paper:

* the means of the Gaussians are medians, as in the authors' code;
* with few shadow models, members share one standard deviation and non-members another, where the authors' code uses
  the members' for both;
* the scores of a record's views are averaged, not modelled jointly.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.special import expit, logit
from scipy.stats import beta, rankdata
from scipy.stats import t as student
from torch import Tensor

PER_RECORD = 64
"""Minimum number of shadow models for one standard deviation per record."""
_LEAST = 1e-6
"""Lower bound of a standard deviation."""


def phi(logits: Float[Tensor, "*views n classes"], labels: Int64[Tensor, " n"]) -> Float64[Tensor, "*views n"]:
    """``ln p_y - ln(1 - p_y)`` (section VI.A), computed as ``z_y - ln sum_{c != y} e^{z_c}``, which never overflows."""
    z = logits.double()
    y = labels.expand(z.shape[:-1])[..., None]
    return z.gather(-1, y)[..., 0] - z.scatter(-1, y, -math.inf).logsumexp(-1)


class Normal(NamedTuple):
    """Distribution of each record's score in models with it, or in models without it."""

    mean: Float64[Tensor, " n"]
    std: Float64[Tensor, " n"]

    def log_density(self, score: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """The log-density, without the constant ``-ln(2 pi) / 2``."""
        return -(((score - self.mean) / self.std) ** 2) / 2 - self.std.log()


class Fitted(NamedTuple):
    """Score distributions in models trained with each record, and without it."""

    present: Normal
    absent: Normal


def fit(scores: Float64[Tensor, "worlds n"], member: Bool[Tensor, "worlds n"]) -> Fitted:
    """Fit Gaussians to the scores under shadow models.

    Args:
        scores: score of each record under each shadow model.
        member: whether the model was trained on the record; true in half of the models for each record.

    Raises:
        ValueError: there are fewer than 4 models, or a record is not in exactly half of them.
    """
    worlds = len(scores)
    if worlds < 4 or not (2 * member.sum(0) == worlds).all():
        raise ValueError(f"{worlds} shadow models; there must be 4 or more, with each record in exactly half of them")
    present, absent = (scores.T[mask.T].view(scores.shape[1], -1).T for mask in (member, ~member))
    return Fitted(_gaussian(present), _gaussian(absent))


def _gaussian(scores: Float64[Tensor, "half n"]) -> Normal:
    half = len(scores)
    ordered, variance = scores.sort(0).values, scores.var(0)
    if 2 * half < PER_RECORD:
        variance = variance.mean().expand_as(variance)
    return Normal((ordered[(half - 1) // 2] + ordered[half // 2]) / 2, variance.sqrt().clamp_min(_LEAST))


def online(score: Float64[Tensor, " n"], fitted: Fitted) -> Float64[Tensor, " n"]:
    """The logarithm of Lambda in Algorithm 1; larger for likely members."""
    return fitted.present.log_density(score) - fitted.absent.log_density(score)


def offline(score: Float64[Tensor, " n"], absent: Normal) -> Float64[Tensor, " n"]:
    """``-ln P[N(mu_out, sigma_out^2) > score]``: `online` without models trained on the record (section VI.B)."""
    result: Tensor = -torch.special.log_ndtr((absent.mean - score) / absent.std)
    return result


# --- accuracy of an attack


def roc(scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """False and true positive rates at every threshold, ``(t,)`` each, from (0, 0) to (1, 1).

    Raises:
        ValueError: all records are members, or none is, or a score is not a number.
    """
    false, true = _counts(scores, member)
    return false.double() / false[-1], true.double() / true[-1]


def _counts(scores: Tensor, member: Tensor) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " t"]]:
    _check(scores, member)
    n = len(member)
    order = scores.argsort(descending=True, stable=True)
    last = torch.cat([scores[order][1:] != scores[order][:-1], torch.ones(1, dtype=torch.bool)])  # of equal scores
    true = member[order].cumsum(0)
    false = torch.arange(1, n + 1) - true
    start = torch.zeros(1, dtype=torch.int64)
    return torch.cat([start, false[last]]), torch.cat([start, true[last]])


def _check(scores: Tensor, member: Tensor) -> None:
    members, n = int(member.sum()), len(member)
    if not 0 < members < n:
        raise ValueError(f"{members} of {n} records are members; there must be members and non-members")
    if unknown := int(scores.isnan().sum()):
        raise ValueError(f"{unknown} of {n} scores are not numbers, which have no place in an order; leave them out")


def auc(scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"]) -> float:
    """Area under the curve of `roc`: probability that a member has a higher score than another record; ties are 1/2."""
    fpr, tpr = roc(scores, member)
    return float(torch.trapezoid(tpr, fpr))


def auc_interval(scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"]) -> tuple[float, float]:
    """The 95 % interval of `auc` by the placements of its records (DeLong et al. 1988), on the scale of log odds.

    Student's distribution has as many degrees of freedom as the fewer of members and others have. Where placements do
    not vary, as if all scores are equal, it is the `interval` of a share of so many.

    Raises:
        ValueError: as `roc`.
    """
    _check(scores, member)
    values = scores.numpy()
    own, others = values[member.numpy()], values[~member.numpy()]
    ranks = rankdata(np.concatenate([own, others]))
    above = (ranks[: len(own)] - rankdata(own)) / len(others)  # of a member, the share of others with a lower score
    below = 1 - (ranks[len(own) :] - rankdata(others)) / len(own)
    area, least = float(above.mean()), min(len(own), len(others))
    deviation = 0.0
    if least > 1:
        deviation = math.sqrt(above.var(ddof=1) / len(own) + below.var(ddof=1) / len(others))
    if not deviation or not 0 < area < 1:
        return interval(area * least, least)
    half = student.isf(0.025, least - 1) * deviation / (area * (1 - area))
    low, high = expit([logit(area) - half, logit(area) + half])
    return float(low), float(high)


FPRS = (0.001, 0.01)
"""False positive rates at which true positive rates are reported."""


class Rate(NamedTuple):
    """True positive rate at a given false positive rate.

    Attributes:
        fpr: the requested rate; the threshold is the lowest with at most this rate on these records.
        tpr: share of the members above the threshold.
        low: lower end of the interval of ``tpr``.
        high: upper end of the interval of ``tpr``.
        fpr_high: upper end of the interval of the false positive rate.
    """

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


def tpr_at(fpr: float, scores: Float64[Tensor, " n"], member: Bool[Tensor, " n"], *, confidence: float = 0.95) -> Rate:
    """The true positive rate at a false positive rate of at most ``fpr``.

    Intervals are Clopper and Pearson's for independent records; ``low`` and ``fpr_high`` hold together with
    ``confidence``.
    """
    false, true = _counts(scores, member)
    at = int((false <= fpr * int(false[-1]) + 1e-9).sum()) - 1
    hits, members, misses, others = (int(count) for count in (true[at], true[-1], false[at], false[-1]))
    low, high = interval(hits, members, confidence)
    return Rate(fpr, hits / members, low, high, interval(misses, others, confidence)[1])


def interval(successes: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) for a probability; counts may be fractional."""
    rest = (1 - confidence) / 2
    low = float(beta.ppf(rest, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - rest, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def bound(fpr: float, epsilon: float, delta: float) -> float:
    """Maximum true positive rate at ``fpr`` of any test under (epsilon, delta)-DP.

    ``min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR))`` and at most 1: Kairouz, Oh, Viswanath 2015
    (arXiv:1311.0776), theorem 2.1. The region below is convex, so the bound holds for means over records too.
    """
    factor = math.exp(min(epsilon, 700.0))
    return min(factor * fpr + delta, 1 - (1 - delta - fpr) / factor, 1.0)

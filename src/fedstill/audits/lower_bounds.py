"""Lower bounds on epsilon, from attacks on a mechanism's own code.

A bound above the claimed epsilon refutes the claim. `one_run` audits one run with many canaries: it is cheap enough for
a training, but its bound is far below the true epsilon. `many_runs` audits many runs with one canary: its bound is
close to the true epsilon. Both know a mechanism as `Canaries` only.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy.special import expit, ndtri, stdtrit
from scipy.stats import beta, binom
from torch import Tensor

from fedstill.privacy.accounting import gaussian_epsilon

V = TypeVar("V")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Canaries(Generic[V]):
    """Records whose presence an attacker tries to infer from a release; the attacker knows all other records.

    Attributes:
        count: number of canaries, m.
        release: maps a mask ``(m,)`` of the included canaries to the mechanism's release, with fresh noise each time.
        score: maps a release to scores ``(m,)``, larger for canaries that look included.
    """

    count: int
    release: Callable[[Bool[Tensor, " m"]], V]
    score: Callable[[V], Float[Tensor, " m"]]

    def alone(self, included: bool) -> float:
        """The first canary's score in a release without other canaries, with or without it; for `many_runs`."""
        mask = torch.zeros(self.count, dtype=torch.bool)
        mask[0] = included
        return float(self.score(self.release(mask))[0])


@dataclass(frozen=True)
class AuditResult:
    """Lower bound on epsilon from one run, with the numbers of guesses and of correct guesses."""

    epsilon: float
    guesses: int
    correct: int


@dataclass(frozen=True)
class ManyRunsResult:
    """Lower bounds on epsilon from many runs: for any mechanism, and for one that claims to be Gaussian."""

    epsilon: float
    gaussian: float


def p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Largest probability of ``correct`` or more correct ``guesses`` on ``m`` canaries under (epsilon, delta)-DP.

    Steinke, Nasr, Jagielski 2023 (arXiv:2305.08846), theorem 5.2: with ``W ~ Bin(r, e^epsilon / (1 + e^epsilon))`` at
    most ``P[W >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= W < v] / i``. Not capped at 1.
    """
    if correct == 0:
        return 1.0
    tail = binom.sf(np.arange(-1, correct), guesses, expit(epsilon))  # P[W >= 0 .. v]
    inside = (tail[-2::-1] - tail[-1]) / np.arange(1, correct + 1)
    return float(tail[-1] + 2 * m * delta * inside.max())


def lower_bound(m: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that ``correct`` correct guesses out of ``guesses`` on ``m`` canaries refute.

    Args:
        m: number of canaries, each included by a fair coin of its own.
        guesses: number of guesses, fixed before the scores are seen.
        correct: number of correct guesses.
        delta: the claimed delta, in ``[0, 1)``.
        confidence: probability that the bound is below the true epsilon. To report the best of k audits, use
            ``1 - (1 - confidence) / k`` for each.

    Raises:
        ValueError: a number is out of its range.
    """
    if not (0 <= correct <= guesses <= m and 0 <= delta < 1 and 0 < confidence < 1):
        raise ValueError(
            f"{correct} correct of {guesses} guesses on {m} canaries, delta {delta}, confidence {confidence}; correct "
            "guesses can't exceed guesses, guesses can't exceed canaries, delta is in [0, 1), confidence in (0, 1)"
        )

    def refuted(epsilon: float) -> bool:
        return p_value(m, guesses, correct, epsilon, delta) <= 1 - confidence

    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def one_run(
    canaries: Canaries[V], guesses: int, rng: torch.Generator, *, delta: float, confidence: float = 0.95
) -> AuditResult:
    """Audit one release: guess that the ``guesses / 2`` highest scores are included and as many of the lowest not.

    Args:
        canaries: the attack; data sets that differ by one canary must be neighbours in the mechanism's guarantee.
        guesses: an even number, at most the number of canaries, chosen beforehand.
        rng: generator of the inclusion coins; nothing else may draw from it.
        delta: see `lower_bound`.
        confidence: see `lower_bound`.

    Raises:
        ValueError: ``guesses`` or a number of `lower_bound` is out of range.
    """
    if guesses % 2 or not 2 <= guesses <= canaries.count:
        raise ValueError(f"{guesses} guesses on {canaries.count} canaries; they must be even, from 2 to all canaries")
    included = torch.rand(canaries.count, generator=rng) < 0.5
    order = included[canaries.score(canaries.release(included)).argsort(stable=True)]
    correct = int((~order[: guesses // 2]).sum() + order[-(guesses // 2) :].sum())
    return AuditResult(lower_bound(canaries.count, guesses, correct, delta, confidence), guesses, correct)


def many_runs(score: Callable[[bool], float], runs: int, *, delta: float, confidence: float = 0.95) -> ManyRunsResult:
    """Audit independent releases with and without a record by a threshold on the score.

    The threshold with the best bound on the first half of the runs is tested on the second half, where both error rates
    have Clopper-Pearson bounds. An (epsilon, delta)-DP mechanism has ``FPR e^epsilon + FNR >= 1 - delta``, also with
    the two exchanged (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, theorem 2.1). A mu-Gaussian one, which the
    composition of Gaussian events without sampling is, has ``Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu`` (Dong, Roth, Su
    2019, arXiv:1905.02383, equation 6; as an audit: Nasr et al. 2023, arXiv:2302.07956): far fewer runs refute that.

    Args:
        score: the score of one fresh release with the record or without it, larger if it looks included.
        runs: number of releases with the record and of releases without it, each at least 2.
        delta: the claimed delta, in ``[0, 1)``; for 0 the result's ``gaussian`` is 0.
        confidence: confidence of each bound.

    Raises:
        ValueError: a number is out of its range.
    """
    if runs < 2:
        raise ValueError(f"runs is {runs}; give 2 or more")
    _check_bounds(delta, confidence)
    scores = np.array([[score(included) for _ in range(runs)] for included in (False, True)], dtype=np.float64)
    return from_scores(scores[0], scores[1], delta=delta, confidence=confidence)


def _check_bounds(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta}; give a number from 0 to below 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a number between 0 and 1")


def from_scores(without: Floats, present: Floats, *, delta: float, confidence: float = 0.95) -> ManyRunsResult:
    """As `many_runs`, from the scores of independent releases without and with the record, each at least 2.

    Raises:
        ValueError: a number is out of its range.
    """
    if min(len(without), len(present)) < 2:
        raise ValueError(
            f"there are {len(without)} scores without the record and {len(present)} with it; give 2 or more"
        )
    _check_bounds(delta, confidence)
    out, then = np.split(without, [len(without) // 2])
    seen, later = np.split(present, [len(present) // 2])
    thresholds = np.unique(np.quantile(np.concatenate([out, seen]), np.linspace(0, 1, 1001)))
    chosen = [thresholds[int(bound.argmax())] for bound in _bounds(out, seen, thresholds, delta, confidence)]
    epsilon, mu = (bound[i] for i, bound in enumerate(_bounds(then, later, np.array(chosen), delta, confidence)))
    gaussian = gaussian_epsilon(1 / float(mu), delta) if delta and mu > 0 else 0.0
    return ManyRunsResult(max(0.0, float(epsilon)), gaussian)


def fitted(
    without: Floats, present: Floats, *, delta: float, confidence: float = 0.95, correlation: float = 1.0
) -> float:
    """Lower bound on epsilon by a fit: valid only against claims whose scores are Gaussian with one variance.

    A linear score of a Gaussian mechanism is ``N(a, s^2)`` without the record and ``N(a + mu s, s^2)`` with it. The
    difference of the means over the pooled deviation has the variance ``1/n + 1/m + mu^2 / (2 (n + m))`` for many
    scores (Hedges, Olkin 1985, chapter 5), which gives a bound on mu, and it the epsilon of a mu-Gaussian mechanism.
    The quantile is Student's with ``n + m - 2`` degrees of freedom, since a normal one is too short for few scores. The
    fit needs ten times fewer releases than thresholds do, which need no fit.

    Args:
        without: scores of releases without the record.
        present: scores with it.
        delta: the claimed delta, in (0, 1).
        confidence: probability that the bound is below the true epsilon.
        correlation: factor by which the variance of means is larger than for independent scores.
    """
    n, m = len(without), len(present)
    pooled = (without.var(ddof=1) * (n - 1) + present.var(ddof=1) * (m - 1)) / (n + m - 2)
    shift = float(present.mean() - without.mean()) / math.sqrt(max(float(pooled), 1e-300))
    deviation = math.sqrt(correlation * (1 / n + 1 / m + shift**2 / (2 * (n + m))))
    mu = min(shift + float(stdtrit((n + m - 2) / correlation, 1 - confidence)) * deviation, 1e6)
    return gaussian_epsilon(1 / mu, delta) if mu > 1e-6 else 0.0


def _bounds(out: Floats, present: Floats, thresholds: Floats, delta: float, confidence: float) -> tuple[Floats, Floats]:
    """Lower bounds on epsilon and on mu at each threshold, from scores without and with the record."""
    n = np.array([[len(out)], [len(present)]])
    wrong = np.stack([(out >= thresholds[:, None]).sum(1), (present < thresholds[:, None]).sum(1)])
    # each error rate's upper bound fails with half of 1 - confidence; for n errors in n it is 1
    fpr, fnr = np.where(wrong < n, beta.ppf((1 + confidence) / 2, wrong + 1, np.maximum(n - wrong, 1)), 1.0)
    ratio = np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
    return np.log(np.maximum(ratio, 1e-300)), -ndtri(fpr) - ndtri(fnr)


EXCEEDED = 1.001
"""Share of the claimed sensitivity that refutes a claim: in DP-SGD, exact steps move the later ones a little."""


@dataclass(frozen=True)
class Finding:
    """The result of an audit of one method.

    Attributes:
        method: the method.
        unit: what its claim protects.
        claim: the epsilon of the runs' guarantee.
        delta: its delta.
        bound: lower bound on epsilon for any mechanism.
        fit: lower bound on epsilon if scores are Gaussian, as the claim implies; None for other claims.
        reach: largest share of the claimed sensitivity by which a canary moves exact values; None for labels.
        canaries: number of canaries.
        clients: number of clients.
        risk: probability that a bound of this audit, or of an earlier one of some of its scores, is above the truth.
        looks: number of times that the scores were judged, each with more clients.
        difference: what else depends on a record (`Scene.difference`); empty if nothing does.
    """

    method: str
    unit: str
    claim: float
    delta: float
    bound: float
    fit: float | None
    reach: float | None
    canaries: int
    clients: int
    risk: float
    looks: int
    difference: str = ""

    @property
    def largest(self) -> float:
        """The larger of both bounds."""
        return max(self.bound, self.fit or 0.0)

    @property
    def refuted(self) -> bool:
        """Whether a bound exceeds the claim, a canary moves exact values too far, or something else depends on it."""
        return self.largest > self.claim or (self.reach or 0.0) > EXCEEDED or bool(self.difference)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verdict = "refuted" if self.refuted else "not refuted"
        return {**asdict(self), "ratio": self.largest / self.claim, "verdict": verdict}

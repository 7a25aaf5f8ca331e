"""What a difference between two accuracies decides: the one rule of the board and of docs/papers.md.

Two things make a difference vary: the seeds (records, clients, random starts, noise), whose variance is estimated from
the seeds that both methods have, and the test records, which are the same for all seeds, so that no seed shows them.
Both are counted. With ``d`` the mean of the differences seed by seed, ``a`` the squared standard error of this mean
over ``S`` seeds and ``b`` the variance of a difference over ``n`` test records, the p value is the smallest level at
which ``d^2 > t^2 a + z^2 b``, with ``t`` and ``z`` the two-sided quantiles of Student's distribution with ``S - 1``
degrees of freedom and of the normal one. Such an interval has at least its nominal level, whatever the ratio of the two
variances (Banerjee, Sankhya 22, 1960); Welch's degrees of freedom would be up to sixteen times too sure at the small
levels that Holm's procedure asks for with three seeds.

``b`` takes the errors of the two models as independent over test records, ``p (1 - p) / n`` each. On the same records
they rarely are, so it is rather too large: predictions of single records are not stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy.optimize import brentq
from scipy.stats import norm, t

LEVEL = 0.05
"""Chance of any wrong answer among all that are called decided."""
TEST_RECORDS = 10_000
"""Test records of MNIST, Fashion-MNIST and CIFAR-10."""
SAME = 0.0011
"""Accuracies as close as this are equal but for rounding: eleven test records."""
Seeds = Mapping[int, float]
"""The accuracy of each seed, from 0 to 1."""


@dataclass(frozen=True)
class Difference:
    """How much more accurate a method is than another.

    Attributes:
        mean: mean over the common seeds, from -1 to 1.
        spread: standard deviation of the differences seed by seed; nan with one seed.
        seeds: number of common seeds.
        p: two-sided p value; 1 with one seed.
    """

    mean: float
    spread: float
    seeds: int
    p: float


def difference(first: Seeds, second: Seeds, records: int = TEST_RECORDS) -> Difference:
    """The difference of ``first`` and ``second`` on the seeds that both have.

    Raises:
        ValueError: they have no seed in common.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the two methods have no seed in common; run both with one seed at least")
    apart = [first[seed] - second[seed] for seed in common]
    size = mean(apart)
    if len(common) == 1:
        return Difference(size, math.nan, 1, 1.0)
    spread = stdev(apart)
    of_tests = sum(variance(mean(one[seed] for seed in common)) for one in (first, second)) / records
    return Difference(size, spread, len(common), p_value(size, spread**2 / len(common), len(common) - 1, of_tests))


def variance(accuracy: float) -> float:
    """Variance of the correctness of one record; never quite 0, so that no difference is certain."""
    within = min(max(accuracy, 0.0005), 0.9995)
    return within * (1 - within)


def p_value(size: float, of_seeds: float, degrees: int, of_tests: float) -> float:
    """The smallest level at which ``size^2`` is above ``t^2 of_seeds + z^2 of_tests``.

    Args:
        size: mean difference.
        of_seeds: its squared standard error over seeds.
        degrees: degrees of freedom of that, from 1.
        of_tests: its variance over test records.
    """

    def excess(log_level: float) -> float:
        half = math.exp(log_level) / 2
        return float(t.isf(half, degrees) ** 2 * of_seeds + norm.isf(half) ** 2 * of_tests - size**2)

    if excess(-1e-9) >= 0:
        return 1.0
    return math.exp(brentq(excess, -300.0, -1e-9)) if excess(-300.0) > 0 else math.exp(-300.0)


def holm(values: Sequence[float]) -> list[float]:
    """The p values after Holm's procedure, in their order: those up to a level err with at most this chance in all."""
    adjusted, most = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        most = max(most, min(1.0, values[i] * (len(values) - rank)))
        adjusted[i] = most
    return adjusted


@dataclass(frozen=True)
class Answer:
    """The most accurate of several methods on one task.

    Attributes:
        leader: its name; of equal ones the first by name.
        accuracy: its mean accuracy on the seeds that all methods have.
        lead: its difference to the second, which is ``second``; None if it is alone.
        p: the largest p value of the leader against any other method: it leads if it is apart from all of them. For
            a leader that the same runs chose no more is needed (Gutmann, Maymin, Annals of Statistics 15, 1987).
        nearest: the method with this p value.
        not_apart: the others that are not apart from the leader at `LEVEL`, each alone.
        evidence: the accuracies of the leader and of ``nearest``, seed by seed.
    """

    leader: str
    accuracy: float
    second: str = ""
    lead: Difference | None = None
    p: float = 1.0
    nearest: str = ""
    not_apart: tuple[str, ...] = ()
    evidence: tuple[Seeds, Seeds] = ({}, {})

    def is_same(self, other: "Answer") -> bool:
        """Whether both are one comparison: equal methods whose accuracies are equal on the seeds of both.

        So it is for methods of sums, whose result does not depend on how the records are dealt to clients.
        """
        if (self.leader, self.nearest) != (other.leader, other.nearest):
            return False
        pairs = list(zip(self.evidence, other.evidence, strict=True))
        return all(abs(one[seed] - two[seed]) < SAME for one, two in pairs for seed in one.keys() & two.keys())


def answer(by_method: Mapping[str, Seeds], records: int = TEST_RECORDS) -> Answer:
    """The most accurate of several methods on the seeds that all have, tested against each of the others.

    Raises:
        ValueError: there is no method, or no seed that all have.
    """
    common = set.intersection(*({*seeds} for seeds in by_method.values())) if by_method else set[int]()
    if not common:
        raise ValueError("there is no seed that all methods have; run each with one seed at least")
    ranked = sorted(sorted(by_method), key=lambda name: -mean(by_method[name][seed] for seed in common))
    leader = ranked[0]
    own = by_method[leader]
    accuracy = mean(own[seed] for seed in common)
    if len(ranked) == 1:
        return Answer(leader, accuracy)
    found = {name: difference(own, by_method[name], records) for name in ranked[1:]}
    p_of = {name: one.p if one.mean > 0 else 1.0 for name, one in found.items()}
    nearest = max(p_of, key=lambda name: p_of[name])
    return Answer(
        leader=leader,
        accuracy=accuracy,
        second=ranked[1],
        lead=found[ranked[1]],
        p=p_of[nearest],
        nearest=nearest,
        not_apart=tuple(name for name in ranked[1:] if p_of[name] > LEVEL),
        evidence=(own, by_method[nearest]),
    )


def distinct(answers: Sequence[Answer]) -> list[list[int]]:
    """The positions of the answers in groups, each of which is one comparison."""
    groups = list[list[int]]()
    for i, one in enumerate(answers):
        own = next((group for group in groups if all(one.is_same(answers[j]) for j in group)), None)
        if own is None:
            groups.append([i])
        else:
            own.append(i)
    return groups


def decide(answers: Sequence[Answer]) -> tuple[list[bool], int, int]:
    """Which answers are decided, and how many of how many distinct ones: Holm's procedure over these at `LEVEL`.

    An answer that is one comparison with others counts once, with the smallest of its p values, and every task of it
    is decided by its own.
    """
    groups = distinct(answers)
    values = [min(answers[i].p for i in group) for group in groups]
    kept = sum(adjusted <= LEVEL for adjusted in holm(values))
    limit = LEVEL / (len(values) - kept + 1) if kept else -1.0  # of the last one that the procedure decided
    return [one.p <= limit for one in answers], kept, len(groups)

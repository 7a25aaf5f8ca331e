"""Adversaries that choose each release by the outcomes of those before, and their privacy loss by exact computation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import log_ndtr

from fedstill.privacy.releases import Event, Gaussian, Pure

Floats = NDArray[np.float64]
Rule = Callable[[Sequence[Event]], bool]


@dataclass(frozen=True)
class Outcomes:
    """The log likelihood ratios of some releases together, and their probabilities where the record is present."""

    losses: Floats
    probabilities: Floats
    mu: float | None = None
    """Of Gaussian releases, the root of the sum of ``1 / s^2``."""

    def excess(self, threshold: Floats) -> Floats:
        """``E[(1 - e^(threshold - loss))_+]``, the hockey-stick divergence, for each threshold."""
        if self.mu is not None:
            here, there = (log_ndtr(sign * self.mu / 2 - threshold / self.mu) for sign in (1, -1))
            exact: Floats = np.exp(here) - np.exp(threshold + there)
            return exact
        gap = np.minimum(threshold[:, None] - self.losses, 0.0)
        result: Floats = (-np.expm1(gap) * self.probabilities).sum(1)
        return result


def outcomes(events: Sequence[Event]) -> Outcomes:
    """Of several equal randomised responses, or of several equal Gaussians (their losses at 2,001 places)."""
    if not events:
        return Outcomes(np.zeros(1), np.ones(1))
    first, n = events[0], len(events)
    assert all(event == first for event in events)
    if isinstance(first, Pure):
        right = np.arange(n + 1)
        keep = 1 / (1 + math.exp(-first.epsilon))
        return Outcomes((2 * right - n) * first.epsilon, stats.binom.pmf(right, n, keep))
    assert isinstance(first, Gaussian)
    m = n / first.noise_multiplier**2
    z = np.linspace(-9, 9, 2001)
    weights = stats.norm.pdf(z)
    return Outcomes(m / 2 + math.sqrt(m) * z, weights / weights.sum(), math.sqrt(m))


def most(make: Callable[[int], list[Event]], allowed: Rule, limit: int) -> list[Event]:
    """The longest admitted continuation."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allowed(make(middle)) else (low, middle - 1)
    return make(low)


def largest(start: list[Event], kind: str, allowed: Rule) -> list[Event]:
    """The costliest single release that is admitted after ``start``, to one part in a thousand."""

    def one(i: int) -> list[Event]:
        if not i:
            return []
        return [Pure(epsilon=i / 500) if kind == "pure" else Gaussian(noise_multiplier=1000 / i)]

    return most(one, lambda more: allowed([*start, *more]), 8000)


def continuations(start: list[Event], allowed: Rule) -> list[list[Event]]:
    """What an adversary may choose from after each outcome of ``start``."""
    return [
        [],
        *(largest(start, kind, allowed) for kind in ("pure", "gaussian")),
        *(
            most(lambda n, e=event: [e] * n, lambda more: allowed([*start, *more]), 500)
            for event in (Pure(epsilon=0.02), Pure(epsilon=0.1), Pure(epsilon=0.5), Gaussian(noise_multiplier=20.0))
        ),
    ]


def worst(start: list[Event], choices: list[list[Event]], epsilon: float) -> float:
    """The delta at ``epsilon`` of an adversary who sees ``start`` and takes the best choice for each outcome."""
    seen = outcomes(start)
    left = epsilon - seen.losses
    best = np.max([outcomes(more).excess(left) for more in choices], axis=0)
    return float((seen.probabilities * best).sum())


def true_epsilon(start: list[Event], choices: list[list[Event]], delta: float, most: float) -> float:
    """The least epsilon, up to ``most``, at which that adversary has ``delta``."""
    low, high = 0.0, most
    while high - low > 1e-5 * most:
        middle = (low + high) / 2
        low, high = (low, middle) if worst(start, choices, middle) <= delta else (middle, high)
    return high


STARTS: list[list[Event]] = [
    *([Pure(epsilon=e)] * n for e in (0.01, 0.02, 0.05, 0.1, 0.3) for n in (1, 4, 16, 32)),
    *([Gaussian(noise_multiplier=s)] * n for s in (8.0, 15.0, 40.0) for n in (1, 4, 16)),
]
BUDGETS = [(0.5, 1e-5), (1.0, 1e-5), (2.0, 1e-3), (2.0, 1e-6), (4.0, 1e-5), (8.0, 1e-5), (1.0, 1e-9)]

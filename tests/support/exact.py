"""Deltas and epsilons of composed releases in 40 digits, from their definitions alone: nothing of fedstill is used.

Let R_j be the outcomes of randomised responses, with probability p_j and log likelihood ratio l_j. Then the divergence
of these beside another mechanism is ``sum_j p_j H(epsilon - l_j)``, with H the other's hockey-stick divergence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mpmath
from mpmath import mpf

mpmath.mp.dps = 40
Divergence = Callable[[mpf], mpf]
DIGITS = 12
"""Significant digits of an epsilon on file."""


def gaussian(noise: mpf) -> Divergence:
    """Of N(1, s^2) and N(0, s^2), for every real epsilon (also a negative one)."""

    def at(epsilon: mpf) -> mpf:
        return mpmath.ncdf(1 / (2 * noise) - epsilon * noise) - mpmath.exp(epsilon) * mpmath.ncdf(
            -1 / (2 * noise) - epsilon * noise
        )

    return at


def sampled(noise: mpf, q: mpf, added: bool) -> Divergence:
    """Of the mixture (1 - q) N(0, s^2) + q N(1, s^2) and N(0, s^2); ``added`` has the two change places."""

    def mixture(x: mpf) -> mpf:
        return (1 - q) * mpmath.ncdf(x / noise) + q * mpmath.ncdf((x - 1) / noise)

    def at(epsilon: mpf) -> mpf:
        ratio = mpmath.exp(-epsilon if added else epsilon)
        if ratio <= 1 - q:  # the mixture is at least this everywhere
            return mpf(0) if added else 1 - mpmath.exp(epsilon)
        x = noise**2 * mpmath.log((ratio - 1 + q) / q) + mpf(1) / 2
        if added:
            return mpmath.ncdf(x / noise) - mpmath.exp(epsilon) * mixture(x)
        return 1 - mixture(x) - mpmath.exp(epsilon) * (1 - mpmath.ncdf(x / noise))

    return at


def with_responses(epsilons: Sequence[mpf], other: Divergence) -> Divergence:
    """Of randomised responses of these epsilons beside ``other``."""
    outcomes = [(mpf(1), mpf(0))]
    for each in epsilons:
        keep = 1 / (1 + mpmath.exp(-each))
        outcomes = [(p * w, s + t) for p, s in outcomes for w, t in ((keep, each), (1 - keep, -each))]
    return lambda epsilon: mpmath.fsum(p * other(epsilon - loss) for p, loss in outcomes)


def _nothing(epsilon: mpf) -> mpf:
    return max(mpf(0), 1 - mpmath.exp(epsilon))


def divergences(events: Sequence[dict[str, Any]], moved: int) -> list[Divergence]:
    """Of whole Gaussians, pure releases and at most one release on a sample, in both directions.

    Args:
        events: the releases as on file.
        moved: number of sensitivities by which a neighbour moves a Gaussian's exact value: 1, or 2 for a label.
    """
    noisy = [event for event in events if event["kind"] == "gaussian"]
    whole = [event for event in noisy if event.get("sampling", 1.0) == 1]
    on_sample = [event for event in noisy if event.get("sampling", 1.0) < 1]
    pure = [mpf(event["epsilon"]) for event in events if event["kind"] == "pure"]
    if on_sample:
        (one,) = on_sample
        assert not whole and moved == 1 and one.get("count", 1) == 1
        noise, q = mpf(one["noise_multiplier"]), mpf(one["sampling"])
        return [with_responses(pure, sampled(noise, q, added)) for added in (False, True)]
    if not whole:
        return [with_responses(pure, _nothing)]
    precision = mpmath.fsum(mpf(event.get("count", 1)) / mpf(event["noise_multiplier"]) ** 2 for event in whole)
    return [with_responses(pure, gaussian(1 / (moved * mpmath.sqrt(precision))))]


def epsilon(events: Sequence[dict[str, Any]], delta: float, unit: str) -> mpf:
    """The least epsilon at which all ``events`` together are (epsilon, delta)-DP, by bisection."""
    both = divergences(events, 2 if unit == "label" else 1)
    low, high = mpf(0), mpf(1)

    def excess(at: mpf) -> mpf:
        return max(each(at) for each in both) - mpf(delta)

    if excess(low) <= 0:
        return low
    while excess(high) > 0:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) <= 0 else (middle, high)
    return high

"""What releases cost together: events, their composition and the noise that meets a target.

Composition is dp-accounting's: privacy loss distributions (Doroshenko et al. 2022), which are exact up to a
discretisation that is rounded to the safe side. Single Gaussians have a closed form.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

from fedstill.privacy.events import Gaussian, Pure, Unbounded, Unit


def epsilon(events: Iterable[Gaussian | Pure | Unbounded], delta: float, unit: Unit) -> float:
    """The epsilon of all ``events`` together at ``delta``; infinite when one of them is unbounded.

    Neighbours differ by one record that is added or removed for ``unit`` "record" (noise multipliers are then relative
    to that sensitivity), by one label that is replaced for "label".

    Raises:
        ValueError: ``delta`` is not in (0, 1), or an event has no accountant for this unit.
    """
    return _epsilon(tuple(events), delta, unit)


_LEAST_NOISE = 0.05
"""One release with this has an epsilon above 200; more of it is not composed with anything else."""
_LEAST_ON_SAMPLES = 0.3
"""Noise on a sample that an epsilon is found for."""


@lru_cache(maxsize=1024)
def _epsilon(events: tuple[Gaussian | Pure | Unbounded, ...], delta: float, unit: Unit) -> float:
    _check_delta(delta)
    if any(isinstance(event, Unbounded) for event in events):
        return math.inf
    if all(isinstance(event, Pure) for event in events) and len(events) <= 1:
        return sum(event.epsilon for event in events if isinstance(event, Pure))
    if any(e.sampling < 1 and e.noise_multiplier < _LEAST_ON_SAMPLES for e in events if isinstance(e, Gaussian)):
        return math.inf  # the loss distribution of next to no noise takes minutes, or does not fit into memory
    whole = [event for event in events if isinstance(event, Gaussian) and event.sampling == 1]
    precision = sum(event.count / event.noise_multiplier**2 for event in whole)
    if precision > 1 / _LEAST_NOISE**2:
        return gaussian_epsilon(precision**-0.5, delta) if len(whole) == len(events) and unit == "record" else math.inf
    from fedstill.privacy import loss_distributions  # takes a second, which most commands need not wait for

    return loss_distributions.epsilon(_merged(events), delta, unit)


def _merged(events: Iterable[Gaussian | Pure | Unbounded]) -> list[Gaussian | Pure | Unbounded]:
    """The same events, equal Gaussians counted instead of repeated: far fewer convolutions."""
    counts: dict[tuple[float, float], int] = {}
    others: list[Gaussian | Pure | Unbounded] = []
    for event in events:
        if isinstance(event, Gaussian):
            kind = event.noise_multiplier, event.sampling
            counts[kind] = counts.get(kind, 0) + event.count
        else:
            others.append(event)
    made = (Gaussian(noise_multiplier=noise, sampling=q, count=many) for (noise, q), many in counts.items())
    return [*made, *others]


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The smallest delta of one Gaussian release (Balle, Wang 2018, arXiv:1805.06530, theorem 8).

    With ``mu = 1 / noise_multiplier``: ``Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``.
    """
    mu = 1 / noise_multiplier
    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, first - second)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier of one Gaussian release that is (epsilon, delta)-DP.

    Raises:
        ValueError: epsilon is not positive or delta not in (0, 1).
    """
    _check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon is {epsilon}; it must be a positive number")

    def excess(log_noise: float) -> float:
        return gaussian_delta(math.exp(log_noise), epsilon) - delta

    low, high = -10.0, 25.0
    found = math.exp(_root(excess, low, high))
    while gaussian_delta(found, epsilon) > delta:  # the root, on its safe side
        found *= 1 + 1e-12
    return float(found)


def sampled_noise(epsilon_: float, delta: float, sampling: float, steps: int) -> float:
    """The noise multiplier, to 1 %, at which so many steps on Poisson samples of records cost at most ``epsilon_``."""

    def fits_in(multiplier: float) -> bool:
        return (
            epsilon([Gaussian(noise_multiplier=multiplier, sampling=sampling, count=steps)], delta, "record")
            <= epsilon_
        )

    low, high = 0.1, 1.0
    while not fits_in(high):
        low, high = high, 2 * high
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits_in(middle) else (middle, high)
    return high


def share_noise(epsilon: float | None, delta: float, share: float = 1.0) -> float:
    """The noise multiplier of a release that takes ``share`` of ``1 / sigma^2`` of an (epsilon, delta) budget.

    A trifle more than the formula's: accountants round to the safe side, and a budget of epsilon must be enough. No
    noise for an epsilon of None.
    """
    return 0.0 if epsilon is None else gaussian_noise(epsilon, delta) * (1 + 1e-5) / math.sqrt(share)


def classic_noise(epsilon: float, delta: float) -> float:
    """``sqrt(2 ln(1.25 / delta)) / epsilon`` (Dwork, Roth 2014, theorem A.1): proved for an epsilon below 1 only."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest epsilon of one Gaussian release at ``delta``; the inverse of `gaussian_noise`."""
    _check_delta(delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    return _root(lambda e: gaussian_delta(noise_multiplier, e) - delta, 0.0, high)


def split_gaussian(noise_multiplier: float, shares: Iterable[float]) -> tuple[float, ...]:
    """Noise multipliers of several Gaussian releases that cost together what one of ``noise_multiplier`` costs.

    Gaussians compose by ``1/s^2 = sum_i 1/s_i^2`` (Dong, Roth, Su 2019, arXiv:1905.02383, corollary 3.3); release i
    takes ``shares[i]`` of ``1/s^2``.

    Raises:
        ValueError: the shares are not positive or sum to more than 1.
    """
    found = tuple(shares)
    if min(found) <= 0 or sum(found) > 1 + 1e-12:
        raise ValueError(f"shares {found} must be positive and sum to at most 1")
    return tuple(noise_multiplier / math.sqrt(share) for share in found)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # as above

    return float(brentq(function, low, high, xtol=1e-12, rtol=1e-14))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie between 0 and 1")


def fits(
    events: Iterable[Gaussian | Pure | Unbounded], budget: float, delta: float, unit: Unit, adaptive: bool
) -> bool:
    """Whether all ``events`` may be released within (budget, delta).

    Args:
        events: see `epsilon`.
        budget: the largest epsilon.
        delta: where it is stated.
        unit: see `epsilon`.
        adaptive: whether the noise of some was chosen from releases before; an `RdpFilter` judges then.
    """
    if adaptive:
        return rdp_filter(budget, delta).allows(events)
    return epsilon(events, delta, unit) <= budget


class RdpFilter:
    """Stops releases whose noise is chosen adaptively before they cost more than (epsilon, delta) together.

    For adaptively chosen noise, composing what was spent is not a guarantee; a filter is (Feldman, Zrnic 2021,
    arXiv:2008.11193, theorem 3.1; Lecuyer 2021, arXiv:2103.01379). At one Renyi order, fixed beforehand, the
    divergences of all releases may sum to at most ``bound``; then everything released is (epsilon, delta)-DP by the
    conversion of Canonne, Kamath, Steinke 2020 (arXiv:2004.00010, proposition 12).

    Attributes:
        order: the Renyi order; the integer that leaves Gaussians most room.
        bound: the largest sum of divergences at that order.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        _check_delta(delta)
        self._delta = delta
        self.order, self.bound = max(
            ((order, _room(order, epsilon, delta)) for order in range(2, 1025)), key=lambda pair: pair[1] / pair[0]
        )

    def allows(self, events: Iterable[Gaussian | Pure | Unbounded]) -> bool:
        """Whether all ``events`` together stay within the bound."""
        return self._spent(events) <= self.bound

    def epsilon(self, events: Iterable[Gaussian | Pure | Unbounded]) -> float:
        """What the filter holds ``events`` to have cost; 0 for none."""
        spent = self._spent(events)
        return max(0.0, spent - _room(self.order, 0.0, self._delta)) if spent else 0.0

    def _spent(self, events: Iterable[Gaussian | Pure | Unbounded]) -> float:
        return sum(renyi(event, self.order) for event in events)


rdp_filter = lru_cache(maxsize=64)(RdpFilter)
"""The filter of a budget, made once."""


def _room(order: int, epsilon: float, delta: float) -> float:
    """The divergence at ``order`` that implies (epsilon, delta)-DP."""
    return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)


@lru_cache(maxsize=4096)
def renyi(event: Gaussian | Pure | Unbounded, order: int) -> float:
    """The Renyi divergence of an event at an integer order of 2 or more.

    Gaussian: ``a / 2s^2`` (Mironov 2017, arXiv:1702.07476, proposition 7). On a Poisson sample (Mironov, Talwar, Zhang
    2019, arXiv:1908.10530, section 3.3): ``1/(a-1) ln sum_i C(a,i) (1-q)^(a-i) q^i e^((i^2-i)/2s^2)``. Pure: of binary
    randomised response.
    """
    if isinstance(event, Unbounded):
        return math.inf
    if isinstance(event, Pure):
        keep, swap = 1 / (1 + math.exp(-event.epsilon)), 1 / (1 + math.exp(event.epsilon))
        terms = [order * math.log(a) + (1 - order) * math.log(b) for a, b in ((keep, swap), (swap, keep))]
        return float(logsumexp(terms)) / (order - 1)
    q, variance = event.sampling, event.noise_multiplier**2
    if q == 1:
        return event.count * order / (2 * variance)
    i = np.arange(order + 1)
    choose = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    terms = choose + (order - i) * math.log1p(-q) + i * math.log(q) + (i * i - i) / (2 * variance)
    return event.count * float(logsumexp(terms)) / (order - 1)

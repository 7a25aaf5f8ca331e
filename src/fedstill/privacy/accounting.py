"""Privacy accounting: the epsilon of a set of releases, and the noise multiplier for a given epsilon.

Events compose by dp-accounting's privacy loss distributions (Doroshenko et al. 2022), which are exact up to a
discretisation that is rounded to the safe side; single Gaussians have a closed form. `RdpFilter` bounds adaptive noise.

Four functions turn an epsilon into a noise multiplier: `gaussian_noise` by the theorem on one Gaussian release,
`release_noise` for a method's sound releases, `dp_sgd_noise` for training by DP-SGD, and `published_noise` for
mechanisms that reproduce a paper.

Composition theorems for fixed lists of mechanisms do not cover this: among 32 randomised responses, whose number and
cost were chosen by earlier outcomes, a sum that is exact for every fixed list is exceeded (Rogers, Roth, Ullman, Vadhan
2016, arXiv:1605.08294). A *filter* does: it adds up one number for each release, which may depend on all outcomes so
far, and stops before the sum exceeds a bound that was fixed at the start. Three filters are used (`admits`):

* **Pure.** If every release is epsilon_i-DP and the epsilon_i sum to at most epsilon, everything together is
  epsilon-DP (Rogers et al. 2016): on every path, the likelihood ratio is a product of factors up to
  e^epsilon_i.
* **Gaussian.** If release i has noise s_i times its sensitivity and the 1/s_i^2 sum to at most 1/s^2, everything
  together is as private as one release with noise s (Smith, Thakurta 2022, arXiv:2210.17520). Proof, by
  induction from the last release: with H(x, m) the hockey-stick divergence at e^x of a Gaussian release of m = 1/s^2,
  the divergence from release i on is at most the mean over its outcome o of H(x - l(o), m - 1/s_i^2), with l(o) the log
  likelihood ratio. That is the divergence of two Gaussian releases one after the other: H(x, m).
* **Renyi.** If the divergences at one order a sum to at most r, everything together has divergence r, whatever the
  kinds of the mechanisms (Feldman, Zrnic 2021, arXiv:2008.11193, theorem 3.1), and is (epsilon, delta)-DP by
  `RdpFilter`. The *first* release decides the order, and no outcome has decided that one.

A union of filters is no filter: an adversary may end some paths at the bound of one and the others at that of another.
But deltas of filters add up: let S be the paths that the first one admits. An adversary who stops before leaving S is
within the first bound, and one who stops before a path outside of S within the second; so for every event E,
P[E] = P[E and S] + P[E and not S] <= e^epsilon Q[E] + delta_1 + delta_2. The pure filter has delta 0. The other two
share delta in proportions that the *first* release alone decides, which is chosen before any outcome.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp
from typing_extensions import TypeIs

from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded, Unit

if TYPE_CHECKING:  # runs without noise need no accountant
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


def _distribution(event: Gaussian | Pure, relation: "NeighboringRelation") -> "PrivacyLossDistribution":
    """The privacy loss distribution of an event, rounded to the safe side.

    That of a pure mechanism is binary randomised response's, which dominates every epsilon-DP mechanism whatever its
    neighbours are (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, theorem 2).
    """
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    if isinstance(event, Pure):
        return pld.from_privacy_parameters(common.DifferentialPrivacyParameters(event.epsilon, 0.0))
    if event.sampling == 1:  # several are one of more precision
        return pld.from_gaussian_mechanism(event.noise_multiplier / event.count**0.5, neighboring_relation=relation)
    once = pld.from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sampling, neighboring_relation=relation
    )
    return once if event.count == 1 else once.self_compose(event.count)


def pld_epsilon(events: Iterable[Gaussian | Pure], delta: float, unit: Unit) -> float:
    """The epsilon of all ``events`` together at ``delta``, for neighbours of ``unit``."""
    from dp_accounting import NeighboringRelation as relations  # takes a second to import
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = relations.REPLACE_ONE if unit == "label" else relations.ADD_OR_REMOVE_ONE
    total = pld.identity()
    for event in events:
        total = total.compose(_distribution(event, relation))
    return float(total.get_epsilon_for_delta(delta))


def epsilon(events: Iterable[Event], delta: float, unit: Unit) -> float:
    """The epsilon of all ``events`` together at ``delta``; infinite if one of them is unbounded.

    For ``unit`` "record", neighbours differ by one record that is added or removed; for "label", by one label that is
    replaced. Noise multipliers are relative to the influence of one record that is added or removed, twice of which a
    replaced label has.

    Raises:
        ValueError: ``delta`` is not in (0, 1), or an event has no accountant for this unit.
    """
    return _epsilon(tuple(events), delta, unit)


_LARGEST = 1e8
"""Largest epsilon for which noise is computed."""
_LEAST_NOISE = 0.05
"""Smallest noise multiplier that is composed with other events; its epsilon alone is above 200."""
_LEAST_ON_SAMPLES = 0.3
"""Smallest noise multiplier on Poisson samples that gets an epsilon."""

_MOST_PURE = 500.0
"""Largest epsilon of a pure mechanism that is composed with other events."""
_MOST_KINDS, _MOST_STEPS = 16, 10**7
"""Largest numbers of kinds of noise on samples, and of steps of one kind, whose loss distributions are composed, which
takes seconds. Beyond them epsilon comes from Renyi divergences: larger, but quick, as a client may list any events."""
_ROUNDING = 1e-12
"""Bound of the rounding error of the divergence of one step on a sample."""


@lru_cache(maxsize=1024)
def _epsilon(events: tuple[Event, ...], delta: float, unit: Unit) -> float:
    _check_delta(delta)
    if any(isinstance(event, Unbounded) for event in events):
        return math.inf
    pure = sum(event.epsilon for event in events if isinstance(event, Pure))  # basic composition
    if len(events) <= 1 and all(isinstance(event, Pure) for event in events):
        return pure
    if any(e.sampling < 1 and e.noise_multiplier < _LEAST_ON_SAMPLES for e in events if isinstance(e, Gaussian)):
        return math.inf  # with so little noise, the loss distribution takes minutes or does not fit into memory
    whole = [event for event in events if isinstance(event, Gaussian) and event.sampling == 1]
    precision = sum(event.count / event.noise_multiplier**2 for event in whole)
    if _are_one_gaussian(events, unit):
        return gaussian_epsilon(precision**-0.5, delta)
    if precision > 1 / _LEAST_NOISE**2:
        return math.inf
    if any(isinstance(event, Pure) and event.epsilon > _MOST_PURE for event in events):
        return math.inf
    merged = [event for event in _merged(events) if not isinstance(event, Unbounded)]
    if _are_too_many(merged):
        return _renyi_epsilon(merged, delta) if unit == "record" else math.inf

    bounds = [pld_epsilon(merged, delta, unit)]  # of tiny losses mostly its own rounding
    all_pure = all(isinstance(event, Pure) for event in merged)
    if all_pure:
        bounds.append(pure)
    if all_pure or unit == "record":  # the divergences of Gaussians are for a record that is added or removed
        bounds.append(_renyi_epsilon(merged, delta))
    return min(bounds)


def accountant(events: Iterable[Event], unit: Unit) -> str:
    """The way in which `epsilon` adds these events up, in words."""
    every = tuple(events)
    if len(every) == 1 and isinstance(every[0], Pure):
        return "a single release"
    if _are_one_gaussian(every, unit):
        number = sum(event.count for event in every if isinstance(event, Gaussian))
        what = "a single Gaussian release" if number == 1 else "Gaussian releases as one with the noise of all"
        return f"{what}, exactly (Balle, Wang 2018)"
    if unit == "record" and _are_too_many(_merged(every)):
        return "Renyi divergences"
    pure = all(isinstance(event, Pure) for event in every)
    others = " or Renyi divergences, the smaller" if unit == "record" else ""
    others = ", Renyi divergences or the sum of epsilons, the smallest" if pure else others
    return f"privacy loss distributions (dp-accounting){others}"


def _are_one_gaussian(events: Sequence[Event], unit: Unit) -> bool:
    """Whether they cost together what one Gaussian release costs, whose precision is the sum of theirs."""
    on_all = (isinstance(event, Gaussian) and event.sampling == 1 for event in events)
    return bool(events) and unit == "record" and all(on_all)


def _are_too_many(merged: Iterable[Event]) -> bool:
    """Whether their loss distributions would take too long to compose."""
    sampled = [event for event in merged if isinstance(event, Gaussian) and event.sampling < 1]
    return len(sampled) > _MOST_KINDS or any(event.count > _MOST_STEPS for event in sampled)


def _renyi_epsilon(events: Iterable[Event], delta: float) -> float:
    """An upper bound of epsilon: the smallest over orders of the conversion in `RdpFilter`."""
    every = list(events)
    slack = _ROUNDING * sum(event.count for event in every if isinstance(event, Gaussian))
    orders = (*range(2, 65), 96, 128, 256, 512, 1024)
    return max(0.0, slack + min(sum(renyi(e, order) for e in every) - _room(order, 0.0, delta) for order in orders))


Events = Iterable[Event] | Mapping[Event, int]
"""Events, or the number of times that each is among them."""


def _counted(events: Events) -> list[tuple[Event, int]]:
    return list(events.items()) if isinstance(events, Mapping) else [(event, 1) for event in events]


def _merged(events: Iterable[Event]) -> list[Event]:
    """The same events with equal Gaussians merged into one event with a count, which saves convolutions."""
    return [event for event, _ in _merged_counts([(event, 1) for event in events])]


def _merged_counts(events: Iterable[tuple[Event, int]]) -> list[tuple[Event, int]]:
    counts: dict[tuple[float, float], int] = {}
    others: list[tuple[Event, int]] = []
    for event, times in events:
        if isinstance(event, Gaussian):
            kind = event.noise_multiplier, event.sampling
            counts[kind] = counts.get(kind, 0) + times * event.count
        else:
            others.append((event, times))
    gaussians = (  # unchecked, as a sum may exceed the largest count of one release
        (Gaussian.model_construct(kind="gaussian", noise_multiplier=noise, sampling=q, count=many), 1)
        for (noise, q), many in counts.items()
    )
    return [*gaussians, *others]


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The smallest delta of one Gaussian release (Balle, Wang 2018, arXiv:1805.06530, theorem 8).

    With ``mu = 1 / noise_multiplier``: ``Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``.
    """
    mu = 1 / noise_multiplier
    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, first - second)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest epsilon of one Gaussian release at ``delta``; the inverse of `gaussian_noise`."""
    _check_delta(delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    return _root(lambda e: gaussian_delta(noise_multiplier, e) - delta, 0.0, high)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier of one Gaussian release that is (epsilon, delta)-DP.

    Raises:
        ValueError: epsilon is not positive, or above 1e8, or delta not in (0, 1).
    """
    _check_delta(delta)
    if not 0 < epsilon <= _LARGEST:
        raise ValueError(f"epsilon is {epsilon}; it must be a positive number, and at most {_LARGEST:g}")

    def excess(log_noise: float) -> float:
        return gaussian_delta(math.exp(log_noise), epsilon) - delta

    noise = math.exp(_root(excess, -10.0, 25.0))
    while gaussian_delta(noise, epsilon) > delta:  # move the root to its safe side
        noise *= 1 + 1e-12
    return float(noise)


def release_noise(epsilon: float | None, delta: float, precision_share: float = 1.0) -> float:
    """The noise multiplier of one of a method's Gaussian releases under an (epsilon, delta) budget.

    Gaussians compose by ``1/sigma^2 = sum_i 1/sigma_i^2`` (Dong, Roth, Su 2019, arXiv:1905.02383, corollary 3.3), so
    releases whose shares sum to 1 cost the budget together. The noise is larger than the formula's by a factor of 1 +
    1e-5: accountants round to the safe side, and a ledger with a budget of epsilon must accept the releases.

    Args:
        epsilon: the budget of all releases; None for no noise.
        delta: the delta of the budget.
        precision_share: this release's share of the precision ``1/sigma^2``, in (0, 1]; not a share of epsilon.
    """
    return 0.0 if epsilon is None else gaussian_noise(epsilon, delta) * (1 + 1e-5) / math.sqrt(precision_share)


def dp_sgd_noise(target: float, delta: float, sampling: float, steps: int) -> float:
    """The noise multiplier, to 1 %, at which ``steps`` on Poisson samples of rate ``sampling`` cost ``target``."""

    def is_enough(noise: float) -> bool:
        event = Gaussian(noise_multiplier=noise, sampling=sampling, count=steps)
        return epsilon([event], delta, "record") <= target

    low, high = 0.1, 1.0
    while not is_enough(high):
        low, high = high, 2 * high
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def published_noise(epsilon: float, delta: float) -> float:
    """``sqrt(2 ln(1.25 / delta)) / epsilon``, the formula in many papers (Dwork, Roth 2014, theorem A.1).

    It is proved for an epsilon below 1 only, so no sound mechanism uses it.
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # imported here because it is slow to load

    return float(brentq(function, low, high, xtol=1e-12, rtol=1e-14))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie between 0 and 1")


_ON_ALL = Gaussian(noise_multiplier=1.0)


class RdpFilter:
    """A privacy filter: refuses releases with adaptively chosen noise that would exceed (epsilon, delta) together.

    If noise is chosen adaptively, composing the costs of the releases is not a guarantee; a filter is (Feldman, Zrnic
    2021, arXiv:2008.11193, theorem 3.1; Lecuyer 2021, arXiv:2103.01379). At one Renyi order, fixed beforehand, the
    divergences of all releases may sum to at most ``bound``; then everything released is (epsilon, delta)-DP by the
    conversion of Canonne, Kamath, Steinke 2020 (arXiv:2004.00010, proposition 12).

    Args:
        epsilon: the bound of epsilon.
        delta: the bound of delta.
        first: the first release, whose cost no outcome has decided; the order is the one that admits most of its like,
            or, if it is not Gaussian, most Gaussian releases.

    Attributes:
        order: the Renyi order, an integer.
        bound: the largest sum of divergences at that order.
    """

    def __init__(self, epsilon: float, delta: float, first: Event = _ON_ALL) -> None:
        _check_delta(delta)
        self._delta = delta
        once = _once(first)
        self.order, self.bound = max(
            ((order, _room(order, epsilon, delta)) for order in range(2, 1025)),
            key=lambda pair: pair[1] / renyi(once, pair[0]),
        )

    def allows(self, events: Events) -> bool:
        """Whether all ``events`` together stay within the bound."""
        return self._divergence(events) <= self.bound

    def share(self, events: Events) -> float:
        """The share of the bound that ``events`` use up; infinite if the bound is not positive."""
        return self._divergence(events) / self.bound if self.bound > 0 else math.inf

    def epsilon(self, events: Events) -> float:
        """The epsilon of ``events`` at the filter's order; 0 for no events."""
        spent = self._divergence(events)
        return max(0.0, spent - _room(self.order, 0.0, self._delta)) if spent else 0.0

    def _divergence(self, events: Events) -> float:
        # sorted by noise, so that rounding does not depend on the order of releases
        merged = sorted(_merged_counts(_counted(events)), key=lambda pair: getattr(pair[0], "noise_multiplier", 0.0))
        return sum(times * renyi(event, self.order) for event, times in merged)


def rdp_filter(epsilon: float, delta: float, first: Event = _ON_ALL) -> RdpFilter:
    """`RdpFilter`, cached by its arguments."""
    return _filter(epsilon, delta, _once(first))


def _once(first: Event) -> Gaussian:
    """The step whose order a filter takes."""
    return first.model_copy(update={"count": 1}) if isinstance(first, Gaussian) else _ON_ALL


_filter = lru_cache(maxsize=1024)(RdpFilter)


def _room(order: int, epsilon: float, delta: float) -> float:
    """The divergence at ``order`` that implies (epsilon, delta)-DP."""
    return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)


_TINY = 1e-4
"""Epsilon of a pure guarantee below which its divergence is taken by a bound, larger by .01 % at order 256."""


@lru_cache(maxsize=4096)
def renyi(event: Event, order: int) -> float:
    """The Renyi divergence of an event at an integer order of 2 or more.

    Gaussian: ``a / 2s^2`` (Mironov 2017, arXiv:1702.07476, proposition 7). On a Poisson sample (Mironov, Talwar, Zhang
    2019, arXiv:1908.10530, section 3.3): ``1/(a-1) ln sum_i C(a,i) (1-q)^(a-i) q^i e^((i^2-i)/2s^2)``. Pure: of binary
    randomised response; below `_TINY` its bound ``a epsilon^2 / 2`` (Bun and Steinke 2016, proposition 1.4).
    """
    if isinstance(event, Unbounded):
        return math.inf
    if isinstance(event, Pure):
        if event.epsilon < _TINY:  # where the logarithm below has rounding alone, which may be negative
            return order * event.epsilon**2 / 2
        keep, swap = 1 / (1 + math.exp(-event.epsilon)), 1 / (1 + math.exp(event.epsilon))
        terms = [order * math.log(a) + (1 - order) * math.log(b) for a, b in ((keep, swap), (swap, keep))]
        return float(logsumexp(terms)) / (order - 1)
    q, variance = event.sampling, event.noise_multiplier**2
    if q == 1:
        return event.count * order / (2 * variance)
    i = np.arange(order + 1)
    choose = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    terms = choose + (order - i) * math.log1p(-q) + i * math.log(q) + (i * i - i) / (2 * variance)
    return event.count * max(0.0, float(logsumexp(terms))) / (order - 1)  # rounding must not make a filter's sum fall


RENYI_SHARE = 1e-5
"""The Renyi filter's share of delta where the Gaussian one has the rest, as little as methods' noise has to spare."""


def admits(events: Events, first: Event, epsilon: float, delta: float) -> bool:
    """Whether the filters admit ``events`` under (epsilon, delta), for mechanisms that an adversary chose adaptively.

    Args:
        events: releases that one record may have influenced, the next one included, each once or with its number of
            times; costs of one unit.
        first: the first release of the whole ledger, whichever records it used.
        epsilon: the bound of epsilon, fixed before the first release.
        delta: the bound of delta.
    """
    counted = _counted(events)
    if any(isinstance(event, Unbounded) for event, _ in counted):
        return False
    pure = [times * event.epsilon for event, times in counted if isinstance(event, Pure)]
    if len(pure) == len(counted) and sum(pure) <= epsilon * (1 + 1e-12):  # rounding
        return True
    if not _is_whole(first):
        return rdp_filter(epsilon, delta, first).allows(events)
    whole = _whole(counted)
    if len(whole) == len(counted):
        if gaussian_delta(sum(whole) ** -0.5, epsilon) <= delta * (1 - RENYI_SHARE):
            return True
    return rdp_filter(epsilon, delta * RENYI_SHARE, first).allows(events)


class Use(NamedTuple):
    """The part of a bound that releases use up.

    Attributes:
        epsilon: an epsilon that bounds them, by the filter that has most room for them.
        share: the share of that filter's bound, 1 for all of it.
    """

    epsilon: float
    share: float


def _whole(counted: Sequence[tuple[Event, int]]) -> list[float]:
    """The precisions of the Gaussian releases on all records among some."""
    return [times * (event.count / event.noise_multiplier**2) for event, times in counted if _is_whole(event)]


def used(events: Events, first: Event, epsilon: float, delta: float) -> Use:
    """The use that ``events`` make of the bound; arguments as of `admits`, which admits a share up to 1."""
    counted = _counted(events)
    if not counted:
        return Use(0.0, 0.0)
    if any(isinstance(event, Unbounded) for event, _ in counted):
        return Use(math.inf, math.inf)
    ways = []
    pure = [times * event.epsilon for event, times in counted if isinstance(event, Pure)]
    if len(pure) == len(counted):
        ways.append(Use(sum(pure), sum(pure) / epsilon))
    is_whole, whole = _is_whole(first), _whole(counted)
    if is_whole and len(whole) == len(counted):
        precision, own = sum(whole), delta * (1 - RENYI_SHARE)
        share = precision * gaussian_noise(epsilon, own) ** 2
        ways.append(Use(gaussian_epsilon(precision**-0.5, own), share))
    renyi = rdp_filter(epsilon, delta * RENYI_SHARE if is_whole else delta, first)
    ways.append(Use(renyi.epsilon(events), renyi.share(events)))
    return min(ways, key=lambda use: use.share)


def shares(uses: Mapping[Unit, Use]) -> dict[str, dict[str, float | None]]:
    """Uses by unit as JSON; None stands for no bound."""
    return {
        unit: {name: value if math.isfinite(value) else None for name, value in use._asdict().items()}
        for unit, use in uses.items()
    }


def _is_whole(event: Event) -> TypeIs[Gaussian]:
    return isinstance(event, Gaussian) and event.sampling == 1


def of_records(event: Event, size: int) -> Event:
    """The cost of a release on all records, for ``size`` records that are added or removed together.

    They move the exact value by ``size`` sensitivities at most, and a pure release's likelihood by ``size`` factors.
    """
    if isinstance(event, Gaussian):
        return event.model_copy(update={"noise_multiplier": event.noise_multiplier / size})
    return Pure(epsilon=size * event.epsilon) if isinstance(event, Pure) else event


def for_replaced_labels(event: Event) -> list[Event]:
    """The cost, where one record's label is replaced, of a release that costs ``event`` where a record is added.

    The record with the old label is removed and that with the new one is added, in a sum by at most twice the
    sensitivity. Of noise on samples, the release is counted as if on all records, which dominates it.
    """
    if isinstance(event, Gaussian):
        return [Gaussian(noise_multiplier=max(event.noise_multiplier / 2, 1e-9), count=event.count)]
    return [event, event] if isinstance(event, Pure) else [event]

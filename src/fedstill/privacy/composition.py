"""Composition of releases that an adversary chooses one after the other, each by the outcomes of those before.

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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedstill.privacy import accounting
from fedstill.privacy.events import Event, Gaussian, Pure, Unbounded, Unit

_SHARE = 1e-5
"""The Renyi filter's share of delta where the Gaussian one has the rest, as little as methods' noise has to spare."""


def admits(events: Sequence[Event], first: Event, epsilon: float, delta: float) -> bool:
    """Whether the filters admit ``events`` under (epsilon, delta), for mechanisms that an adversary chose adaptively.

    Args:
        events: releases that one record may have influenced, the next one included; costs of one unit.
        first: the first release of the whole ledger, whichever records it used.
        epsilon: the bound of epsilon, fixed before the first release.
        delta: the bound of delta, likewise.
    """
    if any(isinstance(event, Unbounded) for event in events):
        return False
    pure = [event.epsilon for event in events if isinstance(event, Pure)]
    if len(pure) == len(events) and sum(pure) <= epsilon * (1 + 1e-12):  # rounding
        return True
    if not _is_whole(first):
        return accounting.rdp_filter(epsilon, delta, first).allows(events)
    whole = [event for event in events if isinstance(event, Gaussian) and event.sampling == 1]
    if len(whole) == len(events):
        precision = sum(event.count / event.noise_multiplier**2 for event in whole)
        if accounting.gaussian_delta(precision**-0.5, epsilon) <= delta * (1 - _SHARE):
            return True
    return accounting.rdp_filter(epsilon, delta * _SHARE, first).allows(events)


class Use(NamedTuple):
    """The part of a bound that releases use up.

    Attributes:
        epsilon: an epsilon that bounds them, by the filter that has most room for them.
        share: the share of that filter's bound, 1 for all of it.
    """

    epsilon: float
    share: float


def used(events: Sequence[Event], first: Event, epsilon: float, delta: float) -> Use:
    """The use that ``events`` make of the bound; arguments as of `admits`, which admits a share up to 1."""
    if not events:
        return Use(0.0, 0.0)
    if any(isinstance(event, Unbounded) for event in events):
        return Use(math.inf, math.inf)
    ways = []
    pure = [event.epsilon for event in events if isinstance(event, Pure)]
    if len(pure) == len(events):
        ways.append(Use(sum(pure), sum(pure) / epsilon))
    is_whole = _is_whole(first)
    whole = [event for event in events if isinstance(event, Gaussian) and event.sampling == 1]
    if is_whole and len(whole) == len(events):
        precision, own = sum(event.count / event.noise_multiplier**2 for event in whole), delta * (1 - _SHARE)
        share = precision * accounting.gaussian_noise(epsilon, own) ** 2
        ways.append(Use(accounting.gaussian_epsilon(precision**-0.5, own), share))
    renyi = accounting.rdp_filter(epsilon, delta * _SHARE if is_whole else delta, first)
    ways.append(Use(renyi.epsilon(events), renyi.share(events)))
    return min(ways, key=lambda use: use.share)


def shares(uses: Mapping[Unit, Use]) -> dict[str, dict[str, float | None]]:
    """Uses by unit as JSON; None stands for no bound."""
    return {
        unit: {name: value if math.isfinite(value) else None for name, value in use._asdict().items()}
        for unit, use in uses.items()
    }


def _is_whole(event: Event) -> bool:
    return isinstance(event, Gaussian) and event.sampling == 1


def for_replaced_labels(event: Event) -> list[Event]:
    """The cost, where one record's label is replaced, of a release that costs ``event`` where a record is added.

    The record with the old label is removed and that with the new one is added, in a sum by at most twice the
    sensitivity. Of noise on samples, the release is counted as if on all records, which dominates it.
    """
    if isinstance(event, Gaussian):
        return [Gaussian(noise_multiplier=max(event.noise_multiplier / 2, 1e-9), count=event.count)]
    return [event, event] if isinstance(event, Pure) else [event]

"""Composition by dp-accounting, in a separate module because that library loads slowly."""

import math
from collections.abc import Iterable

import dp_accounting
from dp_accounting.pld import PLDAccountant

from fedstill.privacy.events import Event, Pure, Unbounded, Unit


def dp_event(event: Event) -> dp_accounting.DpEvent:
    """The same event as a class of dp-accounting.

    A pure mechanism becomes binary randomised response of its epsilon, which dominates every epsilon-DP mechanism
    (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, theorem 2): a fair coin with probability ``p = 2 / (1 + e^epsilon)``.
    """
    if isinstance(event, Pure):
        return dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(event.epsilon)), 2)
    if isinstance(event, Unbounded):
        return dp_accounting.NonPrivateDpEvent()
    once: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    if event.sampling < 1:
        once = dp_accounting.PoissonSampledDpEvent(event.sampling, once)
    return once if event.count == 1 else dp_accounting.SelfComposedDpEvent(once, event.count)


def epsilon(events: Iterable[Event], delta: float, unit: Unit) -> float:
    """The epsilon of all ``events`` together at ``delta``; ValueError if an event has no accountant for ``unit``."""
    relation = dp_accounting.NeighboringRelation
    accountant = PLDAccountant(relation.REPLACE_ONE if unit == "label" else relation.ADD_OR_REMOVE_ONE)
    for event in events:
        theirs = dp_event(event)
        if not accountant.supports(theirs):
            raise ValueError(f"{event} has no accountant for the unit '{unit}'")
        accountant.compose(theirs)
    return float(accountant.get_epsilon(delta))

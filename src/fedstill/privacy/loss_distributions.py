"""Composition by dp-accounting's privacy loss distributions, in a separate module because that library loads slowly."""

from collections.abc import Iterable

import dp_accounting
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld

from fedstill.privacy.events import Gaussian, Pure, Unit


def _distribution(event: Gaussian | Pure, relation: dp_accounting.NeighboringRelation) -> pld.PrivacyLossDistribution:
    """The privacy loss distribution of an event, rounded to the safe side.

    That of a pure mechanism is binary randomised response's, which dominates every epsilon-DP mechanism whatever its
    neighbours are (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, theorem 2).
    """
    if isinstance(event, Pure):
        return pld.from_privacy_parameters(common.DifferentialPrivacyParameters(event.epsilon, 0.0))
    if event.sampling == 1:  # several are one of more precision
        return pld.from_gaussian_mechanism(event.noise_multiplier / event.count**0.5, neighboring_relation=relation)
    once = pld.from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sampling, neighboring_relation=relation
    )
    return once if event.count == 1 else once.self_compose(event.count)


def epsilon(events: Iterable[Gaussian | Pure], delta: float, unit: Unit) -> float:
    """The epsilon of all ``events`` together at ``delta``, for neighbours of ``unit``."""
    relations = dp_accounting.NeighboringRelation
    relation = relations.REPLACE_ONE if unit == "label" else relations.ADD_OR_REMOVE_ONE
    total = pld.identity()
    for event in events:
        total = total.compose(_distribution(event, relation))
    return float(total.get_epsilon_for_delta(delta))

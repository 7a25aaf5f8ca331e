"""Adversaries that choose each release by the outcomes of those before, by exact computation against the filters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from adaptive import BUDGETS, STARTS, Outcomes, continuations, largest, most, outcomes, worst

from fedstill.privacy import accounting
from fedstill.privacy.accounting import admits, for_replaced_labels
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS, ids=str)
def test_no_adaptive_strategy_exceeds_the_budget(epsilon: float, delta: float) -> None:
    """29 beginnings, each with the best of 7 continuations for every outcome: 203 strategies and all their mixtures."""
    tried = 0
    for start in STARTS:

        def allowed(events: Sequence[Event], first: Event = start[0]) -> bool:
            return admits(events, first, epsilon, delta)

        if allowed(start):
            tried += 1
            assert worst(start, continuations(start, allowed), epsilon) <= delta * (1 + 1e-3), start
    assert tried >= 12


@pytest.mark.parametrize(("epsilon", "delta", "factor"), [(4.0, 1e-5, 1.8), (1.0, 1e-5, 1.5)])
def test_a_sum_for_fixed_lists_is_exceeded(epsilon: float, delta: float, factor: float) -> None:
    """The same computation catches composition as if all releases were fixed in advance."""

    def fixed(events: Sequence[Event]) -> bool:
        counts = {event: events.count(event) for event in dict.fromkeys(events)}
        found = Outcomes(np.zeros(1), np.ones(1))
        for event, n in counts.items():
            other = outcomes([event] * n)
            found = Outcomes(
                np.add.outer(found.losses, other.losses).ravel(),
                np.multiply.outer(found.probabilities, other.probabilities).ravel(),
            )
        return float(found.excess(np.array([epsilon]))[0]) <= delta

    start: list[Event] = [Pure(epsilon=0.02)] * 32
    pures = [
        most(lambda n, e=e: [Pure(epsilon=e)] * n, lambda more: fixed([*start, *more]), 500) for e in (0.02, 0.1, 0.5)
    ]
    pures.append(largest(start, "pure", fixed))
    seen = outcomes(start)
    best = np.max([outcomes(more).excess(epsilon - seen.losses) for more in pures], axis=0)
    assert float((seen.probabilities * best).sum()) > factor * delta


def test_what_one_release_costs_fits_its_budget_exactly() -> None:
    for epsilon in (0.1, 1.0, 4.0, 8.0):
        noise = accounting.release_noise(epsilon, 1e-5)
        whole = [Gaussian(noise_multiplier=noise)]
        assert admits(whole, whole[0], epsilon, 1e-5)
        assert not admits([Gaussian(noise_multiplier=noise * 0.999)], whole[0], epsilon, 1e-5)
        shares = [Gaussian(noise_multiplier=accounting.release_noise(epsilon, 1e-5, share)) for share in (0.25, 0.75)]
        assert admits(shares, shares[0], epsilon, 1e-5)
        pure = [Pure(epsilon=epsilon)]
        assert admits(pure, pure[0], epsilon, 1e-5) and not admits([*pure, *pure], pure[0], epsilon, 1e-30)


@pytest.mark.parametrize(
    ("events", "unit", "words"),
    [
        ([Pure(epsilon=0.3)], "record", "a single release"),
        ([Gaussian(noise_multiplier=4.0)], "record", "a single Gaussian release, exactly (Balle, Wang 2018)"),
        (
            [Gaussian(noise_multiplier=4.0, count=3)],
            "record",
            "Gaussian releases as one with the noise of all, exactly",
        ),
        ([Gaussian(noise_multiplier=4.0)], "label", "privacy loss distributions (dp-accounting)"),
        (
            [Gaussian(noise_multiplier=4.0), Pure(epsilon=0.3)],
            "record",
            "privacy loss distributions (dp-accounting) or R",
        ),
        (
            [Pure(epsilon=1e-5)] * 200,
            "label",
            "privacy loss distributions (dp-accounting), Renyi divergences or the sum",
        ),
        ([Gaussian(noise_multiplier=2.0, sampling=0.1, count=9)], "record", "privacy loss distributions"),
        ([Gaussian(noise_multiplier=9.0, sampling=0.1, count=10**8)], "record", "Renyi divergences"),
    ],
)
def test_the_way_in_which_releases_were_added_up_is_named(events: list[Event], unit: Any, words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if "loss" not in words:
            patch.delattr(accounting, "pld_epsilon")
        if "Renyi" not in words and "loss" not in words:
            patch.delattr(accounting, "_renyi_epsilon")
        accounting.epsilon(events, 1.1e-5, unit)  # no value that another test has made
    assert accounting.accountant(events, unit).startswith(words)


def test_kinds_are_not_added_up_with_the_exact_sum_of_one() -> None:
    one = Gaussian(noise_multiplier=accounting.release_noise(0.6, 1e-5))
    assert admits([one], one, 1.0, 1e-5)
    assert not admits([one, Pure(epsilon=0.4)], one, 1.0, 1e-5)
    sampled = Gaussian(noise_multiplier=5.0, sampling=0.05, count=20)
    assert admits([sampled], sampled, 1.0, 1e-5) == accounting.rdp_filter(1.0, 1e-5).allows([sampled])
    assert not admits([Unbounded(reason="none")], one, 1.0, 1e-5)


@pytest.mark.parametrize(("sampling", "epsilon", "share", "count"), [(1.0, 4.0, 1e-5, 10), (0.5, 2.0, 1.0, 100)])
def test_the_first_release_alone_chooses_the_order(sampling: float, epsilon: float, share: float, count: int) -> None:
    """Were it the last, an adversary could choose the order by what the releases before have told.

    Beside the exact filter for noise on all records, this filter has ``share`` of delta.
    """
    first = Gaussian(noise_multiplier=5.0, sampling=sampling)
    later = Gaussian(noise_multiplier=1.0, sampling=0.01, count=count)
    assert accounting.rdp_filter(epsilon, 1e-5 * share, later).allows([first, later])
    assert not admits([first, later], first, epsilon, 1e-5)


def test_a_replaced_label_is_a_record_removed_and_one_added() -> None:
    assert for_replaced_labels(Gaussian(noise_multiplier=4.0, count=3)) == [Gaussian(noise_multiplier=2.0, count=3)]
    # on samples: at least what the exact accountant says
    event = Gaussian(noise_multiplier=4.0, sampling=0.1, count=3)
    bound = accounting.epsilon(for_replaced_labels(event), 1e-5, "record")
    assert bound >= accounting.epsilon([event], 1e-5, "label")
    assert for_replaced_labels(Pure(epsilon=0.3)) == [Pure(epsilon=0.3)] * 2


@pytest.mark.parametrize("kind", [Pure(epsilon=0.3), Gaussian(noise_multiplier=3.0, sampling=0.2)])
def test_no_release_is_left_out_of_the_use_of_a_bound(kind: Event) -> None:
    """Of releases of several kinds the Gaussian filter's sum would count only the Gaussian ones."""
    whole = Gaussian(noise_multiplier=8.0)
    both, one = (accounting.used(events, whole, 2.0, 1e-5) for events in ([whole, kind], [whole]))
    renyi = accounting.rdp_filter(2.0, 1e-5 * accounting.RENYI_SHARE, whole)
    assert both.share == pytest.approx(renyi.share([whole, kind])) and both.share > one.share
    assert one.share == pytest.approx(accounting.gaussian_noise(2.0, 1e-5 * (1 - accounting.RENYI_SHARE)) ** 2 / 64)
    assert one.epsilon == pytest.approx(accounting.gaussian_epsilon(8.0, 1e-5 * (1 - accounting.RENYI_SHARE)))

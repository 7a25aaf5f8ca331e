"""The accounting against dp-accounting itself, closed forms and published numbers."""

import math
import os
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.privacy import accounting
from fedstill.privacy.accounting import RdpFilter
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded, Unit


def theirs_of(event: Event) -> dp_accounting.DpEvent:
    """The same event as a class of dp-accounting."""
    assert isinstance(event, Gaussian)
    once: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    return once if event.sampling == 1 else dp_accounting.PoissonSampledDpEvent(event.sampling, once)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_sequences_cost_what_dp_accounting_says(part: int) -> None:
    rng = np.random.default_rng([part, 0])
    for _ in range(50 if os.environ.get("FEDSTILL_SLOW") else 10):
        events, theirs = [], PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        for _ in range(rng.integers(1, 3)):
            noise, count = float(rng.uniform(1.5, 8)), int(rng.integers(1, 4))
            sampling = float(rng.choice([1.0, 0.3, 0.05], p=[0.8, 0.1, 0.1]))
            events.append(Gaussian(noise_multiplier=noise, count=count, sampling=sampling))
            one = dp_accounting.GaussianDpEvent(noise)
            theirs.compose(one if sampling == 1 else dp_accounting.PoissonSampledDpEvent(sampling, one), count)
        delta = float(10 ** -rng.uniform(2, 8))
        ours, expected = accounting.epsilon(events, delta, "record"), theirs.get_epsilon(delta)
        # exact without sampling; with it, full Gaussians are merged before they are rounded up, and theirs are not
        low, high = (1e-6, 1e-12) if all(event.sampling == 1 for event in events) else (1e-7, 1e-9)
        assert expected * (1 - low) <= ours <= expected * (1 + high)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-4, 1e-3, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("share", [1 / 6, 0.5])
def test_the_shares_of_a_budget_cost_the_budget(epsilon: float, share: float) -> None:
    """At small epsilons the discretised composition costs up to 4.5 times as much."""
    noises = [accounting.release_noise(epsilon, 1e-5, precision_share=part) for part in (share, 1 - share)]
    events = [Gaussian(noise_multiplier=noise) for noise in noises if noise is not None]
    assert accounting.epsilon(events, 1e-5, "record") == pytest.approx(epsilon, rel=1e-4)
    assert accounting.epsilon(events, 1e-5, "record") <= epsilon * (1 + 1e-9)


def test_full_gaussians_compose_to_one_gaussian() -> None:
    events = [Gaussian(noise_multiplier=3.0), Gaussian(noise_multiplier=4.0, count=2)]
    together = 1 / math.sqrt(1 / 9 + 2 / 16)
    found = accounting.epsilon(events, 1e-5, "record")
    assert found == pytest.approx(accounting.gaussian_epsilon(together, 1e-5), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0, 10.0])
def test_calibrated_noise_gives_back_its_epsilon(epsilon: float, delta: float) -> None:
    noise = accounting.gaussian_noise(epsilon, delta)
    event = Gaussian(noise_multiplier=noise)
    assert accounting.gaussian_delta(noise, epsilon) <= delta
    assert accounting.gaussian_delta(noise * 0.999, epsilon) > delta
    assert accounting.gaussian_epsilon(noise, delta) == pytest.approx(epsilon, rel=1e-4)
    assert accounting.epsilon([event], delta, "record") == pytest.approx(epsilon, rel=1e-3)
    split = [Gaussian(noise_multiplier=accounting.release_noise(epsilon, delta, share)) for share in (0.25, 0.75)]
    assert accounting.epsilon(split, delta, "record") == pytest.approx(epsilon, rel=1e-3)
    assert accounting.epsilon(split, delta, "record") <= epsilon  # so a ledger with that budget accepts both


@pytest.mark.parametrize(
    ("epsilon", "noise"), [(0.01, 244), (0.1, 30.8), (0.5, 7.03), (1, 3.73), (5, 0.89), (10, 0.500)]
)
def test_the_noise_is_that_of_the_published_table(epsilon: float, noise: float) -> None:
    """spec: sigma by Delta at delta 1e-5 with the analytic Gaussian mechanism."""
    assert accounting.gaussian_noise(epsilon, 1e-5) == pytest.approx(noise, rel=6e-3)


def test_the_classic_formula_is_wrong_above_1() -> None:
    classic = math.sqrt(2 * math.log(1.25 / 1e-5)) / 10
    assert accounting.gaussian_delta(classic, 10) == pytest.approx(2.3e-5, rel=0.05)


def test_delta_against_numerical_integration() -> None:
    noise, epsilon = 1.7, 0.8
    x = np.linspace(-30, 30, 2_000_001)
    p = np.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    q = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    expected = np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x)
    assert accounting.gaussian_delta(noise, epsilon) == pytest.approx(expected, abs=1e-9)


def test_pure_releases() -> None:
    assert accounting.epsilon([Pure(epsilon=1.5)], 1e-5, "label") == 1.5
    twice = accounting.epsilon([Pure(epsilon=0.5)] * 2, 1e-9, "label")
    assert 0.9 < twice <= 1.0 + 1e-3
    many = accounting.epsilon([Pure(epsilon=0.1)] * 50, 1e-5, "label")
    assert many < 5  # advanced composition


def test_unbounded_is_unbounded_whatever_stands_beside_it() -> None:
    events = [Gaussian(noise_multiplier=5.0), Unbounded(reason="no noise")]
    assert accounting.epsilon(events, 1e-5, "record") == math.inf
    assert accounting.renyi(events[1], 8) == math.inf


@settings(max_examples=60, deadline=None)
@given(
    noise=st.floats(0.5, 10),
    sampling=st.sampled_from([1.0, 0.5, 0.1, 0.01]),
    count=st.integers(1, 200),
    order=st.integers(2, 64),
)
def test_renyi_divergences_are_those_of_dp_accounting(noise: float, sampling: float, count: int, order: int) -> None:
    accountant = RdpAccountant(orders=[float(order)])
    accountant.compose(theirs_of(Gaussian(noise_multiplier=noise, sampling=sampling)), count)
    delta = 1e-12
    epsilon = accountant.get_epsilon(delta)  # = divergence + log1p(-1/a) - (ln delta + ln a) / (a - 1)
    expected = epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    found = accounting.renyi(Gaussian(noise_multiplier=noise, sampling=sampling, count=count), order)
    if epsilon > 0:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_renyi_divergence_of_pure_releases_is_below_theirs() -> None:
    for epsilon in (0.1, 1.0, 5.0):
        for order in (2, 8, 200):
            assert 0 < accounting.renyi(Pure(epsilon=epsilon), order) <= epsilon
    assert accounting.renyi(Pure(epsilon=1.0), 900) == pytest.approx(1.0, abs=0.01)


def test_a_filter_stops_before_its_bound_and_never_later_than_the_truth() -> None:
    watch = RdpFilter(2.0, 1e-5)
    events: list[Gaussian] = []
    rng = np.random.default_rng(1)
    while True:
        following = [*events, Gaussian(noise_multiplier=float(rng.uniform(5, 15)))]
        if not watch.allows(following):
            break
        events = following
    spent = accounting.epsilon(events, 1e-5, "record")
    assert 1.5 < spent <= 2.0  # close to what exact composition of fixed noise would allow, on its safe side
    assert not watch.allows([Unbounded(reason="x")])


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_impossible_deltas(delta: float) -> None:
    for call in (
        lambda: accounting.gaussian_noise(1, delta),
        lambda: accounting.epsilon([], delta, "record"),
        lambda: RdpFilter(1, delta),
    ):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            call()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e300, math.inf, math.nan])
def test_impossible_epsilons(epsilon: float) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        accounting.gaussian_noise(epsilon, 1e-5)


def test_what_the_filter_states_does_not_depend_on_the_order_of_releases() -> None:
    events: list[Event] = [Gaussian(noise_multiplier=5 * 0.97**i, sampling=0.3, count=20) for i in range(12)]
    events += [Pure(epsilon=0.1), events[0]]
    account = accounting.rdp_filter(2.0, 1e-5)
    rng = np.random.default_rng(0)
    assert len({account.epsilon([events[i] for i in rng.permutation(len(events))]) for _ in range(50)}) == 1
    assert account.epsilon(events) > account.epsilon(events[1:])  # equal ones count as often as they occur


def adaptive_schedule(number: int) -> tuple[float, float, list[Gaussian], Gaussian]:
    """What a filter admits of steps whose noise and sampling follow coins and what went before, and the refused one."""
    rng = np.random.default_rng(number)
    budget, delta = float(rng.uniform(0.5, 8)), float(10 ** rng.uniform(-7, -4))
    account, admitted = accounting.rdp_filter(budget, delta), []
    noise = float(rng.uniform(1, 4))
    while True:
        noise = max(0.6, noise * float(rng.choice([0.7, 1.0, 1.1])))
        sampling, count = float(rng.choice([0.05, 0.3, 1.0])), int(rng.choice([1, 20]))
        step = Gaussian(noise_multiplier=noise, sampling=sampling, count=count)
        if not account.allows([*admitted, step]):
            return budget, delta, admitted, step
        admitted.append(step)


@pytest.mark.slow
def test_the_filter_never_lets_a_schedule_past_its_budget_and_leaves_less_than_one_step() -> None:
    for number in range(1000):
        budget, delta, admitted, refused = adaptive_schedule(number)
        account = accounting.rdp_filter(budget, delta)
        theirs = RdpAccountant([account.order])
        for step in admitted:
            theirs.compose(theirs_of(step), step.count)
        if admitted:
            assert theirs.get_epsilon(delta) <= budget * (1 + 1e-9)
            assert account.epsilon(admitted) == pytest.approx(theirs.get_epsilon(delta), rel=1e-6)
        assert theirs.compose(theirs_of(refused), refused.count).get_epsilon(delta) > budget


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 1000, 100))
def test_what_the_filter_admits_costs_less_by_privacy_loss_distributions(number: int) -> None:
    budget, delta, admitted, _ = adaptive_schedule(number)
    assert accounting.epsilon(admitted, delta, "record") <= budget


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "events",
    [
        [Gaussian(noise_multiplier=1e9, sampling=0.5, count=10**9)],
        [Gaussian(noise_multiplier=1.0, sampling=1e-9, count=10**9)],
        [Gaussian(noise_multiplier=0.31 + i / 1000, sampling=0.5 - i / 1000) for i in range(100)],
        [Pure(epsilon=1e300)] * 100,
        [Pure(epsilon=501.0), Gaussian(noise_multiplier=1.0)],
    ],
)
def test_events_that_somebody_invents_are_added_up_in_no_time(events: list[Event]) -> None:
    began = time.process_time()
    assert accounting.epsilon(events, 1e-5, "record") >= 0
    assert time.process_time() - began < 60


def test_many_kinds_of_noise_on_samples_cost_at_least_their_exact_epsilon() -> None:
    kinds = [Gaussian(noise_multiplier=2.0 + i / 10, sampling=0.05, count=10) for i in range(17)]
    merged = [Gaussian(noise_multiplier=3.6, sampling=0.05, count=170)]  # the most noise of all of them
    exact, bound = accounting.epsilon(merged, 1e-5, "record"), accounting.epsilon(kinds, 1e-5, "record")
    assert exact < bound < 3 * exact


def test_a_count_beyond_any_training_is_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 1000000000"):
        Gaussian(noise_multiplier=1.0, sampling=0.5, count=10**12)


def test_pure_releases_of_records_add_up_alone_and_beside_gaussians() -> None:
    twice = accounting.epsilon([Pure(epsilon=0.1)] * 2, 1e-5, "record")
    assert 0.19 < twice <= 0.2 + 1e-9
    noisy = Gaussian(noise_multiplier=10.0)
    mixed, alone = (accounting.epsilon([*pure, noisy], 1e-5, "record") for pure in ([Pure(epsilon=0.1)], []))
    # an adversary who sees randomised response and then the Gaussian: delta at x, written out
    p = 1 / (1 + math.exp(-0.1))
    delta = sum(weight * accounting.gaussian_delta(10.0, mixed - loss) for weight, loss in ((p, 0.1), (1 - p, -0.1)))
    assert alone < mixed < alone + 0.1 and delta <= 1e-5 * (1 + 1e-6)
    assert delta == pytest.approx(1e-5, rel=0.02)  # and not much more than needed


def test_a_replaced_label_has_twice_the_influence_of_a_record_on_a_gaussian_release() -> None:
    noisy, unlike = Gaussian(noise_multiplier=5.0), Pure(epsilon=0.1)
    alone = accounting.epsilon([noisy], 1e-5, "label")
    assert alone == pytest.approx(accounting.gaussian_epsilon(2.5, 1e-5), rel=1e-3)
    assert alone < accounting.epsilon([noisy, unlike], 1e-5, "label") < alone + 0.1


@pytest.mark.parametrize(
    ("events", "unit"),
    [
        ([Gaussian(noise_multiplier=20.0, sampling=1e-4, count=10**5)], "record"),
        ([Pure(epsilon=1e-6)] * 5, "record"),
        ([Pure(epsilon=1e-6)] * 5, "label"),
    ],
)
def test_tiny_losses_cost_no_more_than_the_simple_bounds(events: list[Event], unit: Unit) -> None:
    found = accounting.epsilon(events, 1e-5, unit)
    if isinstance(events[0], Pure):
        assert found <= 5e-6 * (1 + 1e-9)  # basic composition
    else:
        accountant = RdpAccountant()
        accountant.compose(theirs_of(events[0]), 10**5)
        assert found <= accountant.get_epsilon(1e-5) * 1.01 < 0.006  # loss distributions: 0.016


@pytest.mark.parametrize(("noise", "sampling", "count"), [(1.2, 0.01, 500), (1.0, 0.01, 1000), (0.8, 0.005, 2000)])
def test_a_filter_for_noise_on_samples_needs_a_third_more_than_the_exact_cost(
    noise: float, sampling: float, count: int
) -> None:
    """At the order of unsampled noise these would need 40 to 77 % more."""
    step = Gaussian(noise_multiplier=noise, sampling=sampling)
    every = step.model_copy(update={"count": count})
    exact = accounting.epsilon([every], 1e-5, "record")
    assert RdpFilter(1.33 * exact, 1e-5, step).allows([every])
    assert not RdpFilter(exact, 1e-5, step).allows([every])
    assert RdpFilter(2.0, 1e-5, every).order == RdpFilter(2.0, 1e-5, step).order  # one step decides, not their number
    assert RdpFilter(2.0, 1e-5, Gaussian(noise_multiplier=7.0)).order == RdpFilter(2.0, 1e-5).order


def test_a_charge_never_lowers_a_renyi_sum() -> None:
    """Rounding gave a negative divergence for strong noise, so that a filter's share fell with a charge."""
    for noise in (1.0, 1e2, 1e4, 1e6, 1e8):
        for rate in (1e-6, 0.1, 0.5, 0.999):
            event = Gaussian(noise_multiplier=noise, sampling=rate, count=10**9)
            assert all(accounting.renyi(event, order) >= 0 for order in (2, 3, 16, 64, 255))


@pytest.mark.parametrize("order", [2, 16, 256])
def test_no_pure_release_costs_less_than_nothing(order: int) -> None:
    """At an epsilon of 1e-9 rounding made a divergence of -1e-17, and a share of a budget below 0."""
    for power in np.arange(-12, -1, 0.25):
        epsilon = float(10**power)
        exact = order * epsilon**2 / 2  # to the second order
        assert exact * (1 - order * epsilon) <= accounting.renyi(Pure(epsilon=epsilon), order) <= exact * (1 + 1e-7)
    assert accounting.used([Pure(epsilon=1e-9)], Pure(epsilon=1e-9), 2.0, 1e-5).share > 0

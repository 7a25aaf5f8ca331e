"""Sums of whole numbers: exact for any split and order, with the sensitivity and the noise that they say."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedstill.base import seeds
from fedstill.privacy import lattice
from fedstill.privacy.accounting import gaussian_epsilon
from fedstill.privacy.integer_sums import (
    IntegerClassSums,
    IntegerHead,
    IntegerMoments,
    IntegerUpdate,
    whole_steps,
)
from fedstill.privacy.logistic import LogisticHead
from fedstill.privacy.second_moments import SecondMoments, diagonal_places


def noise(seed: int = 0) -> seeds.Noise:
    return seeds.Simulated(torch.Generator().manual_seed(seed))


def moments(dims: int = 6, **facts: object) -> IntegerMoments:
    settings = {"num_classes": 3, "dims": dims, "radius": 1.0, "noise_multiplier": 0.0, "share": 0.6} | facts
    return IntegerMoments(**settings)


def vector(mechanism: IntegerMoments, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``v = (D, sqrt(2) U, a L H)`` without noise."""
    sums = mechanism(rows, noise())
    places = diagonal_places(mechanism.dims + 1)
    weights = torch.full((sums.second.shape[1],), math.sqrt(2), dtype=torch.float64)
    weights[places] = 1
    return torch.cat([(sums.second * weights).flatten(), mechanism.weight_of_first * sums.first.double().flatten()])


def records(n: int, dims: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, dims, generator=rng), torch.randint(0, 3, (n,), generator=rng)


def test_any_split_order_and_number_of_threads_gives_equal_bits() -> None:
    x, y = records(20_000, 40)
    mechanism = moments(40, by_class=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = mechanism([(x, y)], noise())
        torch.set_num_threads(1)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        pieces = [(x[some], y[some]) for some in order.split([1, 7000, 12, 12_987])]
        parts = [mechanism([piece], noise()) for piece in pieces]
    finally:
        torch.set_num_threads(before)
    assert whole.second.dtype == torch.int64
    assert torch.equal(whole.second, sum(part.second for part in parts))
    assert torch.equal(whole.first, sum(part.first for part in parts))


def test_the_sums_are_those_of_real_numbers_to_a_step() -> None:
    x, y = records(3000, 20, scale=0.2)
    real = SecondMoments(num_classes=3, dims=20, radius=1.0, noise_multiplier=0.0, share=0.6)([(x, y)], noise())
    whole = moments(20, steps=4096)([(x, y)], noise())
    assert (whole.first / 4096 - real.first).abs().max() < 3000 / 4096
    assert (whole.second / 4096**2 - real.second).abs().max() < 2 * 3000 / 4096


@pytest.mark.parametrize("by_class", [False, True])
def test_no_record_moves_the_sums_further_than_the_sensitivity_and_one_exactly_as_far(by_class: bool) -> None:
    """At steps of 10 and a constant of .6 the row (8, 0, ..., 6) has length 10 exactly."""
    mechanism = moments(6, steps=10, bias=0.6, by_class=by_class)
    x, y = records(2000, 6)
    base, largest = vector(mechanism, [(x, y)]), 0.0
    rng = torch.Generator().manual_seed(3)
    for trial in range(1500):
        row = torch.randn(1, 6, generator=rng) * 10 ** float(torch.empty(()).uniform_(-3, 3, generator=rng))
        if trial % 5 == 0:
            row = torch.zeros(1, 6)
            row[0, trial % 6] = 2.0**20 * (-1) ** trial
        label = torch.tensor([trial % 3])
        moved = vector(mechanism, [(x, y), (row, label)]) - base
        largest = max(largest, float(moved.norm()))
    assert largest <= mechanism.sensitivity * (1 + 1e-12)
    assert largest == pytest.approx(mechanism.sensitivity, rel=1e-12)


@pytest.mark.parametrize("steps", [8, 255, 256, 4096])
def test_rounding_makes_no_row_longer(steps: int) -> None:
    """Also rows that float64 rounds to a little more than length 1."""
    rng = np.random.default_rng(steps)
    for dims in (1, 2, 3, 50, 2000):
        rows = torch.from_numpy(rng.normal(size=(300, dims)))
        rows[0], rows[0, 0] = 0, 1
        rows = rows / rows.norm(dim=1, keepdim=True) * (1 + 4e-16)
        whole = whole_steps(rows, steps)
        assert int((whole**2).sum(1).max()) <= steps**2


@pytest.mark.parametrize("dims", [3, 50, 500, 5000])
def test_rounding_makes_rows_neither_shorter_nor_longer_in_the_mean(dims: int) -> None:
    """Rounded toward zero, rows of 5,000 numbers were 11 % shorter, and heads of their sums that much too steep."""
    rng = np.random.default_rng(dims)
    rows = torch.from_numpy(rng.normal(size=(400, dims)))
    rows = rows / rows.norm(dim=1, keepdim=True)
    for length, at_most in ((1.0, 0.01), (0.9, 0.001)):  # those of the largest length may not be longer
        along = (whole_steps(length * rows, 256) * rows).sum(1) / (256 * length)
        assert abs(float(along.mean()) - 1) < at_most
    assert not torch.equal(whole_steps(0.9 * rows, 256), (0.9 * rows * 256).trunc())


@pytest.mark.parametrize("bias", [0.001, 0.1, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("steps", [8, 256])
def test_each_row_has_one_constant_and_no_greater_length(bias: float, steps: int) -> None:
    x, y = records(500, 4, scale=5)
    mechanism = moments(4, bias=bias, steps=steps)
    found = mechanism.rows(x, torch.empty(500, 5, dtype=torch.float64))
    assert set(found[:, -1].tolist()) == {float(mechanism.constant)} and 1 <= mechanism.constant < steps
    assert float(found.square().sum(1).max()) <= steps**2
    sums = mechanism([(x, y)], noise())
    assert (sums.first[:, -1] == torch.bincount(y) * mechanism.constant).all()
    assert int(sums.second[0, -1]) == 500 * mechanism.constant**2


@pytest.mark.parametrize("adders", [1, 9, 90])
def test_the_noise_is_that_of_the_sum_divided_among_the_adders(adders: int) -> None:
    mechanism = moments(60, noise_multiplier=4.0, adders=adders)
    x, y = records(50, 60)
    exact, noisy = moments(60)([(x, y)], noise()), mechanism([(x, y)], noise(5))
    places = diagonal_places(61)
    above = torch.ones(exact.second.shape[1], dtype=torch.bool)
    above[places] = False
    diagonal, off, first = mechanism.scales
    kinds = {
        diagonal: (noisy.second - exact.second)[:, places],
        off: (noisy.second - exact.second)[:, above],
        first: noisy.first - exact.first,
    }
    for scale, found in kinds.items():
        variance, n = lattice.share(4.0 * scale, adders), found.numel()
        statistic = float((found.double() ** 2).sum()) / variance
        low, high = stats.chi2.ppf(1e-6, n), stats.chi2.ppf(1 - 1e-6, n)
        assert low < statistic < high
        if n > 150:
            assert not low < statistic * (2 / 3) ** 2 < high
            assert not low < statistic * (3 / 2) ** 2 < high


def test_the_event_is_the_sum_s_and_alone_that_of_one_client() -> None:
    mechanism = moments(noise_multiplier=4.0, adders=64)
    assert mechanism.event.noise_multiplier == 4.0
    assert mechanism.alone.noise_multiplier == pytest.approx(0.5, rel=2e-2)
    assert mechanism.alone.noise_multiplier < 0.5 * (1 + 1e-9)
    assert gaussian_epsilon(mechanism.alone.noise_multiplier, 1e-5) > gaussian_epsilon(4.0, 1e-5)
    assert moments(adders=5).alone.kind == "none"
    assert "64 honest clients" in mechanism.theorem


def test_class_sums_and_updates_are_clipped_in_whole_numbers() -> None:
    x, y = records(500, 8, scale=30)
    sums = IntegerClassSums(num_classes=3, radius=5.0, noise_multiplier=0.0)
    with_one = sums((torch.cat([x, torch.full((1, 8), 1e5)]), torch.cat([y, torch.tensor([2])])), noise())
    moved = with_one - sums((x, y), noise())
    assert float(moved.double().norm()) <= sums.sensitivity
    assert set(moved.nonzero()[:, 0].tolist()) == {2}
    update = IntegerUpdate(radius=2.0, noise_multiplier=0.0)
    assert float(update(torch.full((9,), 1e9), noise()).double().norm()) <= update.sensitivity
    assert not update(torch.full((9,), math.nan), noise()).any()
    assert float(update(torch.full((4,), 0.25), noise()).double().norm() / 4096 * 2) == pytest.approx(0.5, abs=1e-3)


def head(features: int, penalty: float = 0.3, **facts: float) -> IntegerHead:
    exact = LogisticHead(num_classes=3, penalty=penalty, radius=2.0, noise_multiplier=0.0)
    return IntegerHead(head=exact, features=features, **{"noise_multiplier": 0.0} | facts)


def test_a_head_in_whole_steps_is_the_exact_one_to_half_a_step() -> None:
    x, y = records(2000, 12)
    whole = head(12)
    found = whole((x, y), noise())
    assert found.dtype == torch.int64
    gap = found.double() * whole.step - whole.head((x, y), noise())
    assert float(gap.abs().max()) <= whole.step / 2 * (1 + 1e-9)
    assert float(gap.abs().max()) > whole.step / 3  # steps are no finer than they say


@pytest.mark.parametrize("many", [4000, 60_000])
def test_no_record_moves_a_head_by_more_steps_than_its_sensitivity(many: int) -> None:
    """Short rows of two classes move the head far along a column, with hardly any curvature."""
    whole, x, y = head(5, penalty=0.1), torch.zeros(many, 5), torch.arange(many) % 2
    x[:, 0] = 2.0 * (1 - 2 * y) * min(1.0, 2 * 0.1 * (1 / 0.1 + 12) / many)
    far = torch.zeros(1, 5)
    far[0, 0] = 2.0
    base, moved = whole((x, y), noise()), []
    for row in (far, -far, far * 1e30, torch.full((1, 5), math.nan), *records(5, 5, seed=4, scale=3)[0].split(1)):
        for label in range(3):
            neighbour = (torch.cat([x, row]), torch.cat([y, torch.tensor([label])]))
            moved.append(float((whole(neighbour, noise()) - base).double().norm()))
    assert 0.9 * whole.sensitivity < max(moved) <= whole.sensitivity


def test_the_reach_of_heads_covers_the_longest_total() -> None:
    whole, x = head(6, penalty=0.01), torch.zeros(3000, 6)
    x[:, 0] = torch.tensor([2.0, -2.0]).repeat(1500)
    y = torch.arange(3000) % 2
    one = whole((x, y), noise())
    assert float(one.double().norm()) <= whole.reach(3000, 1)
    assert (
        float((4 * one).double().norm())
        <= whole.reach(12_000, 4)
        < head(6, 0.01, noise_multiplier=3.0).largest(12_000, 4)
    )


def test_the_noise_of_heads_has_the_variance_of_its_share() -> None:
    """1,200 coefficients reject 2/3 and 3/2 of it."""
    x, y = records(50, 400)
    exact, noisy = head(400)((x, y), noise()), head(400, noise_multiplier=4.0, adders=9)((x, y), noise(3))
    variance = lattice.share(4.0 * head(400).sensitivity, 9)
    statistic, n = float(((noisy - exact).double() ** 2).sum()) / variance, exact.numel()
    low, high = stats.chi2.ppf(1e-6, n), stats.chi2.ppf(1 - 1e-6, n)
    assert low < statistic < high
    assert not low < statistic * (2 / 3) ** 2 < high and not low < statistic * (3 / 2) ** 2 < high


def test_a_head_that_has_noise_of_its_own_is_refused() -> None:
    noisy = LogisticHead(num_classes=3, penalty=1.0, radius=1.0, noise_multiplier=2.0)
    with pytest.raises(ValueError, match=r"own noise multiplier is 2\.0"):
        IntegerHead(head=noisy, features=3, noise_multiplier=1.0)


def test_a_row_that_is_not_finite_counts_as_its_constant() -> None:
    clean = moments()([(torch.zeros(1, 6), torch.tensor([1]))], noise())
    broken = moments()([(torch.full((1, 6), math.inf), torch.tensor([1]))], noise())
    assert torch.equal(clean.second, broken.second) and torch.equal(clean.first, broken.first)


@pytest.mark.parametrize(("name", "value"), [("steps", 4), ("steps", 5000), ("adders", 0)])
def test_values_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        moments(**{name: value})


def test_the_reach_covers_the_largest_total() -> None:
    mechanism = moments(noise_multiplier=3.0, adders=10, steps=256)
    x = torch.zeros(4000, 6)
    x[:, 0] = 1e9
    total = moments(steps=256)([(x, torch.zeros(4000, dtype=torch.int64))], noise())
    assert int(total.second.max()) <= mechanism.reach(4000, 10) < mechanism.largest(4000, 10)
    assert int(total.second.max()) > 0.95 * mechanism.reach(4000, 10)

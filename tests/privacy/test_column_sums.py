"""Sums of columns: exact for any split, with the sensitivity and the noise that they say; scales; ranges of totals."""

import math
from functools import reduce
from typing import Any

import pytest
import torch
from scipy import special, stats
from torch import Tensor

from fedstill.base import seeds
from fedstill.privacy import lattice
from fedstill.privacy.accounting import epsilon, release_noise
from fedstill.privacy.column_sums import ColumnSums, ColumnTotals, scale_of
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.sum_ranges import OutOfRange, check_columns

Rows = tuple[Tensor, Tensor]


def noise(seed: int = 0) -> seeds.Noise:
    return seeds.Simulated(torch.Generator().manual_seed(seed))


def sums(columns: int = 5, **facts: Any) -> ColumnSums:
    return ColumnSums(**{"num_classes": 3, "columns": columns, "noise_multiplier": 0.0} | facts)


def records(n: int, columns: int = 5, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(n, columns, generator=rng), torch.randint(0, 3, (n,), generator=rng)


def added(totals: list[ColumnTotals]) -> ColumnTotals:
    return reduce(lambda one, other: ColumnTotals(*map(torch.add, one, other)), totals)


def vector(mechanism: ColumnSums, rows: Rows) -> Tensor:
    """``v = (q, w t, c counts)`` without noise, with the theorem's factors written out."""
    found = mechanism(rows, noise())
    factor = math.sqrt(1 + mechanism.columns / 8)
    return torch.cat([found.values.double(), math.sqrt(0.5) * found.squares.double(), factor * found.counts.double()])


def test_any_split_and_order_gives_equal_bits() -> None:
    x, y = records(25_000)
    mechanism = sums()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    parts = [mechanism((x[some], y[some]), noise()) for some in order.split([1, 7000, 17_999])]
    whole = mechanism((x, y), noise())
    assert all(map(torch.equal, whole, added(parts)))
    assert whole.values.dtype == torch.int64 and int(whole.counts.sum()) == 25_000 * mechanism.steps


@pytest.mark.parametrize("columns", [1, 5, 40])
@pytest.mark.parametrize("steps", [8, 4096])
def test_no_record_moves_the_sums_further_than_the_sensitivity_and_one_exactly_as_far(columns: int, steps: int) -> None:
    mechanism = sums(columns, steps=steps)
    x, y = records(50, columns)
    base, largest = vector(mechanism, (x, y)), 0.0
    rng = torch.Generator().manual_seed(3)
    hostile = [0.0, -1.0, 1.0, math.inf, -math.inf, math.nan, 1 + 1e-7, 0.5 / steps, 1e38, 1 / math.sqrt(2)]
    for trial in range(400):
        row = torch.randn(1, columns, generator=rng) * 10 ** float(torch.empty(()).uniform_(-4, 4, generator=rng))
        if trial < len(hostile):
            row = torch.full((1, columns), hostile[trial])
        with_one = vector(mechanism, (torch.cat([x, row]), torch.cat([y, torch.tensor([trial % 3])])))
        largest = max(largest, float((with_one - base).norm()))
    bound = steps * math.sqrt(1.5 * columns + 1 + columns / 8)
    assert mechanism.sensitivity == pytest.approx(bound, rel=1e-12)
    assert largest == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("label", [3, -1, 10**12])
def test_a_class_outside_of_the_list_shows_in_no_count(label: int) -> None:
    x, y = records(50)
    found = sums()((torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([label])])), noise())
    assert torch.equal(found.counts, sums()((x, y), noise()).counts)


@pytest.mark.parametrize("adders", [1, 9])
def test_the_noise_is_that_of_the_sum_divided_among_the_adders(adders: int) -> None:
    facts = {"columns": 300, "num_classes": 200}
    mechanism, rows = sums(noise_multiplier=2.0, adders=adders, **facts), records(20, 300)
    exact, noisy = sums(**facts)(rows, noise()), mechanism(rows, noise(5))
    whole = 4096 * math.sqrt(1.5 * 300 + 1 + 300 / 8)
    wanted = {"values": whole, "squares": whole * math.sqrt(2), "counts": whole / math.sqrt(1 + 300 / 8)}
    for place, (name, scale) in enumerate(wanted.items()):
        found = (noisy[place] - exact[place]).double()
        statistic = float(found.square().sum()) / lattice.share(2.0 * scale, adders)
        low, high = (float(stats.chi2.ppf(p, found.numel())) for p in (1e-6, 1 - 1e-6))
        assert low < statistic < high, name
        assert not low < statistic * (2 / 3) ** 2 < high and not low < statistic * (3 / 2) ** 2 < high, name
        assert mechanism.spreads(adders)[place] >= 2.0 * scale


@pytest.mark.parametrize("wanted", [0.5, 1.0, 8.0])
def test_epsilon_is_that_of_an_independent_computation(wanted: float) -> None:
    """The privacy profile of the Gaussian, integrated from its loss, which is normal."""
    sigma = release_noise(wanted, 1e-5)
    mu = 1 / sigma

    def delta(eps: float) -> float:
        loss = torch.linspace(-12, 12, 400_001, dtype=torch.float64) * mu + mu**2 / 2
        density = torch.exp(-((loss - mu**2 / 2) ** 2) / (2 * mu**2)) / (mu * math.sqrt(2 * math.pi))
        return float(torch.trapezoid(density * (1 - torch.exp(eps - loss)).clamp_min(0), loss))

    assert delta(wanted) == pytest.approx(1e-5, rel=1e-3)
    event = sums(noise_multiplier=sigma).event
    both = epsilon([event, event], 1e-5, "record")  # two Gaussians are one of sqrt(2) times mu (Dong, Roth, Su 2019)
    exact = special.ndtr(mu / math.sqrt(2) - both / mu / math.sqrt(2))
    exact -= math.exp(both) * special.ndtr(-mu / math.sqrt(2) - both / mu / math.sqrt(2))
    assert exact == pytest.approx(1e-5, rel=1e-2)


def test_one_client_s_share_alone_is_counted_on_a_fine_lattice() -> None:
    """Also counts: with steps of whole records the share of small noise would vanish in the rounding."""
    mechanism = sums(noise_multiplier=0.6, adders=9)
    assert mechanism.alone.kind == "gaussian"
    assert mechanism.alone.noise_multiplier == pytest.approx(0.2, rel=1e-3)


def test_a_scale_is_the_mean_and_the_deviation_and_never_below_what_the_noise_tells() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 4, generator=rng) * torch.tensor([0.1, 0.3, 0.2, 0.0]) + torch.tensor([0.5, 0, -0.3, 0.7])
    y = torch.randint(0, 3, (20_000,), generator=rng)
    x = x.clamp(-1, 1)
    exact = scale_of(sums(4), sums(4)((x, y), noise()), 1)
    assert exact.clear and exact.counts == tuple(torch.bincount(y).tolist())
    assert torch.tensor(exact.mean) == pytest.approx(x.mean(0), abs=1e-4)
    assert torch.tensor(exact.std)[:3] == pytest.approx(x.std(0)[:3], abs=1e-3)
    mechanism = sums(4, noise_multiplier=release_noise(1.0, 1e-5))
    noisy = scale_of(mechanism, mechanism((x, y), noise(2)), 1)
    assert torch.tensor(noisy.mean) == pytest.approx(x.mean(0), abs=5e-3)
    assert torch.tensor(noisy.std)[:3] == pytest.approx(x.std(0)[:3], rel=0.1)
    assert 0.01 < noisy.std[3] < 0.1  # constant, so the noise of its variance
    few = scale_of(mechanism, mechanism((x[:20], y[:20]), noise(3)), 1)
    assert few == ((0.0,) * 4, (1.0,) * 4, few.counts, False)
    half = mechanism((x[:0], y[:0]), noise(4))
    assert not scale_of(mechanism, half, 1).clear


@pytest.mark.parametrize("multiplier", [0.0, 3.0])
def test_the_most_that_records_can_give_passes_and_what_none_give_is_refused(multiplier: float) -> None:
    mechanism = sums(noise_multiplier=multiplier, adders=4)
    extreme = torch.ones(200, 5), torch.zeros(200, dtype=torch.int64)
    total = added([mechanism(extreme, noise(client)) for client in range(6)])
    check_columns(mechanism, total, 6, records=1200)
    far = 3 * (1200 * 4096 + int(40 * multiplier * max(mechanism.scales)))
    for place, sign in ((0, 1), (0, -1), (1, 1), (1, -1), (2, -1)):
        forged = ColumnTotals(*(part.clone() for part in total))
        forged[place][1] += sign * far
        with pytest.raises(OutOfRange, match=r"no records give|0 at least"):
            check_columns(mechanism, forged, 6)
    with pytest.raises(OutOfRange, match="claims .* 500 at most"):
        check_columns(mechanism, total, 6, records=500)


def test_noise_that_is_left_out_is_told_from_the_noise_that_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: a record at the end of every range, over 200 releases; without noise the claim of epsilon 1 falls."""
    mechanism, (x, y) = sums(3, noise_multiplier=release_noise(1.0, 1e-5)), records(30, 3)
    one = torch.ones(1, 3), torch.zeros(1, dtype=torch.int64)
    both = torch.cat([x, one[0]]), torch.cat([y, one[1]])

    def told() -> float:
        """Share of releases in which the projection on the canary's direction tells whether it is there."""
        base = sums(3)((x, y), noise())
        direction = vector(sums(3), both) - vector(sums(3), (x, y))
        hits = 0
        for trial in range(200):
            found = mechanism(both if trial % 2 else (x, y), noise(trial))
            moved = torch.cat(
                [
                    (found.values - base.values).double(),
                    math.sqrt(0.5) * (found.squares - base.squares).double(),
                    math.sqrt(1 + 3 / 8) * (found.counts - base.counts).double(),
                ]
            )
            hits += (float(moved @ direction / direction.norm() ** 2) > 0.5) == bool(trial % 2)
        return hits / 200

    most = math.exp(1) / (1 + math.exp(1)) + 4 * math.sqrt(0.25 / 200)
    assert told() < most
    monkeypatch.setattr(IntegerSum, "integers", lambda self, exact, scale, source: exact)
    assert told() == 1.0 > most


@pytest.mark.parametrize(("name", "value"), [("columns", 0), ("num_classes", 0), ("steps", 5000), ("adders", 0)])
def test_values_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        sums(**{name: value})

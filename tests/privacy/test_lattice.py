"""Discrete Gaussian noise: its law, the theorem by which sums of it are Gaussian releases, and faults that show."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from fedstill.base import seeds
from fedstill.privacy import lattice
from fedstill.privacy.accounting import gaussian_delta

MANY = 200_000


def simulated(seed: int = 0) -> seeds.Noise:
    return seeds.Simulated(torch.Generator().manual_seed(seed))


def law(variance: float, most: int) -> NDArray[np.float64]:
    """Probabilities of -most ... most."""
    k = np.arange(-most, most + 1)
    weights = np.exp(-(k**2) / (2 * variance))
    return weights / weights.sum()


def p_value(found: NDArray[np.int64], variance: float) -> float:
    """Of the chi-square test against the exact law."""
    most = math.ceil(4 * math.sqrt(variance))
    expected = law(variance, 12 * most)
    counts = np.bincount(np.clip(found + 12 * most, 0, 24 * most), minlength=24 * most + 1)
    middle = slice(11 * most, 13 * most + 1)
    inside, probability = counts[middle], expected[middle]
    observed = np.append(inside, len(found) - inside.sum())
    wanted = np.append(probability, 1 - probability.sum()) * len(found)
    keep = wanted > 5
    observed = np.append(observed[keep], observed[~keep].sum())
    wanted = np.append(wanted[keep], wanted[~keep].sum())
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("source", [seeds.Entropy(), simulated()], ids=["entropy", "simulated"])
@pytest.mark.parametrize("variance", [1.0, 2.3, 9.0, 50.7, 1000.0])
def test_the_law_is_exact(variance: float, source: seeds.Noise) -> None:
    found = lattice.discrete_gaussian((MANY,), variance, source).numpy()
    assert p_value(found, variance) > 1e-5
    for wrong in (2 / 3, 3 / 2):
        assert p_value(found, wrong * variance) < 1e-10
        assert p_value(found, wrong**2 * variance) < 1e-10


@pytest.mark.parametrize("std", [1e3, 4e5, 2.0**30])
def test_large_noise_is_gaussian(std: float) -> None:
    found = lattice.discrete_gaussian((MANY,), std**2, simulated()).double().numpy() / std
    assert stats.kstest(found, "norm").pvalue > 1e-4
    assert stats.kstest(1.5 * found, "norm").pvalue < 1e-10
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / math.sqrt(MANY)


def test_comparisons_that_float64_can_t_decide_have_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all comparisons made in 60 digits, and with those of tables by whole words."""
    monkeypatch.setattr(lattice, "_UNSURE", 2.0**64)
    assert p_value(lattice.discrete_gaussian((6000,), 5.5, simulated()).numpy(), 5.5) > 1e-4


def test_the_slow_comparison_agrees_with_the_fast_one() -> None:
    table = lattice.table(137.9)
    rng = np.random.default_rng(0)
    for _ in range(500):
        q, r = int(rng.integers(0, 12)), int(rng.integers(0, 2**table.block))
        word = int(rng.integers(0, 2**64, dtype=np.uint64))
        exact = math.exp(-(r * (2 * 2**table.block * q + r)) / (2 * 137.9))
        if abs(word / 2**64 - exact) > 1e-12:
            assert table.stays(q, r, word, simulated()) == (word / 2**64 < exact)


def test_a_word_on_a_threshold_draws_its_lower_half() -> None:
    table = lattice.table(3.0)

    class Low(seeds.Entropy):
        def __init__(self, low: int) -> None:
            self.low = low

        def words(self, count: int) -> NDArray[np.uint64]:
            return np.full(count, self.low, dtype=np.uint64)

    words = table.high[:1].copy()
    below, above = table.thresholds[0] % 2**64 - 1, table.thresholds[0] % 2**64
    assert table.blocks(words, Low(below))[0] == 0
    assert table.blocks(words, Low(above))[0] == 1


@pytest.mark.parametrize("v", [0.2, 0.5, 1.0])
def test_the_sum_over_shifted_integers_is_within_the_theorem_s_bound(v: float) -> None:
    """``sum_j exp(-(j - y)^2 / 2v) = sqrt(2 pi v) (1 + e)``, ``|e| <= 2.1 exp(-2 pi^2 v)``, nearly reached at y = 0."""
    j = np.arange(-60, 61)
    errors = [
        abs(np.exp(-((j - y) ** 2) / (2 * v)).sum() / math.sqrt(2 * math.pi * v) - 1) for y in np.linspace(0, 1, 101)
    ]
    bound = 2.1 * math.exp(-2 * math.pi**2 * v)
    assert 0.9 * bound < max(errors) < bound


@pytest.mark.parametrize(("std", "adders", "move"), [(6.0, 1, 3), (12.0, 7, 5), (20.0, 30, 7), (40.0, 100, 20)])
def test_a_sum_of_shares_costs_no_more_than_the_gaussian(std: float, adders: int, move: int) -> None:
    """The exact delta of the sum of discrete noises, by convolution, against theorem 8 of Balle and Wang."""
    v = lattice.share(std, adders)
    total = one = law(v, 20 * math.ceil(math.sqrt(v)))
    for _ in range(adders - 1):
        total = np.convolve(total, one)
        cut = (len(total) - 1) // 2 - math.ceil(14 * math.sqrt(adders * v))
        total = total[max(cut, 0) : len(total) - max(cut, 0)]
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        moved = np.concatenate([np.zeros(move), total])
        still = np.concatenate([total, np.zeros(move)])
        delta = np.maximum(moved - math.exp(epsilon) * still, 0).sum()
        claimed = gaussian_delta(std / move, epsilon)
        assert delta <= claimed * (1 + 1e-6) + 1e-14
        assert delta >= gaussian_delta(math.sqrt(adders * v) * 1.02 / move, epsilon) - 1e-12  # and hardly less


@pytest.mark.parametrize("adders", [2, 9, 630])
def test_a_share_that_is_too_small_shows(adders: int) -> None:
    """Noise of all clients in place of the least number, and a third of it, are caught by the sum's variance."""
    std, tries = 500.0, 3000

    def variance(shared: int) -> float:
        draws = lattice.discrete_gaussian((adders, tries), lattice.share(std, shared), simulated(1)).sum(0).double()
        return float(draws.var())

    low, high = (stats.chi2.ppf(p, tries - 1) / (tries - 1) * (std**2 + lattice.SMOOTH) for p in (1e-5, 1 - 1e-5))
    assert low < variance(adders) < high
    assert variance(math.ceil(adders * 1.5)) < low
    if adders == 2:
        assert variance(1) > high


def test_what_one_client_adds_is_what_it_is_alone() -> None:
    assert lattice.alone(30.0, 1) == pytest.approx(30.0)
    assert lattice.alone(300.0, 100) == pytest.approx(math.sqrt(900.09 - 9), rel=1e-4)
    assert lattice.alone(3.0, 10) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("variance", [0.5, math.nan, -1.0, 2.0**81, math.inf])
def test_a_variance_out_of_range_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="variance of discrete noise is"):
        lattice.discrete_gaussian((2,), variance, simulated())

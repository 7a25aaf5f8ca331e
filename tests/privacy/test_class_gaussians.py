"""FedPFT's theorem: what it protects as printed, and what shows where a record is added or removed."""

import math

import numpy as np
import pytest
import torch
from noise import looks_like
from torch import Tensor

from fedstill.base import seeds
from fedstill.privacy.accounting import gaussian_epsilon
from fedstill.privacy.class_gaussians import COUNTS, ClassGaussians, PublishedGaussians, claimed_noise
from fedstill.privacy.releases import Unbounded

DELTA = 1e-5
CLAIMED = math.sqrt(2**2 + 6**2)
"""The sensitivity that the printed noise is for, times n."""


def quiet() -> seeds.Noise:
    return seeds.Simulated(seeds.stream(0, "noise"))


def moved(x: np.ndarray, y: np.ndarray) -> float:
    """The distance between mean and covariance of two sets of rows, times their number."""
    mean = np.linalg.norm(x.mean(0) - y.mean(0))
    matrix = np.linalg.norm(np.cov(x.T, bias=True) - np.cov(y.T, bias=True))
    return float(len(x) * math.hypot(mean, matrix))


def test_a_replaced_record_moves_mean_and_covariance_less_than_the_noise_is_for() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):  # searched neighbours: few or many records, some all at one place, one of them moved
        n, place = rng.integers(1, 60), rng.normal(size=3)
        x = place / np.linalg.norm(place) + rng.normal(size=(n, 3)) * rng.choice([0.0, 0.1, 3.0])
        x /= np.maximum(np.linalg.norm(x, axis=1), 1)[:, None]
        y = x.copy()
        x[0], y[0] = (row / np.linalg.norm(row) for row in rng.normal(size=(2, 3)))
        if rng.random() < 0.5:
            x[0], y[0] = x[-1], -x[-1]
        found.append(moved(x, y))
    assert max(found) < CLAIMED
    assert max(found) == pytest.approx(math.sqrt(2**2 + 4**2), rel=0.02)  # records at one end, and one at the other


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 10.0])
def test_the_printed_noise_suffices_for_replaced_records_and_a_public_n(epsilon: float) -> None:
    true = gaussian_epsilon(claimed_noise(50, epsilon, DELTA) / (CLAIMED / 50), DELTA)
    assert true <= epsilon
    assert gaussian_epsilon(claimed_noise(50, epsilon, DELTA) / (2 * CLAIMED / 50), DELTA) > epsilon  # half of it


def test_the_classic_formula_ends_somewhere() -> None:
    assert gaussian_epsilon(claimed_noise(50, 20.0, DELTA) / (CLAIMED / 50), DELTA) > 20


def release(x: Tensor, noise: seeds.Noise) -> ClassGaussians:
    mechanism = PublishedGaussians(radius=1.0, epsilon=1.0, delta=DELTA)
    return mechanism((x, torch.full((len(x),), 2)), noise)


def test_the_values_are_the_mean_the_covariance_and_the_noise_that_is_claimed() -> None:
    rng = seeds.stream(0, "rows")
    x = torch.randn(30, 4, generator=rng, dtype=torch.float64) / 8
    draws = [release(x, noise) for noise in [quiet()] for _ in range(2000)]
    assert draws[0].classes.tolist() == [2] and draws[0].counts.tolist() == [30]
    mean = torch.stack([each.means[0] for each in draws]) - x.mean(0)
    matrix = torch.stack([each.covariances[0] for each in draws]) - torch.from_numpy(np.cov(x.T, bias=True))
    std = claimed_noise(30, 1.0, DELTA)
    assert std == pytest.approx(4 / 30 * math.sqrt(5 * math.log(4 / DELTA)))
    above = matrix[:, torch.ones(4, 4).triu(1).bool()]
    for values, right in ((mean, std), (matrix.diagonal(dim1=1, dim2=2), std), (above, std / math.sqrt(2))):
        assert looks_like(values, right)
        assert not looks_like(values, right * 2 / 3)
    assert torch.equal(draws[0].covariances, draws[0].covariances.mT)


def test_one_record_more_shows_in_the_count_and_even_in_the_noise() -> None:
    assert release(torch.zeros(21, 4), quiet()).counts != release(torch.zeros(20, 4), quiet()).counts
    first, _ = (release(torch.zeros(n, 4), quiet()) for n in (1, 0))
    assert first.classes.tolist() == [2]  # and with no record the class is absent

    noise, above = quiet(), torch.ones(64, 64).triu(1).bool()
    between = claimed_noise(1, 1.0, DELTA) / 20.5
    says_20 = {}
    for n in (20, 21):  # all rows are 0, so that nothing but noise can be seen, and the count is not looked at
        found = [release(torch.zeros(n, 64), noise).covariances[0][above].square().mean() for _ in range(100)]
        says_20[n] = sum(math.sqrt(2 * value) > between for value in found) / 100
    assert says_20[20] > math.e * says_20[21] + DELTA + 0.3  # (1, delta)-DP allows no such difference


def test_nothing_bounds_it_and_impossible_numbers_are_refused() -> None:
    mechanism = PublishedGaussians(radius=1.0, epsilon=1.0, delta=DELTA)
    assert mechanism.event == Unbounded(reason=COUNTS)
    for changes in ({"epsilon": 0.0}, {"radius": -1.0}, {"delta": 1.5}):
        with pytest.raises(ValueError, match="must"):
            PublishedGaussians(**{"radius": 1.0, "epsilon": 1.0, "delta": DELTA, **changes})

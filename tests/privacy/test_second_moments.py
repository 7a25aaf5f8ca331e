"""Sums of features and of their products: what they are, how far one record moves them, the noise that is claimed."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from benchmark import load
from noise import looks_like
from torch import Tensor

from fedstill.base import seeds
from fedstill.privacy.mechanisms import ROUNDING
from fedstill.privacy.releases import Gaussian, Unbounded
from fedstill.privacy.second_moments import Moments, SecondMoments, entries, unpacked, upper

CLASSES, DIMS, RADIUS, BIAS = 4, 5, 2.0, 0.3


def made(noise: float = 0.0, **changes: Any) -> SecondMoments:
    facts = {"num_classes": CLASSES, "dims": DIMS, "radius": RADIUS, "noise_multiplier": noise, "bias": BIAS}
    return SecondMoments(**{**facts, **changes})


def records(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = seeds.stream(seed, "records")
    lengths = torch.rand(n, 1, generator=rng) * 2 * RADIUS  # some are clipped, some are not
    rows = torch.randn(n, DIMS, generator=rng)
    return rows / rows.norm(dim=1, keepdim=True) * lengths, torch.randint(0, CLASSES, (n,), generator=rng)


def quiet() -> seeds.Noise:
    return seeds.Simulated(seeds.stream(0, "noise"))


def vector(sums: Moments, share: float) -> Tensor:
    """The numbers with one scale of noise: the diagonal, the others times sqrt(2), and H times a."""
    scales = torch.full((DIMS + 1, DIMS + 1), math.sqrt(2), dtype=torch.float64).fill_diagonal_(1.0)[upper(DIMS + 1)]
    return torch.cat([(sums.second * scales).flatten(), sums.first.flatten() * math.sqrt(share / (1 - share))])


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_sums_against_plain_loops(by_class: bool, batch: int) -> None:
    features, labels = records()
    batches = zip(features.split(batch), labels.split(batch), strict=True)
    found = made(by_class=by_class)(batches, quiet())
    second = np.zeros((CLASSES if by_class else 1, DIMS + 1, DIMS + 1))
    first = np.zeros((CLASSES, DIMS + 1))
    for row, label in zip(features.double().numpy(), labels.tolist(), strict=True):
        r = np.array([*(math.sqrt(1 - BIAS**2) * row / max(np.linalg.norm(row), RADIUS)), BIAS])
        second[label if by_class else 0] += np.outer(r, r)
        first[label] += r
    for group, expected in zip(found.second, second, strict=True):
        assert np.allclose(unpacked(group, DIMS + 1), expected, rtol=0, atol=1e-12)
    assert np.allclose(found.first, first, rtol=0, atol=1e-12)
    assert found.second.shape[1] == entries(DIMS + 1)


def test_no_records_and_rows_that_are_not_finite() -> None:
    none = made()([], quiet())
    assert not none.second.any() and not none.first.any()
    broken = torch.full((1, DIMS), math.nan)
    found = made()([(broken, torch.tensor([1]))], quiet())
    assert found.first[1].tolist() == [0.0] * DIMS + [BIAS]  # counted, and nothing else


@pytest.mark.parametrize("features", [torch.ones(1, 1), torch.ones(2, DIMS + 1), torch.ones(DIMS)])
def test_rows_of_another_length_are_refused(features: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"they must be \\(records, {DIMS}\\)"):  # one number would fill all columns
        made()([(features, torch.zeros(len(features), dtype=torch.int64))], quiet())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("by_class", [False, True])
def test_no_record_moves_the_sums_further_than_the_sensitivity_and_some_nearly_as_far(
    share: float, by_class: bool
) -> None:
    rng = np.random.default_rng(0)
    features, labels = records(6)
    mechanism = made(share=share, by_class=by_class)
    assert mechanism.sensitivity == pytest.approx(math.sqrt(1 + share / (1 - share)))
    without = vector(mechanism([(features, labels)], quiet()), share)
    moved = []
    for _ in range(2000):  # searched neighbours: any direction, length and class, some with one feature only
        row = rng.normal(size=DIMS) * 10 ** rng.uniform(-2, 6)
        if rng.random() < 0.3:
            row *= np.eye(DIMS)[rng.integers(DIMS)]
        one = torch.from_numpy(row)[None], torch.tensor([rng.integers(CLASSES)])
        with_it = vector(mechanism([(features, labels), one], quiet()), share)
        moved.append(float((with_it - without).norm()) / mechanism.sensitivity)
    assert max(moved) <= 1
    assert max(moved) > 0.9


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("source", ["simulated", "entropy"])
def test_the_noise_is_what_is_claimed_and_neither_two_thirds_nor_three_halves_of_it(share: float, source: str) -> None:
    data, mechanism = [records()], made(1.5, share=share)
    noise = seeds.Entropy() if source == "entropy" else quiet()
    exact = made(share=share)(data, quiet())
    draws = [mechanism(data, noise) for _ in range(1000)]
    std = 1.5 * mechanism.sensitivity
    second = torch.stack([unpacked(each.second[0] - exact.second[0], DIMS + 1) for each in draws])
    diagonal = second.diagonal(dim1=1, dim2=2)
    above = second[:, torch.ones(DIMS + 1, DIMS + 1).triu(1).bool()]
    first = torch.stack([each.first - exact.first for each in draws])
    for values, right in ((diagonal, std), (above, std / math.sqrt(2)), (first, std / math.sqrt(share / (1 - share)))):
        assert looks_like(values, right)
        assert not looks_like(values, right * 2 / 3)
        assert not looks_like(values, right * 3 / 2)
    assert mechanism.event == Gaussian(noise_multiplier=1.5)


def test_without_noise_nothing_is_guaranteed() -> None:
    assert isinstance(made().event, Unbounded)
    assert "sensitivity" in made().theorem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": -1.0}, "noise_multiplier is -1.0"),
        ({"radius": 0.0}, "radius is 0.0"),
        ({"bias": 0.0}, "bias is 0.0; it must lie between 0 and 1"),
        ({"share": 1.0}, "share is 1.0; it must lie between 0 and 1"),
    ],
)
def test_impossible_numbers(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_the_release_carries_the_noise_that_its_sensitivity_asks_for() -> None:
    mechanism = made(2.0, share=0.3)
    assert mechanism.sensitivity / ROUNDING * 2.0 == pytest.approx(2.0 / math.sqrt(0.7))  # as two releases compose


@pytest.mark.slow
@pytest.mark.parametrize("name", [build.name for build in load("audit").BUILDS if "SecondMoments" in build.name])
def test_audits_refute_the_broken_builds_and_no_sound_one(name: str) -> None:
    benchmark = load("audit")
    build = next(each for each in benchmark.BUILDS if each.name == name)
    row = benchmark.run(build, fast=True)
    assert (row.verdict == "holds") == build.sound, row

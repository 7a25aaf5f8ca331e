"""Sums and counts: bounded influence, the noise that is claimed, nothing that data can break."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import looks_like
from torch import Tensor

from fedstill import seeds
from fedstill.privacy import accounting
from fedstill.privacy.events import Gaussian, Unbounded
from fedstill.privacy.mechanisms import ROUNDING, ClassSums, Histogram, Mechanism, NoisySum, clipped


def quiet() -> seeds.Noise:
    return seeds.Simulated(seeds.stream(0, "noise"))


def rows(n: int = 30, d: int = 7, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    rng = seeds.stream(0, "rows")
    return torch.randn(n, d, generator=rng) * scale, torch.randint(0, 5, (n,), generator=rng)


Make = Callable[[float], Mechanism[Any, Tensor]]
MAKERS: dict[str, tuple[Make, float, Any]] = {
    "sum": (lambda noise: NoisySum(2.0, noise), 2.0 * ROUNDING, rows()[0]),
    "class sums": (lambda noise: ClassSums(5, 2.0, noise), 2.0 * ROUNDING, rows()),
    "histogram": (lambda noise: Histogram(5, noise), 1.0, rows()[1]),
}
every = pytest.mark.parametrize("name", MAKERS)


@every
@pytest.mark.parametrize("source", ["simulated", "entropy"])
def test_the_noise_is_what_is_claimed_and_neither_two_thirds_nor_three_halves_of_it(name: str, source: str) -> None:
    make, sensitivity, data = MAKERS[name]
    exact, mechanism = make(0.0)(data, quiet()), make(1.5)
    noise = seeds.Entropy() if source == "entropy" else quiet()
    draws = torch.stack([mechanism(data, noise) - exact for _ in range(1000)])
    std = 1.5 * sensitivity
    assert looks_like(draws, std)
    assert not looks_like(draws, std * 2 / 3)
    assert not looks_like(draws, std * 3 / 2)
    assert mechanism.event == Gaussian(noise_multiplier=1.5)


@every
def test_without_noise_nothing_is_guaranteed(name: str) -> None:
    mechanism = MAKERS[name][0](0.0)
    assert isinstance(mechanism.event, Unbounded)
    assert accounting.epsilon([mechanism.event], 1e-5, "record") == math.inf
    assert "sensitivity" in mechanism.theorem


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_record_moves_a_release_by_at_most_the_sensitivity(data: st.DataObject) -> None:
    n, d = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
    values = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=n, max_size=n)))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    radius = data.draw(st.floats(1e-3, 1e3))
    for mechanism, whole, less, sensitivity in (
        (NoisySum(radius, 0.0), values, values[1:], radius),
        (ClassSums(5, radius, 0.0), (values, labels), (values[1:], labels[1:]), radius),
        (Histogram(5, 0.0), labels, labels[1:], 1.0),
    ):
        moved = (mechanism(whole, quiet()) - mechanism(less, quiet())).norm()  # type: ignore[operator]
        assert torch.isfinite(moved)
        assert moved <= sensitivity * ROUNDING + 1e-9 * radius * n  # the second: rounding of the sums themselves


def test_clipping_reaches_the_radius_and_keeps_shorter_rows() -> None:
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    short = clipped(values, 1.0)
    assert torch.allclose(short, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64), atol=1e-7)
    assert short.dtype == torch.float64
    assert (clipped(torch.tensor([[math.nan, 1.0], [math.inf, 0.0]]), 1.0) == 0).all()


def test_sums_against_a_plain_loop() -> None:
    values, labels = rows()
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for row, label in zip(values.double(), labels, strict=True):
        expected[label] += row * min(1.0, 2.0 / float(row.norm()))
    assert torch.allclose(ClassSums(5, 2.0, 0.0)((values, labels), quiet()), expected)
    assert torch.allclose(NoisySum(2.0, 0.0)(values, quiet()), expected.sum(0))
    assert Histogram(5, 0.0)(labels, quiet()).tolist() == torch.bincount(labels, minlength=5).tolist()


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_impossible_noise(noise: float) -> None:
    for make, _, _ in MAKERS.values():
        with pytest.raises(ValueError, match="noise_multiplier is .*; it must be a finite number from 0"):
            make(noise)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_impossible_radius(radius: float) -> None:
    with pytest.raises(ValueError, match="radius is .*; it must be a positive number"):
        NoisySum(radius, 1.0)


def test_entropy_is_never_the_same_and_uniform() -> None:
    first, second = seeds.Entropy().uniform((1000,)), seeds.Entropy().uniform((1000,))
    assert not torch.equal(first, second)
    assert 0 <= float(first.min()) and float(first.max()) < 1
    assert abs(float(first.mean()) - 0.5) < 0.08
    assert torch.isfinite(seeds.Entropy().gaussian((3, 4))).all()
    assert seeds.Entropy().gaussian((0, 4)).shape == (0, 4)

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

from fedstill.base import seeds
from fedstill.privacy import accounting
from fedstill.privacy.logistic import LogisticHead
from fedstill.privacy.mechanisms import (
    LEAST,
    MOST,
    ROUNDING,
    ClassSums,
    ClippedUpdate,
    Histogram,
    Mechanism,
    NoisySum,
    clipped,
)
from fedstill.privacy.releases import Gaussian, Unbounded


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


@pytest.mark.parametrize("label", [5, -1, 10**12])
def test_a_class_outside_of_the_list_shows_in_no_histogram(label: int) -> None:
    mechanism, labels = Histogram(5, 0.0), rows()[1]
    assert torch.equal(mechanism(torch.cat([labels, torch.tensor([label])]), quiet()), mechanism(labels, quiet()))


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


@pytest.mark.parametrize("radius", [1e-3, 1.0, 3.0])
def test_a_client_s_update_moves_by_twice_its_length_whatever_the_records(radius: float) -> None:
    mechanism, far = ClippedUpdate(radius, 0.0), torch.tensor([1e6, -1e6])
    moved = (mechanism(far, quiet()) - mechanism(-far, quiet())).norm()
    assert moved == pytest.approx(2 * radius) and moved <= mechanism.sensitivity <= 2 * radius * ROUNDING * (1 + 1e-12)


def test_no_roundings_of_60_000_records_exceed_the_sensitivity() -> None:
    """Rows that keep the sum above 2^15 with the first record, where float64 is twice as coarse, and below without."""
    fine = 2.0**-38
    steps = [1 / 8 + 1.2 * fine, -(1 / 8 + 0.8 * fine)] * 13_000
    values = torch.tensor([1.0] * 2**15 + [0.5, *steps], dtype=torch.float64)[:, None]
    labels = torch.zeros(len(values), dtype=torch.int64)
    mechanism = ClassSums(2, 1.0, 0.0)
    moved = (mechanism((values, labels), quiet()) - mechanism((values[1:], labels[1:]), quiet())).norm()
    assert 1 + 9e-8 < moved <= mechanism.sensitivity  # a factor of 1 + 1e-9 was exceeded


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


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf, 6e-309, 9e-21, 2e20])
def test_impossible_radius(radius: float) -> None:
    with pytest.raises(ValueError, match="radius is .*; it must be a positive number"):
        NoisySum(radius, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    radius=st.floats(LEAST, MOST) | st.sampled_from([LEAST, MOST]),
    size=st.floats(1e-320, 1e308) | st.sampled_from([5e-324, 1e-310, 1.7e308]),
    seed=st.integers(0, 1000),
)
def test_no_row_is_longer_than_the_radius_after_rounding(radius: float, size: float, seed: int) -> None:
    found = clipped(torch.randn(3, 9, dtype=torch.float64, generator=seeds.stream(seed)) * size, radius)
    lengths = [math.hypot(*row) for row in found.tolist()]
    assert max(lengths) <= radius * ROUNDING


@pytest.mark.parametrize("radius", [1e-20, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("columns", [1, 2, 9])
def test_no_length_is_clipped_to_more_than_the_radius(radius: float, columns: int) -> None:
    """Up to the largest float64: a subnormal quotient made rows of one column twice as long."""
    sizes = torch.logspace(-307, 308, 2000, dtype=torch.float64)
    rows = sizes[:, None] * torch.ones(columns, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(1000)[:, None]
    found = clipped(rows, radius)
    assert found.isfinite().all() and float(found.norm(dim=1).max()) <= radius * (1 + 1e-14)
    assert torch.equal(clipped(rows[7:9], radius), found[7:9])


def test_a_subnormal_radius_is_refused_since_rows_would_be_twice_as_long() -> None:
    for radius in (6e-309, 5e-324):
        with pytest.raises(ValueError, match="it must be a positive number, from 1e-20 to 1e.20"):
            clipped(torch.ones(1, 3), radius)
        with pytest.raises(ValueError, match="radius is"):
            LogisticHead(num_classes=2, penalty=1.0, radius=radius, noise_multiplier=1.0)


def words(*values: int) -> Callable[[int], bytes]:
    """As os.urandom, with these 64-bit words again and again."""
    return lambda count: (b"".join(v.to_bytes(8, "little") for v in values) * count)[:count]


@pytest.mark.parametrize("first", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("second", [0, 1, 2**64 - 2, 2**64 - 1])
def test_no_word_of_the_system_gives_an_infinite_or_a_one_sided_tail(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for sign in (0, 1):  # two draws take first the exponents' words, then the digits'
        monkeypatch.setattr(seeds.os, "urandom", words(first, first, second & ~1 | sign, second & ~1 | sign))
        found.append(float(seeds.Entropy().gaussian((2,))[0]))
    assert math.isfinite(found[0]) and found[0] == -found[1] and 0 <= found[0] < 9
    if first < 2:
        assert found[0] > 8.1  # the lower and the upper tail alike


def test_entropy_releases_multiples_of_a_public_grid_whose_rounding_hides_the_value() -> None:
    """A float64 sum of a value and noise has the value's own last bits (Mironov 2012)."""
    std = 0.3
    grid = 2.0**-12
    assert std / 2048 < grid <= std / 1024
    for value in (0.0, 0.1, 1e-9, -17.3, 1e6 / 3, 1e30):
        exact = torch.full((20000,), value, dtype=torch.float64)
        found = seeds.Entropy().added(exact, std)
        assert bool(((found / grid) == (found / grid).round()).all())
        if abs(value) < 1e9:
            assert looks_like(found - value, std) and not looks_like(found - value, 1.1 * std)
    # simulated noise is not for release, and its sums keep all bits
    assert not bool(((quiet().added(exact * 0, std) / grid) % 1 == 0).any())
    assert torch.equal(seeds.Entropy().added(exact, 0.0), exact)


def test_the_bits_of_gaussian_entropy_are_fair_and_its_tails_right() -> None:
    found = seeds.Entropy().gaussian((400_000,))
    assert looks_like(found, 1.0) and not looks_like(found, 1.02)
    beyond = int((found.abs() > 4.0).sum())  # 25 expected
    assert 5 < beyond < 60


def test_entropy_is_never_the_same_and_uniform() -> None:
    first, second = seeds.Entropy().uniform((1000,)), seeds.Entropy().uniform((1000,))
    assert not torch.equal(first, second)
    assert 0 <= float(first.min()) and float(first.max()) < 1
    assert abs(float(first.mean()) - 0.5) < 0.08
    assert torch.isfinite(seeds.Entropy().gaussian((3, 4))).all()
    assert seeds.Entropy().gaussian((0, 4)).shape == (0, 4)

"""Audits: their statistics against known numbers, and what they find of sound and of broken builds."""

import math

import numpy as np
import pytest
import torch
from benchmark import load
from scipy.stats import binom

from fedstill.audits.lower_bounds import Canaries, lower_bound, many_runs, one_run, p_value
from fedstill.base.seeds import Simulated, numpy_stream, stream
from fedstill.privacy.accounting import gaussian_epsilon
from fedstill.privacy.logistic import BinaryHead, LogisticHead

benchmark = load("audit")


# --- the bound of one run


@pytest.mark.parametrize(
    ("guesses", "correct", "bound"), [(100, 100, 3.47), (200, 200, 4.17), (100, 80, 0.96), (1000, 550, 0.09)]
)
def test_lower_bounds_are_the_published_examples(guesses: int, correct: int, bound: float) -> None:
    # computed from the formula by others, rounded to two places
    assert lower_bound(1000, guesses, correct, 1e-5) == pytest.approx(bound, abs=0.005)


def test_without_delta_the_bound_is_that_of_a_binomial() -> None:
    assert lower_bound(100, 100, 100, 0.0) == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-5)
    assert p_value(100, 50, 40, 0.0, 0.0) == pytest.approx(binom.sf(39, 50, 0.5))


@pytest.mark.parametrize(("guesses", "correct"), [(1000, 500), (100, 50), (100, 0), (0, 0)])
def test_chance_proves_nothing(guesses: int, correct: int) -> None:
    assert lower_bound(1000, guesses, correct, 1e-5) == 0


def test_bounds_fall_with_delta_and_confidence_and_rise_with_right_guesses() -> None:
    bounds = [lower_bound(1000, 200, correct, 1e-5) for correct in range(201)]
    assert bounds == sorted(bounds)
    assert lower_bound(1000, 200, 180, 1e-3) < lower_bound(1000, 200, 180, 1e-5) < lower_bound(1000, 200, 180, 0)
    assert lower_bound(1000, 200, 180, 0, 0.999) < lower_bound(1000, 200, 180, 0)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_bound_is_above_the_truth_as_seldom_as_it_says_and_not_far_below(epsilon: float) -> None:
    """Guesses on randomised response are right by exactly the binomial of the theorem, which is so tight for it."""
    counts = numpy_stream(0, "guesses").binomial(400, 1 / (1 + math.exp(-epsilon)), size=2000)
    bounds = {count: lower_bound(400, 400, int(count), 0.0, 0.9) for count in set(counts.tolist())}
    above = sum(bounds[count] > epsilon for count in counts.tolist())
    # exact coverage is at least 0.9; discreteness costs at most one outcome's probability, below 0.06
    assert binom.cdf(above, 2000, 0.04) > 1e-6 and binom.sf(above, 2000, 0.1) > 1e-6


# --- whole audits


def shifted(count: int, shift: float, seed: int) -> Canaries[torch.Tensor]:
    """A Gaussian mechanism in a line, without any of the package's code."""
    rng = stream(seed, "shifted")
    return Canaries(count, lambda included: shift * included + torch.randn(count, generator=rng), lambda value: value)


def test_one_run_guesses_on_both_ends() -> None:
    sure = one_run(shifted(400, 100.0, 0), 100, stream(0), delta=1e-5)
    assert (sure.guesses, sure.correct) == (100, 100) and sure.epsilon == lower_bound(400, 100, 100, 1e-5)
    inverted = one_run(shifted(400, -100.0, 0), 100, stream(0), delta=1e-5)
    assert inverted.correct == 0 and inverted.epsilon == 0
    assert one_run(shifted(400, 0.0, 0), 100, stream(0), delta=1e-5, confidence=0.999).epsilon == 0


@pytest.mark.slow
def test_many_runs_come_close_to_a_gaussian_and_stay_below() -> None:
    for shift in (0.3, 1.0, 3.0):
        truth = gaussian_epsilon(1 / shift, 1e-5)
        found = many_runs(shifted(1, shift, 1).alone, 20_000, delta=1e-5, confidence=0.999)
        # 10,000 judging runs: mu is known to 0.06 at this confidence, a little worse where errors are rare; twice that
        assert gaussian_epsilon(1 / (shift - 0.11 - 0.02 * shift), 1e-5) < found.gaussian <= truth
        assert 0.15 * truth < found.epsilon <= truth
    nothing = many_runs(shifted(1, 0.0, 1).alone, 2000, delta=1e-5, confidence=0.999)
    assert nothing.epsilon == 0 and nothing.gaussian == 0


@pytest.mark.slow
def test_many_runs_are_above_the_truth_as_seldom_as_they_say() -> None:
    truth, rng = gaussian_epsilon(1.0, 1e-5), np.random.default_rng(0)
    found = [
        many_runs(lambda present: float(rng.normal()) + present, 200, delta=1e-5, confidence=0.8) for _ in range(300)
    ]
    # each may exceed with probability 0.2; Gaussian bounds are tight up to Clopper and Pearson's two rates
    assert binom.sf(sum(each.gaussian > truth for each in found) - 1, 300, 0.2) > 1e-6
    assert binom.sf(sum(each.epsilon > truth for each in found) - 1, 300, 0.2) > 1e-6
    assert sum(each.gaussian > truth / 2 for each in found) > 150


def test_perfect_separation_proves_what_the_number_of_runs_allows() -> None:
    found = many_runs(float, 200, delta=0.0)
    rate = 1 - 0.025**0.01  # Clopper and Pearson for none of 100
    assert found.epsilon == pytest.approx(math.log((1 - rate) / rate)) and found.gaussian == 0


def test_canaries_of_heads_move_them_by_nearly_the_sensitivity() -> None:
    """Else an audit that passes would say little."""
    head = LogisticHead(num_classes=10, penalty=0.3, radius=1.0, noise_multiplier=1.0, bias=0.0)
    lone = benchmark.class_head(1, benchmark.NoNoise())
    assert 0.93 * head.sensitivity < lone.alone(True) - lone.alone(False) <= head.sensitivity
    binary = BinaryHead(negatives=torch.zeros(1, 1), penalty=0.05, radius=1.0, noise_multiplier=1.0, bias=0.0)
    score = benchmark.score_head(1, benchmark.NoNoise())
    assert 0.9 * binary.sensitivity < score.alone(True) - score.alone(False) <= binary.sensitivity


def test_releases_of_one_set_of_canaries_differ_and_masks_decide() -> None:
    canaries = benchmark.row_canaries(
        lambda rows, noise: rows.sum(0) + noise.gaussian((3,)), torch.eye(3), Simulated(stream(0))
    )
    mask = torch.tensor([True, False, True])
    assert not torch.equal(canaries.release(mask), canaries.release(mask))
    exact = benchmark.row_canaries(lambda rows, noise: rows.sum(0), torch.eye(3), benchmark.NoNoise())
    assert exact.score(exact.release(mask)).tolist() == [1, 0, 1]
    assert benchmark.joint([exact, exact], [1.0, 2.0]).alone(True) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lower_bound(10, 11, 5, 0.0), "5 correct of 11 guesses on 10 canaries"),
        (lambda: lower_bound(10, 5, 6, 0.0), "6 correct of 5 guesses"),
        (lambda: lower_bound(10, 5, 5, 1.0), "delta 1.0"),
        (lambda: lower_bound(10, 5, 5, 0.0, 1.0), "confidence 1.0"),
        (lambda: one_run(shifted(10, 1.0, 0), 5, stream(0), delta=0.0), "5 guesses on 10 canaries; they must be even"),
        (lambda: one_run(shifted(10, 1.0, 0), 12, stream(0), delta=0.0), "12 guesses on 10 canaries"),
        (lambda: many_runs(float, 1, delta=0.0), "runs is 1; give 2 or more"),
        (lambda: many_runs(float, 10, delta=-1.0), "delta is -1.0; give a number from 0"),
    ],
)
def test_numbers_out_of_range_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


# --- the package's mechanisms


@pytest.mark.slow
@pytest.mark.parametrize("build", [build for build in benchmark.BUILDS if build.sound], ids=lambda build: build.name)
def test_no_audit_exceeds_a_sound_claim_and_none_is_idle(build: object) -> None:
    row = benchmark.run(build, fast=True)
    assert row.verdict == "holds", row
    # a third: what 500 judging runs leave of a head's mu of 0.9
    assert row.bound > row.claimed / 3, row


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [build for build in benchmark.BUILDS if not build.sound], ids=lambda build: build.name
)
def test_every_broken_build_is_caught(build: object) -> None:
    row = benchmark.run(build, fast=True)
    assert row.verdict == "REFUTED", row


def test_a_true_claim_of_a_broken_build_holds() -> None:
    half = next(build for build in benchmark.BUILDS if build.name == "half the noise")
    assert benchmark.run(half, fast=True).bound <= gaussian_epsilon(benchmark.SIGMA / 2, benchmark.DELTA)

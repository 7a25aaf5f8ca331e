"""DP-SGD: the noise, the sampling and the divisor that are claimed; what audits find of it and of broken builds."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from noise import looks_like
from scipy.stats import binomtest, chi2
from torch import Tensor, nn

from fedstill import models
from fedstill.audits.canaries import directional_derivatives, gradient_canaries
from fedstill.audits.lower_bounds import Canaries, one_run
from fedstill.base.records import Examples, Trainable
from fedstill.base.seeds import Entropy, Noise, Simulated, isolated, stream
from fedstill.models.cnn import ConvNet
from fedstill.privacy.accounting import epsilon, gaussian_noise
from fedstill.privacy.dp_sgd import DPSGD, per_record_cross_entropy
from fedstill.privacy.releases import Gaussian, Unbounded

LEVEL = 1e-6
"""How seldom a test may reject what is right."""


def quiet(seed: int = 0) -> Noise:
    return Simulated(stream(seed, "noise"))


def up(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Its gradient is minus the inputs: a record moves the weights along its own."""
    return -output[:, 0]


def line(d: int) -> nn.Module:
    model = nn.Linear(d, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def axes(n: int, length: float = 10.0) -> Examples:
    """Each record moves a weight of its own."""
    return Examples(length * torch.eye(n), torch.zeros(n, dtype=torch.int64))


def counting(d: int, **other: Any) -> DPSGD:
    """The weights it releases count, without noise, how often each record of `axes` was in a batch."""
    given = {"lr": 1.0, "clip": 1.0, "noise_multiplier": 0.0, "sampling": 1.0, "steps": 1, "batch_size": 1.0}
    return DPSGD(model=line(d), loss=up, **(given | other))


def weights(release: DPSGD, rows: Trainable, noise: Noise) -> Tensor:
    return release(rows, noise)["weight"][0].double()


def net() -> nn.Module:
    with isolated(0):
        return models.build("kadp-mnist", (1, 8, 8), 3)


def digits(n: int) -> Examples:
    rng = stream(0, "digits")
    return Examples(torch.randn(n, 1, 8, 8, generator=rng), torch.randint(0, 3, (n,), generator=rng))


# --- noise, sampling, divisor


@pytest.mark.parametrize("source", ["simulated", "entropy"])
@pytest.mark.parametrize("n", [0, 40])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_noise_is_what_is_claimed_and_neither_two_thirds_nor_three_halves(n: int, steps: int, source: str) -> None:
    d, lr, clip, sigma, divisor = 5000, 0.5, 2.0, 1.5, 8.0
    rows = Examples(torch.randn(n, d, generator=stream(0)), torch.zeros(n, dtype=torch.int64))
    make = partial(counting, d, lr=lr, clip=clip, steps=steps, batch_size=divisor)
    noise = Entropy() if source == "entropy" else quiet()
    drawn = weights(make(noise_multiplier=sigma), rows, noise) - weights(make(), rows, noise)
    std = math.sqrt(steps) * sigma * clip * lr / divisor
    assert looks_like(drawn, std)
    assert not looks_like(drawn, std * 2 / 3)
    assert not looks_like(drawn, std * 3 / 2)


def test_noise_is_drawn_once_a_step_for_all_parameters_whatever_the_batch() -> None:
    class Counted(Simulated):
        shapes: list[tuple[int, ...]] = []

        def gaussian(self, shape: Any) -> Tensor:
            self.shapes.append(tuple(shape))
            return super().gaussian(shape)

    release = DPSGD(model=net(), lr=0.1, clip=1.0, noise_multiplier=1.0, sampling=0.5, steps=3, batch_size=100.0)
    release(digits(300), Counted(stream(0)))
    assert Counted.shapes == [(sum(p.numel() for p in net().parameters()),)] * 3


@pytest.mark.parametrize("source", ["simulated", "entropy"])
def test_records_are_sampled_at_the_rate_and_neither_at_two_thirds_nor_three_halves_of_it(source: str) -> None:
    n, steps, q = 400, 50, 0.1
    noise = Entropy() if source == "entropy" else quiet()
    counts = weights(counting(n, sampling=q, steps=steps), axes(n), noise)
    seen = round(float(counts.sum()))
    for rate, right in ((q, True), (q * 2 / 3, False), (q * 3 / 2, False)):
        assert (binomtest(seen, n * steps, rate).pvalue > LEVEL) == right


def spread(counts: Tensor, trials: int, q: float) -> float:
    """How likely counts vary as little, or as much, as those of independent coins; chi-square approximates it."""
    statistic = float((counts - trials * q).square().sum() / (trials * q * (1 - q)))
    return float(2 * min(chi2.cdf(statistic, len(counts)), chi2.sf(statistic, len(counts))))


def test_coins_are_independent_over_steps_and_over_records_as_shuffled_batches_are_not() -> None:
    n, q = 200, 0.2
    once = torch.stack([weights(counting(n, sampling=q), axes(n), quiet(i)) for i in range(100)]).round()
    assert spread(once.sum(0), 100, q) > LEVEL and spread(once.sum(1), n, q) > LEVEL
    fixed = torch.cat([shuffled_batches(n, 5, i) for i in range(20)]).double()
    assert spread(fixed.sum(0), 100, q) < LEVEL and spread(fixed.sum(1), n, q) < LEVEL


def shuffled_batches(n: int, steps: int, seed: int) -> Tensor:
    """Who is in which batch ``(steps, n)`` of one epoch: each record in exactly one, all of one size."""
    order = torch.randperm(n, generator=stream(seed, "order"))
    return (order % steps)[None] == torch.arange(steps)[:, None]


@pytest.mark.parametrize("n", [5, 50])
def test_the_divisor_is_the_public_one_whatever_the_batch(n: int) -> None:
    release = counting(64, sampling=0.5, lr=0.3, clip=2.0, batch_size=8.0)
    rows = Examples(axes(64).inputs()[:n], axes(64).labels[:n])
    found = weights(release, rows, quiet())
    moved = found[found > 0]
    assert 0 < len(moved) < n
    # a record's part is lr clip / B; of float32
    torch.testing.assert_close(moved, torch.full_like(moved, 0.3 * 2.0 / 8.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("record", ["huge", "nan", "infinite", "plain"])
def test_any_record_more_moves_a_step_by_at_most_the_clip(record: str) -> None:
    value = {"huge": 1e25, "nan": math.nan, "infinite": math.inf, "plain": 1.0}[record]
    rows = digits(30)
    rows.inputs()[-1] *= value
    make = DPSGD(model=net(), lr=1.0, clip=0.7, noise_multiplier=0.0, sampling=1.0, steps=1, batch_size=1.0)
    less = Examples(rows.inputs()[:-1], rows.labels[:-1])
    pairs = zip(make(rows, quiet()).values(), make(less, quiet()).values(), strict=True)
    moved = torch.cat([(a.double() - b.double()).flatten() for a, b in pairs]).norm()
    # the second: float32 weights and sums of 30 gradients, some 10^5 entries of size 1
    assert torch.isfinite(moved) and moved <= 0.7 * (1 + 1e-6) + 1e-5


def test_steps_are_those_of_a_plain_loop() -> None:
    rows, model = digits(20), net()
    release = DPSGD(model=model, lr=0.1, clip=0.5, noise_multiplier=0.0, sampling=1.0, steps=3, batch_size=10.0)
    for _ in range(3):
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(20):
            given = model(rows.inputs()[i : i + 1]), rows.inputs()[i : i + 1], rows.labels[i : i + 1]
            gradients = torch.autograd.grad(per_record_cross_entropy(*given)[0], list(model.parameters()))
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            torch._foreach_add_(totals, [g * min(1.0, 0.5 / float(norm)) for g in gradients])
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), totals, alpha=-0.1 / 10)
    # a release starts from the model as it is now, so from a fresh one
    released = DPSGD(**{**vars(release), "model": net()})(rows, quiet())
    for name, p in model.named_parameters():
        torch.testing.assert_close(released[name], p.detach(), rtol=1e-4, atol=1e-6)


def test_batches_larger_than_what_is_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release = counting(300, sampling=0.9)
    whole = weights(release, axes(300), quiet())
    monkeypatch.setattr("fedstill.privacy.dp_sgd._LOADED", 7)
    assert torch.equal(weights(release, axes(300), quiet()), whole)


# --- the start, randomness, what is refused


def test_the_model_stays_and_only_what_is_trainable_is_released() -> None:
    model = net().eval()
    model.convs[0].requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    release = DPSGD(model=model, lr=0.1, clip=1.0, noise_multiplier=1.0, sampling=1.0, steps=2, batch_size=8.0)
    released = release(digits(8), quiet())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items()) and not model.training
    assert list(released) == [name for name in before if not name.startswith("convs.0.")]
    assert all(torch.isfinite(w).all() and not torch.equal(w, before[name]) for name, w in released.items())
    assert all(w.dtype == torch.float32 and not w.requires_grad for w in released.values())


def test_everything_random_comes_from_the_noise_dropout_too() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    release = DPSGD(model=model, lr=0.1, clip=1.0, noise_multiplier=0.0, sampling=1.0, steps=1, batch_size=8.0)
    before = torch.get_rng_state()
    first, same, other = (release(digits(8), quiet(seed))["1.weight"] for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise_multiplier", -1.0, "noise_multiplier is -1.0; it must be a finite number from 0"),
        ("clip", 0.0, "clip is 0.0; it must be a positive number"),
        ("clip", 7.9e-45, "clip is 7.9e-45; it must be a positive number, from 1e-20 to 1e.20"),
        ("lr", 1e44, "lr is 1e.44; it must be a positive number"),
        ("lr", math.nan, "lr is nan; it must be a positive number"),
        ("batch_size", 0, "batch_size is 0; it must be a positive number"),
        ("steps", 0, "steps is 0; it must be a positive number"),
        ("steps", 1.5, "steps is 1.5; .* whole number"),
        ("sampling", 0.0, "sampling is 0.0; it must be a positive number"),
        ("sampling", 1.1, r"sampling is 1.1 .* probability in \(0, 1\]"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counting(3, **{name: value})


def test_a_model_with_batch_norm_is_refused_at_once_though_in_eval_mode() -> None:
    model = ConvNet((1, 8, 8), 3, width=4, depth=1, norm="batch").eval()
    with pytest.raises(ValueError, match="layer 'layers.1' is a BatchNorm2d in train mode"):
        DPSGD(model=model, lr=1.0, clip=1.0, noise_multiplier=1.0, sampling=1.0, steps=1, batch_size=1.0)


# --- the cost


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.05, 40), (5.0, 32 / 600, 200), (2.0, 1.0, 7), (0.8, 1.0, 1)])
def test_the_cost_is_that_of_the_accountants(sigma: float, q: float, steps: int) -> None:
    release = counting(3, noise_multiplier=sigma, sampling=q, steps=steps)
    assert release.event == Gaussian(noise_multiplier=sigma, sampling=q, count=steps)
    once: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(sigma)
    once = dp_accounting.PoissonSampledDpEvent(q, once) if q < 1 else once
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    exact, looser = PLDAccountant(relation), RdpAccountant(neighboring_relation=relation)
    for accountant in (exact, looser):
        accountant.compose(once, steps)
    found = epsilon([release.event], 1e-5, "record")
    assert found == pytest.approx(exact.get_epsilon(1e-5), rel=1e-6)
    assert 0.7 * looser.get_epsilon(1e-5) < found < looser.get_epsilon(1e-5)
    assert "at most 1, the sensitivity" in release.theorem and f"each of {steps} sums" in release.theorem


def test_without_noise_nothing_is_guaranteed() -> None:
    assert isinstance(counting(3).event, Unbounded)
    assert epsilon([counting(3).event], 1e-5, "record") == math.inf


# --- audits: gradients of canaries are orthogonal

COUNT, GUESSES, DELTA = 1000, 200, 1e-5
SIGMA = gaussian_noise(3.0, DELTA)  # 200 right guesses of 200 prove 4.17
Step = Callable[[Trainable, Noise], dict[str, Tensor]]


def test_the_score_is_the_product_of_update_and_gradient() -> None:
    model, rows = net(), digits(6)
    direction = {name: torch.randn(p.shape, generator=stream(0)) for name, p in model.named_parameters()}
    found = directional_derivatives(model, direction, rows.inputs(), rows.labels, per_record_cross_entropy)
    for i in range(6):
        one = per_record_cross_entropy(model(rows.inputs()[i : i + 1]), rows.inputs(), rows.labels[i : i + 1])
        gradients = torch.autograd.grad(one.sum(), list(model.parameters()))
        expected = sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True))
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-4)


def claimed(release: DPSGD) -> float:
    return epsilon([release.event], DELTA, "record")


def proved(step: Step) -> float:
    """What one run with a thousand canaries proves; each is ten times longer than the clip."""
    rows = axes(COUNT)
    canaries = gradient_canaries(lambda chosen: step(chosen, quiet()), line(COUNT), rows.inputs(), rows.labels, up)
    return one_run(canaries, GUESSES, stream(0, "coins"), delta=DELTA).epsilon


def sound(**other: Any) -> DPSGD:
    return counting(COUNT, noise_multiplier=SIGMA, batch_size=COUNT / 4, **other)


def test_a_sound_build_is_not_refuted_and_the_audit_is_not_idle() -> None:
    bound = proved(sound())
    # a Gaussian mechanism of epsilon 3: one run is far below the truth
    assert 0.1 < bound <= claimed(sound())


def by_hand(rows: Trainable, noise: Noise, *, scale: float, batch_clip: bool = False) -> dict[str, Tensor]:
    """One step as broken builds have it: ``scale`` is the noise beside the averaged gradient."""
    x, divisor = rows.inputs(slice(None)).double(), COUNT / 4
    if batch_clip:
        mean = x.sum(0) / divisor
        mean = mean * min(1.0, 1.0 / float(mean.norm()))
    else:
        mean = (x * (1 / x.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0) / divisor
    return {"weight": (mean + scale * noise.gaussian(mean.shape)).float()[None]}


BROKEN: dict[str, Step] = {
    # FedKADP's: the batch's gradient is clipped, which bounds no record's part in it
    "clips the batch": partial(by_hand, scale=SIGMA * 4 / COUNT, batch_clip=True),
    "divides the noise twice": partial(by_hand, scale=SIGMA * (4 / COUNT) ** 2),
    # of all records rather than of the expected batch
    "adds noise after averaging by another divisor": partial(by_hand, scale=SIGMA / COUNT),
    "no noise": partial(by_hand, scale=0.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_builds_are_caught(name: str) -> None:
    assert proved(BROKEN[name]) > claimed(sound())


def test_the_step_by_hand_is_the_librarys_when_it_is_not_broken() -> None:
    right = by_hand(axes(COUNT), quiet(), scale=0.0)["weight"]
    exact = counting(COUNT, batch_size=COUNT / 4)(axes(COUNT), quiet())["weight"]
    torch.testing.assert_close(right, exact, rtol=1e-6, atol=0)
    assert proved(partial(by_hand, scale=SIGMA * 4 / COUNT)) <= claimed(sound())


# the weights of every step are seen, which is what the accounting supposes
STEPS, RATE, LOW = 100, 0.01, 1.0


def followed(step: Callable[[int, Examples], Tensor], evidence: Callable[[Tensor], Tensor]) -> float:
    """One run of `STEPS` steps from the same start, ``(STEPS, m)`` moves along canaries, two thousand of them."""
    rows = axes(2000)

    def release(included: Tensor) -> Tensor:
        chosen = Examples(rows.inputs() * included[:, None], rows.labels)  # a gradient of 0 is no record
        return torch.stack([step(i, chosen) for i in range(STEPS)])

    canaries = Canaries(2000, release, evidence)
    return one_run(canaries, 200, stream(0, "coins"), delta=DELTA).epsilon


def likelihood(moves: Tensor) -> Tensor:
    """The log likelihood ratio of a record that is in each batch with probability `RATE`."""
    return torch.log1p(RATE * torch.expm1((moves - 0.5) / LOW**2)).sum(0)


def test_poisson_samples_hold_their_claim_and_shuffled_batches_accounted_as_such_are_caught() -> None:
    """Each record in one batch of an epoch, in an order that a seed gives: no sampling hides it from who knows that."""
    release = counting(2000, noise_multiplier=LOW, sampling=RATE)
    claim = epsilon([Gaussian(noise_multiplier=LOW, sampling=RATE, count=STEPS)], DELTA, "record")
    noise, batches = quiet(), shuffled_batches(2000, STEPS, 0)

    def shuffled(i: int, rows: Examples) -> Tensor:
        whole = counting(2000, noise_multiplier=LOW)
        return weights(whole, Examples(rows.inputs()[batches[i]], rows.labels[batches[i]]), noise)

    assert followed(lambda i, rows: weights(release, rows, noise), likelihood) <= claim
    assert followed(shuffled, lambda moves: (moves * batches).sum(0)) > claim

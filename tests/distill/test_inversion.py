"""Losses on pixels worked out by hand; images fitted to networks with and without batch norms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.errors import Diverged
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.inversion import Inversion, competition, reversed_competition, total_variation
from fedstill.distill.teachers import Teachers

SHAPE, CLASSES = (2, 8, 8), 3
LIKE = Records(
    torch.empty(0, *SHAPE, dtype=torch.uint8), torch.empty(0).long(), CLASSES, Normalisation((0.4, 0.6), (0.2, 0.3))
)


def network(seed: int, spec: str = "dense-mnist") -> nn.Module:
    with isolated(seed):
        found = models.build(spec, SHAPE, CLASSES)
        for module in found.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        with torch.no_grad():
            found(torch.randn(32, *SHAPE) * 0.4 + 0.8)  # whose statistics are the running ones then
    return found


def with_norms() -> Teachers:
    return Teachers([network(1), network(2)])


def without_norms() -> Teachers:
    return Teachers([network(1, "convnet:width=4,depth=2"), network(2, "convnet:width=4,depth=2")])


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[[[1.0, 2.0], [4.0, 8.0]]], [[[0.0, 0.0], [0.0, 3.0]]]])
    across = math.sqrt(1 + 16 + 9)
    down = math.sqrt(9 + 36 + 9)
    falling = math.sqrt(49 + 9)
    rising = math.sqrt(4)
    assert float(total_variation(x)) == pytest.approx(across + down + falling + rising, rel=1e-6)
    flat = torch.full((2, 1, 3, 3), 5.0).requires_grad_()
    assert torch.equal(torch.autograd.grad(total_variation(flat), flat)[0], torch.zeros_like(flat))  # no NaN


TEACHER, STUDENT = [[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]], [[0.0, 3.0, 0.0], [0.0, 3.0, 1.5]]


def laws(rows: list[list[float]], temperature: float = 3.0) -> list[list[float]]:
    found = []
    for row in rows:
        e = [math.exp(v / temperature) for v in row]
        found.append([v / sum(e) for v in e])
    return found


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_competition_is_one_minus_the_jensen_shannon_divergence() -> None:
    total = 0.0
    for p, q in zip(laws(TEACHER), laws(STUDENT), strict=True):
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        total += (kl(p, m) + kl(q, m)) / 2
    teacher, student = torch.tensor(TEACHER).requires_grad_(), torch.tensor(STUDENT).requires_grad_()
    value = competition(teacher, student)
    assert float(value.detach()) == pytest.approx(1 - total / 2, rel=1e-5)
    assert all(g.abs().min() > 0 for g in torch.autograd.grad(value, (teacher, student)))
    assert float(competition(torch.tensor(TEACHER), torch.tensor(TEACHER))) == pytest.approx(1, abs=1e-6)
    far = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])
    assert float(competition(*far)) == pytest.approx(1 - math.log(2), rel=1e-5)  # and finite


def test_reversed_competition_is_the_authors() -> None:
    total = 0.0
    for p, q in zip(laws(TEACHER), laws(STUDENT), strict=True):
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        total += (kl(m, p) + kl(m, q)) / 2
    value = reversed_competition(torch.tensor(TEACHER), torch.tensor(STUDENT))
    assert float(value) == pytest.approx(1 - total / 2, rel=1e-5)
    assert abs(float(value) - float(competition(torch.tensor(TEACHER), torch.tensor(STUDENT)))) > 1e-3
    far = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])  # P = (.99, .01), Q = (.01, .99), M = (.5, .5)
    divergence = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(0.5 / 0.01)
    assert float(reversed_competition(*far)) == pytest.approx(max(0.0, 1 - divergence), abs=1e-5)


@pytest.mark.parametrize("reversed_js", [False, True])
def test_loss_is_the_weighted_sum(reversed_js: bool) -> None:
    x, labels = torch.randn(6, *SHAPE, generator=stream(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    teachers, student = with_norms(), network(7)
    settings = Inversion(ce=2.0, tv=3.0, bn=4.0, adaptive=5.0, temperature=2.0, reversed_js=reversed_js)
    ours = settings.loss(teachers, student, x, labels)
    assert student.training
    joint = teachers.outputs(x)
    compete = reversed_competition if reversed_js else competition
    expected = 2 * cross_entropy(joint.mean, labels) + 3 * total_variation(x) + 4 * joint.bn
    expected = expected + 5 * compete(joint.mean, student.eval()(x), 2.0)
    assert torch.allclose(ours, expected, rtol=1e-5) and float(joint.bn) > 0


def made(teachers: Teachers, *, seed: int = 0, steps: int = 3, **changes: Any) -> tuple[Records, Tensor]:
    student = network(7)
    nets = (student, *teachers.networks)
    before = [value.clone() for net in nets for value in net.state_dict().values()]
    settings = Inversion(**{"batch_size": 12, "steps": steps, **changes})
    found = settings.epoch(teachers, student, LIKE, stream(seed))
    after = [value for net in nets for value in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for net in nets for p in net.parameters()) and student.training
    return found


@pytest.mark.parametrize("kind", [with_norms, without_norms])
def test_a_batch_is_8_bit_images_and_what_the_teachers_say(kind: Any) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    images, logits = made(kind())
    assert torch.equal(torch.get_rng_state(), before)
    assert images.images.shape == (12, *SHAPE) and images.images.dtype == torch.uint8
    assert torch.equal(images.labels, images.labels.sort().values) and images.normalisation == LIKE.normalisation
    assert torch.allclose(logits, kind().predict(images), atol=1e-5) and not logits.requires_grad
    assert torch.equal(images.images, made(kind())[0].images)
    assert not torch.equal(images.images, made(kind(), seed=1)[0].images)


def test_images_start_as_noise_in_normalised_units() -> None:
    images, _ = made(with_norms(), steps=1, lr=1e-9, batch_size=500)
    for channel, (mean, std) in enumerate(((0.4, 0.2), (0.6, 0.3))):
        pixels = images.pixels()[:, channel]
        clamped = (mean + std * torch.randn(10**5, generator=stream(3))).clamp(0, 1)
        assert float(pixels.mean()) == pytest.approx(float(clamped.mean()), abs=0.01)  # 32,000 pixels: 0.002 off
        assert float(pixels.std()) == pytest.approx(float(clamped.std()), abs=0.01)


def test_batch_norms_and_labels_are_what_images_come_to_fit() -> None:
    def distances(steps: int, teachers: Teachers, **changes: Any) -> tuple[float, float]:
        images, logits = made(teachers, steps=steps, adaptive=0.0, jitter=0, **changes)
        return float(cross_entropy(logits, images.labels)), float(teachers.outputs(images.inputs()).bn)

    teachers = with_norms()
    before, after = distances(1, teachers, lr=1e-9), distances(20, teachers, bn=1.0)
    assert after[1] < 0.5 * before[1]
    assert distances(20, teachers, bn=0.0)[0] < before[0] - 0.1
    plain = without_norms()
    assert distances(20, plain)[0] < distances(1, plain, lr=1e-9)[0] - 0.1


def test_the_jitter_rolls_what_the_networks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def watched(self: Inversion, _t: Any, _s: Any, x: Tensor, _labels: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.sum() * 0

    monkeypatch.setattr(Inversion, "loss", watched)
    made(with_norms(), steps=30, jitter=1)
    rolls = {(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)}
    first = seen[0]
    shifts = [
        [(a, b) for a in range(-2, 3) for b in range(-2, 3) if torch.equal(first.roll((a, b), (2, 3)), x)] for x in seen
    ]
    assert all(len(found) == 1 for found in shifts) and len({found[0] for found in shifts}) > 4
    assert len({found[0] for found in shifts}) <= len(rolls)


@pytest.mark.parametrize(("sign", "value"), [(1.0, 0), (-1.0, 255)])
def test_pixels_stay_in_their_range(monkeypatch: pytest.MonkeyPatch, sign: float, value: int) -> None:
    monkeypatch.setattr(Inversion, "loss", lambda _self, _t, _s, x, _labels: sign * x.sum())
    images, _ = made(with_norms(), steps=5, lr=10.0)
    assert bool((images.images == value).all())


def test_a_missing_main_term_is_said() -> None:
    assert Inversion().missing(with_norms()) is None
    mixed = Teachers([network(1), network(2, "convnet:width=4,depth=2"), network(3, "convnet:width=4,depth=2")])
    message = Inversion().missing(mixed)
    assert message is not None and message.startswith("2 of 3 networks have no batch normalisation")
    assert Inversion(bn=0).missing(mixed) is None


def test_pixels_that_are_not_finite_are_said() -> None:
    broken = network(1)
    with torch.no_grad():
        broken.fc.bias[0] = math.nan
    with pytest.raises(Diverged, match="lr=0.1 left pixels .* not finite"):
        Inversion(batch_size=2, steps=2).epoch(Teachers([broken]), network(7), LIKE, stream(0))


def test_published_is_the_authors_code() -> None:
    settings = Inversion.published()
    assert settings.reversed_js and (settings.steps, settings.bn, settings.tv) == (2000, 100.0, 2.5e-5)

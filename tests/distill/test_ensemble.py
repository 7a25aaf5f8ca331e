"""Weighted means of teachers against plain loops, and a student that learns them."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedstill.base.errors import Diverged
from fedstill.base.records import Examples, Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.ensemble import Distillation, Ensemble

N, CLASSES = 12, 3


def teachers(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Logits and positive weights."""
    rng = stream(0, "teachers")
    return [(3 * torch.randn(N, CLASSES, generator=rng), torch.rand(N, generator=rng) + 0.01) for _ in range(count)]


def images(n: int = N) -> Records:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=stream(1), dtype=torch.uint8)
    return Records(pixels, torch.zeros(n, dtype=torch.int64), 1, Normalisation((0.5,), (0.25,)))


def student() -> nn.Module:
    with isolated(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


def softmax(values: list[float]) -> list[float]:
    e = [math.exp(v) for v in values]
    return [v / sum(e) for v in e]


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
@pytest.mark.parametrize("weighted", [True, False])
def test_targets_are_the_formula_image_by_image(outputs: str, weighted: bool) -> None:
    ensemble = Ensemble(outputs)  # type: ignore[arg-type]
    for logits, weight in teachers():
        ensemble.add(logits, *([weight] if weighted else []))
    targets = ensemble.targets()
    assert targets.shape == (N, CLASSES)
    for i in range(N):
        above, below = [0.0] * CLASSES, 0.0
        for logits, weight in teachers():
            said = logits[i].tolist() if outputs == "logits" else softmax(logits[i].tolist())
            s = float(weight[i]) if weighted else 1.0
            above, below = [a + s * f for a, f in zip(above, said, strict=True)], below + s
        mean = [a / below for a in above]
        expected = softmax(mean) if outputs == "logits" else mean
        assert targets[i].tolist() == pytest.approx(expected, abs=1e-5)  # float32
        assert sum(expected) == pytest.approx(1)


def test_a_teacher_without_weight_says_nothing_and_numbers_weigh_like_vectors() -> None:
    (first, _), (second, _), *_ = teachers()
    alone, both, vector = Ensemble("logits"), Ensemble("logits"), Ensemble("logits")
    alone.add(first)
    both.add(first, 1.0)
    both.add(second, 1e-8)
    vector.add(first, torch.ones(N))
    vector.add(second, 1e-8)  # a number after a vector
    assert torch.allclose(alone.targets(), both.targets(), atol=1e-6)
    assert torch.equal(both.targets(), vector.targets())
    assert not torch.allclose(alone.targets(), second.softmax(1), atol=1e-2)


def test_logits_and_probabilities_differ_where_a_class_is_absent() -> None:
    sure = torch.tensor([[9.0, 0.0, 0.0]])
    means = {}
    for outputs in ("logits", "probabilities"):
        ensemble = Ensemble(outputs)  # type: ignore[arg-type]
        ensemble.add(sure)
        ensemble.add(torch.zeros(1, 3))
        means[outputs] = float(ensemble.targets()[0, 0])
    assert means["logits"] > 0.97
    assert means["probabilities"] == pytest.approx(2 / 3, abs=0.01)


def test_taking_teachers_in_changes_none_of_them() -> None:
    logits, weight = teachers()[0]
    before = logits.clone(), weight.clone()
    ensemble = Ensemble("logits")
    for _ in range(2):
        ensemble.add(logits, weight)
        ensemble.targets()
    assert torch.equal(logits, before[0]) and torch.equal(weight, before[1])


def test_no_teachers_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="there are 0 teachers to distil from; at least 1 is needed"):
        Ensemble("logits").targets()


def test_the_student_is_trained_by_adam_on_the_divergence_from_the_targets() -> None:
    targets = teachers()[0][0].softmax(1)
    ours, plain = student(), student()
    Distillation(lr=0.01, batch_size=5, epochs=3).distil(ours, images(), targets.double(), stream(2))
    rng, adam = stream(2), torch.optim.Adam(plain.parameters(), lr=0.01)
    torch.randint(2**63 - 1, (), generator=rng)  # the seed of dropout
    for _ in range(3):
        for batch in torch.randperm(N, generator=rng).split(5):
            y, p = targets[batch], plain(images().inputs(batch)).softmax(1)
            adam.zero_grad()
            (y * (y / p).log()).sum(1).mean().backward()
            adam.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        # the same sum in another order; Adam's first steps are of the size of lr whatever the gradient
        assert torch.allclose(a, b, atol=1e-5)
        assert not torch.equal(a, b.new_zeros(()))


def test_the_student_comes_to_say_what_it_is_taught() -> None:
    model, said = student(), teachers()[0][0].softmax(1)

    def away() -> float:
        with torch.no_grad():
            return float((model(images().inputs()).softmax(1) - said).abs().mean())

    before = away()
    Distillation(lr=0.05, epochs=200).distil(model, images(), said, stream(2))
    assert away() < 0.1 * before


def test_targets_of_exactly_zero_are_no_obstacle() -> None:
    model = student()
    Distillation(lr=0.01).distil(model, images(), torch.eye(3).repeat(4, 1), stream(2))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_labels_of_the_images_are_not_looked_at() -> None:
    found = []
    for label in (0, 2):
        model = student()
        public = Records(images().images, torch.full((N,), label), 3, images().normalisation)
        Distillation(lr=0.01).distil(model, public, teachers()[0][0].softmax(1), stream(2))
        found.append(model[1].weight.detach())  # type: ignore[index]
    assert torch.equal(*found)
    assert torch.equal(Examples(images(), teachers()[0][0]).inputs(torch.tensor([3])), images().inputs()[3:4])


def test_epochs_are_reported_and_divergence_is_said() -> None:
    seen: list[tuple[int, int]] = []
    Distillation(epochs=2).distil(
        student(), images(), torch.full((N, 3), 1 / 3), stream(2), lambda *pair: seen.append(pair)
    )
    assert seen == [(1, 2), (2, 2)]
    broken = student()
    broken.register_buffer("moment", torch.tensor(math.nan))
    with pytest.raises(Diverged):
        Distillation().distil(broken, images(), torch.full((N, 3), 1 / 3), stream(2))

"""Co-Boosting's losses, perturbation and weights against its authors' formulas, worked out another way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.boosting import (
    HardGeneration,
    Reweighting,
    adversarial_loss,
    clipped,
    cosine,
    hard_loss,
    perturbed,
    reweighted,
)
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Teachers, weighted

LIKE = Records(torch.empty(0, 1, 8, 8, dtype=torch.uint8), torch.empty(0).long(), 3, Normalisation((0.4,), (0.2,)))
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}  # float64, a few sums in another order


def logits(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=stream(0, *shape), dtype=torch.float64)


def networks(count: int) -> list[nn.Module]:
    with isolated(0):
        return [nn.Sequential(nn.Flatten(), nn.Linear(64, 3)) for _ in range(count)]


@pytest.mark.parametrize("hardness", [0.0, 1.0, 2.5])
def test_the_hard_loss_and_its_gradient_are_the_published_ones(hardness: float) -> None:
    own, other = (logits(7, 3).requires_grad_() for _ in range(2))
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    mask = torch.zeros(7, 3).scatter(1, labels[:, None], 1.0).bool()
    p = softmax(other, 1)[mask].detach()
    published = ((1 - p).pow(hardness) * nn.CrossEntropyLoss(reduction="none")(other, labels)).mean()
    found = hard_loss(own, labels, hardness)
    torch.testing.assert_close(found, published, **EXACT)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v, x in ((found, own), (published, other))), **EXACT)
    if hardness == 0:
        torch.testing.assert_close(found, cross_entropy(own, labels), **EXACT)


def test_the_adversarial_loss_and_both_gradients_are_the_published_ones() -> None:
    both = [logits(5, 4).requires_grad_(), (logits(5, 4) * 0.3 + 1).requires_grad_()]
    q, p = log_softmax(both[1] / 3, 1), softmax(both[0] / 3, 1)
    published = -(kl_div(q, p, reduction="none") * 9).sum(1).mean()
    found = adversarial_loss(*both)
    torch.testing.assert_close(found, published, **EXACT)
    for own, theirs in zip(torch.autograd.grad(found, both), torch.autograd.grad(published, both), strict=True):
        torch.testing.assert_close(own, theirs, **EXACT)
    assert float(found.detach()) < 0  # most negative where student and ensemble differ most


def test_the_generation_s_loss_is_the_sum_of_its_parts() -> None:
    first, second, student = networks(3)
    weights = torch.tensor([0.75, 0.25])
    x, labels = torch.randn(4, 1, 8, 8, generator=stream(1)), torch.tensor([0, 1, 2, 0])
    mean = 0.75 * first(x) + 0.25 * second(x)
    expected = 2 * hard_loss(mean, labels, 1.5) + 0.5 * adversarial_loss(mean, student(x), 2.0)
    settings = HardGeneration(ce=2.0, div=0.5, hardness=1.5, div_temperature=2.0)
    found = settings.loss(Teachers([first, second], weights=weights), student, x, labels)
    torch.testing.assert_close(found, expected)
    alone = HardGeneration(ce=2.0, div=0.0, hardness=1.5)
    assert float(alone.loss(Teachers([first, second]), student, x, labels)) >= 0


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_weighted_ensemble_of_equal_weights_is_the_mean(average: Any) -> None:
    each = logits(5, 4, 3)
    plain = Teachers(networks(4), average=average).averaged(each)
    torch.testing.assert_close(weighted(each, torch.full((4,), 0.3).double(), average), plain, **EXACT)
    alone = weighted(each, torch.tensor([0.0, 0.0, 0.2, 0.0]).double(), average)
    torch.testing.assert_close(alone.softmax(1), each[:, 2].softmax(1), **EXACT)


def test_a_step_of_the_weights_lowers_the_loss_by_the_sign_of_its_difference_quotient() -> None:
    each, labels, weights = logits(9, 4, 3), torch.tensor([0, 1, 2] * 3), torch.tensor([0.1, 0.5, 0.2, 1.0]).double()

    def loss(w: Tensor) -> float:
        return float(cross_entropy(sum(w[k] * each[:, k] for k in range(4)) / w.sum(), labels))

    new = reweighted(weights, each, labels, 0.01)
    for k in range(4):
        up, down = (weights + h * torch.eye(4).double()[k] for h in (1e-6, -1e-6))
        expected = (weights[k] - 0.01 * (1 if loss(up) > loss(down) else -1)).clamp(0, 1)
        assert float(new[k]) == pytest.approx(float(expected), abs=1e-12)
    assert loss(new) < loss(weights)


def test_the_last_teacher_keeps_its_weight() -> None:
    """The loss does not depend on the weights' scale, so w g = 0; rounding may still give the last one a gradient."""
    for seed in range(50):
        each = 20 * torch.randn(3, 1, 2, generator=stream(seed))
        weights = torch.rand(1, generator=stream(seed, 1)) * 0.02
        assert float(reweighted(weights, each, torch.tensor([0, 1, 1]), 0.02)) > 0


def test_weights_leave_a_teacher_that_contradicts_the_labels() -> None:
    good, bad = networks(2)
    images = torch.randint(0, 256, (40, 1, 8, 8), generator=stream(2), dtype=torch.uint8)
    labels = good(LIKE.normalisation.apply(images / 255)).argmax(1)
    pool = Pool(LIKE, 40)
    pool.add(Records(images, labels, 3, LIKE.normalisation), torch.zeros(40, 3))
    weights = torch.tensor([0.5, 0.5])
    teachers = Teachers([good, bad], weights=weights)
    for epoch in range(1, 6):
        weights = Reweighting().fit(weights, teachers, pool, epoch, stream(epoch), average="logits", batch_size=8)
    assert weights[0] > 0.9
    assert weights[1] < 0.1


def test_a_perturbation_has_its_size_and_moves_the_prediction_in_a_random_direction() -> None:
    model = networks(1)[0]
    x, size = torch.randn(6, 1, 8, 8, generator=stream(3)), torch.full((1, 1, 1), 0.05)
    found = perturbed(x, Teachers([model]), size, stream(4))
    u = 2 * torch.rand(6, 3, generator=stream(4)) - 1
    other = x.clone().requires_grad_()
    (u * softmax(model(other) / 4, 1)).sum().backward()
    assert other.grad is not None
    torch.testing.assert_close(found, x + 0.05 * torch.sign(other.grad))
    assert not found.requires_grad
    assert not torch.equal(found, perturbed(x, Teachers([model]), size, stream(5)))


def test_a_clipped_gradient_is_as_torch_clips_it() -> None:
    for scale in (0.1, 30.0):
        values = [scale * logits(3, 2), scale * logits(5)]
        weights = [torch.zeros_like(v).requires_grad_() for v in values]
        for weight, value in zip(weights, values, strict=True):
            weight.grad = value.clone()
        nn.utils.clip_grad_norm_(weights, 10.0)
        for own, weight in zip(clipped(10.0)(weights, values), weights, strict=True):
            torch.testing.assert_close(own, weight.grad)


def test_the_learning_rate_is_that_of_torch_s_cosine() -> None:
    adam = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=7)
    for epoch in range(1, 8):
        assert cosine(0.3, epoch, 7) == pytest.approx(schedule.get_last_lr()[0])
        adam.step()
        schedule.step()

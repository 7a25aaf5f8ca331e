"""The distance, its gradient, and the fast step against the plain one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstill.distill.gradient_matching import Distance, gradient_distance, match, matched_parameters
from fedstill.models import build
from fedstill.seeds import isolated, stream

KINDS: list[Distance] = ["grouped", "mse", "cos"]


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = stream(seed, "tensors")
    return [torch.randn(*shape, generator=rng, dtype=dtype) for shape in ((3, 2, 2, 2), (3,), (4, 5), (4,))]


def test_distances_by_hand() -> None:
    g, h = (
        [torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([9.0])],
        [torch.tensor([[4.0, 3.0], [0.0, 2.0]]), torch.ones(1)],
    )
    # rows: 1 - 24/25 and 1 - 0; the vector counts 0
    assert gradient_distance(g, h, "grouped").item() == pytest.approx(0.04 + 1.0, abs=1e-6)
    assert gradient_distance(g, h, "mse").item() == pytest.approx(1 + 1 + 1 + 4 + 64)
    cosine = (24 + 0 + 9) / ((25 + 1 + 81) ** 0.5 * (25 + 4 + 1) ** 0.5)
    assert gradient_distance(g, h, "cos").item() == pytest.approx(1 - cosine, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_gradients_are_at_distance_0_and_opposite_ones_are_not(kind: Distance) -> None:
    g = tensors(0)
    assert gradient_distance(g, g, kind).item() == pytest.approx(0, abs=1e-5)  # the 1e-6 in the denominator
    assert gradient_distance(g, [-t for t in g], kind).item() > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_distances_gradient_agrees_with_finite_differences(kind: Distance) -> None:
    h = tensors(1)
    torch.autograd.gradcheck(lambda *g: gradient_distance(g, h, kind), [t.requires_grad_() for t in tensors(0)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_images_gradient_agrees_with_finite_differences(kind: Distance) -> None:
    """Through two derivatives of a network with smooth activations, in float64."""
    with isolated(0):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 9, 3)).double()
    rng = stream(0, "images")
    real = torch.randn(7, 1, 5, 5, generator=rng, dtype=torch.float64)
    images = torch.randn(2, 1, 5, 5, generator=rng, dtype=torch.float64)
    _, (gradient,) = match(model, [real], [images], [1], kind)
    for at in ((0, 0, 0, 0), (1, 0, 2, 3), (0, 0, 4, 4)):
        step = torch.zeros_like(images)
        step[at] = 1e-5
        up, down = (float(match(model, [real], [images + s], [1], kind)[0]) for s in (step, -step))
        # central differences: error of order h^2 = 1e-10 and of rounding / h = 1e-11
        assert float(gradient[at]) == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-8)


def plain(
    model: nn.Module, real: list[Tensor], images: list[Tensor], labels: list[int], kind: Any
) -> tuple[Tensor, Any]:
    """Dataset condensation's loop: a class at a time, all parameters, one backward pass for the sum."""
    parameters = list(model.parameters())
    leaves = [x.detach().requires_grad_() for x in images]
    total = torch.zeros(())
    for x, s, label in zip(real, leaves, labels, strict=True):
        loss = functional.cross_entropy(model(x), torch.full((len(x),), label))
        target = [g.detach() for g in torch.autograd.grad(loss, parameters)]
        loss = functional.cross_entropy(model(s), torch.full((len(s),), label))
        total = total + gradient_distance(torch.autograd.grad(loss, parameters, create_graph=True), target, kind)
    return total.detach(), torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["convnet:width=16,depth=2", "convnet:width=8,depth=2,norm=batch", "lenet:padding=2"])
def test_the_fast_step_equals_the_plain_loop(kind: Distance, spec: str) -> None:
    with isolated(0):
        model = build(spec, (1, 12, 12), 10)
    rng = stream(0, "batches")
    labels = [2, 7, 0]
    real = [torch.randn(n, 1, 12, 12, generator=rng) for n in (37, 16, 5)]
    images = [torch.randn(4, 1, 12, 12, generator=rng) for _ in labels]
    loss, gradients = match(model, real, images, labels, kind)
    expected, wanted = plain(model, real, images, labels, kind)
    # float32 sums in another order
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_the_step_leaves_the_model_as_it_is() -> None:
    with isolated(0):
        model = build("convnet:width=8,depth=2", (1, 8, 8), 10)
    before = [p.detach().clone() for p in model.parameters()]
    match(model, [torch.rand(5, 1, 8, 8)], [torch.rand(2, 1, 8, 8)], [3])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_vectors_are_matched_only_where_they_count() -> None:
    model = nn.Linear(3, 2)
    assert [p.dim() for p in matched_parameters(model, "grouped")] == [2]
    assert [p.dim() for p in matched_parameters(model, "cos")] == [2, 1]


def test_unknown_distances_are_refused() -> None:
    with pytest.raises(ValueError, match="distance='l1' is unknown; use 'grouped', 'mse' or 'cos'"):
        gradient_distance(tensors(0), tensors(1), "l1")  # type: ignore[arg-type]

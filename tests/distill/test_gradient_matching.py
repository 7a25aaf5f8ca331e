"""The distance against its formula and finite differences; the fast step against a plain loop over classes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.seeds import isolated, stream
from fedstill.distill.gradient_matching import Distance, gradient_distance, match, matched_parameters, real_gradient
from fedstill.models.cnn import ConvNet

KINDS: list[Distance] = ["grouped", "mse", "cos"]
SHAPES = [(3, 2, 3, 3), (3,), (4, 12), (4,)]  # a convolution and a linear layer with their biases


def gradients(*names: str) -> list[Tensor]:
    rng = stream(0, *names)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with isolated(seed):
        return ConvNet((1, 16, 16), 4, width=8, depth=2).to(dtype)


def batches(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = stream(1, "images", n)
    return [torch.randn(n, 1, 16, 16, generator=rng, dtype=dtype) for _ in range(3)]


def test_grouped_is_one_minus_cosine_of_each_row_of_each_matrix() -> None:
    ours, theirs = gradients("g"), gradients("h")
    expected = 0.0
    for g, h in zip(ours, theirs, strict=True):
        if g.dim() > 1:
            for row, other in zip(g.reshape(len(g), -1), h.reshape(len(h), -1), strict=True):
                expected += float(1 - row @ other / (row.norm() * other.norm() + 1e-6))
    assert float(gradient_distance(ours, theirs)) == pytest.approx(expected, rel=1e-12)


def test_mse_and_cos_take_all_entries_vectors_included() -> None:
    ours, theirs = gradients("g"), gradients("h")
    g, h = (torch.cat([t.flatten() for t in side]) for side in (ours, theirs))
    assert float(gradient_distance(ours, theirs, "mse")) == pytest.approx(float(((g - h) ** 2).sum()), rel=1e-12)
    cosine = float(g @ h / (g.norm() * h.norm() + 1e-6))
    assert float(gradient_distance(ours, theirs, "cos")) == pytest.approx(1 - cosine, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_gradients_have_distance_nearly_zero_and_opposite_ones_do_not(kind: Distance) -> None:
    g = gradients("g")
    assert float(gradient_distance(g, g, kind)) == pytest.approx(0, abs=1e-5)  # 1e-6 in the denominator, 7 rows
    assert float(gradient_distance(g, [-t for t in g], kind)) > 1.9


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_of_the_distance_is_its_finite_difference(kind: Distance) -> None:
    ours = [g.requires_grad_() for g in gradients("g")]
    assert torch.autograd.gradcheck(lambda *g: gradient_distance(g, gradients("h"), kind), ours)


def test_vectors_count_only_where_the_distance_looks_at_them() -> None:
    ours, theirs = gradients("g"), gradients("h")
    moved = [g + 1.0 if g.dim() == 1 else g for g in ours]
    assert float(gradient_distance(moved, theirs)) == float(gradient_distance(ours, theirs))
    for kind in ("mse", "cos"):
        assert float(gradient_distance(moved, theirs, kind)) != float(gradient_distance(ours, theirs, kind))
    assert {p.dim() for p in matched_parameters(network(), "grouped")} == {2, 4}
    assert {p.dim() for p in matched_parameters(network(), "mse")} == {1, 2, 4}


def test_an_unknown_distance_is_refused() -> None:
    with pytest.raises(ValueError, match="'l1' is unknown; use 'grouped', 'mse', 'cos' or 'convolutions'"):
        gradient_distance(gradients("g"), gradients("h"), "l1")  # type: ignore[arg-type]


def plain(
    model: nn.Module, real: list[Tensor], synthetic: list[Tensor], labels: list[int], kind: Distance
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """DC's loop: whole batches, all parameters, one backward pass for the sum over classes."""
    parameters = list(model.parameters())
    images = [s.clone().requires_grad_() for s in synthetic]
    loss = torch.zeros((), dtype=images[0].dtype)
    for x, s, c in zip(real, images, labels, strict=True):
        h = torch.autograd.grad(cross_entropy(model(x), torch.full((len(x),), c)), parameters)
        g = torch.autograd.grad(cross_entropy(model(s), torch.full((len(s),), c)), parameters, create_graph=True)
        loss = loss + gradient_distance(g, h, kind)
    return loss.detach(), torch.autograd.grad(loss, images)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_equals_a_plain_loop_over_classes(kind: Distance, dtype: torch.dtype) -> None:
    model, labels = network(dtype=dtype), [2, 0, 3]
    real, synthetic = batches(37, dtype), batches(5, dtype)  # 37: a last chunk that isn't full
    loss, ours = match(model, real, synthetic, labels, kind)
    expected, theirs = plain(model, real, synthetic, labels, kind)
    # Chunks add up in another order. "cos" in float32 is a difference of numbers near 1: rounding, 6e-8 of 1, is large.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance * float(other.abs().max()))


def test_the_gradient_of_the_step_is_its_finite_difference() -> None:
    with isolated(0):  # smooth activations: at a ReLU's kink finite differences mean nothing
        model = ConvNet((1, 8, 8), 3, width=4, depth=1, activation="swish").double()
    rng = stream(0, "images")
    real, start = (torch.randn(n, 1, 8, 8, generator=rng, dtype=torch.float64) for n in (6, 2))
    (gradient,) = match(model, [real], [start], [1])[1]
    direction = torch.randn(start.shape, generator=rng, dtype=torch.float64)
    step = 1e-5
    above, below = (float(match(model, [real], [start + sign * step * direction], [1])[0]) for sign in (1, -1))
    slope = (above - below) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6)  # error of order step^2 = 1e-10


def test_the_model_and_the_images_stay_as_they_are() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    synthetic = batches(5)
    kept = [s.clone() for s in synthetic]
    match(model, batches(20), synthetic, [0, 1, 2])
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(s, old) and not s.requires_grad for s, old in zip(synthetic, kept, strict=True))


def test_the_real_gradient_is_the_mean_over_the_batch_and_has_no_graph() -> None:
    model, x = network(dtype=torch.float64), batches(20, torch.float64)[0]
    parameters = matched_parameters(model, "grouped")
    both = real_gradient(model, x, 1, parameters)
    halves = [real_gradient(model, part, 1, parameters) for part in (x[:10], x[10:])]
    for whole, a, b in zip(both, *halves, strict=True):
        assert not whole.requires_grad
        torch.testing.assert_close(whole, (a + b) / 2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"),
    [((1, 28, 28), 10, 317_706), ((3, 32, 32), 10, 320_010), ((3, 32, 32), 100, 504_420), ((1, 32, 32), 10, 317_706)],
)
def test_convnet_has_the_published_size(shape: tuple[int, int, int], classes: int, parameters: int) -> None:
    model = ConvNet(shape, classes)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.features(torch.zeros(1, *shape)).shape == (1, 2048)


def test_average_pooling_is_that_of_torch() -> None:
    for size in ((8, 8), (9, 7)):
        x = torch.randn(2, 3, *size, generator=stream(0), dtype=torch.float64)
        pooled = ConvNet((3, 16, 16), 2, width=4).layers[3](x)
        torch.testing.assert_close(pooled, nn.functional.avg_pool2d(x, 2))


def test_images_too_small_for_the_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="depth=4 halves images of 8x8 pixels to nothing; use depth=3"):
        ConvNet((1, 8, 8), 10, depth=4)


@pytest.mark.parametrize("alone", ["real", "synthetic"])
def test_one_image_of_a_class_is_refused_where_batch_norms_see_one_pixel(alone: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 16), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 4))
    sizes = {"real": 4, "synthetic": 3, alone: 1}
    with pytest.raises(ValueError, match="1 image of a class is too few .* take --ipc 2, .* without batch norms"):
        match(model, batches(sizes["real"]), batches(sizes["synthetic"]), range(3))
    match(model, batches(4), batches(3), range(3))


def test_the_distance_of_convolutions_leaves_out_everything_else() -> None:
    one, other = ([torch.randn(4, 2, 3, 3), torch.randn(4), torch.randn(5, 4)] for _ in range(2))
    assert gradient_distance(one, other, "convolutions") == ((one[0] - other[0]) ** 2).sum()
    with pytest.raises(ValueError, match="'convolutions' needs a network with convolutions"):
        gradient_distance(one[1:], other[1:], "convolutions")

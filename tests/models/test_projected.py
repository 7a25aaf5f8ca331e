"""FedRD's network: sizes, the order of the reshape, and the lean forward pass against the plain one."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedstill import models
from fedstill.base.seeds import isolated, stream
from fedstill.models import projected
from fedstill.models.projected import Projected, TaskNetwork


def network(shape: tuple[int, int, int] = (3, 16, 8), width: int = 8) -> Projected:
    with isolated(0):
        return Projected(shape, 4, width=width)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, "images"))


@pytest.mark.parametrize(
    ("shape", "classes", "projection", "task", "features"),
    [
        ((3, 32, 32), 10, 1_392, 317_706, 2048),
        ((1, 28, 28), 10, 1_248, 308_746, 1152),
        ((3, 32, 32), 100, 1_392, 502_116, 2048),
        ((1, 8, 8), 10, 1_248, 298_506, 128),
    ],
)
def test_both_parts_have_the_published_sizes(
    shape: tuple[int, int, int], classes: int, projection: int, task: int, features: int
) -> None:
    model = models.build("projected", shape, classes)
    assert isinstance(model, Projected)
    assert [sum(p.numel() for p in part.parameters()) for part in (model.projection, model.task)] == [projection, task]
    assert [name for name, _ in model.named_children()] == ["projection", "task"]
    x = images(2, *shape)
    assert model.projection(x).shape == (2, 1, *shape[1:])
    assert models.features(model, x).shape == (2, features)
    assert model(x).shape == (2, classes)


def test_representations_are_channels_then_rows_then_columns() -> None:
    model = network((3, 16, 8))
    x = images(2, 3, 16, 8)
    maps = model.projection.conv2(relu(model.projection.conv1(x)))
    assert maps.shape == (2, 16, 4, 2)
    z = model.projection(x)
    for channel in range(16):  # a channel's 4 x 2 values fill one row of 8
        assert torch.equal(z[:, 0, channel], maps[:, channel].reshape(2, 8))
    assert bool((z < 0).any()) and bool((z > 0).any())


def test_logits_are_the_task_of_the_projection_and_width_is_an_option() -> None:
    model = models.build("projected:width=4", (1, 16, 16), 3).eval()
    assert isinstance(model, Projected) and model.task.fc.in_features == 16
    x = images(2, 1, 16, 16)
    assert torch.equal(model(x), model.task(model.projection(x)))
    assert torch.equal(model(x), model.task.fc(models.features(model, x)))


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 30, 28), "30x28.*multiples of 4"), ((3, 32, 6), "32x6"), ((1, 4, 4), "4x4.*8x8")]
)
def test_images_of_other_sizes_are_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        models.build("projected", shape, 10)
    assert "\n" not in str(caught.value)


def plain(task: TaskNetwork, x: Tensor) -> Tensor:
    """The task network as one writes it down."""
    for conv, norm in zip(task.convs, task.norms, strict=True):
        x = max_pool2d(relu(norm(conv(x))), 2)
    return x.flatten(1)


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("side", [16, 14])
def test_the_lean_pass_gives_features_and_running_statistics_of_the_plain_one(scale: float, side: int) -> None:
    with isolated(0):
        task = TaskNetwork((1, side, side), 4, width=8)
    with torch.no_grad():
        for norm in task.norms:
            norm.weight.uniform_(0.5, 2, generator=stream(0, "scales"))
            norm.weight[3] *= scale  # a scale below 0 turns the order of values around, so this must go the plain way
            norm.bias.uniform_(-1, 1, generator=stream(0, "shifts"))
    other, x = copy.deepcopy(task), 3 * images(37, 1, side, side) + 1
    expected = plain(other, x)
    with torch.no_grad():
        lean = task.features(x)
    with_graph = copy.deepcopy(task).features(x)
    # Sums over 37 images in another order, in float32.
    torch.testing.assert_close(lean, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(with_graph, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(task.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_lean_pass_is_taken_and_only_in_train_mode_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], projected.pool_first
    monkeypatch.setattr(projected, "pool_first", lambda *a: (calls.append(1), original(*a))[1])
    task, x = network().task, images(5, 1, 16, 8)
    task.features(x)
    assert calls == []
    with torch.no_grad():
        task.features(x)
        assert len(calls) == 3
        task.eval().features(x)
    assert len(calls) == 3


def test_inputs_with_little_contrast_lose_no_digits() -> None:
    with isolated(0):
        task = TaskNetwork((1, 16, 16), 4, width=8)
    x = 1000 + 0.01 * images(20, 1, 16, 16)  # the mean's square is 10^10 variances: its float32 has none of them left
    conv, norm = task.convs[0], task.norms[0]
    assert isinstance(norm, nn.BatchNorm2d)
    conv.padding = (0, 0)  # else the border of zeros is contrast
    with torch.no_grad():
        expected = max_pool2d(relu(norm(conv(x))), 2)
        found = projected.pool_first(x, conv, norm)
    assert torch.equal(found, expected)

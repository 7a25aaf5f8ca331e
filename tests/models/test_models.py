"""Models by name: parameter counts, options, networks of one's own, features, pooling."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import avg_pool2d, max_pool2d

from fedstill import models
from fedstill.base.seeds import isolated
from fedstill.models.cnn import AvgPool2, max_pool2

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "num_classes", "count"),
    [
        ("convnet", MNIST, 10, 317_706),
        ("convnet", CIFAR, 10, 320_010),
        ("convnet", CIFAR, 100, 504_420),
        ("lenet", MNIST, 10, 44_426),
        ("lenet5", MNIST, 10, 44_426),
        ("lenet", CIFAR, 10, 62_006),
        ("dense-cnn1", CIFAR, 10, 122_570),
        ("dense-cnn2", CIFAR, 10, 319_242),
        ("dense-cnn2:width=256", CIFAR, 100, 1_097_188),
        ("dense-mnist", MNIST, 10, 29_034),
        ("kadp-mnist", MNIST, 10, 215_370),
        ("kadp-cifar", CIFAR, 10, 188_810),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("wrn", CIFAR, 10, 175_066),
        ("wrn:depth=40", CIFAR, 10, 563_930),
    ],
)
def test_parameter_counts_are_the_published_ones(
    spec: str, shape: tuple[int, int, int], num_classes: int, count: int
) -> None:
    assert parameters(models.build(spec, shape, num_classes)) == count


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR], ids=str)
@pytest.mark.parametrize(
    "spec",
    ["convnet:width=8,depth=2", "lenet:padding=2", "dense-mnist", "kadp-mnist", "kadp-cifar", "resnet18", "wrn"],
)
def test_logits_and_features_have_a_row_per_image(spec: str, shape: tuple[int, int, int]) -> None:
    model = models.build(spec, shape, 7).eval()
    x = torch.rand(3, *shape)
    assert model(x).shape == (3, 7)
    features = models.features(model, x)
    assert features.ndim == 2
    assert models.feature_width(model, shape) == features.shape[1]
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    assert torch.equal(last(features), model(x))


def test_resnet18_has_the_published_buffers() -> None:
    assert sum(b.numel() for b in models.build("resnet18", CIFAR, 10).buffers()) == 9_620


def test_a_wide_resnet_activates_before_each_convolution_and_shares_that_where_the_shape_changes() -> None:
    model = models.build("wrn:depth=10,width=2", DIGITS, 10).eval()
    stem, first, second, third, norm, last = model.body
    assert (type(norm), type(last)) == (nn.BatchNorm2d, nn.ReLU)
    x = torch.rand(2, 16, 8, 8)
    for block in (first, second, third):
        active = torch.relu(block.norm1(x))
        residual = block.conv2(torch.relu(block.norm2(block.conv1(active))))
        assert torch.equal(block(x), block.shortcut(active) + residual)
        x = block(x)
    assert x.shape == (2, 128, 2, 2)  # 64 channels, twice as wide; two strides of 2
    same = models.build("wrn", DIGITS, 10).eval().body[1]  # 16 channels in and out
    x = torch.rand(2, 16, 8, 8)
    residual = same.conv2(torch.relu(same.norm2(same.conv1(torch.relu(same.norm1(x))))))
    assert torch.equal(same(x), x + residual)


def test_options_reach_the_network() -> None:
    assert parameters(models.build("wrn:width=2", CIFAR, 10)) > 3 * parameters(models.build("wrn", CIFAR, 10))
    assert parameters(models.build("convnet:width=32,depth=2", MNIST, 10)) < 100_000
    assert any(isinstance(m, nn.BatchNorm2d) for m in models.build("convnet:norm=batch", MNIST, 10).modules())


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("resnet999", MNIST, "no model 'resnet999'; did you mean resnet8"),
        ("", MNIST, "no model ''"),
        ("convnet:widht=8", MNIST, "'widht=8'.*from: width"),
        ("convnet:width", MNIST, "'width'.*option=value"),
        ("convnet:width=8,width=9", MNIST, "'width=9'.*at most once"),
        ("convnet:width=eight", MNIST, "'width=eight'.*integer"),
        ("lenet:padding=-1", MNIST, "'padding=-1'.*greater than or equal to 0"),
        ("dense-mnist:width=8", MNIST, "no options"),
        ("lenet", DIGITS, "8x8.*16x16.*padding=2"),
        ("lenet", (1, 15, 28), "15x28"),
        ("dense-cnn1", DIGITS, "8x8.*18x18"),
        ("dense-cnn2", (3, 32, 17), "32x17.*18x18"),
        ("dense-mnist", (1, 3, 3), "3x3.*4x4"),
        ("kadp-mnist", (1, 3, 4), "3x4.*4x4"),
        ("kadp-cifar", (3, 7, 8), "7x8.*8x8"),
        ("resnet18", (1, 7, 8), "7x8.*8x8"),
        ("wrn", (1, 7, 8), "7x8.*8x8"),
        ("wrn:depth=17", MNIST, r"6 n \+ 4.*depth=17.*16 or 22"),
        ("nowhere.to:be_found", MNIST, "can't be imported"),
    ],
)
def test_a_bad_specification_is_one_clear_sentence(spec: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        models.build(spec, shape, 10)
    assert "\n" not in str(caught.value)


def test_the_smallest_images_named_in_errors_work() -> None:
    assert models.build("lenet", (1, 16, 16), 3)(torch.rand(2, 1, 16, 16)).shape == (2, 3)
    assert models.build("dense-cnn1", (3, 18, 18), 3)(torch.rand(2, 3, 18, 18)).shape == (2, 3)
    assert models.build("dense-mnist", (1, 4, 4), 3)(torch.rand(2, 1, 4, 4)).shape == (2, 3)


OWN = """
import torch
from torch import nn

def good(shape, num_classes):
    c, h, w = shape
    return nn.Sequential(nn.BatchNorm2d(c), nn.Flatten(), nn.Linear(c * h * w, num_classes))

def too_wide(shape, num_classes):
    return good(shape, num_classes + 1)

def wrong_size(shape, num_classes):
    return good((shape[0], 5, 5), num_classes)

def not_a_module(shape, num_classes):
    return "net"

def broken(shape, num_classes):
    raise KeyError("width")

def sparse(shape, num_classes):
    net = good(shape, num_classes)
    net.register_buffer("links", torch.eye(3).to_sparse())
    return net

def infinite(shape, num_classes):
    net = good(shape, num_classes)
    net[2].weight.data[0, 0] = float("nan")
    return net

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_network_of_ones_own(own: str) -> None:
    model = models.build(f"{own}:good", DIGITS, 4)
    assert model(torch.rand(3, *DIGITS)).shape == (3, 4)
    assert model.training
    # The check on a batch of zeros must not move the running statistics.
    fresh = models.build(f"{own}:good", DIGITS, 4)
    assert int(fresh[0].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_wide", r"gives \(2, 5\).*\(n, 4\)"),
        ("wrong_size", "fails on a batch of zeros"),
        ("not_a_module", "returned a str"),
        ("broken", r"can't be built for records of .*KeyError\('width'\)"),
        ("sparse", "'links' is sparse"),
        ("infinite", "'2.weight' has a value that is not finite"),
        ("number", "not a function"),
        ("missing", "can't be imported"),
    ],
)
def test_a_network_of_ones_own_is_checked(own: str, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(f"{own}:{function}", DIGITS, 4)


@pytest.mark.parametrize("spec", ["convnet:width=8", "lenet", "dense-cnn1", "dense-cnn2:width=8", "dense-mnist", "wrn"])
def test_first_weights_come_from_the_isolated_stream(spec: str) -> None:
    def weights(seed: int) -> Tensor:
        with isolated(seed):
            return torch.cat([p.detach().flatten() for p in models.build(spec, MNIST, 10).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_features_without_a_method_are_the_input_of_the_last_linear_layer() -> None:
    with isolated(1):  # with other draws all of the five ReLUs may be off
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
        x = torch.rand(2, *DIGITS, requires_grad=True)
    found = models.features(model, x)
    assert torch.equal(found, model[:3](x))
    assert torch.autograd.grad(found.sum(), x)[0].abs().sum() > 0
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_features_need_a_linear_layer() -> None:
    with pytest.raises(ValueError, match="no features.*nn.Linear"):
        models.features(nn.Sequential(nn.Flatten()), torch.rand(2, *DIGITS))


def tied(*shape: int) -> Tensor:
    """Values of which many are equal, so that the choice among equal maxima shows."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("shape", [(50, 6, 24, 24), (16, 8, 30, 18), (50, 6, 25, 24), (2, 3, 4, 4)], ids=str)
def test_max_pool2_is_pytorchs_to_the_bit(shape: tuple[int, ...]) -> None:
    def derivatives(pool: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = tied(*shape).requires_grad_()
        y = pool(x)
        g = torch.linspace(-1, 1, y.numel()).view_as(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
        (dg,) = torch.autograd.grad(dx.square().sum(), g)
        return [y, dx, dg]

    for ours, theirs in zip(derivatives(max_pool2), derivatives(lambda x: max_pool2d(x, 2)), strict=True):
        assert torch.equal(ours, theirs)


def test_max_pool2_does_not_hide_nan() -> None:
    x = tied(50, 6, 24, 24)
    x[3, 2, 5, 7] = torch.nan
    assert torch.equal(max_pool2(x).isnan(), max_pool2d(x, 2).isnan())


def test_max_pool2_under_vmap_gives_the_gradient_of_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.models.cnn._SMALL", 0)
    model = models.build("lenet", (1, 16, 16), 3)
    weights = dict(model.named_parameters())
    x = tied(4, 1, 16, 16)

    def loss(weights: dict[str, Tensor], record: Tensor) -> Tensor:
        result: Tensor = functional_call(model, weights, (record[None],)).square().sum()
        return result

    together = vmap(grad(loss), (None, 0))(weights, x)
    for i, record in enumerate(x):
        for name, alone in grad(loss)(weights, record).items():
            # Rounding of float32 sums of a few hundred terms in another order.
            torch.testing.assert_close(together[name][i], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("convnet:width=8,depth=2", "convnet:depth=2,width=8", True),
        ("convnet", "convnet:width=128", True),
        ("lenet", "lenet5", True),
        ("convnet:width=8", "convnet:width=16", False),
        ("dense-cnn1", "dense-cnn2", False),
        ("here.nets:small", "here.nets:small", True),
        ("here.nets:small", "here.nets:large", False),
        ("here.nets:small", "convnet", False),
    ],
)
def test_two_specifications_of_one_network_are_the_same(one: str, other: str, same: bool) -> None:
    assert models.same(one, other) is same
    assert models.same(other, one) is same


def test_the_feature_width_is_read_off_without_a_trace() -> None:
    model = models.build("convnet:width=8,depth=2,norm=batch", DIGITS, 10).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert models.feature_width(model, DIGITS) == models.features(model.eval(), torch.zeros(2, *DIGITS)).shape[1]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.train()
    models.feature_width(model, DIGITS)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("side", [(8, 8), (7, 9), (2, 3)])
def test_average_pooling_has_pytorch_s_gradients(side: tuple[int, int]) -> None:
    x = torch.randn(3, 2, *side, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own, other = AvgPool2()(x), avg_pool2d(x, 2)
    torch.testing.assert_close(own, other)  # sums of four in another order
    weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    (gradient,), (expected,) = (torch.autograd.grad((weights * out).sum(), x) for out in (own, other))
    assert torch.equal(gradient, expected)  # a quarter of the output's, in both

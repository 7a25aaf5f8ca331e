"""FedAUX's backbones: the published sizes, features, eval mode, images of other sizes."""

import pytest
import torch
from torch import Tensor, nn

from fedstill import models
from fedstill.base.seeds import isolated
from fedstill.evaluation import mode_of

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)
SPECS = ["resnet8:width=8", "mobilenetv2s", "shufflenet"]


def built(spec: str, shape: tuple[int, int, int], num_classes: int = 10, seed: int = 0) -> nn.Module:
    with isolated(seed):
        return models.build(spec, shape, num_classes)


def images(shape: tuple[int, int, int], n: int = 3) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spec", "dim", "parameters", "buffers"),
    [
        ("resnet8", 512, 4_903_242, 5_772),
        ("mobilenetv2s", 640, 604_178, None),
        ("shufflenet", 800, 887_582, None),
    ],
)
def test_sizes_are_those_of_fedaux(spec: str, dim: int, parameters: int, buffers: int | None) -> None:
    model = built(spec, CIFAR)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert buffers in (None, sum(b.numel() for b in model.buffers()))
    assert model.classifier.weight.shape == (10, dim)


def test_resnet8_is_he_et_als_block_by_block() -> None:
    """Against the sizes worked out by hand: 9 ab weights a 3x3 convolution, 2b of its normalisation, 1x1 shortcuts."""
    for w in (1, 8, 16):
        stages = [(w, w, False), (w, 2 * w, True), (2 * w, 4 * w, True), (4 * w, 8 * w, True)]
        count = 9 * 3 * w + 2 * w + (8 * w + 1) * 10
        count += sum(9 * a * b + 9 * b * b + 4 * b + (a * b + 2 * b) * short for a, b, short in stages)
        assert sum(p.numel() for p in built(f"resnet8:width={w}", CIFAR).parameters()) == count


@pytest.mark.parametrize("shape", [CIFAR, MNIST, DIGITS, (3, 9, 17)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_features_feed_the_classifier(spec: str, shape: tuple[int, int, int]) -> None:
    model = built(spec, shape, 7)
    x = images(shape)
    with mode_of(model, training=False), torch.no_grad():
        features = models.features(model, x)
        assert features.shape == (3, model.classifier.in_features)
        assert torch.equal(model.classifier(features), model(x))
    assert [m for m in model.modules() if isinstance(m, nn.Linear)] == [model.classifier]


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_gets_a_gradient(spec: str) -> None:
    model = built(spec, CIFAR)
    gradients = torch.autograd.grad(model(images(CIFAR)).square().sum(), list(model.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("spec", SPECS)
def test_in_eval_mode_an_image_is_judged_alone_and_always_alike(spec: str) -> None:
    model = built(spec, CIFAR)
    model(images(CIFAR, 8))  # moves the running statistics away from 0 and 1
    before = [b.clone() for b in model.buffers()]
    x = images(CIFAR, 4)
    with mode_of(model, training=False), torch.no_grad():
        once, again, alone = model(x), model(x), torch.cat([model(image[None]) for image in x])
    assert torch.equal(once, again)
    # Float32 sums of up to a thousand terms in another order, through up to 50 layers.
    torch.testing.assert_close(alone, once, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    with torch.no_grad():
        assert not torch.allclose(model(x), once, rtol=1e-3, atol=1e-4)  # batch statistics do mix images


@pytest.mark.parametrize("spec", SPECS)
def test_the_layout_in_memory_does_not_matter(spec: str) -> None:
    model = built(spec, CIFAR).eval()
    x = images(CIFAR)
    assert torch.equal(model(x), model(x.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("spec", SPECS)
def test_first_weights_come_from_the_isolated_stream(spec: str) -> None:
    def weights(seed: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in built(spec, MNIST, seed=seed).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("shape", [(1, 7, 28), (3, 32, 4), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_images_too_small_to_halve_three_times_are_refused(spec: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"{spec.split(':')[0]} can't use.*{shape[1]}x{shape[2]}.*8x8 or more"):
        models.build(spec, shape, 10)


@pytest.mark.parametrize(("option", "message"), [("width=0", "greater than 0"), ("depth=2", "from: width")])
def test_bad_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(f"resnet8:{option}", CIFAR, 10)


def test_shufflenets_groups_exchange_channels() -> None:
    model = built("shufflenet", CIFAR).eval()
    residual = model.body[-1].residual
    x = torch.rand(2, 800, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(residual(x)[:, :400].square().sum(), x)
    assert gradient[:, :400].abs().sum() > 0
    assert gradient[:, 400:].abs().sum() > 0  # without the shuffle, half of the output would never see these

"""Images from gradients and from classes: a small smooth network hides nothing, noise shows nothing."""

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.attacks.labels import descent
from fedstill.attacks.reconstruction import (
    GradientInversion,
    ModelInversion,
    closest_psnr,
    labels_of,
)
from fedstill.base.errors import Diverged
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.protocol import state
from fedstill.train.sgd import SGD

SMOOTH = "convnet:width=16,depth=2,activation=swish,norm=none,pooling=none"
ATTACK = GradientInversion(steps=400)


def network(digits: DataSet, spec: str = SMOOTH) -> nn.Module:
    with isolated(0):
        return models.build(spec, digits.train.shape, 10)


def gradient(model: nn.Module, records: Records) -> dict[str, Tensor]:
    weights = dict(model.named_parameters())
    values = torch.autograd.grad(cross_entropy(model(records.inputs()), records.labels), list(weights.values()))
    return dict(zip(weights, values, strict=True))


def matched_psnr(images: Records, truth: Records) -> Tensor:
    """PSNR of each image to its record, no record for two images: the assignment with the least squared error."""
    errors = torch.stack([(image - truth.pixels()).square().flatten(1).mean(1) for image in images.pixels()])
    rows, columns = linear_sum_assignment(errors.numpy())
    return -10 * errors[rows, columns].log10()


# --- by a gradient


@pytest.mark.slow
def test_one_record_comes_back_from_its_gradient(digits: DataSet) -> None:
    model, record = network(digits), digits.train[10:11]
    found = ATTACK.invert(model, gradient(model, record), 1, digits.train[:0], stream(0))
    assert torch.equal(found.images.labels, record.labels)
    assert float(matched_psnr(found.images, record)[0]) > 30 and found.distance < 1e-3
    # as near as nothing to no other record: the attack found this one, not a digit like it
    assert float(closest_psnr(digits.train[11:12], record)[0]) < 15


@pytest.mark.slow
def test_one_record_of_16_by_16_pixels_comes_back(digits: DataSet) -> None:
    small = digits.train[20:21]
    record = Records(
        small.images.repeat_interleave(2, 2).repeat_interleave(2, 3), small.labels, 10, small.normalisation
    )
    with isolated(0):
        model = models.build(SMOOTH, record.shape, 10)
    found = ATTACK.invert(model, gradient(model, record), 1, record[:0], stream(0))
    assert float(matched_psnr(found.images, record)[0]) > 20


@pytest.mark.slow
def test_a_few_records_come_back_with_labels_found_by_the_attack(digits: DataSet) -> None:
    model, records = network(digits), digits.train[10:13]
    found = ATTACK.invert(model, gradient(model, records), 3, digits.train[:0], stream(0))
    assert torch.equal(found.images.labels.sort().values, records.labels.sort().values)
    assert bool((matched_psnr(found.images, records) > 20).all())


@pytest.mark.slow
def test_an_update_of_one_step_is_as_good_as_its_gradient(digits: DataSet) -> None:
    model, record = network(digits), digits.train[30:31]
    start = {name: value.clone() for name, value in state(model).items()}
    SGD(lr=0.05).fit(model, record, stream(1))
    update = descent(start, state(model))
    model.load_state_dict(start)
    assert torch.allclose(update["classifier.bias"], 0.05 * gradient(model, record)["classifier.bias"].double(), 1e-3)
    found = ATTACK.invert(model, update, 1, digits.train[:0], stream(0))
    assert float(matched_psnr(found.images, record)[0]) > 20


@pytest.mark.slow
def test_noise_for_a_gradient_brings_nothing_back(digits: DataSet) -> None:
    model, record = network(digits), digits.train[10:11]
    rng = stream(2)
    noise = {name: torch.randn(p.shape, generator=rng) for name, p in model.named_parameters()}
    found = ATTACK.invert(model, noise, 1, digits.train[:0], stream(0), labels=record.labels)
    assert float(matched_psnr(found.images, record)[0]) < 12 and found.distance > 0.5


def test_the_attack_leaves_the_model_and_the_global_generator(digits: DataSet) -> None:
    model, record = network(digits, "dense-mnist").train(), digits.train[:2]
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    before = [value.clone() for value in model.state_dict().values()]
    observed = gradient(network(digits, "dense-mnist"), record)
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    GradientInversion(steps=3).invert(model, observed, 2, digits.train[:0], stream(0))
    assert torch.equal(torch.get_rng_state(), generator) and model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_the_same_stream_gives_the_same_images_and_restarts_keep_the_best(digits: DataSet) -> None:
    model, record = network(digits, "convnet:width=4,depth=2"), digits.train[:1]
    observed = gradient(model, record)

    def found(seed: int, restarts: int = 1) -> tuple[Tensor, float]:
        attack = GradientInversion(steps=20, restarts=restarts)
        result = attack.invert(model, observed, 1, digits.train[:0], stream(seed))
        return result.images.images, result.distance

    assert torch.equal(found(0)[0], found(0)[0]) and not torch.equal(found(0)[0], found(1)[0])
    assert found(0, 4)[1] <= found(0)[1]


def test_a_larger_weight_of_smoothness_gives_smoother_images(digits: DataSet) -> None:
    model, record = network(digits), digits.train[10:11]

    def roughness(tv: float) -> float:
        attack = GradientInversion(steps=100, tv=tv)
        pixels = attack.invert(model, gradient(model, record), 1, digits.train[:0], stream(0)).images.pixels()
        return float(pixels.diff(dim=3).abs().mean())

    assert roughness(1.0) < roughness(0.0) / 2


def test_labels_of_batches(digits: DataSet) -> None:
    model = network(digits)
    right = 0
    for start in range(0, 160, 4):
        records = digits.train[start : start + 4]
        found = labels_of(gradient(model, records), 4, 10)
        right += int(torch.minimum(torch.bincount(found, minlength=10), records.class_counts()).sum())
    assert right / 160 > 0.9


def test_what_can_t_be_inverted_is_refused(digits: DataSet) -> None:
    model, record = network(digits), digits.train[:1]
    observed, like = gradient(model, record), digits.train[:0]
    part = {name: value for name, value in observed.items() if "classifier" in name}
    with pytest.raises(ValueError, match="lacks 4 of 6 parameters, such as layers.0.weight"):
        ATTACK.invert(model, part, 1, like, stream(0))
    with pytest.raises(ValueError, match="the gradient is 0 or not finite"):
        ATTACK.invert(model, {name: 0 * value for name, value in observed.items()}, 1, like, stream(0))
    with pytest.raises(ValueError, match="2 labels for 1 records"):
        ATTACK.invert(model, observed, 1, like, stream(0), labels=torch.tensor([1, 2]))
    broken = {name: value * math.nan for name, value in observed.items()}
    with pytest.raises(ValueError, match="the gradient is 0 or not finite"):
        ATTACK.invert(model, broken, 1, like, stream(0), labels=record.labels)
    with torch.no_grad():
        model.classifier.bias[0] = math.nan  # type: ignore[union-attr, operator, index]
    with pytest.raises(Diverged, match="the model's gradient"):
        GradientInversion(steps=2).invert(model, observed, 1, like, stream(0))
    with pytest.raises(Diverged):
        ModelInversion(steps=2).invert(model, record.labels, like, stream(0))


# --- by a model's classes


def likeness(images: Records, records: Records) -> Tensor:
    """Correlation of every image (row) with what is special about every class's mean (column)."""
    means = torch.stack([records.of_class(c).pixels().mean(0).flatten() for c in range(10)])
    rows = images.pixels().flatten(1)
    middle = means.mean(0)
    return torch.corrcoef(torch.cat([rows - middle, means - middle]))[: len(rows), len(rows) :]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_classes_of_a_linear_model_look_like_their_records(digits: DataSet, spread: float) -> None:
    with isolated(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    attack, every = ModelInversion(steps=200, spread=spread), torch.arange(10)
    blind = attack.invert(model, every, digits.train[:0], stream(0))
    SGD(epochs=10).fit(model, digits.train, stream(1))
    found = attack.invert(model, every, digits.train[:0], stream(0))
    assert torch.equal(found.labels, every) and found.images.dtype == torch.uint8
    assert int((likeness(found, digits.train).argmax(1) == every).sum()) >= 9
    # an untrained model knows nothing: 10 guesses of 10 classes are right once, more than 5 times with P < 1e-4
    assert int((likeness(blind, digits.train).argmax(1) == every).sum()) <= 5


def test_inverted_classes_are_what_the_model_says_they_are_and_differ(digits: DataSet) -> None:
    model = network(digits, "convnet:width=8,depth=2").train()
    SGD(epochs=3).fit(model, digits.train, stream(1))
    wanted = torch.tensor([3, 3, 8])
    attack = ModelInversion(steps=100)
    found = attack.invert(model, wanted, digits.train[:0], stream(0))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(model.eval()(found.inputs()).argmax(1), wanted)
    assert not torch.equal(found.images[0], found.images[1])
    alone = attack.invert(model, wanted[:1], digits.train[:0], stream(0))
    # the first draws are the same ones, and no image counts for another; batches round differently
    assert int((alone.images[0].int() - found.images[0].int()).abs().max()) <= 8


# --- measures


def grey(*levels: int) -> Records:
    images = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2).contiguous()
    return Records(images, torch.zeros(len(levels)).long(), 2, Normalisation((0.5,), (0.5,)))


def test_psnr_by_hand() -> None:
    assert closest_psnr(grey(51), grey(0, 102, 255)).tolist() == pytest.approx([20 * math.log10(5)])
    assert closest_psnr(grey(7, 8), grey(7, 100))[0] == math.inf
    assert closest_psnr(grey(255), grey(0)).tolist() == pytest.approx([0.0], abs=1e-9)


def test_many_images_may_be_close_to_one_record() -> None:
    assert closest_psnr(grey(100, 90), grey(0, 95, 200)).tolist() == pytest.approx([20 * math.log10(51)] * 2)

"""A client's synthetic images: exact bytes, own streams, and nearer in gradient than what they started from."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.functional import cross_entropy

from fedstill.base.records import Records
from fedstill.base.seeds import derive, isolated, stream
from fedstill.data.sources import DataSet
from fedstill.distill import synthesis
from fedstill.distill.gradient_matching import match
from fedstill.distill.pool import unfold
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.models import build

SMALL = GradientMatching(nets=3, batch_size=16, choose="representatives", pool=64)


def new_net(index: int, seed: int = 0) -> nn.Module:
    with isolated(derive(seed, "net", index)):
        return build("convnet:width=8,depth=2", (1, 8, 8), 10)


def two_classes(digits: DataSet) -> Records:
    return digits.train[(digits.train.labels == 3) | (digits.train.labels == 7)]


def changed(**values: object) -> GradientMatching:
    return GradientMatching(**{**SMALL.model_dump(), **values})


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        changed(init="noise", choose="random", augment="none", anneal=False),
        changed(init="real", steps=3, nets=2, interval=2, distance="mse"),
        changed(lr=10.0, distance="cos"),
        changed(formation=2, distance="convolutions"),
        changed(formation=2, init="noise", steps=2, nets=2, train_on="real", net_epochs=2),
    ],
)
def test_images_are_bytes_of_the_clients_classes(digits: DataSet, settings: GradientMatching) -> None:
    made = synthesise(two_classes(digits), new_net, 2, settings, stream(0))
    assert made.images.dtype == torch.uint8 and made.images.shape == (4, 1, 8, 8)
    assert made.labels.tolist() == [3, 3, 7, 7]
    assert made.num_classes == 10 and made.normalisation == digits.train.normalisation
    assert len({bytes(image.flatten().tolist()) for image in made.images}) == 4


def test_pixels_stay_in_the_unit_interval_all_along(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], synthesis.pixel_gradient

    def spy(net: nn.Module, records: Records, images: torch.Tensor, *rest: object) -> object:
        seen.append(images.clone())
        return original(net, records, images, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(synthesis, "pixel_gradient", spy)
    synthesise(two_classes(digits), new_net, 2, changed(lr=10.0, init="noise", nets=5), stream(0))
    assert all(0 <= float(x.min()) and float(x.max()) <= 1 for x in seen)
    assert float((seen[-1] - seen[0]).abs().max()) > 0.5  # the step was large enough to need the clamp


def test_the_matching_loss_is_told_before_each_step_and_falls(digits: DataSet) -> None:
    losses: list[float] = []
    settings = changed(nets=1, steps=40, net_epochs=0, init="noise", augment="none", lr=0.1, interval=40)
    synthesise(two_classes(digits), new_net, 2, settings, stream(0), on_loss=losses.append)
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]


def test_same_seed_same_bytes_another_seed_others_global_generator_untouched(digits: DataSet) -> None:
    before = torch.get_rng_state()
    first, again, other = (synthesise(two_classes(digits), new_net, 2, SMALL, stream(s)).images for s in (0, 0, 1))
    nets = synthesise(two_classes(digits), lambda i: new_net(i, 5), 2, SMALL, stream(0)).images
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, nets)
    assert torch.equal(before, torch.get_rng_state())


def test_the_networks_asked_for_are_the_first_ones_in_order(digits: DataSet) -> None:
    asked: list[int] = []
    synthesise(digits.train.of_class(0), lambda i: (asked.append(i), new_net(i))[1], 2, SMALL, stream(0))
    assert asked == [0, 1, 2]


@pytest.mark.slow
def test_matching_brings_gradients_nearer_at_networks_never_matched_at(digits: DataSet) -> None:
    part = digits.train.of_class(3)

    def distance(images: Records) -> float:
        nets = [new_net(index, seed=99) for index in range(5)]
        return sum(float(match(net, [part.inputs()], [images.inputs()], [3])[0]) for net in nets)

    settings = changed(nets=40, init="noise", augment="none", lr=0.05)
    before = synthesise(part, new_net, 2, changed(**{**settings.model_dump(), "nets": 1, "lr": 1e-12}), stream(0))
    after = synthesise(part, new_net, 2, settings, stream(0))
    assert distance(after) < 0.8 * distance(before)


def test_a_step_is_momentum_sgd_on_pixels_scaled_by_the_number_of_images(digits: DataSet) -> None:
    part = digits.train.of_class(1)
    settings = changed(nets=2, augment="none", choose="random", init="real", batch_size=500, momentum=0.5, lr=1e-3)
    rng = stream(0)
    torch.randn(2, *part.shape, generator=rng)  # the noise that fills up classes with fewer than 2 records
    pixels = part.pixels(torch.randperm(len(part), generator=rng)[:2])
    velocity = torch.zeros_like(pixels)
    for index, cosine in ((0, 1.0), (1, 0.5)):  # (1 + cos(pi index / 2)) / 2
        x = pixels.clone().requires_grad_()
        inputs = part.normalisation.apply(x)
        gradient = match(new_net(index), [part.inputs()], [inputs], [1])[1][0]
        velocity = 0.5 * velocity + torch.autograd.grad(inputs, x, gradient)[0]
        pixels = (pixels - 1e-3 * 2 * cosine * velocity).clamp(0, 1)
    made = synthesise(part, new_net, 2, settings, stream(0))
    off = (made.images.double() - 255 * pixels.double()).abs()
    assert float(off.max()) <= 0.51  # rounding, and the order in which the same real images were drawn


def test_networks_are_trained_only_between_their_own_steps(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = synthesis.train_network
    monkeypatch.setattr(synthesis, "train_network", lambda *a: (calls.append(a[0]), original(*a)))
    synthesise(two_classes(digits), new_net, 2, SMALL, stream(0))
    assert calls == []
    synthesise(two_classes(digits), new_net, 2, changed(steps=3, nets=2), stream(0))
    assert len(calls) == 4 and len(set(calls)) == 2


def test_training_lowers_the_loss_of_the_synthetic_images(digits: DataSet) -> None:
    records, net = two_classes(digits)[:4], new_net(0)
    settings = changed(net_epochs=20, net_lr=0.1)
    images = records.pixels()[:, None]  # four classes of one image each
    labels = records.labels.tolist()

    def loss() -> float:
        return float(nn.functional.cross_entropy(net(records.inputs()).detach(), records.labels))

    before = loss()
    synthesis.train_network(net, records, images, labels, settings)
    assert loss() < 0.5 * before


def test_classes_with_few_records_fill_up_with_noise(digits: DataSet) -> None:
    part = digits.train.of_class(5)[:3]
    made = synthesise(part, new_net, 6, changed(lr=1e-12, nets=1), stream(0))
    kept = {bytes(image.flatten().tolist()) for image in part.images}
    assert [bytes(image.flatten().tolist()) in kept for image in made.images] == [True] * 3 + [False] * 3


def test_nonsense_is_refused(digits: DataSet) -> None:
    with pytest.raises(ValueError, match="0 records have no classes"):
        synthesise(digits.train[:0], new_net, 2, SMALL, stream(0))
    for wrong in (
        {"nets": 0},
        {"momentum": 1.0},
        {"lr": float("inf")},
        {"distance": "l1"},
        {"augment": "zoom"},
        {"x": 1},
    ):
        with pytest.raises(ValidationError):
            changed(**wrong)


def test_published_constants() -> None:
    paper = GradientMatching.published(10)
    assert (paper.nets, paper.steps, paper.lr * 10, paper.batch_size) == (300, 100, 0.01, 128)
    assert (paper.interval, paper.init, paper.choose) == (10, "representatives", "representatives")


def test_a_step_on_formed_images_follows_the_gradient_of_the_stored_pixels(digits: DataSet) -> None:
    records = two_classes(digits)
    settings = changed(formation=2, nets=1, choose="random", augment="none", batch_size=10_000, anneal=False, lr=0.005)
    made = synthesise(records, new_net, 1, changed(**{**settings.model_dump(), "lr": 1e-12}), stream(0))
    start = made.pixels().requires_grad_()
    net, held = new_net(0), unfold(start, 2)
    assert held.shape == (8, 1, 8, 8)
    real, labels = [records.of_class(c).inputs() for c in (3, 7)], [3, 7]
    synthetic = [records.normalisation.apply(part) for part in held.split(4)]
    _, by_input = match(net, real, synthetic, labels)
    (gradient,) = torch.autograd.grad(synthetic, start, by_input)
    expected = (start.detach() - 0.005 * 4 * gradient).clamp(0, 1)  # ipc 1, four images in each
    moved = synthesise(records, new_net, 1, settings, stream(0)).pixels()
    assert float((moved - expected).abs().max()) < 2 / 255  # both are rounded to bytes
    assert float((moved - start.detach()).abs().max()) > 0.02


@pytest.mark.slow
def test_networks_trained_on_real_images_learn_them(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    records, nets = two_classes(digits), list[nn.Module]()

    def counted(index: int) -> nn.Module:
        nets.append(new_net(index))
        return nets[-1]

    settings = changed(nets=1, steps=3, net_epochs=10, net_lr=0.1, train_on="real", init="noise", batch_size=32)
    synthesise(records, counted, 1, settings, stream(0))
    with torch.no_grad():
        loss = cross_entropy(nets[0](records.inputs()), records.labels)
        before = cross_entropy(new_net(0)(records.inputs()), records.labels)
    assert loss < 0.5 * before

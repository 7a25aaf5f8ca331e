"""The fast step against plain loops over classes; images and representations come nearer in distribution."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedstill.base.records import Examples, Records
from fedstill.base.seeds import derive, isolated, stream
from fedstill.data.sources import DataSet
from fedstill.distill import distribution_matching
from fedstill.distill.distribution_matching import (
    DistributionMatching,
    fit_images,
    fit_representations,
    match,
    sphere_around,
)
from fedstill.models import build
from fedstill.models.cnn import ConvNet
from fedstill.models.projected import Projected, TaskNetwork
from fedstill.train.augment import Transform

FEDDM = DistributionMatching(steps=5, batch_size=16)
FEDRD = DistributionMatching(
    **{**DistributionMatching.published_fedrd().model_dump(), "steps": 5, "batch_size": 16, "min_records": 1}
)


def changed(settings: DistributionMatching, **values: object) -> DistributionMatching:
    return DistributionMatching(**{**settings.model_dump(), **values})


def network(dtype: torch.dtype = torch.float32, norm: Any = "instance") -> ConvNet:
    with isolated(0):
        return ConvNet((1, 16, 16), 4, width=8, depth=2, norm=norm).to(dtype)


def whole(index: int = 0, seed: int = 0) -> Projected:
    with isolated(derive(seed, "net", index)):
        net = build("projected:width=8", (1, 8, 8), 10)
    assert isinstance(net, Projected)
    return net


def psi(index: int) -> TaskNetwork:
    return whole(index, seed=1).task


def batches(sizes: Sequence[int], dtype: torch.dtype, *shape: int) -> list[Tensor]:
    rng = stream(1, "images")
    return [torch.randn(n, *shape, generator=rng, dtype=dtype) + 0.3 * c for c, n in enumerate(sizes)]


def two_classes(digits: DataSet) -> Records:
    return digits.train[(digits.train.labels == 3) | (digits.train.labels == 7)]


def plain_feddm(net: ConvNet, real: list[Tensor], synthetic: Tensor) -> tuple[Tensor, Tensor]:
    """FedDM's re-implementation: class by class, one pass for the features and one for the logits."""
    images = synthetic.clone().requires_grad_()
    net.eval()
    loss = torch.zeros((), dtype=synthetic.dtype)
    for x, s in zip(real, images, strict=True):
        loss = loss + ((net.features(x).detach().mean(0) - net.features(s).mean(0)) ** 2).sum()
        loss = loss + ((net(x).detach().mean(0) - net(s).mean(0)) ** 2).sum()
    return loss.detach(), torch.autograd.grad(loss, images)[0]


def plain_fedrd(task: TaskNetwork, real: list[Tensor], synthetic: Tensor) -> tuple[Tensor, Tensor]:
    """The task network as one writes it, all classes through it for batch norm's sake, then class by class."""
    layers = [m for c, n in zip(task.convs, task.norms, strict=True) for m in (c, n, nn.ReLU(), nn.MaxPool2d(2))]
    net = nn.Sequential(*layers, nn.Flatten()).train()
    values = synthetic.clone().requires_grad_()
    theirs, ours = net(torch.cat(real)).detach(), net(values.flatten(0, 1))
    loss = torch.zeros((), dtype=synthetic.dtype)
    places = torch.split(torch.arange(len(theirs)), [len(x) for x in real])
    for c, place in enumerate(places):
        loss = loss + (theirs[place].mean(0) - ours.view(*synthetic.shape[:2], -1)[c].mean(0)).norm()
    return loss.detach(), torch.autograd.grad(loss, values)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["feddm", "fedrd"])
def test_the_step_equals_a_plain_loop_over_classes(form: str, dtype: torch.dtype) -> None:
    sizes = [37, 20, 5]  # a class with fewer records than the others; 62 leaves a last chunk that isn't full
    if form == "feddm":
        real, (synthetic,) = batches(sizes, dtype, 1, 16, 16), batches([3], dtype, 4, 1, 16, 16)
        net = network(dtype)
        loss, gradient = match(net, real, synthetic, FEDDM)
        expected, theirs = plain_feddm(net, real, synthetic)
    else:
        real, (synthetic,) = batches(sizes, dtype, 1, 8, 8), batches([3], dtype, 4, 1, 8, 8)
        loss, gradient = match(psi(0).to(dtype), real, synthetic, FEDRD)
        expected, theirs = plain_fedrd(psi(0).to(dtype), real, synthetic)
    # Means of 37 numbers in another order, and PyTorch's own order in batch norm.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    torch.testing.assert_close(gradient, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
    assert gradient.shape == synthetic.shape and not loss.requires_grad


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("logits", [True, False])
def test_the_loss_is_the_sum_over_classes_and_outputs_of_the_norm(squared: bool, logits: bool) -> None:
    net, real = network(torch.float64), batches([9, 9], torch.float64, 1, 16, 16)
    (synthetic,) = batches([2], torch.float64, 3, 1, 16, 16)
    settings = changed(FEDDM, squared=squared, logits=logits)
    expected = 0.0
    for x, s in zip(real, synthetic, strict=True):
        for f in [net.features, net] if logits else [net.features]:
            norm = float((f(x).mean(0) - f(s).mean(0)).norm().detach())
            expected += norm**2 if squared else norm
    assert float(match(net, real, synthetic, settings)[0]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("settings", [FEDDM, changed(FEDDM, squared=False)])
def test_the_gradient_is_the_finite_difference_of_the_loss(settings: DistributionMatching) -> None:
    with isolated(0):  # smooth activations: at a ReLU's kink finite differences mean nothing
        net = ConvNet((1, 8, 8), 3, width=4, depth=1, activation="swish").double()
    real = batches([6, 4], torch.float64, 1, 8, 8)
    (start,) = batches([2], torch.float64, 2, 1, 8, 8)
    gradient = match(net, real, start, settings)[1]
    direction = torch.randn(start.shape, generator=stream(0), dtype=torch.float64)
    above, below = (float(match(net, real, start + sign * 1e-5 * direction, settings)[0]) for sign in (1, -1))
    # error of order step^2 = 1e-10
    assert float((gradient * direction).sum()) == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_examples_that_match_already_stay_where_they_are() -> None:
    (synthetic,) = batches([2], torch.float64, 3, 1, 16, 16)
    loss, gradient = match(network(torch.float64), list(synthetic), synthetic, FEDDM)
    assert float(loss) < 1e-20 and float(gradient.abs().max()) < 1e-10  # squares of rounding errors, and those
    # the norm's own gradient has length 1 however small the norm is, unless it is 0
    assert distribution_matching.root_of(torch.tensor([0.0, 4.0])).tolist() == [0.0, 2.0]
    x = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(distribution_matching.root_of(x).sum(), x)[0].tolist() == [0.0]


def test_weights_stand_for_repeated_records() -> None:
    net, (x, y) = network(torch.float64), batches([5, 4], torch.float64, 1, 16, 16)
    (synthetic,) = batches([2], torch.float64, 2, 1, 16, 16)
    weights = [torch.tensor([1.0, 3, 2, 1, 1]), torch.ones(4)]
    weighted = match(net, [x, y], synthetic, FEDDM, weights)
    repeated = match(net, [x[[0, 1, 1, 1, 2, 2, 3, 4]], y], synthetic, FEDDM)
    for one, other in zip(weighted, repeated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_class_is_topped_up_by_draws_with_replacement() -> None:
    settings = changed(FEDDM, top_up=True)
    index, weights = distribution_matching.draw_batch(6, settings, stream(0))
    assert index.tolist() == list(range(6)) and float(weights.sum()) == 16 and float(weights.min()) >= 1
    index, weights = distribution_matching.draw_batch(6, changed(FEDRD, top_up=True), stream(0))
    assert len(index) == 16 and set(index.tolist()) == set(range(6)) and set(weights.tolist()) == {1.0}
    for n, count in ((6, 6), (40, 16)):
        index, weights = distribution_matching.draw_batch(n, FEDDM, stream(0))
        assert len(index) == len(set(index.tolist())) == count and set(weights.tolist()) == {1.0}


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_the_network_keeps_its_parameters_and_modes(norm: str) -> None:
    net = network(norm=norm).train()
    before = [p.detach().clone() for p in net.parameters()]
    real, (synthetic,) = batches([9, 9], torch.float32, 1, 16, 16), batches([2], torch.float32, 2, 1, 16, 16)
    kept = synthetic.clone()
    match(net, real, synthetic, FEDDM)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(net.parameters(), before, strict=True))
    assert torch.equal(synthetic, kept) and not synthetic.requires_grad and net.training
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_networks_lie_on_the_sphere_around_the_servers() -> None:
    model = network()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    draw = sphere_around(model, 5.0, stream(0))
    points = [torch.nn.utils.parameters_to_vector(draw(i).parameters()).detach() - before for i in range(3)]
    for z in points:
        assert float(z.norm()) == pytest.approx(5, rel=1e-4)  # float32 sums of a thousand squares
    # In d dimensions the cosine of independent directions has standard deviation 1 / sqrt(d): 5 of them.
    assert abs(float(points[0] @ points[1])) / 25 < 5 / len(before) ** 0.5
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)
    wide = sphere_around(model, 1e6, stream(0))(0)  # z itself, whose entries are standard normal
    z = torch.nn.utils.parameters_to_vector(wide.parameters()).detach() - before
    assert float(z.std()) == pytest.approx(1, abs=5 / (2 * len(z)) ** 0.5)


Fit = Callable[[Records, DistributionMatching, int], Examples]


def images(records: Records, settings: DistributionMatching, seed: int = 0) -> Examples:
    with isolated(0):
        model = build("convnet:width=8,depth=2", (1, 8, 8), 10)
    nets = sphere_around(model, settings.rho, stream(seed, "nets"))
    return fit_images(records, nets, 3, settings, stream(seed, "batches"))


def representations(records: Records, settings: DistributionMatching, seed: int = 0) -> Examples:
    return fit_representations(records, whole().projection, psi, 3, settings, stream(seed, "batches"))


@pytest.mark.parametrize(("fit", "settings"), [(images, FEDDM), (representations, FEDRD)])
def test_same_seed_same_values_for_the_classes_there_are(
    digits: DataSet, fit: Fit, settings: DistributionMatching
) -> None:
    before = torch.get_rng_state()
    first, again, other = (fit(two_classes(digits), settings, seed) for seed in (0, 0, 1))
    assert first.inputs().shape == (6, 1, 8, 8) and first.inputs().dtype == torch.float32
    assert first.labels.tolist() == [3, 3, 3, 7, 7, 7]
    assert torch.equal(first.inputs(), again.inputs()) and not torch.equal(first.inputs(), other.inputs())
    assert torch.equal(first.inputs(slice(1, 3)), first.inputs()[1:3])
    assert torch.equal(before, torch.get_rng_state())


def test_images_are_of_pixels_in_the_unit_interval_and_round_to_bytes(digits: DataSet) -> None:
    records = two_classes(digits)
    black, white = records.normalisation.limits(torch.device("cpu"))
    torch.testing.assert_close(records.normalisation.apply(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1))[1], white)
    made = images(records, changed(FEDDM, lr=50.0, init="noise"))
    assert bool((made.inputs() >= black).all()) and bool((made.inputs() <= white).all())
    free = images(records, changed(FEDDM, lr=50.0, init="noise", clamp=False))
    assert bool((free.inputs() < black).any()) and bool((free.inputs() > white).any())
    assert bool((representations(records, FEDRD).inputs() < black).any())
    rounded = made.rounded(10, records.normalisation)
    assert rounded.images.dtype == torch.uint8 and torch.equal(rounded.labels, made.labels)
    step = float((white - black).max()) / 255
    assert float((rounded.inputs() - made.inputs()).abs().max()) <= 0.501 * step


def test_what_real_records_start_as_and_what_fills_them_up(digits: DataSet) -> None:
    few = digits.train.of_class(5)[:2]
    still = changed(FEDDM, lr=1e-12, steps=1)
    made = images(few, still)
    kept = [torch.isclose(few.inputs(), value, atol=1e-5).flatten(1).all(1).any().item() for value in made.inputs()]
    assert kept == [True, True, False]
    z = whole().eval().projection(few.inputs()).detach()
    noise = representations(two_classes(digits), changed(FEDRD, lr=1e-12, steps=1)).inputs()
    everything = whole().projection(two_classes(digits).inputs()).detach()
    # 6 x 64 normal values: 5 standard errors; the real ones' mean and variance are those of 256 of 290 records
    assert abs(float(noise.mean() - everything.mean())) < (5 / 384**0.5 + 0.05) * float(everything.std())
    assert float(noise.std() / everything.std()) == pytest.approx(1, abs=5 / (2 * 384) ** 0.5 + 0.05)
    real = representations(few, changed(FEDRD, lr=1e-12, steps=1, init="real")).inputs()[:2]
    torch.testing.assert_close(real.sort(0).values, z.sort(0).values)


@pytest.mark.slow
def test_matching_brings_means_nearer_at_networks_never_matched_at(digits: DataSet) -> None:
    records = two_classes(digits)
    own = [records.of_class(c) for c in (3, 7)]
    with isolated(0):
        model = build("convnet:width=8,depth=2", (1, 8, 8), 10)

    def images_off(made: Examples) -> float:
        nets = sphere_around(model, 5.0, stream(99))
        real = [part.inputs() for part in own]
        return sum(float(match(nets(i), real, made.inputs().view(2, 3, 1, 8, 8), FEDDM)[0]) for i in range(5))

    settings = changed(FEDDM, init="noise", batch_size=64)
    start, end = (images(records, changed(settings, steps=n, lr=lr)) for n, lr in ((1, 1e-12), (30, 0.05)))
    assert images_off(end) < 0.75 * images_off(start)

    def representations_off(made: Examples) -> float:
        nets = [whole(i, seed=99).task for i in range(5)]
        real = [whole().projection(part.inputs()).detach() for part in own]
        return sum(float(match(net, real, made.inputs().view(2, 10, 1, 8, 8), FEDRD)[0]) for net in nets)

    settings = changed(FEDRD, batch_size=64, augment="none")
    start, end = (
        fit_representations(records, whole().projection, psi, 10, changed(settings, steps=n, lr=lr), stream(0))
        for n, lr in ((1, 1e-12), (40, 1.0))
    )
    # Batch norm over 20 examples is not batch norm over 290 records: that difference stays, whatever the examples are.
    assert representations_off(end) < 0.9 * representations_off(start)


def test_a_step_is_momentum_sgd_at_the_network_of_that_step(digits: DataSet) -> None:
    part = digits.train.of_class(1)
    settings = changed(FEDDM, steps=2, batch_size=500, lr=0.1, clamp=False)
    with isolated(0):
        model = build("convnet:width=8,depth=2", (1, 8, 8), 10)
    rng = stream(0, "batches")
    values = part.inputs(torch.randperm(len(part), generator=rng)[:3])[None]
    velocity, nets = torch.zeros_like(values), sphere_around(model, 5.0, stream(0, "nets"))
    for step in range(2):
        velocity = 0.5 * velocity + match(nets(step), [part.inputs()], values, settings)[1]
        values = values - 0.1 * velocity
    made = images(part, settings).inputs()
    torch.testing.assert_close(made[None], values, rtol=1e-4, atol=1e-5)  # the same real images in another order


def test_only_real_images_are_augmented_before_they_are_projected(
    digits: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, seen = two_classes(digits), []
    original = Transform.__call__
    monkeypatch.setattr(Transform, "__call__", lambda self, x: (seen.append(x), original(self, x))[1])
    representations(records, changed(FEDRD, steps=3))
    assert len(seen) == 6  # one draw for each class and step
    assert all(len(x) == 16 and float(x.min()) >= float(records.inputs().min()) for x in seen)


def test_networks_are_asked_for_once_a_step(digits: DataSet) -> None:
    asked: list[int] = []
    fit_representations(
        two_classes(digits),
        whole().projection,
        lambda i: (asked.append(i), psi(i))[1],
        2,
        changed(FEDRD, steps=3),
        stream(0),
    )
    assert asked == [0, 1, 2]


def test_small_classes_are_left_out_and_nonsense_is_refused(digits: DataSet) -> None:
    records = digits.train[
        torch.cat([torch.nonzero(digits.train.labels == c).flatten()[:n] for c, n in ((2, 4), (6, 9))])
    ]
    assert set(images(records, changed(FEDDM, min_records=5)).labels.tolist()) == {6}
    assert set(images(records, FEDDM).labels.tolist()) == {2, 6}
    for few in (records, records[:0]):
        with pytest.raises(ValueError, match=f"these {len(few)} records has min_records=10.*lower min_records"):
            images(few, changed(FEDDM, min_records=10))
    asked = changed(FEDDM, min_records=10)
    assert set(images(records, asked.for_records(records)).labels.tolist()) == {2, 6}
    assert asked.for_records(digits.train) == asked
    with pytest.raises(ValueError, match="Sequential doesn't end in one nn.Linear"):
        match(nn.Sequential(nn.Flatten()), [records.inputs()], records.inputs()[None], FEDDM)
    for wrong in ({"steps": 0}, {"momentum": 1.0}, {"lr": 0.0}, {"rho": -1.0}, {"augment": "zoom"}, {"x": 1}):
        with pytest.raises(ValidationError):
            changed(FEDDM, **wrong)


def test_published_constants() -> None:
    feddm, fedrd = DistributionMatching.published_feddm(), DistributionMatching.published_fedrd()
    assert (feddm.steps, feddm.lr, feddm.momentum, feddm.batch_size, feddm.rho) == (1000, 1.0, 0.5, 256, 5.0)
    assert (feddm.logits, feddm.squared, feddm.batch_statistics, feddm.init, feddm.augment) == (
        True,
        True,
        False,
        "real",
        "none",
    )
    assert (fedrd.steps, fedrd.lr, fedrd.momentum, fedrd.batch_size) == (1000, 1.0, 0.0, 256)
    assert (fedrd.logits, fedrd.squared, fedrd.batch_statistics) == (False, False, True)

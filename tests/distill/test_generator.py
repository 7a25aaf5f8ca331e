"""DENSE's and DAFL's generators: sizes, losses worked out by hand, what gets gradients, epochs that resume."""

import math
from typing import Any

import pytest
import torch
from benchmark import load as load_benchmark
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.errors import Diverged
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.ensemble import distillation_loss
from fedstill.distill.generation import (
    DAFL,
    Generation,
    activation_loss,
    augmented,
    divergence_loss,
    entropy_loss,
    one_hot_loss,
    pixels_of,
)
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Teachers
from fedstill.evaluation import evaluate
from fedstill.models.generator import DAFLGenerator, Generator, UpsampledConv
from fedstill.protocol import load
from fedstill.train.sgd import SGD

SHAPE, CLASSES = (1, 8, 8), 3
LIKE = Records(torch.empty(0, *SHAPE, dtype=torch.uint8), torch.empty(0).long(), CLASSES, Normalisation((0.4,), (0.2,)))
SMALL = {"batch_size": 12, "steps": 3, "nz": 5, "ngf": 4}


def network(seed: int, spec: str = "dense-mnist") -> nn.Module:
    with isolated(seed):
        found = models.build(spec, SHAPE, CLASSES)
        with torch.no_grad():
            found(torch.randn(16, *SHAPE))  # moves running statistics
    return found


def teachers() -> Teachers:
    return Teachers([network(1), network(2), network(3, "convnet:width=4,depth=2")])


def softmax(row: list[float]) -> list[float]:
    e = [math.exp(v) for v in row]
    return [v / sum(e) for v in e]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 4), (7, 5)])
def test_an_upsampled_convolution_is_one_after_upsampling(height: int, width: int, bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    fast = UpsampledConv(3, 4, bias=bias).double()
    plain = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3, padding=1, bias=bias)).double()
    plain.load_state_dict({f"1.{name}": value for name, value in fast.state_dict().items()})
    x = torch.randn(2, 3, height, width, generator=rng, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 4, 2 * height, 2 * width, generator=rng, dtype=torch.float64)
    found = []
    for layer in (fast, plain):
        y = layer(x)
        found.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], g)])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "count"), [((3, 32, 32), 2_328_899), ((1, 28, 28), 1_834_305)], ids=str)
def test_dense_generator_has_the_published_size(shape: tuple[int, int, int], count: int) -> None:
    # 28 x 28: the linear layer has 256 * 6272 + 6272 weights in place of 256 * 8192 + 8192, the last 577 for 1731
    assert count == 2_328_899 - (257 * (8192 - 6272) + 1154 if shape[0] == 1 else 0)
    with isolated(0):
        generator = Generator(shape).requires_grad_(False)
    assert sum(p.numel() for p in generator.parameters()) == count
    pixels = generator(torch.randn(2, 256, generator=stream(0)))
    assert pixels.shape == (2, *shape) and 0 <= float(pixels.min()) <= float(pixels.max()) <= 1
    norms = [m for m in generator.modules() if isinstance(m, nn.BatchNorm2d)]
    assert float(generator.linear.weight.std()) == pytest.approx(0.02, rel=0.02)  # 1.5 million values
    assert all(abs(float(m.weight.mean()) - 1) < 0.01 for m in norms)  # 64 values or more of deviation 0.02
    assert all(float(m.bias.abs().max()) == 0 for m in generator.modules() if getattr(m, "bias", None) is not None)


def test_dafl_generator_gives_the_channels_of_a_data_set() -> None:
    with isolated(0):
        generator = DAFLGenerator((3, 12, 8), nz=7)
    images = generator(torch.randn(16, 7, generator=stream(0)))
    assert images.shape == (16, 3, 12, 8)
    flat = images.transpose(0, 1).flatten(1)
    assert torch.allclose(flat.mean(1), torch.zeros(3), atol=1e-5)
    assert torch.allclose(flat.var(1, correction=0), torch.ones(3), atol=1e-2)  # eps of 1e-5 beside small variances
    assert sum(p.numel() for p in generator.parameters()) == 8 * 128 * 6 + 256 + (
        128 * (9 * 128 + 1) + 256 + 64 * (9 * 128 + 1) + 128 + 3 * (9 * 64 + 1)
    )


@pytest.mark.parametrize("kind", [Generator, DAFLGenerator])
def test_sizes_that_halving_twice_doesnt_reach_are_a_sentence(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="10x8 pixels, only multiples of 4"):
        kind((1, 10, 8))


def test_pixels_of_normalised_images() -> None:
    images = torch.tensor([[[[0.0, 1.0]], [[-1.0, 9.0]]]]).requires_grad_()
    pixels = pixels_of(images, Normalisation((0.5, 0.1), (0.25, 0.2)))
    assert torch.allclose(pixels, torch.tensor([[[[0.5, 0.75]], [[0.0, 1.0]]]]))
    (gradient,) = torch.autograd.grad(pixels.sum(), images)
    assert torch.equal(gradient, torch.tensor([[[[0.25, 0.25]], [[0.0, 0.0]]]]))


TEACHER = [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.0, 3.0]]
STUDENT = [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 0.0]]


def test_divergence_loss_by_hand() -> None:
    # the first image is called alike, so only the other two count, over all three
    expected = -(kl(softmax(TEACHER[1]), softmax(STUDENT[1])) + kl(softmax(TEACHER[2]), softmax(STUDENT[2]))) / 3
    teacher, student = torch.tensor(TEACHER).requires_grad_(), torch.tensor(STUDENT).requires_grad_()
    loss = divergence_loss(teacher, student)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    other_way = kl(softmax(STUDENT[1]), softmax(TEACHER[1])) + kl(softmax(STUDENT[2]), softmax(TEACHER[2]))
    assert float(loss.detach()) != pytest.approx(-other_way / 3, rel=1e-2)
    for rows in torch.autograd.grad(loss, (teacher, student)):
        assert torch.equal(rows[0], torch.zeros(3)) and rows[1:].abs().min() > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_loss_by_hand(temperature: float) -> None:
    soft = [[softmax([v / temperature for v in row]) for row in rows] for rows in (TEACHER, STUDENT)]
    expected = temperature**2 * sum(kl(p, q) for p, q in zip(*soft, strict=True)) / 3
    teacher, student = torch.tensor(TEACHER).requires_grad_(), torch.tensor(STUDENT).requires_grad_()
    loss = distillation_loss(student, teacher, temperature)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    by_student, by_teacher = torch.autograd.grad(loss, (student, teacher), allow_unused=True)
    assert by_teacher is None
    # d KL(p || softmax(z / T)) / dz = (q - p) / T
    expected_gradient = temperature * (torch.tensor(soft[1]) - torch.tensor(soft[0])) / 3
    assert torch.allclose(by_student, expected_gradient, atol=1e-6)


def test_dafl_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    surest = [softmax([2.0, 0.0])[0], softmax([1.0, 0.0])[0]]
    assert float(one_hot_loss(logits)) == pytest.approx(-sum(math.log(p) for p in surest) / 2, rel=1e-6)
    p = (surest[0] + 1 - surest[1]) / 2
    assert float(entropy_loss(logits)) == pytest.approx(p * math.log(p) + (1 - p) * math.log(1 - p), rel=1e-6)
    assert float(entropy_loss(torch.tensor([[200.0, 0.0]]))) == 0  # not NaN
    features = [torch.tensor([[1.0, -3.0]]), torch.tensor([[0.0, 0.0, 6.0]])]
    assert float(activation_loss(features)) == -2.0  # means of 2 and 2
    assert float(activation_loss([*features, torch.empty(1, 0)])) == pytest.approx(-4 / 3)
    joint = teachers().outputs(torch.randn(4, *SHAPE, generator=stream(0)))
    total = 2 * one_hot_loss(joint.mean) + 3 * activation_loss(joint.features) + 4 * entropy_loss(joint.mean)
    assert torch.allclose(DAFL(one_hot=2, activation=3, balance=4).loss(joint), total)


def test_loss_is_the_weighted_sum_and_zero_weights_leave_terms_out() -> None:
    x, labels = torch.randn(6, *SHAPE, generator=stream(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    group, student = teachers(), network(7)
    joint = group.outputs(x)
    parts = [cross_entropy(joint.mean, labels), joint.bn, divergence_loss(joint.mean, student.eval()(x))]
    student.train()
    for weights in ((1.0, 1.0, 0.5), (2.0, 0.0, 3.0), (1.0, 0.5, 0.0), (0.0, 1.0, 0.0)):
        ours = Generation(ce=weights[0], bn=weights[1], div=weights[2]).loss(group, student, x, labels)
        assert torch.allclose(ours, sum(w * part for w, part in zip(weights, parts, strict=True)), rtol=1e-4)
    assert student.training and float(parts[1].detach()) > 0 and float(parts[2].detach()) < 0


def states(*networks: nn.Module) -> list[Tensor]:
    return [value.clone() for network in networks for value in network.state_dict().values()]


def epochs(settings: Any, count: int = 2, seed: int = 0) -> tuple[Any, list[tuple[Records, Tensor]]]:
    """A stage and what its epochs gave."""
    group, student = teachers(), network(7)
    before = states(student, *group.networks)
    stage = settings.start(LIKE, stream(seed, "start"))
    found = [epoch_of(stage, group, student, stream(seed, "epoch", i)) for i in range(count)]
    assert all(torch.equal(a, b) for a, b in zip(before, states(student, *group.networks), strict=True))
    assert all(p.grad is None for net in (student, *group.networks) for p in net.parameters())
    assert student.training
    return stage, found


def epoch_of(stage: Any, group: Teachers, student: nn.Module, rng: torch.Generator) -> tuple[Records, Tensor]:
    found: tuple[Records, Tensor] = (
        stage.epoch(group, rng) if takes_no_student(stage) else stage.epoch(group, student, rng)
    )
    return found


def takes_no_student(stage: Any) -> bool:
    return type(stage).__name__ == "DAFLSynthesis"


ALL = {
    "kept": Generation(**SMALL),
    "fresh": Generation(fresh=True, keep_lowest=True, view="crop_flip", **SMALL),
    "dafl": DAFL(batch_size=4, steps=3, nz=5),
}


@pytest.mark.parametrize("name", ALL)
def test_an_epoch_gives_8_bit_images_and_what_the_teachers_say(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    _, found = epochs(ALL[name])
    assert torch.equal(torch.get_rng_state(), before)
    for images, logits in found:
        assert images.images.shape == (12, *SHAPE) and images.images.dtype == torch.uint8
        assert (images.num_classes, images.normalisation) == (CLASSES, LIKE.normalisation)
        assert logits.shape == (12, CLASSES) and not logits.requires_grad
        # DAFL's are from before the rounding, by at most half of 1/255 a pixel
        judged = teachers().predict(images)
        assert torch.allclose(logits, judged, atol=0.1 if name == "dafl" else 1e-4)
    assert not torch.equal(found[0][0].images, found[1][0].images)
    _, again = epochs(ALL[name])
    assert all(torch.equal(a[0].images, b[0].images) for a, b in zip(found, again, strict=True))
    assert not torch.equal(epochs(ALL[name], seed=1)[1][0][0].images, found[0][0].images)


@pytest.mark.parametrize("name", ALL)
def test_a_stage_resumes_from_its_tensors(name: str) -> None:
    settings = ALL[name]
    stage, (_, second) = epochs(settings)
    assert bool(stage.tensors) == (name != "fresh")
    begun, _ = epochs(settings, 1)
    kept = {key: value.clone() for key, value in begun.tensors.items()}
    other = settings.start(LIKE, stream(9, "start"))  # another process's: other first weights
    load(other.tensors, kept)
    resumed = epoch_of(other, teachers(), network(7), stream(0, "epoch", 1))
    assert torch.equal(resumed[0].images, second[0].images) and torch.equal(resumed[1], second[1])
    if kept:
        partly = settings.start(LIKE, stream(9, "start"))
        load(partly.tensors, {key: value for key, value in kept.items() if key.startswith("generator")})
        unlike = epoch_of(partly, teachers(), network(7), stream(0, "epoch", 1))
        assert not torch.equal(unlike[1], second[1])  # Adam's moments do count


def test_steps_follow_the_loss_and_the_labels_drawn() -> None:
    group, student = teachers(), network(7)
    found = {}
    for steps in (1, 20):
        stage = Generation(batch_size=30, steps=steps, nz=5, ngf=4, lr=0.02, bn=0, div=0).start(LIKE, stream(0))
        images, logits = stage.epoch(group, student, stream(1))
        found[steps] = float(cross_entropy(logits, images.labels))
        assert torch.equal(images.labels, images.labels.sort().values) and len(images.labels.unique()) == 3
    assert found[20] < found[1] - 0.05


def test_fresh_generators_fit_their_latents_and_keep_the_best_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 1.0, 2.0])
    seen: list[Tensor] = []

    def staged(self: Generation, _t: Any, _s: Any, x: Tensor, _labels: Tensor) -> Tensor:
        seen.append(x.detach())
        total = x.square().sum()
        return total - total.detach() + next(values)

    monkeypatch.setattr(Generation, "loss", staged)
    stage = Generation(fresh=True, keep_lowest=True, **SMALL).start(LIKE, stream(0))
    images, _ = stage.epoch(teachers(), network(7), stream(1))
    assert torch.allclose(images.inputs(), seen[1], atol=0.5 / 255 / 0.2 + 1e-5)  # rounding, in normalised units
    assert not torch.allclose(images.inputs(), seen[0], atol=0.5 / 255 / 0.2 + 1e-5)


def test_views_shift_and_flip_with_black_borders() -> None:
    pixels = torch.rand(400, 1, 8, 8, generator=stream(0)) + 0.1
    assert augmented(pixels, "none", stream(1)) is pixels
    shifted, flipped = augmented(pixels, "crop", stream(1)), augmented(pixels, "crop_flip", stream(1))
    still = (shifted == pixels).flatten(1).all(1)
    assert 0.05 < float(still.float().mean()) < 0.18  # one of nine shifts by up to a pixel
    assert float(shifted.min()) == 0
    same = (shifted == flipped).flatten(1).all(1)
    assert 0.4 < float(same.float().mean()) < 0.6
    assert torch.equal(flipped[~same], shifted[~same].flip(3))


def test_pixels_that_are_not_finite_are_said() -> None:
    with pytest.raises(Diverged, match="use a smaller learning rate, for example 0\\.1"):
        Generation(lr=1e30, **SMALL).start(LIKE, stream(0)).epoch(teachers(), network(7), stream(1))


def test_published_settings_differ_where_the_code_does() -> None:
    settings = Generation.published()
    assert (settings.fresh, settings.keep_lowest, settings.view, settings.bn) == (True, True, "crop_flip", 0.0)
    # the README's batch, T_G and learning rate; the code's Adam, latents and channels
    assert (settings.batch_size, settings.steps, settings.lr) == (256, 30, 1e-3)
    assert (settings.beta1, settings.nz, settings.ngf) == (0.5, 256, 64)
    assert (settings.ce, settings.div) == (1.0, 1.0)
    assert DAFL.published().balance * math.log(10) == pytest.approx(5)


def batch(first: int, n: int) -> tuple[Records, Tensor]:
    numbers = torch.arange(first, first + n)
    images = numbers.to(torch.uint8)[:, None, None, None].expand(n, *SHAPE)
    return Records(images, numbers % CLASSES, CLASSES, LIKE.normalisation), numbers[:, None].float().expand(n, CLASSES)


def numbers(pool: Pool) -> list[int]:
    found = pool.images.images[:, 0, 0, 0]
    assert torch.equal(pool.images.labels, found.long() % CLASSES)
    examples = pool.examples()
    assert torch.equal(examples.inputs(), pool.images.inputs())
    assert torch.equal(examples.labels, found[:, None].float().expand(-1, CLASSES))
    return sorted(found.tolist())


def test_a_pool_holds_the_latest_images_and_resumes() -> None:
    pool = Pool(LIKE, 5)
    assert len(pool) == 0 and numbers(pool) == []
    pool.add(*batch(0, 3))
    assert numbers(pool) == [0, 1, 2]
    pool.add(*batch(3, 3))
    assert numbers(pool) == [1, 2, 3, 4, 5] and len(pool) == 5
    other = Pool(LIKE, 5)
    load(other.tensors, {key: value.clone() for key, value in pool.tensors.items()})
    for held in (pool, other):
        held.add(*batch(6, 2))
        assert numbers(held) == [3, 4, 5, 6, 7]
        held.add(*batch(8, 7))
        assert numbers(held) == [10, 11, 12, 13, 14]


@pytest.mark.slow
def test_a_student_learns_from_teachers_without_data() -> None:
    with isolated(0):
        labels = torch.arange(60) % CLASSES
        pixels = (torch.rand(60, *SHAPE) * 100).to(torch.uint8)
        pixels[torch.arange(60), 0, 2 * labels] += 150  # a bright row
    real = Records(pixels, labels, CLASSES, LIKE.normalisation)
    nets = [network(k) for k in range(2)]
    for k, net in enumerate(nets):
        SGD(lr=0.05, batch_size=20, epochs=10).fit(net, real, stream(k))
    group, student = Teachers(nets), network(7)
    start = evaluate(student, real)

    def lesson(output: Tensor, x: Tensor, logits: Tensor) -> Tensor:
        return distillation_loss(output, logits)

    stage, pool = Generation(batch_size=30, steps=10, nz=8, ngf=8, lr=5e-3).start(LIKE, stream(0)), Pool(LIKE, 150)
    for epoch in range(5):
        pool.add(*stage.epoch(group, student, stream(1, epoch)))
        SGD(lr=0.05, batch_size=15, epochs=2).fit(student, pool.examples(), stream(2, epoch), loss=lesson)
    assert evaluate(student, real) > max(start, 1 / 3) + 0.3


@pytest.mark.slow
def test_the_fast_epoch_does_what_a_plain_loop_over_the_models_does() -> None:
    """Loss, gradient and what the student learns by, on the benchmark's networks, two of them."""
    assert max(load_benchmark("dense_epoch").differences(("dense-mnist", (1, 8, 8), 2, 1))) < 1e-5

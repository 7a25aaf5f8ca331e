"""Teachers together against the plain loop, and what their batch norms expect against sums worked out by hand."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedstill import models
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill import teachers as module
from fedstill.distill.teachers import Teachers
from fedstill.evaluation import mode_of

SHAPE, CLASSES = (1, 8, 8), 4
SPECS = [
    "dense-mnist",
    "convnet:width=4,depth=2",
    "dense-mnist",
    "wrn:depth=10",
    "dense-mnist",
    "convnet:norm=batch,width=4",
]


def network(spec: str, seed: int) -> nn.Module:
    """With running statistics that have moved."""
    with isolated(seed):
        found = models.build(spec, SHAPE, CLASSES)
        with torch.no_grad():
            for _ in range(3):
                found(torch.randn(16, *SHAPE) * (1 + seed) + 0.5)
    return found


def networks(specs: Sequence[str] = SPECS) -> list[nn.Module]:
    return [network(spec, seed) for seed, spec in enumerate(specs)]


def images(n: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, *SHAPE, generator=stream(seed))


def near(a: Tensor, b: Tensor) -> bool:
    """To 1e-5 of the largest value: float32 sums in another order."""
    return float((a - b).detach().abs().max()) <= 1e-5 * float(b.detach().abs().max())


def naive_bn(network: nn.Module, x: Tensor) -> Tensor:
    """One network's sum of distances, from the inputs of its batch norms and the definition of mean and variance."""
    inputs: list[tuple[nn.BatchNorm2d, Tensor]] = []
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [m.register_forward_hook(lambda m, args, _out: inputs.append((m, args[0]))) for m in norms]
    with mode_of(network, training=False):
        network(x)
    for hook in hooks:
        hook.remove()
    total = x.new_zeros(())
    for norm, rows in inputs:
        flat = rows.transpose(0, 1).flatten(1)  # a row for every channel
        mean = flat.sum(1) / flat.shape[1]
        variance = ((flat - mean[:, None]) ** 2).sum(1) / flat.shape[1]
        total = (
            total + ((mean - norm.running_mean) ** 2).sum().sqrt() + ((variance - norm.running_var) ** 2).sum().sqrt()
        )
    return total


@pytest.mark.parametrize("stacked", [False, True])
def test_logits_and_their_gradient_are_the_plain_loops(stacked: bool) -> None:
    nets, x = networks(), images().requires_grad_()
    teachers = Teachers(nets, stacked=stacked)
    assert len(teachers) == 6 and len(teachers.stacks) == stacked  # one kind occurs more than once
    for net in nets:
        net.eval()
    plain = torch.stack([net(x) for net in nets], 1)
    each = teachers.each(x)
    assert each.shape == (6, 6, CLASSES) and near(each, plain)
    assert near(teachers(x), plain.mean(1)) and near(teachers.outputs(x).mean, plain.mean(1))
    ours, theirs = (torch.autograd.grad(value.square().sum(), x)[0] for value in (teachers(x), plain.mean(1)))
    assert theirs.abs().max() > 0 and near(ours, theirs)
    assert not near(each[:, 0], plain[:, 2])  # each its own weights
    assert len(teachers.stacks) == stacked  # nothing fell back


@pytest.mark.parametrize("stacked", [False, True])
def test_l_bn_is_the_mean_over_clients_of_distances_from_their_running_statistics(stacked: bool) -> None:
    nets, x = networks(), images().requires_grad_()
    expected = torch.stack([naive_bn(net, x) for net in nets])
    assert (expected.detach() > 0).tolist() == [True, False, True, True, True, True]
    joint = Teachers(nets, stacked=stacked).outputs(x)
    assert near(joint.bn, expected.mean())
    ours, theirs = (torch.autograd.grad(value, x)[0] for value in (joint.bn, expected.mean()))
    assert theirs.abs().max() > 0 and near(ours, theirs)


def test_l_bn_by_hand() -> None:
    norm = nn.BatchNorm2d(2)
    norm.running_mean, norm.running_var = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0])
    other = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    x = torch.tensor([[[[1.0, 3.0]], [[5.0, 5.0]]], [[[5.0, 7.0]], [[5.0, 5.0]]]])  # (2, 2, 1, 2)
    # channel 0: 1, 3, 5, 7: mean 4, biased variance 5; channel 1: mean 5, variance 0
    expected = (4**2 + 4**2) ** 0.5 + (4**2 + 4**2) ** 0.5
    with_norm = nn.Sequential(norm, nn.Flatten(), nn.Linear(4, 2))
    assert float(Teachers([with_norm]).outputs(x).bn) == pytest.approx(expected, rel=1e-6)
    teachers = Teachers([with_norm, other])
    assert float(teachers.outputs(x).bn) == pytest.approx(expected / 2, rel=1e-6)  # divided by m
    assert teachers.batch_norms == (1, 0)
    assert float(Teachers([other]).outputs(x).bn) == 0
    norm.running_mean, norm.running_var = torch.tensor([4.0, 5.0]), torch.tensor([5.0, 0.0])
    exact = x.clone().requires_grad_()
    bn = Teachers([with_norm]).outputs(exact).bn
    assert float(bn.detach()) == 0  # and no NaN from the root's infinite slope
    assert torch.equal(torch.autograd.grad(bn, exact)[0], torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (1, 3, 2, 2)])
def test_the_gradient_of_l_bn_is_that_of_finite_differences(shape: tuple[int, ...]) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, dtype=torch.float64)
    norm.running_mean, norm.running_var = torch.randn(3, generator=stream(0)).double(), torch.rand(3).double() + 0.5
    teachers = Teachers([norm])
    x = torch.randn(shape, generator=stream(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: 3 * teachers.outputs(x).bn, [x])
    (slope,) = torch.autograd.grad(x.sum() * teachers.outputs(x).bn, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()  # refused, not wrong


def test_layers_without_running_statistics_have_nothing_to_compare_with() -> None:
    norms = [nn.BatchNorm2d(1, track_running_stats=False), nn.InstanceNorm2d(1, track_running_stats=True)]
    net = nn.Sequential(*norms, nn.Flatten(), nn.Linear(64, 2))
    teachers = Teachers([net])
    assert teachers.batch_norms == (0,) and float(teachers.outputs(images()).bn) == 0


@pytest.mark.parametrize("stacked", [False, True])
def test_nothing_about_the_networks_changes(stacked: bool) -> None:
    nets = networks()
    nets[0].eval()
    before = [{name: value.clone() for name, value in net.state_dict().items()} for net in nets]
    teachers = Teachers(nets, stacked=stacked)
    joint = teachers.outputs(images().requires_grad_())
    (joint.mean.sum() + joint.bn).backward()
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in net.parameters())
        assert not any(m._forward_pre_hooks for m in net.modules())
    assert [net.training for net in nets] == [False] + 5 * [True]
    assert not teachers(images()).requires_grad  # the weights are no part of a graph


def test_without_a_stack_the_weights_are_held_once() -> None:
    net = network("dense-mnist", 0)
    (held,) = Teachers([net]).networks
    assert [p.data_ptr() for p in held.parameters()] == [p.data_ptr() for p in net.parameters()]


@pytest.mark.parametrize("stacked", [False, True])
def test_features_are_what_each_networks_last_layer_sees(stacked: bool) -> None:
    nets, x = networks(), images().requires_grad_()
    found = Teachers(nets, stacked=stacked).outputs(x).features
    for net, rows in zip(nets, found, strict=True):
        with mode_of(net, training=False):
            expected = models.features(net, x)
        assert rows.shape == expected.shape and near(rows, expected)
    assert torch.autograd.grad(sum(rows.sum() for rows in found), x)[0].abs().max() > 0
    (none,) = Teachers([nn.Flatten()]).outputs(x).features
    assert none.shape == (6, 0)


class Branching(nn.Module):
    """Code that can't be stacked: it asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1))
        return out if float(out.detach().sum()) > 0 else -out


def test_networks_that_cant_be_stacked_run_one_after_another() -> None:
    with isolated(0):
        nets = [Branching() for _ in range(3)]
    teachers, x = Teachers(nets, stacked=True), images()
    assert len(teachers.stacks) == 1
    assert near(teachers.each(x), torch.stack([net(x) for net in nets], 1))
    assert not teachers.stacks
    with pytest.raises(RuntimeError):  # images that fit no network are an error all the same
        Teachers(networks(["dense-mnist"] * 2), stacked=True)(torch.rand(2, 3, 8, 8))


class Scaled(nn.Module):
    """Two of these with other factors have equal weights and print alike."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.fc = factor, nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.factor * self.fc(x.flatten(1))
        return out


def test_networks_that_differ_outside_their_weights_are_not_taken_for_one_architecture() -> None:
    with isolated(0):
        nets = [Scaled(1.0), Scaled(5.0), Scaled(1.0).eval()]
    teachers = Teachers(nets, stacked=True)
    assert teachers.groups == [[0, 2], [1]]
    assert near(teachers.each(images()), torch.stack([net(images()) for net in nets], 1))


def test_records_are_judged_in_order_without_gradients() -> None:
    pixels = torch.randint(0, 256, (7, *SHAPE), generator=stream(0), dtype=torch.uint8)
    records = Records(pixels, torch.zeros(7, dtype=torch.int64), CLASSES, Normalisation((0.5,), (0.25,)))
    teachers = Teachers(networks())
    judged = teachers.predict(records, batch_size=3)
    assert near(judged, teachers(records.inputs())) and not judged.requires_grad


def test_no_teachers_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="there are 0 teachers to learn from; at least 1 is needed"):
        Teachers([])


def test_probabilities_can_be_averaged_in_place_of_logits() -> None:
    nets, x = networks(), images()
    teachers = Teachers(nets, average="probabilities")
    with torch.no_grad():
        expected = torch.stack([net.eval()(x).softmax(1) for net in nets]).mean(0)
    torch.testing.assert_close(teachers(x).exp(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(teachers.outputs(x).mean.softmax(1), expected, rtol=1e-5, atol=1e-6)


def loss_and_gradient(teachers: Teachers) -> tuple[Tensor, Tensor, int]:
    """A loss of all outputs, its gradient in the images, and the bytes that the pass kept for it."""
    kept: list[int] = []

    def count(saved: Tensor) -> Tensor:
        kept.append(saved.nbytes if saved.requires_grad else 0)
        return saved.detach()

    x = images(64).requires_grad_()
    with saved_tensors_hooks(count, lambda saved: saved):
        outputs = teachers.outputs(x)
        loss = outputs.mean.square().sum() + outputs.bn + sum(f.square().mean() for f in outputs.features)
    return loss.detach(), torch.autograd.grad(loss, x)[0], sum(kept)


@pytest.mark.parametrize("most", [0, 3_000_000])
def test_networks_that_run_again_give_the_same_bits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, gradient, whole = loss_and_gradient(Teachers(networks()))
    monkeypatch.setattr(module, "MOST_KEPT", most)
    loss, again, kept = loss_and_gradient(Teachers(networks()))
    assert torch.equal(loss, expected) and torch.equal(again, gradient)
    assert kept < whole / 2 if most == 0 else kept < whole


def test_memory_does_not_grow_with_the_number_of_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass keeps beyond `MOST_KEPT` are the networks' outputs: their logits and features."""
    monkeypatch.setattr(module, "MOST_KEPT", 2_000_000)
    few, many = (loss_and_gradient(Teachers(networks(["dense-mnist"] * n)))[2] for n in (8, 32))
    one = loss_and_gradient(Teachers(networks(["dense-mnist"])))[2]
    assert one < 2_000_000 and 8 * one > 2_000_000
    assert few <= 3_000_000 and (many - few) / 24 < one / 20

"""Sums of clipped gradients: against a loop over records, for every model; bounded influence; nothing left behind."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.seeds import isolated, stream
from fedstill.privacy import rowwise
from fedstill.privacy.per_record import ClippedGradients, check_alone

# small enough for a loop; a name without an entry is built as it is, for 3x32x32
SMALL: dict[str, tuple[str, tuple[int, int, int]]] = {
    "convnet": ("convnet:width=8,depth=2", (1, 8, 8)),
    "lenet": ("lenet:padding=2", (1, 8, 8)),
    "lenet5": ("lenet5", (3, 16, 16)),
    "dense-cnn1": ("dense-cnn1", (3, 18, 18)),
    "dense-cnn2": ("dense-cnn2:width=16", (3, 18, 18)),
    "dense-mnist": ("dense-mnist", (1, 8, 8)),
    "kadp-mnist": ("kadp-mnist", (1, 8, 8)),
    "kadp-cifar": ("kadp-cifar", (3, 8, 8)),
    "scattering": ("scattering:angles=2,groups=3", (1, 8, 8)),
    "patches": ("patches:centroids=32,side=3", (3, 8, 8)),
    "projected": ("projected:width=8", (1, 8, 8)),
}
BY_BATCH = {"dense-mnist", "resnet8", "resnet18", "wrn", "mobilenetv2s", "shufflenet", "projected"}
MORE = [
    ("convnet:width=8,depth=2,norm=layer", (3, 8, 8)),
    ("convnet:width=8,depth=2,norm=group,pooling=max", (3, 8, 8)),
    ("convnet:width=8,depth=1,norm=none,activation=swish", (1, 16, 16)),
]
ALONE = [SMALL.get(name, (name, (3, 32, 32))) for name in models.MODELS if name not in BY_BATCH] + MORE
each_alone = pytest.mark.parametrize(("spec", "shape"), ALONE, ids=str)


def loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y, reduction="none")


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """In float64, so that only the formulas can differ."""
    with isolated(0):
        return make().double()


def batch(shape: tuple[int, ...], n: int = 7) -> tuple[Tensor, Tensor]:
    rng = stream(0, "batch")
    return torch.randn(n, *shape, generator=rng, dtype=torch.float64), torch.randint(0, 3, (n,), generator=rng)


def loop(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> tuple[list[Tensor], Tensor]:
    """One record at a time."""
    weights = [p for p in model.parameters() if p.requires_grad]
    totals, norms = [torch.zeros_like(w) for w in weights], []
    for i in range(len(x)):
        one = slice(i, i + 1)
        gradients = torch.autograd.grad(loss(model(x[one]), x[one], y[one])[0], weights, materialize_grads=True)
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
        for total, g in zip(totals, gradients, strict=True):
            total += g * min(1.0, clip * (1 - 2.0**-21) / float(norms[-1]))  # shorter by a hair, for float32
    return totals, torch.stack(norms)


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    largest = max(float(t.abs().max()) for t in expected)
    for ours, theirs in zip(found, expected, strict=True):
        # rounding in float64
        assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= 1e-9 * largest


def compare(model: nn.Module, x: Tensor, y: Tensor, *, fast: bool = True) -> None:
    """Against the loop, with some records clipped and some not."""
    clip = float(loop(model, x, y, 1.0)[1].median())
    expected, norms = loop(model, x, y, clip)
    found, lengths = ClippedGradients(model, fast=fast).clipped_sum(x, y, clip, loss)
    agree(found, expected)
    torch.testing.assert_close(lengths, norms)


# --- every model


def test_the_table_of_models_is_whole() -> None:
    assert BY_BATCH | {spec.partition(":")[0] for spec, _ in ALONE} == models.MODELS.keys()


@each_alone
def test_clipped_sums_are_those_of_a_loop(spec: str, shape: tuple[int, int, int]) -> None:
    model = build(lambda: models.build(spec, shape, 3))
    compare(model, *batch(shape))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@each_alone
def test_the_librarys_models_take_the_fast_way_and_the_general_one_agrees(
    spec: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(lambda: models.build(spec, shape, 3))
    x, y = batch(shape)
    general = ClippedGradients(model, fast=False).clipped_sum(x, y, 0.5, loss)
    monkeypatch.delattr(ClippedGradients, "_by_records")
    fast = ClippedGradients(model).clipped_sum(x, y, 0.5, loss)
    agree(fast[0], general[0])
    torch.testing.assert_close(fast[1], general[1])


@pytest.mark.parametrize("name", sorted(BY_BATCH))
def test_models_with_statistics_of_the_batch_are_refused_while_they_train(name: str) -> None:
    spec, shape = SMALL.get(name, (name, (3, 32, 32)))
    model = models.build(spec, shape, 3)
    with pytest.raises(ValueError, match="is a BatchNorm2d in train mode.*take a model") as caught:
        ClippedGradients(model)
    assert "\n" not in str(caught.value)
    gradients = ClippedGradients(model.eval())
    with pytest.raises(ValueError, match="in train mode"):
        model.train()
        gradients.clipped_sum(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64), 1.0, loss)


def test_running_statistics_of_an_instance_norm_are_refused_and_fixed_ones_are_not() -> None:
    model = build(lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True), *tail(128)))
    with pytest.raises(ValueError, match="layer '0' is a InstanceNorm2d in train mode"):
        check_alone(model)
    compare(model.eval(), *batch((2, 8, 8)))


# --- layers and odd models


def tail(features: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(features, 3)]


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(self.inner(x).tanh()))
        return out


class Tied(Twice):
    """A layer's weight used by hand as well: no hook sees that."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x).tanh() @ self.inner.weight)
        return out


class Scale(nn.Module):
    """A parameter of no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(x * self.scale)
        return out


class Changed(Twice):
    """Changes a layer's input after its use."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone()
        first = self.inner(hidden)
        hidden.mul_(2)
        out: Tensor = self.outer(first + hidden)
        return out


class Turned(Twice):
    """Positions before records: with as many positions as records, nothing but gradients shows it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x.transpose(0, 1)).tanh().sum(0))
        return out


class Mixed(Twice):
    """The mean of the batch: a record alone has none."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x - x.mean(0) / 2).tanh())
        return out


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *tail(144))
    model[0].bias.requires_grad_(False)
    return model


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    return model


IMAGE, ROW, ROWS = (2, 8, 8), (8,), (7, 8)
ODD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stride": (lambda: nn.Sequential(nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.Tanh(), *tail(80)), IMAGE),
    "oblong": (
        lambda: nn.Sequential(nn.Conv2d(2, 5, (3, 8), stride=(1, 2), padding=(0, 1), bias=False), *tail(60)),
        IMAGE,
    ),
    "strips": (lambda: nn.Sequential(nn.Conv2d(2, 9, 3), nn.Conv2d(9, 4, (2, 3), padding=(2, 1)), *tail(216)), IMAGE),
    "one position": (lambda: nn.Sequential(nn.Conv2d(2, 5, 8), nn.Tanh(), *tail(5)), IMAGE),
    "dilation": (lambda: nn.Sequential(nn.Conv2d(2, 5, 3, dilation=2), *tail(80)), IMAGE),
    "groups": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), *tail(144)), IMAGE),
    "padding by name": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), *tail(256)), IMAGE),
    "padding by reflection": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), *tail(256)),
        IMAGE,
    ),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True), *tail(128)), IMAGE),
    "group norm of rows": (lambda: nn.Sequential(nn.Linear(8, 6), nn.GroupNorm(3, 6), nn.Linear(6, 3)), ROW),
    "positions": (lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), *tail(42)), ROWS),
    "in place": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), ROW),
    "frozen": (frozen, IMAGE),
    "shared": (shared, ROW),
    "twice": (Twice, ROW),
    "tied": (Tied, ROW),
    "unknown": (Scale, ROW),
    "turned": (Turned, ROWS),
    "mixed": (Mixed, ROW),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_models_are_right_too(name: str) -> None:
    make, shape = ODD[name]
    compare(build(make), *batch(shape))
    compare(build(make), *batch(shape), fast=False)


def test_an_input_that_is_gone_is_an_error_as_in_a_plain_backward_pass() -> None:
    with pytest.raises(RuntimeError):
        ClippedGradients(build(Changed)).clipped_sum(*batch(ROW), 1.0, loss)


def test_a_hook_of_others_is_heeded() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)))
    handle = model[0].register_forward_hook(lambda layer, given, output: output.tanh())
    compare(model, *batch(ROW))
    handle.remove()


def test_a_batch_of_several_chunks() -> None:
    model = build(lambda: models.build("kadp-mnist", (1, 8, 8), 3))
    x, y = batch((1, 8, 8), n=200)
    compare(model, x, y)


def test_float32_is_close() -> None:
    model = build(lambda: models.build("convnet:width=8,depth=2", (1, 8, 8), 3))
    x, y = batch((1, 8, 8))
    expected, norms = loop(model, x, y, 1.0)
    found, lengths = ClippedGradients(model.float()).clipped_sum(x.float(), y, 1.0, loss)
    for ours, theirs in zip(found, expected, strict=True):
        # rounding in float32 of some hundred terms
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert lengths.dtype == torch.float64
    torch.testing.assert_close(lengths, norms, rtol=1e-5, atol=1e-6)


# --- no records, and nothing left behind


@pytest.mark.parametrize("fast", [True, False])
def test_no_records_sum_to_zero(fast: bool) -> None:
    model = build(lambda: models.build("lenet:padding=2", (1, 8, 8), 3))
    found, norms = ClippedGradients(model, fast=fast).clipped_sum(*batch((1, 8, 8), n=0), 1.0, loss)
    assert [t.shape for t in found] == [p.shape for p in model.parameters()]
    assert all((t == 0).all() and not t.requires_grad for t in found) and norms.shape == (0,)


def test_hooks_are_gone_also_after_an_error() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)))
    gradients = ClippedGradients(model)
    with pytest.raises(RuntimeError):
        gradients.clipped_sum(*batch((5,)), 1.0, loss)
    assert not any(m._forward_hooks for m in model.modules())
    compare(model, *batch(ROW))
    assert not any(m._forward_hooks for m in model.modules())


def test_a_loss_that_is_not_of_each_record_is_refused() -> None:
    model = build(lambda: nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"gives \(\) for 1 records; it must give one per record"):
        ClippedGradients(model).clipped_sum(*batch(ROW), 1.0, lambda output, x, y: cross_entropy(output, y))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no trainable parameters"):
        ClippedGradients(nn.Linear(8, 3).requires_grad_(False))


# --- bounded influence


def linear(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Its gradient is as long as the inputs."""
    return output.sum(1)


RECORDS: dict[str, nn.Module] = {
    "linear": build(lambda: nn.Linear(64, 3)).float(),
    "convolutions": build(lambda: nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), *tail(144))).float(),
    "norms": build(lambda: nn.Sequential(nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))).float(),
    "general": build(lambda: nn.Sequential(nn.Unflatten(1, (64, 1)), nn.Conv1d(64, 3, 1), nn.Flatten())).float(),
}


@pytest.mark.parametrize("name", RECORDS)
@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.floats(1e-30, 1e30), st.sampled_from([0.0, math.inf, math.nan, 3e38, 1e-45])),
    clip=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
    n=st.integers(0, 3),
)
def test_one_record_moves_the_sum_by_at_most_the_clip(name: str, size: float, clip: float, seed: int, n: int) -> None:
    gradients, rng = ClippedGradients(RECORDS[name]), stream(seed)
    x, y = torch.randn(n + 1, 64, generator=rng), torch.zeros(n + 1, dtype=torch.int64)
    x[0] *= size
    for kind in (linear, loss):
        together, less, alone = (
            torch.cat([t.double().flatten() for t in gradients.clipped_sum(x[part], y[part], clip, kind)[0]])
            for part in (slice(0, n + 1), slice(1, n + 1), slice(0, 1))
        )
        assert torch.isfinite(together).all()
        assert (together - less).norm() <= clip
        assert alone.norm() <= clip


class Gate(nn.Module):
    """Takes the batch's mean off once its weights are large, as they are after some steps."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.inner.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x)
        mixing = (self.inner.weight.abs().amax() > 1.0).to(rows.dtype)
        out: Tensor = self.outer((rows - mixing * rows.mean(0)).tanh())
        return out


def twins(classes: int) -> nn.Module:
    """Each filter has a twin and the last layer takes the two from each other, a million times: logits are rounding."""
    with isolated(0):
        model = models.build("convnet:width=16,depth=2", (1, 8, 8), classes)
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.Conv2d):
                m.weight[1::2] = m.weight[::2]
                m.bias[1::2] = m.bias[::2]
        by_channel = linear.weight.view(classes, 16, -1)
        by_channel.normal_(std=1e6, generator=stream(0))
        by_channel[:, 1::2] = -by_channel[:, ::2]
    return model


def moves(model: nn.Module, x: Tensor, y: Tensor, without: int) -> float:
    """By how much one record moves the sum, in clipping lengths."""
    gradients, clip = ClippedGradients(model), 0.01
    rest = torch.arange(len(x)) != without
    both = [gradients.clipped_sum(x[some], y[some], clip, loss)[0] for some in (rest | True, rest)]
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*both, strict=True))) / clip


@pytest.mark.parametrize("classes", [2, 12, 20])
@pytest.mark.parametrize("n", [65, 194, 196])
def test_weights_that_leave_only_rounding_let_no_record_move_others(classes: int, n: int) -> None:
    rng = stream(1)
    x, y = torch.randn(n, 1, 8, 8, generator=rng), torch.randint(0, classes, (n,), generator=rng)
    assert max(moves(twins(classes), x, y, i) for i in (0, 5, n - 1)) <= 1.0


def test_a_last_layer_of_odd_width_takes_batches_and_lets_no_record_move_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with isolated(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(243, 10))
    rng = stream(1)
    x, y = torch.randn(70, 243, generator=rng), torch.randint(0, 10, (70,), generator=rng)
    gradients, among = ClippedGradients(model), list[Any]()
    with monkeypatch.context() as patch:
        batches = rowwise.batches
        patch.setattr(rowwise, "batches", lambda n, sizes: (among.append(sizes), batches(n, sizes))[1])
        found, norms = gradients.clipped_sum(x, y, 0.1, loss)
    alone = [ClippedGradients(model).clipped_sum(x[i : i + 1], y[i : i + 1], 0.1, loss)[1] for i in range(70)]
    assert torch.equal(norms, torch.cat(alone))  # to the bit
    assert among and (1,) not in among, "records are computed one at a time, which takes twice as long"
    slow, _ = ClippedGradients(model, fast=False).clipped_sum(x, y, 0.1, loss)
    torch.testing.assert_close(found, slow, rtol=1e-5, atol=1e-6)  # float32
    assert max(moves(model, x, y, i) for i in (0, 33, 69)) <= 1.0


def test_sizes_are_asked_again_where_facts_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with isolated(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    gradients, y = ClippedGradients(model), torch.zeros(2, dtype=torch.int64)
    asked = []
    monkeypatch.setattr(rowwise, "sizes", lambda *_: asked.append(1) or (8,))
    for x in (torch.zeros(2, 8), torch.ones(2, 8), torch.zeros(2, 2, 4), torch.zeros(2, 8)):
        gradients.clipped_sum(x, y, 1.0, loss)
    model.eval()
    gradients.clipped_sum(torch.zeros(2, 8), y, 1.0, loss)
    assert len(asked) == 4


@pytest.mark.parametrize("factor", [0.5, 100.0])
def test_a_model_that_mixes_records_late_lets_no_record_move_others(factor: float) -> None:
    with isolated(0):
        model = Gate(factor)
    x, y = torch.randn(50, 8, generator=stream(1)), torch.zeros(50, dtype=torch.int64)
    assert max(moves(model, x, y, i) for i in range(0, 50, 7)) <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fast", [True, False])
def test_records_that_are_not_finite_count_as_nothing(bad: float, fast: bool) -> None:
    model = build(lambda: models.build("kadp-mnist", (1, 8, 8), 3))
    x, y = batch((1, 8, 8))
    gradients = ClippedGradients(model, fast=fast)
    expected, _ = gradients.clipped_sum(x[1:], y[1:], 1.0, loss)
    x[0, 0, 3, 3] = bad
    found, norms = gradients.clipped_sum(x, y, 1.0, loss)
    agree(found, expected)
    assert not torch.isfinite(norms[0]) and torch.isfinite(norms[1:]).all()


def test_long_gradients_reach_the_clip_and_short_ones_stay() -> None:
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    for i, length in ((0, 1.0), (1, 0.5)):
        found, norms = ClippedGradients(model).clipped_sum(x[i : i + 1], torch.zeros(1), 1.0, linear)
        assert float(found[0].norm()) == pytest.approx(length, rel=1e-6)
        assert float(norms) == pytest.approx(float(x[i].norm()))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [("convnet:width=4,depth=2", (1, 8, 8)), ("linear", (1, 8, 8)), ("mlp:hidden=16", (12,)), ("lenet5", (3, 16, 16))],
)
def test_a_record_adds_its_own_clipped_gradient_and_moves_no_other(
    spec: str, shape: tuple[int, ...], fast: bool
) -> None:
    """In a batch of thousands, of an odd size: the sum with a record less the sum without is what it adds alone."""
    model = build(lambda: models.build(spec, shape, 3))
    n = 2003 if fast else 203
    x, y = batch(shape, n)
    gradients, clip = ClippedGradients(model, fast=fast), 0.7
    whole, _ = gradients.clipped_sum(x, y, clip, loss)
    for i in (0, 1, n // 2, n - 1):
        keep = torch.arange(n) != i
        without, _ = gradients.clipped_sum(x[keep], y[keep], clip, loss)
        own, _ = gradients.clipped_sum(x[i : i + 1], y[i : i + 1], clip, loss)
        moved = torch.cat([(a - b).flatten() for a, b in zip(whole, without, strict=True)])
        alone = torch.cat([part.flatten() for part in own])
        assert float(alone.norm()) <= clip
        assert float((moved - alone).abs().max()) <= 1e-12 * n
        assert float(moved.norm()) <= clip * (1 + 1e-11)

"""The kernel against hand computation and against wide random networks; images that regression learns more from."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedstill.base.records import Examples, Records
from fedstill.base.seeds import stream
from fedstill.data.sources import DataSet
from fedstill.distill import kip
from fedstill.distill.kip import KIP, inducing_points, ntk, predict

W, B = math.sqrt(2), 0.1
SMALL = KIP(steps=20, batch_size=20)


def changed(**values: object) -> KIP:
    return KIP(**{**SMALL.model_dump(), **values})


def rows(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=stream(seed, "rows", n), dtype=torch.float64)


def two_classes(digits: DataSet) -> Records:
    return digits.train[(digits.train.labels == 3) | (digits.train.labels == 7)]


def test_one_hidden_layer_by_hand() -> None:
    # x.x / d = 1, y.y / d = 1, x.y / d = 1/2; W^2 = 2, b^2 = 0: K = 2 and 1, the angle is 60 degrees.
    x, y = torch.tensor([[math.sqrt(2), 0.0]]), torch.tensor([[math.sqrt(0.5), math.sqrt(1.5)]])
    k1 = 2 * (math.sin(math.pi / 3) + (2 * math.pi / 3) * 0.5) / math.pi  # W^2 |.| J_1 / 2 pi, |.| = 2
    k0 = (2 * math.pi / 3) / (2 * math.pi)
    assert float(ntk(x, y, 0, W, 0.0)) == pytest.approx(1, rel=1e-6)
    assert float(ntk(x, y, 1, W, 0.0)) == pytest.approx(k1 + 2 * 1 * k0, rel=1e-6)
    # at x = y the angle is 0: K -> W^2 K / 2 + b^2, T -> K + W^2 T / 2, from K = T = 2.01
    assert float(ntk(x, x, 1, W, B)) == pytest.approx((2.01 + 0.01) + 2.01, rel=1e-6)
    assert float(ntk(x, x, 2, W, B)) == pytest.approx((2.02 + 0.01) + (2.02 + 2.01), rel=1e-6)
    # opposite inputs without bias: the angle is 180 degrees and ReLU passes one or the other, never both
    assert float(ntk(x, -x, 1, W, 0.0)) == pytest.approx(0, abs=1e-12)


def empirical(x: Tensor, depth: int, width: int, bias_std: float, rng: torch.Generator) -> Tensor:
    """Inner products of the parameter gradients of one wide network; float32, by its layers' outer products."""
    a, inputs, gates = x.float(), [], []
    weights = []
    for layer in range(depth + 1):
        inputs.append(a)
        out = 1 if layer == depth else width
        weights.append(torch.randn(out, a.shape[1], generator=rng) * (W / a.shape[1] ** 0.5))
        h = a @ weights[-1].T + bias_std * torch.randn(out, generator=rng)
        gates.append((h > 0).float())
        a = h.relu()
    delta, total = torch.ones(len(x), 1), torch.zeros(len(x), len(x))
    for layer in range(depth, -1, -1):  # d output / d (W, b) of the layer: W_std / sqrt(fan) delta a^T, b_std delta
        a = inputs[layer]
        total += (W**2 / a.shape[1] * a @ a.T + bias_std**2) * (delta @ delta.T)
        if layer:
            delta = (delta @ weights[layer]) * gates[layer - 1]
    return total


def test_outer_products_are_the_gradients_of_autograd() -> None:
    """What `empirical` computes is the definition of the kernel: checked with every parameter's gradient."""
    x = rows(3, 5).float()
    found = empirical(x, 1, 7, B, stream(3))
    rng = stream(3)
    w0, b0, w1, b1 = (torch.randn(*s, generator=rng).requires_grad_() for s in ((7, 5), (7,), (1, 7), (1,)))
    out = (x @ w0.T * (W / 5**0.5) + B * b0).relu() @ w1.T * (W / 7**0.5) + B * b1
    gradients = [torch.autograd.grad(o, (w0, b0, w1, b1), retain_graph=True) for o in out[:, 0]]
    flat = torch.stack([torch.cat([g.flatten() for g in one]) for one in gradients])
    torch.testing.assert_close(found, flat @ flat.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias_std", [B, 1.0])
def test_the_kernel_is_that_of_wide_networks(bias_std: float) -> None:
    x, draws, width = rows(3, 6), 24, 1024
    rng = stream(1)
    samples = torch.stack([empirical(x, 4, width, bias_std, rng) for _ in range(draws)]).double()
    mean, error = samples.mean(0), samples.std(0) / draws**0.5

    def off(kernel: Tensor) -> float:
        """In standard errors of the mean; 2 % for what a width of 1,024 lacks to infinity."""
        return float(((mean - kernel).abs() / (error + 0.02 * mean.abs())).max())

    assert off(ntk(x, x, 4, W, bias_std)) < 4
    # what must not pass: one layer less, half a bias more, the kernel of the outputs instead of the gradients
    assert off(ntk(x, x, 3, W, bias_std)) > 4
    if bias_std == 1.0:
        assert off(ntk(x, x, 4, W, 1.5)) > 4
    assert off(ntk(x, x, 4, W, bias_std) / 5) > 4


def test_the_kernel_is_symmetric_positive_and_has_the_derivative_of_finite_differences() -> None:
    x, y = rows(5, 4).requires_grad_(), rows(3, 4)
    within = ntk(x, x, 4, W, B)
    torch.testing.assert_close(within, within.T)
    assert float(torch.linalg.eigvalsh(within.detach()).min()) > 0
    assert torch.autograd.gradcheck(lambda v: ntk(v, y, 4, W, B), x)
    assert torch.autograd.gradcheck(lambda v: ntk(v, v, 4, W, B).diagonal(), x)
    same = torch.autograd.grad(ntk(x, x.detach(), 4, W, B).sum(), x)[0]
    assert bool(same.isfinite().all())


def test_regression_reproduces_what_it_knows_and_follows_the_formula() -> None:
    x, values, y = rows(4, 6), rows(4, 3, seed=1), rows(5, 6, seed=2)
    # A ridge of a millionth of the diagonal leaves an error of that order over the smallest eigenvalue.
    torch.testing.assert_close(predict(x, values, x, SMALL), values, rtol=0, atol=1e-3)
    k = ntk(x, x, 4, W, B)
    expected = ntk(y, x, 4, W, B) @ torch.linalg.inv(k + 1e-6 * k.trace() / 4 * torch.eye(4).double()) @ values
    torch.testing.assert_close(predict(x, values, y, SMALL), expected, rtol=1e-6, atol=1e-8)


def error(records: Records, made: Examples) -> float:
    codes = torch.nn.functional.one_hot(torch.arange(10)).double() - 0.1
    found = predict(made.inputs().flatten(1), codes[made.labels], records.inputs().flatten(1), SMALL)
    return float(0.5 * (found - codes[records.labels]).square().mean())


def test_fitting_lowers_the_error_on_the_clients_records(digits: DataSet) -> None:
    records = two_classes(digits)
    start, end = (inducing_points(records, 4, changed(steps=n, lr=lr), stream(0)) for n, lr in ((1, 1e-12), (25, 0.05)))
    assert error(records, end) < 0.7 * error(records, start)
    kept = {bytes(i.flatten().tolist()) for i in records.images}
    assert all(bytes(i.flatten().tolist()) in kept for i in start.rounded(10, records.normalisation).images)


def test_a_step_is_adam_on_half_the_mean_squared_error(digits: DataSet) -> None:
    records = digits.train[torch.cat([torch.nonzero(digits.train.labels == c).flatten()[:5] for c in (3, 7)])]
    settings = changed(steps=1, batch_size=10, lr=0.1, clamp=False, stop="never")  # the batch is all records
    start, end = (
        inducing_points(records, 2, changed(**{**settings.model_dump(), "lr": lr}), stream(0)) for lr in (1e-12, 0.1)
    )
    support = start.inputs().double().requires_grad_()
    codes = torch.nn.functional.one_hot(torch.arange(10)).double() - 0.1
    found = predict(support.flatten(1), codes[start.labels], records.inputs().flatten(1), settings)
    (gradient,) = torch.autograd.grad(0.5 * (found - codes[records.labels]).square().mean(), support)
    moved = end.inputs() - start.inputs()
    clear = gradient.abs() > 1e-5  # Adam's first step is lr g / (|g| + 1e-8)
    assert bool(clear.any())
    torch.testing.assert_close(moved[clear], -0.1 * gradient.sign()[clear].float(), rtol=1e-2, atol=0)


def test_same_seed_same_images_within_the_limits_of_pixels(digits: DataSet) -> None:
    records = two_classes(digits)
    first, again, other = (inducing_points(records, 4, changed(lr=1.0), stream(s)) for s in (0, 0, 1))
    assert torch.equal(first.inputs(), again.inputs()) and not torch.equal(first.inputs(), other.inputs())
    assert first.inputs().shape == (4, 1, 8, 8) and first.inputs().dtype == torch.float32
    assert first.labels.tolist() == [3, 3, 7, 7]
    black, white = records.normalisation.limits(torch.device("cpu"))
    assert bool((first.inputs() >= black).all()) and bool((first.inputs() <= white).all())
    free = inducing_points(records, 4, changed(lr=1.0, clamp=False), stream(0))
    assert bool((free.inputs() < black).any())


def test_the_clients_own_statistics_are_used_only_when_asked_for(digits: DataSet) -> None:
    records = two_classes(digits)
    still = {"steps": 1, "lr": 1e-12}
    ours, theirs = (
        inducing_points(records, 4, changed(**still, standardise=s), stream(0)).inputs() for s in ("global", "client")
    )
    x = records.inputs()
    torch.testing.assert_close(theirs, (ours - x.mean()) / x.std(correction=0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_batches_hold_as_many_of_each_class_and_repeat_only_when_they_must() -> None:
    few, many = torch.tensor([4, 5, 6]), torch.arange(100, 200)
    batch = kip.balanced_batch([few, many], 21, stream(0)).tolist()
    assert len(batch) == 20 and set(batch[:10]) == {4, 5, 6}
    assert len(set(batch[10:])) == 10 and min(batch[10:]) >= 100
    assert len(kip.balanced_batch([few, many], 1, stream(0))) == 2


def steps_of(records: Records, settings: KIP) -> int:
    batches: list[Tensor] = []
    balanced = kip.balanced_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kip, "balanced_batch", lambda *args: batches.append(balanced(*args)) or batches[-1])
        inducing_points(records, 2, settings, stream(0))
    return len(batches)


def test_when_fitting_ends(digits: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kip, "_EVERY", 4)
    records, one = two_classes(digits)[:40], digits.train.of_class(3)
    # With a rate of nothing the loss stands still from the first judgement: it takes five more of them.
    assert steps_of(records, changed(steps=40, lr=1e-12, batch_size=2)) == 24
    assert steps_of(records, changed(steps=40, lr=0.02)) == 40  # it still falls
    assert steps_of(records, changed(steps=30, lr=1e-12, stop="never")) == 30
    assert steps_of(records, changed(steps=30, batch_size=2, stop="batch_accuracy")) < 30
    assert steps_of(one, changed(steps=30, stop="batch_accuracy")) == 1  # one class alone is always right
    assert steps_of(one, changed(steps=10)) == 10


def test_small_classes_fill_up_with_noise_and_nonsense_is_refused(digits: DataSet) -> None:
    few = digits.train.of_class(5)[:2]
    made = inducing_points(few, 3, changed(steps=1, lr=1e-12), stream(0))
    assert len(made.labels) == 3 and len({tuple(v.flatten().tolist()) for v in made.inputs()}) == 3
    with pytest.raises(ValueError, match="3 examples of 0 classes"):
        inducing_points(few[:0], 3, SMALL, stream(0))
    for wrong in ({"steps": 0}, {"ridge": 0.0}, {"stop": "soon"}, {"depth": -1}, {"x": 1}):
        with pytest.raises(ValidationError):
            changed(**wrong)


def test_published_constants() -> None:
    paper = KIP.published()
    assert (paper.steps, paper.lr, paper.batch_size, paper.ridge, paper.depth) == (3000, 0.004, 10, 1e-6, 4)
    assert (paper.stop, paper.standardise, paper.clamp) == ("batch_accuracy", "client", False)
    assert (paper.weight_std**2, paper.bias_std) == (pytest.approx(2), 0.1)

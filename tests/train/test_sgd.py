"""Local training against a plain loop, bit for bit; its corrections, limits and random streams; evaluation."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_training import flat, new_model, shuffled, small_records, stream
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.errors import Diverged
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated
from fedstill.evaluation import accuracies, confusion, evaluate, predictions
from fedstill.train import sgd
from fedstill.train.sgd import SGD, Adam, ball_constraint, control_variates, proximal


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("spec", ["dense-mnist", "lenet:padding=2"])
def test_fit_is_the_plain_loop_to_the_bit(spec: str, momentum: float, weight_decay: float) -> None:
    records, ours, plain = small_records(50), new_model(spec), new_model(spec)
    sgd = SGD(lr=0.05, momentum=momentum, weight_decay=weight_decay, batch_size=16, epochs=3)
    steps = sgd.fit(ours, records, stream())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    for x, y in shuffled(records, stream(), 16, 3):
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert torch.equal(flat(ours), flat(plain))
    assert steps == 12  # 16 + 16 + 16 + 2 records, three times


def test_frozen_norms_keep_the_statistics_of_the_first_epoch_to_the_bit() -> None:
    records, ours, plain = small_records(50), new_model(), new_model()
    SGD(lr=0.1, batch_size=16, epochs=3).fit(ours, records, stream(), norms="frozen-after-first")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(shuffled(records, stream(), 16, epochs=3)):
        plain.train(step < 4)  # four batches an epoch; the whole network, as in the code of DENSE's authors
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert torch.equal(flat(ours), flat(plain))
    batch = new_model()
    SGD(lr=0.1, batch_size=16, epochs=3).fit(batch, records, stream())
    assert not torch.equal(flat(ours), flat(batch))
    assert all(module.training for module in ours.modules())


def test_large_sets_are_converted_by_batch_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, converted = new_model(), new_model()
    SGD().fit(kept, small_records(), stream())
    monkeypatch.setattr(sgd, "_CACHED_BYTES", 0)
    SGD().fit(converted, small_records(), stream())
    assert torch.equal(flat(kept), flat(converted))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.drop(x.flatten(1)))
        return result


def test_everything_random_comes_from_the_stream() -> None:
    def trained(seed: int, global_seed: int) -> Tensor:
        with isolated(0):
            model = Dropping()
        with isolated(global_seed):
            before = torch.get_rng_state()
            SGD(batch_size=8).fit(model, small_records(), stream(seed))
            assert torch.equal(torch.get_rng_state(), before)
        return flat(model)

    assert torch.equal(trained(1, 1), trained(1, 2))
    assert not torch.equal(trained(1, 1), trained(2, 1))


def test_dropout_is_drawn_anew_in_every_fit() -> None:
    records, rng = small_records(8), stream()
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        seen.append(output == 0)

    model = Dropping()
    model.drop.register_forward_hook(keep)
    for _ in range(2):
        SGD().fit(model, records, rng)
    assert not torch.equal(seen[0], seen[1])


def test_modes_come_back_and_no_gradients_stay() -> None:
    model = new_model()
    model.eval()
    model.norm1.train()
    before = [m.training for m in model.modules()]
    running = model.norm2.running_mean.clone()
    SGD().fit(model, small_records(), stream())
    assert not torch.equal(model.norm2.running_mean, running)  # it was trained in train mode
    predictions(model, small_records())
    assert [m.training for m in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_stay_and_unused_ones_are_no_obstacle() -> None:
    model = new_model()
    model.conv1.weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    frozen, moving = model.conv1.weight.clone(), model.fc.weight.clone()
    SGD().fit(model, small_records(), stream())
    assert torch.equal(model.conv1.weight, frozen)
    assert not torch.equal(model.fc.weight, moving)
    with pytest.raises(ValueError, match="no trainable parameters"):
        SGD().fit(model.requires_grad_(False), small_records(), stream())


def test_max_steps_stops_within_an_epoch() -> None:
    short, longer = new_model(), new_model()
    assert SGD(batch_size=16, epochs=2, max_steps=6).fit(short, small_records(), stream()) == 6
    assert SGD(batch_size=16, epochs=2, max_steps=99).fit(longer, small_records(), stream()) == 8
    assert not torch.equal(flat(short), flat(longer))


@pytest.mark.parametrize(("batch_size", "steps"), [(64, 10), (32, 10), (24, 12), (5, 10), (2, 25)])
def test_without_a_number_of_passes_few_records_make_ten_steps(batch_size: int, steps: int) -> None:
    """Epochs are whole, so steps may be more than ten; a number that is given is kept, however few steps it makes."""
    free, given = new_model(), new_model()
    settings: dict[str, Any] = {"batch_size": batch_size, "lr": 1e-3}
    local = SGD(epochs=None, **settings)
    assert local.fit(free, small_records(), stream()) == steps
    SGD(epochs=local.passes(len(small_records())), **settings).fit(given, small_records(), stream())
    assert torch.equal(flat(free), flat(given))
    assert SGD(**settings).fit(given, small_records(), stream()) == -(-len(small_records()) // batch_size)
    assert SGD(epochs=None, max_steps=4, **settings).fit(free, small_records(), stream()) == 4
    assert SGD(epochs=None, **settings).fit(free, small_records()[:0], stream()) == 0


def test_no_records_mean_no_steps() -> None:
    model = new_model()
    before = flat(model)
    assert SGD(epochs=2).fit(model, small_records()[:0], stream()) == 0
    assert torch.equal(flat(model), before)


def test_a_milestone_lowers_the_rate_and_restarts_momentum() -> None:
    records, ours, plain = small_records(), new_model(), new_model()
    SGD(lr=0.1, batch_size=16, epochs=3, milestones=(2,), decay=0.5).fit(ours, records, stream())
    batches = shuffled(records, stream(), 16, 3)
    for lr, steps in ((0.1, 8), (0.05, 4)):
        optimizer = torch.optim.SGD(plain.parameters(), lr=lr, momentum=0.9)
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            cross_entropy(plain(x), y).backward()
            optimizer.step()
    assert torch.equal(flat(ours), flat(plain))


def test_augmentation_sees_every_batch_and_the_stream() -> None:
    rng, sizes = stream(), []

    def noise(x: Tensor, draws: torch.Generator) -> Tensor:
        assert draws is rng
        sizes.append(len(x))
        return x + torch.randn(x.shape, generator=draws)

    model, plain = new_model(), new_model()
    SGD(batch_size=16).fit(model, small_records(), rng, augment=noise)
    SGD(batch_size=16).fit(plain, small_records(), stream())
    assert sizes == [16, 16, 16, 2]
    assert not torch.equal(flat(model), flat(plain))


def test_another_loss_and_soft_labels() -> None:
    class Soft:
        def __init__(self, records: Records, labels: Tensor) -> None:
            self.records, self.labels = records, labels

        def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
            return self.records.inputs(index)

    records, hard, soft, doubled = small_records(), new_model(), new_model(), new_model()
    SGD().fit(hard, records, stream())
    SGD().fit(soft, Soft(records, nn.functional.one_hot(records.labels, 3).float()), stream())
    # The same gradient from another formula: float32 rounding.
    torch.testing.assert_close(flat(soft), flat(hard), rtol=1e-4, atol=1e-6)
    SGD(lr=0.005).fit(doubled, records, stream(), loss=lambda z, x, y: 2 * cross_entropy(z, y))
    torch.testing.assert_close(flat(doubled), flat(hard), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [SGD(batch_size=16), Adam(batch_size=16)], ids=lambda kind: type(kind).__name__)
def test_a_loss_sees_the_inputs_that_the_model_got(training: SGD | Adam) -> None:
    """Of the augmented batch, where there is augmentation."""
    model, got, seen = new_model(), list[Tensor](), list[Tensor]()
    model.register_forward_pre_hook(lambda _, args: got.append(args[0]))

    def loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        return cross_entropy(output, y)

    flip: dict[str, Any] = {"augment": lambda x, _: x.flip(3)} if isinstance(training, SGD) else {}
    training.fit(model, small_records(), stream(), loss=loss, **flip)
    assert len(seen) == 4 and all(x is y for x, y in zip(got, seen, strict=True))
    if flip:
        plain = [x.flip(3) for x, _ in shuffled(small_records(), stream(), 16, 1)]
        assert all(torch.equal(x, y) for x, y in zip(seen, plain, strict=True))


def test_epochs_are_reported() -> None:
    calls: list[tuple[int, int]] = []
    SGD(epochs=3).fit(new_model(), small_records(), stream(), on_epoch=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_proximal_is_the_gradient_of_the_loss_term() -> None:
    records, mu = small_records(), 0.7
    ours, plain, free = new_model(), new_model(), new_model()
    sgd = SGD(lr=0.05, batch_size=16, epochs=2)
    sgd.fit(ours, records, stream(), correct=proximal(ours, mu))
    x0 = [p.detach().clone() for p in plain.parameters()]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x, y in shuffled(records, stream(), 16, 2):
        optimizer.zero_grad()
        distance = sum((p - p0).square().sum() for p, p0 in zip(plain.parameters(), x0, strict=True))
        (cross_entropy(plain(x), y) + mu / 2 * distance).backward()
        optimizer.step()
    # Equal but for the rounding of one addition per step.
    torch.testing.assert_close(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    sgd.fit(free, records, stream())
    assert (flat(ours) - flat(free)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="mu=-1"):
        proximal(ours, -1.0)


def test_proximal_with_mu_0_changes_nothing() -> None:
    ours, plain = new_model(), new_model()
    SGD(epochs=2).fit(ours, small_records(), stream(), correct=proximal(ours, 0.0))
    SGD(epochs=2).fit(plain, small_records(), stream())
    assert torch.equal(flat(ours), flat(plain))


def test_within_is_the_nearest_point_of_a_ball_after_every_step() -> None:
    def vector(model: nn.Module) -> Tensor:
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()

    records, radius = small_records(), 0.05
    ours, plain = new_model(), new_model()
    sgd = SGD(lr=0.05, momentum=0.0, batch_size=16, epochs=2)
    x0 = vector(plain)
    sgd.fit(ours, records, stream(), bound=ball_constraint(ours, radius))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    outside = 0
    for x, y in shuffled(records, stream(), 16, 2):
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
        moved = vector(plain) - x0
        if moved.norm() > radius:
            outside += 1
            torch.nn.utils.vector_to_parameters((x0 + moved * radius / moved.norm()).float(), plain.parameters())
    assert outside > 1
    torch.testing.assert_close(
        vector(ours), vector(plain), rtol=1e-4, atol=1e-5
    )  # the distance, summed in another order
    assert abs(float((vector(ours) - x0).norm()) - radius) < 1e-4
    free, wide = new_model(), new_model()
    sgd.fit(free, records, stream())
    sgd.fit(wide, records, stream(), bound=ball_constraint(wide, 1e6))
    torch.testing.assert_close(vector(wide), vector(free), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="radius of a ball is 0"):
        ball_constraint(ours, 0.0)


def test_control_variates_shift_each_step() -> None:
    records, model = small_records(16), new_model("lenet:padding=2")
    start = [p.detach().clone() for p in model.parameters()]
    gradients = torch.autograd.grad(cross_entropy(model(records.inputs()), records.labels), list(model.parameters()))
    c = [torch.full_like(p, 0.25) for p in start]
    c_i = [torch.full_like(p, -0.5) for p in start]
    sgd = SGD(lr=0.1, momentum=0.0)
    assert sgd.fit(model, records, stream(), correct=control_variates(c, c_i)) == 1
    for y1, y0, g in zip(model.parameters(), start, gradients, strict=True):
        # y1 = y0 - lr (g - c_i + c); the batch is shuffled, so its mean gradient rounds differently.
        torch.testing.assert_close(y1.detach(), y0 - 0.1 * (g + 0.5 + 0.25), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="differ in shape"):
        control_variates(c, c_i[1:])


def test_weights_that_are_not_finite_are_never_returned() -> None:
    with pytest.raises(Diverged, match="lr=1e.30.*smaller learning rate"):
        SGD(lr=1e30, batch_size=8).fit(new_model("lenet:padding=2"), small_records(), stream())
    broken = new_model()
    broken.norm1.running_mean[0] = torch.nan
    with pytest.raises(Diverged):
        SGD().fit(broken, small_records(), stream())


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"weight_decay": -1e-4},
        {"batch_size": 0},
        {"epochs": 0},
        {"max_steps": 0},
        {"milestones": (0,)},
        {"decay": 0.0},
        {"learning_rate": 0.1},
    ],
    ids=str,
)
def test_hyperparameters_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SGD.model_validate(bad)


def test_hyperparameters_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SGD().lr = 0.1  # type: ignore[misc]


class Brightest(nn.Module):
    """Takes the class whose pixel is brightest; records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.sizes.append(len(x))
        return x.flatten(1)


def pixels(*rows: list[int], labels: list[int]) -> Records:
    images = torch.tensor(rows, dtype=torch.uint8).reshape(-1, 1, 1, 3)
    return Records(images, torch.tensor(labels, dtype=torch.int64), 3, Normalisation((0.5,), (0.5,)))


def test_evaluation_of_known_predictions() -> None:
    records = pixels([9, 0, 0], [0, 9, 0], [0, 0, 9], [5, 5, 0], [1, 2, 1], labels=[0, 0, 2, 0, 2])
    model = Brightest()
    assert predictions(model, records).tolist() == [0, 1, 2, 0, 1]
    assert evaluate(model, records) == 3 / 5
    assert confusion(model, records).tolist() == [[2, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert evaluate(model, records, batch_size=2) == 3 / 5
    assert model.sizes[-3:] == [2, 2, 1]
    assert model.training


def test_several_networks_are_judged_at_once() -> None:
    records = pixels([9, 0, 0], [0, 9, 0], [0, 0, 9], [5, 5, 0], [1, 2, 1], labels=[0, 0, 2, 0, 2])

    class Both(nn.Module):
        """The brightest pixel's class, and the darkest's."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.flatten(1), -x.flatten(1)], 1)

    assert accuracies(Both(), records, batch_size=2) == [3 / 5, 1 / 5]
    with pytest.raises(ValueError, match="0 records"):
        accuracies(Both(), pixels(labels=[]))


def test_evaluation_of_no_records() -> None:
    none = pixels(labels=[])
    assert predictions(Brightest(), none).tolist() == []
    assert confusion(Brightest(), none).sum() == 0
    with pytest.raises(ValueError, match="0 records"):
        evaluate(Brightest(), none)

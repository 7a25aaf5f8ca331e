"""Adam against a plain loop, bit for bit; its random streams and limits."""

import pytest
import torch
from pydantic import ValidationError
from small_training import flat, new_model, shuffled, small_records, stream
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.errors import Diverged
from fedstill.base.seeds import isolated
from fedstill.train.sgd import Adam


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("spec", ["dense-mnist", "convnet:width=4,depth=2,norm=batch"])
def test_fit_is_the_plain_loop_to_the_bit(spec: str, weight_decay: float) -> None:
    records, ours, plain = small_records(50), new_model(spec), new_model(spec)
    Adam(lr=0.01, weight_decay=weight_decay, batch_size=16, epochs=3).fit(ours, records, stream())
    optimizer, steps = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=weight_decay), 0
    for x, y in shuffled(records, stream(), 16, 3):
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
        steps += 1
    assert steps == 12  # 16 + 16 + 16 + 2 records, three times
    assert torch.equal(flat(ours), flat(plain))
    assert not torch.equal(flat(ours), flat(new_model(spec)))


def test_everything_random_comes_from_the_stream() -> None:
    def trained(seed: int, global_seed: int) -> Tensor:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), new_linear())
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        Adam(batch_size=16).fit(model, small_records(), stream(seed))
        assert torch.equal(torch.get_rng_state(), before)
        return flat(model)

    def new_linear() -> nn.Module:
        with isolated(0):
            return nn.Linear(64, 3)

    assert torch.equal(trained(1, 1), trained(1, 2))
    assert not torch.equal(trained(1, 1), trained(2, 1))


def test_modes_come_back_and_no_gradients_stay() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 3)).eval()
    model[1].train()
    Adam().fit(model, small_records(), stream())
    assert [m.training for m in model.modules()] == [False, False, True, False]
    assert all(p.grad is None for p in model.parameters())


def test_gradients_from_before_do_not_count() -> None:
    ours, plain = (new_model("convnet:width=4,depth=2") for _ in range(2))
    cross_entropy(ours(small_records(8).inputs()), small_records(8).labels).backward()
    for model in (ours, plain):
        Adam(batch_size=16).fit(model, small_records(), stream())
    assert torch.equal(flat(ours), flat(plain))


def test_frozen_parameters_stay_and_unused_ones_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    before = [p.clone() for p in model.parameters()]
    Adam(weight_decay=0.1).fit(model, small_records(), stream())
    kept = {name: torch.equal(p, b) for (name, p), b in zip(model.named_parameters(), before, strict=True)}
    assert kept == {"unused": True, "1.weight": True, "1.bias": True, "2.weight": False, "2.bias": False}


def test_no_records_mean_no_steps() -> None:
    model = new_model()
    Adam(epochs=2).fit(model, small_records()[:0], stream())
    assert torch.equal(flat(model), flat(new_model()))


def test_another_loss_and_soft_labels() -> None:
    records, seen = small_records(20), []

    class Soft:
        labels = torch.full((20, 3), 1 / 3)
        inputs = records.inputs

    def loss(logits: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.shape)
        return cross_entropy(logits, targets)

    Adam(batch_size=16).fit(new_model(), Soft(), stream(), loss=loss)  # type: ignore[arg-type]
    assert seen == [(16, 3), (4, 3)]


def test_epochs_are_reported() -> None:
    seen: list[tuple[int, int]] = []
    Adam(epochs=3).fit(new_model(), small_records(), stream(), on_epoch=lambda *pair: seen.append(pair))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_weights_that_are_not_finite_are_never_returned() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(Diverged, match=r"lr=1e\+37 left weights that are not finite after 40 .* for example 0\.1"):
        Adam(lr=1e37, epochs=20).fit(model, small_records(), stream())
    broken = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    broken.register_buffer("moment", torch.tensor(float("nan")))
    with pytest.raises(Diverged):
        Adam().fit(broken, small_records(), stream())


def test_a_model_with_nothing_to_train_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="Sequential has no trainable parameters; set requires_grad on some"):
        Adam().fit(nn.Sequential(nn.Flatten()), small_records(), stream())


@pytest.mark.parametrize("bad", [{"lr": 0}, {"epochs": 0}, {"batch_size": 0}, {"weight_decay": -1}, {"momentum": 0.9}])
def test_hyperparameters_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Adam(**bad)  # type: ignore[arg-type]

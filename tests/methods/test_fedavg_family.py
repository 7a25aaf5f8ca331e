"""The averaging methods agree where the theory says they must, and differ where it says so."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import STEEPEST, descended, holding, kept, last_state, loss_on, near, of_sizes, run
from torch import Tensor, nn

from fedstill import methods
from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.methods.averaging import gradient_weight, mean_weights, weighted_mean
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fednova import FedNova
from fedstill.methods.fedprox import FedProx
from fedstill.methods.fedrep import FedRep
from fedstill.methods.ldp_fedavg import LDPFedAvg
from fedstill.methods.scaffold import Scaffold
from fedstill.protocol import Method, load, parameters, state
from fedstill.train.sgd import SGD

LOCAL = SGD(lr=0.05, momentum=0.9, batch_size=32)


@pytest.fixture(scope="module")
def train(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a method on the first 1,200 digits, so that 4 clients hold equally many."""

    class Task:
        train = digits.train[:1200]
        test = digits.test

    def result(method: Method) -> dict[str, torch.Tensor]:
        model, _ = run(method, Task, tmp_path_factory.mktemp("run"))
        return state(model)

    return result


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=0, atol=atol) for name in left)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), FedNova(), Scaffold(), LDPFedAvg()])
def test_the_server_may_compute_on_another_device_than_replies_come_to(method: Method) -> None:
    """The device "meta" holds no values, and refuses to compute with tensors of another, as a GPU does."""

    def ask(*_: Any, **__: Any) -> list[Any]:
        sent = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
        reply = {"weights": sent, "change": sent, "update": SimpleNamespace(value=sent), "num_records": 3, "work": 2.0}
        return [SimpleNamespace(**reply)] * 2

    round = SimpleNamespace(number=1, log=lambda **_: None)
    fed: Any = SimpleNamespace(ask=ask, clients=[0, 1], evaluate=lambda _: 0.5)
    fed.like = SimpleNamespace(shape=(3,), labels=torch.zeros(0))
    fed.new_model, fed.rounds = (lambda: nn.Linear(3, 2, device="meta")), (lambda *_: [round, round])
    model = method.server(fed)
    assert {value.device.type for value in model.parameters()} == {"meta"}


def test_fedprox_with_mu_0_is_fedavg(train: Any) -> None:
    left = train(FedProx(rounds=2, local=LOCAL, mu=0))
    right = train(FedAvg(rounds=2, local=LOCAL))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not close(train(FedProx(rounds=2, local=LOCAL, mu=1)), right, 1e-3)


def test_fedprox_with_a_large_mu_stays_where_it_is(train: Any) -> None:
    plain = SGD(lr=0.01, momentum=0, batch_size=32)
    start = train(FedAvg(rounds=1, local=plain.model_copy(update={"lr": 1e-12})))
    held = train(FedProx(rounds=1, local=plain, mu=90))  # lr * mu = 0.9: stable, and 100 times less drift than mu = 0
    free = train(FedProx(rounds=1, local=plain, mu=0))
    moved = sum(float((held[n] - start[n]).square().sum()) for n in start)
    assert moved < 0.05 * sum(float((free[n] - start[n]).square().sum()) for n in start)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(momentum: float, train: Any) -> None:
    local = LOCAL.model_copy(update={"momentum": momentum})
    # both sum in float64 and round once a round; the order of the sums differs: an ulp of weights below 4
    assert close(train(FedNova(rounds=2, local=local)), train(FedAvg(rounds=2, local=local)), 2e-6)


@pytest.mark.slow
def test_scaffolds_first_round_is_fedavg_and_its_second_is_not(train: Any) -> None:
    once = Scaffold(rounds=1, local=LOCAL), FedAvg(rounds=1, local=LOCAL)
    assert close(train(once[0]), train(once[1]), 1e-6)
    twice = Scaffold(rounds=2, local=LOCAL), FedAvg(rounds=2, local=LOCAL)
    assert not close(train(twice[0]), train(twice[1]), 1e-4)


def test_accumulated_is_what_sgd_does() -> None:
    for momentum in (0.0, 0.5, 0.9):
        for steps in (1, 2, 17):
            w = nn.Parameter(torch.zeros((), dtype=torch.float64))
            sgd = torch.optim.SGD([w], lr=0.1, momentum=momentum)
            for _ in range(steps):
                w.grad = torch.ones_like(w)
                sgd.step()
            assert gradient_weight(momentum, steps) == pytest.approx(-w.item() / 0.1, rel=1e-12)


def test_fednova_weighs_directions_not_distances(digits: Any, tmp_path: Path) -> None:
    """By the formula: x - (sum p_k a_k) sum p_k (x - y_k)/a_k with numbers from the replies themselves."""
    method = FedNova(rounds=1, local=LOCAL)
    fed = holding(of_sizes(120, 360), method, digits, tmp_path)
    x = {n: v.double() for n, v in state(fed.new_model()).items()}
    result = state(method.server(fed))
    replies = kept(fed, FedNova.update)
    p = [0.25, 0.75]
    assert [r.num_records for r in replies] == [120, 360]
    assert [r.work for r in replies] == [gradient_weight(0.9, 4), gradient_weight(0.9, 12)]
    tau = sum(q * r.work for q, r in zip(p, replies, strict=True))
    for name, start in x.items():
        direction = sum(q * (start - r.weights[name].double()) / r.work for q, r in zip(p, replies, strict=True))
        assert torch.allclose(result[name].double(), start - tau * direction, rtol=0, atol=1e-6)


def test_fewer_participants_are_drawn_anew_each_round(digits: Any, tmp_path: Path) -> None:
    _, fed = run(FedAvg(rounds=6, local=LOCAL, participation=0.5), digits, tmp_path, keep_replies=True)
    asked = [sorted(f.stem for f in place.glob("*.reply")) for place in sorted(tmp_path.glob("journal/0*"))]
    assert len(asked) == 6
    assert all(len(names) == 2 for names in asked)
    assert len({tuple(names) for names in asked}) > 1


def test_weighted_mean_by_hand() -> None:
    mean = weighted_mean([(1, {"a": torch.tensor([1.0, 2.0])}), (3, {"a": torch.tensor([5.0, 6.0])})])
    assert mean["a"].tolist() == [4.0, 5.0]


def test_mean_weights_by_hand() -> None:
    replies = [
        SimpleNamespace(num_records=1, weights={"a": torch.tensor([1.0, 2.0])}),
        SimpleNamespace(num_records=3, weights={"a": torch.tensor([5.0, 6.0])}),
    ]
    assert mean_weights(replies, "records")["a"].tolist() == [4.0, 5.0]
    assert mean_weights(replies, "uniform")["a"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (FedAvg(rounds=1, local=LOCAL), 0.1),
        (FedAvg(rounds=1, local=LOCAL, weighting="uniform"), 0.5),
        (FedProx(rounds=1, local=LOCAL), 0.1),
        (Scaffold(rounds=1, local=LOCAL), 0.5),
        (Scaffold(rounds=1, local=LOCAL, weighting="records"), 0.1),
        (FedRep(rounds=1, head=LOCAL, body=LOCAL), 0.5),
        (FedRep(rounds=1, head=LOCAL, body=LOCAL, weighting="records"), 0.1),
    ],
    ids=lambda value: f"{type(value).__name__}" if isinstance(value, Method) else str(value),
)
def test_a_client_with_a_tenth_of_the_records_weighs_that_or_as_much_as_the_other(
    method: Any, share: float, digits: Any, tmp_path: Path
) -> None:
    fed = holding(of_sizes(20, 180), method, digits, tmp_path)
    found = state(method.server(fed))
    small, large = (reply.weights for reply in kept(fed, method.update))
    for name in small:
        expected = share * small[name].double() + (1 - share) * large[name].double()
        assert torch.allclose(found[name].double(), expected, rtol=0, atol=1e-6)  # rounded once, to float32


def corrected(records: Records, drift: Mapping[str, Tensor]) -> Callable[[nn.Module], Tensor]:
    """A loss whose gradient is that of the cross-entropy, plus ``drift``."""

    def loss(model: nn.Module) -> Tensor:
        along = [(drift[name] * p).sum() for name, p in model.named_parameters()]
        return loss_on(records)(model) + torch.stack(along).sum()

    return loss


def test_scaffold_is_its_algorithm_when_half_of_the_clients_are_asked(digits: Any, tmp_path: Path) -> None:
    """Option II with K = 2 steps of plain gradient descent, so that nothing is drawn but who is asked."""
    method = Scaffold(rounds=4, local=STEEPEST.model_copy(update={"epochs": 2}), participation=0.5)
    parts = of_sizes(20, 40, 60, 80)
    fed = holding(parts, method, digits, tmp_path)
    found = method.server(fed)
    x = fed.new_model()
    zero = {name: torch.zeros_like(value) for name, value in parameters(x).items()}
    c, own = zero, [zero] * 4
    asked = [fed.journal.replies_to(round, "update")[0] for round in range(4)]
    assert {len(some) for some in asked} == {2} and len({tuple(some) for some in asked}) > 1
    for some in asked:
        sums, change = zero, zero
        for k in some:
            records = digits.train[torch.from_numpy(parts[k][0])]
            y = parameters(descended(x, corrected(records, {n: c[n] - own[k][n] for n in c}), steps=2))
            new = {n: own[k][n] - c[n] + (value - y[n]) / (2 * STEEPEST.lr) for n, value in parameters(x).items()}
            sums = {n: sums[n] + y[n] for n in c}
            change = {n: change[n] + new[n] - own[k][n] for n in c}
            own[k] = new
        load(x, {n: value / 2 for n, value in sums.items()})
        c = {n: c[n] + change[n] / 4 for n in c}  # of all four clients
    assert near(found, x)


def test_fedrep_fits_the_head_alone_then_the_body_alone_and_goes_on_from_both(digits: Any, tmp_path: Path) -> None:
    method = FedRep(rounds=2, head=STEEPEST.model_copy(update={"epochs": 3}), body=STEEPEST)
    fed = holding(of_sizes(100), method, digits, tmp_path)
    found, loss = method.server(fed), loss_on(digits.train[:100])
    expected, own = fed.new_model(), method.own(fed.new_model())
    for _ in range(2):  # the only client's body is the mean
        expected = descended(expected, loss, steps=3, only=lambda name: name in own)
        expected = descended(expected, loss, only=lambda name: name not in own)
    load(found, last_state(tmp_path / "clients", 0))
    assert near(found, expected)


@pytest.mark.parametrize("name", sorted(methods.TABLE))
def test_a_part_of_a_group_keeps_the_method_s_other_defaults(name: str) -> None:
    """In Python and in files ``local={"lr": 0.03}`` gave FENS one epoch in place of its 200, and SCAFFOLD momentum."""
    kind: Any = methods.find(name)
    whole = kind()
    for field in kind.model_fields:
        group = getattr(whole, field)
        if isinstance(group, Settings):
            for inner in type(group).model_fields:
                part = {inner: group.model_dump()[inner]}
                assert kind(**{field: part}) == whole, (field, inner)
    assert (
        "local" not in kind.model_fields
        or "lr" not in type(whole.local).model_fields
        or (kind(local={"lr": 0.0123}).local == whole.local.model_copy(update={"lr": 0.0123}))
    )

"""The averaging methods agree where the theory says they must, and differ where it says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import run
from torch import nn

from fedstill.methods.averaging import accumulated, weighted_mean
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fednova import FedNova
from fedstill.methods.fedprox import FedProx
from fedstill.methods.scaffold import Scaffold
from fedstill.protocol import Method, state
from fedstill.train.local import SGD

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
            assert accumulated(momentum, steps) == pytest.approx(-w.item() / 0.1, rel=1e-12)


def test_fednova_weighs_directions_not_distances(digits: Any, tmp_path: Path) -> None:
    """By the formula: x - (sum p_k a_k) sum p_k (x - y_k)/a_k with numbers from the replies themselves."""
    import numpy as np
    from small import agreement

    from fedstill.data.shards import Shards
    from fedstill.engines.inprocess import Inline
    from fedstill.engines.server import ServerFederation
    from fedstill.engines.site import Site

    method = FedNova(rounds=1, local=LOCAL)
    sizes = [np.arange(0, 120), np.arange(120, 480)]
    inline = Inline(Site(agreement(method, digits.train), Shards(digits.train, [(s, s[:0]) for s in sizes]), tmp_path))
    fed = ServerFederation(
        agreement(method, digits.train), inline, num_clients=2, folder=tmp_path, test=digits.test, keep_replies=True
    )
    x = {n: v.double() for n, v in state(fed.new_model()).items()}
    result = state(method.server(fed))
    fed._exchange = 0
    replies = fed.ask(FedNova.update, weights=state(fed.new_model()))
    p = [0.25, 0.75]
    assert [r.num_records for r in replies] == [120, 360]
    assert [r.work for r in replies] == [accumulated(0.9, 4), accumulated(0.9, 12)]
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

"""FENS against its protocol: which records train what, and what one round of the aggregator does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import holding, kept, last_state, of_sizes, run
from torch import nn

from fedstill.distill.stacking import ServerAdam, StackedModel
from fedstill.engines.client import SiteClient
from fedstill.evaluation import confusion
from fedstill.methods.fens import FENS
from fedstill.protocol import state
from fedstill.train.sgd import SGD

METHOD: dict[str, Any] = {"local": SGD(lr=0.05, batch_size=32), "rounds": 1}


@pytest.mark.slow
def test_a_tenth_of_the_records_waits_for_the_aggregator(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fit = SGD.fit

    def watched(self: SGD, model: nn.Module, records: Any, rng: Any, **options: Any) -> int:
        seen.append(records)
        return fit(self, model, records, rng, **options)

    monkeypatch.setattr(SGD, "fit", watched)
    model, _ = run(FENS(**METHOD), digits, tmp_path, clients=2)
    assert isinstance(model, StackedModel)
    for k, part in enumerate(torch.arange(len(digits.train)).tensor_split(2)):
        own = digits.train[part]
        proxy = last_state(tmp_path / "clients", k)["proxy"]
        assert len(proxy) == len(own) // 10
        trained, aggregated = seen[k], seen[2 + k]
        assert len(trained) == len(own) - len(proxy)
        assert torch.equal(aggregated.labels, own.labels[proxy])
        logits = torch.cat([network.eval()(own[proxy].inputs()) for network in model.networks], 1)
        torch.testing.assert_close(aggregated.inputs(), logits.detach(), rtol=1e-4, atol=1e-4)  # batches of other sizes
        rest = torch.ones(len(own), dtype=torch.bool)
        rest[proxy] = False
        assert sorted(trained.labels.tolist()) == sorted(own.labels[rest].tolist())


def test_a_client_makes_one_network_for_the_outputs_of_all(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    new_model = SiteClient.new_model

    def counted(self: SiteClient, *args: Any, **options: Any) -> nn.Module:
        made.append(options)
        return new_model(self, *args, **options)

    monkeypatch.setattr(SiteClient, "new_model", counted)
    run(FENS(**METHOD), digits, tmp_path, clients=4)
    assert [options.get("draw", 0) for options in made] == [1, 2, 3, 4, 0, 0, 0, 0]  # its own, and one for all outputs


@pytest.mark.slow
def test_models_start_apart(digits: Any, tmp_path: Path) -> None:
    local = SGD(lr=1e-12, batch_size=10_000)
    model, _ = run(FENS(local=local, rounds=1), digits, tmp_path, clients=2)
    assert isinstance(model, StackedModel)
    first, second = (state(network) for network in model.networks)
    assert not torch.allclose(next(iter(first.values())), next(iter(second.values())))


@pytest.mark.parametrize(("update", "seen"), [({"max_steps": 1}, 16), ({"max_steps": 3}, 35), ({"epochs": 2}, 35)])
def test_a_change_weighs_as_the_records_of_its_batches(
    update: dict[str, Any], seen: int, digits: Any, tmp_path: Path
) -> None:
    method = FENS(rounds=1, proxy=0.5, local=SGD(), update=SGD(batch_size=16, **update))
    fed = holding(of_sizes(20, 70), method, digits, tmp_path)
    method.server(fed)
    first, second = kept(fed, method.improve, exchange=2)
    assert (first.num_records, second.num_records) == (10, seen)


def test_a_standardised_aggregator_of_one_class_clients_tells_classes_apart(digits: Any, tmp_path: Path) -> None:
    """The result has the inputs' scaling in its first layer, and is the same after a stop and a resumption."""
    local = SGD(lr=0.05, batch_size=32)
    method = FENS(local=local, rounds=30, standardise=True, optimiser=ServerAdam(lr=0.01), hidden=4)
    labels = digits.train.labels.numpy()
    shares = [((labels == label).nonzero()[0], labels[:0]) for label in (0, 1, 2)]
    fed = holding(shares, method, digits, tmp_path)
    model = method.server(fed)
    test = digits.test[torch.nonzero(digits.test.labels < 3).flatten()]
    table = confusion(model, test)
    assert (table.sum(0) > 0).sum() >= 3 and table.diagonal().sum() > 0.6 * len(test)
    assert isinstance(model, StackedModel)
    again = method.server(holding(shares, method, digits, tmp_path))
    assert all(torch.equal(value, state(again)[name]) for name, value in state(model).items())

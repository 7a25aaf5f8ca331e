"""FedRD: what a client trains and keeps, and at which networks it makes what it sends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import holding, last_state, of_sizes
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.data.sources import DataSet
from fedstill.distill import distribution_matching
from fedstill.distill.distribution_matching import DistributionMatching
from fedstill.methods.fedrd import FedRD
from fedstill.protocol import Method, load, shared_part
from fedstill.train.sgd import Adam

MATCHING: Any = {"steps": 1, "batch_size": 16, "logits": False, "batch_statistics": True}


def method(**changes: Any) -> FedRD:
    """Trains a projection by one step on all records at once, which no shuffle changes."""
    settings: dict[str, Any] = {"dpc": 1, "projection": Adam(lr=0.01, batch_size=10_000), "matching": MATCHING}
    return FedRD(**{**settings, **changes})


def server_s(fed: Any, method: Method, draw: int, x: Tensor) -> dict[str, Tensor]:
    """What a server shares: a task network whose running statistics are not those of the client's batches."""
    model = fed.new_model(draw=draw)
    with torch.no_grad():
        model(3 * x)
    return shared_part(method, model)


def test_a_projection_is_trained_under_the_task_network_as_it_was_sent_and_kept(
    digits: DataSet, tmp_path: Path
) -> None:
    """By the formula of Adam's first step, twice: the second from what the first has left at the client."""
    fed = holding(of_sizes(100), method(), digits, tmp_path)
    records = digits.train[:100]
    expected = fed.new_model().eval()  # which leaves the running statistics as they were sent
    for draw in (1, 2):
        shared = server_s(fed, method(), draw, records.inputs())
        fed.ask(FedRD.represent, at_most={"n": 10}, shared=shared)
        load(expected, shared)
        weights = dict(expected.projection.named_parameters(prefix="projection"))
        loss = cross_entropy(expected(records.inputs()), records.labels)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for p, g in zip(weights.values(), gradients, strict=True):
                p -= 0.01 * g / (g.abs() + 1e-8)
        kept = last_state(tmp_path / "clients", 0)
        assert kept.keys() == weights.keys()
        for name, p in weights.items():
            # a step is of 0.01; sums over records are in another order, which matters to gradients near 1e-8 alone
            assert torch.allclose(kept[name], p, rtol=0, atol=1e-5)


def test_every_step_of_matching_is_at_another_random_network(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    match = distribution_matching.match

    def watched(net: Any, *args: Any, **options: Any) -> Any:
        seen.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone())
        return match(net, *args, **options)

    monkeypatch.setattr(distribution_matching, "match", watched)
    many = method(matching=DistributionMatching(**{**MATCHING, "steps": 4}))
    fed = holding(of_sizes(60, 60), many, digits, tmp_path)
    fed.ask(FedRD.represent, at_most={"n": 10}, shared=shared_part(many, fed.new_model()))
    for networks in (seen[:4], seen[4:]):  # of one client
        networks = [*networks, torch.nn.utils.parameters_to_vector(fed.new_model().task.parameters())]
        assert len(networks) == 5  # with the server's
        for i, network in enumerate(networks):
            # of two independent draws no two weights are equal, of which half are drawn at all
            assert all(float((network != other).double().mean()) > 0.5 for other in networks[:i])

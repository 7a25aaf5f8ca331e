"""FedProto against its formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rogue import MAX, of, reasons
from small import last_state, run
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fedstill import models
from fedstill.base import seeds
from fedstill.data.sources import DataSet
from fedstill.methods.fedproto import FedProto, Prototypes, global_prototypes
from fedstill.train.sgd import SGD

KNOWN = {"means": torch.full((3, 2), 7.0), "counts": torch.zeros(3, dtype=torch.int64)}
REPLIES = [
    Prototypes(means=torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), counts=torch.tensor([3, 0, 0])),
    Prototypes(means=torch.tensor([[5.0, 4.0], [6.0, 8.0], [0.0, 0.0]]), counts=torch.tensor([1, 2, 0])),
]


@pytest.mark.parametrize(("weighting", "first"), [("uniform", [3.0, 3.0]), ("records", [2.0, 2.5])])
def test_a_global_prototype_is_the_mean_over_the_clients_that_have_the_class(
    weighting: Any, first: list[float]
) -> None:
    new = global_prototypes(KNOWN, REPLIES, weighting)
    assert new["means"].tolist() == [first, [6.0, 8.0], [7.0, 7.0]]  # of a class that nobody has, the one before
    assert new["counts"].tolist() == [4, 2, 0]


@pytest.mark.parametrize("spec", ["convnet:width=8,depth=2", "lenet:padding=2", "dense-mnist", "resnet8", "scattering"])
def test_features_and_logits_come_from_one_pass(spec: str) -> None:
    size = 28 if spec == "dense-mnist" else 16
    with seeds.isolated(0):
        model = models.build(spec, (1, size, size), 10).eval()
        x = torch.rand(3, 1, size, size)
    features, logits = models.FeaturesAndLogits(model)(x)
    assert torch.equal(features, models.features(model, x))
    assert torch.equal(logits, model(x))


def test_a_network_of_one_s_own_may_define_its_features() -> None:
    class Own(nn.Linear):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = Own(4, 2)
    features, logits = models.FeaturesAndLogits(model)(torch.ones(1, 4))
    assert torch.equal(features, torch.full((1, 4), 2.0))
    assert torch.equal(logits, model(torch.ones(1, 4)))


@pytest.mark.parametrize("pull", [0.0, 2.0])
def test_two_rounds_of_one_client_are_two_gradient_steps_on_the_loss_as_written(
    pull: float, digits: Any, tmp_path: Path
) -> None:
    """Plain gradient descent on all records at once, whose gradients autograd takes of the written-out loss."""
    local = SGD(lr=0.1, momentum=0.0, batch_size=10_000)
    _, fed = run(FedProto(rounds=2, local=local, pull=pull), digits, tmp_path, clients=1)
    plain, x, y = fed.new_model(), digits.train.inputs(), digits.train.labels
    prototypes = None
    for _ in range(2):
        features, logits = models.features(plain, x), plain(x)
        loss = cross_entropy(logits, y)
        if prototypes is not None:  # nothing pulls in the first round
            loss = loss + pull * mse_loss(features, prototypes[y])
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for p, gradient in zip(plain.parameters(), gradients, strict=True):
                p -= 0.1 * gradient
            features = models.features(plain, x)
            prototypes = torch.stack([features[y == label].mean(0) for label in range(10)])
    kept = last_state(tmp_path / "clients", 0)
    for name, p in plain.named_parameters():
        assert torch.allclose(kept[name], p, atol=1e-5)  # float32, sums in another order


@pytest.mark.parametrize("size", [1e12, MAX])
def test_absurd_prototypes_of_one_client_end_nobody_s_run(size: float, digits: DataSet, tmp_path: Path) -> None:
    found = reasons("fedproto", of(size), digits, tmp_path)
    assert found
    assert all("the limit is 1000 times that" in reason for reason in found)

"""FedLPA's protocol: what a client measures, what the server makes of it, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rogue import reasons
from small import MODEL, holding, kept, of_sizes, run

from fedstill import models
from fedstill.data.sources import DataSet
from fedstill.distill.posteriors import LayerPosterior, damped, fisher_factors, layers, packed, product_mean, unpacked
from fedstill.methods.averaging import mean_weights
from fedstill.methods.fedlpa import FedLPA
from fedstill.protocol import load, state
from fedstill.train.sgd import SGD

LOCAL: dict[str, Any] = {"local": SGD(lr=0.05, batch_size=32)}
SIZES = (60, 200, 25)


def test_factors_are_those_of_the_model_that_is_sent_on_all_of_a_client_s_records(
    digits: DataSet, tmp_path: Path
) -> None:
    fed = holding(of_sizes(*SIZES), FedLPA(**LOCAL), digits, tmp_path)
    fed.spec.method.server(fed)
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    replies = list(kept(fed, FedLPA.train))
    assert [reply.num_records for reply in replies] == list(SIZES)
    for reply, size, end in zip(replies, SIZES, ends, strict=True):
        model, own = fed.new_model(), digits.train[end - size : end]
        load(model, reply.weights)
        expected = packed(fisher_factors(model, own, layers(model, own.shape)))
        torch.testing.assert_close(reply.factors, expected.float(), rtol=1e-5, atol=1e-8)  # single precision


@pytest.mark.parametrize(("solution", "damping"), [("exact", 1e-3), ("expectation", 1e-3), ("exact", 0.1)])
def test_layers_have_the_posteriors_mean_and_all_else_the_mean_by_records(
    solution: Any, damping: float, digits: DataSet, tmp_path: Path
) -> None:
    method = FedLPA(solution=solution, damping=damping, **LOCAL)
    fed = holding(of_sizes(*SIZES), method, digits, tmp_path)
    found = state(method.server(fed))
    replies, like = list(kept(fed, FedLPA.train)), fed.new_model()
    expected = mean_weights(replies, "records")
    known = layers(like, digits.train.shape)
    norms = expected.keys() - {f"{one.name}.{part}" for one in known for part in ("weight", "bias")}
    assert len(known) == 3 and len(norms) == 4, "two convolutions and a linear layer; two norms"
    for at, layer in enumerate(known):
        clients = [
            LayerPosterior(
                reply.num_records,
                layer.matrix(reply.weights),
                *(damped(factor, damping) for factor in unpacked(reply.factors, known)[at]),
            )
            for reply in replies
        ]
        expected |= layer.named(product_mean(clients, exact=solution == "exact").mean)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solution", ["exact", "expectation"])
def test_one_client_s_model_is_the_result(solution: Any, digits: DataSet, tmp_path: Path) -> None:
    found, fed = run(FedLPA(solution=solution, **LOCAL), digits, tmp_path, clients=1, keep_replies=True)
    (reply,) = kept(fed, FedLPA.train)
    for name, value in state(found).items():
        torch.testing.assert_close(value, reply.weights[name], rtol=1e-6, atol=1e-6)


def test_the_mean_and_the_ensemble_of_the_same_uploads_stand_beside_the_result(digits: DataSet, tmp_path: Path) -> None:
    fed = holding(of_sizes(*SIZES), FedLPA(**LOCAL), digits, tmp_path)
    model = fed.spec.method.server(fed)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    mean = fed.new_model()
    load(mean, mean_weights(kept(fed, FedLPA.train), "records"))
    assert line["average"] == fed.evaluate(mean) and line["accuracy"] == fed.evaluate(model)
    probabilities = 0
    for reply in kept(fed, FedLPA.train):
        load(mean, reply.weights)
        probabilities = probabilities + mean.eval()(digits.test.inputs()).softmax(1)
    right = (probabilities.argmax(1) == digits.test.labels).double().mean()
    assert line["ensemble"] == pytest.approx(float(right))
    assert line["residual"] < 1e-11


def test_factors_that_no_records_have_do_not_end_the_run(digits: DataSet, tmp_path: Path) -> None:
    def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "factors": -100 * tensors["factors"]}

    assert reasons("fedlpa", turned, digits, tmp_path) == set()


def test_factors_of_another_number_are_refused(digits: DataSet, tmp_path: Path) -> None:
    found = reasons("fedlpa", lambda tensors: {**tensors, "factors": tensors["factors"][1:]}, digits, tmp_path)
    assert len(found) == 1 and "factors" in found.pop()


def test_models_that_it_cannot_use_are_refused_before_a_client_works(digits: DataSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each client would send 4 MB, a model and the factors of its 3 layers, but"):
        run(FedLPA(**LOCAL), digits, tmp_path / "large", model="convnet:width=128,depth=2", max_bytes=2**20)
    shape = digits.train.shape
    sides = [(one.inputs, one.outputs) for one in layers(models.build(MODEL, shape, 10), shape)]
    assert sides == [(10, 8), (73, 8), (33, 10)]
    numbers = sum(math.comb(side + 1, 2) for pair in sides for side in pair)
    fed = holding(of_sizes(30, 30), FedLPA(**LOCAL), digits, tmp_path / "small")
    fed.spec.method.server(fed)
    assert all(len(reply.factors) == numbers for reply in kept(fed, FedLPA.train))

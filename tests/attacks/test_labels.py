"""Classes of a client by its updates: found where they must be, chance where nothing tells."""

import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.attacks import labels
from fedstill.attacks.labels import LastLayer, descent, last_layer, leak
from fedstill.base.records import Records
from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.protocol import state
from fedstill.train.sgd import SGD

CLASSES = 10
LOCAL = SGD(batch_size=32, epochs=5)


def fresh(digits: DataSet) -> nn.Module:
    with isolated(0):
        return models.build("convnet:width=8,depth=2", digits.train.shape, CLASSES)


def of_classes(records: Records, counts: dict[int, int]) -> Records:
    parts = [records.of_class(label)[:count] for label, count in counts.items()]
    together = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    return Records(*together, records.num_classes, records.normalisation)


def layer_after(digits: DataSet, records: Records, sgd: SGD = LOCAL) -> LastLayer:
    model = fresh(digits)
    start = {name: value.clone() for name, value in state(model).items()}
    sgd.fit(model, records, stream(4))
    return last_layer(descent(start, state(model)), CLASSES)


@pytest.mark.parametrize("label", [0, 3, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_the_class_of_a_one_class_client_is_found_from_its_update(digits: DataSet, label: int, bias: bool) -> None:
    layer = layer_after(digits, digits.train.of_class(label))
    shares = labels.shares_of_update(layer.drift if bias else LastLayer(layer.weight, None).drift)
    found = leak(shares, digits.train.of_class(label).class_counts(), least=0.02)
    assert found.held_accuracy == 1 and found.distance < 0.01 < found.uniform_distance


def test_classes_of_a_two_class_client_are_found_and_the_larger_share_is_larger(digits: DataSet) -> None:
    records = of_classes(digits.train, {3: 100, 7: 40})
    shares = labels.shares_of_update(layer_after(digits, records).drift)
    found = leak(shares, records.class_counts(), least=0.02)
    assert found.held_accuracy == 1 and found.distance < 0.5 < found.uniform_distance and shares[3] > shares[7]


def test_an_update_of_noise_says_nothing(digits: DataSet) -> None:
    model, rng = fresh(digits), stream(5)
    counts = torch.tensor([100] + [0] * 9)
    tries = 300
    first = 0
    for _ in range(tries):
        noise = {name: torch.randn(value.shape, generator=rng) for name, value in state(model).items()}
        shares = labels.shares_of_update(last_layer(noise, CLASSES).drift)
        assert leak(shares, counts, least=0.02).distance < 2.0 + 1e-9
        first += int(shares.argmax()) == 0
    assert binom.cdf(first, tries, 0.1) > 1e-6 and binom.sf(first - 1, tries, 0.1) > 1e-6
    assert labels.shares_of_update(torch.ones(10).double()).tolist() == [0.1] * 10


@pytest.mark.parametrize("bias", [True, False])
def test_the_label_of_one_record_is_found_from_its_gradient(digits: DataSet, bias: bool) -> None:
    model = fresh(digits)
    for i in range(20):
        record = digits.train[i : i + 1]
        weights = dict(model.named_parameters())
        loss = cross_entropy(model(record.inputs()), record.labels)
        values = torch.autograd.grad(loss, list(weights.values()))
        layer = last_layer(dict(zip(weights, values, strict=True)), CLASSES)
        assert labels.single_label(layer if bias else LastLayer(layer.weight, None)) == int(record.labels[0])


def test_without_a_bias_activations_below_0_don_t_matter() -> None:
    p, activations = torch.tensor([0.2, 0.1, 0.4, 0.3]).double(), torch.tensor([-1.0, -2.0, 0.5]).double()
    p[1] -= 1
    assert labels.single_label(LastLayer(torch.outer(p, activations), None)) == 1
    with pytest.raises(ValueError, match="at least 3 classes"):
        labels.single_label(LastLayer(torch.ones(2, 3).double(), None))


def test_counts_of_a_few_records() -> None:
    shares = torch.tensor([0.0, 0.55, 0.05, 0.4]).double()
    assert labels.counts_of(shares, 10).tolist() == [0, 5, 1, 4]
    assert labels.counts_of(shares, 2).tolist() == [0, 1, 0, 1]
    assert labels.counts_of(shares, 1).tolist() == [0, 1, 0, 0]


def test_the_last_layer_is_the_last_with_a_row_for_each_class(digits: DataSet) -> None:
    model = fresh(digits)
    layer = last_layer(state(model), CLASSES)
    assert torch.equal(layer.weight, model.classifier.weight.double())  # type: ignore[union-attr, operator]
    assert torch.equal(layer.drift, model.classifier.bias.double())  # type: ignore[union-attr, operator]
    without = {name: value for name, value in state(model).items() if name != "classifier.bias"}
    assert torch.equal(last_layer(without, CLASSES).drift, layer.weight.sum(1))
    deep = nn.Sequential(nn.Linear(4, CLASSES), nn.ReLU(), nn.Linear(CLASSES, CLASSES))
    found = last_layer(state(deep), CLASSES)
    assert found.bias is not None
    assert torch.equal(found.bias, deep[2].bias.double()) and torch.equal(found.weight, deep[2].weight.double())
    with pytest.raises(ValueError, match="is a linear layer with 11 rows"):
        last_layer(state(model), 11)


def test_a_client_without_records_holds_no_secret() -> None:
    with pytest.raises(ValueError, match="0 records"):
        leak(torch.full((10,), 0.1).double(), torch.zeros(10).long(), 0.02)

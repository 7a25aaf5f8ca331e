"""Classes of a client by its tags, images and updates: found where they must be, chance where nothing tells."""

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

from fedstill import models
from fedstill.attacks import labels
from fedstill.attacks.inversion import gradient_of
from fedstill.attacks.labels import LastLayer, descent, evidence_of_images, evidence_of_tags, last_layer, leak, vote
from fedstill.data.sources import DataSet
from fedstill.evaluate import evaluate
from fedstill.privacy.randomized_response import RandomizedResponse, RRWithPrior, probabilities
from fedstill.protocol import state
from fedstill.records import Records
from fedstill.seeds import Simulated, isolated, stream
from fedstill.train.sgd import SGD

CLASSES, IPC = 10, 50
LOCAL = SGD(batch_size=32, epochs=5)


def sent(labels: Tensor, epsilon: float, seed: int = 0) -> Tensor:
    return RandomizedResponse(CLASSES, epsilon)(labels, Simulated(stream(seed, "tags")))


# --- tags


def test_labels_in_clear_are_what_they_say() -> None:
    truth = torch.tensor([3, 3, 7, 0])
    evidence = evidence_of_tags(truth, labels.response(CLASSES, None))
    assert torch.equal(evidence.argmax(1), truth)
    shares = labels.shares_of_evidence(evidence)
    assert torch.allclose(shares, torch.bincount(truth, minlength=CLASSES).double() / 4, atol=1e-6)
    found = leak(shares, torch.bincount(truth, minlength=CLASSES), least=0.125)
    assert found.held_accuracy == 1 and found.distance < 1e-5 and found.uniform_distance == pytest.approx(1.4)


@pytest.mark.parametrize(("epsilon", "rate"), [(2.0, 1.0), (1.0, 0.84)])
def test_the_vote_of_50_tags_names_the_class_as_often_as_others_computed(epsilon: float, rate: float) -> None:
    clients = 2000
    truth = torch.arange(clients) % CLASSES
    evidence = evidence_of_tags(sent(truth.repeat_interleave(IPC), epsilon), labels.response(CLASSES, epsilon))
    posterior = vote(evidence, torch.arange(clients).repeat_interleave(IPC))
    right = int((posterior.argmax(1) == truth).sum())
    # the rates are rounded to 0.005, and 2000 coins of 0.84 spread by 0.008: four of those
    assert abs(right / clients - rate) < 0.005 + 0.033
    sure = posterior.amax(1)
    assert float(sure.mean()) == pytest.approx(right / clients, abs=0.04)  # the posterior is what it claims


def test_the_vote_is_close_to_chance_where_tags_say_next_to_nothing() -> None:
    clients = 2000
    truth = torch.arange(clients) % CLASSES
    evidence = evidence_of_tags(sent(truth.repeat_interleave(IPC), 0.1), labels.response(CLASSES, 0.1))
    posterior = vote(evidence, torch.arange(clients).repeat_interleave(IPC))
    rate = float((posterior.argmax(1) == truth).double().mean())
    # 50 tags name their class 0.47 times oftener than each other one: 0.2 of a standard deviation of its count
    assert 0.08 < rate < 0.2 and float(posterior.amax(1).mean()) < 0.25


def test_without_groups_all_tags_are_of_one_class() -> None:
    truth = torch.full((IPC,), 4)
    posterior = vote(evidence_of_tags(sent(truth, 2.0), labels.response(CLASSES, 2.0)))
    assert posterior.shape == (1, CLASSES) and int(posterior.argmax()) == 4
    assert vote(torch.empty(0, CLASSES).double()).shape == (0, CLASSES)


def test_shares_are_found_behind_randomised_tags_and_the_tags_own_shares_are_not_them() -> None:
    counts = torch.tensor([600, 300, 100] + [0] * 7) * 4
    truth = torch.arange(CLASSES).repeat_interleave(counts)
    tags = sent(truth, 2.0)
    shares = labels.shares_of_evidence(evidence_of_tags(tags, labels.response(CLASSES, 2.0)))
    # a tag's share has a standard deviation of 0.008, over keep - change = 0.39: 0.02 a class, less at the border 0
    assert leak(shares, counts, least=0.05).distance < 0.1 and leak(shares, counts, least=0.05).held_accuracy == 1
    assert leak(torch.bincount(tags, minlength=CLASSES) / len(tags), counts, least=0.05).distance > 0.5


def test_a_channel_of_its_own_for_every_record() -> None:
    """Of RRWithPrior, whose output has few possible classes where the prior is narrow."""
    prior = torch.rand(3000, CLASSES, generator=stream(1)) ** 6
    truth = torch.full((3000,), 2)
    tags = RRWithPrior(1.0, prior)(truth, Simulated(stream(2)))
    evidence = evidence_of_tags(tags, probabilities(prior, 1.0))
    assert float(labels.shares_of_evidence(evidence)[2]) > 0.85
    each = probabilities(prior, 1.0)[7, :, tags[7]].clamp_min(1e-12).log()
    assert torch.equal(evidence[7], each)


@pytest.fixture(scope="module")
def judge(digits: DataSet) -> nn.Module:
    """A network that knows digits no client of these tests holds."""
    model = fresh(digits)
    SGD(epochs=30).fit(model, digits.test, stream(3))
    return model


def test_images_add_to_what_tags_say(digits: DataSet, judge: nn.Module) -> None:
    records = digits.train[:400]
    accuracy = evaluate(judge, records)
    by_image = evidence_of_images(judge, records)
    assert float((by_image.argmax(1) == records.labels).double().mean()) == pytest.approx(accuracy)
    by_tag = evidence_of_tags(sent(records.labels, 2.0), labels.response(CLASSES, 2.0))
    kept = float((by_tag.argmax(1) == records.labels).double().mean())
    both = float(((by_image + by_tag).argmax(1) == records.labels).double().mean())
    assert 0.35 < kept < 0.55 < accuracy < both


def test_a_temperature_softens_and_has_limits(digits: DataSet, judge: nn.Module) -> None:
    few = digits.train[:50]
    sharp, soft = evidence_of_images(judge, few), evidence_of_images(judge, few, temperature=5.0)
    assert torch.equal(sharp.argmax(1), soft.argmax(1)) and bool((soft.amax(1) < sharp.amax(1)).all())
    assert evidence_of_images(judge, few[:0]).shape == (0, CLASSES)
    with pytest.raises(ValueError, match="temperature is 0"):
        evidence_of_images(judge, few, temperature=0.0)


def test_no_evidence_has_no_shares() -> None:
    with pytest.raises(ValueError, match="0 rows of evidence"):
        labels.shares_of_evidence(torch.empty(0, CLASSES).double())


# --- updates


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


def test_offsets_find_the_classes_of_a_balanced_client(digits: DataSet) -> None:
    """Without them the sign says only which classes the model expected less of."""
    drift, counts = layer_after(digits, digits.train[:144]).drift, digits.train[:144].class_counts()
    alone = torch.stack([layer_after(digits, digits.test.of_class(c)).drift for c in range(CLASSES)])
    with_them = leak(labels.shares_of_update(drift, labels.offsets(alone)), counts, least=0.02)
    without = leak(labels.shares_of_update(drift), counts, least=0.02)
    assert with_them.held_accuracy >= 0.9 > without.held_accuracy and with_them.distance < without.distance / 2


def test_offsets_by_hand() -> None:
    alone = torch.tensor([[-5.0, 1.0, 2.0], [3.0, -5.0, 4.0], [5.0, 3.0, -5.0]]).double()
    assert labels.offsets(alone).tolist() == [4.0, 2.0, 3.0]
    shares = labels.shares_of_update(torch.tensor([4.0, 0.0, 1.0]).double(), labels.offsets(alone))
    assert shares.tolist() == [0.0, 0.5, 0.5]


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
        layer = last_layer(gradient_of(model, record.inputs(), record.labels), CLASSES)
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

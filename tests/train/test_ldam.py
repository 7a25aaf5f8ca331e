"""Margins, class weights and the loss against values worked out by hand; training on them."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.train.losses import LDAM, class_weights, margins
from fedstill.train.sgd import SGD

NO_INPUTS = torch.empty(0)
"""The loss looks at none."""
COUNTS = torch.tensor([16, 1, 0, 81])


def test_margins_by_hand() -> None:
    # n^(-1/4): 1/2, 1, absent, 1/3
    assert margins(COUNTS).tolist() == pytest.approx([0.25, 0.5, 0.0, 0.5 / 3], rel=1e-6)
    assert margins(COUNTS, 2.0).tolist() == pytest.approx([1.0, 2.0, 0.0, 2 / 3], rel=1e-6)
    assert margins(torch.tensor([10, 10])).tolist() == [0.5, 0.5]


def test_class_weights_by_hand() -> None:
    raw = [(1 - 0.5) / (1 - 0.5**n) for n in (2, 1, 3)]  # 2/3, 1, 4/7
    mean = sum(raw) / 3
    expected = [raw[0] / mean, raw[1] / mean, 0.0, raw[2] / mean]
    assert class_weights(torch.tensor([2, 1, 0, 3]), 0.5).tolist() == pytest.approx(expected, rel=1e-6)
    assert class_weights(COUNTS, 0.0).tolist() == [1.0, 1.0, 0.0, 1.0]
    weights = class_weights(torch.tensor([1, 10]))  # nearly 1/n while n is far below 1 / (1 - beta)
    assert float(weights[0] / weights[1]) == pytest.approx(sum(0.9999**i for i in range(10)), rel=1e-6)


def test_the_loss_by_hand() -> None:
    logits, labels = torch.tensor([[1.0, 0.0, 2.0, 0.5], [0.0, 3.0, 0.0, 1.0]]), torch.tensor([0, 1])
    loss = LDAM(scale=2.0, beta=0.5, defer=0.5).loss(torch.tensor([16, 1, 0, 81]))
    lowered = [[0.75, 0.0, 2.0, 0.5], [0.0, 2.5, 0.0, 1.0]]
    terms = [
        math.log(sum(math.exp(2 * z) for z in row)) - 2 * row[y]
        for row, y in zip(lowered, labels.tolist(), strict=True)
    ]
    assert float(loss(logits, NO_INPUTS, labels)) == pytest.approx(sum(terms) / 2, rel=1e-6)
    assert logits[0, 0] == 1.0  # not changed in place
    loss.on_epoch(1, 4)
    assert float(loss(logits, NO_INPUTS, labels)) == pytest.approx(sum(terms) / 2, rel=1e-6)
    loss.on_epoch(2, 4)  # from here on classes are weighted
    w = [0.5 / (1 - 0.5**16), 1.0]
    weighted = (w[0] * terms[0] + w[1] * terms[1]) / (w[0] + w[1])
    assert float(loss(logits, NO_INPUTS, labels)) == pytest.approx(weighted, rel=1e-6)


def test_a_margin_asks_for_more_and_none_is_plain_cross_entropy() -> None:
    logits, labels = torch.randn(5, 4, generator=stream(0)), torch.tensor([0, 1, 3, 3, 0])
    assert LDAM().loss(COUNTS)(logits, NO_INPUTS, labels) > cross_entropy(4 * logits, labels)
    tiny = LDAM(largest=1e-9, scale=1.0).loss(COUNTS)
    assert torch.allclose(tiny(logits, NO_INPUTS, labels), cross_entropy(logits, labels))


def test_when_weights_begin() -> None:
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 1])
    logits[0, 0] = 2.0
    found = {}
    for defer in (0.0, 0.8, 1.0):
        loss = LDAM(defer=defer, beta=0.9).loss(COUNTS)
        values = [float(loss(logits, NO_INPUTS, labels))]
        for epoch in range(1, 11):
            loss.on_epoch(epoch, 10)
            values.append(float(loss(logits, NO_INPUTS, labels)))
        found[defer] = [value != found_first for found_first in (values[0],) for value in values]
        if defer == 0.0:
            weighted = values[0]
        else:
            assert values[0] != weighted
    assert not any(found[0.0]) and not any(found[1.0])
    assert found[0.8] == [False] * 8 + [True] * 3


def unbalanced() -> tuple[Records, Records]:
    """Three classes of overlapping blobs, 300, 12 and no records of them; and a balanced test set of the first two."""
    rng = stream(0)

    def draw(counts: list[int]) -> Records:
        labels = torch.arange(3).repeat_interleave(torch.tensor(counts))
        pixels = torch.randn(len(labels), 1, 2, 2, generator=rng) * 40 + 110 + 30.0 * labels[:, None, None, None]
        return Records(pixels.clamp(0, 255).to(torch.uint8), labels, 3, Normalisation((0.5,), (0.2,)))

    return draw([300, 12, 0]), draw([200, 200, 0])


def trained(**settings: float | None) -> Tensor:
    """Accuracy on each of the two classes after training with LDAM, or cross-entropy where ``plain``."""
    train, test = unbalanced()
    with isolated(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    sgd = SGD(lr=0.05, batch_size=32, epochs=10)
    if "plain" in settings:
        sgd.fit(model, train, stream(1))
    else:
        loss = LDAM(**settings).loss(train.class_counts())  # type: ignore[arg-type]
        sgd.fit(model, train, stream(1), loss=loss, on_epoch=loss.on_epoch)
    right = model(test.inputs()).argmax(1) == test.labels
    return torch.stack([right[test.labels == c].float().mean() for c in (0, 1)])


def test_the_rare_class_gains() -> None:
    plain, margin, weighted = trained(plain=1), trained(defer=1.0), trained(defer=0.5)
    assert weighted[1] > plain[1] + 0.1
    assert weighted.mean() > plain.mean() + 0.02
    assert margin[1] >= plain[1]
    assert torch.equal(trained(defer=0.5), weighted)


def test_bad_settings_and_no_records_are_sentences() -> None:
    for wrong in ({"beta": 1.0}, {"scale": 0.0}, {"defer": 1.1}, {"largest": -1.0}):
        with pytest.raises(ValidationError):
            LDAM(**wrong)
    for function in (margins, class_weights, LDAM().loss):
        with pytest.raises(ValueError, match="0 records have no"):
            function(torch.zeros(3, dtype=torch.int64))

"""FedCOF: its head is the authors' formula in plain code, its covariance is unbiased, and its private form holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from torch import Tensor

from fedstill.base.seeds import Simulated, stream
from fedstill.data.sources import DataSet
from fedstill.distill.public_map import PublicMap
from fedstill.methods.fedcof import ClassMeans, FedCOF, Sent
from fedstill.privacy.logistic import extend
from fedstill.privacy.mechanisms import ClassSums

TINY: dict[str, Any] = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}}
CLASSES, DIMS, BIAS = 4, 6, 0.1
Clients = list[tuple[Tensor, Tensor]]


def clients(number: int, records: int = 40, seed: int = 0) -> Clients:
    """Rows and classes of clients of several sizes, each without one class."""
    rng, found = stream(seed, "clients"), []
    centres, spread = torch.randn(CLASSES, DIMS, generator=rng), torch.randn(DIMS, DIMS, generator=rng) * 0.3
    for k in range(number):
        labels = torch.randint(0, CLASSES, (records + 10 * k,), generator=rng)
        labels = labels[labels != k % CLASSES]
        rows = centres[labels] + torch.randn(len(labels), DIMS, generator=rng) @ spread
        found.append((extend(rows, 3.0, BIAS), labels))
    return found


def replies(parts: Clients) -> list[ClassMeans]:
    """The means that clients send, in double precision."""
    found = []
    for rows, labels in parts:
        kinds = torch.unique(labels)
        means = torch.stack([rows[labels == label, :-1].mean(0) for label in kinds])
        found.append(ClassMeans(labels=kinds, counts=torch.bincount(labels)[kinds], means=means))
    return found


def by_the_authors(parts: Clients, gamma: float) -> Any:
    """Classes, then clients, as in the public code; a class of one mean has the covariance gamma I."""
    gram, total, sums = np.zeros((DIMS + 1, DIMS + 1)), np.zeros(DIMS + 1), np.zeros((CLASSES, DIMS + 1))
    for label in range(CLASSES):
        own = [rows[labels == label].numpy() for rows, labels in parts if (labels == label).any()]
        numbers = np.array([len(rows) for rows in own])
        means = np.array([rows.mean(0) for rows in own])
        sums[label] = sum(rows.sum(0) for rows in own)
        centre = sums[label] / numbers.sum()
        scatter = sum(n * np.outer(m - centre, m - centre) for n, m in zip(numbers, means, strict=True))
        gram += (numbers.sum() - 1) * (scatter / max(len(own) - 1, 1) + gamma * np.eye(DIMS + 1))
        total += sums[label]
    gram += np.outer(total, total) / sum(len(labels) for _, labels in parts)
    heads = np.linalg.pinv(gram) @ sums.T
    return (heads / np.linalg.norm(heads, axis=0)).T


@pytest.mark.parametrize("number", [1, 2, 9])
def test_the_head_is_the_authors_formula(number: int) -> None:
    parts = clients(number)
    if number == 1:  # which lacks a class that the formula divides by
        parts[0] = parts[0][0], (parts[0][1] - 1)
        parts.append((parts[0][0][:1], torch.tensor([3])))
    method = FedCOF(shrinkage=0.3 * DIMS)
    head, _ = method.head(method.added(replies(parts)), CLASSES)
    expected = by_the_authors(parts, 0.3)
    assert np.abs(head.numpy() - expected).max() < 1e-6
    assert np.abs(head.numpy() - by_the_authors(parts, 0.4)).max() > 1e-3


def test_the_covariance_is_unbiased() -> None:
    """The mean over 400 draws; a divisor of K in place of K - 1 would be off by a fifth of the trace."""
    rng, root = stream(0, "draws"), torch.diag(torch.linspace(0.1, 0.3, DIMS + 1, dtype=torch.float64))
    root[:, -1] = 0  # the constant does not vary
    found, sizes, label = [], (3, 10, 40, 5, 2), torch.zeros(5, dtype=torch.int64)
    for _ in range(400):
        rows = [torch.randn(n, DIMS + 1, generator=rng, dtype=torch.float64) @ root for n in sizes]
        sums = torch.stack([part.sum(0) for part in rows])
        sums[:, -1] = torch.tensor(sizes) * BIAS
        found.append(FedCOF().covariance(Sent(label, sums), 0))
    mean, expected = torch.stack(found).mean(0), root.T @ root
    assert float(mean.trace()) == pytest.approx(float(expected.trace()), rel=0.1)  # standard error .015
    assert (mean - expected).abs().max() < 0.02  # four standard errors of the largest entry


def test_one_mean_of_each_class_or_several_of_disjoint_groups(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:200], test=digits.test[:50])
    own = [np.flatnonzero(few.train.labels.numpy() == label) for label in range(10)]

    def sent(means: int) -> tuple[Any, list[ClassMeans]]:
        method = FedCOF(**TINY, means=means)
        parts, public = [(o, o[:0]) for o in own], small.noise_images(few)
        fed = small.holding(parts, method, few, tmp_path / str(means), public=public)
        method.server(fed)
        return fed, list(small.kept(fed, FedCOF.average))

    fed, single = sent(1)
    net, map_ = fed.new_model(), PublicMap(dims=8)
    features = map_.fit(net, fed.public, fed.rng("public map"))
    rows = extend(features.rows(net, few.train), features.radius, BIAS)[:, :-1]
    for label, reply in enumerate(single):
        assert reply.labels.tolist() == [label] and reply.counts.tolist() == [len(own[label])]
        torch.testing.assert_close(reply.means[0].double(), rows[own[label]].mean(0), rtol=0, atol=1e-7)  # float32
        # a class, a number of eight bytes, a mean of 8 numbers; the header says what they are
    assert 1 + 8 + 4 * 8 < fed.journal.bytes_up / 10 < 1 + 8 + 4 * 8 + 290
    _, several = sent(4)
    for label, (reply, one) in enumerate(zip(several, single, strict=True)):
        assert reply.labels.tolist() == [label] * 4 and int(reply.counts.sum()) == len(own[label])
        assert int(reply.counts.min()) >= 2
        torch.testing.assert_close((reply.counts[:, None] * reply.means).sum(0) / len(own[label]), one.means[0])
    assert max(int(reply.labels.shape[0]) for reply in sent(200)[1]) == max(len(o) for o in own) // 2


def test_a_class_without_records_is_never_predicted() -> None:
    parts = [(rows[labels != 2], labels[labels != 2]) for rows, labels in clients(5)]
    method = FedCOF()
    head, _ = method.head(method.added(replies(parts)), CLASSES)
    assert not any((rows @ head.T).argmax(1).eq(2).any() for rows, _ in clients(5))


def test_noise_is_that_of_one_sum_and_clients_without_a_class_do_not_show_in_its_covariance(
    digits: DataSet, tmp_path: Path
) -> None:
    _, fed = small.run(FedCOF(**TINY, epsilon=1.0), digits, tmp_path, public=small.noise_images(digits))
    found = fed.guarantee()
    assert found.holds and found.unit == "record" and found.epsilon == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="means is 2, but with an epsilon each class has one noisy sum"):
        FedCOF(epsilon=1.0, means=2)
    parts, noise = clients(6, records=20_000), 3.7
    silent, loud = (ClassSums(CLASSES, 1.0, multiplier) for multiplier in (0.0, noise))
    labels = torch.arange(CLASSES).repeat(6)
    exact = torch.cat([silent(part, Simulated(stream(0, "none"))) for part in parts])
    noisy = Sent(labels, torch.cat([loud(part, Simulated(stream(k, "noise"))) for k, part in enumerate(parts)]), noise)
    method = FedCOF(epsilon=1.0)
    right = method.covariance(Sent(labels, exact), 0)
    error = (method.covariance(noisy, 0) - right).abs().max()
    unsure = (method.covariance(replace(noisy, noise=0.0), 0) - right).abs().max()  # of whoever has a count above 0
    assert 10 * error < unsure
    (head, _), (plain, _) = method.head(noisy, CLASSES), method.head(Sent(labels, exact), CLASSES)
    rows = torch.cat([rows for rows, _ in parts])
    assert float(((rows @ head.T).argmax(1) == (rows @ plain.T).argmax(1)).double().mean()) > 0.95

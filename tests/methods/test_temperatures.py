"""Temperatures of least-squares scores: by scipy on many draws, on records of their own, and from odd sums."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_t
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

import fedstill
from fedstill.base.seeds import stream
from fedstill.methods.afl import AFL
from fedstill.methods.parts import temperatures
from fedstill.methods.parts.feature_sums import Total
from fedstill.methods.parts.moments import noise_of
from fedstill.methods.parts.temperatures import temperature, tempered

BIAS = 0.1
RIDGE = 1e-3
EYE = torch.eye(65).double()


def rows_of(values: Any) -> Tensor:
    """Standardised values within the unit ball, with the constant feature."""
    x = torch.from_numpy((values - values.mean(0)) / (values.std(0) + 1e-9))
    x *= math.sqrt(1 - BIAS**2) / x.norm(dim=1, keepdim=True).clamp_min(math.sqrt(x.shape[1]))
    return torch.cat([x, x.new_full((len(x), 1), BIAS)], 1)


def solved(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Total]:
    """The head of AFL without noise, and the sums that it is of."""
    first = one_hot(y, classes).double().T @ x
    head = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1]).double(), first.T).T
    return head, Total(upper(x.T @ x), first, BIAS, 0.0, 0.0)


def upper(matrix: Tensor) -> Tensor:
    """The upper triangle, row by row."""
    row, column = torch.triu_indices(*matrix.shape)
    return matrix[row, column][None]


def gaussians(shares: list[float], apart: float, records: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Records and classes to fit, and 10,000 new ones: classes around centres in 20 dimensions, in the unit ball."""
    rng = stream(seed, "records")
    centres = apart * normalize(torch.randn(len(shares), 20, generator=rng).double())
    y = torch.multinomial(torch.tensor(shares), records + 10_000, True, generator=rng)
    x = centres[y] + torch.randn(len(y), 20, generator=rng).double()
    x *= math.sqrt(1 - BIAS**2) / x.norm(dim=1, keepdim=True).clamp_min(4)
    x = torch.cat([x, x.new_full((len(x), 1), BIAS)], 1)
    return x[:records], y[:records], x[records:], y[records:]


def released(x: Tensor, y: Tensor, classes: int, epsilon: float | None, seed: int) -> tuple[Tensor, Total, float]:
    """The head of AFL from sums with its noise, the sums, and its ridge."""
    method, rng = AFL(epsilon=epsilon), stream(seed, "noise")
    std, of_first = (0.0, 0.0) if epsilon is None else noise_of(method, 1e-5)
    noise = torch.randn(x.shape[1], x.shape[1], generator=rng).double() * std
    first = one_hot(y, classes).double().T @ x
    first += of_first * torch.randn(first.shape, generator=rng).double()
    total = Total(upper(x.T @ x + (noise + noise.T) / 2), first, BIAS, std, of_first)
    return method.head(total), total, method.damping(total)


def best(scores: Tensor, y: Tensor) -> tuple[float, float]:
    """The temperature with the least log loss on records, and that loss."""
    found = minimize_scalar(lambda u: float(cross_entropy(math.exp(u) * scores, y)), bounds=(-3, 6), method="bounded")
    return math.exp(found.x), float(found.fun)


def test_it_has_the_least_expected_log_loss_of_such_scores() -> None:
    """By scipy on 200,000 draws of its own, from means and a covariance in plain code."""
    values, labels = load_digits(return_X_y=True)
    x, y = rows_of(values), torch.from_numpy(labels)
    head, total = solved(x, y, 10)
    scores = (x @ head.T).numpy()
    means = np.array([scores[labels == label].mean(0) for label in range(10)])
    spread = sum(np.cov(scores[labels == label].T, bias=True) * (labels == label).mean() for label in range(10))
    h, drawn = 40 / len(y), np.random.default_rng(1).choice(labels, 200_000)
    means, spread = (means - h * np.eye(10)) / (1 - h), spread / (1 - h) ** 2
    z = means[drawn] + multivariate_t(np.zeros(10), spread * 3 / 5, df=5, seed=1, allow_singular=True).rvs(len(drawn))
    expected, _ = best(torch.from_numpy(z), torch.from_numpy(drawn))
    sums = total.first @ head.T
    assert temperature(sums, sums, total.first[:, -1] / BIAS, 40.0) == pytest.approx(expected, rel=0.05)
    of_ridge = torch.linalg.solve(x.T @ x + 5 * EYE, total.first.T).T
    hat = torch.trace(x @ torch.linalg.solve(x.T @ x + 5 * EYE, x.T))
    found = temperature(
        total.first @ of_ridge.T, of_ridge @ x.T @ x @ of_ridge.T, total.first[:, -1] / BIAS, float(hat)
    )
    exact = replace(total, second=upper(x.T @ x))
    assert tempered(of_ridge, exact, 5.0) == pytest.approx(found * of_ridge, rel=1e-6)


@pytest.mark.parametrize("load", [load_digits, load_breast_cancer])
def test_new_records_have_nearly_the_least_log_loss(load: Any) -> None:
    values, labels = load(return_X_y=True)
    x, y = rows_of(values), torch.from_numpy(labels)
    known, new = map(torch.from_numpy, train_test_split(np.arange(len(y)), random_state=0))
    head, total = solved(x[known], y[known], int(y.max()) + 1)
    scores, warm = x[new] @ head.T, x[new] @ tempered(head, total, RIDGE).T
    found, least, plain = cross_entropy(warm, y[new]), best(scores, y[new])[1], cross_entropy(scores, y[new])
    assert found < 1.1 * least and found < plain / 2
    assert torch.equal(warm.argmax(1), scores.argmax(1))


def test_absent_classes_one_class_and_one_output_are_no_error() -> None:
    values, labels = load_digits(return_X_y=True)
    x, y = rows_of(values), torch.from_numpy(labels)
    head, total = solved(x[y > 4], y[y > 4], 10)  # five of them have no record
    assert 5 < float(tempered(head, total, RIDGE).norm() / head.norm()) < 100
    head, total = solved(x[y == 3], y[y == 3], 10)
    assert torch.isfinite(tempered(head, total, RIDGE)).all()
    assert torch.equal(tempered(head[:1], total, RIDGE), head[:1])
    assert temperature(torch.zeros(3, 3), torch.zeros(3, 3), torch.tensor([-2.0, 0.4, 0.0]), 3) == 1.0
    apart = 50 * torch.eye(2).double()  # each class's score is 1 for its own records, 0 for others
    assert (
        math.log(25) < temperature(apart, apart, torch.tensor([50.0, 50.0]), 2) < math.log(100)
    )  # as in Laplace's rule
    assert temperature(apart, apart, torch.tensor([50.0, 50.0]), 95.0) == 1  # each record has its own way to fit it


@pytest.mark.parametrize("epsilon", [None, 4.0, 1.0, 0.5, 0.1])
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.92, 0.08], [0.99, 0.01], [0.1] * 10, [0.02] * 50])
def test_noise_makes_no_probabilities_worse(shares: list[float], epsilon: float | None) -> None:
    """With the noise's own share in the means, fifty classes at epsilon 1 were worse than equal probabilities."""
    for seed in range(3):
        x, y, new, of_new = gaussians(shares, 3.0, 2000, seed)
        head, total, ridge = released(x, y, len(shares), epsilon, seed)
        warm, scores = new @ tempered(head, total, ridge).T, new @ head.T
        found, plain = float(cross_entropy(warm, of_new)), float(cross_entropy(scores, of_new))
        assert found < 1.01 * plain and torch.equal(warm.argmax(1), scores.argmax(1))
        if epsilon is None:
            assert found < 1.1 * best(scores, of_new)[1] + 0.005


def test_two_hundred_classes_need_a_large_one() -> None:
    x, y, new, of_new = gaussians([0.005] * 200, 12.0, 4000, 0)
    head, total, ridge = released(x, y, 200, None, 0)
    factor, least = best(new @ head.T, of_new)
    assert factor > 100 and cross_entropy(new @ tempered(head, total, ridge).T, of_new) < 1.1 * least


def test_a_thousand_classes_take_seconds() -> None:
    rng, began = stream(0, "scores"), time.monotonic()
    means = torch.eye(1000).double() * 0.3 + 0.001 * torch.randn(1000, 1000, generator=rng).double()
    counts = torch.full((1000,), 50.0).double()
    products = 50 * (means.T @ means) + 50_000 * 0.003 * torch.eye(1000).double()
    assert 1 < temperature(50 * means, products, counts, 100) < 1000
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("epsilon", [None, 4.0])
@pytest.mark.parametrize("method", ["afl", "safle", "deepafl", "fedcof"])
def test_runs_are_more_probable_with_it_and_predict_the_same(
    method: str, epsilon: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real digits, with the same noise in both runs."""
    own: dict[str, Any] = {"extractor": {"pretrain": "none"}, "space": {"dims": 16}, "epsilon": epsilon}
    own |= {"rounds": 2, "width": 16, "expanded": 16} if method == "deepafl" else {}
    task: dict[str, Any] = {"data": "digits", "clients": 2, "model": "linear", "public": "noise=200", "workers": 0}
    losses, right = [], []
    for number in range(2):
        if number:
            for name in ("fedstill.methods.fedcof", temperatures.__name__):
                monkeypatch.setattr(f"{name}.temperature", lambda *_: 1.0)
        run = fedstill.run(method, out=tmp_path / str(number), noise="simulated", **task, **own)
        losses.append(run.metrics[-1]["log_loss"])
        right.append(run.summary["accuracy"])
    assert right[0] == right[1]
    assert losses[0] < losses[1] or (method == "fedcof" and epsilon)  # which has none under noise

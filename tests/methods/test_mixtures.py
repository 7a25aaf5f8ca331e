"""FedPFT and SAFLe: mixtures satisfy EM's equations, embeddings are a ridge regression; both against plain code."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from pydantic import ValidationError
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from sklearn.mixture import GaussianMixture
from torch import Tensor

from fedstill import Experiment, Job, run
from fedstill.base.seeds import Simulated, stream
from fedstill.data import from_torch
from fedstill.data.sources import DataSet
from fedstill.distill.mixtures import Mixture, coloured
from fedstill.methods.fedpft import FedPFT
from fedstill.methods.parts.feature_sums import Total
from fedstill.methods.parts.gaussians import Mixtures
from fedstill.methods.safle import SAFLe
from fedstill.models.heads import Bucketed
from fedstill.privacy.class_gaussians import COUNTS
from fedstill.privacy.second_moments import SecondMoments, unpacked

TINY: dict[str, Any] = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}, "epsilon": None}


def rows_of(n: int = 300, dims: int = 4) -> Tensor:
    """Rows around three centres, one of them stretched."""
    rng = stream(0, "rows")
    centres = 4 * torch.randn(3, dims, generator=rng)
    place = torch.randint(3, (n,), generator=rng)
    noise = torch.randn(n, dims, generator=rng) * (1 + (place == 0)[:, None] * torch.arange(dims))
    return (centres[place] + noise).double()


def covariances_of(mixture: Mixture, packed: Tensor, dims: int) -> list[np.ndarray[Any, Any]]:
    if mixture.covariance == "full":
        return [unpacked(c, dims).numpy() for c in packed]
    return [np.diag(np.broadcast_to(c.numpy(), (dims,))) for c in packed]


@pytest.mark.parametrize("kind", ["diag", "spherical", "full"])
def test_a_mixture_is_a_fixed_point_of_em_and_scikit_learn_s(kind: Any) -> None:
    rows, mixture = rows_of(), Mixture(components=3, covariance=kind, iterations=1000, tolerance=1e-12)
    weights, means, packed = mixture.fit(rows, seed=3)
    x, dims = rows.numpy(), rows.shape[1]
    covariances = covariances_of(mixture, packed, dims)
    density = [
        w * multivariate_normal(m, c).pdf(x)
        for w, m, c in zip(weights.numpy(), means.numpy(), covariances, strict=True)
    ]
    shares = np.stack(density, 1) / np.sum(density, 0)[:, None]  # expectation
    assert np.allclose(shares.mean(0), weights, atol=1e-5)  # maximisation changes nothing
    for k in range(3):
        mean = shares[:, k] @ x / shares[:, k].sum()
        centred = x - mean
        moment = (shares[:, k, None] * centred).T @ centred / shares[:, k].sum()
        diagonal = np.diag(moment)
        target = {"full": moment, "diag": np.diag(diagonal), "spherical": diagonal.mean() * np.eye(dims)}[kind]
        assert np.allclose(mean, means[k], atol=1e-4)
        assert np.allclose(target + 1e-6 * np.eye(dims), covariances[k], atol=1e-3)
    theirs = GaussianMixture(3, covariance_type=kind, max_iter=1000, tol=1e-12, random_state=3).fit(x)
    assert np.array_equal(theirs.means_, means.numpy())


def test_missing_components_are_empty_and_one_record_is_its_own_mixture() -> None:
    for kind in ("diag", "spherical", "full"):
        mixture = Mixture(components=3, covariance=kind)
        weights, means, packed = mixture.fit(rows_of(1), seed=0)
        assert weights.tolist() == [1.0, 0.0, 0.0]
        assert torch.equal(means[0], rows_of(1)[0])
        drawn = mixture.draw((weights, means, packed), 50, stream(0, "draw"))
        assert (drawn - means[0]).abs().max() < 0.01  # the absent components, at 0, are never drawn


@pytest.mark.parametrize("kind", ["diag", "spherical", "full"])
def test_samples_have_the_moments_of_the_mixture(kind: Any) -> None:
    rows, mixture = rows_of(), Mixture(components=2, covariance=kind)
    fitted = weights, means, packed = mixture.fit(rows, seed=0)
    drawn = mixture.draw(fitted, 40_000, stream(0, "draw"))
    mean = weights @ means
    covariance = sum(
        w * (torch.from_numpy(c) + torch.outer(m - mean, m - mean))
        for w, m, c in zip(weights, means, covariances_of(mixture, packed, rows.shape[1]), strict=True)
    )
    assert torch.allclose(drawn.mean(0), mean, atol=0.1)  # 5 standard errors
    assert (drawn.T.cov() - covariance).abs().max() < 0.05 * torch.as_tensor(covariance).abs().max()
    shuffled = torch.tensor([weights[1], weights[0]])
    assert not torch.allclose(
        mixture.draw((shuffled, means, packed), 40_000, stream(0, "draw")).mean(0), mean, atol=0.1
    )


def test_what_a_client_sends_cannot_break_the_draws() -> None:
    mixture = Mixture(components=2, covariance="full")
    sent = (torch.tensor([-1.0, 0.0]), torch.zeros(2, 4), torch.full((2, 10), -3.0))
    assert torch.isfinite(mixture.draw(sent, 20, stream(0, "draw"))).all()
    reply = Mixtures(
        labels=torch.tensor([1], dtype=torch.uint8),
        counts=torch.tensor([2**39]),
        weights=torch.ones(1, 2).half(),
        means=torch.zeros(1, 2, 4).half(),
        covariances=torch.zeros(1, 2, 4).half(),
    )
    method = FedPFT(mixture={"components": 2}, samples=30)  # type: ignore[arg-type]
    assert len(method.drawn(reply.fitted(), stream(0, "draw")).labels) == 30


def test_coloured_rows_of_an_indefinite_matrix() -> None:
    white = torch.randn(20_000, 2, dtype=torch.float64, generator=stream(0, "white"))
    drawn = coloured(white, torch.tensor([[4.0, 0.0], [0.0, -9.0]], dtype=torch.float64))
    assert drawn[:, 1].abs().max() == 0
    assert float(drawn[:, 0].std()) == pytest.approx(2, rel=0.03)


def test_privacy_needs_one_full_gaussian() -> None:
    with pytest.raises(ValidationError, match="mixtures have no private form"):
        FedPFT(epsilon=1.0)
    assert FedPFT(epsilon=1.0, mixture={"components": 1, "covariance": "full"}).epsilon == 1.0  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="epsilon is None, which adds no noise"):
        FedPFT(privacy="published")


def sums_of(rows: Tensor, labels: Tensor, *, radius: float, by_class: bool = False) -> Total:
    mechanism = SecondMoments(
        num_classes=3, dims=rows.shape[1], radius=radius, noise_multiplier=0.0, bias=0.1, by_class=by_class
    )
    exact = mechanism([(rows, labels)], Simulated(stream(0, "noise")))
    return Total(exact.second.double(), exact.first.double(), 0.1, 0.0, 0.0)


def test_the_private_form_draws_each_class_s_gaussian() -> None:
    rows = rows_of(900)
    labels = torch.arange(900) % 3
    rows = rows + labels[:, None]
    radius = float(rows.norm(dim=1).max())
    method = FedPFT(samples=50_000)
    repeated = sums_of(rows.repeat(20, 1), labels.repeat(20), radius=radius, by_class=True)
    drawn = method.drawn_of(repeated, radius, stream(0, "draw"))
    x = drawn.inputs()
    for label in range(3):
        own, found = rows[labels == label], x[drawn.labels == label].double()
        assert len(found) == 20 * len(own)
        assert torch.allclose(found.mean(0), own.mean(0), atol=0.3)
        assert (found.T.cov() - own.T.cov()).abs().max() < 0.1 * own.T.cov().abs().max()


@pytest.mark.slow
def test_the_published_noise_gives_a_model_and_no_guarantee(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:100])
    one: dict[str, Any] = {**TINY, "epsilon": 1e4, "mixture": {"components": 1, "covariance": "full"}}
    method = FedPFT(**one, privacy="published", training={"epochs": 30, "lr": 0.01})  # type: ignore[arg-type]
    fed = small.world(method, few, tmp_path, small.of_sizes(150, 150), small.noise_images(few), local_test=False)
    assert fed.federation.evaluate(method.server(fed.federation)) > 0.5  # 0.1 by guessing
    guarantee = fed.federation.guarantee()
    assert not guarantee.holds and "PublishedGaussians" in guarantee.reason and COUNTS in guarantee.reason


@pytest.mark.slow
def test_fedpft_s_network_is_its_head_on_the_samples_scale(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:100])
    method = FedPFT(**TINY, mixture={"components": 1}, training={"epochs": 30, "lr": 0.01})  # type: ignore[arg-type]
    fed = small.world(method, few, tmp_path, small.of_sizes(150, 150), small.noise_images(few), local_test=False)
    assert fed.federation.evaluate(method.server(fed.federation)) > 0.5  # 0.1 by guessing


@pytest.mark.slow
def test_fedpft_does_not_depend_on_the_features_scale(tmp_path: Path) -> None:
    rng = stream(0, "scales")
    labels = torch.arange(240) % 3
    rows = (torch.randn(240, 6, generator=rng) + 2 * torch.eye(6)[labels]).float()
    settings: dict[str, Any] = {**TINY, "space": {"dims": 4, "whiten": False}, "training": {"epochs": 5}}
    method = FedPFT(**settings, mixture={"components": 1})  # type: ignore[arg-type]
    results = []
    for i, scale in enumerate((1e-3, 1.0, 1e4)):
        data = from_torch((scale * rows, labels), test=(scale * rows[:60], labels[:60]))
        task = {"data": "own", "model": "linear", "clients": 2, "workers": 0, "public": "held=60"}
        job = Job(Experiment(**task, mean=(0.0,), std=(1.0,)), method, tmp_path / str(i))
        results.append(run(job, data=data)["accuracy"])
    assert results[0] == results[1] == results[2] > 0.6


def test_safle_is_a_ridge_regression_on_one_hot_groups() -> None:
    rows, method = rows_of(400, dims=5).float(), SAFLe(buckets={"thresholds": 3, "group": 4}, ridge=0.5, epsilon=None)
    labels = torch.arange(400) % 3
    thresholds = method.buckets.quantiles(rows[:100])
    order = torch.randperm(15, generator=stream(0, "order"))
    plain = np.zeros((400, 4 * 16))
    for i, row in enumerate(rows.tolist()):
        bits = [float(value > t) for value, of_dim in zip(row, thresholds.tolist(), strict=True) for t in of_dim]
        shuffled = [bits[j] for j in order.tolist()] + [0.0]  # 15 bits in groups of 4
        for group in range(4):
            value = sum(2**j * shuffled[4 * group + j] for j in range(4))
            plain[i, 16 * group + int(value)] = 1
    sparse = method.buckets.sparse(rows, thresholds, order)
    assert np.array_equal(sparse.numpy(), plain)
    embeddings, bias = method.embeddings(sums_of(sparse.double(), labels, radius=math.sqrt(4)))
    scaled = np.hstack([plain * math.sqrt(0.99 / 4), np.full((400, 1), 0.1)])
    ridge = Ridge(alpha=0.5, fit_intercept=False, solver="svd").fit(scaled, np.eye(3)[labels.numpy()])
    expected = ridge.predict(scaled)
    found = Bucketed(embeddings, bias, thresholds, order)(rows)
    factor = float(found.norm()) / np.linalg.norm(expected)  # the temperature of the scores
    assert factor > 1 - 1e-12 and np.abs(found.numpy() / factor - expected).max() < 1e-6


@pytest.mark.slow
def test_safle_classifies_and_its_split_does_not_matter(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:100])
    method = SAFLe(**TINY, buckets={"thresholds": 2, "group": 3}, precision="double")
    found = []
    for sizes in ((300,), (10, 190, 100)):
        folder = tmp_path / str(len(sizes))
        fed = small.world(method, few, folder, small.of_sizes(*sizes), small.noise_images(few), local_test=False)
        model = method.server(fed.federation)
        found.append(model[1].embeddings)
        assert fed.federation.evaluate(model) > 0.5
    assert torch.allclose(found[0], found[1], atol=1e-6)

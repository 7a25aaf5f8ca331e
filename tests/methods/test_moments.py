"""AFL, FedCGS and GH-OFL: the split of the records does not matter; heads agree with other implementations."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import small
import torch
from safetensors.torch import load_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedstill
from fedstill import methods, models
from fedstill.base.seeds import Simulated, stream
from fedstill.data.sources import DataSet
from fedstill.distill.public_map import PublicMap
from fedstill.methods.afl import AFL
from fedstill.methods.fedcgs import FedCGS
from fedstill.methods.fedcgs_p import FedCGSP
from fedstill.methods.gh_ofl import GHOFL
from fedstill.methods.parts.feature_sums import Total, add_up, cleaned
from fedstill.methods.parts.gaussians import FisherMix, classes_of
from fedstill.methods.parts.moments import DTYPES, Sums
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import IntegerMoments
from fedstill.privacy.second_moments import SecondMoments
from fedstill.protocol import Records, Released, Summation, load

TINY = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}, "epsilon": None, "precision": "double"}
CLASSES, DIMS, BIAS = 5, 12, 0.1


def features(n: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Made-up features of classes that overlap, each with a covariance of its own."""
    rng = stream(seed, "features")
    labels = torch.randint(0, CLASSES, (n,), generator=rng)
    means = torch.randn(CLASSES, DIMS, generator=rng)
    spread = torch.randn(CLASSES, DIMS, DIMS, generator=rng) * 0.4
    rows = means[labels] + torch.einsum("nd,nde->ne", torch.randn(n, DIMS, generator=rng), spread[labels])
    return rows.double(), labels


def sums(rows: Tensor, labels: Tensor, *, radius: float, by_class: bool = False) -> Total:
    """The sums of one client without noise."""
    mechanism = SecondMoments(
        num_classes=CLASSES, dims=DIMS, radius=radius, noise_multiplier=0.0, bias=BIAS, by_class=by_class
    )
    exact = mechanism([(rows, labels)], Simulated(stream(0, "noise")))
    return Total(exact.second.double(), exact.first.double(), BIAS, 0.0, 0.0)


def extended(rows: Tensor, radius: float) -> np.ndarray[Any, Any]:
    """r of each record, in plain code."""
    found = []
    for row in rows.numpy():
        length = max(np.linalg.norm(row), radius)
        found.append([*(row * np.sqrt(1 - BIAS**2) / length), BIAS])
    return np.array(found)


def near(found: Tensor, expected: Any, rel: float) -> bool:
    expected = np.asarray(expected)
    return bool(np.abs(found.numpy() - expected).max() <= rel * np.abs(expected).max())


@pytest.mark.parametrize("by_class", [False, True])
def test_sums_of_whole_numbers_are_those_of_real_ones(by_class: bool) -> None:
    """The constant of 25.6 steps was 25: counts were 2.4 % too small, means that much too long, FedCGS no solution."""
    rows, labels = features(20_000)
    facts = {"num_classes": CLASSES, "dims": DIMS, "radius": 6.0, "noise_multiplier": 0.0, "share": 0.6}
    method = FedCGS(epsilon=None)
    totals = []
    for mechanism in (SecondMoments(**facts, by_class=by_class), IntegerMoments(**facts, by_class=by_class)):  # type: ignore[arg-type]
        sent = mechanism([(rows, labels)], Simulated(stream(0, "noise")))
        summed = Summation(Sums(second=Released(sent.second), first=Released(sent.first)), range(1))
        totals.append(add_up(summed, method, 1e-5, torch.device("cpu")))
    real, whole = totals
    counts = torch.bincount(labels).double()
    assert torch.allclose(whole.first[:, -1] / whole.bias, counts, rtol=1e-12)
    for group, number in enumerate(counts if by_class else [float(len(labels))]):
        assert float(whole.matrix(group)[-1, -1]) == pytest.approx(float(number) * BIAS**2, rel=1e-12)
        assert near(whole.matrix(group), real.matrix(group), 5e-3)  # clipped rows are a step shorter
    assert near(whole.first, real.first, 5e-3)
    if not by_class:
        truth, found = (method.head(total) for total in (real, whole))
        assert near(found, truth, 0.02)


@pytest.mark.parametrize(("bias", "steps"), [(0.1, 256), (0.001, 256), (0.18, 8)])
def test_the_noise_of_a_count_is_that_of_the_rescaled_constant(bias: float, steps: int) -> None:
    """It was claimed for the constant of the settings: with a small one, classes that are there counted as absent."""
    method = FedCGS(epsilon=1.0, bias=bias, steps=steps)
    facts = {"num_classes": 400, "dims": 2, "radius": 1.0, "share": method.share, "bias": bias, "steps": steps}
    mechanism = IntegerMoments(**facts, noise_multiplier=release_noise(1.0, 1e-5))  # type: ignore[arg-type]
    rows, labels = torch.zeros(40_000, 2), torch.arange(40_000) % 400
    sent = mechanism([(rows, labels)], Simulated(stream(0, "noise")))
    summed = Summation(Sums(second=Released(sent.second), first=Released(sent.first)), range(1))
    total = add_up(summed, method, 1e-5, torch.device("cpu"))
    wrong = total.first[:, -1] / total.bias - 100
    ratio = float(wrong.square().mean().sqrt()) / total.count_std
    assert abs(ratio - 1) < 4.5 / math.sqrt(800)
    assert not abs(1.5 * ratio - 1) < 4.5 / math.sqrt(800) and not abs(ratio / 1.5 - 1) < 4.5 / math.sqrt(800)


def test_the_ones_of_safle_s_rows_are_whole_numbers(tmp_path: Path) -> None:
    """All of them are one number, whose rounding does not cancel: rows had 31 steps for 31.84."""
    task: dict[str, Any] = {"data": "digits", "clients": 3, "workers": 0, "progress": False, "epsilon": None}
    sums = {"public": "noise=300", "extractor": {"pretrain": "none"}, "space": {"dims": 16}}
    tensors = {}
    for way in ("open", "masked:least=3"):
        run = fedstill.run("safle", sums=way, out=tmp_path / way[:4], **task, **sums)
        tensors[way[:4]] = load_file(run.folder / "model.safetensors")
    one, other = (tensors[way]["1.embeddings"].flatten().double() for way in ("open", "mask"))
    assert float(one @ other / (one @ one)) == pytest.approx(1, abs=5e-3)


# --- the split of the records


def splits(labels: Tensor) -> dict[str, list[Tensor]]:
    """Parts of the records, by name."""
    rng = np.random.default_rng(0)
    n, order = len(labels), torch.from_numpy(rng.permutation(len(labels)))
    alone = [torch.nonzero(labels == c).flatten() for c in range(int(labels.max()) + 1)]
    shares = rng.dirichlet([0.01] * 10, len(alone))  # clients' shares of each class
    owners = torch.cat(
        [torch.from_numpy(rng.choice(10, len(part), p=p)) for part, p in zip(alone, shares, strict=True)]
    )
    dirichlet = [torch.cat(alone)[owners == k] for k in range(10)]
    return {
        "one client": [torch.arange(n)],
        "one class a client": alone,
        "Dirichlet(0.01)": dirichlet,
        "IID, 10 clients": list(order.tensor_split(10)),
        "1,000 clients": list(order.tensor_split(1000)),
    }


def sent(rows: Tensor, labels: Tensor, parts: list[Tensor], *, by_class: bool = False) -> Total:
    """What the server adds up, without noise."""
    mechanism = SecondMoments(
        num_classes=CLASSES, dims=DIMS, radius=2.0, noise_multiplier=0.0, bias=BIAS, by_class=by_class
    )
    noise = Simulated(stream(0, "noise"))
    exact = (mechanism([(rows[part], labels[part])], noise) for part in parts)
    second, first = None, None
    for each in exact:
        second, first = (each.second, each.first) if second is None else (second + each.second, first + each.first)
    total = Summation(Sums(second=Released(second), first=Released(first)), range(len(parts)))
    return add_up(total, AFL(epsilon=None, precision="double"), 1e-5, torch.device("cpu"))


@pytest.mark.parametrize("name", ["afl", "fedcgs"])
def test_the_split_of_the_records_does_not_matter(name: str) -> None:
    rows, labels = features(2000)
    method: Any = methods.find(name)(epsilon=None)
    heads = {split: method.head(sent(rows, labels, parts)) for split, parts in splits(labels).items()}
    for head in heads.values():
        assert near(head, heads["one client"].numpy(), 1e-9)  # the order of float64 sums
    lost = method.head(sent(rows, labels, splits(labels)["IID, 10 clients"][:-1]))
    assert not near(lost, heads["one client"].numpy(), 1e-3)


def test_nor_does_it_in_whole_runs(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:50])
    heads = []
    for split, parts in splits(few.train.labels).items():
        if split != "1,000 clients":
            indices = [(part.numpy(), part[:0].numpy()) for part in parts]
            public, folder = small.noise_images(few), tmp_path / split
            fed = small.world(AFL(**TINY), few, folder, indices, public, local_test=False).federation
            heads.append(AFL(**TINY).server(fed).head.detach())
    assert all(near(head, heads[0].numpy(), 1e-7) for head in heads)


# --- other implementations


def test_afl_is_the_paper_s_pairwise_aggregation() -> None:
    rows, labels = features()
    x, y = extended(rows, 2.0), np.eye(CLASSES)[labels.numpy()]
    gamma, identity = 0.7, np.eye(DIMS + 1)
    clients = np.array_split(np.random.default_rng(0).permutation(len(x)), 4)
    locals_ = []
    for part in clients:
        c = x[part].T @ x[part] + gamma * identity  # C_k^r
        locals_.append((np.linalg.solve(c, x[part].T @ y[part]), c))
    w, c = locals_[0]
    for w_v, c_v in locals_[1:]:  # theorem 1, the absolute aggregation law
        inverse = np.linalg.inv(c + c_v)
        left = identity - np.linalg.solve(c, c_v) @ (identity - inverse @ c_v)
        right = identity - np.linalg.solve(c_v, c) @ (identity - inverse @ c)
        w, c = left @ w + right @ w_v, c + c_v
    ridge = 0.01
    expected = np.linalg.solve(c + (ridge - len(clients) * gamma) * identity, c @ w)  # gamma removed
    found = AFL(ridge=ridge, epsilon=None).head(sums(rows, labels, radius=2.0))
    assert near(found, expected.T, 1e-6)


def test_fedcgs_is_scikit_learn_s_linear_discriminant_analysis() -> None:
    rows, labels = features()
    x = extended(rows, 2.0)[:, :-1]
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(x, labels.numpy())
    head = FedCGS(ridge=0, epsilon=None).head(sums(rows, labels, radius=2.0))
    assert near(head[:, :-1], expected.coef_, 1e-6)
    assert near(head[:, -1] * BIAS, expected.intercept_, 1e-6)


def test_fedcgs_with_the_covariance_of_all_records() -> None:
    rows, labels = features()
    x = extended(rows, 2.0)[:, :-1]
    inverse = np.linalg.inv(np.cov(x.T) + 0.01 * np.eye(DIMS))
    means = np.stack([x[labels.numpy() == c].mean(0) for c in range(CLASSES)])
    shares = np.bincount(labels.numpy()) / len(labels)
    head = FedCGS(covariance="total", ridge=0.01, epsilon=None).head(sums(rows, labels, radius=2.0))
    assert near(head[:, :-1], means @ inverse, 1e-6)
    assert near(head[:, -1] * BIAS, np.log(shares) - np.einsum("cd,de,ce->c", means, inverse, means) / 2, 1e-6)


def shrunk(covariance: Any, shrinkage: float) -> Any:
    return (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / len(covariance) * np.eye(len(covariance))


def test_gh_ofl_s_lda_is_scikit_learn_s_with_shrinkage() -> None:
    rows, labels = features()
    x, y = extended(rows, 2.0)[:, :-1], labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(CLASSES)])
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(x, y)
    inverse = np.linalg.inv(shrunk(expected.covariance_, 0.2))
    head = GHOFL(shrinkage=0.2, epsilon=None).head(sums(rows, labels, radius=2.0))
    assert near(head[:, :-1], means @ inverse, 1e-6)
    almost = GHOFL(shrinkage=1e-12, epsilon=None).head(sums(rows, labels, radius=2.0))
    assert near(almost[:, :-1], expected.coef_, 1e-6)
    assert near(almost[:, -1] * BIAS, expected.intercept_, 1e-6)


def test_gh_ofl_s_naive_bayes_has_one_variance_a_feature() -> None:
    rows, labels = features()
    x, y = extended(rows, 2.0)[:, :-1], labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(CLASSES)])
    variances = (x - means[y]).var(0)
    expected = np.log(np.bincount(y) / len(y)) - ((x[:, None] - means) ** 2 / variances).sum(2) / 2
    head = GHOFL(classifier="nb", shrinkage=1e-12, epsilon=None).head(sums(rows, labels, radius=2.0))
    found = torch.from_numpy(extended(rows, 2.0)) @ head.T
    difference = found.numpy() - expected  # a linear head leaves out what all classes have in common
    assert np.abs(difference - difference.mean(1, keepdims=True)).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.skipif(
    tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 9), reason="before 1.9 it divided by n - 1"
)
def test_gh_ofl_s_qda_is_scikit_learn_s() -> None:
    rows, labels = features(3000)
    x, y = extended(rows, 2.0)[:, :-1], labels.numpy()
    expected = QuadraticDiscriminantAnalysis().fit(x, y).decision_function(x)
    method = GHOFL(classifier="qda", shrinkage=1e-12, epsilon=None)
    quadratic = method.quadratic(sums(rows, labels, radius=2.0, by_class=True))
    assert near(quadratic(torch.from_numpy(x)), expected, 1e-6)


def test_a_class_of_one_record_has_the_covariance_of_all_classes_in_qda() -> None:
    rng = stream(0, "three")
    labels = torch.tensor([0] * 200 + [1] * 199 + [2])
    rows = (torch.randn(400, DIMS, generator=rng) + 5 * torch.eye(DIMS)[labels]).double()
    quadratic = GHOFL(classifier="qda", epsilon=None).quadratic(sums(rows, labels, radius=99.0, by_class=True))
    new = (torch.randn(300, DIMS, generator=rng) + 5 * torch.eye(DIMS)[2]).double()
    scores = quadratic(torch.from_numpy(extended(new, 99.0)[:, :-1]))
    assert float((scores.argmax(1) == 2).double().mean()) > 0.8


def test_fisher_mix_has_scikit_learn_s_subspace_and_a_head_as_good_as_its_discriminant() -> None:
    rows, labels = features(3000)
    x, y = extended(rows, 2.0)[:, :-1], labels.numpy()
    total = sums(rows, labels, radius=2.0)
    expected = LinearDiscriminantAnalysis(solver="eigen").fit(x, y)
    classes = classes_of(total)
    factor = torch.linalg.inv(torch.linalg.cholesky(classes.within(total.matrix()[:-1, :-1]))).T
    found = FisherMix(energy=1.0).subspace(classes, factor)[:, : CLASSES - 1]
    theirs = expected.scalings_[:, : CLASSES - 1]
    assert near(found @ torch.linalg.pinv(found), theirs @ np.linalg.pinv(theirs), 1e-6)  # the same projection
    assert FisherMix(energy=1e-6).subspace(classes, factor).shape == (DIMS, 1)
    mix = FisherMix(samples=2000, training={"epochs": 30, "batch_size": 256, "lr": 0.01})  # type: ignore[arg-type]
    head = mix.head(classes, factor, stream(0, "samples"), stream(0, "training"))
    right = float((torch.from_numpy(extended(rows, 2.0)) @ head.T).argmax(1).eq(labels).double().mean())
    assert right > expected.score(x, y) - 0.01


def test_nor_does_it_for_qda() -> None:
    rows, labels = features(1000)
    method = GHOFL(classifier="qda", epsilon=None)
    x = torch.from_numpy(extended(rows, 2.0)[:, :-1])
    parts = splits(labels)
    first = method.quadratic(sent(rows, labels, parts["one client"], by_class=True))(x)
    for split in parts.values():
        assert near(method.quadratic(sent(rows, labels, split, by_class=True))(x), first.numpy(), 1e-9)


def test_a_class_without_records_is_never_predicted() -> None:
    rows, labels = features()
    without = labels != 2
    head = FedCGS(epsilon=None).head(sums(rows[without], labels[without], radius=2.0))
    assert not (torch.from_numpy(extended(rows, 2.0)) @ head.T).argmax(1).eq(2).any()


@pytest.mark.parametrize("pull", [0.0, 2.0])
def test_the_personal_form_is_a_gradient_step_on_the_loss_as_written(
    pull: float, digits: DataSet, tmp_path: Path
) -> None:
    few = replace(digits, train=digits.train[:200], test=digits.test[:50])
    method = FedCGSP(**TINY, pull=pull, local=small.STEEPEST.model_copy(update={"epochs": 1}))
    parts, public = small.of_sizes(120, 80), small.noise_images(few)
    fed = small.world(method, few, tmp_path, parts, public, local_test=False).federation
    method.server(fed)
    h0, map_ = fed.new_model(), PublicMap(dims=8)
    features = map_.fit(h0, fed.public, fed.rng("public map"))

    def rows(model: nn.Module, records: Records) -> Tensor:
        mapped = (models.features(model, records.inputs()) - features.mean) @ features.projection
        return mapped * np.sqrt(0.99) / mapped.norm(dim=1, keepdim=True).clamp_min(features.radius)

    with torch.no_grad():
        whole = rows(h0.eval(), few.train)
        means = torch.stack([whole[few.train.labels == label].mean(0) for label in range(10)])
    own = few.train[:120]

    def loss(model: nn.Module) -> Tensor:
        distance = (rows(model, own) - means[own.labels]).square().sum(1).mean()
        return cross_entropy(model(own.inputs()), own.labels) + pull * distance

    expected = small.descended(h0, loss)
    found = fed.new_model()
    load(found, small.last_state(tmp_path / "clients", 0))
    assert small.near(found, expected)
    if pull:
        assert not small.near(found, small.descended(h0, small.loss_on(own)))


# --- what is sent


@pytest.mark.parametrize("name", ["afl", "fedcgs"])
def test_methods_with_the_same_sums_share_one_release(name: str) -> None:
    kind: Callable[..., Any] = methods.find(name)
    assert kind(ridge=3.0, noise_ridge=2.0).first_reply == AFL().first_reply
    for change in ({"epsilon": 2.0}, {"share": 0.4}, {"bias": 0.2}, {"precision": "half"}, {"space": {"dims": 3}}):
        assert kind(**change).first_reply != AFL().first_reply


@pytest.mark.parametrize(("precision", "tolerance"), [("half", 2e-3), ("single", 1e-6), ("double", 0.0)])
def test_numbers_are_sent_in_the_precision_that_was_asked_for(
    precision: str, tolerance: float, digits: DataSet, tmp_path: Path
) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:50])

    def replies(**settings: Any) -> list[Any]:
        method = AFL(**{**TINY, **settings})
        parts = small.of_sizes(100, 100, 100)
        public = small.noise_images(few)
        folder = tmp_path / settings["precision"]
        fed = small.holding(parts, method, few, folder, public=public, min_clients=1)
        method.server(fed)
        return list(small.kept(fed, AFL.sum_up))

    scale = 2.0**10 if precision == "half" else 1.0
    for reply, exact in zip(replies(precision=precision), replies(precision="double"), strict=True):
        for field in ("second", "first"):
            sent, whole = getattr(reply, field).value, getattr(exact, field).value
            assert sent.dtype == DTYPES[precision]
            assert (sent.double() * scale - whole).abs().max() <= tolerance * whole.abs().max()


def test_cleaned_eigenvalues_are_those_along_the_noisy_eigenvectors() -> None:
    p, rng = 200, stream(0, "matrix")
    a = torch.diag(torch.logspace(-2, 0.5, p, dtype=torch.float64))
    above = torch.randn(p, p, dtype=torch.float64, generator=rng).triu(1) / math.sqrt(2)
    std = 0.05
    noise = std * (above + above.T + torch.diag(torch.randn(p, dtype=torch.float64, generator=rng)))
    values, vectors = torch.linalg.eigh(a + noise)
    norm = std * math.sqrt(2 * p)
    assert torch.linalg.eigvalsh(noise).abs().max() == pytest.approx(norm, rel=0.1)
    wanted = (vectors.T @ a @ vectors).diagonal()
    found = cleaned(values, norm)
    errors = [float((each - wanted).abs().mean()) for each in (values, values.clamp_min(0), found)]
    assert errors[2] < errors[1] / 3 < errors[0] / 3
    assert float((cleaned(values, 2 * norm) - wanted).abs().mean()) > 3 * errors[2]


@pytest.mark.parametrize("kind", [AFL, FedCGS])
def test_without_noise_the_spectrum_is_left_alone(kind: Any) -> None:
    total = sums(*features(), radius=2.0)
    assert torch.equal(kind(spectrum="cleaned").head(total), kind().head(total))


@pytest.mark.parametrize("name", ["afl", "safle"])
def test_more_noise_means_more_ridge(name: str) -> None:
    """The multiple of the identity grows with the noise, so the head shrinks."""
    rows, labels = features(2000)
    exact = sent(rows, labels, [torch.arange(len(labels))])
    method: Any = methods.find(name)(buckets={"group": 1, "thresholds": 1}) if name == "safle" else methods.find(name)()
    heads = []
    for std in (0.0, 30.0, 300.0):
        total = dataclasses.replace(exact, std=std)
        head = method.embeddings(total)[0] if name == "safle" else method.head(total)[:, :-1]
        heads.append(float(head.norm()))
    assert heads[0] > 1.02 * heads[1] > 1.02**2 * heads[2]

"""Heads: the solver against unrelated ones, the claimed sensitivity against a search, the noise against its scale."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import looks_like
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import one_hot

from fedstill.base.seeds import Simulated, stream
from fedstill.privacy import solver
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.logistic import (
    LEAST_PENALTY,
    BinaryHead,
    LogisticHead,
    PublishedBinaryHead,
    PublishedLogisticHead,
    extend,
    logits,
)
from fedstill.privacy.mechanisms import ROUNDING
from fedstill.privacy.releases import Gaussian, Unbounded
from fedstill.privacy.solver import RESIDUAL, NotConverged, solve, solve_binary


def gradient(x: Tensor, labels: Tensor, beta: Tensor, penalty: float) -> Tensor:
    """Of the objective at ``beta``, by automatic differentiation."""
    beta = beta.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ beta.T, labels, reduction="sum") if len(x) else 0.0
    (found,) = torch.autograd.grad(loss + penalty / 2 * beta.square().sum(), beta)
    return found


def newton(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    """The minimiser by damped Newton steps with the whole Hessian: small problems only."""
    beta = torch.zeros(classes, x.shape[1], dtype=torch.float64)

    def objective(b: Tensor) -> float:
        losses = -(x @ b.T).log_softmax(1).gather(1, labels[:, None])
        return float(losses.sum() + penalty / 2 * b.square().sum())

    for _ in range(100):
        p = (x @ beta.T).softmax(1)
        g = (p - one_hot(labels, classes)).T @ x + penalty * beta
        if float(g.norm()) < 1e-11:
            break
        inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        h = torch.einsum("nij,na,nb->iajb", inner, x, x).reshape(beta.numel(), -1)
        step = -torch.linalg.solve(h + penalty * torch.eye(len(h)), g.flatten()).view_as(beta)
        t = 1.0
        # 1e-9: rounding of the objective, which is at most some thousands
        while objective(beta + t * step) > objective(beta) + 1e-4 * t * float((g * step).sum()) + 1e-9:
            t /= 2
        beta = beta + t * step
    return beta


def data(n: int, d: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated rows of length at most 1, and their labels."""
    rng = stream(seed, "data", n, d, classes)
    labels = torch.randint(classes, (n,), generator=rng)
    means = torch.randn(classes, d, generator=rng)
    rows = torch.relu(means[labels] + torch.randn(n, d, generator=rng)) * torch.arange(1, d + 1) ** -0.5
    return extend(rows, max(1.0, math.sqrt(d) / 4), 0.1), labels


# --- the solver


@pytest.mark.parametrize("penalty", [0.25, 25.0])
def test_agrees_with_scikit_learn(penalty: float) -> None:
    x, labels = data(600, 80, 7)
    options = {"C": 1 / penalty, "fit_intercept": False, "solver": "newton-cholesky", "tol": 1e-12, "max_iter": 1000}
    theirs = torch.from_numpy(LogisticRegression(**options).fit(x.numpy(), labels.numpy()).coef_)
    assert (solve(x, labels, 7, penalty) - theirs).norm() < 1e-7
    two = LogisticRegression(**options).fit(x.numpy(), labels.numpy() > 2)
    assert (solve_binary(x, labels > 2, penalty) - torch.from_numpy(two.coef_[0])).norm() < 1e-7


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    d=st.integers(1, 40),
    classes=st.integers(2, 6),
    exponent=st.floats(-2, 4),
    copies=st.integers(1, 3),
    one_class=st.booleans(),
)
def test_any_shape_reaches_the_tolerance(
    n: int, d: int, classes: int, exponent: float, copies: int, one_class: bool
) -> None:
    x, labels = data(n, d, classes)
    x, labels = x.repeat(copies, 1), labels.repeat(copies) * (not one_class)
    penalty = 10**exponent
    beta = solve(x, labels, classes, penalty)
    # 1e-11: rounding of sums of 180 rows, and of a penalty of 1e4 by coefficients
    assert gradient(x, labels, beta, penalty).norm() <= 1e-9 + 1e-11
    if d <= 8:
        # both are within 1e-9 / penalty
        assert (beta - newton(x, labels, classes, penalty)).norm() <= 2.1e-9 / penalty + 1e-12


@pytest.mark.parametrize("d", [*range(33, 41), 64])
def test_a_single_record_reaches_the_tolerance(d: int) -> None:
    x, labels = data(1, d, 3)  # LAPACK's eigh of the rank-1 matrix of a preconditioner was NaN or failed
    assert gradient(x, labels, solve(x, labels, 3, 1.0), 1.0).norm() <= 1e-9 + 1e-11


def test_eigenvalues_are_found_where_lapack_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.randn(1, 36, generator=stream(0, "row"))
    matrix = row.T @ row
    expected = float(row.square().sum())

    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = solver.eigen(matrix)
    assert values.dtype == torch.float32 and float(values.max()) == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(vectors @ torch.diag(values) @ vectors.T, matrix, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "classes"), [(2000, 60, 100), (30, 600, 10), (1, 1, 2), (5000, 3, 2)])
@pytest.mark.parametrize("penalty", [1e-2, 1.0, 1e4])
def test_extreme_shapes_and_penalties_reach_the_tolerance(n: int, d: int, classes: int, penalty: float) -> None:
    x, labels = data(n, d, classes)
    assert gradient(x, labels, solve(x, labels, classes, penalty), penalty).norm() <= 1e-9 + 2e-11


def test_two_classes_are_the_binary_problem_at_half_the_penalty() -> None:
    x, labels = data(200, 30, 2)
    two, one = solve(x, labels, 2, 2.0), solve_binary(x, labels, 1.0)
    assert torch.allclose(two[1] - two[0], one, rtol=0, atol=1e-8) and two.sum(0).norm() < 1e-8
    p = torch.sigmoid(x @ one)
    assert ((p - labels.double()) @ x + one).norm() <= 1e-9 + 1e-11  # the one-vector gradient


def test_no_records_and_one_class_have_their_known_solutions() -> None:
    assert not solve(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), 3, 1.0).any()
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    beta = solve(x, torch.tensor([1]), 3, 0.5)
    # by symmetry (-v, 2v, -v) in the first feature, where .5 * 2v = 1 - p
    v = float(beta[1, 0]) / 2
    assert torch.allclose(beta, torch.tensor([[-v, 0.0], [2 * v, 0.0], [-v, 0.0]], dtype=torch.float64), atol=1e-8)
    assert abs(v - (1 - math.exp(2 * v) / (math.exp(2 * v) + 2 * math.exp(-v)))) < 1e-8


def hostile(n: int, d: int, decades: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of length 1 whose columns fall over ``decades``, and labels that a plane almost separates."""
    rng = stream(seed, "hostile")
    scales = torch.logspace(0, -decades, d, dtype=torch.float64)
    x = torch.randn(n, d, dtype=torch.float64, generator=rng).sign() * scales
    x = x / x.norm(dim=1, keepdim=True)
    labels = (x @ torch.randn(d, dtype=torch.float64, generator=rng) > 0).long()
    labels[:3] = 1 - labels[:3]
    return x, labels


@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("decades", [0.0, 3.0, 6.0])
def test_a_head_ends_within_its_residual_after_any_number_of_steps(
    steps: int, decades: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second search begins where the first one stops, and ends whatever the records are."""
    monkeypatch.setattr(solver, "STEPS", steps)
    x, labels = hostile(400, 24, decades)
    for rows in (slice(None), slice(1, None), slice(0, 0), slice(0, 1)):
        beta = solve(x[rows], labels[rows], 2, LEAST_PENALTY, limit=RESIDUAL)
        assert gradient(x[rows], labels[rows], beta, LEAST_PENALTY).norm() <= RESIDUAL * (1 + 1e-9)
    exact = newton(x, labels, 2, LEAST_PENALTY)
    assert (solve(x, labels, 2, LEAST_PENALTY, limit=RESIDUAL) - exact).norm() <= RESIDUAL / LEAST_PENALTY + 1e-9
    head = LogisticHead(num_classes=2, penalty=LEAST_PENALTY, radius=1.0, noise_multiplier=1.0)
    assert head((x[:, :-1], labels), Simulated(stream(0, "noise"))).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_head_ends_at_the_size_of_a_site(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 records over three decades, from where the first search is far above its tolerance."""
    monkeypatch.setattr(solver, "STEPS", 100)
    x, labels = hostile(4_000, 96, 3.0)
    beta = solve(x[first:], labels[first:], 2, LEAST_PENALTY, limit=RESIDUAL)
    assert gradient(x[first:], labels[first:], beta, LEAST_PENALTY).norm() <= RESIDUAL * (1 + 1e-9)


def steps_of(monkeypatch: pytest.MonkeyPatch, x: Tensor, labels: Tensor, penalty: float) -> int:
    """The steps of a head's search."""
    steps, search = [0], solver.line_search

    def counted(*given: Any) -> tuple[float, Tensor]:
        steps[0] += 1
        return search(*given)

    with monkeypatch.context() as patch:
        patch.setattr(solver, "line_search", counted)
        solve(x, labels, 2, penalty, limit=RESIDUAL)
    return steps[0]


def test_a_wide_spectrum_makes_no_search_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """569 steps with 32 directions of the preconditioner, 136 with all from the 128th step on."""
    x, labels = hostile(4_000, 192, 3.0)
    assert 128 < steps_of(monkeypatch, x, labels, LEAST_PENALTY) <= 200


def test_no_record_makes_a_search_long_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """60,000 rows of two kinds, for which rounding leaves more than 1e-9: with a record 4 steps, without it 2,000."""
    x = torch.zeros(60_000, 5, dtype=torch.float64)
    labels = (torch.arange(60_000) < 30_000).long()
    x[:, 0], x[:, -1] = (1 - 2 * labels.double()) * 7.3e-5 * math.sqrt(0.99), 0.1
    assert all(steps_of(monkeypatch, x[start:], labels[start:], 0.2) <= 8 for start in range(6))


def test_many_records_have_the_gradient_of_their_blocks() -> None:
    x, labels = data(2**16 + 5000, 3, 4)
    p = torch.randn(4, len(x), generator=stream(0, "p"), dtype=torch.float64).softmax(0)
    expected = (p - one_hot(labels, 4).T) @ x
    assert torch.allclose(solver.loss_gradient(p, labels, x), expected, rtol=0, atol=1e-8)
    assert torch.equal(
        solver.loss_gradient(p[:, :99], labels[:99], x[:99]), (p - one_hot(labels, 4).T)[:, :99] @ x[:99]
    )


def test_a_search_ends_without_any_eigenvalue_routine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tensor) -> None:
        raise RuntimeError("the algorithm failed to converge")

    x, labels = hostile(400, 40, 1.0)
    for name in ("eigh", "svd"):
        monkeypatch.setattr(torch.linalg, name, fails)
    beta = solve(x, labels, 2, 1.0, limit=RESIDUAL)
    assert gradient(x, labels, beta, 1.0).norm() <= RESIDUAL


def test_the_sensitivity_includes_the_residual_that_no_record_can_exceed() -> None:
    head = LogisticHead(num_classes=2, penalty=2.0, radius=1.0, noise_multiplier=1.0, tolerance=1e-9)
    assert head.residual == RESIDUAL and head.sensitivity >= (math.sqrt(2) + 2 * RESIDUAL) / 2.0
    assert head.sensitivity == pytest.approx((math.sqrt(2) + 2 * RESIDUAL) / 2.0, rel=1e-6)


@pytest.mark.slow
def test_below_the_least_penalty_one_record_decides_whether_the_solver_ends() -> None:
    """Why heads have a least penalty: a failure would be a release without noise."""

    def told(penalty: float, seed: int) -> bool:
        rng = stream(seed, "separable but for one")
        x = torch.randn(60, 10, dtype=torch.float64, generator=rng)
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1)
        labels = (x @ torch.randn(10, 10, dtype=torch.float64, generator=rng)).argmax(1)
        labels[0] = (labels[0] + 1) % 10
        return ends(x, labels, penalty) != ends(x[1:], labels[1:], penalty)

    def ends(x: Tensor, labels: Tensor, penalty: float) -> bool:
        try:
            solve(x, labels, 10, penalty)
        except NotConverged:
            return False
        return True

    assert any(told(1e-9, seed) for seed in range(12))
    assert not any(told(LEAST_PENALTY, seed) for seed in range(12))


def test_a_tolerance_out_of_reach_is_an_error() -> None:
    x, labels = data(300, 20, 4)
    with pytest.raises(NotConverged, match="norm is .* the limit is 1e-30; raise the penalty"):
        solve(x, labels, 4, 1.0, tolerance=1e-30)
    with pytest.raises(NotConverged, match="norm is nan"):
        solve(x * math.nan, labels, 4, 1.0)
    with pytest.raises(ValueError, match="0 to 3; with 2 classes"):
        solve(x, labels, 2, 1.0)


# --- "number 2": no neighbouring pair moves a head further than claimed

RADIUS, BIAS = 2.0, 0.1
Release = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """Records, the last of which the neighbour lacks."""

    h: Tensor
    labels: Tensor

    def moved(self, release: Release) -> float:
        return float((release(self.h, self.labels) - release(self.h[:-1], self.labels[:-1])).norm())


def worst_ratio(release_without_noise: Release, claimed: float, pairs: Sequence[Pair]) -> float:
    """The furthest that a pair moves the release, by the claim."""
    return max(distances(release_without_noise, pairs)) / claimed


def distances(release_without_noise: Release, pairs: Sequence[Pair]) -> list[float]:
    """How far each pair moves the release."""
    return [pair.moved(release_without_noise) for pair in pairs]


def candidates(penalty: float, classes: int, count: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Random neighbours and designed ones; the record that differs has label 1, and label 0 always occurs."""
    for i in range(count):
        d = int(rng.integers(1, 5))
        last = rng.normal(size=d)
        last *= RADIUS / np.linalg.norm(last)
        family = i % 5
        if family == 0:  # random
            n = int(rng.integers(1, 12))
            h, labels = rng.normal(size=(n, d)) * RADIUS, rng.integers(classes, size=n)
        elif family == 1:  # one class, and the removed one is the only other
            n = int(rng.integers(1, 30))
            h, labels = rng.normal(size=(n, d)), np.zeros(n, int)
        elif family == 2:  # many records at one point of one class
            n = int(rng.integers(1, 60))
            h, labels = np.tile(last * rng.uniform(0.05, 1), (n, 1)), np.zeros(n, int)
        elif family == 3:  # short rows of two classes that pull along the removed one: far, but with little curvature
            pull, length = rng.uniform(2, 12) * penalty, rng.uniform(0.003, 0.1)
            n = int(np.clip(pull / length / 2, 1, 200))
            h, labels = np.concatenate([np.tile(last, (n, 1)), np.tile(-last, (n, 1))]) * length, np.repeat([0, 1], n)
        else:  # the removed one is far outside the radius
            n = int(rng.integers(1, 12))
            h, labels, last = rng.normal(size=(n, d)), rng.integers(classes, size=n), last * 10 ** rng.uniform(0, 3)
        h, labels = np.concatenate([h, last[None]]), np.append(labels, 1)
        labels[0] = 0
        yield Pair(torch.from_numpy(h), torch.from_numpy(labels))


def climbed(pair: Pair, best: float, release: Release, tries: int, rng: np.random.Generator) -> list[float]:
    """Distances of neighbours of a pair, each step from the ``best`` so far: one row moved, or one record more."""
    seen = []
    for _ in range(tries):
        h, labels = pair.h.clone(), pair.labels.clone()
        row = int(rng.integers(len(h)))
        if rng.uniform() < 0.3 and row < len(h) - 1:
            h, labels = torch.cat([h[row : row + 1], h]), torch.cat([labels[row : row + 1], labels])
        else:
            h[row] += torch.from_numpy(rng.normal(size=h.shape[1]) * 0.3 * (float(h[row].norm()) + 0.01))
        neighbour = Pair(h, labels)
        seen.append(neighbour.moved(release))
        if seen[-1] > best:
            pair, best = neighbour, seen[-1]
    return seen


def searched(release: Release, penalty: float, classes: int, count: int = 200, tries: int = 50) -> list[float]:
    """Distances of ``count`` candidates and of ``tries`` steps up from the best."""
    rng = np.random.default_rng([int(1000 * penalty), classes])
    pairs = list(candidates(penalty, classes, count, rng))
    moved = distances(release, pairs)
    top = int(np.argmax(moved))
    return moved + climbed(pairs[top], moved[top], release, tries, rng)


class Silent:
    """No noise: what a release is without it."""

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    def added(self, exact: Tensor, std: float) -> Tensor:
        return exact

    uniform = gaussian


def class_head(penalty: float, classes: int) -> LogisticHead:
    return LogisticHead(num_classes=classes, penalty=penalty, radius=RADIUS, noise_multiplier=1.0, bias=BIAS)


def binary_head(penalty: float, negatives: Tensor) -> BinaryHead:
    return BinaryHead(negatives=negatives, penalty=penalty, radius=RADIUS, noise_multiplier=1.0, bias=BIAS)


SETTINGS = [(0.01, 2), (0.01, 3), (0.03, 2), (0.1, 2), (0.1, 5), (1.0, 2), (1.0, 3), (30.0, 2)]


@pytest.mark.slow
def test_no_pair_moves_the_class_head_further_than_its_sensitivity() -> None:
    ratios, count = [], 0
    for penalty, classes in SETTINGS:
        head = class_head(penalty, classes)
        release: Release = lambda h, labels, head=head: head((h, labels), Silent())  # noqa: E731
        moved = searched(release, penalty, classes)
        ratios.append(max(moved) / head.sensitivity)
        count += len(moved)
    assert count >= 2000
    assert 0.75 < max(ratios) <= 1, ratios


@pytest.mark.slow
def test_no_pair_moves_the_binary_head_further_than_its_sensitivity() -> None:
    ratios, count = [], 0
    for penalty in (0.01, 0.02, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0):

        def release(h: Tensor, labels: Tensor, penalty: float = penalty) -> Tensor:
            return binary_head(penalty, h[labels == 0])(h[labels == 1], Silent())

        moved = searched(release, penalty, 2)
        ratios.append(max(moved) / binary_head(penalty, torch.zeros(1, 1)).sensitivity)
        count += len(moved)
    assert count >= 2000
    assert 0.75 < max(ratios) <= 1, ratios


def scaled_by_the_repository(h: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """C = 1/lambda, where the claim is of a penalty that is n times as large."""
    return solve(extend(h, RADIUS, BIAS), labels, 2, penalty / len(h))


def free_bias(h: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """A constant feature so large that its coefficient costs next to nothing."""
    x, large = extend(h, RADIUS, BIAS), 1000.0
    x[:, -1] = large
    beta = solve(x, labels, 2, penalty, tolerance=1e-6)  # rounding grows with the features
    return torch.cat([beta[:, :-1], beta[:, -1:] * large], 1)


def own_maximum(h: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Features divided by the data's own longest row."""
    return solve(extend(h, float(h.norm(dim=1).max()), BIAS), labels, 2, penalty)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [scaled_by_the_repository, free_bias, own_maximum])
def test_the_same_check_catches_what_the_publications_do(broken: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    ratios = []
    for penalty in (0.1, 1.0, 30.0):
        head = class_head(penalty, 2)
        pairs = list(candidates(penalty, 2, 100, np.random.default_rng(0)))
        release: Release = lambda h, labels, penalty=penalty: broken(h, labels, penalty)  # noqa: E731
        ratios.append(worst_ratio(release, head.sensitivity, pairs))
        sound: Release = lambda h, labels, head=head: head((h, labels), Silent())  # noqa: E731
        assert worst_ratio(sound, head.sensitivity, pairs) <= 1
    assert max(ratios) > 1, ratios


@pytest.mark.parametrize("scaling", ["paper", "repository"])
def test_the_published_heads_exceed_their_own_claim(scaling: str) -> None:
    """The claim is for replacing one record, which is twice as far as removing one: this is the milder check."""
    lam, n = 0.01, 1000
    h = torch.randn(n, 3, generator=stream(0))
    h /= h.norm(dim=1).max()  # 1 without the outlier: the release is then in the claim's own units
    labels = (h[:, 0] > 0).long()
    h[-1], labels[-1] = torch.tensor([-300.0, 0.0, 0.0]), 1
    pair = Pair(h, labels)

    def classes(h: Tensor, labels: Tensor) -> Tensor:
        head = PublishedLogisticHead(num_classes=2, lam=lam, epsilon=0.5, delta=1e-5, scaling=scaling)
        return head((h, labels), Silent())

    def scores(h: Tensor, labels: Tensor) -> Tensor:
        head = PublishedBinaryHead(negatives=h[labels == 0], lam=lam, epsilon=0.5, delta=1e-5, scaling=scaling)
        return head(h[labels == 1], Silent())

    assert worst_ratio(classes, 2 * math.sqrt(2) / (lam * n), [pair]) > 1
    assert worst_ratio(scores, 2 / (lam * n), [pair]) > 1


# --- noise


@pytest.mark.slow
def test_noise_has_the_claimed_scale_and_shape() -> None:
    h, labels = torch.randn(50, 3, generator=stream(0)), torch.arange(50) % 4
    noise = Simulated(stream(1))
    head = class_head(2.0, 4)
    exact = head((h, labels), Silent())
    draws = torch.stack([head((h, labels), noise) for _ in range(300)]) - exact
    std = math.sqrt(2) / 2.0
    assert looks_like(draws, std) and not looks_like(draws, std * 2 / 3) and not looks_like(draws, std * 3 / 2)
    twice = LogisticHead(num_classes=4, penalty=2.0, radius=RADIUS, noise_multiplier=2.0, bias=BIAS)
    assert looks_like(torch.stack([twice((h, labels), noise) for _ in range(300)]) - exact, 2 * std)
    binary = binary_head(2.0, h[:20])
    draws = torch.stack([binary(h[20:], noise) for _ in range(600)]) - binary(h[20:], Silent())
    assert looks_like(draws, 0.5) and not looks_like(draws, 0.5 * 2 / 3) and not looks_like(draws, 0.5 * 3 / 2)


@pytest.mark.slow
def test_published_noise_is_the_classic_formula_with_the_local_class_count() -> None:
    h, labels = torch.randn(50, 3, generator=stream(0)), torch.arange(50) % 2 * 3
    head = PublishedLogisticHead(num_classes=5, lam=0.01, epsilon=0.5, delta=1e-5, bias=0.0)
    noise, longest = Simulated(stream(2)), float(h.norm(dim=1).max())
    draws = torch.stack([head((h, labels), noise) for _ in range(500)]) - head((h, labels), Silent())
    assert not draws[:, [1, 2, 4]].any()  # absent classes: no noise, which shows them
    # spec: sqrt(8 C ln(1.25/delta)) / (epsilon lambda n), in units of the divided features
    std = math.sqrt(8 * 2 * math.log(1.25e5)) / (0.5 * 0.01 * 50)
    seen = torch.cat([draws[:, [0, 3], :-1] * longest, draws[:, [0, 3], -1:]], -1)
    assert looks_like(seen, std) and not looks_like(seen, std * 2 / 3) and not looks_like(seen, std * 3 / 2)
    one = PublishedLogisticHead(num_classes=5, lam=0.01, epsilon=0.5, delta=1e-5)((h, labels * 0), Silent())
    assert one.shape == (5, 4) and not one.any()  # one class: nothing to learn, and no error


# --- what goes in and what comes out


def test_extended_rows_are_clipped_and_have_the_constant_feature() -> None:
    h = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    x = class_head(1.0, 2).extended(h)
    assert x.dtype == torch.float64 and torch.equal(x[:, 2], torch.full((5,), BIAS, dtype=torch.float64))
    assert torch.allclose(x.norm(dim=1)[:2].square(), torch.tensor([1.0, 0.25 * 0.99 + 0.01], dtype=torch.float64))
    assert not x[2:, :2].any()


def test_logits_are_what_the_head_was_fitted_to() -> None:
    h, labels = torch.randn(80, 3, generator=stream(0)), torch.arange(80) % 2
    h[:, 0] += 6 * labels - 3
    head = class_head(0.1, 2)
    beta = head((h, labels), Silent())
    assert torch.equal(logits(beta, h, RADIUS, BIAS), head.extended(h) @ beta.T)
    assert float((logits(beta, h, RADIUS, BIAS).argmax(1) == labels).double().mean()) > 0.9
    score = binary_head(0.1, h[labels == 0])(h[labels == 1], Silent())
    assert float(((logits(score, h, RADIUS, BIAS) > 0).long() == labels).double().mean()) > 0.9
    # a published head takes the features as they are
    published = PublishedLogisticHead(num_classes=2, lam=0.01, epsilon=0.5, delta=1e-5)((h, labels), Silent())
    longest = float(h.double().norm(dim=1).max())
    expected = extend(h, longest, BIAS) @ solve(extend(h, longest, BIAS), labels, 2, 0.8).T
    assert torch.allclose(logits(published, h, None, BIAS), expected, atol=1e-7)


def test_the_release_is_the_noises_alone() -> None:
    h, labels = torch.randn(30, 3, generator=stream(0)), torch.arange(30) % 3
    head = class_head(1.0, 3)
    first = head((h, labels), Simulated(stream(1)))
    assert torch.equal(first, head((h, labels), Simulated(stream(1))))
    assert not torch.equal(first, head((h, labels), Simulated(stream(2))))


def test_events_and_theorems() -> None:
    head = class_head(25.0, 10)
    assert head.event == Gaussian(noise_multiplier=1.0) and "1.4142 by" not in head.theorem
    assert "lemma 7" in head.theorem and "25-strongly convex" in head.theorem and "0.05657" in head.theorem
    assert (
        head.sensitivity == pytest.approx((math.sqrt(2) + 2 * RESIDUAL) / 25 * ROUNDING, rel=1e-12)
        and head.sensitivity > math.sqrt(2) / 25
    )
    assert "0.04, the sensitivity" in binary_head(25.0, torch.zeros(1, 2)).theorem
    none = LogisticHead(num_classes=2, penalty=1.0, radius=1.0, noise_multiplier=0.0)
    assert isinstance(none.event, Unbounded)
    for scaling, reason in (("paper", "own maximum norm"), ("repository", "lacks its factor n")):
        for published in (
            PublishedLogisticHead(num_classes=2, lam=0.01, epsilon=0.5, delta=1e-5, scaling=scaling),
            PublishedBinaryHead(negatives=torch.zeros(1, 2), lam=0.01, epsilon=0.1, delta=1e-5, scaling=scaling),
        ):
            assert isinstance(published.event, Unbounded) and reason in published.event.reason
            assert (
                published.event.reason in published.theorem and epsilon([published.event], 1e-5, "record") == math.inf
            )
    assert "number of local classes" in PublishedLogisticHead(num_classes=2, lam=1, epsilon=1, delta=0.1).event.reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"penalty": 0.0}, "penalty is 0.0; it must be a positive number"),
        ({"penalty": 1e-9}, "penalty is 1e-09; it must be a positive number, from 0.01 to 1e.20"),
        ({"penalty": math.inf}, "penalty is inf"),
        ({"radius": -1.0}, "radius is -1.0; it must be a positive number"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"bias": 1.0}, r"bias is 1.0; it must lie in \[0, 1\)"),
        ({"bias": math.nan}, "bias is nan"),
        ({"num_classes": 1}, "num_classes is 1; a head needs at least 2"),
    ],
)
def test_constants_out_of_range_are_refused(changed: dict[str, float], message: str) -> None:
    good = {"num_classes": 2, "penalty": 1.0, "radius": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=message):
        LogisticHead(**{**good, **changed})  # type: ignore[arg-type]
    if "num_classes" not in changed:
        del good["num_classes"]
        with pytest.raises(ValueError, match=message):
            BinaryHead(negatives=torch.zeros(1, 2), **{**good, **changed})


@pytest.mark.parametrize("changed", [{"lam": 0.0}, {"epsilon": -1.0}, {"delta": 1.0}, {"scaling": "x"}, {"bias": -0.1}])
def test_published_constants_out_of_range_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changed))} is|scaling 'x'"):
        PublishedLogisticHead(**{"num_classes": 2, "lam": 0.01, "epsilon": 1.0, "delta": 1e-5, **changed})


def test_rows_that_do_not_fit_are_refused() -> None:
    h, labels = torch.zeros(4, 2), torch.tensor([0, 1, 2, 1])
    with pytest.raises(ValueError, match="labels run from 0 to 2; with 2 classes they must lie in 0 to 1"):
        class_head(1.0, 2)((h, labels), Silent())
    with pytest.raises(ValueError, match=r"features \(4, 3\), labels \(3,\)"):
        class_head(1.0, 3)((h, labels[:3]), Silent())
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        class_head(1.0, 3)((h[:, 0], labels), Silent())
    with pytest.raises(ValueError, match=r"rows \(4, 2\) and negatives \(4, 3\)"):
        binary_head(1.0, torch.zeros(4, 3))(h, Silent())
    with pytest.raises(ValueError, match="0 records"):
        PublishedLogisticHead(num_classes=2, lam=1, epsilon=1, delta=0.1)((h[:0], labels[:0]), Silent())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_solves_on_a_gpu() -> None:
    x, labels = data(500, 60, 5)
    beta = solve(x.cuda(), labels.cuda(), 5, 1.0).cpu()
    assert (beta - solve(x, labels, 5, 1.0)).norm() < 3e-9

"""Randomised response: it keeps its epsilon, nothing keeps labels more often, and the sampler is what is written."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, kron
from scipy.stats import chi2
from torch import Tensor

from fedstill.base.seeds import Entropy, Noise, Simulated, numpy_stream, stream
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.randomized_response import RandomizedResponse, RRWithPrior, probabilities, top_k
from fedstill.privacy.releases import Pure

Array = NDArray[np.float64]

COUNT = 10_000
CLASSES = range(2, 9)
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
# every 60th prior is solved as a linear program too; all 60,000 programs with FEDSTILL_SLOW=1, which takes minutes
STEP = 1 if os.environ.get("FEDSTILL_SLOW") else 60
# of float64's 2e-16 in sums of at most 8 terms, divided by e^.1 - 1 in the certificate
ROUNDING = 1e-13


@cache
def priors(classes: int) -> Array:
    """This number of classes' share of the 10,000 priors: flat to very peaked, with exact zeros, with ties."""
    rng = numpy_stream(0, "priors", classes)
    found = []
    for i in range(len(np.array_split(np.arange(COUNT), len(CLASSES))[classes - 2])):
        match i % 8:
            case 6:  # zeros
                row = rng.dirichlet(np.ones(classes)) * (rng.random(classes) < 0.5)
            case 7:  # ties and zeros, among them uniform and one-hot priors
                row = rng.integers(0, 3, classes).astype(np.float64)
            case kind:
                row = rng.dirichlet(np.full(classes, (0.02, 0.1, 0.5, 1.0, 5.0, 100.0)[kind]))
        row[i % classes] += row.sum() == 0
        found.append(row / row.sum())
    return np.stack(found)


def kept(prior: Array, q: Array) -> Array:
    """P[output = label] of each row when the label is drawn from the prior."""
    found: Array = np.einsum("nx,nxx->n", prior, q)
    return found


def distribution(prior: Array, eps: float, k: Tensor | int | None = None) -> Array:
    found: Array = probabilities(torch.from_numpy(prior), eps, k).numpy()
    return found


def mistaken_top_k(prior: Array, eps: float) -> Tensor:
    """The public helper's k: its denominator counts k from 0."""
    sums = np.sort(prior, axis=1)[:, ::-1].cumsum(1)
    return torch.from_numpy((sums / (1 + (np.arange(prior.shape[1]) - 1) * math.exp(-eps))).argmax(1) + 1)


def upper_bound(prior: Array, eps: float, guess: Array) -> Array:
    """A number that P[output = label] of no eps-DP randomiser exceeds, whatever ``guess`` is; a proof, not a search.

    With a = e^eps and any v >= 0 with sum N: eps-DP gives q[x, t] >= q[t, t] / a, so
    sum_x v_x q[x, t] >= (v_t + (N - v_t) / a) q[t, t]. Where the bracket is at least p_t - d_t, summing over t gives
    sum_t p_t q[t, t] <= N + sum_t d_t. Here v_t = max(0, (a p_t - guess) / (a - 1)), the solution of the dual program
    for which all d_t are 0 if the guess is the optimum.
    """
    a = math.exp(eps)
    v = np.maximum(0, (a * prior - guess[:, None]) / (a - 1))
    total = v.sum(1, keepdims=True)
    missing = np.maximum(0, prior - v - (total - v) / a)
    found: Array = total[:, 0] + missing.sum(1)
    return found


@cache
def constraints(classes: int, eps: float) -> tuple[csr_array, csr_array]:
    """``q[x, t] - e^eps q[z, t]`` for all x, z, t, and the sums of the rows of q."""
    pairs = itertools.permutations(range(classes), 2)
    row, column, value = [], [], []
    for i, ((x, z), t) in enumerate(itertools.product(pairs, range(classes))):
        row += [i, i]
        column += [x * classes + t, z * classes + t]
        value += [1.0, -math.exp(eps)]
    sums = kron(eye_array(classes), np.ones((1, classes)))
    return csr_array((value, (row, column))), csr_array(sums)


def linear_program(prior: Array, eps: float) -> float:
    """The largest P[output = label] of all eps-DP randomisers of one prior."""
    upper, equal = constraints(len(prior), eps)
    found = linprog(
        -np.diag(prior).ravel(),
        A_ub=upper,
        b_ub=np.zeros(upper.shape[0]),
        A_eq=equal,
        b_eq=np.ones(len(prior)),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0, found.message
    return -float(found.fun)


def gaps(classes: int, step: int) -> Array:
    """Linear program's optimum less RRWithPrior's P[output = label], for each ``step``-th prior and each epsilon."""
    some = priors(classes)[::step]
    found = [
        [
            linear_program(prior, eps) - value
            for prior, value in zip(some, kept(some, distribution(some, eps)), strict=True)
        ]
        for eps in EPSILONS
    ]
    return np.array(found)


def test_there_are_10000_priors_with_zeros_ties_and_peaks() -> None:
    rows = [row for classes in CLASSES for row in priors(classes)]
    assert len(rows) == COUNT
    assert sum(row.min() == 0 for row in rows) > 1000 and sum(row.max() > 1 - 1e-9 for row in rows) > 500
    assert sum(len(set(row[row > 0])) < (row > 0).sum() for row in rows) > 800


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("classes", CLASSES)
def test_every_output_is_within_e_to_the_epsilon_between_all_pairs_of_labels(classes: int, eps: float) -> None:
    q = distribution(priors(classes), eps)
    assert np.abs(q.sum(2) - 1).max() < ROUNDING
    assert (q[:, :, None] <= math.exp(eps) * (1 + 1e-9) * q[:, None]).all()
    # and no smaller epsilon would do where the output depends on the label: the check can fail
    random = top_k(torch.from_numpy(priors(classes)), eps).numpy() > 1
    assert random.any() and not (q[random, :, None] <= math.exp(0.999 * eps) * q[random, None]).all((1, 2, 3)).any()


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("classes", CLASSES)
def test_no_private_randomiser_keeps_more_labels_by_certificate(classes: int, eps: float) -> None:
    prior = priors(classes)
    value = kept(prior, distribution(prior, eps))
    assert np.abs(upper_bound(prior, eps, value) - value).max() < ROUNDING


@pytest.mark.parametrize(("eps", "loss"), [(0.5, 0.02), (1.0, 0.01)])
def test_the_certificate_tells_the_mistaken_k_apart(eps: float, loss: float) -> None:
    prior = priors(8)
    value = kept(prior, distribution(prior, eps, mistaken_top_k(prior, eps)))
    missed = kept(prior, distribution(prior, eps)) - value
    assert missed.min() > -ROUNDING and missed.max() > loss
    # where labels are lost, no certificate exists: the bound stays above the mistaken value by what is lost at least
    assert (upper_bound(prior, eps, value) - value > missed - ROUNDING).all()


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASSES)
def test_no_private_randomiser_keeps_more_labels_by_linear_program(classes: int) -> None:
    # the solver's tolerance is 1e-10 for each constraint
    assert np.abs(gaps(classes, STEP)).max() < 1e-8


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("classes", [1, 2, 3, 7, 10, 100, 1000])
def test_a_uniform_prior_means_plain_randomised_response(classes: int, eps: float) -> None:
    for dtype in (torch.float32, torch.float64):
        prior = torch.full((1, classes), 1 / classes, dtype=dtype)
        assert top_k(prior, eps).tolist() == [classes]
        q = probabilities(prior, eps)[0]
        other = 1 / (math.exp(eps) + classes - 1)
        plain = torch.full((classes, classes), other, dtype=torch.float64).fill_diagonal_(math.exp(eps) * other)
        torch.testing.assert_close(q, plain, rtol=1e-12, atol=0)


def test_the_mistaken_formula_fails_on_a_uniform_prior() -> None:
    for eps in (0.01, 0.1, 0.5):
        assert mistaken_top_k(np.full((1, 10), 0.1), eps).tolist() == [1]


@pytest.mark.parametrize("eps", [0.01, *EPSILONS, 20.0])
@pytest.mark.parametrize("classes", [1, 2, 3, 5, 8])
def test_k_is_the_best_of_all_sets_of_classes(classes: int, eps: float) -> None:
    some = priors(classes)[3::100] if classes > 1 else np.ones((1, 1))
    for row, k in zip(some, top_k(torch.from_numpy(some), eps).tolist(), strict=True):
        value = {
            subset: math.exp(eps) / (math.exp(eps) + len(subset) - 1) * math.fsum(row[list(subset)])
            for size in range(1, classes + 1)
            for subset in itertools.combinations(range(classes), size)
        }
        best = max(value.values())
        assert k == max(len(subset) for subset, w in value.items() if w >= best * (1 - 1e-12))


# ---- the sampler

PRIOR = [
    [0.05, 0.40, 0.05, 0.30, 0.20],
    [0.20, 0.20, 0.20, 0.20, 0.20],
    [0.30, 0.00, 0.30, 0.10, 0.30],
    [0.01, 0.02, 0.90, 0.03, 0.04],
]
DRAWS = 200_000


def sample(build: Callable[[Tensor], Mechanism[Tensor, Tensor]], prior: Tensor, noise: Noise) -> Array:
    """How often each output came, by row of the prior and by label: ``(rows, classes, classes)``."""
    rows, classes = prior.shape
    index = torch.arange(DRAWS)
    row, label = index % rows, index // rows % classes
    output = build(prior[row])(label, noise)
    found: Array = torch.bincount((row * classes + label) * classes + output, minlength=rows * classes**2).numpy()
    return found.reshape(rows, classes, classes)


def p_value(counts: Array, q: Array) -> float:
    """Pearson's chi-square of counts with known totals of ``(rows, label)``; 0 for an output that can't be."""
    expected = counts.sum(2, keepdims=True) * q
    if (counts[q == 0] > 0).any():
        return 0.0
    used = expected > 0
    assert expected[used].min() > 5, "too few draws for the chi-square approximation"
    free = used.sum() - (used.sum(2) > 0).sum()
    return float(chi2.sf(((counts - expected)[used] ** 2 / expected[used]).sum(), free)) if free else 1.0


def mechanism(name: str, eps: float) -> Callable[[Tensor], Mechanism[Tensor, Tensor]]:
    if name == "RandomizedResponse":
        return lambda prior: RandomizedResponse(prior.shape[1], eps)
    if name == "RRWithPrior":
        return lambda prior: RRWithPrior(eps, prior)
    return lambda prior: RRWithPrior(eps, prior, int(name.removeprefix("RRTopK ")))


def size(name: str, prior: Tensor, eps: float) -> Tensor:
    if name == "RRWithPrior":
        return top_k(prior, eps)
    return torch.full((len(prior),), 5 if name == "RandomizedResponse" else int(name.removeprefix("RRTopK ")))


NAMES = ("RandomizedResponse", "RRTopK 2", "RRTopK 3", "RRTopK 5", "RRWithPrior")


@pytest.mark.slow
@pytest.mark.parametrize("eps", [0.5, 1.0, 2.0, 4.0, 5.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_sampler_draws_from_the_written_distribution(name: str, eps: float) -> None:
    prior = torch.tensor(PRIOR)
    counts = sample(mechanism(name, eps), prior, Simulated(stream(7, "draws", name, int(10 * eps))))
    k = size(name, prior, eps)
    assert k.max() > 1
    assert p_value(counts, probabilities(prior, eps, k).numpy()) > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert p_value(counts, probabilities(prior, wrong * eps, k).numpy()) < 1e-9


def test_the_sampler_draws_from_the_written_distribution_with_entropy() -> None:
    prior = torch.tensor(PRIOR)
    counts = sample(mechanism("RRWithPrior", 1.0), prior, Entropy())
    k = top_k(prior, 1.0)
    # fails once in a million runs; the wrong epsilons miss by far more than chance can make up for
    assert p_value(counts, probabilities(prior, 1.0).numpy()) > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert p_value(counts, probabilities(prior, wrong, k).numpy()) < 1e-9


def test_rows_have_their_own_k() -> None:
    assert top_k(torch.tensor(PRIOR), 1.0).tolist() == [3, 5, 3, 1]


class Fixed:
    """Noise whose two draws are chosen."""

    def __init__(self, first: Sequence[float], second: Sequence[float]) -> None:
        self.grid = torch.tensor(list(itertools.product(first, second)), dtype=torch.float64).T

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        raise AssertionError("labels need no Gaussian noise")

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """All pairs, and no label can have asked for more of them."""
        assert tuple(shape) == tuple(self.grid.shape)
        return self.grid


@pytest.mark.parametrize("eps", [1e-300, 1e-9, 0.01, 1.0, 8.0, 20.0, 36.0, 40.0, 300.0, 700.0, 800.0, 1e300])
@pytest.mark.parametrize("k", [1, 2, 3, 7, 8])
def test_rounding_makes_no_output_possible_for_some_labels_only(eps: float, k: int) -> None:
    classes, least, most = 8, 2.0**-53, 1 - 2.0**-53
    prior = torch.tensor([[1.0, 5e-324, 0.5, 1e-30, 0.5, 1.0, 0.25, 1e-8]], dtype=torch.float64)
    q = probabilities(prior, eps, k)[0]
    changed = float(1 - q.diagonal().max()) if k > 1 else 0.5
    first = (0.0, least, most, *(min(max(changed + i * least, 0.0), most) for i in (-2, -1, 0, 1, 2)), 0.5)
    second = (0.0, least, most, *(min(i / 56 + j * least, most) for i in range(1, 56) for j in (-1, 0, 1)))
    noise = Fixed(first, second)
    count = noise.grid.shape[1]
    for label in range(classes):
        output = RRWithPrior(eps, prior.expand(count, -1), k)(torch.full((count,), label), noise)
        assert set(output.tolist()) == set(torch.nonzero(q[label]).flatten().tolist())
    possible = q > 0
    assert bool((possible == possible[0]).all()) and int(possible[0].sum()) == k
    # the first draw's grid changes a label at least as often as written
    plain = RRWithPrior(eps, prior.expand(count, -1), k)(torch.zeros(count, dtype=torch.int64), noise)
    assert bool((plain[noise.grid[0] == 0] != 0).all()) == (k > 1)


@pytest.mark.parametrize("eps", [20.0, 100.0, 700.0, 1e4])
def test_large_epsilons_neither_overflow_nor_reach_zero(eps: float) -> None:
    q = probabilities(torch.tensor([[0.5, 0.3, 0.2]]), eps, 3)[0]
    assert bool(torch.isfinite(q).all()) and float(q.min()) > 0
    assert float((q.amax(0) / q.amin(0)).log().max()) <= eps * (1 + 1e-9)


def test_randomness_is_the_noise_and_nothing_else() -> None:
    prior = torch.tensor(PRIOR).repeat(100, 1)
    labels = torch.arange(400) % 5
    before = torch.get_rng_state()
    first = RRWithPrior(1.0, prior)(labels, Simulated(stream(1)))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(first, RRWithPrior(1.0, prior)(labels, Simulated(stream(1))))
    assert not torch.equal(first, RRWithPrior(1.0, prior)(labels, Simulated(stream(2))))


# ---- facts


@pytest.mark.parametrize(("eps", "keep"), [(1, 0.232), (2, 0.451), (4, 0.858), (5, 0.943), (8, 0.997)])
def test_ten_classes_are_kept_as_often_as_published(eps: float, keep: float) -> None:
    # three digits are given
    assert float(probabilities(torch.full((1, 10), 0.1), eps)[0, 3, 3]) == pytest.approx(keep, abs=5e-4)


def test_k_of_one_gives_the_prior_s_likeliest_class() -> None:
    prior = torch.tensor(PRIOR)[[0, 0, 3, 3, 2, 2]]
    labels = torch.tensor([0, 1, 2, 4, 1, 4])
    assert RRWithPrior(1.0, prior, 1)(labels, Entropy()).tolist() == [1, 1, 2, 2, 0, 0]
    peaked = torch.tensor([[0.98, 0.01, 0.01]]).expand(3, -1)
    assert RRWithPrior(1.0, peaked)(torch.arange(3), Entropy()).tolist() == [0, 0, 0]


def test_ties_are_broken_without_the_label() -> None:
    prior = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    # all classes but the smallest tie for two places: classes 1 and 2 get them, whatever the label
    assert (probabilities(prior, 1.0, 2)[0] > 0).all(0).tolist() == [False, True, True, False]
    assert ((probabilities(prior, 1.0, 2)[0] > 0).sum(1) == 2).all()
    # many, where a sort may go another way
    assert set(RRWithPrior(1.0, torch.ones(50, 3000), 3)(torch.arange(50), Simulated(stream(4))).tolist()) == {0, 1, 2}
    labels = torch.arange(4).repeat(500)
    output = RRWithPrior(1.0, prior.expand(2000, -1), 2)(labels, Simulated(stream(3)))
    for label in range(4):
        assert set(output[labels == label].tolist()) == {1, 2}


def test_of_equally_good_k_the_largest_is_taken() -> None:
    # w_1 = w_2 exactly: p_2 = p_1 e^-eps
    a = math.exp(-1.0)
    prior = torch.tensor([[1.0, a, 0.0], [a, 1.0, 0.0]], dtype=torch.float64)
    assert top_k(prior, 1.0).tolist() == [2, 2]
    assert top_k(prior * 3, 1.001).tolist() == [2, 2] and top_k(prior * 3, 0.999).tolist() == [1, 1]


def test_priors_are_normalised_whatever_their_scale_and_type() -> None:
    prior = torch.tensor(PRIOR, dtype=torch.float64)
    for scale in (5e-300, 1e-3, 1e300):
        torch.testing.assert_close(probabilities(prior * scale, 1.0), probabilities(prior, 1.0), rtol=1e-12, atol=0)
    # the sum is beyond float64
    assert top_k(torch.tensor([[1.5e308, 5e307]], dtype=torch.float64), 1.0).tolist() == [1]
    assert top_k(prior.half(), 1.0).tolist() == top_k(prior, 1.0).tolist()


@pytest.mark.parametrize(
    "found",
    [RandomizedResponse(10, 1.5), RRWithPrior(1.5, torch.tensor(PRIOR), 2), RRWithPrior(1.5, torch.tensor(PRIOR))],
)
def test_a_release_costs_its_epsilon_and_says_why(found: Mechanism[Tensor, Tensor]) -> None:
    assert found.unit == "label" and found.event == Pure(epsilon=1.5)
    assert epsilon([found.event], 1e-5, found.unit) == 1.5
    for words in ("one record's label", "1.5-DP", "arXiv:2102.06062", "lemma 1", "parallel composition"):
        assert words in found.theorem
    assert "tensor" not in found.theorem + repr(found) + found.event.model_dump_json()


def test_no_records_give_no_labels() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for noise in (Entropy(), Simulated(stream(0))):
        assert RandomizedResponse(3, 1.0)(none, noise).shape == (0,)
        assert RRWithPrior(1.0, torch.empty(0, 3))(none, noise).shape == (0,)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_is_no_positive_number_is_refused(eps: float) -> None:
    prior = torch.tensor(PRIOR)
    for build in (
        lambda: top_k(prior, eps),
        lambda: probabilities(prior, eps),
        lambda: RandomizedResponse(5, eps),
        lambda: RRWithPrior(eps, prior, 2),
        lambda: RRWithPrior(eps, prior),
    ):
        with pytest.raises(ValueError, match=f"epsilon is {eps}; it must be a finite number above 0"):
            build()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0.5, math.nan, 0.5], "record 1 has entries from nan to nan; they must be finite, from 0 and not all 0"),
        ([0.5, math.inf, 0.5], "record 1 has entries from 0.5 to inf"),
        ([0.5, -0.25, 0.5], "record 1 has entries from -0.25 to 0.5"),
        ([0.0, 0.0, 0.0], "record 1 has entries from 0.0 to 0.0"),
    ],
)
def test_a_prior_that_is_no_distribution_is_refused(row: list[float], words: str) -> None:
    prior = torch.tensor([[0.2, 0.3, 0.5], row])
    for build in (
        lambda: top_k(prior, 1.0),
        lambda: probabilities(prior, 1.0, 1),
        lambda: RRWithPrior(1.0, prior, 2),
        lambda: RRWithPrior(1.0, prior),
    ):
        with pytest.raises(ValueError, match=words):
            build()


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 0)])
def test_a_prior_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"priors have shape .*; they must be \(records, classes\)"):
        RRWithPrior(1.0, torch.ones(shape))


@pytest.mark.parametrize(
    "build",
    [lambda p: RandomizedResponse(3, 1.0), lambda p: RRWithPrior(1.0, p, 2), lambda p: RRWithPrior(1.0, p)],
    ids=["RandomizedResponse", "RRTopK", "RRWithPrior"],
)
def test_labels_that_are_no_classes_are_refused(build: Callable[[Tensor], Mechanism[Tensor, Tensor]]) -> None:
    found, noise = build(torch.ones(2, 3)), Simulated(stream(0))
    for label in (3, -1):
        with pytest.raises(ValueError, match=rf"label {label} of record 1 is outside 0\.\.2; count classes from 0"):
            found(torch.tensor([0, label]), noise)
    with pytest.raises(ValueError, match="labels are torch.float32; they must be torch.int64"):
        found(torch.tensor([0.0, 1.0]), noise)
    with pytest.raises(ValueError, match=r"labels have shape \(2, 1\); they must have shape \(2,\)"):
        found(torch.zeros(2, 1, dtype=torch.int64), noise)


def test_one_label_for_each_row_of_the_prior() -> None:
    for found in (RRWithPrior(1.0, torch.ones(2, 3), 2), RRWithPrior(1.0, torch.ones(2, 3))):
        with pytest.raises(ValueError, match=r"labels have shape \(3,\); they must have shape \(2,\): one label for"):
            found(torch.tensor([0, 1, 2]), Simulated(stream(0)))


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_outside_the_classes_is_refused(k: int) -> None:
    for build in (
        lambda: RRWithPrior(1.0, torch.ones(2, 3), k),
        lambda: probabilities(torch.ones(2, 3), 1.0, k),
        lambda: probabilities(torch.ones(2, 3), 1.0, torch.tensor([1, k])),
    ):
        with pytest.raises(ValueError, match=f"k is {k}; it must lie between 1 and the number of classes, 3"):
            build()
    with pytest.raises(ValueError, match="k must be one integer, or one for each row"):
        probabilities(torch.ones(2, 3), 1.0, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="num_classes is 0; it must be at least 1"):
        RandomizedResponse(0, 1.0)

"""The largest movement of each private mechanism's exact value over searched neighbours, by its charged sensitivity.

    python benchmarks/movements.py --json benchmarks/results/movements.json
    python benchmarks/movements.py --quick

Neighbours are random, extreme (the least and the largest numbers, what is not finite, lengths one rounding away from
the radius) and adversarial (records found by hill climbing or by a gradient, data sets made for one record). A sum
moves by what a record adds, so that of n records a neighbour costs one row; a head moves by Newton steps from the
minimiser of all n, with one factorised Hessian. The furthest neighbours of each search are computed in full, twice, by
the mechanism itself. ``outcomes`` counts the pairs whose two computations end alike, by a value or by an error of one
kind. Nothing may be above 1, and the exit code says so. A movement is of the exact value: no noise is drawn.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import record
import torch
from torch import Tensor, nn

from fedstill.base.seeds import Simulated, stream
from fedstill.privacy.column_sums import ColumnSums, ColumnTotals
from fedstill.privacy.dp_sgd import per_record_cross_entropy
from fedstill.privacy.integer_sums import IntegerClassSums, IntegerHead, IntegerMoments, IntegerUpdate
from fedstill.privacy.logistic import BinaryHead, LogisticHead
from fedstill.privacy.mechanisms import ClassSums, ClippedUpdate, Histogram, NoisySum
from fedstill.privacy.per_record import ClippedGradients
from fedstill.privacy.randomized_response import probabilities
from fedstill.privacy.second_moments import Moments, SecondMoments, diagonal_places

Rows = tuple[Tensor, Tensor]
CLASSES = 3


def quiet() -> Simulated:
    """Noise of which mechanisms with a noise multiplier of 0 use nothing."""
    return Simulated(stream(0, "no noise"))


def ended(compute: Callable[[], Any]) -> tuple[Any, str, float]:
    """A result, or None; the word "value" or the kind of the error; and the processor's seconds."""
    start = time.process_time()
    try:
        value, outcome = compute(), "value"
    except Exception as error:
        value, outcome = None, type(error).__name__
    return value, outcome, time.process_time() - start


def largest(lengths: Sequence[float]) -> float:
    """The largest of some lengths; NaN if one is NaN, which counts against the mechanism."""
    return math.nan if any(map(math.isnan, lengths)) else max(lengths)


# --- sums


class Sum(NamedTuple):
    """A mechanism whose exact value is a sum over records, called with features and labels."""

    mechanism: Any
    value: Callable[[Rows], Any]

    def distance(self, some: Any, other: Any) -> float:
        """The distance of two values in the coordinates of the sensitivity."""
        if isinstance(some, ColumnTotals):
            values, squares, counts = (int((a - b).square().sum()) for a, b in zip(some, other, strict=True))
            whole = values + self.mechanism.weight**2 * squares + self.mechanism.weight_of_counts**2 * counts
            return math.sqrt(whole)
        if not isinstance(some, Moments):
            return float((some.double() - other.double()).norm())
        weight = getattr(self.mechanism, "weight_of_first", self.mechanism.weight)
        second = some.second.double() - other.second.double()
        diagonal = second[:, diagonal_places(self.mechanism.dims + 1)]
        squares = 2 * float(second.square().sum()) - float(diagonal.square().sum())
        return math.sqrt(squares + weight**2 * float((some.first.double() - other.first.double()).square().sum()))


def sums(columns: int, radius: float) -> Iterator[tuple[str, Sum]]:
    """Every mechanism that adds up records, for these columns."""
    common: dict[str, Any] = {"radius": radius, "noise_multiplier": 0.0}
    moments = {**common, "num_classes": CLASSES, "dims": columns}
    for name, made in {
        "ClassSums": ClassSums(CLASSES, radius, 0.0),
        "IntegerClassSums": IntegerClassSums(num_classes=CLASSES, **common),
    }.items():
        yield name, Sum(made, lambda rows, made=made: made(rows, quiet()))
    yield "NoisySum", Sum(made := NoisySum(radius, 0.0), lambda rows, made=made: made(rows[0], quiet()))
    for name, each in {
        "SecondMoments": SecondMoments(**moments, share=0.3),
        "IntegerMoments": IntegerMoments(**moments),
        **({} if columns > 512 else {"SecondMoments, by class": SecondMoments(**moments, by_class=True)}),
    }.items():
        yield name, Sum(each, lambda rows, each=each: each([rows], quiet()))
    of_numbers = SecondMoments(**{**moments, "num_classes": 1})
    yield (
        "SecondMoments, numbers",
        Sum(of_numbers, lambda rows: of_numbers([(rows[0], rows[1].double() * 3 - 2)], quiet())),
    )


def records(columns: int, radius: float, count: int, seed: int) -> Iterator[Tensor]:
    """Single rows ``(1, columns)``: extreme ones first, then random ones of many lengths and spectra."""
    rng = stream(seed, "rows", columns)
    one = torch.zeros(1, columns, dtype=torch.float64)
    one[0, 0] = 1
    flat = torch.full((1, columns), 1 / math.sqrt(columns), dtype=torch.float64)
    sizes = [5e-324, 1e-310, 1e-160, 1e-45, 1e38, 1e199, 1e201, 1.7e308, math.inf, math.nan]
    for row in (one, flat):
        yield from (row * size for size in sizes)
        yield from (row * radius * (1 + k * 2.0**-52) for k in range(-4, 5))
    for _ in range(count):
        drawn = torch.randn(1, columns, generator=rng, dtype=torch.float64)
        decades = float(torch.rand(1, generator=rng)) * 6
        drawn *= 10 ** -torch.linspace(0, decades, columns, dtype=torch.float64)
        size = radius * 10 ** float(torch.rand(1, generator=rng) * 8 - 2)
        yield drawn * size
        yield (drawn * size).float()


def climbed(moved: Callable[[Tensor], float], best: Tensor, steps: int, seed: int) -> list[tuple[float, Tensor]]:
    """Rows that begin at ``best``, each a random change of the furthest so far, with how far each moves."""
    rng = stream(seed, "climb")
    tried = [(moved(best), best)]
    top = tried[0]
    for i in range(steps):
        change = torch.randn(best.shape, generator=rng, dtype=torch.float64) * 10.0 ** -(i % 16)
        row = top[1].double() * (1 + change)
        tried.append((moved(row), row))
        top = max(top, tried[-1], key=lambda pair: pair[0])
    return tried[1:]


def of_columns(columns: int, radius: float) -> Iterator[tuple[str, Sum]]:
    """The sums of a table's columns, whose ranges are [-1, 1] whatever the radius is."""
    made = ColumnSums(num_classes=CLASSES, columns=columns, noise_multiplier=0.0)
    yield "ColumnSums", Sum(made, lambda rows: made(rows, quiet()))


TRIES = {1: 1700, 16: 1700, 512: 60, 2048: 12}  # of moments, whose values grow with the square of the columns
TRIES_OF_ROWS = 1100


def search_sums(
    quick: bool, kinds: Callable[[int, float], Iterator[tuple[str, Sum]]] = sums
) -> Iterator[dict[str, Any]]:
    """A row for every sum and number of columns: the largest movement among single records, and within 60,000."""
    for columns in (1, 16, 512) if quick else (1, 16, 512, 2048):
        radius = {1: 1e-20, 16: 3.7, 512: 1.0, 2048: 1e20}[columns]
        many = (4000 if quick else 60_000) if columns <= 512 else 8000
        drawn = torch.randn(many, columns, generator=stream(1, "data"))
        drawn *= 10 ** -torch.linspace(0, 6, columns) * radius / 3
        among = (drawn, torch.randint(0, CLASSES, (many,), generator=stream(1, "labels")))
        for name, each in kinds(columns, radius):
            tries = 10 if quick else TRIES[columns] if "Moments" in name else TRIES_OF_ROWS
            found = search_sum(each, columns, radius, tries)
            within, gap, alike = moved_among(each, among, [row for _, row in found[:6]])
            sensitivity = each.mechanism.sensitivity
            yield {
                "mechanism": name,
                "records": many,
                "columns": columns,
                "neighbours": len(found),
                "largest": largest([each for each, _ in found] + within) / sensitivity,
                "full minus incremental": gap / sensitivity,
                "outcomes": alike,
            }


def search_sum(each: Sum, columns: int, radius: float, tries: int) -> list[tuple[float, Tensor]]:
    """Single records with what each adds to a sum, the furthest first."""
    y = torch.ones(1, dtype=torch.int64)
    empty = each.value((torch.zeros(0, columns, dtype=torch.float64), y[:0]))

    def moved(row: Tensor) -> float:
        return each.distance(each.value((row, y)), empty)

    found = [(moved(row), row) for row in records(columns, radius, tries, seed=0)]
    found += climbed(moved, max(found, key=lambda pair: pair[0])[1], tries, seed=1)
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def moved_among(each: Sum, among: Rows, rows: Sequence[Tensor]) -> tuple[list[float], float, str]:
    """How far each record moves the sum over all others; the largest gap to what it adds; and how many end alike.

    A record stands first, in the middle or last in turn. One that is not finite is among them.
    """
    features, labels = among[0].double(), among[1]
    one, (base, before, _) = torch.ones(1, dtype=torch.int64), ended(lambda: each.value(among))
    empty = each.value((features[:0], labels[:0]))
    far: list[float] = []
    gaps: list[float] = []
    alike = 0
    rows = [*rows, torch.full_like(rows[0].double(), math.nan)]
    for k, row in enumerate(rows):
        at = (0, len(labels) // 2, len(labels))[k % 3]
        x = torch.cat([features[:at], row.double(), features[at:]])
        y = torch.cat([labels[:at], one, labels[at:]])
        full, outcome, _ = ended(lambda x=x, y=y: each.value((x, y)))
        far.append(math.nan if full is None or base is None else each.distance(full, base))
        gaps.append(abs(far[-1] - each.distance(each.value((row, one)), empty)))
        alike += outcome == before
    return far, largest(gaps), f"{alike} of {len(rows)} alike"


def crossing(many: int) -> Tensor:
    """Rows ``(many, 1)`` of length at most 1 whose sequential sum rounds one way with the first, the other without.

    With it, the sum stays above a power of two, where float64 is twice as coarse as below, in which the sum without it
    stays: steps of 0.6 and 0.4 of the coarse spacing round up there, and down below.
    """
    top = 2.0 ** math.floor(math.log2(many * 0.6))
    fine = top * 2.0**-53  # spacing below the power of two
    rise = [1.0] * int(top) + [0.5]  # without the first: half a row below the power
    steps = [(1 / 8 + 1.2 * fine), -(1 / 8 + 0.8 * fine)] * ((many - len(rise)) // 2)
    return torch.tensor(rise + steps, dtype=torch.float64)[:, None]


def search_roundings(quick: bool) -> Iterator[dict[str, Any]]:
    """Data sets made so that roundings of a sum go one way with a record, and the other without it."""
    for many in (2000, 60_000) if quick else (2000, 20_000, 60_000):
        rows = crossing(many)
        for name, each in sums(1, 1.0):
            labels = torch.ones(len(rows), dtype=torch.int64)
            with_it, without = each.value((rows, labels)), each.value((rows[1:], labels[1:]))
            yield {
                "mechanism": f"{name}, roundings",
                "records": many,
                "columns": 1,
                "neighbours": 1,
                "largest": each.distance(with_it, without) / each.mechanism.sensitivity,
                "full minus incremental": None,
                "outcomes": None,
            }


# --- heads


class Problem(NamedTuple):
    """A head of two classes as one logistic regression: rows ``(n, d + 1)``, targets 0 and 1, and its penalty.

    The rows of a class head of two classes are opposite; their difference has half the penalty and sqrt(2) the length.
    """

    x: Tensor
    y: Tensor
    penalty: float
    weights: Tensor
    factor: Tensor

    def gradient(self, at: Tensor) -> Tensor:
        """Gradients ``(d + 1, k)`` at k points; blocks of rows, so that no second matrix of them is needed."""
        total = self.penalty * at
        for x, y in zip(self.x.split(4096), self.y.split(4096), strict=True):
            total = total + x.T @ (torch.sigmoid(x @ at) - y[:, None])
        return total


def problem(x: Tensor, y: Tensor, penalty: float, weights: Tensor) -> Problem:
    """A problem at its minimiser, with the Hessian's Cholesky factor."""
    hessian = penalty * torch.eye(x.shape[1], dtype=torch.float64)
    for some in x.split(4096):
        p = torch.sigmoid(some @ weights)
        hessian += (some.T * (p * (1 - p))) @ some
    return Problem(x, y, penalty, weights, torch.linalg.cholesky(hessian))


def first_order(given: Problem, x: Tensor, y: Tensor, sign: int) -> Tensor:
    """About how far k records ``(k, d + 1)`` move the minimiser if they are added (1) or removed (-1), one each."""
    p = torch.sigmoid(x @ given.weights)
    solved = torch.cholesky_solve(x.T, given.factor)
    curved = 1 + sign * p * (1 - p) * (x.T * solved).sum(0)
    return solved.norm(dim=0) * (p - y).abs() / curved.clamp_min(1e-3)


def moved_by(given: Problem, x: Tensor, y: Tensor, sign: int, limit: float = 1e-7) -> tuple[Tensor, Tensor]:
    """How far each of k records moves the minimiser, and the length of the gradient that is left there.

    Newton's steps with the Hessian of the base, in which the record's own curvature at each point is included.
    """
    at = given.weights[:, None].repeat(1, len(x))
    solved = torch.cholesky_solve(x.T, given.factor)
    lever = (x.T * solved).sum(0)
    best, size = at, torch.full((len(x),), math.inf, dtype=torch.float64)
    share = torch.ones(len(x), dtype=torch.float64)
    for _ in range(80):
        p = torch.sigmoid((x.T * at).sum(0))
        gradient = given.gradient(at) + sign * (p - y) * x.T
        here = gradient.norm(dim=0)
        better = here < size
        best, size = torch.where(better, at, best), torch.where(better, here, size)
        if bool((size <= limit).all()):
            break
        share = torch.where(better, (2 * share).clamp_max(1), share / 4)
        curved = sign * p * (1 - p)
        step = torch.cholesky_solve(gradient, given.factor)
        step = step - solved * (curved * (x.T * step).sum(0) / (1 + curved * lever).clamp_min(1e-3))
        at = torch.where(better, at, best) - share * step
    return (best - given.weights[:, None]).norm(dim=0), size


def spectrum(many: int, columns: int, decades: float) -> Rows:
    """Rows of length 1 whose columns fall over these decades, and classes of a plane, with some wrong."""
    rng = stream(3, "spectrum", many, columns)
    h = torch.randn(many, columns, generator=rng, dtype=torch.float64).sign_()
    h *= 10 ** -torch.linspace(0, decades, columns, dtype=torch.float64)
    h /= h.norm(dim=1, keepdim=True)
    y = (h @ torch.randn(columns, generator=rng, dtype=torch.float64) > 0).to(torch.int64)
    y[: many // 100] = 1 - y[: many // 100]
    return h, y


def pull(many: int, columns: int, penalty: float) -> Rows:
    """Short rows of two classes that move the minimiser far along the first column, with hardly any curvature."""
    far = 1 / penalty + 12
    h = torch.zeros(many, columns, dtype=torch.float64)
    y = torch.arange(many) % 2
    h[:, 0] = (1 - 2 * y.double()) * min(1.0, 2 * penalty * far / many)
    return h, y


def ascended(given: Problem, start: Tensor, y: Tensor, bias: float, steps: int) -> Tensor:
    """Records that move the minimiser further to first order, by gradient ascent on their features."""
    h = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([h], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        (-first_order(given, extended(h, bias), y, 1).sum() * given.penalty).backward()
        optimiser.step()
    return h.detach()


def extended(h: Tensor, bias: float) -> Tensor:
    """Rows as a head of radius 1 makes them."""
    short = h / h.norm(dim=1, keepdim=True).clamp_min(1)
    return torch.cat([short * math.sqrt(1 - bias**2), torch.full((len(h), 1), bias, dtype=torch.float64)], 1)


def head_of(kind: str, penalty: float, bias: float) -> tuple[Any, float, float]:
    """A head without noise, called with features and labels; the penalty of its `Problem`; its unit of movement."""
    common: dict[str, Any] = {"penalty": penalty, "radius": 1.0, "noise_multiplier": 0.0, "bias": bias}
    if kind == "LogisticHead":
        head = LogisticHead(num_classes=2, **common)
        return (lambda h, y: head((h, y), quiet())), penalty / 2, head.sensitivity * math.sqrt(2)

    def release(h: Tensor, y: Tensor) -> Tensor:
        return BinaryHead(**common, negatives=h[y == 0])(h[y == 1], quiet())

    sensitivity: float = BinaryHead(**common, negatives=torch.zeros(1, 1)).sensitivity
    return release, penalty, sensitivity


def starts(given: Problem, h: Tensor, tries: int, both: bool, bias: float) -> tuple[Tensor, Tensor]:
    """Features and targets of records to begin with, and those that a gradient makes of them; ``both`` targets or 1."""
    rng = stream(5, "records")
    start = torch.randn(tries, h.shape[1], generator=rng, dtype=torch.float64)
    start[: tries // 2] = h[torch.randint(0, len(h), (tries // 2,), generator=rng)]  # records like the others
    start[0], start[1] = 0.0, 0.0
    start[0, 0], start[1, 0] = 1.0, -1.0
    label = torch.arange(tries).remainder(2).double() if both else torch.ones(tries).double()
    if both:
        wrong = extended(start[: tries // 4], bias) @ given.weights < 0
        label[: tries // 4] = wrong.double()
    return torch.cat([start, ascended(given, start, label, bias, 25)]), torch.cat([label, label])


def search_head(kind: str, h: Tensor, y: Tensor, penalty: float, tries: int, checks: int) -> dict[str, Any]:
    """The furthest neighbours of one data set, to first order, then by Newton, then by the head itself."""
    both, bias, (release, own, unit) = kind == "LogisticHead", 0.1, head_of(kind, penalty, 0.1)
    base, before, seconds = ended(lambda: release(h, y))
    given = problem(extended(h, bias), y.double(), own, base[1] - base[0] if both else base)
    more, labels = starts(given, h, tries, both, bias)
    added = extended(more, bias)
    keep = first_order(given, added, labels, 1).topk(min(16, len(more))).indices
    moved, left = moved_by(given, added[keep], labels[keep], 1)
    wrong = (torch.sigmoid(given.x @ given.weights) - given.y).abs() * (1.0 if both else given.y)
    some = wrong.topk(min(1000, len(h))).indices
    some = some[first_order(given, given.x[some], given.y[some], -1).topk(16).indices]
    less, left_less = moved_by(given, given.x[some], given.y[some], -1)
    # what is left of a gradient bounds the error: it counts against the mechanism
    ratios = torch.cat([moved + left / own, less + left_less / own]) / unit

    def full(k: int, sign: int) -> tuple[Any, str, float]:
        if sign > 0:
            return ended(lambda: release(torch.cat([h, more[k : k + 1]]), torch.cat([y, labels[k : k + 1].long()])))
        return ended(lambda: release(torch.cat([h[:k], h[k + 1 :]]), torch.cat([y[:k], y[k + 1 :]])))

    best = [(keep[k], 1, moved[k]) for k in moved.topk(checks)[1]]
    best += [(some[k], -1, less[k]) for k in less.topk(checks)[1]]
    checked = [full(int(k), sign) for k, sign, _ in best]
    length = math.sqrt(2) / unit if both else 1 / unit
    whole = [length * float((value - base).norm()) for value, _, _ in checked if value is not None]
    gaps = [abs(one - float(expected) / unit) for one, (*_, expected) in zip(whole, best, strict=False)]
    return {
        "neighbours": len(more) + min(1000, len(h)),
        "by Newton": len(ratios),
        "largest": max([float(ratios.max()), *whole]),
        "full minus incremental": max(gaps, default=math.nan),
        "outcomes": f"{sum(outcome == before for _, outcome, _ in checked)} of {len(checked)} alike ({before})",
        "seconds": [round(seconds, 2), *(round(each[2], 2) for each in checked)],
    }


def search_heads(quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each kind of head, size, spectrum and penalty."""
    sizes: Sequence[tuple[int, int, float]] = [(4000, 64, 3.0), (4000, 64, 6.0), (60_000, 16, 6.0)]
    sizes = (
        sizes if quick else [*sizes, (60_000, 512, 0.0), (60_000, 512, 3.0), (60_000, 512, 6.0), (60_000, 2048, 6.0)]
    )
    for kind in ("LogisticHead", "BinaryHead"):
        for many, columns, decades in sizes:
            large = many * columns > 2**24
            for penalty in ((0.01,) if large else (0.01, 1.0, 30.0)) if not (large and kind == "BinaryHead") else ():
                h, y = spectrum(many, columns, decades)
                found = search_head(kind, h, y, penalty, 64, 1 if large else 3)
                yield _named(kind, many, columns, decades, penalty, found)
        for many, penalty in ((60_000, 0.01), (60_000, 0.1), (60_000, 1.0)):
            release_penalty = head_of(kind, penalty, 0.1)[1]
            found = search_head(kind, *pull(many, 4, release_penalty), penalty, 64, 3)
            yield _named(f"{kind}, pulled", many, 4, None, penalty, found)


def _named(
    kind: str, many: int, columns: int, decades: float | None, penalty: float, found: dict[str, Any]
) -> dict[str, Any]:
    return {
        "mechanism": kind,
        "records": many,
        "columns": columns,
        "decades": decades,
        "penalty": penalty,
        **found,
    }


def search_classes(quick: bool) -> Iterator[dict[str, Any]]:
    """Heads of several classes, by the head itself for every neighbour: few records that pull, and hill climbing."""
    for classes, penalty in ((3, 0.1), (10, 0.1), (10, 1.0)):
        head = LogisticHead(num_classes=classes, penalty=penalty, radius=1.0, noise_multiplier=0.0)
        tries = 10 if quick else 40
        yield search_pulled(f"LogisticHead, {classes} classes", head, head, tries)
        whole = IntegerHead(head=head, features=3, noise_multiplier=0.0)
        yield search_pulled(f"IntegerHead, {classes} classes", whole, head, tries if quick else TRIES_OF_ROWS)


def search_pulled(name: str, mechanism: Any, head: LogisticHead, tries: int) -> dict[str, Any]:
    """The furthest neighbours of rows that pull a head along a column, by the mechanism itself."""
    h, y = pull(4000, 3, head.penalty)
    base = mechanism((h, y), quiet())

    def moved(row: Tensor) -> float:
        neighbour = (torch.cat([h, row]), torch.cat([y, torch.ones(1, dtype=torch.int64)]))
        return float((mechanism(neighbour, quiet()) - base).double().norm())

    rows = [*records(3, 1.0, tries, seed=2), torch.tensor([[1.0, 0, 0]]).double()]
    far = [(moved(row), row) for row in rows]
    far += climbed(moved, max(far, key=lambda pair: pair[0])[1], tries, seed=2)
    return {
        "mechanism": name,
        "records": len(h),
        "columns": 3,
        "penalty": head.penalty,
        "neighbours": len(far),
        "largest": largest([length for length, _ in far]) / mechanism.sensitivity,
        "full minus incremental": None,
        "outcomes": None,
    }


# --- what is no sum of rows


def search_updates() -> Iterator[dict[str, Any]]:
    """Two vectors that differ in everything: the unit of a clipped update is the client."""
    for columns in (1, 16, 2048):
        for name, made in {
            "ClippedUpdate": ClippedUpdate(1.3, 0.0),
            "IntegerUpdate": IntegerUpdate(radius=1.3, noise_multiplier=0.0),
        }.items():
            values = [made(row[0], quiet()).double() for row in records(columns, 1.3, 40, seed=4)]
            values += [made(-row[0], quiet()).double() for row in records(columns, 1.3, 40, seed=4)]
            far = torch.cdist(torch.stack(values), torch.stack(values), compute_mode="donot_use_mm_for_euclid_dist")
            yield {
                "mechanism": name,
                "records": "all of a client",
                "columns": columns,
                "neighbours": len(values) * (len(values) - 1) // 2,
                "largest": float(far.max()) / made.sensitivity,
                "full minus incremental": None,
                "outcomes": None,
            }


def search_labels() -> Iterator[dict[str, Any]]:
    """The largest ratio of the probabilities of an output under two labels, as an epsilon over the charged one."""
    rng = stream(6, "priors")
    for epsilon in (0.01, 1.0, 4.0, 20.0):
        for name, size in (("RandomizedResponse", 10), ("RRWithPrior", None)):
            priors = torch.rand(300, 10, generator=rng, dtype=torch.float64) ** 8 + 1e-12
            logs = probabilities(priors, epsilon, size).log()
            worst = float((logs.amax(1) - logs.amin(1)).nan_to_num(0.0, posinf=0.0).max())
            one_sided = bool((logs.isinf().any(1) & logs.isfinite().any(1)).any())
            yield {
                "mechanism": name,
                "records": "one label",
                "epsilon": epsilon,
                "neighbours": 300 * 90,
                "largest": math.inf if one_sided else (worst - 1e-14) / epsilon,  # logarithms are rounded
                "full minus incremental": None,
                "outcomes": None,
            }
    counts, histogram = torch.randint(0, CLASSES, (60_000,), generator=rng), Histogram(CLASSES, 0.0)
    fewer = [histogram(torch.cat([counts[:k], counts[k + 1 :]]), quiet()) for k in range(10_000)]
    far = largest([float((histogram(counts, quiet()) - each).norm()) for each in fewer])
    yield {
        "mechanism": "Histogram",
        "records": len(counts),
        "neighbours": len(fewer),
        "largest": far / histogram.sensitivity,
        "full minus incremental": None,
        "outcomes": None,
    }


def networks() -> Iterator[tuple[str, nn.Module, tuple[int, ...], int]]:
    """Networks for steps of DP-SGD: a name, the network, the shape of a record and the number of records."""
    from fedstill import models

    torch.manual_seed(0)
    yield "linear", nn.Linear(2048, 10), (2048,), 32_768
    yield "two layers", nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), (64,), 60_000
    yield "convnet:width=8,depth=2", models.build("convnet:width=8,depth=2", (1, 8, 8), 10), (1, 8, 8), 2048


def search_steps(quick: bool) -> Iterator[dict[str, Any]]:
    """Sums of clipped gradients with and without a record, for weights and records of many sizes, at radius 1."""
    for name, network, shape, many in networks():
        many, rng = min(many, 1024) if quick else many, stream(7, name)
        x, y = torch.randn(many, *shape, generator=rng), torch.randint(0, 10, (many,), generator=rng)
        far: list[float] = []
        for scale in (1.0, 1e10, 1e-10):
            with torch.no_grad():
                for p in network.parameters():
                    p.mul_(scale)
            far += [length for length, _ in search_step(network, x[:100], y[:100], 10 if quick else 560, rng)]
            if scale == 1.0:
                far += removed(network, x, y, 1 if quick else 10)
            with torch.no_grad():
                for p in network.parameters():
                    p.div_(scale)
        yield {
            "mechanism": f"DPSGD, {name}",
            "records": many,
            "columns": math.prod(shape),
            "neighbours": len(far),
            "largest": largest(far),
            "full minus incremental": None,
            "outcomes": None,
        }


def clipped_sum(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum of these records' clipped gradients, in one vector."""
    parts, _ = ClippedGradients(network).clipped_sum(x, y, 1.0, per_record_cross_entropy)
    return torch.cat([part.flatten() for part in parts])


def search_step(
    network: nn.Module, x: Tensor, y: Tensor, tries: int, rng: torch.Generator
) -> list[tuple[float, Tensor]]:
    """Records of many sizes and classes, drawn and then climbed, with how far each moves the sum over some others."""
    base = clipped_sum(network, x, y)

    def moved(row: Tensor, label: Tensor) -> float:
        with_it = clipped_sum(network, torch.cat([x, row.float()]), torch.cat([y, label]))
        return float((with_it - base).norm())

    found = []
    sizes = [1e-30, 1.0, 1e3, 1e30, math.inf, math.nan]
    for size in sizes + (10 ** (60 * torch.rand(tries, generator=rng) - 30)).tolist():
        row, label = torch.randn(1, *x.shape[1:], generator=rng) * size, torch.randint(0, 10, (1,), generator=rng)
        found.append((moved(row, label), row, label))
    best = max(found, key=lambda each: each[0])
    return [each[:2] for each in found] + climbed(lambda row: moved(row, best[2]), best[1], tries, seed=8)


def removed(network: nn.Module, x: Tensor, y: Tensor, count: int) -> list[float]:
    """How far the sum over all records moves without one, for records at these many places."""
    base, places = clipped_sum(network, x, y), torch.linspace(0, len(x) - 1, count).long().tolist()
    without = [clipped_sum(network, torch.cat([x[:k], x[k + 1 :]]), torch.cat([y[:k], y[k + 1 :]])) for k in places]
    return [float((base - each).norm()) for each in without]


def main() -> None:
    """Print a row for each search; exit code 1 if one is above 1, or if outcomes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller searches: a minute")
    parser.add_argument("--only", help="searches whose name contains this: sums, roundings, heads, classes, ...")
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    searches: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "sums": lambda: search_sums(args.quick),
        "columns": lambda: search_sums(args.quick, of_columns),
        "roundings": lambda: search_roundings(args.quick),
        "updates": search_updates,
        "labels": search_labels,
        "steps": lambda: search_steps(args.quick),
        "classes": lambda: search_classes(args.quick),
        "heads": lambda: search_heads(args.quick),
    }
    table = []
    for name, search in searches.items():
        for row in search() if args.only is None or args.only in name else ():
            table.append(row)
            words = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("mechanism", "largest"))
            print(f"{row['largest']:.10f}  {row['mechanism']}: {words}", flush=True)
            if args.json:
                record.keep(args.json, table, commit=record.commit())
    bad = [row for row in table if not row["largest"] <= 1 or different(row["outcomes"])]
    print(f"{len(table)} searches, {len(bad)} above 1 or with other outcomes")
    sys.exit(bool(bad))


def different(outcomes: str | None) -> bool:
    """Whether the two numbers of ``"2 of 4 alike (value)"`` differ."""
    return outcomes is not None and len(set(outcomes.split(" alike")[0].split(" of "))) > 1


if __name__ == "__main__":
    main()

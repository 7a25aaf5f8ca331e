"""A precise solver of penalised logistic regression: preconditioned L-BFGS.

The sensitivity of a private head includes the solver's residual, so the residual must be tiny. Iterates are float64;
products with the features are float32 between exact corrections.
"""

import math

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from fedstill.base.errors import FedstillError
from fedstill.base.seeds import stream
from fedstill.privacy.mechanisms import check_positive

RANK, MEMORY, STEPS = 32, 20, 2000  # rank of the preconditioner; number of stored steps; largest number of steps
FULL = 128
"""Number of steps after which a preconditioner of all directions is worth its cost, and after which it is renewed.

It makes a search short whatever the spectrum of the features is: 30,000 records of 512 columns over three decades, at
the least penalty, took more than 2,000 steps with 32 directions, and 60,000 over six decades take about 150."""
RESIDUAL = 1e-6
"""Largest norm of the gradient at a result, whatever the records are (`_descend`), if it is asked for as the limit.

Rounding in float64 moves the gradient of 2^16 records of length 1 by less than 2^-22 even if all roundings go one way,
and that of 2^21 records, which are added in blocks, by less than 2^-20."""


class NotConverged(FedstillError, ValueError):
    """The solver stopped above its tolerance, so no sensitivity holds for its result."""


class _Pairs:
    """The last steps and the changes of the gradient: L-BFGS in its compact form.

    Byrd, Nocedal, Schnabel 1994, equation (2.6), arranged so that the initial inverse Hessian is applied once.
    """

    def __init__(self, like: Tensor) -> None:
        self.steps = like.new_zeros(2 * MEMORY, like.numel())
        self.changes = torch.zeros_like(self.steps)
        self.products = like.new_zeros(2 * MEMORY, 2 * MEMORY)  # steps by changes
        self.end = 0

    def add(self, step: Tensor, change: Tensor) -> None:
        if self.end == 2 * MEMORY:
            for rows in (self.steps, self.changes):
                rows[:MEMORY] = rows[MEMORY:].clone()
            self.products[:MEMORY, :MEMORY] = self.products[MEMORY:, MEMORY:].clone()
            self.end = MEMORY
        self.steps[self.end], self.changes[self.end] = step.flatten(), change.flatten()
        self.end += 1
        self.products[: self.end, self.end - 1] = self.steps[: self.end] @ self.changes[self.end - 1]

    def direction(self, gradient: Tensor, kronecker: "_Kronecker") -> Tensor:
        """Minus the product of the approximate inverse Hessian and the gradient."""
        if not self.end:
            return -kronecker.solve(gradient)
        recent = slice(max(0, self.end - MEMORY), self.end)
        steps, changes, upper = self.steps[recent], self.changes[recent], self.products[recent, recent].triu()
        a = torch.linalg.solve_triangular(upper, (steps @ gradient.flatten())[:, None], upper=True)
        r = kronecker.solve(gradient - (a[:, 0] @ changes).view_as(gradient))
        b = upper.diagonal()[:, None] * a - (changes @ r.flatten())[:, None]
        b = torch.linalg.solve_triangular(upper.T, b, upper=False)
        direction: Tensor = -(r + (b[:, 0] @ steps).view_as(gradient))
        return direction


class _Kronecker:
    """The Hessian ``sum_i (diag p_i - p_i p_i') (x) x_i x_i' + penalty I`` with its sum approximated as in K-FAC.

    The approximation is one Kronecker product: the sum of class matrices times the weighted mean over features. Of the
    latter all eigenvectors are used, or the top ``rank`` (Halko, Martinsson, Tropp 2011, algorithm 4.4 with one pass),
    computed from each ``every``-th row.
    """

    def __init__(
        self,
        x: Float[Tensor, "n d"],
        p: Float64[Tensor, "classes n"],
        penalty: float,
        every: int = 1,
        rank: int | None = RANK,
    ) -> None:
        x = x[::every]
        d = x.shape[1]
        self.penalty = penalty
        weights = (1 - p[:, ::every].square().sum(0)).to(x.dtype)  # traces of the class matrices
        if rank is None:
            values, vectors = eigen((x.T * weights) @ x)
        else:
            if d <= rank:
                q = torch.eye(d, dtype=x.dtype, device=x.device)
            else:
                sketch = torch.randn(rank, d, generator=stream(0, "range finder")).to(x)
                q = torch.linalg.qr((((sketch @ x.T) * weights) @ x).T).Q
            inner = q.T @ x.T
            values, vectors = eigen((inner * weights) @ inner.T)
            vectors = q @ vectors
        self.features = vectors.to(torch.float64)
        self.values = values.clamp_min(0).to(torch.float64) / weights.sum(dtype=torch.float64).clamp_min(1e-300)
        self.update(p)

    def update(self, p: Float64[Tensor, "classes n"]) -> None:
        values, self.classes = eigen(torch.diag(p.sum(1)) - p @ p.T)
        self.scale = 1 / (values.clamp_min(0)[:, None] * self.values + self.penalty) - 1 / self.penalty

    def solve(self, g: Float64[Tensor, "classes d"]) -> Float64[Tensor, "classes d"]:
        inner = self.classes.T @ g @ self.features * self.scale
        solved: Tensor = self.classes @ inner @ self.features.T + g / self.penalty
        return solved


def eigen(matrix: Float[Tensor, "k k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Eigenvalues and eigenvectors of a symmetric positive semidefinite matrix."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
        if vectors.isfinite().all():
            return values, vectors
    except RuntimeError:  # torch's LinAlgError
        pass
    # for some float32 matrices of rank 1, LAPACK's divide and conquer gives NaN or, on other processors, an error
    try:
        vectors, values, _ = torch.linalg.svd(matrix.double())
    except RuntimeError:  # no record may end a search: without eigenvalues it goes on, more slowly
        return matrix.new_zeros(len(matrix)), torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def solve(
    features: Float64[Tensor, "n d"],
    labels: Int64[Tensor, " n"],
    num_classes: int,
    penalty: float,
    *,
    tolerance: float = 1e-9,
    limit: float | None = None,
) -> Float64[Tensor, "classes d"]:
    """The minimiser of ``sum_i CE(softmax(beta x_i), y_i) + penalty/2 |beta|^2``, with every coordinate penalised.

    L-BFGS preconditioned by `_Kronecker`. Products with the features are float32, but they only give changes of logits
    and gradient, which add up in float64. The gradient is computed anew in float64 whenever its norm has fallen by a
    factor of a million, and at the end, so the tolerance holds for the exact gradient.

    Args:
        features: ``(n, d)``, finite; ``n`` may be 0.
        labels: ``(n,)``, in ``[0, num_classes)``.
        num_classes: number of rows of the result; absent classes have a row too.
        penalty: positive.
        tolerance: largest Euclidean norm of the gradient at the result.
        limit: largest norm where rounding leaves more than the tolerance, or `STEPS` steps do not reach it: a second,
            slower search goes on to it and ends whatever the records are. None raises the error instead.

    Returns:
        ``(num_classes, d)``, at most ``tolerance / penalty``, or ``limit / penalty``, from the exact minimiser.

    Raises:
        ValueError: shapes differ, or a label or the penalty is out of range.
        NotConverged: the tolerance is out of reach, and there is no limit.
    """
    check_labels(features, labels, num_classes)
    check_positive("penalty", penalty)
    x, narrow = features, features.to(torch.float32)
    beta = x.new_zeros(num_classes, x.shape[1])
    pairs, first, synced, size = _Pairs(beta), math.inf, math.inf, 0.0
    for done in range(STEPS):
        if size <= max(tolerance, 1e-6 * synced):  # the true gradient
            logits = beta @ x.T if beta.any() else x.new_zeros(num_classes, len(x))
            p = logits.softmax(0)
            gradient, before = loss_gradient(p, labels, x) + penalty * beta, synced
            size = synced = float(gradient.norm())
            first = min(first, synced)
            if limit is not None and before / 2 < size <= limit:
                return beta  # rounding is all that is left of it: to go on would tell time of the records
        if size <= tolerance:
            return beta
        if not math.isfinite(size):
            break
        if done in (0, 16):  # first from a sample of rows; in a long search once more, from all rows
            kronecker = _Kronecker(narrow, p, penalty, 1 if done else max(1, len(x) // (20 * RANK)))
        elif done % FULL == 0:
            kronecker = _Kronecker(narrow, p, penalty, rank=None)
        elif size > 1e-4 * first:
            kronecker.update(p)
        step = pairs.direction(gradient, kronecker)
        change = (step.to(torch.float32) @ narrow.T).to(torch.float64)
        length, after = line_search(
            logits, p, change, float((gradient * step).sum()), penalty * float(step.norm()) ** 2
        )
        step = length * step
        moved = ((after - p).to(torch.float32) @ narrow).to(torch.float64) + penalty * step
        beta, logits, p, gradient = beta + step, logits + length * change, after, gradient + moved
        size = float(gradient.norm())
        if float((step * moved).sum()) > 0:
            pairs.add(step, moved)
    if limit is not None:
        return _descend(x, labels, penalty, beta if math.isfinite(size) else torch.zeros_like(beta), limit)
    raise NotConverged(
        f"the gradient's norm is {size:.3g} after {STEPS} steps, the limit is {tolerance:g}; raise the penalty "
        f"({penalty:g}) or scale the features down"
    )


def loss_gradient(
    p: Float64[Tensor, "classes n"], labels: Int64[Tensor, " n"], x: Float64[Tensor, "n d"]
) -> Float64[Tensor, "classes d"]:
    """The gradient of the sum of losses; of many records by blocks, so that roundings of equal rows stay small."""
    errors = p.scatter_add(0, labels[None], -torch.ones_like(p[:1]))
    if len(x) <= _WHOLE:
        return errors @ x
    blocks = zip(torch.split(errors, _BLOCK, 1), torch.split(x, _BLOCK), strict=True)
    return sum((e @ rows for e, rows in blocks), x.new_zeros(()))


_WHOLE, _BLOCK = 2**16, 2**12
"""Most records whose gradient is one product, and the records of a block of more."""


def _descend(
    x: Float64[Tensor, "n d"],
    labels: Int64[Tensor, " n"],
    penalty: float,
    beta: Float64[Tensor, "classes d"],
    limit: float,
) -> Float64[Tensor, "classes d"]:
    """A point at which the gradient's norm is at most ``limit``, by Nesterov's method with constant momentum.

    The objective is ``penalty``-strongly convex, and its gradient is L-Lipschitz for L = penalty + sum_i |x_i|^2 / 2,
    since a softmax's Hessian is at most 1/2. So after k steps the objective is within
    ``(1 - sqrt(penalty / L))^k (f(beta) - f* + penalty/2 |beta - beta*|^2)`` of its least value f* (Nesterov 2018,
    "Lectures on Convex Optimization", theorem 2.2.3), and the squared norm of the gradient within 2 L times that: the
    search ends for every ``limit`` above rounding, after at most about ``sqrt(L / penalty) log(L |beta - beta*| /
    limit)`` steps, and no record decides whether it does. All is float64.
    """
    lipschitz = penalty + float(x.square().sum()) / 2
    root = math.sqrt(penalty / lipschitz)
    momentum, point = (1 - root) / (1 + root), beta
    while True:
        p = (point @ x.T).softmax(0)
        gradient = loss_gradient(p, labels, x) + penalty * point
        if float(gradient.norm()) <= limit:
            return point
        after = point - gradient / lipschitz
        point, beta = after + momentum * (after - beta), after


def line_search(
    logits: Float64[Tensor, "classes n"],
    p: Float64[Tensor, "classes n"],
    change: Float64[Tensor, "classes n"],
    slope: float,
    curvature: float,
) -> tuple[float, Float64[Tensor, "classes n"]]:
    """A step length at which the convex objective's slope is at most a fifth of ``slope``, and the probabilities there.

    The slope at ``t`` is ``slope + <softmax(logits + t change) - p, change> + t curvature``: a bracketed secant.
    """
    t, low, low_slope, high = 1.0, 0.0, slope, math.inf
    for _ in range(30):
        after = (logits + t * change).softmax(0)
        here = slope + float(((after - p) * change).sum()) + t * curvature
        if abs(here) <= 0.2 * abs(slope):
            break
        secant = t - here * (t - low) / (here - low_slope) if here != low_slope else math.inf
        if here < 0:
            low, low_slope = t, here
        else:
            high = t
        edge = 0.1 * (min(high, 8 * t) - low)
        t = min(max(secant, low + edge), min(high, 8 * t) - edge)
    return t, after


def solve_binary(
    features: Float64[Tensor, "n d"],
    labels: Bool[Tensor, " n"] | Int64[Tensor, " n"],
    penalty: float,
    *,
    tolerance: float = 1e-9,
    limit: float | None = None,
) -> Float64[Tensor, " d"]:
    """The minimiser of ``sum_i log(1 + exp(-s_i beta x_i)) + penalty/2 |beta|^2``, ``s_i`` +1 for label 1, -1 for 0.

    It is the difference of the two rows of `solve` at twice the penalty; its gradient is half the difference of theirs,
    so no longer than ``tolerance``, or ``limit``. Arguments and errors are `solve`'s, with ``(d,)`` for
    ``(classes, d)``.
    """
    two = solve(features, labels.to(torch.int64), 2, 2 * penalty, tolerance=tolerance, limit=limit)
    return two[1] - two[0]


def check_labels(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise ValueError unless there is one class in ``[0, num_classes)`` for each row of features."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features {tuple(features.shape)}, labels {tuple(labels.shape)}; must be (n, d) and (n,)")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        span = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"labels run from {span}; with {num_classes} classes they must lie in 0 to {num_classes - 1}")

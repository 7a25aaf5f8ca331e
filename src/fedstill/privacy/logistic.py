"""Logistic regression heads on frozen features: sound ones, whose noise a theorem covers, and the published ones.

The sound heads differ from FedAUXfdp's (Hoech, Rischke, Mueller, Samek 2022): a fixed public penalty added to the sum
of losses, clipping instead of division by the data's own norm, a public class list, and a sensitivity without the class
count. The published heads are for comparison and have no guarantee.

``docs/proofs.md`` has the proof beside those of the other mechanisms.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy.accounting import published_noise
from fedstill.privacy.mechanisms import (
    LEAST,
    ROUNDING,
    GaussianMechanism,
    Mechanism,
    Rows,
    Value,
    check_noise,
    check_positive,
    clipped,
)
from fedstill.privacy.releases import Event, Unbounded
from fedstill.privacy.solver import RESIDUAL, check_labels, solve, solve_binary

LEAST_PENALTY = 0.01
"""Smallest penalty of a sound head: with less, the residual that its sensitivity includes may be within rounding."""

Labelled = tuple[Float[Tensor, "n p"], Int64[Tensor, " n"]]


def extend(
    h: Float[Tensor, "n p"], radius: float | None, bias: float, out: Float64[Tensor, "n p+1"] | None = None
) -> Float64[Tensor, "n p+1"]:
    """Rows ``(min(1, R/|h|) h/R sqrt(1 - b^2), b)``, of length at most 1; ``(h, b)`` without a radius; in ``out``."""
    if h.ndim != 2:
        raise ValueError(f"features of shape {tuple(h.shape)}; they must be (records, features)")
    wide = h.new_empty(len(h), h.shape[1] + 1, dtype=torch.float64) if out is None else out
    wide[:, :-1] = h if radius is None else clipped(h, radius).mul_(math.sqrt(1 - bias**2) / radius)
    wide[:, -1] = bias
    return wide


def logits(
    head: Float[Tensor, "*classes p+1"], h: Float[Tensor, "n p"], radius: float | None, bias: float
) -> Float64[Tensor, "n *classes"]:
    """Logits of a released head on features ``(n, p)``: ``(n, classes)``, or ``(n,)`` of a `BinaryHead`.

    ``radius`` and ``bias`` are those of the mechanism; a published head has no radius.
    """
    wide = head.to(torch.float64)
    return extend(h, radius, bias) @ (wide.T if wide.ndim == 2 else wide)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Head(GaussianMechanism[Rows, Value]):
    """The shared part of both sound heads: constants of the objective, and the sensitivity."""

    theorems = (
        "one record adds a loss of slope at most {0.steepness:.4g} to a {0.penalty:g}-strongly convex objective and so "
        "moves its minimiser, the solver's residual included, by at most {0.sensitivity:.4g}, the sensitivity "
        "(Chaudhuri, Monteleoni, Sarwate 2011, lemma 7); Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    )

    steepness: ClassVar[float]  # bound of |p - e_y|, the length of one loss's gradient divided by |x|
    penalty: float
    radius: float
    noise_multiplier: float
    bias: float = 0.1
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("penalty", self.penalty, LEAST_PENALTY)
        for name in ("radius", "tolerance"):
            check_positive(name, getattr(self, name))
        _check_bias(self.bias)

    @property
    def sensitivity(self) -> float:
        """Largest change of the coefficients (Euclidean length) when one record is added or removed.

        Lemma 7 of Chaudhuri, Monteleoni, Sarwate 2011 (JMLR 12): the objective J is penalty-strongly convex. Let
        J' = J + CE_new, with minimisers beta and beta'. As grad J(beta') = -grad CE_new(beta'),
        |beta - beta'| <= |grad CE_new(beta')| / penalty. That gradient is (p - e_y) (x) x. For several classes
        |p - e_y|^2 <= 2; for one vector |sigmoid - y| <= 1; and |x| <= 1. Each of the solver's two solutions is within
        residual / penalty of its minimiser, whatever the records are (`fedstill.privacy.solver`), so that no error
        before the noise depends on one.
        """
        return (self.steepness + 2 * self.residual) / self.penalty * ROUNDING

    @property
    def residual(self) -> float:
        """Largest norm of the gradient at the solver's solution, whatever the records are."""
        return max(self.tolerance, RESIDUAL)

    def extended(self, h: Float[Tensor, "n p"]) -> Float64[Tensor, "n p+1"]:
        """The head's inputs: clipped features with the constant feature, of length at most 1."""
        return extend(h, self.radius, self.bias)


@dataclass(frozen=True, kw_only=True)
class LogisticHead(_Head[Labelled, Float64[Tensor, "classes p+1"]]):
    """A multinomial logistic regression on clipped features, with Gaussian noise.

    Attributes:
        num_classes: number of rows of the release. The class list is public: absent classes have a row too.
        penalty: factor of half the squared length of all coefficients, added to the SUM of losses. Public, at least
            `LEAST_PENALTY`.
        radius: largest length of a feature row; longer ones are scaled down. Positive, public.
        noise_multiplier: standard deviation of the noise divided by ``sensitivity``.
        bias: the constant feature, in ``[0, 1)``.
        tolerance: norm of the gradient to which the solver goes where `solver.STEPS` steps are enough; otherwise it
            goes to ``residual``, which the sensitivity includes.
    """

    steepness: ClassVar[float] = math.sqrt(2)
    num_classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_classes(self.num_classes)

    def __call__(self, rows: Labelled, noise: Noise) -> Float64[Tensor, "classes p+1"]:
        """Coefficients ``(num_classes, p + 1)``, the constant's last, from features ``(n, p)`` and classes ``(n,)``."""
        return self.noised(self.exact(rows), noise)

    def exact(self, rows: Labelled) -> Float64[Tensor, "classes p+1"]:
        """The coefficients without noise, which are private."""
        x = self.extended(rows[0])
        return solve(x, rows[1], self.num_classes, self.penalty, tolerance=self.tolerance, limit=self.residual)


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryHead(_Head[Float[Tensor, "n p"], Float64[Tensor, " p+1"]]):
    """A logistic regression that separates private from public records: ``P[private | x] = sigmoid(logit)``.

    Attributes:
        negatives: features ``(m, p)`` of the PUBLIC records, which must not depend on anything private. All other
            attributes are as in `LogisticHead`.
    """

    steepness: ClassVar[float] = 1.0
    negatives: Float[Tensor, "m p"]

    def __call__(self, rows: Float[Tensor, "n p"], noise: Noise) -> Float64[Tensor, " p+1"]:
        """Coefficients ``(p + 1,)``, the constant's last, from private features ``(n, p)``."""
        x, labels = _against(rows, self.negatives)
        return self.noised(
            solve_binary(self.extended(x), labels, self.penalty, tolerance=self.tolerance, limit=self.residual), noise
        )


def _reasons(leaks: str) -> tuple[str, str]:
    """Why nothing bounds a published head: with the paper's penalty, and with that of its code."""
    norm = (
        "features are divided by the private data's own maximum norm, so one record changes every feature and the "
        f"released scale without bound; the number of records enters the noise{leaks}"
    )
    return (
        norm,
        f"the penalty lacks its factor n, so one record moves the head about 20 times the claimed bound; {norm}",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _PublishedHead(Mechanism[Rows, Value]):
    """The shared part of both published heads, which have no guarantee.

    Hoech, Rischke, Mueller, Samek 2022 ("FedAUXfdp"), equation 2 and theorem 1: mean loss plus ``lam/2 |beta|^2``,
    features divided by the longest one in the data, noise by the classic formula.

    Attributes:
        lam: the paper's lambda.
        epsilon: epsilon in the classic formula.
        delta: delta in the classic formula.
        scaling: "paper" penalises the sum of losses by ``n lam``, "repository" by ``lam``, as FedAUX's code does.
    """

    lam: float
    epsilon: float
    delta: float
    bias: float = 0.1
    scaling: Literal["paper", "repository"] = "paper"

    def __post_init__(self) -> None:
        for name in ("lam", "epsilon", "delta"):
            check_positive(name, getattr(self, name))
        if self.delta >= 1 or self.scaling not in ("paper", "repository"):
            raise ValueError(f"delta is {self.delta}, scaling '{self.scaling}'; below 1, 'paper' or 'repository'")
        _check_bias(self.bias)

    @property
    @override
    def event(self) -> Event:
        return Unbounded(reason=self.reasons[self.scaling != "paper"])

    @property
    @override
    def theorem(self) -> str:
        return self.theorems[self.scaling != "paper"]

    def _released(self, h: Tensor, labels: Tensor, classes: int | None, claimed: float, noise: Noise) -> Tensor:
        """The head trained on rows divided by the longest one, rescaled so that it applies to undivided features."""
        if len(h) == 0:
            raise ValueError("a published head has 0 records; it needs at least 1")
        h = torch.where(torch.isfinite(h).all(1, keepdim=True), h, 0.0).to(torch.float64)
        longest = max(float(h.norm(dim=1).max()), LEAST)
        x, penalty = extend(h, longest, self.bias), self.lam * (len(h) if self.scaling == "paper" else 1)
        beta = solve_binary(x, labels, penalty) if classes is None else solve(x, labels, classes, penalty)
        std = (
            claimed / (self.lam * len(h)) * published_noise(self.epsilon, self.delta)
        )  # for every epsilon, as in the paper
        beta = beta + std * noise.gaussian(beta.shape).to(beta.device)
        return torch.cat([beta[..., :-1] * (math.sqrt(1 - self.bias**2) / longest), beta[..., -1:]], -1)


@dataclass(frozen=True, kw_only=True)
class PublishedLogisticHead(_PublishedHead[Labelled, Float64[Tensor, "classes p+1"]]):
    """The published class head; its noise assumes sensitivity ``2 sqrt(C_k) / (lam n)`` for ``C_k`` local classes."""

    num_classes: int
    reasons = _reasons(", and so does the number of local classes; classes that do not occur show as rows of zeros")
    theorems = tuple(f"none holds: {reason}" for reason in reasons)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_classes(self.num_classes)

    def __call__(self, rows: Labelled, noise: Noise) -> Float64[Tensor, "classes p+1"]:
        """Coefficients for `logits` without a radius, from features ``(n, p)`` and classes ``(n,)``."""
        h, labels = rows
        check_labels(h, labels, self.num_classes)
        local, within = torch.unique(labels, return_inverse=True)
        head = torch.zeros(self.num_classes, h.shape[1] + 1, dtype=torch.float64, device=h.device)
        head[local] = self._released(h, within, len(local), 2 * math.sqrt(len(local)), noise)
        return head


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedBinaryHead(_PublishedHead[Float[Tensor, "n p"], Float64[Tensor, " p+1"]]):
    """The published score head against public rows ``negatives`` ``(m, p)``.

    Its noise assumes sensitivity ``2 / (lam n)``, where ``n`` counts private and public rows.
    """

    reasons = _reasons("")
    theorems = tuple(f"none holds: {reason}" for reason in reasons)
    negatives: Float[Tensor, "m p"]

    def __call__(self, rows: Float[Tensor, "n p"], noise: Noise) -> Float64[Tensor, " p+1"]:
        """Coefficients for `logits` without a radius, from private features ``(n, p)``."""
        x, labels = _against(rows, self.negatives)
        return self._released(x, labels, None, 2.0, noise)


def _against(rows: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Private rows with label 1, then public rows with label 0."""
    if rows.ndim != 2 or negatives.ndim != 2 or rows.shape[1] != negatives.shape[1]:
        raise ValueError(f"rows {tuple(rows.shape)} and negatives {tuple(negatives.shape)}; both must be (any, p)")
    x = torch.cat([rows, negatives.to(rows)])
    return x, (torch.arange(len(x), device=x.device) < len(rows)).to(torch.int64)


def _check_classes(num_classes: int) -> None:
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a head needs at least 2")


def _check_bias(bias: float) -> None:
    if not 0 <= bias < 1:
        raise ValueError(f"bias is {bias}; it must lie in [0, 1), as the constant feature of rows of length 1")

"""Canaries for the mechanisms of `fedstill.privacy`, each in a direction of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from typing_extensions import override

from fedstill.audits.lower_bounds import Canaries
from fedstill.base.seeds import Noise
from fedstill.privacy.logistic import Labelled


def row_canaries(
    mechanism: Callable[[Tensor, Noise], Tensor], rows: Float[Tensor, "m d"] | Int64[Tensor, " m"], noise: Noise
) -> Canaries[Float64[Tensor, " d"]]:
    """Canaries of which number i changes entry i of the release; that entry is its score.

    Rows are ``radius * eye(m)`` for `NoisySum` and `BinaryHead` (with `opposing_rows`), ``arange(m)`` for `Histogram`.
    """
    return Canaries(len(rows), lambda included: mechanism(rows[included], noise), lambda value: value[: len(rows)])


def class_sum_canaries(
    mechanism: Callable[[Labelled, Noise], Tensor], num_classes: int, rows: Float[Tensor, "m m"], noise: Noise
) -> Canaries[Float64[Tensor, "classes m"]]:
    """Canaries for `ClassSums`: as `row_canaries`, with the classes in turn."""
    each = torch.arange(len(rows))
    labels = each % num_classes
    return Canaries(
        len(rows),
        lambda included: mechanism((rows[included], labels[included]), noise),
        lambda value: value[labels, each],
    )


def moment_canaries(
    mechanism: Callable[[Labelled, Noise], Tensor], num_classes: int, rows: Float64[Tensor, "m d"], noise: Noise
) -> Canaries[Float64[Tensor, " v"]]:
    """Canaries for sums of rows and of their products; a canary's score is the release along what it adds itself."""
    labels = torch.arange(len(rows)) % num_classes
    none = mechanism((rows[:0], labels[:0]), NoNoise())
    alone = torch.stack([mechanism((rows[i : i + 1], labels[i : i + 1]), NoNoise()) - none for i in range(len(rows))])
    return Canaries(
        len(rows), lambda included: mechanism((rows[included], labels[included]), noise), lambda value: alone @ value
    )


def opposing_rows(count: int, each: int, length: float) -> Float64[Tensor, "n m"]:
    """``each`` short rows along every canary's axis, for another class than the canary's.

    Together they move the logits far but add little curvature, so a canary moves the head by nearly the sensitivity.
    """
    return length * torch.eye(count, dtype=torch.float64).repeat(each, 1)


def class_head_canaries(
    mechanism: Callable[[Labelled, Noise], Tensor], rows: Float64[Tensor, "m m"], others: Tensor, noise: Noise
) -> Canaries[Float64[Tensor, "classes d"]]:
    """Canaries of class 1 for `LogisticHead`, among ``others`` ``(n, m)`` of class 0.

    The score is ``<(e_1 - p) (x) x, beta>``; ``p`` are the head's probabilities for ``x`` without canaries and noise.
    A canary moves the minimiser in that direction, minus the gradient of its loss.
    """
    both = torch.cat([others, rows])
    labels = (torch.arange(len(both)) >= len(others)).to(torch.int64)

    def release(included: Tensor, noise: Noise = noise) -> Tensor:
        chosen = torch.cat([torch.ones(len(others), dtype=torch.bool), included])
        return mechanism((both[chosen], labels[chosen]), noise)

    p = (release(torch.zeros(len(rows), dtype=torch.bool), NoNoise())[:, : len(rows)] @ rows.T).softmax(0)
    factors = normalize(one_hot(torch.tensor(1), len(p))[:, None] - p, dim=0)
    return Canaries(len(rows), release, lambda value: (value[:, : len(rows)] @ rows.T * factors).sum(0))


def label_canaries(
    mechanism: Callable[[Tensor, Noise], Tensor], count: int, noise: Noise
) -> Canaries[Int64[Tensor, " m"]]:
    """Canaries for randomised response: an included record has label 1, another one 0; other outputs score 0."""
    return Canaries(
        count,
        lambda included: mechanism(included.long(), noise),
        lambda value: (value == 1).long() - (value == 0).long(),
    )


def joint(parts: Sequence[Canaries[Any]], weights: Sequence[float]) -> Canaries[tuple[Any, ...]]:
    """Several releases of the same canaries; the score is the weighted sum of their scores.

    The best weight is a canary's effect on the score divided by the score's variance (a Gaussian likelihood ratio).
    """

    def score(values: tuple[Any, ...]) -> Tensor:
        return torch.stack([w * p.score(v) for w, p, v in zip(weights, parts, values, strict=True)]).sum(0)

    return Canaries(parts[0].count, lambda included: tuple(part.release(included) for part in parts), score)


class NoNoise(Noise):
    """Zeros in place of noise, for computations of the attacker."""

    @override
    def gaussian(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    uniform = gaussian

"""Means of the clients' models that a few hostile clients cannot move far: five rules, and their weights.

Median and trimmed mean look at each entry by itself. The other rules depend on the distances between the models'
parameters: they give each client a weight, and the result is the weighted mean. Every rule counts all clients alike,
since a hostile one may claim any number of records.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Literal, Protocol

import torch
from jaxtyping import Float64
from torch import Tensor

from fedstill.methods.averaging import weighted_mean

Rule = Literal["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"]
_NUMBERS = 2**26
"""Numbers of all clients that are in memory at a time, as they were sent: 256 MB of float32."""
_CHUNK = 2**20
"""Numbers of them that are computed with at a time, in float64."""
_STEPS = 1000
"""Largest number of steps of the geometric median."""


class WithWeights(Protocol):
    """A reply with a model."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by name."""


def fewest(rule: Rule, hostile: int) -> int:
    """The smallest number of replies among which ``hostile`` ones may be hostile.

    More than twice as many, and for Krum two more (Blanchard et al. 2017, Proposition 2: n >= 2 f + 3).
    """
    return 2 * hostile + (3 if rule in ("krum", "multi-krum") else 1)


def aggregate(rule: Rule, replies: Sequence[WithWeights], hostile: int, parameters: Set[str]) -> dict[str, Tensor]:
    """The rule's mean of the clients' models, name by name, in float64.

    Args:
        rule: how the models are combined.
        replies: `fewest` models or more, of which `_NUMBERS` numbers are in memory at a time.
        hostile: number of replies that may be hostile (f).
        parameters: names of the tensors that are parameters. The others, buffers, have the median of each entry by
            the rules that go by distances: batch statistics of unlike clients lie so far from each other that a hostile
            client with the statistics of an honest one could have any parameters.
    """
    assert len(replies) >= fewest(rule, hostile), f"{rule} with hostile={hostile} of {len(replies)} replies"
    middle = (len(replies) - 1) // 2
    if rule in ("median", "trimmed-mean"):
        return _by_entry(replies, middle if rule == "median" else hostile, set(replies[0].weights))
    squared = squared_distances(replies, parameters)
    if rule == "geometric-median":
        weights = geometric_median(squared)
    else:
        weights = krum(squared, hostile, len(replies) - hostile if rule == "multi-krum" else 1)
    used = [i for i, weight in enumerate(weights.tolist()) if weight]
    mean = weighted_mean((float(weights[i]), _only(replies[i].weights, parameters)) for i in used)
    return mean | _by_entry(replies, middle, replies[0].weights.keys() - parameters)


def _only(weights: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name in names}


def _by_entry(replies: Sequence[WithWeights], cut: int, names: Set[str]) -> dict[str, Tensor]:
    """The mean of each entry without its ``cut`` smallest and its ``cut`` largest values (Yin et al. 2018).

    Without all but the middle one or two values it is the median.
    """
    found: dict[str, list[Tensor]] = {}
    for name, rows in parts_of(replies, names):
        found.setdefault(name, []).append(rows.sort(0).values[cut : len(rows) - cut].mean(0))
    shapes = {name: value.shape for name, value in replies[0].weights.items()}
    return {name: torch.cat(parts).reshape(shapes[name]) for name, parts in found.items()}


def squared_distances(replies: Sequence[WithWeights], names: Set[str]) -> Float64[Tensor, "k k"]:
    """Squared Euclidean distances between the models, over the tensors ``names``."""
    gram = torch.zeros(len(replies), len(replies), dtype=torch.float64)
    for _, rows in parts_of(replies, names):
        centred = rows - rows.median(0).values  # distances stay; those of honest models keep their digits
        gram += centred @ centred.T
    lengths = gram.diagonal()
    return (lengths[:, None] + lengths - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def krum(squared: Float64[Tensor, "k k"], hostile: int, chosen: int) -> Float64[Tensor, " k"]:
    """Equal weights for the ``chosen`` models nearest to their own neighbours, and 0 for the others.

    A model's score is the sum of its squared distances to the k - f - 2 nearest others (Blanchard, El Mhamdi,
    Guerraoui, Stainer, NeurIPS 2017, section 4); of equal scores the first client's counts.
    """
    nearest = squared.sort(1).values[:, 1 : len(squared) - hostile - 1]  # the first is the distance to itself, 0
    order = nearest.sum(1).sort(stable=True).indices
    weights = torch.zeros(len(squared), dtype=torch.float64)
    weights[order[:chosen]] = 1 / chosen
    return weights


def geometric_median(squared: Float64[Tensor, "k k"], *, smooth: float = 1e-9) -> Float64[Tensor, " k"]:
    """Weights whose mean has the smallest sum of distances to the models.

    Smoothed Weiszfeld steps (Pillutla, Kakade, Harchaoui 2022, arXiv:1912.13445, Algorithm 2), from the mean of the
    half of the models with the smallest median distance to the others. The mean z = sum_i b_i x_i has ||z - x_k||^2 =
    (D b)_k - b^T D b / 2 with the squared distances D, so the steps need no model. ``smooth`` is the shortest distance,
    as a share of the longest one between two models.
    """
    half = math.ceil(len(squared) / 2)
    shortest = smooth * float(squared.max().sqrt())
    weights = torch.zeros(len(squared), dtype=torch.float64)
    weights[squared.median(1).values.sort(stable=True).indices[:half]] = 1 / half
    for _ in range(_STEPS if shortest else 0):
        far = squared @ weights
        distances = (far - weights @ far / 2).clamp_(min=0).sqrt_().clamp_(min=shortest)
        new = 1 / distances
        new /= new.sum()
        moved = float((new - weights).abs().max())
        weights = new
        if moved < 1e-12:
            break
    return weights


def parts_of(replies: Sequence[WithWeights], names: Set[str]) -> Iterator[tuple[str, Float64[Tensor, "k numbers"]]]:
    """Parts of the tensors ``names`` of all clients, as rows: the name, and each client's numbers, in their order.

    A reply is read once for each set of parts that fits the memory, not once for each tensor.
    """
    width = max(1, _NUMBERS // len(replies))
    pieces = [
        (name, start, min(start + width, value.numel()))
        for name, value in replies[0].weights.items()
        for start in range(0, value.numel(), width)
        if name in names
    ]
    for group in _groups(pieces, width):
        rows: list[Tensor] = []
        for client, reply in enumerate(replies):
            weights = reply.weights
            for place, (name, start, end) in enumerate(group):
                if not client:
                    rows.append(torch.empty(len(replies), end - start, dtype=weights[name].dtype))
                rows[place][client] = weights[name].flatten()[start:end]
        for (name, _, _), row in zip(group, rows, strict=True):
            for part in torch.split(row, max(1, _CHUNK // len(replies)), 1):
                yield name, part.double()


def _groups(pieces: Sequence[tuple[str, int, int]], width: int) -> Iterator[list[tuple[str, int, int]]]:
    """The pieces in their order, as many at a time as have ``width`` numbers."""
    group: list[tuple[str, int, int]] = []
    size = 0
    for piece in pieces:
        numbers = piece[2] - piece[1]
        if group and size + numbers > width:
            yield group
            group, size = [], 0
        group.append(piece)
        size += numbers
    if group:
        yield group

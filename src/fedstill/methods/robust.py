"""Means of the clients' models that a few hostile clients cannot move far: five rules, and their weights.

Median and trimmed mean look at each entry by itself. The other rules depend on the models' distances only: they give
each client a weight, and the result is the weighted mean. Every rule counts all clients alike, since a hostile one may
claim any number of records.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from jaxtyping import Float64
from torch import Tensor

from fedstill.methods.averaging import weighted_mean

Rule = Literal["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"]
_NUMBERS = 2**24
"""Numbers of all clients that are in memory at a time: 128 MB."""
_STEPS = 1000
"""Largest number of steps of the geometric median."""


class Sent(Protocol):
    """A reply with a model."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by name."""


def fewest(rule: Rule, hostile: int) -> int:
    """The smallest number of replies among which ``hostile`` ones may be hostile.

    More than twice as many, and for Krum two more (Blanchard et al. 2017, Proposition 2: n >= 2 f + 3).
    """
    return 2 * hostile + (3 if rule in ("krum", "multi-krum") else 1)


def check_enough(rule: Rule, hostile: int, replies: int) -> None:
    """Refuse fewer replies than `fewest`.

    Raises:
        ValueError: there are fewer.
    """
    if replies < (least := fewest(rule, hostile)):
        raise ValueError(
            f"rule {rule} with hostile={hostile} needs {least} replies or more, but there are {replies}; lower "
            "--hostile, or ask more clients"
        )


def aggregate(rule: Rule, replies: Sequence[Sent], hostile: int) -> dict[str, Tensor]:
    """The rule's mean of the clients' models, name by name, in float64.

    Args:
        rule: how the models are combined.
        replies: the models, of which `_NUMBERS` numbers are in memory at a time.
        hostile: number of replies that may be hostile (f).

    Raises:
        ValueError: there are fewer replies than `fewest`.
    """
    check_enough(rule, hostile, len(replies))
    if rule == "median":
        return _by_entry(replies, (len(replies) - 1) // 2)
    if rule == "trimmed-mean":
        return _by_entry(replies, hostile)
    squared = squared_distances(replies)
    if rule == "geometric-median":
        weights = geometric_median(squared)
    else:
        chosen = len(replies) - hostile if rule == "multi-krum" else 1
        weights = krum(squared, hostile, chosen)
    used = [i for i, weight in enumerate(weights.tolist()) if weight]
    return weighted_mean((float(weights[i]), replies[i].weights) for i in used)


def _by_entry(replies: Sequence[Sent], cut: int) -> dict[str, Tensor]:
    """The mean of each entry without its ``cut`` smallest and its ``cut`` largest values (Yin et al. 2018).

    Without all but the middle one or two values it is the median.
    """
    found: dict[str, list[Tensor]] = {}
    for name, rows in _blocks(replies):
        kept = rows.sort(0).values[cut : len(rows) - cut]
        found.setdefault(name, []).append(kept.mean(0))
    shapes = {name: value.shape for name, value in replies[0].weights.items()}
    return {name: torch.cat(parts).reshape(shapes[name]) for name, parts in found.items()}


def squared_distances(replies: Sequence[Sent]) -> Float64[Tensor, "k k"]:
    """Squared Euclidean distances between the models, over all their floating-point tensors."""
    gram = torch.zeros(len(replies), len(replies), dtype=torch.float64)
    counted = {name for name, value in replies[0].weights.items() if value.is_floating_point()}
    for name, rows in _blocks(replies):
        if name in counted:
            centred = rows - rows.mean(0)  # distances stay, and small ones keep their digits
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

    Smoothed Weiszfeld steps from the plain mean (Pillutla, Kakade, Harchaoui 2022, arXiv:1912.13445, Algorithm 2): the
    mean z = sum_i b_i x_i has ||z - x_k||^2 = (D b)_k - b^T D b / 2 with the squared distances D, so the steps need no
    model. ``smooth`` is the shortest distance, as a share of the longest one between two models.
    """
    count = len(squared)
    shortest = smooth * float(squared.max().sqrt())
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
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


def _blocks(replies: Sequence[Sent]) -> Iterator[tuple[str, Float64[Tensor, "k numbers"]]]:
    """Parts of the tensors of all clients, as rows: the name, and each client's numbers, in their order.

    A reply is read once for each set of parts that fits the memory, not once for each tensor.
    """
    width = max(1, _NUMBERS // len(replies))
    parts = [
        (name, start, min(start + width, value.numel()))
        for name, value in replies[0].weights.items()
        for start in range(0, value.numel(), width)
    ]
    for group in _groups(parts, width):
        rows = [torch.empty(len(replies), end - start, dtype=torch.float64) for _, start, end in group]
        for client, reply in enumerate(replies):
            for (name, start, end), row in zip(group, rows, strict=True):
                row[client] = reply.weights[name].flatten()[start:end]
        yield from zip((name for name, _, _ in group), rows, strict=True)


def _groups(parts: Sequence[tuple[str, int, int]], width: int) -> Iterator[list[tuple[str, int, int]]]:
    """The parts in their order, as many at a time as have ``width`` numbers."""
    group: list[tuple[str, int, int]] = []
    size = 0
    for part in parts:
        numbers = part[2] - part[1]
        if group and size + numbers > width:
            yield group
            group, size = [], 0
        group.append(part)
        size += numbers
    if group:
        yield group

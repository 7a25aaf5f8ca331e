"""Representative records of a class: one near the centre of each of its k-means clusters.

Liu, Gu, Wang, Zhu, Jiang, You, "DREAM: efficient dataset distillation by representative matching", ICCV 2023
(arXiv:2302.14416), section 3.2 and the authors' code (``new_strategy.py``).
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedstill.models import features as features_of
from fedstill.records import Records

_ITERATIONS = 10
_BATCH = 256


def choose(
    part: Records, net: nn.Module, count: int, rng: torch.Generator, *, pool: int | None = None
) -> Int64[Tensor, " k"]:
    """Indices of ``k = min(count, len(part))`` representatives in the feature space of ``net``.

    Args:
        part: the records of one class.
        net: the network of the features, of normalised images (DREAM does not normalise them here).
        count: number of representatives.
        rng: draws the pool and the first centres (a CPU generator).
        pool: number of randomly drawn records to choose from, at least ``count``; by default all.
    """
    index = torch.arange(len(part))
    if pool is not None:
        index = torch.randperm(len(part), generator=rng)[: max(pool, count)]
    index = index.to(part.images.device)
    with torch.no_grad():
        embedded = torch.cat([features_of(net, part.inputs(some)) for some in torch.split(index, _BATCH)])
    return index[representatives(embedded, count, rng)]


def representatives(
    features: Float[Tensor, "n d"], count: int, rng: torch.Generator, *, iterations: int = _ITERATIONS
) -> Int64[Tensor, " k"]:
    """Indices of ``k = min(count, n)`` different records, each the nearest of its own cluster to that cluster's mean.

    Lloyd's algorithm with Euclidean distances from ``k`` records drawn at random by a CPU generator; a cluster that
    loses all its records gets the record farthest from its centre. DREAM takes the nearest of all records, which can
    choose a record twice; equal synthetic images would then always stay equal.

    Raises:
        ValueError: there are no records, or ``count`` is below 1.
    """
    n = len(features)
    if n < 1 or count < 1:
        raise ValueError(f"{count} representatives of {n} records can't be chosen; both must be at least 1")
    if count >= n:
        return torch.arange(n, device=features.device)
    features = features - features.mean(0)
    squares = features.square().sum(1)
    if not squares.isfinite().all():
        raise ValueError(
            "some records are so large that squared distances between them overflow; scale them (--mean, --std), or "
            "look for wrong values"
        )
    centres = features[torch.randperm(n, generator=rng)[:count].to(features.device)]
    for _ in range(iterations):
        distances, nearest = _assign(features, squares, centres)
        centres = features.new_zeros(centres.shape).index_add_(0, nearest, features)
        centres /= torch.bincount(nearest, minlength=count)[:, None]
    distances, nearest = _assign(features, squares, centres)
    smallest = distances.new_full((count,), torch.inf).scatter_reduce_(0, nearest, distances, "amin")
    first = torch.where(distances == smallest[nearest], torch.arange(n, device=features.device), n)
    return torch.full_like(nearest[:count], n).scatter_reduce_(0, nearest, first, "amin")


def _assign(
    features: Float[Tensor, "n d"], squares: Float[Tensor, " n"], centres: Float[Tensor, "k d"]
) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
    """Squared distance of every record to its centre, and the centre's index; every centre has at least one record."""
    norms = centres.square().sum(1)
    distances, nearest = torch.addmm(norms, features, centres.T, alpha=-2).min(1)
    distances = (distances + squares).clamp_(min=0)
    sizes = torch.bincount(nearest, minlength=len(centres))
    for empty in torch.nonzero(sizes == 0).flatten().tolist():
        spare = sizes[nearest] > 1  # a cluster's only record must stay, or that cluster would be empty next
        farthest = int(torch.where(spare, distances, -1.0).argmax())
        sizes[nearest[farthest]] -= 1
        sizes[empty] = 1
        nearest[farthest], distances[farthest] = empty, 0.0
    return distances, nearest

"""Closeness of sent images to the training records that they were made from.

The checks of FedGM (Chen, Zhou, Jiang, Electronics 2024, 13(10), 1815, section 3.3.1): the real images nearest to each
synthetic one (figure 2), and whether a network that knows real images can tell its class (figure 3). A distance alone
says little, as images of a class look alike; so the client's records are compared with as many that it doesn't hold.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedstill.attacks.lira import interval
from fedstill.evaluate import outputs, predictions
from fedstill.models import features
from fedstill.records import Records

_CHUNK = 1024


@dataclass(frozen=True)
class Nearest:
    """The ``k`` records nearest to each of ``n`` images, nearest first.

    Attributes:
        distances: L2, of pixels in [0, 1] or of features.
        indices: positions among the records.
    """

    distances: Float[Tensor, "n k"]
    indices: Int64[Tensor, "n k"]


@dataclass(frozen=True)
class Share:
    """A share in [0, 1], and the interval that covers the truth with the confidence asked for."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Closeness:
    """Synthetic images beside records of the client and records that it doesn't hold.

    Attributes:
        members: the client's nearest records.
        others: the nearest of those it doesn't hold.
        nearer: share of the images that are nearer to a member than to any other record; 0.5 means no leak. Images with
            both at the same distance are left out.
        votes: what ``nearer`` rests on, as a number of independent images (see `compare`).
    """

    members: Nearest
    others: Nearest
    nearer: Share
    votes: float


def nearest(
    images: Records, among: Records, k: int = 1, *, network: nn.Module | None = None, chunk: int = _CHUNK
) -> Nearest:
    """The ``k`` records ``among`` that are nearest to each image.

    Memory doesn't grow with either set. Pixels that are equal have distance 0 exactly.

    Args:
        images: what to look up.
        among: where; on the same device.
        k: at most ``len(among)``.
        network: gives features to compare (`fedstill.models.features`, eval mode) in place of pixels.
        chunk: rows and columns of distances that are held at a time.

    Raises:
        ValueError: ``k`` is out of range, or images and records differ in shape.
    """
    if not 1 <= k <= len(among):
        raise ValueError(f"k is {k} of {len(among)} records; it must be from 1 to their number")
    if images.shape != among.shape:
        raise ValueError(f"images have shape {images.shape} and records {among.shape}; they must be of one task")
    kept = [_nearest(_rows(part, network), among, k, network, chunk) for part in _parts(images, chunk)]
    if not kept:
        return Nearest(torch.empty(0, k), torch.empty(0, k, dtype=torch.int64))
    return Nearest(torch.cat([d for d, _ in kept]), torch.cat([i for _, i in kept]))


def alike(members: Records, pool: Records, rng: torch.Generator) -> tuple[Records, Records]:
    """Random records of both with as many of each class in one as in the other: what `compare` wants.

    Without this a client with few classes would look like a leak of records, as its images are nearer to any record of
    their own class.

    Raises:
        ValueError: no class occurs in both.
    """
    each = torch.minimum(members.class_counts(), pool.class_counts()).tolist()
    if not any(each):
        raise ValueError(f"none of {len(members)} and {len(pool)} records share a class; give a pool that has theirs")
    return _drawn(members, each, rng), _drawn(pool, each, rng)


def compare(
    images: Records,
    members: Records,
    others: Records,
    k: int = 1,
    *,
    network: nn.Module | None = None,
    confidence: float = 0.95,
    chunk: int = _CHUNK,
) -> Closeness:
    """Share of synthetic images that are nearer to a record of the client than to any of as many other records.

    If the images say nothing about which records were the client's, the two sets could be exchanged: each record is a
    member by the throw of a coin. So are images, but those that share their nearest record share its coin. With ``c_j``
    images nearest to record j, the share varies as that of ``(sum_j c_j)^2 / sum_j c_j^2`` independent images does
    (Kish 1965), and the interval is Clopper and Pearson's for that number.

    Args:
        images: what was sent.
        members: the client's records.
        others: as many from the same source, with the same classes (see `alike`).
        k: see `nearest`.
        network: see `nearest`.
        confidence: that the interval covers the truth.
        chunk: see `nearest`.

    Raises:
        ValueError: the sets differ in size, or see `nearest`.
    """
    if len(members) != len(others):
        raise ValueError(
            f"there are {len(members)} members and {len(others)} other records; the larger set would be nearer by its "
            "size alone, so draw as many of each (see `alike`)"
        )
    held, free = (nearest(images, among, k, network=network, chunk=chunk) for among in (members, others))
    inside, outside = held.distances[:, 0], free.distances[:, 0]
    won, lost = (
        torch.bincount(found.indices[which, 0], minlength=len(members)).double()
        for found, which in ((held, inside < outside), (free, outside < inside))
    )
    coins = torch.cat([won, lost])
    total = float(coins.sum())
    votes = total**2 / float(coins.square().sum()) if total else 0.0
    value = float(won.sum()) / total if total else 0.5
    return Closeness(held, free, share_of(value, votes, confidence), votes)


def recognised(model: nn.Module, images: Records, confidence: float = 0.95) -> Share:
    """Accuracy on the images' own labels of a model trained on real records: are they recognisable as their class?

    Raises:
        ValueError: there are no images.
    """
    if not len(images):
        raise ValueError("there are 0 images to recognise; accuracy needs at least 1")
    right = predictions(model, images).cpu() == images.labels.cpu()
    return share_of(float(right.double().mean()), len(images), confidence)


def share_of(value: float, trials: float, confidence: float = 0.95) -> Share:
    """``value`` of ``trials``, which need not be whole, with Clopper and Pearson's interval (1934).

    Raises:
        ValueError: a number is out of its range.
    """
    if not (0 <= value <= 1 and trials >= 0 and 0 < confidence < 1):
        raise ValueError(
            f"share {value} of {trials}, confidence {confidence}; they must be in [0, 1], from 0, in (0, 1)"
        )
    return Share(value, *interval(value * trials, trials, confidence))


def _nearest(
    rows: Float[Tensor, "n d"], among: Records, k: int, network: nn.Module | None, chunk: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    best = rows.new_empty(len(rows), 0)
    where = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for start, part in enumerate(_parts(among, chunk)):
        # products of rows would round equal images to some distance above 0
        apart = torch.cdist(rows, _rows(part, network), compute_mode="donot_use_mm_for_euclid_dist")
        here = torch.arange(apart.shape[1], device=rows.device) + start * chunk
        best, where = torch.cat([best, apart], 1), torch.cat([where, here.expand(len(rows), -1)], 1)
        best, order = best.topk(min(k, best.shape[1]), largest=False)
        where = where.gather(1, order)
    return best.cpu(), where.cpu()


def _parts(records: Records, chunk: int) -> list[Records]:
    return [records[start : start + chunk] for start in range(0, len(records), chunk)]


def _rows(part: Records, network: nn.Module | None) -> Float[Tensor, "n d"]:
    if network is None:
        return part.pixels().flatten(1)
    return torch.cat(outputs(network, part, of=partial(features, network)))


def _drawn(records: Records, each: list[int], rng: torch.Generator) -> Records:
    order = torch.randperm(len(records), generator=rng).to(records.labels.device)
    shuffled = records[order]
    return shuffled[torch.cat([torch.nonzero(shuffled.labels == c).flatten()[:n] for c, n in enumerate(each)])]

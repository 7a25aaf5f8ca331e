"""Closeness of a client's synthetic images to its training records.

The checks of FedGM (Chen, Zhou, Jiang, Electronics 2024, 13(10), 1815, section 3.3.1): the real images nearest to each
synthetic image (figure 2), and the accuracy on synthetic images of a network trained on real ones (figure 3). Images of
one class look similar, so distances to the client's records are compared with distances to as many other records.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedstill.attacks.lira import interval
from fedstill.base.records import Records
from fedstill.evaluation import outputs, predictions
from fedstill.models import features

_CHUNK = 1024


@dataclass(frozen=True)
class Nearest:
    """The ``k`` records nearest to each of ``n`` images, nearest first.

    Attributes:
        distances: L2 distances of pixels in [0, 1] or of features.
        indices: indices of the records.
    """

    distances: Float[Tensor, "n k"]
    indices: Int64[Tensor, "n k"]


@dataclass(frozen=True)
class Share:
    """A share in [0, 1], and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Closeness:
    """Distances of synthetic images to records of the client and to other records.

    Attributes:
        members: the nearest records of the client.
        others: the nearest other records.
        nearer: share of the images that are nearer to a record of the client than to any other; 0.5 means no leak. Ties
            are excluded.
        votes: effective number of independent images in ``nearer`` (see `compare`).
    """

    members: Nearest
    others: Nearest
    nearer: Share
    votes: float


def nearest(
    images: Records, among: Records, k: int = 1, *, network: nn.Module | None = None, chunk: int = _CHUNK
) -> Nearest:
    """The ``k`` records ``among`` that are nearest to each image.

    Memory does not grow with either set. Equal pixels have distance 0 exactly.

    Args:
        images: the images.
        among: the records, on the same device.
        k: number of records, at most ``len(among)``.
        network: a network whose features (`fedstill.models.features`, eval mode) are compared in place of pixels.
        chunk: number of rows and columns of distances in memory at a time.

    Raises:
        ValueError: ``k`` is out of range, or images and records differ in shape.
    """
    if not 1 <= k <= len(among):
        raise ValueError(f"k is {k} of {len(among)} records; k must be from 1 to their number")
    if images.shape != among.shape:
        raise ValueError(f"images have shape {images.shape} and records {among.shape}; they must have the same shape")
    chunks = [_nearest(_rows(part, network), among, k, network, chunk) for part in _parts(images, chunk)]
    if not chunks:
        return Nearest(torch.empty(0, k), torch.empty(0, k, dtype=torch.int64))
    return Nearest(torch.cat([d for d, _ in chunks]), torch.cat([i for _, i in chunks]))


def matched_samples(members: Records, pool: Records, rng: torch.Generator) -> tuple[Records, Records]:
    """Random records of both sets with equal class counts, for `compare`.

    Otherwise a client with few classes would look like a leak, since its images are nearer to any record of the same
    class.

    Raises:
        ValueError: no class occurs in both.
    """
    each = _common(members, pool).tolist()
    if not any(each):
        raise ValueError(
            f"{len(members)} members and {len(pool)} pool records share no class; use a pool with the classes"
        )
    return _drawn(members, each, rng), _drawn(pool, each, rng)


def share_a_class(records: Records, others: Records) -> bool:
    """Whether a class occurs in both."""
    return bool(_common(records, others).any())


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

    If the images are independent of the client's choice of records, the two sets are exchangeable: each record is a
    member with probability 1/2, and images with the same nearest record share its outcome. With ``c_j`` images nearest
    to record j, the share has the variance of ``(sum_j c_j)^2 / sum_j c_j^2`` independent images (Kish 1965), for which
    the interval is Clopper and Pearson's.

    Args:
        images: the client's images.
        members: the client's records.
        others: as many records from the same source with equal class counts (see `matched_samples`).
        k: as for `nearest`.
        network: as for `nearest`.
        confidence: confidence level of the interval.
        chunk: as for `nearest`.

    Raises:
        ValueError: the sets differ in size, or as `nearest`.
    """
    if len(members) != len(others):
        raise ValueError(
            f"there are {len(members)} members and {len(others)} other records; the larger set would be nearer by its "
            "size alone, so draw equal numbers (see `matched_samples`)"
        )
    member, other = (nearest(images, among, k, network=network, chunk=chunk) for among in (members, others))
    to_member, to_other = member.distances[:, 0], other.distances[:, 0]
    won, lost = (
        torch.bincount(side.indices[images_of_side, 0], minlength=len(members)).double()
        for side, images_of_side in ((member, to_member < to_other), (other, to_other < to_member))
    )
    counts = torch.cat([won, lost])
    total = float(counts.sum())
    votes = total**2 / float(counts.square().sum()) if total else 0.0
    value = float(won.sum()) / total if total else 0.5
    return Closeness(member, other, share_of(value, votes, confidence), votes)


def recognised(model: nn.Module, images: Records, confidence: float = 0.95) -> Share:
    """Accuracy on the images, with their own labels, of a model trained on real records.

    Raises:
        ValueError: there are no images.
    """
    if not len(images):
        raise ValueError("there are 0 images; the accuracy needs at least 1")
    right = predictions(model, images).cpu() == images.labels.cpu()
    return share_of(float(right.double().mean()), len(images), confidence)


def share_of(value: float, trials: float, confidence: float = 0.95) -> Share:
    """The share ``value`` of ``trials``, a real number, with Clopper and Pearson's interval (1934).

    Raises:
        ValueError: a number is out of its range.
    """
    if not (0 <= value <= 1 and trials >= 0 and 0 < confidence < 1):
        raise ValueError(f"share {value} of {trials}, confidence {confidence}; they must be in [0, 1], >= 0, in (0, 1)")
    return Share(value, *interval(value * trials, trials, confidence))


def _nearest(
    rows: Float[Tensor, "n d"], among: Records, k: int, network: nn.Module | None, chunk: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    best = rows.new_empty(len(rows), 0)
    where = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for start, part in enumerate(_parts(among, chunk)):
        # matrix products would round the distance of equal images to more than 0
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


def _common(records: Records, others: Records) -> Int64[Tensor, " classes"]:
    """The number of records of each class that both have."""
    return torch.minimum(records.class_counts(), others.class_counts())


def _drawn(records: Records, each: list[int], rng: torch.Generator) -> Records:
    order = torch.randperm(len(records), generator=rng).to(records.labels.device)
    shuffled = records[order]
    return shuffled[torch.cat([torch.nonzero(shuffled.labels == c).flatten()[:n] for c, n in enumerate(each)])]

"""Records chosen to stand for all: coresets of mixtures, and representatives.

Song et al., "Federated learning via decentralized dataset distillation in resource-constrained edge environments",
IJCNN 2023 (arXiv:2208.11311) and the authors' code (``fedd3_client.py``).

Liu, Gu, Wang, Zhu, Jiang, You, "DREAM: efficient dataset distillation by representative matching", ICCV 2023
(arXiv:2302.14416), section 3.2 and the authors' code (``new_strategy.py``).
"""

import warnings
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill.base.records import Examples, Records
from fedstill.base.seeds import draw_seed
from fedstill.base.settings import Settings
from fedstill.models import features as features_of


class Coreset(Settings):
    """Settings of the clustering of a class's normalised pixels."""

    algorithm: Literal["gmm", "dbscan"] = "gmm"
    """Means of a Gaussian mixture, or means of the core records of DBSCAN's clusters, largest clusters first."""
    covariance: Literal["full", "diag", "spherical"] = "diag"
    """The mixture's covariances; "full", as published, takes minutes a class at 3,072 pixels."""
    iterations: PositiveInt = 100
    """Maximum number of steps of expectation and maximisation."""
    eps: PositiveFloat = 40.5
    """DBSCAN: Euclidean distance, in normalised pixels, up to which records are neighbours. For 3x32x32 images."""
    min_samples: PositiveInt = 2
    """DBSCAN: number of neighbours, itself included, that makes a record a core record."""

    @classmethod
    def published(cls) -> "Coreset":
        """FedD3's constants: full covariances."""
        return cls(covariance="full")


def shares(counts: Int64[Tensor, " classes"], total: int) -> dict[int, int]:
    """Divide ``total`` examples among classes: equal shares, the remainder to the largest; absent classes get none.

    Raises:
        ValueError: there are no records, or ``total`` is below 1.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    present = [int(c) for c in order if int(counts[c])]
    if total < 1 or not present:
        raise ValueError(f"{total} examples of {len(present)} classes can't be divided; both must be at least 1")
    each, left = divmod(total, len(present))
    share = {c: each + (place < left) for place, c in enumerate(present)}
    return {c: share[c] for c in sorted(share) if share[c]}


def centres(records: Records, total: int, settings: Coreset, rng: torch.Generator) -> Examples:
    """Centres of the classes as normalised images, ordered by class: ``total`` (n_dd) in all, as `shares` divides them.

    There are fewer if a class has fewer records than its share (each record is then sent as it is), or if DBSCAN finds
    fewer clusters; if it finds none, the class's mean is its centre. ``rng``, a CPU generator, seeds the mixtures.

    Raises:
        ValueError: there are no records, or ``total`` is below 1.
    """
    images, labels = [], []
    for label, share in shares(records.class_counts(), total).items():
        part = records.of_class(label)
        rows = part.inputs().flatten(1).double().cpu().numpy()
        seed = draw_seed(rng) % 2**32
        means = _mixture(rows, share, settings, seed) if settings.algorithm == "gmm" else _clusters(rows, settings)
        images.append(torch.from_numpy(means[:share]).float().view(-1, *records.shape))
        labels += [label] * len(images[-1])
    device = records.images.device
    return Examples(torch.cat(images).to(device), torch.tensor(labels, device=device))


def _mixture(rows: NDArray[np.float64], count: int, settings: Coreset, seed: int) -> NDArray[np.float64]:
    if count >= len(rows):
        return rows
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture  # imported here, as below, because it is slow to load

    mixture = GaussianMixture(
        count, covariance_type=settings.covariance, max_iter=settings.iterations, random_state=seed
    )
    with warnings.catch_warnings():  # the last step's means will do without convergence; k-means warns of equal records
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(rows)
    means: NDArray[np.float64] = mixture.means_
    return means


def _clusters(rows: NDArray[np.float64], settings: Coreset) -> NDArray[np.float64]:
    from sklearn.cluster import DBSCAN

    clusters = DBSCAN(eps=settings.eps, min_samples=settings.min_samples).fit(rows)
    core = np.zeros(len(rows), dtype=bool)
    core[clusters.core_sample_indices_] = True
    sizes = np.bincount(clusters.labels_ + 1)[1:]
    members = [core & (clusters.labels_ == cluster) for cluster in np.argsort(-sizes, kind="stable")]
    means: NDArray[np.float64] = np.stack([rows[m].mean(0) for m in members or [np.ones(len(rows), dtype=bool)]])
    return means


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

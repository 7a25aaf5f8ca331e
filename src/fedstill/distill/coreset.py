"""Centres of clusters that stand for the records of each class: FedD3's coreset variant.

Song et al., "Federated learning via decentralized dataset distillation in resource-constrained edge environments",
IJCNN 2023 (arXiv:2208.11311) and the authors' code (``fedd3_client.py``).
"""

import warnings
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt
from sklearn.cluster import DBSCAN
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from fedstill.records import Examples, Records
from fedstill.seeds import draw_seed
from fedstill.settings import Settings


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
    mixture = GaussianMixture(
        count, covariance_type=settings.covariance, max_iter=settings.iterations, random_state=seed
    )
    with warnings.catch_warnings():  # the last step's means will do without convergence; k-means warns of equal records
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(rows)
    means: NDArray[np.float64] = mixture.means_
    return means


def _clusters(rows: NDArray[np.float64], settings: Coreset) -> NDArray[np.float64]:
    clusters = DBSCAN(eps=settings.eps, min_samples=settings.min_samples).fit(rows)
    core = np.zeros(len(rows), dtype=bool)
    core[clusters.core_sample_indices_] = True
    sizes = np.bincount(clusters.labels_ + 1)[1:]
    members = [core & (clusters.labels_ == cluster) for cluster in np.argsort(-sizes, kind="stable")]
    means: NDArray[np.float64] = np.stack([rows[m].mean(0) for m in members or [np.ones(len(rows), dtype=bool)]])
    return means

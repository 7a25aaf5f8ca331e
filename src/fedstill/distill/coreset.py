"""A few centres of each class as its stand-ins: FedD3's coreset variant.

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
    """Settings of the search for a class's centres, among its normalised pixels."""

    algorithm: Literal["gmm", "dbscan"] = "gmm"
    """Means of a Gaussian mixture, or of DBSCAN's clusters (their core records), largest clusters first."""
    covariance: Literal["full", "diag", "spherical"] = "diag"
    """The mixture's covariances; "full" as published takes minutes a class at 3,072 pixels."""
    iterations: PositiveInt = 100
    """Steps of expectation and maximisation at most."""
    eps: PositiveFloat = 40.5
    """DBSCAN: records this near are neighbours (Euclidean, normalised pixels). Made for 3x32x32 images."""
    min_samples: PositiveInt = 2
    """DBSCAN: neighbours, itself included, that make a record a core one."""

    @classmethod
    def published(cls) -> "Coreset":
        """FedD3's constants: full covariances."""
        return cls(covariance="full")


def shares(counts: Int64[Tensor, " classes"], total: int) -> dict[int, int]:
    """Number of each class's examples of ``total``: equal shares, the remainder to the largest classes.

    Args:
        counts: records of each class.
        total: examples of the client, at least 1. With fewer than it has classes only the largest get one.

    Returns:
        The share of every class that gets one, by class. They add up to ``total``.

    Raises:
        ValueError: there are no records, or ``total`` is below 1.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    present = [int(c) for c in order if int(counts[c])]
    if total < 1 or not present:
        raise ValueError(f"{total} examples of {len(present)} classes can't be shared out; both must be at least 1.")
    each, left = divmod(total, len(present))
    found = {c: each + (place < left) for place, c in enumerate(present)}
    return {c: found[c] for c in sorted(found) if found[c]}


def centres(records: Records, total: int, settings: Coreset, rng: torch.Generator) -> Examples:
    """Centres of every class as labelled images.

    Args:
        records: the client's own.
        total: n_dd, centres of all classes together (see `shares`).
        settings: see `Coreset`.
        rng: seeds the mixtures (a CPU generator).

    Returns:
        Normalised images ordered by class, all of pixels in [0, 1] as they are means of such. Fewer than ``total``
        where a class has fewer records than its share, each of which then is its own centre and is sent as it is,
        or where DBSCAN finds fewer clusters; where it finds none, the mean of the class.

    Raises:
        ValueError: there are no records, or ``total`` is below 1.
    """
    images, labels = [], []
    for label, share in shares(records.class_counts(), total).items():
        part = records.of_class(label)
        rows = part.inputs().flatten(1).double().cpu().numpy()
        seed = draw_seed(rng) % 2**32
        found = _mixture(rows, share, settings, seed) if settings.algorithm == "gmm" else _clusters(rows, settings)
        images.append(torch.from_numpy(found[:share]).float().view(-1, *records.shape))
        labels += [label] * len(images[-1])
    device = records.images.device
    return Examples(torch.cat(images).to(device), torch.tensor(labels, device=device))


def _mixture(rows: NDArray[np.float64], count: int, settings: Coreset, seed: int) -> NDArray[np.float64]:
    if count >= len(rows):
        return rows
    mixture = GaussianMixture(
        count, covariance_type=settings.covariance, max_iter=settings.iterations, random_state=seed
    )
    with warnings.catch_warnings():  # the means of the last step are as good as any; k-means finds equal records
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(rows)
    means: NDArray[np.float64] = mixture.means_
    return means


def _clusters(rows: NDArray[np.float64], settings: Coreset) -> NDArray[np.float64]:
    found = DBSCAN(eps=settings.eps, min_samples=settings.min_samples).fit(rows)
    core = np.zeros(len(rows), dtype=bool)
    core[found.core_sample_indices_] = True
    sizes = np.bincount(found.labels_ + 1)[1:]
    members = [core & (found.labels_ == cluster) for cluster in np.argsort(-sizes, kind="stable")]
    means: NDArray[np.float64] = np.stack([rows[m].mean(0) for m in members or [np.ones(len(rows), dtype=bool)]])
    return means

"""The public feature map: an extractor's features, whitened with public images, on which private heads are trained."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Float32
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from fedstill import models
from fedstill.base import seeds
from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.base.weights import state
from fedstill.evaluation import outputs
from fedstill.privacy import rowwise
from fedstill.schema import State

_log = logging.getLogger(__name__)

_LARGE = 100 * 10**6
"""Bytes from which a map's size is logged."""
_ALIKE = 1e-6
"""Largest difference of features, relative to the largest, that is rounding."""
_BATCH = 500
"""Public records whose features are computed at a time."""
_COLUMNS = 8
"""Number that divides the columns of a projection, padded with zeros."""


@dataclass(frozen=True)
class PublicFeatures:
    """A public feature map: the extractor's weights and an affine map of its features; the arguments of a request.

    Attributes:
        weights: state of the extractor.
        mean: ``(p,)``, subtracted from the extractor's features.
        projection: ``(p, d)``, applied to the centred features.
        radius: length to which heads clip rows.
    """

    weights: State
    mean: Float32[Tensor, " features"]
    projection: Float32[Tensor, "features dims"]
    radius: float

    def rows(self, model: nn.Module, records: Records) -> Float[Tensor, "n d"]:
        """The mapped features of ``records``, before clipping; ``model`` must have `weights`.

        A row's bits depend on its own image alone: a server that chose weights and map could amplify the rounding by
        which another record would change it.
        """
        mean, projection = self.mean.to(records.images.device), self.projection.to(records.images.device)
        count = projection.shape[1]  # matrix products round all rows alike where the columns fill whole registers
        wide = functional.pad(projection, (0, -count % _COLUMNS)).contiguous()
        return rowwise.features(_mapped, [model], records, mean, wide)[:, :count]

    @property
    def exactly(self) -> dict[str, int]:
        """The size of heads on these features, for `Federation.ask`: a coefficient for each direction, and the bias."""
        return {"coefficients": self.projection.shape[1] + 1}


def _mapped(nets: Sequence[nn.Module], x: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    return (models.features(nets[0], x) - mean) @ projection


class PublicMap(Settings):
    """Settings of the map from features to the rows that heads are trained on, estimated from public images alone."""

    dims: PositiveInt = 512
    """Maximum number of principal directions of the public features."""
    whiten: bool = True
    """Centre the principal directions and scale them to equal variance; if false, take all features unchanged."""
    ridge: PositiveFloat = 0.003
    """Constant added to each variance before scaling, as a multiple of the largest variance."""
    quantile: Annotated[float, Ge(0), Le(1)] = 0.02
    """Quantile of the public rows' lengths to which rows are clipped."""
    records: PositiveInt = 5000
    """Number of public images for the estimate, drawn at random."""

    def check_size(self, model: nn.Module, public: Records, max_bytes: int) -> None:
        """Compare the size of the map with the limit of a message before it is computed; log the size if it is large.

        Raises:
            ValueError: the map is larger than ``max_bytes``.
        """
        width = models.feature_width(model, public.shape)
        most = min(self.dims, len(public), self.records, width) if self.whiten else width
        weights = sum(value.nbytes for value in state(model).values())
        size = weights + 4 * width * (most + 1)
        words = f"each client has to receive {size / 1e6:.0f} MB: the model and a map of {width} features"
        if size > max_bytes:
            fits = (max_bytes - weights) // (4 * width) - 1
            remedy = f"--space.dims {fits}, " if self.whiten and fits > 0 else ""
            raise ValueError(
                f"{words}, but the limit is {max_bytes / 1e6:.0f} MB; use {remedy}a --model with fewer features or a "
                "larger --max-message-mb"
            )
        if size > _LARGE:
            _log.warning("%s; a --model with fewer features or a smaller --space.dims needs less", words)

    def fit(self, model: nn.Module, public: Records, rng: torch.Generator) -> PublicFeatures:
        """Estimate the map of the features of ``model`` from public images.

        Raises:
            ValueError: some public images have features that are not finite.
        """
        some = torch.randperm(len(public), generator=rng)[: self.records].to(public.labels.device)
        rows = torch.cat(outputs(model, public[some], _BATCH, of=partial(models.features, model))).double()
        if not torch.isfinite(rows).all():
            raise ValueError("some public images have features that are not finite; choose another model or extractor")
        if float((rows - rows[:1]).abs().max()) <= _ALIKE * float(rows.abs().max()):
            raise ValueError("all public images have the same features, which say nothing; name others with --public")
        if self.whiten:
            mean, projection = self._whitening(rows)
            if projection.shape[1] < self.dims != type(self).model_fields["dims"].default:
                _log.warning(
                    "--space.dims is %d, but %d public records with %d features have %d directions; all are used",
                    self.dims,
                    *rows.shape,
                    projection.shape[1],
                )
        else:
            mean, projection = rows.new_zeros(rows.shape[1]), torch.eye(rows.shape[1]).to(rows)
        lengths = ((rows - mean) @ projection).norm(dim=1)
        radius = max(float(lengths.quantile(self.quantile)), 1e-6)
        return PublicFeatures(state(model), mean.float(), projection.float(), radius)

    def _whitening(self, rows: Float[Tensor, "n p"]) -> tuple[Float[Tensor, " p"], Float[Tensor, "p d"]]:
        mean = rows.mean(0)
        centred = (rows - mean) / math.sqrt(len(rows))
        if 4 * self.dims < min(centred.shape):  # for few directions of many, random projection is ten times as fast
            with seeds.isolated(seeds.derive(0, "whitening")):
                _, values, columns = torch.svd_lowrank(centred, q=self.dims + 32, niter=3)
            directions = columns.T
        else:
            _, values, directions = torch.linalg.svd(centred, full_matrices=False)
        variances = values[: self.dims] ** 2
        largest = variances[0].clamp_min(1e-12)
        return mean, directions[: self.dims].T * (variances + self.ridge * largest).rsqrt()


def split_public(public: Records, negatives: float) -> tuple[Tensor, Tensor]:
    """Positions of the distillation images and of the negatives: disjoint, the same at the server and all clients."""
    order = torch.randperm(len(public), generator=seeds.stream(0, "public split")).to(public.labels.device)
    cut = min(max(1, round(len(order) * (1 - negatives))), len(order) - 1)
    return order[:cut], order[cut:]

"""What methods share whose clients send private classifier heads on public features: map, heads, final model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Float, Float32
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import models, seeds
from fedstill.evaluate import outputs
from fedstill.privacy.accounting import share_noise
from fedstill.privacy.logistic import LogisticHead, PublishedLogisticHead
from fedstill.privacy.mechanisms import Mechanism
from fedstill.protocol import (
    Client,
    Federation,
    Method,
    Public,
    Records,
    Released,
    Reply,
    Settings,
    State,
    load,
    state,
    step,
)
from fedstill.train.extractor import Extractor

Epsilon = PositiveFloat | None
Share = Annotated[float, Gt(0), Lt(1)]
_BATCH = 500
"""Records whose features are computed at a time."""

Mean = Annotated[Float32[Tensor, " features"], Public()]
Projection = Annotated[Float32[Tensor, "features dims"], Public()]
Weights = Annotated[State, Public()]


class Head(Reply):
    """A private linear classifier on the public features; the last column is the bias."""

    head: Released[Float32[Tensor, "classes coefficients"]]


class PublicMap(Settings):
    """How features become what heads are trained on; everything in it comes from public images."""

    dims: PositiveInt = 512
    """Principal directions of the public features that are kept; fewer where there are fewer."""
    whiten: bool = True
    """Centre and scale these to equal variance. False: the features as they are, of which all are kept."""
    ridge: PositiveFloat = 0.003
    """Added to each variance before scaling, in multiples of the largest."""
    quantile: Annotated[float, Ge(0), Le(1)] = 0.02
    """Rows are clipped to this quantile of the public rows' lengths."""
    records: PositiveInt = 5000
    """Public images that all this is estimated from, drawn at random."""


class HeadTraining(Settings):
    """A client's class head."""

    penalty: PositiveFloat | None = None
    """Lambda beside the sum of losses; the sensitivity is sqrt(2) / Lambda. By default as ``logit_noise`` says."""
    logit_noise: PositiveFloat = 1.0
    """Standard deviation of the noise in a logit: Lambda is sqrt(2) noise multipliers by this, 0.3 at least."""
    bias: Annotated[float, Ge(0), Lt(1)] = 0.1
    """The constant feature, which makes the penalised bias."""
    lam: PositiveFloat = 0.01
    """Of privacy=published: the paper's lambda, beside the mean of losses."""
    scaling: Literal["paper", "repository"] = "paper"
    """Of privacy=published: lambda times the number of records, as written, or lambda alone, as in FedAUX's code."""


@dataclass(frozen=True)
class Space:
    """Where heads live: the extractor's state and the map behind it, as the server sends them.

    Attributes:
        weights: state of the model whose features are meant.
        mean: ``(p,)``, subtracted from features.
        projection: ``(p, d)``, applied then.
        radius: largest length of a row.
    """

    weights: dict[str, Tensor]
    mean: Float32[Tensor, " p"]
    projection: Float32[Tensor, "p d"]
    radius: float

    def rows(self, model: nn.Module, records: Records) -> Float[Tensor, "n d"]:
        """What heads see of ``records``, before clipping; ``model`` holds `weights`."""
        mean, projection = self.mean.to(records.images.device), self.projection.to(records.images.device)
        found = outputs(model, records, _BATCH, of=lambda x: (models.features(model, x) - mean) @ projection)
        return torch.cat(found)

    @property
    def exactly(self) -> dict[str, int]:
        """What heads on these features must measure: a coefficient for each direction, and the bias."""
        return {"coefficients": self.projection.shape[1] + 1}

    @property
    def payload(self) -> dict[str, Any]:
        """The fields of a request."""
        return {"weights": self.weights, "mean": self.mean, "projection": self.projection, "radius": self.radius}


def space(fed: Federation, extractor: Extractor, public_map: PublicMap, name: str) -> Space:
    """The features of this run, made from public images alone.

    Raises:
        ValueError: there are no public images.
    """
    public = needed(fed.public, name)
    model = fed.new_model()
    load(model, extractor.obtain(model, public, fed.rng("extractor"), progress=fed.progress("pretraining")))
    some = torch.randperm(len(public), generator=fed.rng("public map"))[: public_map.records].to(public.labels.device)
    rows = torch.cat(outputs(model, public[some], _BATCH, of=partial(models.features, model))).double()
    if not torch.isfinite(rows).all():
        raise ValueError("some public images have features that are not finite; choose another model or extractor")
    if public_map.whiten:
        mean, projection = _whitening(rows, public_map)
    else:
        mean, projection = rows.new_zeros(rows.shape[1]), torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    lengths = ((rows - mean) @ projection).norm(dim=1)
    radius = max(float(lengths.quantile(public_map.quantile)), 1e-6)
    return Space(state(model), mean.float(), projection.float(), radius)


def needed(public: Records | None, name: str) -> Records:
    """The public records, or a sentence that asks for some."""
    if public is None or len(public) < 2:
        raise ValueError(
            f"{name} needs public images, of which there are none; name some with --public, as --public noise"
        )
    return public


def _whitening(rows: Tensor, settings: PublicMap) -> tuple[Tensor, Tensor]:
    mean = rows.mean(0)
    centred = (rows - mean) / math.sqrt(len(rows))
    if 4 * settings.dims < min(centred.shape):  # a few of many: by random projection, ten times as fast
        with seeds.isolated(seeds.derive(0, "whitening")):
            _, values, columns = torch.svd_lowrank(centred, q=settings.dims + 32, niter=3)
        directions = columns.T
    else:
        _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    variances = values[: settings.dims] ** 2
    largest = variances[0].clamp_min(1e-12)
    return mean, directions[: settings.dims].T * (variances + settings.ridge * largest).rsqrt()


def published_epsilon(epsilon: Epsilon) -> float:
    """What the classic formula is asked for: next to no noise where there is to be none."""
    return 1e12 if epsilon is None else epsilon


class HeadModel(nn.Module):
    """An extractor, the public map and a linear head: the model of the whole family.

    Args:
        trunk: the extractor; trained or not as its parameters say.
        here: the map.
        head: ``(classes, d + 1)``, the bias last.
        bias: the constant feature.
        published: whether rows are taken as they are, as published heads want them.
    """

    mean: Tensor
    projection: Tensor
    radius: Tensor

    def __init__(self, trunk: nn.Module, here: Space, head: Tensor, bias: float, published: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.register_buffer("mean", here.mean.clone())
        self.register_buffer("projection", here.projection.clone())
        self.head = nn.Parameter(head.clone())
        self.register_buffer("radius", torch.tensor(here.radius))
        self.published = published
        self.bias = bias

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        rows = (models.features(self.trunk, x) - self.mean) @ self.projection
        if not self.published:
            length = rows.norm(dim=1, keepdim=True).clamp_min(self.radius)
            rows = rows * (math.sqrt(1 - self.bias**2) / length)
        logits: Tensor = rows @ self.head[:, :-1].T + self.bias * self.head[:, -1]
        return logits


class LinearHead(nn.Linear):
    """A head alone, on rows that have their constant."""

    def __init__(self, head: Float[Tensor, "classes d"]) -> None:
        super().__init__(head.shape[1], head.shape[0], bias=False, device=head.device)
        with torch.no_grad():
            self.weight.copy_(head)


@dataclass(frozen=True)
class Rows:
    """Features with labels, to train a head on; as `Records`, but for what the model sees."""

    x: Float[Tensor, "n d"]
    labels: Tensor

    def inputs(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "k d"]:
        """The rows at these positions."""
        return self.x[index]


def final(fed: Federation, here: Space, head: Tensor, bias: float, published: bool) -> HeadModel:
    """The family's model with ``head`` on the run's extractor."""
    trunk = fed.new_model()
    load(trunk, here.weights)
    return HeadModel(trunk, here, head.to(fed.device), bias, published).to(fed.device)


def mean_head(heads: Iterable[Tensor]) -> Float32[Tensor, "classes coefficients"]:
    """The plain mean of the clients' heads."""
    held = [head.double() for head in heads]
    return (torch.stack(held).sum(0) / len(held)).float()


class HeadMethod(Method):
    """What these methods have in common: a public extractor, and one private head from each client."""

    runs_model: ClassVar[bool] = False

    epsilon: Epsilon = 1.0
    """What a client's upload may cost at the run's delta; None adds no noise and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Heads whose noise a theorem covers, or the paper's, whose guarantee prints why it does not hold."""
    extractor: Extractor = Extractor()
    """Where the features come from."""
    space: PublicMap = PublicMap()
    """What is done to them."""
    head: HeadTraining = HeadTraining()
    """How a client trains on them."""

    def restored(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """See `Method.restored`."""
        if self.runs_model:
            return super().restored(network, weights)
        trunk = {name.removeprefix("trunk."): value for name, value in weights.items() if name.startswith("trunk.")}
        load(network, trunk)
        here = Space(trunk, weights["mean"], weights["projection"], float(weights["radius"]))
        return HeadModel(network, here, weights["head"], self.head.bias, self.published)

    def scale(self, here: Space) -> float | None:
        """The radius that heads expect rows to be clipped to; None where they take rows as they are."""
        return None if self.published else here.radius

    @property
    def published(self) -> bool:
        """Whether the paper's mechanisms run."""
        return self.privacy == "published"

    @step
    def train_head(self, client: Client, weights: Weights, mean: Mean, projection: Projection, radius: float) -> Head:
        """beta_k = argmin sum CE + Lambda/2 |beta|^2, and noise."""
        here = Space(weights, mean, projection, radius)
        return Head(head=self.class_head(client, here, here.rows(client.new_model(weights), client.train)))

    def class_head(
        self, client: Client, here: Space, rows: Float[Tensor, "n d"], share: float = 1.0
    ) -> Released[Float32[Tensor, "classes coefficients"]]:
        """The client's class head, released.

        Args:
            client: releases it.
            here: the features.
            rows: the client's records there.
            share: of the budget: of ``1 / sigma^2`` for sound noise, of epsilon for published.
        """
        classes = client.train.num_classes
        mechanism: Mechanism[tuple[Tensor, Tensor], Tensor]
        if self.published:
            mechanism = PublishedLogisticHead(
                num_classes=classes,
                lam=self.head.lam,
                epsilon=published_epsilon(self.epsilon) * share,
                delta=client.delta,
                bias=self.head.bias,
                scaling=self.head.scaling,
            )
        else:
            multiplier = share_noise(self.epsilon, client.delta, share)
            mechanism = LogisticHead(
                num_classes=classes,
                penalty=self.head.penalty or max(0.3, math.sqrt(2) * multiplier / self.head.logit_noise),
                radius=here.radius,
                noise_multiplier=multiplier,
                bias=self.head.bias,
            )
        return client.release(mechanism, (rows, client.train.labels)).map(lambda head: head.float().cpu())

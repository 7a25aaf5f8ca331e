"""Shared parts of the methods with one upload of sums of features and of their products: AFL, FedCGS and GH-OFL.

The sums add up over clients to those of all records, so the model does not depend on how the records are split.
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Float, Num
from torch import Tensor
from typing_extensions import override

from fedstill.base.records import answers
from fedstill.base.settings import Epsilon, Share
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.on_features import OnFeatures, head_model
from fedstill.models.heads import HeadModel
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import LEAST_STEPS, MOST_STEPS, IntegerMoments
from fedstill.privacy.second_moments import Labelled, SecondMoments, entries
from fedstill.protocol import Client, Federation, Records, Reply, Summed

_BATCH = 2000
"""Records whose products are added at a time."""
WHOLE_STEPS = 256
"""Steps of whole numbers by default: on CIFAR-10 they cost AFL less than .1 of a percent (docs/sums.md)."""
DTYPES = {"half": torch.float16, "single": torch.float32, "double": torch.float64}


class Sums(Reply):
    """A client's noisy sums (`Moments`), in whole numbers of `MomentSums.steps` or in real ones."""

    second: Summed[Num[Tensor, "groups entries"]]
    first: Summed[Num[Tensor, "classes moments"]]


class MomentSums(OnFeatures):
    """Settings of the public features, and of the sums and their release."""

    protects: ClassVar[str] = "record"
    epsilon: Epsilon = 1.0
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    bias: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Value of the constant feature, which counts records and gives the bias."""
    share: Share = 0.6
    """Share of the privacy budget for the sums of rows; the rest is for those of their products."""
    precision: Literal["half", "single", "double"] = "single"
    """Bytes of each real number sent, after the noise: 2, 4 or 8."""
    steps: Annotated[int, Ge(LEAST_STEPS), Le(MOST_STEPS)] | None = None
    """Whole steps of a row's largest length, to which rows are rounded before they are multiplied and added, so that
    sums are exact; none for real numbers, or 256 where sums are masked."""

    @property
    @override
    def constant(self) -> float:
        return self.bias

    def for_number(self) -> Self:
        """With a larger constant: a number's mean may lie far from the middle of its range, to which ridges pull."""
        own = type(self).model_fields["bias"].default != MomentSums.model_fields["bias"].default
        return self if own or "bias" in self.model_fields_set else self.model_copy(update={"bias": 0.5})

    @property
    def releases(self) -> int:
        """Number of sums that a client releases, which share epsilon."""
        return 1

    @property
    def scale(self) -> float:
        """Factor of the numbers sent: in half precision, so that sums of millions of records fit its range."""
        return 2.0**-10 if self.precision == "half" else 1.0

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """The settings that a client's sums depend on, for `Method.first_reply`."""
        return Sums, self.epsilon, self.extractor, self.space, self.bias, self.share, self.precision, self.steps


def whole_steps(settings: MomentSums, masked: bool) -> int | None:
    """The steps of whole numbers, if rows are rounded to them."""
    return settings.steps or (WHOLE_STEPS if masked else None)


def _multiplier(settings: MomentSums, delta: float) -> float:
    """The noise multiplier of each of a client's releases."""
    return release_noise(settings.epsilon, delta, precision_share=1 / settings.releases)


def noise_of(settings: MomentSums, delta: float) -> tuple[float, float]:
    """Standard deviations of the noise that the guarantee counts on in a diagonal entry of G, and in an entry of H."""
    multiplier = _multiplier(settings, delta)
    return multiplier / math.sqrt(1 - settings.share), multiplier / math.sqrt(settings.share)


class Embedding(NamedTuple):
    """A public map of rows to the rows that are summed.

    Attributes:
        dims: number of entries of an embedded row.
        radius: length to which embedded rows are clipped.
        of: the map, from ``(n, d)`` to ``(n, dims)``; a row's result depends on no other row.
    """

    dims: int
    radius: float
    of: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n dims"]]


def sizes(
    fed: Federation,
    features: PublicFeatures,
    settings: MomentSums,
    *,
    by_class: bool = False,
    dims: int | None = None,
    fewer: str = "--space.dims",
) -> dict[str, int]:
    """The sizes of a reply, for `Federation.ask`; ``dims`` are those of embedded rows, which ``fewer`` makes shorter.

    Raises:
        ValueError: the reply would be larger than a message may be; no client has released anything yet.
    """
    width, groups = (dims or features.projection.shape[1]) + 1, fed.num_classes if by_class else 1
    each = 8 if whole_steps(settings, fed.masked) else DTYPES[settings.precision].itemsize
    size = each * (groups * entries(width) + fed.num_classes * width)
    if size > fed.max_bytes:
        raise ValueError(
            f"each client would send {size / 1e6:.0f} MB, the sums of products of {width - 1} features"
            + (f" for each of {groups} classes" if by_class else "")
            + f", but the limit is {fed.max_bytes / 1e6:.0f} MB; use a smaller {fewer} or a larger "
            "--max-message-mb"
        )
    return {"groups": groups, "entries": entries(width), "moments": width}


def mechanism_facts(
    settings: MomentSums, delta: float, *, num_classes: int, dims: int, radius: float, by_class: bool
) -> dict[str, Any]:
    """The arguments of `SecondMoments` and `IntegerMoments` that the settings give, the same at clients and server."""
    return {
        "num_classes": num_classes,
        "dims": dims,
        "radius": radius,
        "noise_multiplier": _multiplier(settings, delta),
        "bias": settings.bias,
        "share": settings.share,
        "by_class": by_class,
    }


def release_moments(
    client: Client,
    features: PublicFeatures,
    settings: MomentSums,
    *,
    by_class: bool = False,
    embedding: Embedding | None = None,
) -> Sums:
    """Release the sums of a client's rows, or of their ``embedding``."""
    facts = mechanism_facts(
        settings,
        client.delta,
        num_classes=client.train.num_classes,
        dims=embedding.dims if embedding else features.projection.shape[1],
        radius=embedding.radius if embedding else features.radius,
        by_class=by_class,
    )
    rows = _batches(client, features, embedding)
    if steps := whole_steps(settings, client.masked):
        sums = client.release(IntegerMoments(**facts, steps=steps, adders=client.adders), rows)
        return Sums(second=sums.map(lambda sums: sums.second.cpu()), first=sums.map(lambda sums: sums.first.cpu()))
    released = client.release(SecondMoments(**facts), rows)
    dtype, scale = DTYPES[settings.precision], settings.scale
    return Sums(
        second=released.map(lambda sums: (sums.second * scale).to(dtype)),
        first=released.map(lambda sums: (sums.first * scale).to(dtype)),
    )


def _batches(client: Client, features: PublicFeatures, embedding: Embedding | None) -> Iterator[Labelled]:
    model = client.new_model(features.weights)
    for start in range(0, len(client.train), _BATCH):
        some: Records = client.train[slice(start, start + _BATCH)]
        rows = features.rows(model, some)
        yield embedding.of(rows) if embedding else rows, answers(some)


def row_model(fed: Federation, features: PublicFeatures, settings: MomentSums) -> HeadModel:
    """The network whose outputs are the rows themselves, for a classifier that is no linear head."""
    dims = features.projection.shape[1]
    return head_model(fed, features, torch.eye(dims, dims + 1), settings)

"""Shared parts of the methods whose clients send synthetic or chosen records: replies, their union, server training.

Records are images, or vectors.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from jaxtyping import AbstractDtype, Float32, UInt8
from torch import Tensor, nn

from fedstill import schema
from fedstill.base.records import Examples, Trainable
from fedstill.base.settings import Settings
from fedstill.protocol import Client, Federation, Labels, Records, Reply
from fedstill.train.condensation import CondensedTraining

if TYPE_CHECKING:
    from jaxtyping import Float as Vectors
else:

    class Vectors(AbstractDtype):
        """Type of vectors in a message: ``Vectors[Tensor, "n columns"]`` is float32, or float16 for half the bytes."""

        dtypes = ("float16", "float32")


class ImageSet(Reply):
    """Labelled 8-bit images: as many bytes as pixels, one more for each label."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Labels


class SoftImageSet(Reply):
    """8-bit images with a network's logits for them: as many bytes as pixels, four more for each class."""

    images: UInt8[Tensor, "n channels height width"]
    logits: Float32[Tensor, "n classes"]


class ValueSet(Reply):
    """Labelled real-valued images, as networks see them: four bytes a pixel, one more for each label."""

    values: Float32[Tensor, "n channels height width"]
    labels: Labels


class VectorSet(Reply):
    """Labelled vectors, as networks see them: four or two bytes a number, one more for each label."""

    vectors: Vectors[Tensor, "n columns"]
    labels: Labels


class VectorUpload(Settings):
    """Settings of an upload of vectors."""

    vectors: Literal["float32", "float16"] = "float32"
    """Type of the numbers sent if records are vectors: four bytes each, or two."""


def vector_reply(examples: Trainable, num_classes: int, settings: VectorUpload) -> VectorSet:
    """The reply with vectors ``(n, d)`` and their labels."""
    values = examples.inputs()
    if settings.vectors == "float16":
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit).half()
    return VectorSet(vectors=values, labels=schema.compact(examples.labels, num_classes))


def image_reply(records: Records) -> ImageSet:
    """The reply with ``records``."""
    return ImageSet(images=records.images, labels=schema.compact(records.labels, records.num_classes))


def value_reply(examples: Examples, num_classes: int) -> ValueSet:
    """The reply with ``examples``."""
    return ValueSet(values=examples.inputs(), labels=schema.compact(examples.labels, num_classes))


def collect(
    fed: Federation, replies: Sequence[ImageSet | ValueSet | VectorSet], name: str = "synthetic"
) -> Records | Examples:
    """All clients' images, 8-bit or real-valued, or vectors, in the order of the clients.

    The report shows images, in 8 bits, under ``name``.
    """
    if fed.like.are_vectors:
        sets = cast(Sequence[VectorSet], replies)
        return Examples(*concatenate(fed, ((r.vectors.float(), r.labels) for r in sets)))
    if isinstance(replies[0], ImageSet):
        images = union(fed, cast(Sequence[ImageSet], replies))
        fed.show(name, images)
        return images
    examples = Examples(*concatenate(fed, ((r.values, r.labels) for r in cast(Sequence[ValueSet], replies))))
    fed.show("synthetic", examples.rounded(fed.num_classes, fed.like.normalisation))
    return examples


def concatenate(fed: Federation, sets: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All clients' images or values, and all their labels, in the order of the clients.

    Raises:
        ValueError: the clients sent nothing.
    """
    parts = [(values.to(fed.device), labels.long().to(fed.device)) for values, labels in sets]
    values, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    if not len(labels):
        raise ValueError("the clients sent 0 examples; the server needs at least 1 to train on")
    return values, labels


def union(fed: Federation, replies: Iterable[ImageSet]) -> Records:
    """All clients' images as one set, in the order of the clients."""
    images, labels = concatenate(fed, ((r.images, r.labels) for r in replies))
    return Records(images, labels, fed.num_classes, fed.like.normalisation)


def soft_union(fed: Federation, replies: Iterable[SoftImageSet]) -> Examples:
    """All clients' images as one set, in the order of the clients, with probabilities as labels.

    The report shows them under the classes of the largest logits.
    """
    pairs = [(r.images.to(fed.device), r.logits.to(fed.device)) for r in replies]
    images, logits = (torch.cat(part) for part in zip(*pairs, strict=True))
    records = Records(images, logits.argmax(1), fed.num_classes, fed.like.normalisation)
    fed.show("synthetic", records)
    return Examples(records, logits.softmax(1))


def train_on(fed: Federation, images: Records | Examples, training: CondensedTraining) -> nn.Module:
    """The server's model, trained on ``images`` from its first random start."""
    model = fed.new_model()
    progress = fed.progress("training at the server")
    training.fit(model, images, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
    return model


def random_net(client: Client, index: int) -> nn.Module:
    """theta_0 ~ P: random network number ``index``, the same for every client, for gradient matching."""
    return client.new_model(draw=1 + index)  # draw 0 is the server's own start

"""Shared parts of the methods whose clients send synthetic or chosen images: replies, their union, server training."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from fedstill import schema
from fedstill.protocol import Client, Federation, Labels, Records, Reply
from fedstill.records import Examples
from fedstill.train.condensation import CondensedTraining


class ImageSet(Reply):
    """Labelled 8-bit images: as many bytes as pixels, one more for each label."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Labels


class ValueSet(Reply):
    """Labelled real-valued images, as networks see them: four bytes a pixel, one more for each label."""

    values: Float32[Tensor, "n channels height width"]
    labels: Labels


def image_reply(records: Records) -> ImageSet:
    """The reply with ``records``."""
    return ImageSet(images=records.images, labels=schema.compact(records.labels, records.num_classes))


def value_reply(examples: Examples, num_classes: int) -> ValueSet:
    """The reply with ``examples``."""
    return ValueSet(values=examples.inputs(), labels=schema.compact(examples.labels, num_classes))


def collect(fed: Federation, replies: Sequence[ImageSet | ValueSet]) -> Records | Examples:
    """All clients' images, 8-bit or real-valued, in the order of the clients; the report shows them in 8 bits."""
    if isinstance(replies[0], ImageSet):
        images = union(fed, cast(Sequence[ImageSet], replies))
        fed.show("synthetic", images)
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


def train_on(fed: Federation, images: Records, training: CondensedTraining) -> nn.Module:
    """The server's model, trained on ``images`` from its first random start."""
    model = fed.new_model()
    progress = fed.progress("training at the server")
    training.fit(model, images, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
    return model


def random_net(client: Client, index: int) -> nn.Module:
    """theta_0 ~ P: random network number ``index``, the same for every client, for gradient matching."""
    return client.new_model(draw=1 + index)  # draw 0 is the server's own start

"""What methods share whose clients send small labelled image sets: reply, union and the server's training."""

from collections.abc import Iterable

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from fedstill import schema
from fedstill.protocol import Federation, Labels, Records, Reply
from fedstill.train.server import ServerTraining


class ImageSet(Reply):
    """Labelled 8-bit images: as many bytes as pixels, one more for each label."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Labels


def packed(records: Records) -> ImageSet:
    """The reply that carries ``records``."""
    return ImageSet(images=records.images, labels=schema.compact(records.labels, records.num_classes))


def union(fed: Federation, replies: Iterable[ImageSet]) -> Records:
    """All clients' images as one set, in the order of the clients."""
    sets = [(r.images.to(fed.device), r.labels.long().to(fed.device)) for r in replies]
    images, labels = (torch.cat(parts) for parts in zip(*sets, strict=True))
    if not len(labels):
        raise ValueError("the clients sent 0 images; the server needs at least 1 to train on")
    return Records(images, labels, fed.num_classes, fed.like.normalisation)


def train_on(fed: Federation, images: Records, training: ServerTraining) -> nn.Module:
    """The server's model, trained on ``images`` from its first random start."""
    model = fed.new_model()
    training.fit(model, images, fed.rng("training"), on_epoch=fed.progress("training at the server"))
    return model

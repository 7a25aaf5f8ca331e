"""Replies of FedGM with label differential privacy, and the image sets that the server derives from them."""

from typing import Annotated, Literal

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from fedstill import schema
from fedstill.methods.surrogate import ImageSet
from fedstill.privacy.mechanisms import UnprotectedLabels
from fedstill.privacy.randomized_response import RRWithPrior
from fedstill.protocol import Client, Labels, Records, Released, Reply
from fedstill.schema import Below

ClassWeighting = Literal["counts", "equal"]
"""Weights of a client's classes at the server: their numbers of randomised labels, or equal weights."""


class RandomisedSet(Reply):
    """Images of all classes, distilled with randomised labels, and the number of randomised labels of each class."""

    images: Released[UInt8[Tensor, "n channels height width"]]
    labels: Released[Labels]
    counts: Released[Annotated[Int64[Tensor, " classes"], Below(2**40)]]


class TaggedSet(Reply):
    """Images distilled with the true labels, which they reveal, and randomised labels, or tags (privacy=published)."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Released[Labels]


def randomiser(epsilon: float | None, prior: Tensor) -> RRWithPrior | UnprotectedLabels:
    """The mechanism for labels with priors ``(n, classes)``; without an epsilon, labels stay as they are."""
    return UnprotectedLabels("labels are not randomised") if epsilon is None else RRWithPrior(epsilon, prior)


def tag(client: Client, images: Records, prior: Tensor, epsilon: float | None) -> TaggedSet:
    """The reply with ``images`` and their randomised labels."""
    reason = "its images were made with the true labels, so that randomising their tags hides nothing"
    tags = client.release(UnprotectedLabels(reason, randomiser(epsilon, prior)), images.labels)
    return TaggedSet(images=images.images, labels=tags.map(lambda y: schema.compact(y, images.num_classes)))


def image_set(reply: TaggedSet) -> ImageSet:
    """The images with their tags as labels."""
    return ImageSet(images=reply.images, labels=reply.labels.value)


def weigh(weighting: ClassWeighting, reply: RandomisedSet) -> ImageSet:
    """The reply's images; with "counts", repeated or dropped so that classes are as frequent as randomised labels."""
    images, labels = reply.images.value, reply.labels.value.long()
    if weighting == "counts":
        ends = reply.counts.value[labels].double().cumsum(0)
        if not ends.any():  # no randomised label has one of these classes
            return ImageSet(images=images[:0], labels=labels[:0])
        index = torch.searchsorted(ends, (torch.arange(len(ends)) + 0.5) / len(ends) * ends[-1], right=True)
        images, labels = images[index], labels[index]
    return ImageSet(images=images, labels=labels)

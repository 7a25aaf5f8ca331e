"""Replies of FedGM with label differential privacy, and the image sets that the server makes of them."""

from typing import Literal

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from fedstill import schema
from fedstill.methods.surrogate import ImageSet
from fedstill.privacy.mechanisms import UnprotectedLabels
from fedstill.privacy.randomized_response import RRWithPrior
from fedstill.protocol import Client, Labels, Records, Released, Reply

ClassWeighting = Literal["counts", "equal"]
"""Weights of a client's classes at the server: their numbers of randomised labels, or all alike."""


class RandomisedSet(Reply):
    """Images of all classes made with randomised labels, and how many of these name each class."""

    images: Released[UInt8[Tensor, "n channels height width"]]
    labels: Released[Labels]
    counts: Released[Int64[Tensor, " classes"]]


class TaggedSet(Reply):
    """Images made with the true labels, which they reveal whatever their tags say (privacy=published)."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Released[Labels]


def randomiser(epsilon: float | None, prior: Tensor) -> RRWithPrior | UnprotectedLabels:
    """The mechanism for labels with these priors ``(n, classes)``; None leaves labels as they are."""
    return UnprotectedLabels("labels are not randomised") if epsilon is None else RRWithPrior(epsilon, prior)


def retagged(client: Client, images: Records, prior: Tensor, epsilon: float | None) -> TaggedSet:
    """The reply with ``images``, whose labels are randomised as if that hid them."""
    reason = "its images were made with the true labels, so that randomising their tags hides nothing"
    tags = client.release(UnprotectedLabels(reason, randomiser(epsilon, prior)), images.labels)
    return TaggedSet(images=images.images, labels=tags.map(lambda y: schema.compact(y, images.num_classes)))


def tagged(reply: TaggedSet) -> ImageSet:
    """The images with their tags for labels."""
    return ImageSet(images=reply.images, labels=reply.labels.value)


def weighted(weighting: ClassWeighting, reply: RandomisedSet) -> ImageSet:
    """As many images as came, with a class's share of them that of its randomised labels; or these images."""
    images, labels = reply.images.value, reply.labels.value.long()
    if weighting == "counts":
        ends = reply.counts.value[labels].double().cumsum(0)
        index = torch.searchsorted(ends, (torch.arange(len(ends)) + 0.5) / len(ends) * ends[-1], right=True)
        images, labels = images[index], labels[index]
    return ImageSet(images=images, labels=labels)

"""Randomised labels: sets of images with them, and records relabelled by them.

The functions use only randomised labels and public images, so their results cost no privacy.
"""

from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from fedstill import schema
from fedstill.base.records import Records
from fedstill.evaluation import outputs
from fedstill.methods.parts.surrogate import ImageSet
from fedstill.privacy.mechanisms import UnprotectedLabels
from fedstill.privacy.randomized_response import RRWithPrior, probabilities, top_k
from fedstill.protocol import Client, Labels, Released, Reply
from fedstill.schema import Below
from fedstill.train.losses import Denoising


def with_labels(records: Records, labels: Int64[Tensor, " n"]) -> Records:
    """The records' images with other labels."""
    return Records(records.images, labels, records.num_classes, records.normalisation)


def predicted_prior(model: nn.Module, records: Records, temperature: float) -> Float[Tensor, "n classes"]:
    """Softmax of the model's logits divided by ``temperature``, for each record."""
    if not len(records):
        return torch.zeros(0, records.num_classes, dtype=torch.float64, device=records.labels.device)
    logits = torch.cat(outputs(model, records, 500))
    return (logits.double() / temperature).softmax(1)


def likeliest(
    records: Records,
    prior: Float[Tensor, "n classes"],
    epsilon: float,
    model: nn.Module,
    denoising: Denoising,
    rng: torch.Generator,
) -> Records:
    """The records with their likeliest true labels, given `RRWithPrior`'s labels with this prior; trains ``model``."""
    given = probabilities(prior, epsilon).gather(2, records.labels.view(-1, 1, 1).expand(-1, prior.shape[1], 1))
    return with_labels(records, denoising.likeliest(model, records, given[:, :, 0], rng))


def without_unlikely(
    records: Records, prior: Float[Tensor, "n classes"], epsilon: float, later: Bool[Tensor, " n"]
) -> Records:
    """The records, without those whose randomised label the prior makes unlikely; ``later`` ones all stay."""
    if not later.any():
        return records
    k = int(top_k(prior[later], epsilon).double().mean())  # as the official code, rounded down
    rank = (prior > prior.gather(1, records.labels[:, None])).sum(1)
    return records[later | (rank < k)]


def with_every_class(records: Records, ipc: int, rng: torch.Generator) -> Records:
    """The records, with ``ipc`` random images added for each class that no label names."""
    missing = torch.nonzero(records.class_counts() == 0).flatten().repeat_interleave(ipc)
    drawn = torch.randint(len(records), missing.shape, generator=rng).to(missing.device)
    images, labels = torch.cat([records.images, records.images[drawn]]), torch.cat([records.labels, missing])
    return Records(images, labels, records.num_classes, records.normalisation)


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

"""Relabelling of records with randomised labels: likelier labels, dropped records, absent classes (FedGM, LP-MST).

The functions use only randomised labels and public images, so their results cost no privacy.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from fedstill.evaluate import outputs
from fedstill.privacy.randomized_response import probabilities, top_k
from fedstill.records import Records
from fedstill.train.denoise import Denoising


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

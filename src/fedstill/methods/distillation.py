"""Distillation of private heads into a student on public images (FedD+P, FedAUX, FedAUX+F, FedAUXfdp).

Sattler et al. 2021 (FedAUX, arXiv:2102.02514), sections 3.1 and 3.2.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn

from fedstill import models
from fedstill.distill.ensemble import Distillation
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.methods.heads import PrivateHeads, head_model, mean_head
from fedstill.models.head import HeadModel, LinearHead
from fedstill.protocol import Client, Federation, Records, load, public_images
from fedstill.records import Examples
from fedstill.settings import Settings, Share

FLOOR = 1e-8
"""Added to every certainty, so that no image is without a teacher."""


class ScoreTraining(Settings):
    """A client's score head, whose certainty weighs the client: its records against public negatives."""

    share: Share = 1 / 6
    """Of the privacy budget: of ``1 / sigma^2`` for sound noise, of epsilon for published (0.1 of 0.6 in the paper)."""
    penalty: PositiveFloat = 25.0
    """Lambda beside the sum of losses: the sensitivity is 1 / Lambda."""


class HeadDistillation(Settings):
    """The distillation of heads into a student."""

    distillation: Distillation = Distillation()
    """The student's training."""
    student: Literal["mean", "fresh"] = "mean"
    """The student's head at the start: the mean of the clients' heads, or fresh (zeros), as in the paper."""
    negatives: Share = 0.2
    """Share of the public images that stand against a client's records; the student learns on the rest."""


def negative_rows(
    client: Client, features: PublicFeatures, model: nn.Module, share: float, method: str
) -> Float[Tensor, "m d"]:
    """The features of the public negatives D^-, a ``share`` of the public images; once for all clients of a request.

    ``model`` must have the weights of ``features``; ``method`` is the method's name, for errors.
    """
    public = public_images(client.public, method)
    return client.once("negatives", lambda: features.rows(model, public[split_public(public, share)[1]]))


def initial_student(
    fed: Federation, features: PublicFeatures, heads: Iterable[Tensor], settings: PrivateHeads, start: str
) -> HeadModel:
    """The student before its training: the public extractor with the mean of ``heads``, or with zeros."""
    head = mean_head(heads)
    return head_model(fed, features, head if start == "mean" else torch.zeros_like(head), settings)


def distil_student(
    fed: Federation,
    student: HeadModel,
    images: Records,
    x: Float[Tensor, "n d+1"],
    targets: Float[Tensor, "n classes"],
    distillation: Distillation,
) -> HeadModel:
    """Train the student in place to predict the ensemble's ``targets`` on ``images``; returns it.

    Where the extractor has nothing to train, the head alone is trained on ``x``, the images' rows as heads take them.
    """
    rng, progress = fed.rng("distillation"), fed.progress("distilling at the server")
    if models.features(student.trunk, images.inputs(slice(0, 1))).requires_grad:
        distillation.distil(student, images, targets, rng, on_epoch=progress, checkpoint=fed.epochs)
    else:
        head = LinearHead(student.head.detach())
        rows = Examples(x.float(), images.labels)
        distillation.distil(head, rows, targets, rng, on_epoch=progress, checkpoint=fed.epochs)
        load(student, {"head": head.weight.detach()})
    return student

"""Distillation of private heads into a student on public images (FedD+P, FedAUX, FedAUX+F, FedAUXfdp).

Sattler et al. 2021 (FedAUX, arXiv:2102.02514), sections 3.1 and 3.2.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill import models
from fedstill.base.records import Examples
from fedstill.base.settings import Settings, Share
from fedstill.distill.ensemble import Distillation
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.methods.parts.on_features import head_model
from fedstill.methods.parts.private_heads import Penalty, PrivateHeads, mean_head
from fedstill.models.heads import HeadModel, LinearHead
from fedstill.protocol import Client, Federation, Records, load, public_images

FLOOR = 1e-8
"""Added to every certainty score, so that every image has a teacher of positive weight."""


class ScoreTraining(Settings):
    """Training of a score head, which separates a client's records from public negatives; its certainty is a weight."""

    share: Share = 1 / 6
    """Share of the privacy budget: of ``1 / sigma^2`` for sound noise, of epsilon for published noise (0.1 of 0.6)."""
    penalty: Penalty = 25.0
    """Lambda, the weight of the penalty when losses are summed; the sensitivity is 1 / Lambda."""


class HeadDistillation(Settings):
    """Settings of the distillation of heads into a student."""

    distillation: Distillation = Distillation()
    """The student's training."""
    student: Literal["mean", "fresh"] = "mean"
    """The student's first head: the mean of the clients' heads, or zeros ("fresh"); the paper gives no start."""
    negatives: Share = 0.2
    """Share of the public images that score heads use as negatives; the student learns on the rest."""


def negative_rows(
    client: Client, features: PublicFeatures, model: nn.Module, share: float, method: str
) -> Float[Tensor, "m d"]:
    """Features of the public negatives D^-, a ``share`` of the public images; computed once for a request's clients.

    ``model`` must have the weights of ``features``. ``method`` is the method's name, for errors.
    """
    public = public_images(client.public, method)
    return client.once("negatives", lambda: features.rows(model, public[split_public(public, share)[1]]))


def initial_student(
    fed: Federation, features: PublicFeatures, heads: Iterable[Tensor], settings: PrivateHeads, start: str
) -> HeadModel:
    """The student before training: the public extractor with the mean of ``heads``, or zeros, as its head."""
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
    """Train the student in place to predict the ensemble's ``targets`` on ``images``, and return it.

    If the extractor has no trainable parameters, train the head alone, on ``x``, its inputs for these images.
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

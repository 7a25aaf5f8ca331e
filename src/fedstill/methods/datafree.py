"""Shared parts of the methods that distil without data (DENSE, Fed-DAFL, Fed-ADI): settings, loss and checks."""

import math

import torch
from pydantic import PositiveInt
from torch import Tensor

from fedstill.distill.ensemble import Temperature, distillation_loss
from fedstill.distill.teachers import Average, Teachers
from fedstill.protocol import Records, Settings
from fedstill.train.augment import View
from fedstill.train.loop import Diverged, Loss
from fedstill.train.sgd import SGD

_SHOWN = 10
"""Images of each class in the report."""


class DataFreeSettings(Settings):
    """Settings of the server's epochs, in each of which images are made and the student is trained."""

    epochs: PositiveInt = 200
    """Epochs at the server, each of which makes images, then trains the student."""
    student: SGD = SGD(batch_size=128)
    """The student's training in one epoch."""
    average: Average = "logits"
    """The mean that the ensemble takes. If each model saw only a few classes, the surest drown the others' logits."""
    temperature: Temperature = 4.0
    """T of the distillation loss."""
    student_view: View = "none"
    """Augmentation of the student's images; the teachers see the same views."""
    pool: PositiveInt = 20
    """Number of latest epochs whose images the student is trained on in every epoch."""


def student_loss(teachers: Teachers, settings: DataFreeSettings) -> Loss:
    """``L_dis = T^2 KL(softmax(D / T) || softmax(f_S / T))`` on a pool's examples, whose labels are ``D(x)``.

    Under augmentation the teachers are asked for the logits of each view.
    """

    def on_pool(output: Tensor, x: Tensor, logits: Tensor) -> Tensor:
        return distillation_loss(output, logits, settings.temperature)

    def on_views(output: Tensor, x: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            logits = teachers(x)
        return distillation_loss(output, logits, settings.temperature)

    return on_pool if settings.student_view == "none" else on_views


def check_logits(teachers: Teachers, like: Records) -> None:
    """Refuse teachers whose logits are not finite, which would make the images look like the failure.

    Raises:
        Diverged: a teacher has logits that are not finite.
    """
    pixels = torch.linspace(0, 1, math.prod(like.shape), device=like.images.device)
    with torch.no_grad():
        each = teachers.each(like.normalisation.apply(pixels.view(1, *like.shape)))[0]
    if broken := [k for k, logits in enumerate(each) if not torch.isfinite(logits).all()]:
        raise Diverged(
            f"{len(broken)} of the clients' {len(teachers)} models give logits that are not finite, so their training "
            "failed; let clients train with a smaller learning rate (--local.lr)"
        )


def latest_of_each_class(images: Records) -> Records:
    """The last images of each class, for the report."""
    chosen = [torch.nonzero(images.labels == label).flatten()[-_SHOWN:] for label in range(images.num_classes)]
    return images[torch.cat(chosen)]

"""Shared parts of the methods that distil without data (DENSE, Fed-DAFL, Fed-ADI): settings, ensemble and student."""

import math
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.base.errors import Diverged
from fedstill.distill.ensemble import Temperature, distillation_loss
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Average, Teachers
from fedstill.methods.parts.model_uploads import Models
from fedstill.models.generator import quarter_of
from fedstill.protocol import Federation, Records, Settings
from fedstill.train.augment import VIEWS, View
from fedstill.train.sgd import SGD, Loss

_SHOWN = 10
"""Images of each class in the report."""


class DataFreeSettings(Settings):
    """Settings of the server's epochs. In each epoch images are generated, then the student is trained."""

    images_only: ClassVar[bool] = True
    epochs: PositiveInt = 200
    """Epochs at the server. Each generates images, then trains the student."""
    student: SGD = SGD(batch_size=128)
    """The student's training in one epoch."""
    average: Average = "logits"
    """Mean that the ensemble takes. With "logits", confident models outweigh the others if each saw few classes."""
    temperature: Temperature = 4.0
    """T of the distillation loss."""
    student_view: View = "none"
    """Augmentation of the student's images; the teachers see the same augmented images."""
    pool: PositiveInt = 20
    """Number of latest epochs whose images the student is trained on in every epoch."""


def check_images(fed: Federation) -> None:
    """Refuse images that a generator can't make, before a client is asked."""
    quarter_of(fed.like.shape)


def ensemble(fed: Federation, models: Models, settings: DataFreeSettings, weights: Tensor | None = None) -> Teachers:
    """The ensemble D of the clients' models. Logits that are not finite are refused: they would only spoil the images.

    ``weights`` are the models' weights, as in `Teachers`.

    Raises:
        Diverged: a model has logits that are not finite.
    """
    teachers = Teachers(models.networks, average=settings.average, weights=weights)
    pixels = torch.linspace(0, 1, math.prod(fed.like.shape), device=fed.device)
    with torch.no_grad():
        each = teachers.each(fed.like.normalisation.apply(pixels.view(1, *fed.like.shape)))[0]
    if broken := [k for k, logits in enumerate(each) if not torch.isfinite(logits).all()]:
        raise Diverged(
            f"{len(broken)} of the clients' {len(teachers)} models give logits that are not finite, so their training "
            "failed; let clients train with a smaller learning rate (--local.lr)"
        )
    return teachers


def student_loss(teachers: Teachers, settings: DataFreeSettings) -> Loss:
    """``L_dis = T^2 KL(softmax(D / T) || softmax(f_S / T))`` on a pool's examples, whose labels are ``D(x)``.

    Under augmentation, the loss computes the teachers' logits of the augmented images instead.
    """

    def loss(output: Tensor, x: Tensor, logits: Tensor) -> Tensor:
        if settings.student_view != "none":
            with torch.no_grad():
                logits = teachers(x)
        return distillation_loss(output, logits, settings.temperature)

    return loss


def train_student(
    student: nn.Module, teachers: Teachers, pool: Pool, settings: DataFreeSettings, rng: torch.Generator
) -> None:
    """Train the student in place for one epoch, on the images of the pool."""
    loss, view = student_loss(teachers, settings), VIEWS[settings.student_view]
    settings.student.fit(student, pool.examples(), rng, loss=loss, augment=view)


def latest_of_each_class(images: Records) -> Records:
    """The last images of each class, for the report."""
    chosen = [torch.nonzero(images.labels == label).flatten()[-_SHOWN:] for label in range(images.num_classes)]
    return images[torch.cat(chosen)]

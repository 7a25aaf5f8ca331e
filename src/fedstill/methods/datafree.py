"""What methods share that make their images from the clients' models: DENSE, Fed-DAFL and Fed-ADI."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.ensemble import Temperature, distillation_loss
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Average, Teachers
from fedstill.methods.uploads import UploadingMethod
from fedstill.protocol import Federation, Records, Round
from fedstill.records import Examples
from fedstill.train.augment import VIEWS, View
from fedstill.train.sgd import SGD, Diverged

_SHOWN = 10
"""Images of each class in the report."""


class Images(Protocol):
    """Makes images, an epoch at a time."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that lasts from epoch to epoch; changing them in place resumes a run."""

    def epoch(self, teachers: Teachers, student: nn.Module, rng: torch.Generator) -> tuple[Records, Tensor]:
        """One epoch's images, and the teachers' mean logits for them, ``(n, classes)``."""


class DataFreeMethod(UploadingMethod):
    """Images are made for the student to learn on; nobody needs any."""

    epochs: PositiveInt = 200
    """Epochs at the server: make images, then teach the student."""
    student: SGD = SGD(batch_size=128)
    """The student's training in one of them."""
    average: Average = "logits"
    """What the ensemble is the mean of. Of models that saw few classes each, the surest drown the others' logits."""
    temperature: Temperature = 4.0
    """T of the distillation loss."""
    student_view: View = "none"
    """How images are augmented for it, and for the teachers with it."""
    pool: PositiveInt = 20
    """How many epochs' images it sees: the latest, all of them in every epoch."""

    @abstractmethod
    def images(self, like: Records, rng: torch.Generator) -> Images:
        """What makes the images of one round."""

    @property
    @abstractmethod
    def images_per_epoch(self) -> int:
        """How many that makes in an epoch."""

    def teachers(self, networks: Sequence[nn.Module]) -> Teachers:
        """See `UploadingMethod.teachers`."""
        return Teachers(networks, average=self.average)

    def teach(self, fed: Federation, teachers: Teachers, student: nn.Module, round: Round) -> None:
        """See `UploadingMethod.teach`."""
        like = fed.like.to(fed.device)
        _sane(teachers, like)
        images = self.images(like, fed.rng("generator", round.number))
        pool = Pool(like, min(self.pool, self.epochs) * self.images_per_epoch)
        progress = fed.progress("making images and distilling")
        for epoch in fed.epochs(self.epochs, student, images.tensors, pool.tensors):
            pool.add(*images.epoch(teachers, student, fed.rng("images", round.number, epoch)))
            self.learn(teachers, student, pool, fed.rng("student", round.number, epoch))
            progress(epoch, self.epochs)
        fed.show("synthetic", _some(pool.taught().images))

    def learn(self, teachers: Teachers, student: nn.Module, pool: Pool, rng: torch.Generator) -> None:
        """theta_S <- theta_S - eta_S grad L_dis, over the pool."""
        if self.student_view == "none":
            loss = partial(distillation_loss, temperature=self.temperature)
            self.student.fit(student, pool.taught(), rng, loss=loss)
        else:
            pair = _Pair(teachers, student, self.temperature)
            self.student.fit(pair, pool.taught(), rng, augment=VIEWS[self.student_view], loss=pair.loss)


class _Pair(nn.Module):
    """A student with teachers who see the same view of an image."""

    def __init__(self, teachers: Teachers, student: nn.Module, temperature: float) -> None:
        super().__init__()
        self._teachers = teachers
        self._temperature = temperature
        self.student = student

    def forward(self, x: Tensor) -> Tensor:
        """Logits of student and teachers, ``(n, 2, classes)``."""
        with torch.no_grad():
            said = self._teachers(x)
        return torch.stack([self.student(x), said], 1)

    def loss(self, both: Tensor, _: Tensor) -> Tensor:
        """L_dis; what the pool has of the teachers is for the image as it is."""
        return distillation_loss(both[:, 0], both[:, 1], self._temperature)


def _sane(teachers: Teachers, like: Records) -> None:
    """Refuse teachers that say nothing finite; images made for them would seem to be what failed."""
    pixels = torch.linspace(0, 1, math.prod(like.shape), device=like.images.device)
    with torch.no_grad():
        said = teachers.each(like.normalisation.apply(pixels.view(1, *like.shape)))[0]
    if broken := [k for k, logits in enumerate(said) if not torch.isfinite(logits).all()]:
        raise Diverged(
            f"{len(broken)} of the clients' {len(teachers)} models give logits that are not finite, so their training "
            "failed; let clients train with a smaller learning rate (--local.lr)"
        )


def _some(images: Examples) -> Records:
    """The latest of each class."""
    assert isinstance(images, Records)
    chosen = [torch.nonzero(images.labels == label).flatten()[-_SHOWN:] for label in range(images.num_classes)]
    return images[torch.cat(chosen)]

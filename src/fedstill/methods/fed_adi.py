"""Fed-ADI: pixels fitted to the clients' models by adaptive DeepInversion; a baseline of DENSE.

Yin et al., "Dreaming to distill: data-free knowledge transfer via DeepInversion", CVPR 2020 (arXiv:1912.08795), as
Zhang et al. (DENSE, arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-adi.md has the whole list):

* the teacher is the mean of the clients' logits, and the batch norm term the mean over clients;
* fewer, shorter batches than its 2,000 steps; the student learns with DENSE's settings;
* networks without batch norms have no such term; `Inversion.missing` says so.
"""

import logging
from dataclasses import dataclass, field

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.inversion import Inversion
from fedstill.distill.teachers import Teachers
from fedstill.methods.datafree import DataFreeMethod, Images
from fedstill.protocol import Federation, Records, Round
from fedstill.train.sgd import SGD

log = logging.getLogger("fedstill")


class FedADI(DataFreeMethod):
    """One upload of each client's model; images fitted pixel by pixel and a student at the server, and no data."""

    inversion: Inversion = Inversion(steps=500)
    """How a batch of images is made."""
    epochs: PositiveInt = 20
    """Epochs at the server: make a batch of images, then teach the student."""
    student: SGD = SGD(batch_size=128, epochs=10)
    """The student's training in one of them."""

    @property
    def images_per_epoch(self) -> int:
        """See `DataFreeMethod`."""
        return self.inversion.batch_size

    def teach(self, fed: Federation, teachers: Teachers, student: nn.Module, round: Round) -> None:
        """See `UploadingMethod.teach`."""
        if missing := self.inversion.missing(teachers):
            log.warning("%s", missing)
        super().teach(fed, teachers, student, round)

    def images(self, like: Records, rng: torch.Generator) -> Images:
        """Pixels that the models classify, that are smooth and have the statistics their batch norms know."""
        return _Batches(self.inversion, like)


@dataclass(frozen=True)
class _Batches:
    """A batch an epoch; nothing lasts."""

    inversion: Inversion
    like: Records
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def epoch(self, teachers: Teachers, student: nn.Module, rng: torch.Generator) -> tuple[Records, Tensor]:
        """See `Images`."""
        return self.inversion.epoch(teachers, student, self.like, rng)

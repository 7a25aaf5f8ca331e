"""FedDF: the mean of the clients' models, taught by all of them together on public images.

Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020
(arXiv:2006.07242), Algorithm 1.

Differs from the paper (docs/methods/feddf.md has the whole list):

* the student trains for a fixed number of epochs, without a schedule or clipping, and the last one counts; the paper
  stops by validation records;
* of clients whose models differ one student comes out, of the run's model; the paper fuses each architecture.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from fedstill.distill.ensemble import Distillation, Ensemble
from fedstill.distill.teachers import Teachers
from fedstill.evaluate import outputs
from fedstill.methods.uploads import UploadingMethod
from fedstill.protocol import Federation, Round, public_images


class FedDF(UploadingMethod):
    """The clients' models, averaged, then distilled from their ensemble on public images."""

    start: Literal["fresh", "mean"] = "mean"
    """The student before its training: as it was (at first a random start), or the mean of the clients' models."""
    distillation: Distillation = Distillation(lr=1e-3, epochs=20)
    """The student's training on the public images."""

    def teachers(self, networks: Sequence[nn.Module]) -> Teachers:
        """See `UploadingMethod.teachers`."""
        return Teachers(networks, average=self.distillation.outputs)

    def teach(self, fed: Federation, teachers: Teachers, student: nn.Module, round: Round) -> None:
        """AVGLOGITS: the student learns softmax(mean_k f_k(x)) on public x."""
        public = public_images(fed.public, "feddf")
        ensemble = Ensemble(self.distillation.outputs)
        for network in teachers.networks:
            ensemble.add(torch.cat(outputs(network, public)))
        rng, progress = fed.rng("distillation", round.number), fed.progress("distilling at the server")
        self.distillation.distil(student, public, ensemble.targets(), rng, on_epoch=progress, keep=fed.epochs)

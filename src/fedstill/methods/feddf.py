"""FedDF: the mean of the clients' models, taught by all of them together on public images.

Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020
(arXiv:2006.07242), Algorithm 1.

Differs from the paper (docs/methods/feddf.md has the whole list):

* the student trains for a fixed number of epochs, without a schedule or clipping, and the last one counts; the paper
  stops by validation records;
* of clients whose models differ one student comes out, of the run's model; the paper fuses each architecture.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from fedstill.distill.ensemble import Distillation, Ensemble
from fedstill.distill.teachers import Teachers
from fedstill.evaluate import outputs
from fedstill.methods.uploads import (
    Upload,
    UploadSettings,
    check_architectures,
    collect,
    ensemble_accuracies,
    start_student,
    trained,
    training_of,
)
from fedstill.protocol import Client, Federation, Method, State, public_images, state, step


class FedDF(UploadSettings, Method):
    """The clients' models, averaged, then distilled from their ensemble on public images."""

    mixed: ClassVar[bool] = True
    start: Literal["fresh", "mean"] = "mean"
    """The student before its training: unchanged (at first a random start), or the mean of the clients' models."""
    distillation: Distillation = Distillation(lr=1e-3, epochs=20)
    """The student's training on the public images."""

    @property
    @override
    def first_answer(self) -> tuple[Any, ...]:
        return training_of(self)

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Average the models, then distil their ensemble; later rounds start from the student."""
        check_architectures(fed, self.rounds)
        student, public = fed.new_model(), public_images(fed.public, "feddf")
        for round in fed.rounds(self.rounds, student):
            if round.number == 1:
                replies = fed.ask(self.train)
            else:
                replies = fed.ask(self.train_on, weights=state(student))
            models = collect(fed, replies)  # x_1, ..., x_K
            start_student(fed, student, models, self.start)  # x_0 = sum_k n_k / n x_k
            teachers = Teachers(models.networks, average=self.distillation.outputs)
            ensemble = Ensemble(self.distillation.outputs)
            for network in teachers.networks:
                ensemble.add(torch.cat(outputs(network, public)))  # AVGLOGITS
            targets = ensemble.targets()  # softmax(mean_k f_k(x))
            rng, progress = fed.rng("distillation", round.number), fed.progress("distilling at the server")
            self.distillation.distil(student, public, targets, rng, on_epoch=progress, checkpoint=fed.epochs)
            round.log(accuracy=fed.evaluate(student), **ensemble_accuracies(fed, teachers, models.mean))
        return student

    @step
    def train(self, client: Client) -> Upload:
        """The client's own model, trained from the random start that all of its architecture share."""
        return trained(client, client.new_model(architecture=client.architecture), self)

    @step
    def train_on(self, client: Client, weights: State) -> Upload:
        """The student, trained on the client's records."""
        return trained(client, client.new_model(weights), self)

"""FedDF: the mean of the clients' models, distilled further from their ensemble on public images.

Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020
(arXiv:2006.07242), Algorithm 1.

Differs from the paper (docs/methods/feddf.md has the whole list):

* the student trains for a fixed number of epochs, without a schedule or clipping; the paper stops early by validation
  records;
* if clients' models differ, there is still one student, of the run's model; the paper has one for each architecture.
"""

from typing import ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from fedstill.distill.ensemble import Distillation, Ensemble
from fedstill.distill.teachers import Teachers
from fedstill.evaluation import outputs
from fedstill.methods.parts import model_uploads
from fedstill.methods.parts.model_uploads import Upload, UploadSettings
from fedstill.protocol import Client, Federation, Method, State, public_images, state, step


class FedDF(UploadSettings, Method):
    """The clients' models, averaged, then distilled from their ensemble on public images."""

    needs_public: ClassVar[str] = "images"
    start: Literal["fresh", "mean"] = "mean"
    """Start of the student: as it is (at first random), or the mean of the clients' models."""
    distillation: Distillation = Distillation(lr=1e-3, epochs=20)
    """The student's training on the public images."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Average the models, then distil their ensemble; later rounds start from the student."""
        model_uploads.check_architectures(fed, self.rounds)
        student, public = fed.new_model(), public_images(fed.public, "feddf")
        for round in fed.rounds(self.rounds, student):
            replies = fed.ask(self.train) if round.number == 1 else fed.ask(self.train_on, weights=state(student))
            models = model_uploads.collect(fed, replies)  # x_1, ..., x_K
            model_uploads.start_student(fed, student, models, self.start)  # x_0 = sum_k n_k / n x_k
            teachers = Teachers(models.networks, average=self.distillation.outputs)
            ensemble = Ensemble(self.distillation.outputs)
            for network in teachers.networks:
                ensemble.add(torch.cat(outputs(network, public)))  # AVGLOGITS
            targets = ensemble.targets()  # softmax(mean_k f_k(x))
            rng, progress = fed.rng("distillation", round.number), fed.progress("distilling at the server")
            self.distillation.distil(student, public, targets, rng, on_epoch=progress, checkpoint=fed.epochs)
            round.log(accuracy=fed.evaluate(student), **model_uploads.ensemble_accuracies(fed, teachers, models.mean))
        return student

    @step
    def train(self, client: Client) -> Upload:
        """Train the client's own architecture, from the random start that all clients with it share."""
        return model_uploads.local_upload(client, client.new_model(architecture=client.architecture), self)

    @step
    def train_on(self, client: Client, weights: State) -> Upload:
        """Train the student on the client's records."""
        return model_uploads.local_upload(client, client.new_model(weights), self)

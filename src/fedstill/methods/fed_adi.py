"""Fed-ADI: images fitted to the clients' models pixel by pixel (adaptive DeepInversion); a baseline of DENSE.

Yin et al., "Dreaming to distill: data-free knowledge transfer via DeepInversion", CVPR 2020 (arXiv:1912.08795), as
Zhang et al. (DENSE, arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-adi.md has the whole list):

* the teacher is the mean of the clients' logits, and the batch norm term is a mean over clients;
* batches are fewer and take fewer steps than the paper's 2,000; the student learns with DENSE's settings;
* networks without batch norms have no batch norm term; a warning says so.
"""

import logging

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.inversion import Inversion
from fedstill.distill.pool import Pool
from fedstill.methods.parts import model_uploads
from fedstill.methods.parts.datafree import DataFreeSettings, ensemble, latest_of_each_class, train_student
from fedstill.methods.parts.model_uploads import Upload, UploadSettings
from fedstill.protocol import Client, Federation, Method, State, state, step
from fedstill.train.sgd import SGD

log = logging.getLogger("fedstill")


class FedADI(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; the server fits images pixel by pixel and trains a student, without data."""

    inversion: Inversion = Inversion(steps=500)
    """Fitting of one batch of images."""
    epochs: PositiveInt = 20
    """Epochs at the server. Each fits a batch of images, then trains the student."""
    student: SGD = SGD(batch_size=128, epochs=10)
    """The student's training in one epoch."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, then alternate between images and student; later rounds start from the student."""
        model_uploads.check_architectures(fed, self.rounds)
        student, like = fed.new_model(), fed.like.to(fed.device)  # theta_S
        for round in fed.rounds(self.rounds, student):
            replies = fed.ask(self.train) if round.number == 1 else fed.ask(self.train_on, weights=state(student))
            models = model_uploads.collect(fed, replies)  # theta_1, ..., theta_m
            model_uploads.start_student(fed, student, models, self.start)
            teachers = ensemble(fed, models, self)  # D
            if missing := self.inversion.missing(teachers):
                log.warning("%s", missing)
            pool = Pool(like, min(self.pool, self.epochs) * self.inversion.batch_size)
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*self.inversion.epoch(teachers, student, like, rng))  # x by equation 8
                rng = fed.rng("student", round.number, epoch)
                train_student(student, teachers, pool, self, rng)  # theta_S by L_dis
                progress(epoch, self.epochs)
            fed.show("synthetic", latest_of_each_class(pool.images))
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

"""Fed-ADI: pixels fitted to the clients' models by adaptive DeepInversion; a baseline of DENSE.

Yin et al., "Dreaming to distill: data-free knowledge transfer via DeepInversion", CVPR 2020 (arXiv:1912.08795), as
Zhang et al. (DENSE, arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-adi.md has the whole list):

* the teacher is the mean of the clients' logits, and the batch norm term the mean over clients;
* fewer, shorter batches than its 2,000 steps; the student learns with DENSE's settings;
* networks without batch norms have no such term; `Inversion.missing` says so.
"""

import logging
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.inversion import Inversion
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Teachers
from fedstill.methods.datafree import DataFreeSettings, check_logits, latest_of_each_class, student_loss
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
from fedstill.protocol import Client, Federation, Method, State, state, step
from fedstill.train.augment import VIEWS
from fedstill.train.sgd import SGD

log = logging.getLogger("fedstill")


class FedADI(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; images fitted pixel by pixel and a student at the server, and no data."""

    mixed: ClassVar[bool] = True
    inversion: Inversion = Inversion(steps=500)
    """Fitting of one batch of images."""
    epochs: PositiveInt = 20
    """Epochs at the server, each of which makes a batch of images, then trains the student."""
    student: SGD = SGD(batch_size=128, epochs=10)
    """The student's training in one epoch."""

    @property
    @override
    def first_answer(self) -> tuple[Any, ...]:
        return training_of(self)

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, then fit images and train the student in turns; later rounds start from the student."""
        check_architectures(fed, self.rounds)
        student, like = fed.new_model(), fed.like.to(fed.device)  # theta_S
        for round in fed.rounds(self.rounds, student):
            if round.number == 1:
                replies = fed.ask(self.train)
            else:
                replies = fed.ask(self.train_on, weights=state(student))
            models = collect(fed, replies)  # theta_1, ..., theta_m
            start_student(fed, student, models, self.start)
            teachers = Teachers(models.networks, average=self.average)  # D
            check_logits(teachers, like)
            if missing := self.inversion.missing(teachers):
                log.warning("%s", missing)
            pool = Pool(like, min(self.pool, self.epochs) * self.inversion.batch_size)
            loss, view = student_loss(teachers, self), VIEWS[self.student_view]
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*self.inversion.epoch(teachers, student, like, rng))  # x by equation 8
                rng = fed.rng("student", round.number, epoch)
                self.student.fit(student, pool.examples(), rng, loss=loss, augment=view)  # theta_S by L_dis
                progress(epoch, self.epochs)
            fed.show("synthetic", latest_of_each_class(pool.images))
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

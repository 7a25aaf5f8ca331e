"""DENSE: a generator makes images that the clients' models are sure of, and a student learns from them there.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371), Algorithm 1.

Differs from the paper (docs/methods/dense.md has the whole list):

* the student learns on the images of the latest epochs, not on one batch of each (nor on all, as the code does);
* batch statistics are compared, which the authors' code means to do and does not;
* the last epoch counts; the authors' code reports the best one on the test set;
* `DensePublished` is the authors' code.
"""

from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from fedstill.distill.generator import Generation
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


class Dense(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; a generator and a student at the server, and no data."""

    mixed: ClassVar[bool] = True
    generation: Generation = Generation()
    """Generation of one epoch's images."""

    @property
    @override
    def first_answer(self) -> tuple[Any, ...]:
        return training_of(self)

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, then train generator and student in turns; later rounds start from the student."""
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
            generator = self.generation.start(like, fed.rng("generator", round.number))  # theta_G
            pool = Pool(like, min(self.pool, self.epochs) * self.generation.batch_size)
            loss, view = student_loss(teachers, self), VIEWS[self.student_view]
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, generator.tensors, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*generator.epoch(teachers, student, rng))  # T_G steps of theta_G on L_gen
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

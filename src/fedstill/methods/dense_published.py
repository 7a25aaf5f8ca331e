"""DENSE as its authors' code runs it, to compare with: zj-jayzhang/DENSE with the settings of its README.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371).

Differs from the paper (docs/methods/dense-published.md has the whole list):

* every epoch starts a new generator, whose latents are fitted with it, and the images are those of its best step;
* batch statistics are not compared: the code looks for batch norms where it can't find any;
* the student sees all images there ever were;
* from the second local epoch on, clients' batch norms train with their running statistics.

Differs from the code: the last epoch counts, not the best one on the test set.
"""

from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.ensemble import Temperature
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
from fedstill.train.augment import VIEWS, View
from fedstill.train.loop import Norms
from fedstill.train.sgd import SGD


class DensePublished(DataFreeSettings, UploadSettings, Method):
    """DENSE as in its authors' code."""

    mixed: ClassVar[bool] = True
    local: SGD = SGD(batch_size=128, epochs=400)
    """A client's training in one round."""
    local_view: View = "crop_flip"
    """Augmentation of a client's records: that of CIFAR's in the code, which takes other data as they are (none)."""
    local_norm: Norms = "frozen-after-first"
    """Statistics of a client's batch norms: the code's test after each epoch leaves the network in eval mode."""
    generation: Generation = Generation.published()
    """Generation of one epoch's images."""
    student: SGD = SGD(lr=0.005, batch_size=256)
    """The student's training in one epoch."""
    student_view: View = "crop_flip"
    """Augmentation of the student's images, the same for the teachers; take "flip" for images that are not CIFAR's."""
    temperature: Temperature = 20.0
    """T of the distillation loss."""
    pool: PositiveInt = 200
    """Number of latest epochs whose images the student is trained on in every epoch; by default all."""

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
                pool.add(*generator.epoch(teachers, student, rng))  # the best of T_G steps of a new theta_G
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

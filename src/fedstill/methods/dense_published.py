"""DENSE as its authors' code runs it, for comparison: zj-jayzhang/DENSE with the settings of its README.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371).

Differs from the paper (docs/methods/dense-published.md has the whole list):

* every epoch starts a new generator, trains it together with its latents, and takes the images of its best step;
* batch statistics are not compared: the code looks for batch norms in a place that has none;
* the student trains on the images of all epochs so far;
* from the second local epoch on, clients' batch norms train with their running statistics.

Differs from the code: the last epoch's student is the result, not the epoch that is best on the test set.
"""

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.ensemble import Temperature
from fedstill.distill.generation import Generation
from fedstill.distill.pool import Pool
from fedstill.methods.parts import model_uploads
from fedstill.methods.parts.datafree import (
    DataFreeSettings,
    check_images,
    ensemble,
    latest_of_each_class,
    train_student,
)
from fedstill.methods.parts.model_uploads import Upload, UploadSettings
from fedstill.protocol import Client, Federation, Method, State, state, step
from fedstill.train.augment import View
from fedstill.train.sgd import SGD, Norms


class DensePublished(DataFreeSettings, UploadSettings, Method):
    """DENSE as in its authors' code."""

    local: SGD = SGD(batch_size=128, epochs=400)
    """A client's training in one round."""
    local_view: View = "crop_flip"
    """Augmentation of a client's records. The code's is "crop_flip" for CIFAR and "none" for other data."""
    local_norm: Norms = "frozen-after-first"
    """Statistics of a client's batch norms. The code's test after each epoch leaves the network in eval mode."""
    generation: Generation = Generation.published()
    """Generation of one epoch's images."""
    student: SGD = SGD(lr=0.005, batch_size=256)
    """The student's training in one epoch."""
    student_view: View = "crop_flip"
    """Augmentation of the student's images, also for the teachers. Take "flip" for images other than CIFAR's."""
    temperature: Temperature = 20.0
    """T of the distillation loss."""
    pool: PositiveInt = 200
    """Number of latest epochs whose images the student is trained on in every epoch. The default is all epochs."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, then alternate between images and student; later rounds start from the student."""
        model_uploads.check_architectures(fed, self.rounds)
        check_images(fed)
        student, like = fed.new_model(), fed.like.to(fed.device)  # theta_S
        for round in fed.rounds(self.rounds, student):
            replies = fed.ask(self.train) if round.number == 1 else fed.ask(self.train_on, weights=state(student))
            models = model_uploads.collect(fed, replies)  # theta_1, ..., theta_m
            model_uploads.start_student(fed, student, models, self.start)
            teachers = ensemble(fed, models, self)  # D
            generator = self.generation.start(like, fed.rng("generator", round.number))  # theta_G
            pool = Pool(like, min(self.pool, self.epochs) * self.generation.batch_size)
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, generator.tensors, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*generator.epoch(teachers, student, rng))  # the best of T_G steps of a new theta_G
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

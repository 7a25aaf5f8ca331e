"""DENSE: a generator makes images that the clients' models classify confidently; a student learns their outputs there.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371), Algorithm 1.

Differs from the paper (docs/methods/dense.md has the whole list):

* the student learns on the images of the latest epochs, not on one batch of each (nor on all, as the code does);
* batch statistics are compared, as the paper says; the authors' code intends to but never does;
* the last epoch's student is the result; the authors' code reports the epoch that is best on the test set;
* `reproduce/dense/published.sh` has the settings that are the authors' code.
"""

from torch import nn
from typing_extensions import override

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


class Dense(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; the server trains a generator and a student without data."""

    generation: Generation = Generation()
    """Generation of one epoch's images."""

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
                pool.add(*generator.epoch(teachers, student, rng))  # T_G steps of theta_G on L_gen
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

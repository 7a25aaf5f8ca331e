"""Fed-DAFL: DAFL's generator with the ensemble of the clients' models as its teacher; a baseline of DENSE.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), as Zhang et al. (DENSE,
arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-dafl.md has the whole list):

* the teacher is the mean of the clients' logits;
* the loss has the weights of Fast-Datafree's replication; the student learns with DENSE's settings.
"""

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.generation import DAFL
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


class FedDAFL(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; the server trains DAFL's generator and a student without data."""

    generation: DAFL = DAFL()
    """Generation of one epoch's images."""
    pool: PositiveInt = 1
    """Number of latest epochs whose images the student is trained on in every epoch. DAFL uses images once."""

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
            pool = Pool(like, min(self.pool, self.epochs) * self.generation.steps * self.generation.batch_size)
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, generator.tensors, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*generator.epoch(teachers, rng))  # G wants D sure, active and balanced
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

"""Fed-DAFL: DAFL's generator with the clients' models for its teacher; a baseline of DENSE.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), as Zhang et al. (DENSE,
arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-dafl.md has the whole list):

* the teacher is the mean of the clients' logits;
* weights of the loss are those of Fast-Datafree's re-run; the student learns with DENSE's settings.
"""

from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.dafl import DAFL
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


class FedDAFL(DataFreeSettings, UploadSettings, Method):
    """One upload of each client's model; DAFL's generator and a student at the server, and no data."""

    mixed: ClassVar[bool] = True
    generation: DAFL = DAFL()
    """Generation of one epoch's images."""
    pool: PositiveInt = 1
    """Number of latest epochs whose images the student is trained on in every epoch; DAFL uses its images once."""

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
            pool = Pool(like, min(self.pool, self.epochs) * self.generation.steps * self.generation.batch_size)
            loss, view = student_loss(teachers, self), VIEWS[self.student_view]
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, generator.tensors, pool.tensors):
                rng = fed.rng("images", round.number, epoch)
                pool.add(*generator.epoch(teachers, rng))  # G wants D sure, active and balanced
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

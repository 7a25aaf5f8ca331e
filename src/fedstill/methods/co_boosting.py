"""Co-Boosting: images that are hard for the ensemble improve its weights, and both teach a student.

Dai, Zhang, Li, Liu, Yang, Han, "Enhancing one-shot federated learning through data and ensemble co-boosting", ICLR 2024
(arXiv:2402.15070), Algorithm 1.

Differs from the paper (docs/methods/co-boosting.md has the whole list):

* order, losses and constants are those of the authors' code (rong-dai/Co-Boosting);
* the generator's gradients are not clipped;
* the last epoch's student is the result; the authors' code keeps the epoch that is best on the test set.
"""

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.boosting import HardGeneration, Reweighting, clipped, cosine, perturbed
from fedstill.distill.ensemble import distillation_loss
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Teachers
from fedstill.methods.parts import model_uploads
from fedstill.methods.parts.datafree import DataFreeSettings, check_images, ensemble, latest_of_each_class
from fedstill.methods.parts.model_uploads import Upload, UploadSettings
from fedstill.protocol import Client, Federation, Method, State, load, state, step
from fedstill.train.augment import VIEWS
from fedstill.train.sgd import SGD

_CLIP = 10.0
"""Largest length of the student's gradient, as in the authors' code."""


class CoBoosting(DataFreeSettings, UploadSettings, Method):
    """DENSE with hard images and an ensemble that learns its weights on them."""

    local: SGD = SGD(batch_size=128, epochs=100)
    """A client's training in one round."""
    generation: HardGeneration = HardGeneration()
    """Generation of one epoch's images."""
    reweighting: Reweighting = Reweighting()
    """Training of the ensemble's weights, from the second epoch on."""
    perturbation: NonNegativeFloat = 4 / 255
    """Change of every pixel in [0, 1] before the student sees it (epsilon), in a direction that moves the ensemble's
    prediction; 0 for none. The code's 8/255 is for values in [-1, 1]."""
    student: SGD = SGD(batch_size=128, weight_decay=1e-4)
    """The student's training in one epoch; its learning rate falls along half a cosine over all epochs."""
    pool: PositiveInt = 200
    """Number of latest epochs whose images weights and student are trained on. The default is all epochs."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, then alternate between images, weights and student."""
        model_uploads.check_architectures(fed, self.rounds)
        check_images(fed)
        student, like = fed.new_model(), fed.like.to(fed.device)  # theta_S
        for round in fed.rounds(self.rounds, student):
            replies = fed.ask(self.train) if round.number == 1 else fed.ask(self.train_on, weights=state(student))
            models = model_uploads.collect(fed, replies)  # theta_1, ..., theta_n
            model_uploads.start_student(fed, student, models, self.start)
            w = {"w": torch.full((len(models.networks),), 1 / len(models.networks), device=fed.device)}
            teachers = ensemble(fed, models, self, w["w"])  # A_w
            generator = self.generation.start(like, fed.rng("generator", round.number))  # theta_G
            pool = Pool(like, min(self.pool, self.epochs) * self.generation.batch_size)  # D_S
            progress = fed.progress("making images and distilling")
            for epoch in fed.epochs(self.epochs, student, generator.tensors, pool.tensors, w):
                rng = fed.rng("images", round.number, epoch)
                images = generator.epoch(teachers, student, rng)  # T_G steps on L_H + beta L_A
                if epoch > 1:
                    rng = fed.rng("weights", round.number, epoch)
                    load(w, {"w": self._reweighted(w["w"], teachers, pool, epoch, rng)})  # w by CE(A_w(x), y) on D_S
                pool.add(*images)
                self._train_student(student, teachers, pool, epoch, fed.rng("student", round.number, epoch))
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

    def _reweighted(self, w: Tensor, teachers: Teachers, pool: Pool, epoch: int, rng: torch.Generator) -> Tensor:
        return self.reweighting.fit(
            w,
            teachers,
            pool,
            epoch,
            rng,
            average=self.average,
            view=self.student_view,
            batch_size=self.student.batch_size,
        )

    def _train_student(
        self, student: nn.Module, teachers: Teachers, pool: Pool, epoch: int, rng: torch.Generator
    ) -> None:
        """One epoch of ``T^2 KL(softmax(A_w(x) / T) || softmax(f_S(x) / T))`` on perturbed images x of the pool."""
        view, std = VIEWS[self.student_view], pool.images.normalisation.std
        size = torch.tensor([self.perturbation / s for s in std], device=pool.images.images.device)[:, None, None]

        def augment(x: Tensor, rng: torch.Generator) -> Tensor:
            x = x if view is None else view(x, rng)
            return perturbed(x, teachers, size, rng) if self.perturbation else x

        def loss(output: Tensor, x: Tensor, _: Tensor) -> Tensor:
            with torch.no_grad():
                logits = teachers(x)
            return distillation_loss(output, logits, self.temperature)

        rate = cosine(self.student.lr, epoch, self.epochs)
        settings = self.student.model_copy(update={"lr": rate})
        settings.fit(student, pool.examples(), rng, loss=loss, augment=augment, correct=clipped(_CLIP))

"""Generators trained without data: DENSE's and DAFL's.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022 (arXiv:2112.12371), data generation stage of
Algorithm 1. The authors' code (zj-jayzhang/DENSE) differs from it; `Generation.published` has its settings.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), equations 2 to 7, and the authors'
code (huawei-noah/Efficient-Computing, ``DAFL-train.py``). Default weights are those of the replication in
VainF/Fast-Datafree; steps and batches are DENSE's.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Settings
from fedstill.distill.pool import adam_step, live_tensors, to_bytes
from fedstill.distill.teachers import TeacherOutputs, Teachers
from fedstill.evaluation import mode_of
from fedstill.models.generator import DAFLGenerator, Generator
from fedstill.train.augment import VIEWS, View
from fedstill.train.sgd import adam_of


def divergence_loss(teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``L_div = -mean_i omega_i KL(softmax(D_i) || softmax(f_S,i))`` of logits (DENSE, equation 4).

    omega is 1 if student and teachers predict different classes, else 0. Gradients flow through both.
    """
    disagree = teacher.argmax(1) != student.argmax(1)
    divergence = kl_div(log_softmax(student, 1), log_softmax(teacher, 1), reduction="none", log_target=True).sum(1)
    return -(divergence * disagree).mean()


class Generation(Settings):
    """Settings of the generation of one epoch's images."""

    batch_size: PositiveInt = 128
    """Images of an epoch."""
    steps: PositiveInt = 30
    """Steps of Adam on the generator in an epoch (T_G)."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Adam's decay of the mean gradient, in [0, 1); the decay of the squares is 0.999."""
    nz: PositiveInt = 256
    """Length of a latent vector."""
    ngf: PositiveInt = 64
    """Channels of the generator's last layers."""
    ce: NonNegativeFloat = 1.0
    """Weight of the teachers' cross-entropy for the labels drawn."""
    bn: NonNegativeFloat = 1.0
    """Weight of L_BN (lambda_1), the distance from the statistics of the teachers' batch norms."""
    div: NonNegativeFloat = 0.5
    """Weight of L_div (lambda_2), which favours images on which student and teachers disagree."""
    view: View = "none"
    """Augmentation of the images before the losses."""
    fresh: bool = False
    """Start a new generator every epoch and train its latents too (the authors' code), or train one generator
    throughout on fixed latents (Algorithm 1)."""
    keep_lowest: bool = False
    """Return the images of the step with the lowest loss, or those after the last step."""

    @classmethod
    def published(cls) -> "Generation":
        """Settings of the authors' code and its README, in which L_BN is always 0."""
        return cls(batch_size=256, bn=0.0, div=1.0, view="crop_flip", fresh=True, keep_lowest=True)

    def start(self, like: Records, rng: torch.Generator) -> "Synthesis":
        """The generation stage before its first epoch.

        Args:
            like: a record set with the images' shape, classes, normalisation and device.
            rng: a CPU generator; draws the generator's first weights.

        Raises:
            ValueError: a side of the images is not a multiple of 4.
        """
        return Synthesis(self, like, rng)

    def loss(
        self,
        teachers: Teachers,
        student: nn.Module,
        x: Float[Tensor, "n c h w"],
        labels: Int64[Tensor, " n"],
    ) -> Float[Tensor, ""]:
        """``L_gen = ce L_CE + bn L_BN + div L_div`` of normalised images; differentiable in ``x``."""
        outputs = teachers.outputs(x) if self.bn else None
        mean = teachers(x) if outputs is None else outputs.mean
        total = self.ce * cross_entropy(mean, labels)
        if outputs is not None:
            total = total + self.bn * outputs.bn
        if self.div:
            with mode_of(student, training=False):
                total = total + self.div * divergence_loss(mean, student(x))
        return total


class Synthesis:
    """DENSE's data generation stage: a generator and its Adam.

    Attributes:
        tensors: the whole state; a checkpoint is restored by changing them in place (`fedstill.base.weights.load`).
            Empty if every epoch starts a new generator.
    """

    def __init__(self, settings: Generation, like: Records, rng: torch.Generator) -> None:
        """Draw the generator's first weights."""
        self._settings, self._like = settings, like
        self._generator = self._new(rng)
        self._adam = adam_of(self._generator.parameters(), settings.lr, beta1=settings.beta1)
        self.tensors = {} if settings.fresh else live_tensors(self._generator, self._adam)

    def epoch(
        self, teachers: Teachers, student: nn.Module, rng: torch.Generator
    ) -> tuple[Records, Float[Tensor, "n classes"]]:
        """Train the generator for ``steps`` steps on one batch of latents and labels.

        Args:
            teachers: the clients' networks.
            student: the current student; runs in eval mode, gets no gradients.
            rng: a CPU generator; draws latents, labels (uniform over the classes), augmentations and, if every epoch
                starts one, the new generator.

        Returns:
            ``batch_size`` images rounded to 8 bits, ordered by their labels, and the teachers' mean logits for exactly
            these images.

        Raises:
            Diverged: the images are not finite.
        """
        settings, like = self._settings, self._like
        device, n = like.images.device, settings.batch_size
        generator, adam = self._generator, self._adam
        z = torch.randn(n, settings.nz, generator=rng).to(device)  # sample a batch of noises and labels
        labels = torch.randint(like.num_classes, (n,), generator=rng).sort().values.to(device)
        if settings.fresh:
            generator = self._new(rng)
            adam = adam_of([*generator.parameters(), z.requires_grad_()], settings.lr, beta1=settings.beta1)
        lowest, best = float("inf"), torch.empty(0)
        for _ in range(settings.steps):
            pixels = generator(z)  # x^ = G(z)
            x = like.normalisation.apply(augmented(pixels, settings.view, rng))
            loss = settings.loss(teachers, student, x, labels)
            if settings.keep_lowest and float(loss.detach()) < lowest:
                lowest, best = float(loss.detach()), pixels.detach()
            adam_step(adam, loss)  # theta_G <- theta_G - eta_G grad L_gen
        if not settings.keep_lowest:
            with torch.no_grad():
                best = generator(z)
        images = Records(to_bytes(best, settings.lr), labels, like.num_classes, like.normalisation)
        return images, teachers.predict(images)

    def _new(self, rng: torch.Generator) -> Generator:
        with isolated(draw_seed(rng)):
            return Generator(self._like.shape, self._settings.nz, self._settings.ngf).to(self._like.images.device)


def augmented(pixels: Float[Tensor, "n c h w"], view: View, rng: torch.Generator) -> Float[Tensor, "n c h w"]:
    """The augmented pixels, 0 (black) outside a shifted image; differentiable."""
    augment = VIEWS[view]
    return pixels if augment is None else augment(pixels, rng)


def pixels_of(images: Float[Tensor, "n c h w"], normalisation: Normalisation) -> Float[Tensor, "n c h w"]:
    """Pixels in [0, 1] from normalised images: ``mean + std * images``, clamped; the gradient is 0 at clamped pixels.

    DAFL's generator ends in a batch norm, so a batch of its images has the data set's mean and deviation.
    """
    mean, std = (images.new_tensor(v)[:, None, None] for v in (normalisation.mean, normalisation.std))
    return (mean + std * images).clamp(0, 1)


def one_hot_loss(teacher: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``CE(D(x), argmax D(x))``: low if the teachers are confident (equation 3)."""
    return cross_entropy(teacher, teacher.argmax(1))


def activation_loss(features: list[Float[Tensor, "n d"]]) -> Float[Tensor, ""]:
    """``-mean |phi_k(x)|`` of a teacher's penultimate features (0 without any), averaged over teachers (equation 4)."""
    return -torch.stack([rows.abs().sum() / max(1, rows.numel()) for rows in features]).mean()


def entropy_loss(teacher: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``sum_c p_c log p_c`` in nats, p the batch's mean prediction: low if classes are balanced (equation 5)."""
    p = teacher.softmax(1).mean(0)
    return torch.xlogy(p, p).sum()


class DAFL(Settings):
    """Settings of the generation of one epoch's images."""

    batch_size: PositiveInt = 128
    """Images of a step."""
    steps: PositiveInt = 30
    """Steps of Adam on the generator in an epoch, each on new latents."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    nz: PositiveInt = 256
    """Length of a latent vector."""
    one_hot: NonNegativeFloat = 1.0
    """Weight of the cross-entropy for the class that the teachers predict."""
    activation: NonNegativeFloat = 1e-3
    """Weight of the activation loss, which rewards large features."""
    balance: NonNegativeFloat = 20.0
    """Weight of the entropy of the batch's classes."""

    @classmethod
    def published(cls) -> "DAFL":
        """The original's constants for CIFAR-10: 120 steps of 1,024 images; ``balance`` in nats (it takes log10)."""
        return cls(batch_size=1024, steps=120, lr=0.02, nz=1000, one_hot=0.05, activation=0.01, balance=5 / 2.302585093)

    def start(self, like: Records, rng: torch.Generator) -> "DAFLSynthesis":
        """The generator before its first epoch, with arguments as `fedstill.distill.generation.Generation.start`."""
        return DAFLSynthesis(self, like, rng)

    def loss(self, outputs: TeacherOutputs) -> Float[Tensor, ""]:
        """``one_hot L_oh + activation L_a + balance L_ie`` (equation 7)."""
        total = self.one_hot * one_hot_loss(outputs.mean) + self.balance * entropy_loss(outputs.mean)
        return total + self.activation * activation_loss(outputs.features)


class DAFLSynthesis:
    """DAFL's generator and its Adam.

    Attributes:
        tensors: the whole state; a checkpoint is restored by changing them in place (`fedstill.base.weights.load`).
    """

    def __init__(self, settings: DAFL, like: Records, rng: torch.Generator) -> None:
        """Draw the generator's first weights."""
        self._settings, self._like = settings, like
        with isolated(draw_seed(rng)):
            self._generator = DAFLGenerator(like.shape, settings.nz).to(like.images.device)
        self._adam = adam_of(self._generator.parameters(), settings.lr, beta1=0.9)
        self.tensors = live_tensors(self._generator, self._adam)

    def epoch(self, teachers: Teachers, rng: torch.Generator) -> tuple[Records, Float[Tensor, "n classes"]]:
        """Train the generator for ``steps`` steps and return the images of all steps; ``rng`` draws latents.

        The original trains the student on each step's images at that step. Its generator does not depend on the
        student, so one pass of the student over the returned images is equivalent.

        Returns:
            ``steps * batch_size`` images rounded to 8 bits, labelled by the class that the teachers predict, and the
            teachers' mean logits before the rounding.

        Raises:
            Diverged: the images are not finite.
        """
        settings, like, device = self._settings, self._like, self._like.images.device
        images, logits = [], []
        for _ in range(settings.steps):
            z = torch.randn(settings.batch_size, settings.nz, generator=rng).to(device)
            pixels = pixels_of(self._generator(z), like.normalisation)
            outputs = teachers.outputs(like.normalisation.apply(pixels))
            adam_step(self._adam, settings.loss(outputs))
            images.append(to_bytes(pixels, settings.lr))
            logits.append(outputs.mean.detach())
        mean = torch.cat(logits)
        return Records(torch.cat(images), mean.argmax(1), like.num_classes, like.normalisation), mean

"""Data-free generation of images, guided by the clients' networks: DENSE's first stage.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022 (arXiv:2112.12371), data generation stage of
Algorithm 1. The authors' code (zj-jayzhang/DENSE) differs from it; `Generation.published` has its settings.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedstill.distill.descent import adam_step, live_tensors, to_bytes
from fedstill.distill.teachers import Teachers
from fedstill.evaluate import mode_of
from fedstill.models.generator import Generator
from fedstill.records import Records
from fedstill.seeds import draw_seed, isolated
from fedstill.settings import Settings
from fedstill.train.adam import adam_of
from fedstill.train.augment import VIEWS, View


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
        tensors: the whole state; a checkpoint is restored by changing them in place (`fedstill.weights.load`). Empty if
            every epoch starts a new generator.
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

"""DAFL's generator and loss with an ensemble as its teacher: the images of Fed-DAFL, a baseline of DENSE.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), equations 2 to 7, and the authors'
code (huawei-noah/Efficient-Computing, ``DAFL-train.py``). Default weights are those of the replication in
VainF/Fast-Datafree; steps and batches are DENSE's.
"""

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.distill.descent import adam_step, live_tensors, to_bytes
from fedstill.distill.teachers import TeacherOutputs, Teachers
from fedstill.models.generator import DAFLGenerator
from fedstill.records import Normalisation, Records
from fedstill.seeds import draw_seed, isolated
from fedstill.settings import Settings
from fedstill.train.adam import adam_of


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
        """The generator before its first epoch, with arguments as `fedstill.distill.generator.Generation.start`."""
        return DAFLSynthesis(self, like, rng)

    def loss(self, outputs: TeacherOutputs) -> Float[Tensor, ""]:
        """``one_hot L_oh + activation L_a + balance L_ie`` (equation 7)."""
        total = self.one_hot * one_hot_loss(outputs.mean) + self.balance * entropy_loss(outputs.mean)
        return total + self.activation * activation_loss(outputs.features)


class DAFLSynthesis:
    """DAFL's generator and its Adam.

    Attributes:
        tensors: the whole state; a checkpoint is restored by changing them in place (`fedstill.weights.load`).
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

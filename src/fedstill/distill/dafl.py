"""DAFL's generator and loss with an ensemble for a teacher: the images of Fed-DAFL, a baseline of DENSE.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), equations 2 to 7, and the authors'
code (huawei-noah/Efficient-Computing, ``DAFL-train.py``); the weights of
the defaults are those of the re-run in VainF/Fast-Datafree, their steps and batches DENSE's.
"""

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.distill.descent import adam_step, live_tensors, to_bytes
from fedstill.distill.teachers import Look, Teachers
from fedstill.models.generator import DAFLGenerator
from fedstill.records import Normalisation, Records
from fedstill.seeds import draw_seed, isolated
from fedstill.settings import Settings
from fedstill.train.adam import adam_of


def pixels_of(images: Float[Tensor, "n c h w"], normalisation: Normalisation) -> Float[Tensor, "n c h w"]:
    """Pixels in [0, 1] from normalised images: ``mean + std * images``, clamped, no gradient where that cuts.

    DAFL's generator ends in a batch norm and its teachers see normalised images, so its output is one; the batch thus
    has the mean and deviation of the data set's pixels before they are clamped.
    """
    mean, std = (images.new_tensor(v)[:, None, None] for v in (normalisation.mean, normalisation.std))
    return (mean + std * images).clamp(0, 1)


def one_hot_loss(teacher: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``CE(D(x), argmax D(x))``: low where the teachers are sure (equation 3)."""
    return cross_entropy(teacher, teacher.argmax(1))


def activation_loss(features: list[Float[Tensor, "n d"]]) -> Float[Tensor, ""]:
    """``-mean |phi_k(x)|`` over a teacher's penultimate features, averaged over teachers (equation 4).

    A teacher without features counts as 0.
    """
    return -torch.stack([rows.abs().sum() / max(1, rows.numel()) for rows in features]).mean()


def entropy_loss(teacher: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """``sum_c p_c log p_c`` in nats with p the batch's mean prediction: low where classes are balanced (equation 5)."""
    p = teacher.softmax(1).mean(0)
    return torch.xlogy(p, p).sum()


class DAFL(Settings):
    """Settings of the generation of one epoch's images."""

    batch_size: PositiveInt = 128
    """Images of a step."""
    steps: PositiveInt = 30
    """Steps of Adam on the generator in an epoch, each on latents of its own."""
    lr: PositiveFloat = 1e-3
    """Its learning rate."""
    nz: PositiveInt = 256
    """Length of a latent vector."""
    one_hot: NonNegativeFloat = 1.0
    """Weight of the cross-entropy for the class the teachers see."""
    activation: NonNegativeFloat = 1e-3
    """Weight of the size of the teachers' features."""
    balance: NonNegativeFloat = 20.0
    """Weight of the entropy of the batch's classes."""

    @classmethod
    def published(cls) -> "DAFL":
        """The original's constants for CIFAR-10: 120 steps of 1,024 images; ``balance`` in nats (it takes log10)."""
        return cls(batch_size=1024, steps=120, lr=0.02, nz=1000, one_hot=0.05, activation=0.01, balance=5 / 2.302585093)

    def start(self, like: Records, rng: torch.Generator) -> "DAFLSynthesis":
        """The generator before its first epoch; see `fedstill.distill.generator.Generation.start`."""
        return DAFLSynthesis(self, like, rng)

    def loss(self, look: Look) -> Float[Tensor, ""]:
        """``one_hot L_oh + activation L_a + balance L_ie`` (equation 7)."""
        mean = look.mean
        total = self.one_hot * one_hot_loss(mean) + self.balance * entropy_loss(mean)
        return total + self.activation * activation_loss(look.features)


class DAFLSynthesis:
    """DAFL's generator and its Adam.

    Attributes:
        tensors: the stage's whole state; changing them in place (`fedstill.weights.load`) resumes a run.
    """

    def __init__(self, settings: DAFL, like: Records, rng: torch.Generator) -> None:
        """Draw the generator's first weights; `DAFL.start` documents the arguments."""
        self._settings, self._like = settings, like
        with isolated(draw_seed(rng)):
            self._generator = DAFLGenerator(like.shape, settings.nz).to(like.images.device)
        self._adam = adam_of(self._generator.parameters(), settings.lr, beta1=0.9)
        self.tensors = live_tensors(self._generator, self._adam)

    def epoch(self, teachers: Teachers, rng: torch.Generator) -> tuple[Records, Float[Tensor, "n classes"]]:
        """Train the generator for ``steps`` steps and return all images made on the way.

        The original trains the student on each step's images at that step; as its generator doesn't look at the
        student, one pass of the student over what is returned, in any order of the steps, does the same.

        Args:
            teachers: the clients' networks.
            rng: a CPU generator; draws latents.

        Returns:
            ``steps * batch_size`` images rounded to 8 bits, labelled by the class the teachers see, and the teachers'
            mean logits, from before the rounding.

        Raises:
            Diverged: the images are not finite.
        """
        settings, like, device = self._settings, self._like, self._like.images.device
        images, logits = [], []
        for _ in range(settings.steps):
            z = torch.randn(settings.batch_size, settings.nz, generator=rng).to(device)
            pixels = pixels_of(self._generator(z), like.normalisation)
            look = teachers.look(like.normalisation.apply(pixels))
            adam_step(self._adam, settings.loss(look))
            images.append(to_bytes(pixels, settings.lr))
            logits.append(look.mean.detach())
        said = torch.cat(logits)
        return Records(torch.cat(images), said.argmax(1), like.num_classes, like.normalisation), said

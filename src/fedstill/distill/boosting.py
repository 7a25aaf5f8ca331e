"""Co-Boosting's three parts: hard images, their perturbation on the fly, and the weights of the ensemble.

Dai, Zhang, Li, Liu, Yang, Han, "Enhancing one-shot federated learning through data and ensemble co-boosting", ICLR 2024
(arXiv:2402.15070), and the authors' code (rong-dai/Co-Boosting: ``datafree/synthesis/coboost.py``, ``datafree_kd.py``).
"""

import math

import torch
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from typing_extensions import override

from fedstill.base.settings import Settings, Share
from fedstill.distill.ensemble import Temperature
from fedstill.distill.generation import Generation
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Average, Teachers, weighted
from fedstill.evaluation import mode_of
from fedstill.train.augment import VIEWS, View
from fedstill.train.sgd import Correction, Tensors

_SOFTNESS = 4.0
"""Temperature of the probabilities whose random direction perturbs an image."""


def hard_loss(
    teacher: Float[Tensor, "n classes"], labels: Int64[Tensor, " n"], hardness: float = 1.0
) -> Float[Tensor, ""]:
    """``mean_i (1 - p_i)^hardness CE_i`` of the ensemble's logits, p_i its probability of the label of image i.

    The factor has no gradient. It reduces the weight of images that the ensemble already classifies with certainty.
    """
    terms = cross_entropy(teacher, labels, reduction="none")
    return ((1 - (-terms.detach()).exp()) ** hardness * terms).mean()


def adversarial_loss(
    teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"], temperature: float = 3.0
) -> Float[Tensor, ""]:
    """``-T^2 mean_i KL(softmax(D_i / T) || softmax(f_S,i / T))`` of logits; gradients flow through both."""
    p, q = (log_softmax(logits / temperature, 1) for logits in (teacher, student))
    return -(temperature**2) * kl_div(q, p, reduction="batchmean", log_target=True)


class HardGeneration(Generation):
    """Settings of the generation of one epoch's hard images."""

    bn: NonNegativeFloat = 0.0
    """Weight of L_BN, the distance from the statistics of the teachers' batch norms."""
    div: NonNegativeFloat = 1.0
    """Weight of L_A (beta), which favours images on which student and ensemble differ."""
    fresh: bool = True
    """Start a new generator every epoch and train its latents too, or train one generator throughout."""
    keep_lowest: bool = True
    """Return the images of the step with the lowest loss, or those after the last step."""
    hardness: NonNegativeFloat = 1.0
    """Power of an image's weight in L_H, ``(1 - p)^hardness``; 0 is the plain cross-entropy."""
    div_temperature: Temperature = 3.0
    """Temperature of L_A."""

    @override
    def loss(
        self, teachers: Teachers, student: nn.Module, x: Float[Tensor, "n c h w"], labels: Int64[Tensor, " n"]
    ) -> Float[Tensor, ""]:
        """``ce L_H + bn L_BN + div L_A`` of normalised images; differentiable in ``x``."""
        outputs = teachers.outputs(x) if self.bn else None
        mean = teachers(x) if outputs is None else outputs.mean
        total = self.ce * hard_loss(mean, labels, self.hardness)
        if outputs is not None:
            total = total + self.bn * outputs.bn
        if self.div:
            with mode_of(student, training=False):
                total = total + self.div * adversarial_loss(mean, student(x), self.div_temperature)
        return total


def perturbed(
    x: Float[Tensor, "n c h w"], teachers: Teachers, size: Float[Tensor, "c 1 1"], rng: torch.Generator
) -> Float[Tensor, "n c h w"]:
    """``x + size sign(grad_x <u, softmax(D(x) / 4)>)`` with u uniform on [-1, 1], drawn anew for each image."""
    x = x.detach().requires_grad_()
    probabilities = (teachers(x) / _SOFTNESS).softmax(1)
    u = 2 * torch.rand(probabilities.shape, generator=rng).to(x.device) - 1
    (gradient,) = torch.autograd.grad((u * probabilities).sum(), x)
    return x.detach() + size * gradient.sign()


class Reweighting(Settings):
    """Settings of the ensemble's weights, which start alike and move by the sign of their gradient."""

    step: PositiveFloat = 0.1
    """Size of the first epoch's steps, divided by the number of clients (mu)."""
    decay: Share = 0.99
    """Factor of the size from epoch to epoch."""

    def fit(
        self,
        weights: Float[Tensor, " m"],
        teachers: Teachers,
        pool: Pool,
        epoch: int,
        rng: torch.Generator,
        *,
        average: Average,
        view: View = "none",
        batch_size: int = 128,
    ) -> Float[Tensor, " m"]:
        """New weights after one pass over the pool's images and their labels; ``epoch`` counts from 1."""
        images, augment = pool.images, VIEWS[view]
        size = self.step / len(teachers) * self.decay ** (epoch - 1)
        for batch in torch.split(torch.randperm(len(images), generator=rng).to(images.labels.device), batch_size):
            x = images.inputs(batch)
            with torch.no_grad():
                each = teachers.each(x if augment is None else augment(x, rng))
            weights = reweighted(weights, each, images.labels[batch], size, average)
        return weights


def reweighted(
    weights: Float[Tensor, " m"],
    each: Float[Tensor, "n m classes"],
    labels: Int64[Tensor, " n"],
    size: float,
    average: Average = "logits",
) -> Float[Tensor, " m"]:
    """``w - size sign(grad_w CE(D_w(x), y))``, clamped to [0, 1]; ``weights`` if that leaves no teacher."""
    w = weights.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(weighted(each, w, average), labels), w)
    new = (w.detach() - size * gradient.sign()).clamp(0, 1)
    return new if new.any() else weights


def clipped(norm: float) -> Correction:
    """Gradients scaled down to a joint length of at most ``norm``."""

    def correct(_weights: Tensors, gradients: Tensors) -> Tensors:
        length = torch.stack(torch._foreach_norm(gradients)).norm()
        return torch._foreach_mul(gradients, (norm / (length + 1e-6)).clamp(max=1))

    return correct


def cosine(rate: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch, from 1 to ``epochs``: half a cosine from ``rate`` towards 0."""
    return rate * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2

"""Distillates: latents of records that a classifier finds easy, perturbed and then fitted to the records' features.

Zhang, Liu, Wang, "One-shot federated learning via synthetic distiller-distillate communication", NeurIPS 2024
(arXiv:2412.05186), and the authors' code (Carkham/FedSD2C: ``fedsd2c/client.py``, ``fedsd2c/util.py``).
"""

import dataclasses
import math
from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedstill import models
from fedstill.base.records import Examples, Normalisation, Records
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Settings
from fedstill.evaluation import mode_of, outputs
from fedstill.models.autoencoders import Autoencoder
from fedstill.train.augment import Views
from fedstill.train.sgd import Adam, Epochs

_BATCH = 100
"""Latents that are fitted together."""


class Autoencoding(Settings):
    """Settings of the autoencoder and of its training on public images, by the squared error of pixels."""

    latents: PositiveInt = 4
    """Channels of an image's latents, whose height and width are a quarter of the image's."""
    width: PositiveInt = 32
    """Filters of the first convolution."""
    training: Adam = Adam(batch_size=128, epochs=20)
    """Training at the server."""

    def network(self, like: Records, rng: torch.Generator) -> Autoencoder:
        """An untrained autoencoder for images of the shape of ``like``; ``rng`` draws its start."""
        channels, height, width = like.shape
        with isolated(draw_seed(rng)):
            return Autoencoder((channels, height, width), self.latents, self.width)

    def fit(
        self, network: Autoencoder, public: Records, rng: torch.Generator, checkpoint: Epochs | None = None
    ) -> None:
        """Train ``network`` in place, and scale its latents to a deviation of 1 over the images."""
        channels = public.shape[0]
        pixels = dataclasses.replace(public, normalisation=Normalisation((0.0,) * channels, (1.0,) * channels))
        self.training.fit(network, pixels, rng, loss=lambda output, x, y: mse_loss(output, x), checkpoint=checkpoint)
        latents = torch.cat(outputs(network, pixels, of=network.encode))
        network.deviation.mul_(latents.std().clamp_min(1e-6))


class CoreSet(Settings):
    """Settings of the choice of a class's records, each of which is represented by its easiest crop."""

    pool: PositiveInt = 500
    """Number of random records of a class to choose from."""
    crops: PositiveInt = 10
    """Random crops of each of them, resized to the whole image, of which the easiest counts."""
    smallest: Annotated[float, Ge(0.01), Le(1)] = 0.08
    """Smallest share of the image's area that a crop covers; 1 for whole images."""

    def choose(
        self, part: Records, net: nn.Module, count: int, rng: torch.Generator
    ) -> tuple[Float[Tensor, "k c h w"], Float[Tensor, "k c h w"]]:
        """The crops with the lowest cross-entropy, and as many donors: the others, hardest first.

        In the terms of V-information: those from which ``net`` gets the most information on the label.

        Args:
            part: the records of one class.
            net: the client's classifier, in eval mode afterwards as before.
            count: number of records to choose (ipc); all, if there are fewer.
            rng: draws the pool, the crops and the order, a CPU generator.

        Returns:
            Pixels in [0, 1] of ``k = min(count, len(part))`` crops in a random order, and of their donors, which are
            repeated if there are fewer; without others the chosen ones are each other's donors.
        """
        some = torch.randperm(len(part), generator=rng)[: self.pool].to(part.labels.device)
        part = part[some]
        pixels, view = part.pixels(), Views(scale=(self.smallest, 1), ratio=(1, 1), flip=0, jitter=0, gray=0)
        crops = torch.stack([view(pixels, rng) for _ in range(self.crops)])
        losses = torch.stack([_losses(net, crop, part) for crop in crops])
        easiest, which = losses.min(0)
        best = crops[which, torch.arange(len(part), device=which.device)]
        order = easiest.argsort(stable=True)
        chosen, others = order[:count], order[count:].flip(0)
        if not len(others):
            others = chosen.flip(0)
        donors = others[torch.arange(len(chosen), device=others.device) % len(others)]
        chosen = chosen[torch.randperm(len(chosen), generator=rng).to(chosen.device)]
        return best[chosen], best[donors]


def _losses(net: nn.Module, pixels: Tensor, part: Records) -> Float[Tensor, " n"]:
    examples = Examples(part.normalisation.apply(pixels), part.labels)
    return cross_entropy(torch.cat(outputs(net, examples)), part.labels, reduction="none")


def amplitude_mixed(
    x: Float[Tensor, "n c h w"], donors: Float[Tensor, "n c h w"], share: float
) -> Float[Tensor, "n c h w"]:
    """The inverse Fourier transform of ``((1 - share)|F(x)| + share |F(donor)|) exp(i angle F(x))`` of each channel.

    The phases, which show shapes, stay those of ``x``.
    """
    own = torch.fft.fft2(x)
    amplitudes = (1 - share) * own.abs() + share * torch.fft.fft2(donors).abs()
    mixed: Tensor = torch.fft.ifft2(torch.polar(amplitudes, own.angle())).real
    return mixed


class LatentDescent(Settings):
    """Settings of the fitting of latents: AdamW (beta .5, .9) whose learning rate falls along half a cosine."""

    steps: PositiveInt = 100
    """Number of steps."""
    lr: PositiveFloat = 0.013
    """Learning rate, for latents with a deviation of 1. The code's 0.1 is for the latents of Stable Diffusion XL."""
    weight_decay: NonNegativeFloat = 0.077
    """Multiple of the latents that a step takes off, times the learning rate; the code's 0.01 with its 0.1."""
    ce: NonNegativeFloat = 0.0
    """Weight of the cross-entropy of the decoded images; the code takes 0.01 for Tiny-ImageNet."""

    def fit(
        self,
        z: Float[Tensor, "n latents rows columns"],
        target: Float[Tensor, "n c h w"],
        labels: Int64[Tensor, " n"],
        coding: Autoencoder,
        net: nn.Module,
        normalisation: Normalisation,
    ) -> Float[Tensor, "n latents rows columns"]:
        """Latents whose images have the features of ``target``, normalised images, from a start ``z``."""
        with mode_of(net, training=False):
            some = [slice(start, start + _BATCH) for start in range(0, len(z), _BATCH)]
            return torch.cat([self._fitted(z[i], target[i], labels[i], coding, net, normalisation) for i in some])

    def _fitted(
        self, z: Tensor, target: Tensor, labels: Tensor, coding: Autoencoder, net: nn.Module, scale: Normalisation
    ) -> Tensor:
        with torch.no_grad():
            wanted = models.features(net, target)
        z = z.detach().clone().requires_grad_()
        adam = torch.optim.AdamW([z], lr=self.lr, betas=(0.5, 0.9), eps=1e-8, weight_decay=self.weight_decay)
        for number in range(self.steps):
            adam.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * number / self.steps)) / 2
            x = scale.apply(coding.decode(z))
            (z.grad,) = torch.autograd.grad(distillate_loss(net, x, wanted, labels, self.ce), z)
            adam.step()
        return z.detach()


def decoded(coding: Autoencoder, latents: Float[Tensor, "n latents rows columns"]) -> Float[Tensor, "n c h w"]:
    """Images of latents, pixels in [0, 1], without gradients."""
    examples = Examples(latents, torch.zeros(len(latents), device=latents.device))
    return torch.cat(outputs(coding, examples, of=coding.decode)).clamp(0, 1)


def distillate_loss(
    net: nn.Module,
    x: Float[Tensor, "n c h w"],
    wanted: Float[Tensor, "n d"],
    labels: Int64[Tensor, " n"],
    ce: float,
) -> Float[Tensor, ""]:
    """``mean (h(x) - h(target))^2 + ce CE(f(x), y)`` of normalised images x; h are the penultimate features."""
    features, logits = models.FeaturesAndLogits(net)(x)
    loss = mse_loss(features, wanted)
    return loss + ce * cross_entropy(logits, labels) if ce else loss

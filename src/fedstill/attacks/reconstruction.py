"""Reconstruction of images from a gradient, or from a trained model's classes.

* `GradientInversion`: Geiping, Bauermeister, Dröge, Moeller, "Inverting gradients: how easy is it to break privacy in
  federated learning?", NeurIPS 2020 (arXiv:2003.14053), equation 4;
* `ModelInversion`: Fredrikson, Jha, Ristenpart, "Model inversion attacks that exploit confidence information and basic
  countermeasures", CCS 2015, algorithm 1.

Differs from the papers: the smoothness term is DeepInversion's in both (Fredrikson et al. denoise instead), and model
inversion minimises ``-log f_c`` in place of ``1 - f_c``, whose gradient vanishes where ``f_c`` is small.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.attacks.images import nearest
from fedstill.attacks.labels import counts_of, last_layer, shares_of_update, single_label
from fedstill.base.errors import Diverged
from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.distill.inversion import total_variation
from fedstill.distill.pool import adam_step, to_bytes
from fedstill.evaluation import mode_of
from fedstill.train.sgd import adam_of


@dataclass(frozen=True)
class Inverted:
    """Reconstructed images, and the cosine distance in [0, 2] of their gradient, before rounding, to the given one."""

    images: Records
    distance: float


def labels_of(gradient: Mapping[str, Tensor], count: int, num_classes: int) -> Int64[Tensor, " n"]:
    """The labels of the ``count`` records of a gradient, inferred from its last layer, in order of classes."""
    layer = last_layer(gradient, num_classes)
    if count == 1:
        return torch.tensor([single_label(layer)])
    counts = counts_of(shares_of_update(layer.drift), count)
    return torch.arange(num_classes).repeat_interleave(counts)


class GradientInversion(Settings):
    """Reconstruction of images by their gradient."""

    steps: PositiveInt = 4800
    """Number of Adam steps on the pixels, along the signs of the gradient."""
    lr: PositiveFloat = 0.1
    """Learning rate in units of the data set's standard deviation; divided by 10 at 3/8, 5/8 and 7/8 of the steps."""
    tv: NonNegativeFloat = 1e-5
    """Weight of the total variation, averaged over images."""
    restarts: PositiveInt = 1
    """Number of random starts; the result with the smallest distance is returned."""

    def invert(
        self,
        model: nn.Module,
        gradient: Mapping[str, Tensor],
        count: int,
        like: Records,
        rng: torch.Generator,
        *,
        labels: Int64[Tensor, " n"] | None = None,
    ) -> Inverted:
        """Images whose gradient has the direction of ``gradient``: minimise ``1 - cos(g(x), g) + tv TV(x)``.

        Args:
            model: the model of the gradient, in the same mode; not changed.
            gradient: the gradient by parameter name, with any norm.
            count: number of records of the gradient.
            like: records with the shape, classes, normalisation and device.
            rng: a CPU generator for the first images, N(0, 1) after normalisation.
            labels: labels of the records in any order; `labels_of` by default.

        Raises:
            ValueError: the gradient lacks a parameter, is 0 or not finite, or the number of labels is not ``count``.
            Diverged: the model's own gradient is not finite.
        """
        model, device = copy.deepcopy(model), like.images.device
        weights = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        missing = [name for name, _ in weights if name not in gradient]
        if missing:
            raise ValueError(f"the gradient lacks {len(missing)} of {len(weights)} parameters, such as {missing[0]}")
        goal = torch.cat([gradient[name].flatten().to(device, torch.float32) for name, _ in weights])
        if not (goal.any() and torch.isfinite(goal).all()):
            raise ValueError("the gradient is 0 or not finite, so it has no direction")
        y = (labels_of(gradient, count, like.num_classes) if labels is None else labels).to(device)
        if len(y) != count:
            raise ValueError(f"there are {len(y)} labels for {count} records; give one for each record, or none")
        goal = goal / goal.norm()
        parameters = [p for _, p in weights]

        def distance(x: Tensor) -> Tensor:
            parts = torch.autograd.grad(
                cross_entropy(model(x), y), parameters, create_graph=True, materialize_grads=True
            )
            direction = torch.cat([part.flatten() for part in parts])
            cosine_distance: Tensor = 1 - direction @ goal / direction.norm().clamp_min(1e-12)
            return cosine_distance

        tries = []
        for _ in range(self.restarts):
            x = _start(torch.randn(count, *like.shape, generator=rng), like)
            adam = adam_of([x], self.lr, beta1=0.9)
            for step in range(self.steps):
                drops = sum(8 * step >= part * self.steps for part in (3, 5, 7))
                adam.param_groups[0]["lr"] = self.lr * 0.1**drops
                loss = distance(x) + self.tv * _smoothness(x) / count
                x.grad = torch.autograd.grad(loss, x)[0].sign()
                adam.step()
                _limit(x, like)
            tries.append((float(distance(x).detach()), x))
        least, x = min(tries, key=lambda pair: pair[0])
        if not math.isfinite(least):  # the pixels stay finite, as only signs of the gradient reach them
            raise Diverged("the model's gradient for these images is not finite; check its weights")
        return Inverted(_rounded(x, y, like, self.lr), least)


class ModelInversion(Settings):
    """Reconstruction of images by the classes of a trained model."""

    steps: PositiveInt = 1000
    """Number of Adam steps on the pixels."""
    lr: PositiveFloat = 0.05
    """Learning rate in units of the data set's standard deviation."""
    tv: NonNegativeFloat = 1e-2
    """Weight of the total variation."""
    spread: NonNegativeFloat = 0.1
    """Standard deviation of the first images around the data set's mean; with 0 all images of a class are equal."""

    def invert(self, model: nn.Module, labels: Int64[Tensor, " n"], like: Records, rng: torch.Generator) -> Records:
        """An image for each of ``labels``: minimise ``-log f_c(x) + tv TV(x)``.

        Args:
            model: the model, used in eval mode; not changed.
            labels: class of each image.
            like: records with the shape, classes, normalisation and device.
            rng: a CPU generator for the first images.

        Raises:
            Diverged: the images are not finite.
        """
        y = labels.to(like.images.device)
        x = _start(self.spread * torch.randn(len(y), *like.shape, generator=rng), like)
        adam = adam_of([x], self.lr, beta1=0.9)
        with mode_of(model, training=False):
            for _ in range(self.steps):
                adam_step(adam, cross_entropy(model(x), y, reduction="sum") + self.tv * _smoothness(x))
                _limit(x, like)
        return _rounded(x, y, like, self.lr)


# --- quality of the images


def closest_psnr(images: Records, truth: Records) -> Float64[Tensor, " n"]:
    """Peak signal-to-noise ratio, ``-10 log10(MSE)`` dB of pixels in [0, 1], of each image to its nearest record."""
    distances = nearest(images, truth).distances[:, 0].double()
    return -10 * (distances.square() / math.prod(images.shape)).log10()


def _start(x: Float[Tensor, "n c h w"], like: Records) -> Float[Tensor, "n c h w"]:
    x = x.to(like.images.device)
    _limit(x, like)
    return x.requires_grad_()


def _limit(x: Float[Tensor, "n c h w"], like: Records) -> None:
    with torch.no_grad():
        x.clamp_(*like.normalisation.limits(x.device))


def _smoothness(x: Float[Tensor, "n c h w"]) -> Float[Tensor, ""]:
    """The sum of the images' total variations."""
    total: Tensor = torch.vmap(total_variation)(x[:, None]).sum()
    return total


def _rounded(x: Float[Tensor, "n c h w"], labels: Int64[Tensor, " n"], like: Records, lr: float) -> Records:
    black, white = like.normalisation.limits(x.device)
    pixels = to_bytes((x.detach() - black) / (white - black), lr)
    return Records(pixels, labels, like.num_classes, like.normalisation)

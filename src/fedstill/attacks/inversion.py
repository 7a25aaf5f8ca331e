"""Images from what clients send of their models: by a step's gradient, and by a trained model's classes.

* `GradientInversion`: Geiping, Bauermeister, Dröge, Moeller, "Inverting gradients: how easy is it to break privacy in
  federated learning?", NeurIPS 2020 (arXiv:2003.14053), equation 4;
* `ModelInversion`: Fredrikson, Jha, Ristenpart, "Model inversion attacks that exploit confidence information and basic
  countermeasures", CCS 2015, algorithm 1.

Differs from the papers: the smoothness term is DeepInversion's in both (Fredrikson et al. denoise instead), and model
inversion minimises ``-log f_c`` for ``1 - f_c``, whose gradient doesn't vanish where the class is far.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.attacks.images import nearest
from fedstill.attacks.labels import counts_of, last_layer, shares_of_update, single_label
from fedstill.distill.descent import adam_step, to_bytes
from fedstill.distill.inversion import total_variation
from fedstill.evaluate import mode_of
from fedstill.records import Records
from fedstill.settings import Settings
from fedstill.train.adam import adam_of
from fedstill.train.loop import Diverged


@dataclass(frozen=True)
class Inverted:
    """Images made from a gradient, and the cosine distance of theirs to it, in [0, 2], before they were rounded."""

    images: Records
    distance: float


def gradient_of(model: nn.Module, x: Float[Tensor, "n c h w"], labels: Int64[Tensor, " n"]) -> dict[str, Tensor]:
    """The gradient of the mean cross-entropy by parameter name, in the model's own mode: what one step of SGD sends.

    Without momentum and decay, and whatever the learning rate, `fedstill.attacks.labels.descent` points as it does.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values = torch.autograd.grad(cross_entropy(model(x), labels), list(weights.values()), materialize_grads=True)
    return dict(zip(weights, values, strict=True))


def labels_of(gradient: Mapping[str, Tensor], count: int, num_classes: int) -> Int64[Tensor, " n"]:
    """The labels of the ``count`` records that a gradient is of, by its last layer, in order of classes."""
    layer = last_layer(gradient, num_classes)
    if count == 1:
        return torch.tensor([single_label(layer)])
    counts = counts_of(shares_of_update(layer.drift), count)
    return torch.arange(num_classes).repeat_interleave(counts)


class GradientInversion(Settings):
    """Fit of images to a gradient."""

    steps: PositiveInt = 4800
    """Steps of Adam on the pixels, along the signs of their gradient."""
    lr: PositiveFloat = 0.1
    """Its learning rate in units of the data set's standard deviation; a tenth from 3/8, 5/8 and 7/8 of the steps."""
    tv: NonNegativeFloat = 1e-5
    """Weight of the total variation, averaged over images."""
    restarts: PositiveInt = 1
    """First images to try; the result with the smallest distance counts."""

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
        """Images whose gradient points as the one observed: minimise ``1 - cos(g(x), g) + tv TV(x)``.

        Args:
            model: as it was when the gradient was taken, in that mode; stays as it is.
            gradient: by parameter name, of any length.
            count: records it is the mean of.
            like: carries shape, classes, normalisation and device.
            rng: a CPU generator; draws the first images, N(0, 1) after normalisation.
            labels: of the records, in any order; without them `labels_of`.

        Raises:
            ValueError: the gradient lacks a parameter, is 0 or not finite, or there aren't ``count`` labels.
            Diverged: the model's own gradient is not finite.
        """
        model, device = copy.deepcopy(model), like.images.device
        weights = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        missing = [name for name, _ in weights if name not in gradient]
        if missing:
            raise ValueError(f"the gradient lacks {len(missing)} of {len(weights)} parameters, {missing[0]} for one")
        goal = torch.cat([gradient[name].flatten().to(device, torch.float32) for name, _ in weights])
        if not (goal.any() and torch.isfinite(goal).all()):
            raise ValueError("the gradient is 0 or not finite, so that it points nowhere")
        y = (labels_of(gradient, count, like.num_classes) if labels is None else labels).to(device)
        if len(y) != count:
            raise ValueError(f"there are {len(y)} labels for {count} records; give one for each, or none")
        goal = goal / goal.norm()
        parameters = [p for _, p in weights]

        def distance(x: Tensor) -> Tensor:
            parts = torch.autograd.grad(
                cross_entropy(model(x), y), parameters, create_graph=True, materialize_grads=True
            )
            found = torch.cat([part.flatten() for part in parts])
            apart: Tensor = 1 - found @ goal / found.norm().clamp_min(1e-12)
            return apart

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
        reached, x = min(tries, key=lambda found: found[0])
        if not math.isfinite(reached):  # signs hide it from the pixels
            raise Diverged("the model's gradient for these images is not finite; look at its weights")
        return Inverted(_rounded(x, y, like, self.lr), reached)


class ModelInversion(Settings):
    """Fit of images to the classes of a trained model."""

    steps: PositiveInt = 1000
    """Steps of Adam on the pixels."""
    lr: PositiveFloat = 0.05
    """Its learning rate in units of the data set's standard deviation."""
    tv: NonNegativeFloat = 1e-2
    """Weight of every image's total variation."""
    spread: NonNegativeFloat = 0.1
    """Standard deviation of the first images around the data set's mean; at 0 a class's images are all the same."""

    def invert(self, model: nn.Module, labels: Int64[Tensor, " n"], like: Records, rng: torch.Generator) -> Records:
        """An image for each of ``labels``: minimise ``-log f_c(x) + tv TV(x)``.

        Args:
            model: looked at in eval mode; stays as it is.
            labels: classes, in any order, each as often as wanted.
            like: carries shape, classes, normalisation and device.
            rng: a CPU generator; draws the first images.

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


# --- how close it comes


def closest_psnr(found: Records, truth: Records) -> Float64[Tensor, " n"]:
    """Peak signal-to-noise ratio of each image to the true record nearest to it: ``-10 log10(MSE)`` dB.

    Of pixels in [0, 1]; infinite where they are equal. Many images may be close to the same record.
    """
    return _psnr(nearest(found, truth).distances[:, 0].double(), found)


def matched_psnr(found: Records, truth: Records) -> Float64[Tensor, " n"]:
    """As `closest_psnr`, no record for two images: the assignment with the smallest squared error of all.

    Raises:
        ValueError: there are more images than records.
    """
    if len(found) > len(truth):
        raise ValueError(f"{len(found)} images can't each have one of {len(truth)} records; use closest_psnr")
    apart = torch.cdist(found.pixels().flatten(1).double(), truth.pixels().flatten(1).double()).cpu()
    rows, columns = linear_sum_assignment(apart.square().numpy())
    return _psnr(apart[torch.from_numpy(rows), torch.from_numpy(columns)], found)


def _psnr(distances: Float64[Tensor, " n"], like: Records) -> Float64[Tensor, " n"]:
    return -10 * (distances.square() / math.prod(like.shape)).log10()


def _start(x: Float[Tensor, "n c h w"], like: Records) -> Float[Tensor, "n c h w"]:
    x = x.to(like.images.device)
    _limit(x, like)
    return x.requires_grad_()


def _limit(x: Float[Tensor, "n c h w"], like: Records) -> None:
    """Back into the range that pixels in [0, 1] have."""
    with torch.no_grad():
        x.clamp_(*like.normalisation.limits(x.device))


def _smoothness(x: Float[Tensor, "n c h w"]) -> Float[Tensor, ""]:
    """The sum of the images' total variations, so that none counts for another."""
    total: Tensor = torch.vmap(total_variation)(x[:, None]).sum()
    return total


def _rounded(x: Float[Tensor, "n c h w"], labels: Int64[Tensor, " n"], like: Records, lr: float) -> Records:
    black, white = like.normalisation.limits(x.device)
    pixels = to_bytes((x.detach() - black) / (white - black), lr)
    return Records(pixels, labels, like.num_classes, like.normalisation)

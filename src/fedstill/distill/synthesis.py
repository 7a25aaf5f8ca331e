"""A client's synthetic images by gradient matching on representative records.

Chen, Zhou, Jiang, FedGM, section 3.2 and Algorithm 1 (client part): DC's loop (arXiv:2006.05929) with DREAM's choice of
real images (arXiv:2302.14416). `GradientMatching.published` has the paper's constants; the defaults are ours and reach
similar accuracies in a hundredth of the steps.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float
from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from fedstill.base.records import Records
from fedstill.base.settings import Settings
from fedstill.distill import pool
from fedstill.distill.coreset import choose
from fedstill.distill.gradient_matching import Distance, match
from fedstill.ticks import tick
from fedstill.train.augment import DSA, Strategy

_OF_VECTORS = 10.0
"""Factor of the learning rate of vectors: about the inverse variance of pixels in [0, 1]."""


class GradientMatching(Settings):
    """Settings of the synthesis of a client's images."""

    nets: PositiveInt = 300
    """Number of new random networks to match gradients at, one after another."""
    steps: PositiveInt = 1
    """Matching steps at each network. With one class the gradient soon vanishes; more classes need ``net_epochs``."""
    net_epochs: NonNegativeInt = 10
    """Passes over the synthetic images that train the network between two matching steps."""
    net_lr: PositiveFloat = 0.01
    """Learning rate of these passes (plain SGD)."""
    distance: Distance = "grouped"
    """Distance between gradients: "grouped" cosine by output unit, "mse" or "cos" of all parameters, or
    "convolutions", the squared error of convolutions."""
    formation: PositiveInt = 1
    """Smaller images side by side in a stored image, in both directions: 2 for four images in the bytes of one, each
    reduced to half the height and width and enlarged before use."""
    train_on: Literal["synthetic", "real"] = "synthetic"
    """Records of the passes between matching steps: all synthetic images, or a batch of each class's real ones."""
    lr: PositiveFloat = 0.01
    """Learning rate of the pixels, which lie in [0, 1]; multiplied by the number of a class's images, as used. Tenfold
    for vectors, whose columns have about unit variance."""
    anneal: bool = True
    """Reduce the pixels' learning rate to 0 along half a cosine over all matching steps."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Momentum of the pixels' SGD."""
    batch_size: PositiveInt = 64
    """Real images of every class in one matching step."""
    choose: Literal["representatives", "random"] = "random"
    """Choice of real images: random, or one near the centre of each k-means cluster of the network's features."""
    interval: PositiveInt = 10
    """Matching steps, counted over all networks, between two choices of representatives."""
    pool: PositiveInt = 1024
    """Number of a class's records, newly drawn for every choice, from which representatives are chosen."""
    init: Literal["noise", "real", "representatives"] = "representatives"
    """Start of the images: ``0.5 + N(0, 1) / 4``, random records or representative records."""
    augment: Strategy = "color_crop_cutout_scale_rotate"
    """Operations of DSA, joined by "_", from color, crop, cutout, flip, scale, rotate, the same for real and synthetic
    images at a step; or "none"."""

    @classmethod
    def published(cls, ipc: int) -> "GradientMatching":
        """FedGM's constants (section 4.1): 300 networks of 100 steps, lr 0.01, 128 real images, choice every 10."""
        return cls(
            nets=300,
            steps=100,
            net_epochs=1,
            lr=0.01 / ipc,
            anneal=False,
            batch_size=128,
            choose="representatives",
            augment="none",
        )


def _single(settings: GradientMatching) -> GradientMatching:
    if settings.formation > 1:
        raise ValueError(f"formation is {settings.formation}, but this method's images hold one each; leave it out")
    return settings


SingleFormation = Annotated[GradientMatching, AfterValidator(_single)]
"""Settings of a synthesis whose stored images are used as they are."""


def synthesise(
    records: Records,
    new_net: Callable[[int], nn.Module],
    ipc: int,
    settings: GradientMatching,
    rng: torch.Generator,
    *,
    on_loss: Callable[[float], None] | None = None,
) -> Records:
    """Fit ``ipc`` synthetic images of every class in ``records``, ordered by class; pixels are rounded to 8 bits.

    Vectors are fitted as networks see them, without bounds, rounding or augmentation; the result is normalised.

    Args:
        records: the client's records.
        new_net: gives random network 0, 1, ... ``settings.nets - 1``; the same sequence at all clients makes their
            images fit the same networks.
        ipc: number of stored images of a class; with ``formation`` N, each holds N^2.
        settings: settings of the fit.
        rng: draws batches, first images and augmentations (a CPU generator).
        on_loss: called with the matching loss before each step, the sum over classes.

    Raises:
        ValueError: ``records`` is empty, or ``formation`` does not divide the images' sides.
    """
    pool.check_divides(settings.formation, records.shape)
    if len(records) == 0:
        raise ValueError("0 records have no classes to synthesise; leave this client out or give it records")
    vectors = records.are_vectors
    if vectors:
        records = records.normalised()
    labels = [int(c) for c in torch.unique(records.labels)]
    own = [records.of_class(c) for c in labels]
    augment = DSA("none" if vectors else settings.augment)
    lr = settings.lr * (_OF_VECTORS if vectors else 1.0)
    images: Tensor | None = None
    batches: list[Float[Tensor, "n c h w"]] = []
    for index in range(settings.nets):
        net = new_net(index).to(records.images.device)
        if images is None:
            images = torch.stack([_first_images(part, net, ipc, settings, rng) for part in own])
            velocity = torch.zeros_like(images)
        for step in range(settings.steps):
            if settings.choose == "random" or (index * settings.steps + step) % settings.interval == 0:
                batches = [_real_batch(part, net, settings, rng) for part in own]
            transforms = [augment.draw(rng) for _ in own]
            loss, gradient = pixel_gradient(net, records, images, batches, labels, transforms, settings)
            if on_loss is not None:
                on_loss(float(loss))
            velocity.mul_(settings.momentum).add_(gradient)  # S <- S - eta_S v, v <- mu v + grad_S D
            done = (index * settings.steps + step) / (settings.nets * settings.steps)
            factor = ipc * settings.formation**2 * (0.5 + 0.5 * math.cos(math.pi * done) if settings.anneal else 1.0)
            images.sub_(velocity, alpha=lr * factor)
            if not vectors:
                images.clamp_(0, 1)
            if step + 1 < settings.steps:
                if settings.train_on == "real":
                    _train_on_real(net, own, labels, settings, rng)
                else:
                    train_network(net, records, images, labels, settings)
        tick("matching", index + 1, settings.nets)
    assert images is not None
    values = images.flatten(0, 1)
    values = values if vectors else (values * 255).round().to(torch.uint8)
    every = torch.tensor(labels, device=images.device).repeat_interleave(ipc)
    return Records(values, every, records.num_classes, records.normalisation)


def pixel_gradient(
    net: nn.Module,
    records: Records,
    images: Float[Tensor, "k m c h w"],
    batches: Sequence[Float[Tensor, "n c h w"]],
    labels: Sequence[int],
    transforms: Sequence[Callable[[Tensor], Tensor]],
    settings: GradientMatching,
) -> tuple[Float[Tensor, ""], Float[Tensor, "k m c h w"]]:
    """The matching loss, and its gradient by the pixels, through augmentation and normalisation."""
    pixels = images.detach().requires_grad_()
    used = [pool.unfold(x, settings.formation) for x in pixels]
    synthetic = [transform(records.normalisation.apply(x)) for transform, x in zip(transforms, used, strict=True)]
    real = [transform(x) for transform, x in zip(transforms, batches, strict=True)]
    loss, by_input = match(net, real, synthetic, labels, settings.distance)
    (gradient,) = torch.autograd.grad(synthetic, pixels, by_input)
    return loss, gradient


def _real_batch(part: Records, net: nn.Module, settings: GradientMatching, rng: torch.Generator) -> Tensor:
    if settings.choose == "random":
        return part.inputs(_random(part, settings.batch_size, rng))
    return part.inputs(choose(part, net, settings.batch_size, rng, pool=settings.pool))


def _first_images(part: Records, net: nn.Module, ipc: int, settings: GradientMatching, rng: torch.Generator) -> Tensor:
    """``(ipc, c, h, w)`` pixels or ``(ipc, d)`` vectors; if the class has fewer records, the rest starts as noise."""
    count = ipc * settings.formation**2
    noise = torch.randn(count, *part.shape, generator=rng)
    images = (noise if part.are_vectors else (noise / 4 + 0.5).clamp_(0, 1)).to(part.images.device)
    if settings.init != "noise":
        if settings.init == "real":
            index = _random(part, count, rng)
        else:
            index = choose(part, net, count, rng, pool=settings.pool)
        images[: len(index)] = part.pixels(index)
    return pool.fold(images, settings.formation)


def _random(part: Records, count: int, rng: torch.Generator) -> Tensor:
    return torch.randperm(len(part), generator=rng)[:count].to(part.images.device)


def train_network(
    net: nn.Module,
    records: Records,
    images: Float[Tensor, "k m c h w"],
    labels: Sequence[int],
    settings: GradientMatching,
) -> None:
    """Take one step a pass: theta <- theta - eta_theta grad CE(S), with all synthetic images in one batch."""
    inputs = records.normalisation.apply(pool.unfold(images.flatten(0, 1), settings.formation))
    targets = torch.tensor(labels, device=images.device).repeat_interleave(len(inputs) // len(labels))
    for _ in range(settings.net_epochs):
        _step(net, inputs, targets, settings.net_lr)


def _train_on_real(
    net: nn.Module, own: Sequence[Records], labels: Sequence[int], settings: GradientMatching, rng: torch.Generator
) -> None:
    """Take one step a pass on a batch of each class's real images, newly drawn (IDC)."""
    for _ in range(settings.net_epochs):
        batches = [part.inputs(_random(part, settings.batch_size, rng)) for part in own]
        targets = torch.tensor(labels).repeat_interleave(torch.tensor([len(batch) for batch in batches]))
        _step(net, torch.cat(batches), targets.to(batches[0].device), settings.net_lr)


def _step(net: nn.Module, inputs: Tensor, targets: Tensor, lr: float) -> None:
    parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(functional.cross_entropy(net(inputs), targets), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, list(gradients), alpha=-lr)

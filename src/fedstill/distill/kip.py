"""Kernel inducing points: images from which kernel ridge regression predicts a client's records.

Nguyen, Chen, Lee, "Dataset meta-learning from kernel ridge-regression", ICLR 2021 (arXiv:2011.00050), as FedD3 uses it
(Song et al., IJCNN 2023, arXiv:2208.11311, section III and the authors' code, ``dd_kip.py``).
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import one_hot

from fedstill.base.records import Examples, Records
from fedstill.base.settings import Settings
from fedstill.distill.coreset import shares
from fedstill.ticks import tick

_EQUAL = 1e-12
_CHECKED, _EVERY, _PATIENCE = 1000, 50, 5


class KIP(Settings):
    """Settings of the fit of a client's images."""

    steps: PositiveInt = 3000
    """Maximum number of steps of Adam on the images."""
    lr: PositiveFloat = 0.004
    """Learning rate of Adam, on pixels of about unit variance."""
    batch_size: PositiveInt = 200
    """Records that a step predicts, equally many of each class."""
    ridge: PositiveFloat = 1e-6
    """Ridge penalty, as a multiple of the kernel's mean diagonal."""
    depth: NonNegativeInt = 4
    """Hidden layers of the kernel's network."""
    weight_std: PositiveFloat = math.sqrt(2)
    """Standard deviation of the network's weights, times the root of the layer's inputs."""
    bias_std: NonNegativeFloat = 0.1
    """Standard deviation of the network's biases."""
    stop: Literal["plateau", "batch_accuracy", "never"] = "plateau"
    """Criterion to stop early. "plateau": the loss on a fixed 1,000 of the client's records, evaluated every 50 steps,
    has not fallen by ``tolerance`` in the last 250. "batch_accuracy", as published: all records of one batch are
    predicted right, which happens by chance if the batch has 10."""
    tolerance: NonNegativeFloat = 0.01
    """Smallest relative fall of the loss that counts as progress."""
    standardise: Literal["global", "client"] = "global"
    """Scale of the images: the data set's normalisation, or as published also the client's own mean and variance, with
    which the server trains on another scale than it tests on."""
    clamp: bool = True
    """Keep an image's pixels in [0, 1]; ignored if standardise is "client"."""

    @classmethod
    def published(cls) -> "KIP":
        """FedD3's constants: batches of 10, stop by batch accuracy, the client's own statistics, unbounded values."""
        return cls(batch_size=10, stop="batch_accuracy", standardise="client", clamp=False)


def ntk(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], depth: int, weight_std: float, bias_std: float
) -> Float64[Tensor, "n m"]:
    """Neural tangent kernel of an infinitely wide fully connected ReLU network with one output, in float64.

    In NTK parametrisation a layer is ``weight_std / sqrt(inputs) W a + bias_std b`` with standard normal W and b. With
    ``K = weight_std^2 x.y / d + bias_std^2`` and ``T = K``, each hidden layer is (Jacot et al. 2018, arXiv:1806.07572,
    theorem 1; expectations: Cho, Saul 2009, equations 1 and 6, orders 1 and 0)::

        angle = arccos(K(x, y) / sqrt(K(x, x) K(y, y)))
        K <- weight_std^2 sqrt(K(x, x) K(y, y)) (sin angle + (pi - angle) cos angle) / 2 pi + bias_std^2
        T <- K + weight_std^2 T (pi - angle) / 2 pi

    Differentiable; at x = y, where T has a kink, the gradient through the angle is 0. With ``depth`` 0 it is the kernel
    of linear regression, ``K``.
    """
    x, y = x.double(), y.double()
    w, b = weight_std**2, bias_std**2
    k = w * (x @ y.T) / x.shape[1] + b
    of_x, of_y = (w * rows.square().mean(1) + b for rows in (x, y))
    t = k
    for _ in range(depth):
        length = (of_x[:, None] * of_y).sqrt().clamp_min(1e-300)
        cosine = k / length
        apart = (cosine < 1 - _EQUAL) & (cosine > _EQUAL - 1)
        safe = torch.where(apart, cosine, 0.0)
        angle = torch.where(apart, safe.arccos(), (cosine < 0).to(k.dtype) * math.pi)
        sine = torch.where(apart, (1 - safe.square()).sqrt(), 0.0)
        k = w * (length * sine + (math.pi - angle) * k) / (2 * math.pi) + b
        t = k + w * t * (math.pi - angle) / (2 * math.pi)
        of_x, of_y = w * of_x / 2 + b, w * of_y / 2 + b
    return t


def predict(
    support: Float[Tensor, "m d"], values: Float64[Tensor, "m classes"], target: Float[Tensor, "n d"], settings: KIP
) -> Float64[Tensor, "n classes"]:
    """Kernel ridge regression from ``support`` s to ``target`` t: ``K_ts (K_ss + ridge tr(K_ss) / m I)^-1 y_s``."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return ntk(x, y, settings.depth, settings.weight_std, settings.bias_std)

    k = kernel(support, support)
    ridge = settings.ridge * k.diagonal().mean()
    try:
        factor = torch.linalg.cholesky(k + ridge * torch.eye(len(support), dtype=k.dtype, device=k.device))
    except RuntimeError as error:  # torch's LinAlgError
        raise ValueError(
            "the kernel of the client's records has no Cholesky factor; scale records that are very large (--mean, "
            "--std), or raise --kip.ridge"
        ) from error
    return kernel(target, support) @ torch.cholesky_solve(values, factor)


def inducing_points(
    records: Records,
    total: int,
    settings: KIP,
    rng: torch.Generator,
) -> Examples:
    """Fit images so that kernel regression on them predicts the client's records; their labels are fixed.

    The loss is half the mean squared error of `predict` for one-hot labels less ``1 / num_classes``. Images start as
    random records (and noise if there are too few), on the scale that ``settings.standardise`` names.

    Args:
        records: the client's records.
        total: n_dd, number of images over all classes, divided by `fedstill.distill.coreset.shares`.
        settings: settings of the fit.
        rng: draws first images, batches and the records on which the loss is evaluated (a CPU generator).

    Raises:
        ValueError: there are no records, or ``total`` is below 1.
    """
    share = shares(records.class_counts(), total)
    of_class = [torch.nonzero(records.labels.cpu() == c).flatten() for c in share]
    device = records.images.device
    images = _standardised(records, settings)
    codes = one_hot(records.labels, records.num_classes).double() - 1 / records.num_classes
    start = [_start(images, index, n, rng) for index, n in zip(of_class, share.values(), strict=True)]
    support = torch.cat(start).double().requires_grad_()
    labels = torch.tensor([c for c, n in share.items() for _ in range(n)], device=device)
    known = one_hot(labels, records.num_classes).double() - 1 / records.num_classes
    checked = torch.randperm(len(records), generator=rng)[:_CHECKED].to(device)
    bounded = settings.clamp and settings.standardise == "global"
    limits = records.limits() if bounded else None

    def error(index: Tensor) -> tuple[Tensor, bool]:
        predicted = predict(support.flatten(1), known, images[index].flatten(1), settings)
        right = bool((predicted.argmax(1) == records.labels[index]).all())
        return 0.5 * (predicted - codes[index]).square().mean(), right

    adam = torch.optim.Adam([support], lr=settings.lr)
    losses: list[float] = []
    for step in range(1, settings.steps + 1):
        loss, right = error(balanced_batch(of_class, settings.batch_size, rng).to(device))
        (support.grad,) = torch.autograd.grad(loss, support)
        adam.step()
        with torch.no_grad():
            if limits is not None:
                torch.clamp(support, *limits, out=support)
            tick("fitting images", step, settings.steps)
            if settings.stop == "plateau" and step % _EVERY == 0:
                losses.append(float(error(checked)[0]))
        if settings.stop == "batch_accuracy" and right:
            break
        if len(losses) > _PATIENCE and min(losses[-_PATIENCE:]) > (1 - settings.tolerance) * min(losses[:-_PATIENCE]):
            break
    return Examples(support.detach().float(), labels)


def _standardised(records: Records, settings: KIP) -> Float[Tensor, "n c h w"]:
    images = records.inputs()
    if settings.standardise == "client":
        over = (0,) if records.are_vectors else (0, 2, 3)
        mean, std = images.mean(over, keepdim=True), images.std(over, correction=0, keepdim=True)
        images = (images - mean) / std.clamp_min(1e-6)
    return images


def _start(images: Tensor, index: Int64[Tensor, " n"], count: int, rng: torch.Generator) -> Float[Tensor, "m c h w"]:
    chosen = index[torch.randperm(len(index), generator=rng)[:count]]
    values = torch.randn(count, *images.shape[1:], generator=rng).to(images.device)
    values[: len(chosen)] = images[chosen.to(images.device)]
    return values


def balanced_batch(of_class: list[Int64[Tensor, " n"]], size: int, rng: torch.Generator) -> Int64[Tensor, " b"]:
    """Positions of equally many records of each class; records repeat only if the class has too few."""
    each = max(1, size // len(of_class))
    parts = []
    for index in of_class:
        chosen = index[torch.randperm(len(index), generator=rng)[:each]]
        repeated = index[torch.randint(len(index), (each - len(chosen),), generator=rng)]
        parts += [chosen, repeated]
    return torch.cat(parts)

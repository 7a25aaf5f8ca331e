"""Distribution matching: synthetic examples whose class means of random features are those of the real ones.

Zhao, Bilen, "Dataset condensation with distribution matching", WACV 2023 (arXiv:2110.04181), section 3, in the forms of

* FedDM (Xiong et al., CVPR 2023, arXiv:2207.09653): images, at networks around the server's (`sphere_around`,
  `fit_images`);
* FedRD, section III-B2: representations of a projection, at random networks (`fit_representations`).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import models
from fedstill.base.records import Examples, Records
from fedstill.base.settings import Settings
from fedstill.evaluation import mode_of
from fedstill.ticks import tick
from fedstill.train.augment import DSA, FULL_STRATEGY, Strategy

_CHUNK = 16
_SAMPLE = 256


class DistributionMatching(Settings):
    """Settings of the fit of synthetic examples to real ones; the defaults suit images, as in FedDM."""

    steps: PositiveInt = 1000
    """Steps of SGD on the synthetic examples, each at a new network."""
    batch_size: PositiveInt = 256
    """Real records of every class in one step."""
    top_up: bool = False
    """If a class has fewer records than the batch, fill the batch by draws with replacement."""
    min_records: PositiveInt = 1
    """Number of a client's records that a class needs to be distilled."""
    logits: bool = True
    """Match mean logits in addition to mean features."""
    squared: bool = True
    """Distance between means: the squared Euclidean norm, or the norm."""
    batch_statistics: bool = False
    """Run the networks in train mode, with batch norms over all classes together, or in eval mode."""
    lr: PositiveFloat = 1.0
    """Learning rate of the synthetic examples, in the space of the network's inputs."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Momentum of the SGD."""
    init: Literal["real", "noise"] = "real"
    """Start of a class: random real records (and noise if there are too few), or ``N(0, 1)`` noise. For representations
    the noise has the mean and variance of real ones, which matching can't recover after batch norms."""
    augment: Strategy = "none"
    """Operations of DSA on the real images, joined by "_", from color, crop, cutout, flip, scale, rotate, one drawn for
    each class and step; or "none"."""
    rho: NonNegativeFloat = 5.0
    """Distance of FedDM's networks from the server's model (see `sphere_around`); FedRD ignores it."""
    clamp: bool = True
    """Keep an image's pixels in [0, 1]; representations are unbounded."""

    @classmethod
    def published_feddm(cls) -> "DistributionMatching":
        """FedDM's replication: batches filled up, classes of at least 10 records, unbounded values."""
        return cls(top_up=True, min_records=10, clamp=False)

    @classmethod
    def published_fedrd(cls) -> "DistributionMatching":
        """FedRD's constants: norms not squared, features alone, DSA on real images, plain SGD, start from noise."""
        return cls(
            logits=False,
            squared=False,
            batch_statistics=True,
            momentum=0.0,
            init="noise",
            augment=FULL_STRATEGY,
            min_records=10,
        )

    def for_records(self, records: Records) -> "DistributionMatching":
        """These settings, but with ``min_records`` 1 if no class of ``records`` has enough."""
        enough = bool((records.class_counts() >= self.min_records).any())
        return self if enough else self.model_copy(update={"min_records": 1})


def sphere_around(model: nn.Module, rho: float, rng: torch.Generator) -> Callable[[int], nn.Module]:
    """FedDM's networks: at each call ``w' = w + min(1, rho / |z|) z`` with a new ``z ~ N(0, I)`` from a CPU generator.

    As ``|z|`` is near the root of the number of parameters, w' lies on the sphere of radius ``rho`` around w.

    Returns:
        A function of the step's number, which it ignores. Every call returns the same module with new parameters.
        ``model``, which has w, must not change meanwhile.
    """
    net = copy.deepcopy(model)
    centre = [p.detach() for p in model.parameters()]
    sizes = [p.numel() for p in centre]

    def draw(_step: int) -> nn.Module:
        z = torch.randn(sum(sizes), generator=rng)
        z *= min(1.0, rho / float(z.norm()))
        with torch.no_grad():
            for p, w, part in zip(net.parameters(), centre, torch.split(z, sizes), strict=True):
                p.copy_(w + part.view_as(w).to(w.device))
        return net

    return draw


def match(
    net: nn.Module,
    real: Sequence[Float[Tensor, "n c h w"]],
    synthetic: Float[Tensor, "k m c h w"],
    settings: DistributionMatching,
    weights: Sequence[Float[Tensor, " n"]] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "k m c h w"]]:
    """One step's loss L and its gradient by the synthetic examples.

    ``L = sum over classes c of |mean of f(x) over real x of c - mean of f(s) over synthetic s of c|^2``, with f the
    features; settings can add a term with the logits, or make the exponent 1. In eval mode, real examples go through
    the network 16 at a time, so that activations stay in the processor's cache.

    Args:
        net: f. Its parameters do not change; in train mode, the running statistics of batch norms do.
        real: a batch for every class, of network inputs; sizes may differ.
        synthetic: ``m`` examples for every class.
        settings: terms, norm and mode.
        weights: a weight for each real example of every class; by default equal weights.
    """
    x = torch.cat(list(real))
    whole = settings.batch_statistics or not x.is_cpu
    examples = synthetic.detach().flatten(0, 1).requires_grad_()
    with mode_of(net, training=settings.batch_statistics):
        with torch.no_grad():
            parts = [_outputs(net, chunk, settings.logits) for chunk in torch.split(x, len(x) if whole else _CHUNK)]
        averaging = _averaging(real, weights)
        targets = [averaging @ torch.cat(part) for part in zip(*parts, strict=True)]
        means = [o.view(*synthetic.shape[:2], -1).mean(1) for o in _outputs(net, examples, settings.logits)]
        differences = [(m - t).square().sum(1) for m, t in zip(means, targets, strict=True)]
        loss = sum(
            ((d if settings.squared else root_of(d)).sum() for d in differences), torch.zeros((), device=x.device)
        )
        (gradient,) = torch.autograd.grad(loss, examples)
    return loss.detach(), gradient.view_as(synthetic)


def fit_images(
    records: Records,
    net_of: Callable[[int], nn.Module],
    ipc: int,
    settings: DistributionMatching,
    rng: torch.Generator,
) -> Examples:
    """Fit ``ipc`` synthetic images of every class of ``records``, as FedDM's client update; ordered by class.

    Args:
        records: the client's records.
        net_of: gives the network of step 0, 1, ... ``settings.steps - 1`` (`sphere_around`), on the records' device.
        ipc: number of images of a class.
        settings: settings of the fit; with ``clamp``, pixels stay in [0, 1].
        rng: draws first images, batches and augmentations (a CPU generator).

    Raises:
        ValueError: no class has enough records.
    """
    limits = records.limits() if settings.clamp else None
    return _fit(records, nn.Identity(), net_of, ipc, settings, rng, (0.0, 1.0), limits)


def fit_representations(
    records: Records,
    projection: nn.Module,
    net_of: Callable[[int], nn.Module],
    dpc: int,
    settings: DistributionMatching,
    rng: torch.Generator,
) -> Examples:
    """Fit ``dpc`` synthetic representations of every class of ``records``, as FedRD's client update; ordered by class.

    The arguments are those of `fit_images`, and ``projection``: varphi, which maps normalised images to
    representations and is not trained. ``net_of`` gives psi, whose inputs are representations.

    Raises:
        ValueError: no class has enough records.
    """
    some = torch.randperm(len(records), generator=rng)[:_SAMPLE].to(records.images.device)
    with mode_of(projection, training=False), torch.no_grad():
        z = projection(records.inputs(some))
    noise = (float(z.mean()), float(z.std()))
    return _fit(records, projection, net_of, dpc, settings, rng, noise, None)


def _fit(
    records: Records,
    projection: nn.Module,
    net_of: Callable[[int], nn.Module],
    count: int,
    settings: DistributionMatching,
    rng: torch.Generator,
    noise: tuple[float, float],
    limits: tuple[Tensor, Tensor] | None,
) -> Examples:
    counts = records.class_counts()
    labels = [int(c) for c in torch.nonzero(counts >= settings.min_records).flatten()]
    if not labels:
        raise ValueError(
            f"no class of these {len(records)} records has min_records={settings.min_records} of them; leave this "
            "client out or lower min_records"
        )
    own = [records.of_class(c) for c in labels]
    augment = DSA(settings.augment)
    with mode_of(projection, training=False):
        with torch.no_grad():
            values = torch.stack([_start(part, projection, count, settings, rng, noise) for part in own])
        velocity = torch.zeros_like(values)
        for step in range(settings.steps):
            batches = [draw_batch(len(part), settings, rng) for part in own]
            with torch.no_grad():
                real = [
                    projection(augment.draw(rng)(part.inputs(index.to(part.images.device))))
                    for part, (index, _) in zip(own, batches, strict=True)
                ]
            _, gradient = match(net_of(step), real, values, settings, [w.to(values.device) for _, w in batches])
            velocity.mul_(settings.momentum).add_(gradient)
            values.sub_(velocity, alpha=settings.lr)  # S <- S - eta_S v, v <- mu v + grad_S L
            if limits is not None:
                torch.clamp(values, *limits, out=values)
            tick("matching", step + 1, settings.steps)
    return Examples(values.flatten(0, 1), torch.tensor(labels, device=values.device).repeat_interleave(count))


def _start(
    part: Records,
    projection: nn.Module,
    count: int,
    settings: DistributionMatching,
    rng: torch.Generator,
    noise: tuple[float, float],
) -> Float[Tensor, "m c h w"]:
    index = torch.randperm(len(part), generator=rng)[:count].to(part.images.device)
    real: Tensor = projection(part.inputs(index))
    mean, std = noise
    values = torch.randn(count, *real.shape[1:], generator=rng).to(real.device) * std + mean
    if settings.init == "real":
        values[: len(real)] = real
    return values


def draw_batch(
    n: int, settings: DistributionMatching, rng: torch.Generator
) -> tuple[Int64[Tensor, " b"], Float[Tensor, " b"]]:
    """Positions of a class's batch, and their weights; a position repeats only if batch statistics need repetitions."""
    if n >= settings.batch_size or not settings.top_up:
        index = torch.randperm(n, generator=rng)[: settings.batch_size]
        return index, torch.ones(len(index))
    index = torch.cat([torch.arange(n), torch.randint(n, (settings.batch_size - n,), generator=rng)])
    if settings.batch_statistics:
        return index, torch.ones(len(index))
    return torch.arange(n), torch.bincount(index, minlength=n).float()


def _outputs(net: nn.Module, x: Float[Tensor, "n c h w"], logits: bool) -> tuple[Tensor, ...]:
    """Features ``(n, d)`` and, if asked for, logits ``(n, classes)``, from one forward pass."""
    if not logits:
        return (models.features(net, x),)
    inputs: list[Tensor] = []
    last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1:]
    hooks = [m.register_forward_pre_hook(lambda _module, args: inputs.append(args[0])) for m in last]
    try:
        output = net(x)
    finally:
        for hook in hooks:
            hook.remove()
    if len(inputs) != 1:
        raise ValueError(f"{type(net).__name__} doesn't end in one nn.Linear, which logits need; use logits=False")
    return inputs[0].flatten(1), output


def _averaging(real: Sequence[Tensor], weights: Sequence[Tensor] | None) -> Float[Tensor, "k n"]:
    """The matrix that maps all real outputs to their class means."""
    rows = [x.new_ones(len(x)) for x in real] if weights is None else weights
    matrix: Tensor = torch.block_diag(*((row / row.sum()).to(real[0]) for row in rows))  # type: ignore[no-untyped-call]
    return matrix


def root_of(squares: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Square roots with gradient 0 at 0."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)

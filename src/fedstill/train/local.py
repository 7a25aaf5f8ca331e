"""Local training by SGD, and what a trained model gets right.

One loop serves the client's local update, the corrections other methods make to its gradients (``proximal``,
``control_variates``) and the server's training on synthetic records.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int64
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.protocol import Settings
from fedstill.records import Examples, Records
from fedstill.seeds import isolated
from fedstill.train.epochs import Epochs, epochs

__all__ = [
    "SGD",
    "Augment",
    "Bound",
    "Correction",
    "Diverged",
    "Examples",
    "Loss",
    "Norms",
    "Tensors",
    "accuracies",
    "confusion",
    "control_variates",
    "draw_seed",
    "evaluate",
    "mode_of",
    "outputs",
    "predictions",
    "proximal",
    "reader",
    "within",
]

Tensors = list[Tensor] | tuple[Tensor, ...]
"""One tensor for each trainable parameter, in the order of ``model.parameters()``."""

Correction = Callable[[Tensors, Tensors], Tensors]
"""Maps the trainable parameters and their gradients to the gradients to step along; changes neither in place."""

Bound = Callable[[Tensors], None]
"""Moves the trainable parameters, in place, to where they may be."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Maps a normalised batch ``(n, c, h, w)`` to an augmented one; draws from the generator and from nothing else."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits ``(n, classes)`` and labels to the scalar to minimise."""

Norms = Literal["batch", "frozen-after-first"]
"""Statistics that batch norms train with: each batch's own throughout, or from the second epoch on the running ones,
which then no longer change (eval mode)."""

_KEPT_BYTES = 256 * 2**20
"""Inputs up to this size are normalised once per fit, larger ones batch by batch."""


@dataclass(frozen=True)
class Taught:
    """Images, or rows of features, with numbers for every class in place of labels.

    Attributes:
        images: what is judged; own labels are not looked at.
        labels: ``(n, classes)``, in the meaning that the loss gives them.
    """

    images: Examples
    labels: Float[Tensor, "n classes"]

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """What the model sees."""
        return self.images.inputs(index)


class Diverged(ValueError):
    """Training left weights that are not finite."""


def is_finite(model: nn.Module) -> bool:
    """Whether all of the model's parameters and buffers are."""
    return all(torch.isfinite(t).all() for t in chain(model.parameters(), model.buffers()))


def lower_rate(lr: float) -> str:
    """What to do about `Diverged`, with an example."""
    return f"use a smaller learning rate, for example {min(lr / 10, 0.1):g}"


class SGD(Settings):
    """Stochastic gradient descent on mini-batches: shuffled anew each epoch, the last partial batch kept."""

    lr: PositiveFloat = 0.01
    """Learning rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Heavy-ball momentum in [0, 1): buffer = momentum * buffer + gradient, from 0 in each fit."""
    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the weights added to their gradients."""
    batch_size: PositiveInt = 64
    """Records per step."""
    epochs: PositiveInt = 1
    """Passes over the records."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps even if epochs are left; no limit by default."""
    milestones: tuple[PositiveInt, ...] = ()
    """After each of these epochs (the first is 1) the learning rate is multiplied by decay and momentum starts at 0."""
    decay: PositiveFloat = 0.1
    """Factor of the learning rate at a milestone."""

    def fit(
        self,
        model: nn.Module,
        records: Examples,
        rng: torch.Generator,
        *,
        correct: Correction | None = None,
        bound: Bound | None = None,
        augment: Augment | None = None,
        loss: Loss = cross_entropy,
        on_epoch: Callable[[int, int], None] | None = None,
        keep: Epochs | None = None,
        norms: Norms = "batch",
    ) -> int:
        """Train ``model`` in place on ``records``.

        The result depends on the arguments only: shuffles, augmentation and dropout draw from ``rng``, and torch's
        global generator is left as it was.

        Args:
            model: trained in train mode on its own device; every module gets its mode back afterwards.
            records: what to train on; without any, no step is taken.
            rng: stream of the dropout seed, of the shuffles and of ``augment``, in this order.
            correct: changes the gradients before weight decay and momentum, e.g. ``proximal``.
            bound: called after each step, e.g. ``within``.
            augment: applied to each batch of normalised inputs.
            loss: averages over a batch.
            on_epoch: called after each epoch with the number of epochs done and the number of all.
            keep: keeps all that lasts, so that a killed run goes on behind the last epoch: `Federation.epochs`.
            norms: statistics of the batch norms. Only these modules are put in eval mode, dropout is not.

        Returns:
            Number of steps taken, those before a resumption included.

        Raises:
            Diverged: if parameters or buffers are not finite at the end.
            ValueError: if the model has nothing to train.
        """
        weights: Tensors = [p for p in model.parameters() if p.requires_grad]
        if not weights:
            raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
        device = weights[0].device
        labels = records.labels.to(device)
        inputs = reader(records, device)
        steps = 0
        buffers = [torch.zeros_like(w) for w in weights]
        lasting = {str(i): buffer for i, buffer in enumerate(buffers)}
        with mode_of(model, training=True), isolated(draw_seed(rng)):
            for epoch in epochs(self.epochs, keep, rng, device, model, lasting):
                if norms == "frozen-after-first" and epoch > 1:
                    _freeze_norms(model)
                lr = self._rate(epoch)
                steps = (epoch - 1) * math.ceil(len(labels) / self.batch_size)
                steps = steps if self.max_steps is None else min(steps, self.max_steps)
                order = torch.randperm(len(labels), generator=rng, device=rng.device).to(device)
                for start in range(0, len(order), self.batch_size):
                    if steps == self.max_steps:
                        break
                    batch = order[start : start + self.batch_size]
                    x = inputs(batch) if augment is None else augment(inputs(batch), rng)
                    value = loss(model(x), labels[batch])
                    gradients: Tensors = torch.autograd.grad(value, weights, materialize_grads=True)
                    with torch.no_grad():
                        self._step(weights, gradients if correct is None else correct(weights, gradients), buffers, lr)
                        if bound is not None:
                            bound(weights)
                    steps += 1
                if on_epoch is not None:
                    on_epoch(epoch, self.epochs)
                if epoch in self.milestones:
                    torch._foreach_zero_(buffers)
        if not is_finite(model):
            raise Diverged(
                f"training with lr={self.lr:g} left weights that are not finite after {steps} steps; "
                f"{lower_rate(self.lr)}"
            )
        return steps

    def _rate(self, epoch: int) -> float:
        lr = self.lr
        for _ in filter(epoch.__gt__, set(self.milestones)):
            lr *= self.decay
        return lr

    def _step(self, weights: Tensors, gradients: Tensors, buffers: Tensors, lr: float) -> None:
        # torch.optim.SGD's arithmetic in its order, hence its bits; its own step takes twice as long on a small model.
        if self.weight_decay:
            gradients = torch._foreach_add(gradients, weights, alpha=self.weight_decay)
        if self.momentum:
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, gradients)
            gradients = buffers
        torch._foreach_add_(weights, gradients, alpha=-lr)


def _freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def proximal(model: nn.Module, mu: float) -> Correction:
    """FedProx's pull towards x, the weights ``model`` has now: adds ``mu * (y - x)`` to the gradient at y.

    That is the gradient of the loss term ``mu / 2 * |y - x|^2`` over the trainable parameters (Li et al. 2020,
    arXiv:1812.06127, eq. 2).

    Raises:
        ValueError: if ``mu`` is negative or not finite.
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise ValueError(f"mu={mu} is no weight for the proximal term; it must be a finite number of 0 or more")
    x: Tensors = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def correct(weights: Tensors, gradients: Tensors) -> Tensors:
        return torch._foreach_add(gradients, torch._foreach_sub(weights, x), alpha=mu)

    return correct


def within(model: nn.Module, radius: float) -> Bound:
    """Keeps the trainable parameters in the ball of ``radius`` around what they are now: the nearest point of it.

    Raises:
        ValueError: if ``radius`` is not a positive number.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"the radius of a ball is {radius}; it must be a positive number")
    centre: Tensors = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def bound(weights: Tensors) -> None:
        moved = torch._foreach_sub(weights, centre)
        length = torch.stack(torch._foreach_norm(moved)).norm()
        torch._foreach_copy_(
            weights, torch._foreach_add(centre, torch._foreach_mul(moved, (radius / length).clamp(max=1)))
        )

    return bound


def control_variates(server: Tensors, client: Tensors) -> Correction:
    """SCAFFOLD's drift correction: ``g - c_i + c`` in place of g (Karimireddy et al. 2020, arXiv:1910.06378, eq. 3).

    Args:
        server: c, one tensor for each trainable parameter in the order of ``model.parameters()``.
        client: c_i, likewise.

    Raises:
        ValueError: if the two differ in number or shapes.
    """
    if [c.shape for c in server] != [c_i.shape for c_i in client]:
        raise ValueError("the control variates of server and client differ in shape; both need one per parameter")
    drift: Tensors = [c - c_i for c, c_i in zip(server, client, strict=True)]

    def correct(weights: Tensors, gradients: Tensors) -> Tensors:
        return torch._foreach_add(gradients, drift)

    return correct


def predictions(model: nn.Module, records: Examples, batch_size: int = 256) -> Int64[Tensor, " n"]:
    """The class with the largest logit (the first of equals) for each record, in order; on the model's device.

    The model predicts in eval mode without gradients; every module gets its mode back afterwards.
    """
    found = outputs(model, records, batch_size, of=lambda x: model(x).argmax(1))
    return torch.cat(found) if found else records.labels.new_empty(0, dtype=torch.int64)


def outputs(
    model: nn.Module, records: Examples, batch_size: int = 256, *, of: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """What ``of`` gives for each batch of inputs, in order; by default the model's logits.

    The model is in eval mode meanwhile, without gradients; every module gets its mode back afterwards.
    """
    device = next((t.device for t in chain(model.parameters(), model.buffers())), records.labels.device)
    call = model if of is None else of
    with mode_of(model, training=False), torch.no_grad():
        return [
            call(records.inputs(slice(start, start + batch_size)).to(device))
            for start in range(0, len(records.labels), batch_size)
        ]


def evaluate(model: nn.Module, records: Examples, batch_size: int = 256) -> float:
    """Accuracy in [0, 1]: the share of records whose largest logit is that of their label.

    Raises:
        ValueError: if there are no records.
    """
    return _shares_right(predictions(model, records, batch_size)[:, None], records)[0]


def accuracies(together: nn.Module, records: Examples, batch_size: int = 256) -> list[float]:
    """`evaluate` of ``k`` networks in one pass; ``together`` gives all their logits, ``(n, k, classes)``."""
    found = outputs(together, records, batch_size, of=lambda x: together(x).argmax(2))
    return _shares_right(torch.cat(found) if found else records.labels[:, None], records)


def _shares_right(predicted: Int64[Tensor, "n k"], records: Examples) -> list[float]:
    if len(records.labels) == 0:
        raise ValueError("there are 0 records to evaluate on; accuracy needs at least 1")
    right = predicted == records.labels.to(predicted.device)[:, None]
    shares: list[float] = right.double().mean(0).tolist()
    return shares


def confusion(model: nn.Module, records: Records, batch_size: int = 256) -> Int64[Tensor, "classes classes"]:
    """How many records of each class (row) are taken for each class (column), ``(num_classes, num_classes)``."""
    predicted = predictions(model, records, batch_size)
    cells = records.labels.to(predicted.device) * records.num_classes + predicted
    return torch.bincount(cells, minlength=records.num_classes**2).view(records.num_classes, records.num_classes)


def reader(records: Examples, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Normalised inputs on ``device`` by position."""
    labels = records.labels
    if records.inputs(slice(0, 1)).nbytes * len(labels) > _KEPT_BYTES:
        return lambda batch: records.inputs(batch.to(labels.device)).to(device)
    kept = records.inputs().to(device)
    return lambda batch: kept.index_select(0, batch)


def draw_seed(rng: torch.Generator) -> int:
    """A seed for another stream, the next value of ``rng``."""
    return int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))


@contextmanager
def mode_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode inside the block, each module's own mode after it."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode

"""The training loop of SGD and Adam: epochs of shuffled mini-batches, from one random stream, with checkpoints."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.errors import FedstillError
from fedstill.evaluate import mode_of
from fedstill.records import Trainable
from fedstill.seeds import draw_seed, isolated
from fedstill.ticks import tick
from fedstill.train.epochs import Epochs, epochs

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Map of a normalised batch ``(n, c, h, w)`` to an augmented one; it draws from the generator only."""

Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""Map of the model's output (logits ``(n, classes)`` for most models), its inputs and the labels to a scalar loss."""

Norms = Literal["batch", "frozen-after-first"]
"""Statistics of batch norms in training: always those of the batch, or from the second epoch on the running ones, which
then no longer change (eval mode)."""

_CACHED_BYTES = 256 * 2**20
"""Largest size of inputs that are normalised once a fit; larger ones are normalised batch by batch."""


class Diverged(FedstillError, ValueError):
    """Training left weights that are not finite."""


def cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of logits and classes ``(n,)`` or probabilities ``(n, classes)``; a `Loss`."""
    return functional.cross_entropy(output, y)


def trainable(model: nn.Module) -> list[Tensor]:
    """The model's trainable parameters, in the order of ``model.parameters()``; a ValueError if there are none."""
    weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
    return weights


def run_epochs(
    model: nn.Module,
    records: Trainable,
    rng: torch.Generator,
    update: Callable[[Tensor, int], None],
    tensors: dict[str, Tensor],
    *,
    lr: float,
    batch_size: int,
    number: int,
    max_steps: int | None = None,
    augment: Augment | None = None,
    loss: Loss = cross_entropy,
    on_epoch: Callable[[int, int], None] | None = None,
    checkpoint: Epochs | None = None,
    norms: Norms = "batch",
) -> int:
    """Train ``model`` in place for ``number`` epochs; `fedstill.train.sgd.SGD.fit` documents arguments and result.

    Batch norms have no statistics of one record: a last batch of one joins the batch before, and the norms of a model
    that is trained on a single record take their running statistics.

    ``update(loss, epoch)`` changes the weights after each batch. ``tensors`` are the optimiser's live state by name.
    """
    device = trainable(model)[0].device
    inputs, labels = _reader(records, device), records.labels.to(device)
    steps, sizes = 0, _batch_sizes(len(labels), batch_size, model)
    with mode_of(model, training=True), isolated(draw_seed(rng)):
        for epoch in epochs(number, checkpoint, rng, device, model, tensors):
            if norms == "frozen-after-first" and epoch > 1 or len(labels) == 1:
                _freeze_norms(model)
            steps = (epoch - 1) * len(sizes)
            steps = steps if max_steps is None else min(steps, max_steps)
            order = torch.randperm(len(labels), generator=rng, device=rng.device).to(device)
            for batch in torch.split(order, sizes):
                if steps == max_steps:
                    break
                x = inputs(batch) if augment is None else augment(inputs(batch), rng)
                update(loss(model(x), x, labels[batch]), epoch)
                steps += 1
            tick("training", epoch, number)
            if on_epoch is not None:
                on_epoch(epoch, number)
    if not is_finite(model):
        raise Diverged(
            f"training with lr={lr:g} left weights that are not finite after {steps} steps; {lower_rate(lr)}"
        )
    return steps


def _batch_sizes(count: int, batch_size: int, model: nn.Module) -> list[int]:
    """Sizes of an epoch's batches; with batch norms, a last record that would be alone joins the batch before."""
    whole, rest = divmod(count, batch_size)
    if rest == 1 and whole and has_batch_norms(model):
        return [batch_size] * (whole - 1) + [batch_size + 1]
    return [batch_size] * whole + [rest] * (rest > 0)


def has_batch_norms(model: nn.Module) -> bool:
    """Whether the model has a batch norm, in any number of dimensions."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters and buffers of the model are finite."""
    return all(torch.isfinite(t).all() for t in chain(model.parameters(), model.buffers()))


def lower_rate(lr: float) -> str:
    """The remedy for `Diverged`, with an example."""
    return f"use a smaller learning rate, for example {min(lr / 10, 0.1):g}"


def _reader(records: Trainable, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function of positions that gives normalised inputs on ``device``."""
    labels = records.labels
    if records.inputs(slice(0, 1)).nbytes * len(labels) > _CACHED_BYTES:
        return lambda batch: records.inputs(batch.to(labels.device)).to(device)
    cached = records.inputs().to(device)
    return lambda batch: cached.index_select(0, batch)

"""Mini-batch SGD for clients and servers, with corrections of its gradients and a constraint on its weights."""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill.records import Trainable
from fedstill.settings import Rate, Settings
from fedstill.train.epochs import Epochs
from fedstill.train.loop import Augment, Loss, Norms, cross_entropy, run_epochs, trainable

Tensors = list[Tensor] | tuple[Tensor, ...]
"""A tensor for each trainable parameter, in the order of ``model.parameters()``."""

Correction = Callable[[Tensors, Tensors], Tensors]
"""Map of the trainable parameters and their gradients to the gradients of the step; it changes neither in place."""

Bound = Callable[[Tensors], None]
"""Projection of the trainable parameters, in place, to an allowed region."""


class SGD(Settings):
    """Stochastic gradient descent on mini-batches: shuffled anew each epoch, the last partial batch kept."""

    lr: Rate = 0.01
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
    """Maximum number of steps; no limit by default."""
    milestones: tuple[PositiveInt, ...] = ()
    """Epochs (the first is 1) after which the learning rate is multiplied by decay and momentum starts at 0 again."""
    decay: PositiveFloat = 0.1
    """Factor of the learning rate at a milestone."""

    def fit(
        self,
        model: nn.Module,
        records: Trainable,
        rng: torch.Generator,
        *,
        correct: Correction | None = None,
        bound: Bound | None = None,
        augment: Augment | None = None,
        loss: Loss = cross_entropy,
        on_epoch: Callable[[int, int], None] | None = None,
        checkpoint: Epochs | None = None,
        norms: Norms = "batch",
    ) -> int:
        """Train ``model`` in place on ``records``.

        The result depends on the arguments only: shuffles, augmentation and dropout draw from ``rng``, and torch's
        global generator does not change.

        Args:
            model: trained in train mode on its own device; afterwards every module has its former mode.
            records: the training set; without records, no step is taken.
            rng: stream of the dropout seed, the shuffles and ``augment``, in this order.
            correct: changes the gradients before weight decay and momentum, e.g. ``proximal``.
            bound: called after each step, e.g. ``ball_constraint``.
            augment: applied to each batch of normalised inputs.
            loss: a mean over a batch, of the model's output, the augmented inputs and the labels.
            on_epoch: called after each epoch with the numbers of epochs done and of all epochs.
            checkpoint: saves model, momentum and random state, so that an interrupted run resumes after its last
                epoch: `Federation.epochs`.
            norms: statistics of the batch norms.

        Returns:
            Number of steps, including those before a resumption.

        Raises:
            Diverged: parameters or buffers are not finite at the end.
            ValueError: the model has no trainable parameters.
        """
        weights = trainable(model)
        buffers = [torch.zeros_like(w) for w in weights]
        rates = [self._rate(epoch) for epoch in range(1, self.epochs + 1)]

        def update(value: Tensor, epoch: int) -> None:
            gradients: Tensors = torch.autograd.grad(value, weights, materialize_grads=True)
            with torch.no_grad():
                gradients = gradients if correct is None else correct(weights, gradients)
                self._step(weights, gradients, buffers, rates[epoch - 1])
                if bound is not None:
                    bound(weights)

        def end_epoch(epoch: int, total: int) -> None:
            if on_epoch is not None:
                on_epoch(epoch, total)
            if epoch in self.milestones:
                torch._foreach_zero_(buffers)

        return run_epochs(
            model,
            records,
            rng,
            update,
            {str(i): buffer for i, buffer in enumerate(buffers)},
            lr=self.lr,
            batch_size=self.batch_size,
            number=self.epochs,
            max_steps=self.max_steps,
            augment=augment,
            loss=loss,
            on_epoch=end_epoch,
            checkpoint=checkpoint,
            norms=norms,
        )

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


def proximal(model: nn.Module, mu: float) -> Correction:
    """FedProx's proximal term: adds ``mu * (y - x)`` to the gradient at y; x are the current weights of ``model``.

    That is the gradient of the loss term ``mu / 2 * |y - x|^2`` (Li et al. 2020, arXiv:1812.06127, eq. 2).

    Raises:
        ValueError: ``mu`` is negative or not finite.
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise ValueError(f"mu={mu} can't weigh the proximal term; give a finite number of at least 0")
    x: Tensors = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def correct(weights: Tensors, gradients: Tensors) -> Tensors:
        return torch._foreach_add(gradients, torch._foreach_sub(weights, x), alpha=mu)

    return correct


def ball_constraint(model: nn.Module, radius: float) -> Bound:
    """Projection of the trainable parameters to the ball of ``radius`` around their current values.

    Raises:
        ValueError: ``radius`` is not a positive number.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"the radius of a ball is {radius}; give a positive number")
    centre: Tensors = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def bound(weights: Tensors) -> None:
        change = torch._foreach_sub(weights, centre)
        factor = (radius / torch.stack(torch._foreach_norm(change)).norm()).clamp(max=1)
        torch._foreach_copy_(weights, torch._foreach_add(centre, torch._foreach_mul(change, factor)))

    return bound


def control_variates(server: Tensors, client: Tensors) -> Correction:
    """SCAFFOLD's drift correction: ``g - c_i + c`` in place of g (Karimireddy et al. 2020, arXiv:1910.06378, eq. 3).

    ``server`` is c and ``client`` c_i.

    Raises:
        ValueError: the two differ in number or shapes.
    """
    if [c.shape for c in server] != [c_i.shape for c_i in client]:
        raise ValueError("the control variates of server and client differ in shape; give both one for each parameter")
    drift: Tensors = [c - c_i for c, c_i in zip(server, client, strict=True)]

    def correct(weights: Tensors, gradients: Tensors) -> Tensors:
        return torch._foreach_add(gradients, drift)

    return correct

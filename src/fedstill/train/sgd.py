"""SGD and Adam on records: one loop, with epochs that an interrupted run resumes."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.base.errors import Diverged
from fedstill.base.records import Trainable, answers
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Rate, Settings
from fedstill.base.weights import load
from fedstill.evaluation import mode_of
from fedstill.ticks import tick

FEWEST_STEPS = 10
"""Steps that as many passes as are needed take where no number of passes is set."""


def passes_of(records: int, batch_size: int) -> int:
    """The least number of passes over so many records, at least one, that take `FEWEST_STEPS` steps."""
    return -(-FEWEST_STEPS // max(1, -(-records // batch_size)))


Epochs = Callable[..., Iterator[int]]
"""Numbers of the remaining epochs, with checkpoints of models and tensors: `Federation.epochs`."""


def epochs(
    number: int,
    checkpoint: Epochs | None,
    rng: torch.Generator,
    device: torch.device,
    *tensors: nn.Module | dict[str, Tensor],
) -> Iterator[int]:
    """Epochs 1 to ``number``, or the remaining ones; a resumed training draws the same random numbers.

    Args:
        number: number of all epochs.
        checkpoint: saves ``tensors`` and the states of the random streams; None saves nothing.
        rng: the training's own stream.
        device: the training's device, whose global generator dropout draws from.
        *tensors: everything else that an epoch hands to the next.
    """
    if checkpoint is None:
        yield from range(1, number + 1)
        return
    streams = _streams(rng, device)
    for i, epoch in enumerate(checkpoint(number, *tensors, streams)):
        if i == 0:
            _restore(streams, rng, device)
        yield epoch
        load(streams, _streams(rng, device))


def _streams(rng: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    states = {"rng": rng.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore(streams: dict[str, Tensor], rng: torch.Generator, device: torch.device) -> None:
    rng.set_state(streams["rng"])
    torch.set_rng_state(streams["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(streams["cuda"], device)


Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Map of a normalised batch ``(n, c, h, w)`` to an augmented one; it draws from the generator only."""

Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""Map of the model's output (logits ``(n, classes)`` for most models), its inputs and the labels to a scalar loss."""

Norms = Literal["batch", "frozen-after-first"]
"""Statistics of batch norms in training: always those of the batch, or from the second epoch on the running ones, which
then no longer change (eval mode)."""

_CACHED_BYTES = 256 * 2**20
"""Largest size of inputs that are normalised once a fit; larger ones are normalised batch by batch."""


def cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of logits and classes ``(n,)`` or probabilities ``(n, classes)``; a `Loss`."""
    return functional.cross_entropy(output, y)


def usual_loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of one output and numbers ``(n,)``; `cross_entropy` for all others; a `Loss`."""
    if y.is_floating_point() and y.ndim == 1:
        return functional.mse_loss(output[:, 0], y.to(output.dtype))
    return cross_entropy(output, x, y)


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
    loss: Loss = usual_loss,
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
    inputs, labels = _reader(records, device), answers(records).to(device)
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
    epochs: PositiveInt | None = 1
    """Passes over the records; None for as many as make ten steps, and at least one."""
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
        loss: Loss = usual_loss,
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
        weights, number = trainable(model), self.passes(len(answers(records)))
        buffers = [torch.zeros_like(w) for w in weights]
        rates = [self._rate(epoch) for epoch in range(1, number + 1)]

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
            number=number,
            max_steps=self.max_steps,
            augment=augment,
            loss=loss,
            on_epoch=end_epoch,
            checkpoint=checkpoint,
            norms=norms,
        )

    def passes(self, records: int) -> int:
        """Number of passes over so many records."""
        return self.epochs or passes_of(records, self.batch_size)

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


class Adam(Settings):
    """Adam (Kingma, Ba 2015, arXiv:1412.6980) on mini-batches: shuffled anew each epoch, the last partial one kept."""

    lr: Rate = 1e-3
    """Learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the weights added to their gradients."""
    batch_size: PositiveInt = 32
    """Records per step."""
    epochs: PositiveInt = 1
    """Passes over the records."""

    def fit(
        self,
        model: nn.Module,
        records: Trainable,
        rng: torch.Generator,
        *,
        loss: Loss = usual_loss,
        on_epoch: Callable[[int, int], None] | None = None,
        checkpoint: Epochs | None = None,
    ) -> None:
        """Train ``model`` in place on ``records``; the arguments are those of `fedstill.train.sgd.SGD.fit`.

        Raises:
            Diverged: parameters or buffers are not finite at the end.
            ValueError: the model has nothing to train.
        """
        adam = adam_of(trainable(model), self.lr, weight_decay=self.weight_decay)

        def update(value: Tensor, _: int) -> None:
            adam.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            adam.step()

        run_epochs(
            model,
            records,
            rng,
            update,
            moments(adam),
            lr=self.lr,
            batch_size=self.batch_size,
            number=self.epochs,
            loss=loss,
            on_epoch=on_epoch,
            checkpoint=checkpoint,
        )
        adam.zero_grad()


def adam_of(weights: Iterable[Tensor], lr: float, *, beta1: float = 0.9, weight_decay: float = 0.0) -> torch.optim.Adam:
    """An Adam whose moments exist from the start, for checkpoints; beta_2 is 0.999."""
    adam = torch.optim.Adam(list(weights), lr=lr, betas=(beta1, 0.999), weight_decay=weight_decay)
    for weight in adam.param_groups[0]["params"]:
        means = {name: torch.zeros_like(weight, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.zeros(()), **means}
    return adam


def moments(adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Live tensors of the state of an `adam_of` by name; writing into them changes Adam."""
    weights = adam.param_groups[0]["params"]
    return {f"{i}.{name}": value for i, weight in enumerate(weights) for name, value in adam.state[weight].items()}

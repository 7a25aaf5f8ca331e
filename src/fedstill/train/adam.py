"""Training by Adam, for FedAUX's clients and for distillation."""

from collections.abc import Callable, Iterable

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedstill.records import Trainable
from fedstill.settings import Rate, Settings
from fedstill.train.epochs import Epochs
from fedstill.train.loop import Loss, cross_entropy, run_epochs, trainable


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
        loss: Loss = cross_entropy,
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

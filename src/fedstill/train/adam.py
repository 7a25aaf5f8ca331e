"""Training by Adam: local training of FedAUX, and distillation."""

from collections.abc import Callable, Iterable

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.evaluate import mode_of
from fedstill.records import Examples
from fedstill.seeds import isolated
from fedstill.settings import Settings
from fedstill.train.epochs import Epochs, epochs
from fedstill.train.sgd import Diverged, Loss, draw_seed, is_finite, lower_rate, reader


class Adam(Settings):
    """Adam (Kingma, Ba 2015, arXiv:1412.6980) on mini-batches: shuffled anew each epoch, the last partial one kept."""

    lr: PositiveFloat = 1e-3
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
        records: Examples,
        rng: torch.Generator,
        *,
        loss: Loss = cross_entropy,
        on_epoch: Callable[[int, int], None] | None = None,
        keep: Epochs | None = None,
    ) -> None:
        """Train ``model`` in place on ``records``; the arguments are those of `fedstill.train.sgd.SGD.fit`.

        Raises:
            Diverged: parameters or buffers are not finite at the end.
            ValueError: the model has nothing to train.
        """
        weights = [p for p in model.parameters() if p.requires_grad]
        if not weights:
            raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
        device = weights[0].device
        inputs, labels = reader(records, device), records.labels.to(device)
        adam = adam_of(weights, self.lr, weight_decay=self.weight_decay)
        with mode_of(model, training=True), isolated(draw_seed(rng)):
            for epoch in epochs(self.epochs, keep, rng, device, model, moments(adam)):
                order = torch.randperm(len(labels), generator=rng, device=rng.device).to(device)
                for start in range(0, len(order), self.batch_size):
                    batch = order[start : start + self.batch_size]
                    adam.zero_grad()
                    loss(model(inputs(batch)), labels[batch]).backward()  # type: ignore[no-untyped-call]
                    adam.step()
                if on_epoch is not None:
                    on_epoch(epoch, self.epochs)
        adam.zero_grad()
        if not is_finite(model):
            raise Diverged(f"training with lr={self.lr:g} left weights that are not finite; {lower_rate(self.lr)}")


def adam_of(weights: Iterable[Tensor], lr: float, *, beta1: float = 0.9, weight_decay: float = 0.0) -> torch.optim.Adam:
    """Adam with its moments in place from the start, so that a checkpoint finds them; beta_2 is 0.999."""
    adam = torch.optim.Adam(list(weights), lr=lr, betas=(beta1, 0.999), weight_decay=weight_decay)
    for weight in adam.param_groups[0]["params"]:
        means = {name: torch.zeros_like(weight, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.zeros(()), **means}
    return adam


def moments(adam: torch.optim.Adam) -> dict[str, Tensor]:
    """The live tensors of `adam_of`'s state by name: writing into them changes it."""
    weights = adam.param_groups[0]["params"]
    return {f"{i}.{name}": value for i, weight in enumerate(weights) for name, value in adam.state[weight].items()}

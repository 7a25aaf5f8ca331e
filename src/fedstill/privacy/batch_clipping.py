"""DP-SGD as some papers print it, with the gradient of the whole batch clipped; for comparison, without a guarantee."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from fedstill.privacy.dp_sgd import DPSGD
from fedstill.privacy.events import Event, Unbounded
from fedstill.privacy.mechanisms import Mechanism
from fedstill.records import Trainable
from fedstill.seeds import Noise

UNBOUNDED = Unbounded(
    reason="the batch's gradient is clipped, not each record's, so one record may turn it round; the noise is for a "
    "B-th of that"
)
"""The cost of `BatchClippedSGD`."""


@dataclass(frozen=True, eq=False)
class BatchClippedSGD(Mechanism[Trainable, dict[str, Tensor]]):
    """``w <- w - lr (min(1, c / |g|) g + N(0, sigma^2 c^2) / B)``, g the mean gradient of a shuffled batch of B.

    One record may reverse g, so the sensitivity is 2c, and the noise is 2B / sigma times smaller than that.

    Attributes:
        settings: all hyperparameters; ``sampling`` is ignored.
    """

    settings: DPSGD

    @property
    @override
    def event(self) -> Event:
        return UNBOUNDED

    @property
    @override
    def theorem(self) -> str:
        return "none"

    def __call__(self, rows: Trainable, noise: Noise) -> dict[str, Tensor]:
        """The trainable parameters by name, after ``settings.steps`` steps."""
        s = self.settings
        model = copy.deepcopy(s.model).train()
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        size = min(int(s.batch_size), len(rows.labels))
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(s.steps if size else 0):
            if len(order) < size:
                order = noise.uniform((len(rows.labels),)).argsort()
            batch, order = order[:size].to(rows.labels.device), order[size:]
            device = next(iter(weights.values())).device
            x, y = rows.inputs(batch).to(device), rows.labels[batch].to(device)
            gradient = torch.autograd.grad(s.loss(model(x), x, y).mean(), list(weights.values()))
            length = float(torch.sqrt(sum((g.double().square().sum() for g in gradient), torch.zeros(()))))
            for w, g in zip(weights.values(), gradient, strict=True):
                drawn = noise.gaussian(g.shape).to(device) * (s.noise_multiplier * s.clip / s.batch_size)
                w.data.copy_(w.data.double() - s.lr * (g.double() * min(1.0, s.clip / max(length, 1e-30)) + drawn))
        return {name: w.detach() for name, w in weights.items()}

"""DP-SGD as one release, and the published form that clips a batch's mean.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang 2016 (CCS, arXiv:1607.00133), algorithm 1, with the Poisson
sampling that its theorem needs: each record enters a step's batch independently, with the same probability.

``docs/proofs.md`` has the proof beside those of the other mechanisms.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill.base.records import Trainable
from fedstill.base.seeds import Noise, isolated
from fedstill.privacy.mechanisms import Mechanism, check_noise, check_positive, gaussian_event
from fedstill.privacy.per_record import ClippedGradients, PerRecordLoss, check_alone
from fedstill.privacy.releases import Event, Unbounded

_LOADED = 1024
"""Number of records whose inputs are in memory at a time."""


def per_record_cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of logits ``(n, classes)`` and classes ``(n,)`` for each record; a `PerRecordLoss`."""
    losses: Tensor = cross_entropy(output, y, reduction="none")
    return losses


@dataclass(frozen=True, kw_only=True, eq=False)
class DPSGD(Mechanism[Trainable, dict[str, Tensor]]):
    """``steps`` times ``w <- w - lr / B (sum of clipped gradients + N(0, (noise_multiplier clip)^2))``.

    Formal guarantees:

    * One record adds a gradient of length at most ``clip`` to each step's sum, with probability ``sampling``.
    * Neither the divisor nor the sampling rate depends on the number of records.
    * No error depends on the records: a gradient that is not finite counts as 0, so weights stay finite. A learning
      rate that is too large shows as poor accuracy.

    Attributes:
        model: initial model, public or released before; not changed. It must treat each record of a batch separately.
        lr: learning rate.
        clip: largest length of one record's gradient, over all trainable parameters. Positive, public.
        noise_multiplier: standard deviation of the noise on a sum divided by ``clip``.
        sampling: probability that a record is in a step's batch, in (0, 1]. Public.
        steps: number of steps.
        batch_size: B, the divisor. Public: the expected batch size for a public or assumed number of records.
        loss: see `PerRecordLoss`.
    """

    theorems = (
        "one record adds to each of {0.steps} sums, with probability {0.sampling:g}, a gradient of length at most "
        "{0.clip:g}, the sensitivity; Gaussian mechanism on Poisson samples, composed (Abadi et al. 2016; Mironov, "
        "Talwar, Zhang 2019)",
    )

    model: nn.Module
    lr: float
    clip: float
    noise_multiplier: float
    sampling: float
    steps: int
    batch_size: float
    loss: PerRecordLoss = per_record_cross_entropy

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        for name in ("lr", "clip", "batch_size", "sampling", "steps"):
            check_positive(name, getattr(self, name))
        if self.sampling > 1 or self.steps != int(self.steps):
            raise ValueError(
                f"sampling is {self.sampling} and steps is {self.steps}; they must be a probability in (0, 1] and a "
                "whole number from 1"
            )
        check_alone(self._copy())

    @property
    @override
    def event(self) -> Event:
        return gaussian_event(self.noise_multiplier, self.sampling, self.steps)

    def __call__(self, rows: Trainable, noise: Noise) -> dict[str, Tensor]:
        """The trainable parameters by name after training, in train mode."""
        model = self._copy()
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = ClippedGradients(model)
        with isolated(int(noise.uniform((1,)) * 2**53)):  # dropout's randomness
            for _ in range(self.steps):
                sums = self._noised(gradients, rows, noise)
                for w, total in zip(weights.values(), sums, strict=True):
                    w.data.add_(total, alpha=-self.lr / self.batch_size)  # w <- w - lr / B (sum + noise)
        return {name: w.detach() for name, w in weights.items()}

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self.model).train()

    def _noised(self, gradients: ClippedGradients, rows: Trainable, noise: Noise) -> list[Tensor]:
        """One step's release: the sum over a Poisson sample of clipped gradients, with noise, in float64."""
        batch = (noise.uniform((len(rows.labels),)) < self.sampling).nonzero()[:, 0].to(rows.labels.device)
        sums = [torch.zeros(shape, dtype=torch.float64, device=gradients.device) for shape in gradients.shapes]
        for some in torch.split(batch, _LOADED):
            x, y = rows.inputs(some).to(gradients.device), rows.labels[some].to(gradients.device)
            for total, part in zip(sums, gradients.clipped_sum(x, y, self.clip, self.loss)[0], strict=True):
                total += part
        # one vector for all parameters, as in the theorem
        noised = noise.added(torch.cat([total.flatten() for total in sums]), self.noise_multiplier * self.clip)
        parts = torch.split(noised, [total.numel() for total in sums])
        return [part.view(total.shape) for part, total in zip(parts, sums, strict=True)]


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

    theorems, reasons = ("none",), (UNBOUNDED.reason,)

    settings: DPSGD

    @property
    @override
    def event(self) -> Event:
        return UNBOUNDED

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

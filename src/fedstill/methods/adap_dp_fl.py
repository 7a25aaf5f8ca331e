"""Adap DP-FL: clipping follows each client's last gradient, noise falls while the loss does; a baseline of FedKADP.

Fu, Chen, Han, "Adap DP-FL: differentially private federated learning with adaptive noise", 2022 (arXiv:2211.15893).

Differs from the paper (docs/methods/adap-dp-fl.md has the whole list):

* the length of the last *noisy* gradient is mostly noise; what noise adds to its square is taken off first;
* the loss is that on public records, not on anybody's private ones;
* a privacy filter bounds the sum, since noise follows releases.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from fedstill.methods.dp_fl import DPFL, Trained
from fedstill.protocol import Client, Parameters, step
from fedstill.train.feedback import Course

_LENGTH = "clip"


class AdapDPFL(DPFL):
    """DP-SGD with a clipping length of each client's own and noise that falls."""

    looks: ClassVar[bool] = True
    factor: PositiveFloat = 1.0
    """The next round clips at this times the length of the client's mean gradient (alpha_c)."""
    threshold: Literal["debiased", "published"] = "debiased"
    """That length with the noise's share taken off, or as it comes out, which grows with the noise."""
    least_clip: PositiveFloat = 0.1
    """Clipping length that is not gone below, nor above its inverse: lengths are guesses where noise is strong."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.98
    """Factor of the noise (beta)."""
    patience: PositiveInt = 3
    """After this many rounds in a row in which the loss fell."""
    least_noise: PositiveFloat = 1.0
    """Noise multiplier that is not fallen below."""

    @property
    def adaptive(self) -> bool:
        """See `PrivateRounds.adaptive`."""
        return True

    def adapt(self, course: Course, now: int, controls: dict[str, Tensor]) -> dict[str, float]:
        """``sigma_{t+1} = beta sigma_t`` after three checks in a row at which the public loss had fallen."""
        losses = course["loss"][max(0, now - self.patience) : now + 1]
        if len(losses) > self.patience and bool((losses.diff() < 0).all()):
            noise = float(controls["noise"])
            controls["noise"].fill_(max(self.decay * noise, min(noise, self.least_noise)))
        return {"loss": float(course["loss"][now])}

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Trained:
        """E steps of DP-SGD, clipped at C_k^t; what is released tells C_k^{t+1}."""
        clip = float(client.state[_LENGTH]) if _LENGTH in client.state else self.local.clip
        mechanism = self.local.mechanism(client.new_model(weights), noise, clip=clip)
        released = client.release(mechanism, client.train, adaptive=True)
        client.state[_LENGTH] = torch.tensor(self.next_clip(weights, released.value, noise, clip), dtype=torch.float64)
        return Trained(weights=released)

    def next_clip(self, before: Parameters, after: Parameters, noise: float, clip: float) -> float:
        """``alpha_c |g|``, g the mean of the round's noisy gradients.

        The mean over E steps of noisy gradients is ``(w_before - w_after) / (lr E)``; noise adds ``d sigma^2 C^2 / (B^2
        E)`` to its square on average.
        """
        local = self.local
        moved = sum(
            float((after[name].double() - w.to(after[name].device)).square().sum()) for name, w in before.items()
        )
        square = moved / (local.lr * local.steps) ** 2
        if self.threshold == "debiased":
            count = sum(w.numel() for w in before.values())
            square = max(0.0, square - count * (noise * clip / local.batch_size) ** 2 / local.steps)
        length = self.factor * math.sqrt(square)
        if self.threshold == "published":
            return max(length, 1e-12)
        return min(max(length, self.least_clip), 1 / self.least_clip)

"""Adap DP-FL: the clipping length follows each client's last gradient, noise falls with the loss; FedKADP's baseline.

Fu, Chen, Han, "Adap DP-FL: differentially private federated learning with adaptive noise", 2022 (arXiv:2211.15893).

Differs from the paper (docs/methods/adap-dp-fl.md has the whole list):

* the expected square of the noise is subtracted from that of the last *noisy* gradient, whose length is mostly noise;
* the loss is computed on public records, not on private ones;
* a privacy filter bounds the total cost, since the noise is chosen from earlier releases.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Float64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.methods.averaging import sample, weighted_mean
from fedstill.methods.parts.private_rounds import (
    PrivateRounds,
    TrainedModel,
    claimed,
    end_early,
    finite,
    public_scores,
    schedule,
)
from fedstill.privacy.per_record import check_alone
from fedstill.protocol import Client, Federation, Method, Parameters, load, parameters, step
from fedstill.train.feedback import PublicLoss

_CLIP = "clip"


class AdapDPFL(PrivateRounds, Method):
    """DP-SGD with a clipping length for each client and noise that falls."""

    needs_public: ClassVar[str] = "labelled"
    factor: PositiveFloat = 1.0
    """Clipping length of the next round, as a multiple of the length of the client's mean gradient (alpha_c)."""
    threshold: Literal["debiased", "published"] = "debiased"
    """Length of the mean gradient: without the part that the noise adds, or as published with it."""
    least_clip: PositiveFloat = 0.1
    """Smallest clipping length, and inverse of the largest, since strong noise makes lengths unreliable."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.98
    """Factor by which the noise falls (beta)."""
    patience: PositiveInt = 3
    """Number of rounds in a row in which the loss must fall before the noise falls."""
    least_noise: PositiveFloat = 1.0
    """Smallest noise multiplier."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        check_alone(model)
        public, sigma = PublicLoss(self.rounds), schedule(self.rounds, self.noise_multiplier)
        public.record(0, **public_scores(fed, model, self))
        for round in fed.rounds(self.rounds, model, public.tensors, {"sigma": sigma}):
            t, noise = round.number, float(sigma[round.number - 1])
            event = self.local.event(noise)
            able = fed.able(event, adaptive=True)
            if not able:
                end_early(fed, round, event, noise)
                break
            chosen = sample(fed, self.participation, round, able)
            replies = fed.ask(self.update, to=chosen, weights=parameters(model), noise=noise)
            load(model, weighted_mean((1, reply.weights.value) for reply in replies))
            public.record(t, **public_scores(fed, model, self))
            sigma[t] = self.next_noise(noise, public["loss"][max(0, t - self.patience) : t + 1])
            round.log(
                accuracy=fed.evaluate(model),
                epsilon=fed.spent(),
                claimed=claimed(fed, self, sigma[:t].tolist()),
                **finite(noise=noise, loss=float(public["loss"][t])),
            )
        return model

    def next_noise(self, noise: float, losses: Float64[Tensor, " rounds"]) -> float:
        """``sigma_{t+1} = beta sigma_t`` if the public loss fell in each of the last `patience` rounds."""
        if len(losses) > self.patience and bool((losses.diff() < 0).all()):
            return max(self.decay * noise, min(noise, self.least_noise))
        return noise

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> TrainedModel:
        """Take E steps of DP-SGD, clipped at C_k^t; the released weights determine C_k^{t+1}."""
        clip = float(client.state[_CLIP]) if _CLIP in client.state else self.local.clip
        mechanism = self.local.mechanism(client.new_model(weights), noise, clip=clip)
        released = client.release(mechanism, client.train, adaptive=True)
        client.state[_CLIP] = torch.tensor(self.next_clip(weights, released.value, noise, clip), dtype=torch.float64)
        return TrainedModel(weights=released)

    def next_clip(self, before: Parameters, after: Parameters, noise: float, clip: float) -> float:
        """``alpha_c |g|``, g the mean of the round's noisy gradients: ``(w_before - w_after) / (lr E)`` for E steps.

        The noise adds ``d sigma^2 C^2 / (B^2 E)`` to the square of its length on average.
        """
        local = self.local
        distance = sum(
            float((after[name].double() - w.to(after[name].device)).square().sum()) for name, w in before.items()
        )
        square = distance / (local.lr * local.steps) ** 2
        if self.threshold == "debiased":
            count = sum(w.numel() for w in before.values())
            square = max(0.0, square - count * (noise * clip / local.batch_size) ** 2 / local.steps)
        length = self.factor * math.sqrt(square)
        if self.threshold == "published":
            return max(length, 1e-12)
        return min(max(length, self.least_clip), 1 / self.least_clip)

"""LDP-FedAvg: FedAvg whose clients clip their model updates and add Gaussian noise; what FedGM compares itself with.

Huang et al., "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815, section
4.4, on McMahan et al., AISTATS 2017 (arXiv:1602.05629), Algorithm 1. The paper says "Gaussian differential privacy"
and no more; clipping the whole update is what its references do.

Differs from the paper (docs/methods/ldp-fedavg.md has the whole list):

* ``privacy="sound"`` (the default): noise by the analytic Gaussian mechanism for the sensitivity 2S, shared among the
  rounds. "published" takes the classic formula with sensitivity S; the guarantee printed is what its noise achieves;
* every client counts alike: its number of records would leave unprotected;
* models with BatchNorm are refused: their running statistics would leave unprotected.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.methods.averaging import weighted_mean
from fedstill.privacy.accounting import classic_noise, share_noise
from fedstill.privacy.mechanisms import ROUNDING, GaussianMechanism, check_noise, check_positive, clipped
from fedstill.protocol import Client, Federation, Method, Parameters, Released, Reply, load, parameters, step
from fedstill.seeds import Noise
from fedstill.train.local import SGD, Diverged


@dataclass(frozen=True)
class ClippedUpdate(GaussianMechanism[Float[Tensor, " d"], Float64[Tensor, " d"]]):
    """A vector that depends on all records at once, clipped to length ``radius``, with Gaussian noise.

    Attributes:
        radius: S, the largest length of the vector; a longer one is scaled down. Positive, public.
        noise_multiplier: standard deviation of the noise by the sensitivity.
    """

    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """2S: both ends lie in a ball of radius S, whatever the records. So it holds for any number of them too."""
        return 2 * self.radius * ROUNDING

    @property
    def theorem(self) -> str:
        """See `Mechanism.theorem`."""
        return (
            f"the clipped update has length at most {self.radius:g} whatever the records, so that other records, one "
            f"or all, move it by at most {2 * self.radius:g}, the sensitivity; Gaussian mechanism (Balle, Wang 2018, "
            "theorem 8)"
        )

    def __call__(self, rows: Float[Tensor, " d"], noise: Noise) -> Float64[Tensor, " d"]:
        """``(d,)`` to ``(d,)``; a vector that is not finite counts as 0."""
        return self.noised(clipped(rows[None], self.radius)[0], noise)


class NoisyUpdate(Reply):
    """What a client's training added to the model, clipped and noised."""

    update: Released[Parameters]


class LDPFedAvg(Method):
    """One-shot FedAvg with noise on every client's update."""

    epsilon: PositiveFloat | None = 1.0
    """What all uploads of a client may cost at the run's delta; None adds no noise and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Noise for the true sensitivity, or by the classic formula, which gives less than it claims."""
    rounds: PositiveInt = 1
    """Communication rounds, which share the budget."""
    local: SGD = SGD()
    """A client's training in one round."""
    clip: PositiveFloat = 1.0
    """S, the largest length of an update, over all parameters."""
    server_lr: PositiveFloat = 1.0
    """The server adds the mean update times this."""

    def server(self, fed: Federation) -> nn.Module:
        """The server's loop."""
        model = fed.new_model()  # w_0
        if any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()):
            raise ValueError(
                "ldp-fedavg can't protect BatchNorm's running statistics; take a model without, as convnet"
            )
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(self.update, weights=parameters(model))
            mean = weighted_mean((1, reply.update.value) for reply in replies)
            eta = self.server_lr
            load(model, {name: w + eta * mean[name].to(w.device) for name, w in parameters(model).items()})  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: Parameters) -> NoisyUpdate:
        """ClientUpdate(k, w): E epochs of SGD from the server's model; min(1, S / |d|) d + noise for its change d."""
        model = client.new_model(weights)
        before = {name: w.clone() for name, w in parameters(model).items()}
        with suppress(Diverged):  # counts as no change, so that nobody learns of it
            self.local.fit(model, client.train, client.rng("batches"))
        change = torch.cat([(w.double() - before[name].double()).flatten() for name, w in parameters(model).items()])
        released = client.release(ClippedUpdate(self.clip, self.noise_multiplier(client.delta)), change)
        return NoisyUpdate(update=released.map(lambda vector: _named(vector, before)))

    def noise_multiplier(self, delta: float) -> float:
        """Standard deviation of the noise of one round by 2S."""
        if self.epsilon is None or self.privacy == "sound":
            return share_noise(self.epsilon, delta, 1 / self.rounds)  # 1/s^2 adds up over rounds
        return classic_noise(self.epsilon / self.rounds, delta) / 2  # takes S for the sensitivity, which is 2S


def _named(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``vector`` in the shapes and types of ``like``."""
    parts = torch.split(vector, [w.numel() for w in like.values()])
    return {name: part.view_as(w).to(w.dtype) for part, (name, w) in zip(parts, like.items(), strict=True)}

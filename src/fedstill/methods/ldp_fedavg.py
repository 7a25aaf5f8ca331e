"""LDP-FedAvg: FedAvg whose clients clip their model updates and add Gaussian noise; FedGM's baseline.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
section 4.4, on McMahan et al., AISTATS 2017 (arXiv:1602.05629), Algorithm 1. The paper says only "Gaussian differential
privacy"; its references clip the whole update.

Differs from the paper (docs/methods/ldp-fedavg.md has the whole list):

* ``privacy="sound"`` (the default): noise by the analytic Gaussian mechanism for the sensitivity 2S; the rounds share
  the budget. "published" takes the classic formula with sensitivity S; the printed guarantee is that of its noise;
* clients have equal weights, since their numbers of records would be unprotected;
* models with BatchNorm are refused, since their running statistics would be unprotected, and since whether they can
  be trained depends on the number of a client's records.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.errors import Diverged
from fedstill.methods.averaging import check_any_number, weighted_mean
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.privacy.accounting import published_noise, release_noise
from fedstill.privacy.mechanisms import ClippedUpdate
from fedstill.protocol import Change, Client, Federation, Method, Parameters, Released, Reply, load, parameters, step
from fedstill.train.sgd import SGD


class NoisyUpdate(Reply):
    """The change of the model in a client's training, clipped and noised."""

    update: Released[Change]


class LDPFedAvg(ClassWeighted, Method):
    """One-shot FedAvg with noise on every client's update."""

    numeric: ClassVar[bool] = True
    protects: ClassVar[str] = "client"
    epsilon: PositiveFloat | None = 1.0
    """Budget of all uploads of a client, at the run's delta; None adds no noise and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Noise for the true sensitivity, or by the classic formula, which adds less noise than its claim needs."""
    rounds: PositiveInt = 1
    """Communication rounds, which share the budget."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    clip: PositiveFloat = 1.0
    """S, the largest length of an update, over all parameters."""
    server_lr: PositiveFloat = 1.0
    """Factor of the mean update at the server."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        check_any_number(model, fed.like, "ldp-fedavg")
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(self.update, weights=parameters(model))
            mean = weighted_mean((1, reply.update.value) for reply in replies)
            eta = self.server_lr
            load(model, {name: w + eta * mean[name].to(w.device) for name, w in parameters(model).items()})  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: Parameters) -> NoisyUpdate:
        """Take E epochs of SGD from the server's model; release min(1, S / |d|) d + noise for its change d."""
        model = client.new_model(weights)
        before = {name: w.clone() for name, w in parameters(model).items()}
        with suppress(Diverged):  # counts as no change, so that the server can't tell
            self.local.fit(model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client))
        change = torch.cat([(w.double() - before[name].double()).flatten() for name, w in parameters(model).items()])
        released = client.release(ClippedUpdate(self.clip, self.noise_multiplier(client.delta)), change)
        return NoisyUpdate(update=released.map(lambda vector: _named(vector, before)))

    def noise_multiplier(self, delta: float) -> float:
        """Standard deviation of one round's noise, in multiples of 2S."""
        if self.epsilon is None or self.privacy == "sound":
            return release_noise(self.epsilon, delta, precision_share=1 / self.rounds)
        return published_noise(self.epsilon / self.rounds, delta) / 2  # takes S for the sensitivity, which is 2S


def _named(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``vector`` in the shapes and types of ``like``."""
    parts = torch.split(vector, [w.numel() for w in like.values()])
    return {name: part.view_as(w).to(w.dtype) for part, (name, w) in zip(parts, like.items(), strict=True)}

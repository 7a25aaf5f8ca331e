"""DP-FedAvg: FedAvg whose clients send clipped updates as a sum, with the noise that hides a whole client.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018
(arXiv:1710.06963), Algorithm 1 with flat clipping and equal weights; Kairouz, Liu, Steinke, "The Distributed Discrete
Gaussian Mechanism for Federated Learning with Secure Aggregation", ICML 2021 (arXiv:2102.06387), for the noise.

Differs from the papers (docs/methods/dp-fedavg.md has the whole list):

* all clients take part in every round: the server knows whom it asks, so no sampling is counted;
* neighbours differ in all records of one client, so the sensitivity is 2S, twice that of a client that is left out;
* updates are rounded to whole steps of S after clipping, none of them longer than S, so no rotation and no randomised
  rounding are needed;
* models with BatchNorm are refused, as their running statistics would be unprotected.
"""

from contextlib import suppress
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from jaxtyping import Int64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.errors import Diverged
from fedstill.base.settings import Epsilon
from fedstill.methods.averaging import check_any_number
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import LEAST_STEPS, MOST_STEPS, IntegerUpdate
from fedstill.privacy.sum_ranges import check_length
from fedstill.protocol import Client, Federation, Method, Parameters, Reply, Summed, load, parameters, step
from fedstill.train.sgd import SGD


class Change(Reply):
    """A client's clipped change of the model, in whole steps, with its share of the noise."""

    change: Summed[Int64[Tensor, " parameters"]]


class DPFedAvg(ClassWeighted, Method):
    """FedAvg on sums of clipped updates; the noise hides a client with all of its records."""

    numeric: ClassVar[bool] = True
    protects: ClassVar[str] = "client"
    epsilon: Epsilon = 1.0
    """Privacy cost of all rounds at the run's delta; None adds no noise and guarantees nothing."""
    rounds: PositiveInt = 10
    """Communication rounds, which share the budget."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    clip: PositiveFloat = 1.0
    """S, the largest length of an update, over all parameters."""
    steps: Annotated[int, Ge(LEAST_STEPS), Le(MOST_STEPS)] = 4096
    """Whole steps of S to which an update is rounded."""
    server_lr: PositiveFloat = 1.0
    """Factor of the mean update at the server."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        check_any_number(model, fed.like, "dp-fedavg")
        size = sum(w.numel() for w in parameters(model).values())
        for round in fed.rounds(self.rounds, model):
            summed = fed.sum(self.update, exactly={"parameters": size}, weights=parameters(model))
            whole, number = self._mechanism(fed.delta, summed.adders), len(summed.clients)
            check_length(whole, summed.total.change.value, number, self.steps, number, "updates")
            mean = summed.total.change.value.double() * (self.clip / self.steps / len(summed.clients))
            parts = torch.split(mean, [w.numel() for w in parameters(model).values()])
            moved = zip(parameters(model).items(), parts, strict=True)
            load(model, {name: w + self.server_lr * part.view_as(w).to(w) for (name, w), part in moved})  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: Parameters) -> Change:
        """Take E epochs of SGD from the server's model; release min(1, S / |d|) d of its change d."""
        model = client.new_model(weights)
        before = {name: w.clone() for name, w in parameters(model).items()}
        with suppress(Diverged):  # counts as no change, so that the server can't tell
            self.local.fit(model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client))
        change = torch.cat([(w.double() - before[name].double()).flatten() for name, w in parameters(model).items()])
        mechanism = self._mechanism(client.delta, client.adders)
        return Change(change=client.release(mechanism, change).map(Tensor.cpu))

    def _mechanism(self, delta: float, adders: int) -> IntegerUpdate:
        """The mechanism of each round's sum."""
        return IntegerUpdate(
            radius=self.clip,
            noise_multiplier=release_noise(self.epsilon, delta, precision_share=1 / self.rounds),
            steps=self.steps,
            adders=adders,
        )

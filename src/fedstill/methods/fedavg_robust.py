"""FedAvg with a robust rule in place of the mean: Krum, median, trimmed mean, geometric median.

Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017 (Krum, Multi-Krum); Yin, Chen, Kannan, Bartlett, ICML 2018
(arXiv:1803.01498: median, trimmed mean); Pillutla, Kakade, Harchaoui, IEEE TSP 2022 (arXiv:1912.13445: geometric
median).

Differs from the papers: clients send the model after their local training, not one gradient (the geometric median's
paper does too); all clients count alike; distances are those of the parameters, and buffers have their median.
"""

from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import Participation, sample
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.methods.parts.robust import Rule, aggregate, fewest
from fedstill.protocol import Client, Federation, Method, Reply, State, load, parameters, state, step
from fedstill.train.sgd import SGD


class TrainedModel(Reply):
    """A client's model after its local training."""

    weights: State


class FedAvgRobust(ClassWeighted, Method):
    """FedAvg with a robust rule in place of the mean, against a few hostile clients."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    rule: Rule = "multi-krum"
    """Rule that combines the clients' models."""
    hostile: NonNegativeInt = 1
    """Number of hostile clients to expect among those asked in a round (f). Medians do not depend on it; they only need
    more than twice as many replies."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        for round in fed.rounds(self.rounds, model):
            asked = sample(fed, self.participation, round)
            if (least := fewest(self.rule, self.hostile)) > len(asked):
                raise ValueError(
                    f"rule {self.rule} with hostile={self.hostile} needs {least} replies or more, but {len(asked)} "
                    "clients are asked in a round; lower --hostile, or ask more clients"
                )
            replies = fed.ask(self.update, to=asked, at_least=least, weights=state(model))
            load(model, aggregate(self.rule, replies, self.hostile, parameters(model).keys()))  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> TrainedModel:
        """Take E epochs of SGD from the server's model."""
        model = client.new_model(weights)
        self.local.fit(model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client))
        return TrainedModel(weights=state(model))

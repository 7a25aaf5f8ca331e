"""Federated averaging (McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1).

Differs from the paper: nothing. ``rounds=1`` is one-shot FedAvg; ``weighting="uniform"`` is the plain mean that DENSE
takes; buffers (BatchNorm statistics) are averaged like weights.
"""

from typing import ClassVar

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import Participation, Weighting, mean_weights, sample
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.protocol import Client, Count, Federation, Method, Reply, State, load, state, step
from fedstill.train.sgd import SGD


class Update(Reply):
    """A client's model after its local training."""

    weights: State
    num_records: Count


class FedAvg(ClassWeighted, Method):
    """Federated averaging: the mean of the clients' models, round after round."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds; 1 is one-shot FedAvg."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""
    weighting: Weighting = "records"
    """Weights of the clients in the mean: their numbers of records, or equal weights."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        for round in fed.rounds(self.rounds, model):
            asked = sample(fed, self.participation, round)  # S_t
            replies = fed.ask(self.update, to=asked, weights=state(model))
            load(model, mean_weights(replies, self.weighting))  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Take E epochs of SGD from the server's model: ClientUpdate(k, w)."""
        model = client.new_model(weights)
        self.local.fit(model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client))
        return Update(weights=state(model), num_records=len(client.train))

"""FedAvg with fine-tuning: each client tunes the result on its own records; the simplest personalised baseline.

McMahan et al., AISTATS 2017 (arXiv:1602.05629), with local fine-tuning as Yu, Bagdasaryan, Shmatikov 2020
(arXiv:2002.04758) and many others do it.

Differs from the paper: nothing in FedAvg. Before its model is evaluated, every client tunes all weights; the tuned
weights stay at the client.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.methods.averaging import Participation, Weighting, mean_weights, sample
from fedstill.methods.fedavg import Update
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.protocol import Client, Federation, Method, State, load, state, step
from fedstill.train.sgd import SGD


class FedAvgFT(ClassWeighted, Method):
    """Federated averaging, and each client's own fine-tuning of the result."""

    personal: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds; 1 is one-shot FedAvg."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""
    weighting: Weighting = "records"
    """Weights of the clients in the mean: their numbers of records, or equal weights."""
    tuning: SGD = SGD(epochs=None)
    """A client's fine-tuning of the server's model, before evaluation."""

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

    @override
    def personal_model(self, client: Client, shared: Mapping[str, Tensor]) -> nn.Module:
        model = client.new_model(shared)
        self.tuning.fit(model, client.train, client.rng("tuning"), loss=client_loss(self.class_weights, client))
        return model

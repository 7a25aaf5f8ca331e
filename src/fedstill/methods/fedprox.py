"""FedProx (Li et al., MLSys 2020, arXiv:1812.06127, Algorithm 2).

Differs from the paper: SGD solves the local problem for a fixed number of epochs, not to a given inexactness, and
clients are weighted by their numbers of records, as is usual.
"""

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import Participation, mean_weights, sample
from fedstill.methods.fedavg import Update
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.protocol import Client, Federation, Method, State, load, state, step
from fedstill.train.sgd import SGD, proximal


class FedProx(ClassWeighted, Method):
    """FedAvg with a quadratic penalty for local models far from the server's."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds."""
    local: SGD = SGD(epochs=None)
    """A client's training in one round."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""
    mu: NonNegativeFloat = 0.01
    """Weight of mu/2 |w - w_t|^2 in the local loss; 0 is FedAvg."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        for round in fed.rounds(self.rounds, model):
            asked = sample(fed, self.participation, round)  # S_t
            replies = fed.ask(self.update, to=asked, weights=state(model))
            load(model, mean_weights(replies, "records"))  # w_{t+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Approximately minimise h_k(w; w_t) = F_k(w) + mu/2 |w - w_t|^2."""
        model = client.new_model(weights)
        self.local.fit(
            model,
            client.train,
            client.rng("batches"),
            loss=client_loss(self.class_weights, client),
            correct=proximal(model, self.mu),
        )
        return Update(weights=state(model), num_records=len(client.train))

"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481, Algorithm 1).

Differs from the paper: no server momentum and no proximal term; buffers, which the paper does not mention, are averaged
with the numbers of records as weights.
"""

from typing import Annotated, ClassVar

from annotated_types import Ge, Lt
from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import ConstantRate, Participation, gradient_weight, sample, weighted_mean, weighted_sum
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.protocol import Client, Count, Federation, Method, Reply, State, load, parameters, state, step
from fedstill.train.sgd import SGD


class NormalisedUpdate(Reply):
    """A client's model and the amount of its local work."""

    weights: State
    num_records: Count
    work: Annotated[float, Ge(1), Lt(2**40)]
    """|a_k|_1: the sum of the local gradients' factors in the model."""


class FedNova(ClassWeighted, Method):
    """Normalised averaging: more local steps do not increase a client's weight."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds."""
    local: ConstantRate = SGD(epochs=None)
    """A client's training in one round."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # x_0
        for round in fed.rounds(self.rounds, model):
            asked = sample(fed, self.participation, round)
            replies = fed.ask(self.update, to=asked, weights=state(model))
            sizes = [(r.num_records, r.work) for r in replies]
            n = sum(records for records, _ in sizes)
            tau = sum(records / n * work for records, work in sizes)  # tau_eff = sum p_k |a_k|
            # x - tau sum p_k d_k with d_k = (x - y_k)/|a_k|, as one mean of x and the y_k
            _, local = weighted_sum((tau * r.num_records / n / r.work, r.weights) for r in replies)
            share = 1 - sum(tau * records / n / work for records, work in sizes)
            new = weighted_mean((r.num_records, r.weights) for r in replies)  # buffers
            new |= {name: share * x.double() + local[name].to(x.device) for name, x in parameters(model).items()}
            load(model, new)
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> NormalisedUpdate:
        """Train from the server's model, and measure the work."""
        model = client.new_model(weights)
        steps = self.local.fit(model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client))
        work = gradient_weight(self.local.momentum, steps)  # |a_k|_1
        return NormalisedUpdate(weights=state(model), num_records=len(client.train), work=work)

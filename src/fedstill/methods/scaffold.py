"""SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378, Algorithm 1, option II).

Differs from the paper: with momentum rho, the control variate is (x - y) / (eta a), where a is the sum of the local
gradients' factors in the model; for rho = 0 that is the paper's (x - y) / (eta K). With momentum, dividing by K
inflates it by about 1/(1 - rho), the known cause of runs stuck at chance. The default has no momentum, like the paper.
"""

from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import (
    ConstantRate,
    Participation,
    Weighting,
    gradient_weight,
    mean_weights,
    sample,
    weighted_sum,
)
from fedstill.methods.parts.class_weights import ClassWeighted, client_loss
from fedstill.protocol import Client, Count, Federation, Method, Parameters, Reply, State, load, parameters, state, step
from fedstill.train.sgd import SGD, control_variates


class Variates(Reply):
    """A client's model and the change of its control variate."""

    weights: State
    change: Parameters
    """c_k^+ - c_k."""
    num_records: Count


class Scaffold(ClassWeighted, Method):
    """Stochastic controlled averaging: control variates correct the clients' drift in local training."""

    numeric: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds."""
    local: ConstantRate = SGD(momentum=0.0, epochs=None)
    """A client's training in one round."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""
    server_lr: PositiveFloat = 1.0
    """eta_g: step of the server's model towards the mean of the clients' models; 1 takes the mean."""
    weighting: Weighting = "uniform"
    """Weights of the clients: equal, as in the paper, or their numbers of records, as in NIID-Bench."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # x
        control = {name: torch.zeros_like(value) for name, value in parameters(model).items()}  # c
        for round in fed.rounds(self.rounds, model, control):
            asked = sample(fed, self.participation, round)
            replies = fed.ask(self.update, to=asked, weights=state(model), control=control)
            mean, eta, old = mean_weights(replies, self.weighting), self.server_lr, parameters(model)
            # x <- x + eta_g (mean y_k - x)
            new = {name: (1 - eta) * x.double() + eta * mean[name].to(x.device) for name, x in old.items()}
            load(model, mean | new)
            # c <- c + 1/N sum_S (c_k^+ - c_k), N counting all clients
            _, change = weighted_sum((1 / len(fed.clients), r.change) for r in replies)
            load(control, {name: c.double() + change[name].to(c.device) for name, c in control.items()})
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State, control: Parameters) -> Variates:
        """Train by SGD along g(y) - c_k + c."""
        model = client.new_model(weights)
        start = {name: value.clone() for name, value in parameters(model).items()}
        c = {name: value.to(client.device) for name, value in control.items()}
        own = {name: client.state.get(name, torch.zeros_like(value)) for name, value in c.items()}  # c_k
        correct = control_variates(list(c.values()), list(own.values()))
        steps = self.local.fit(
            model, client.train, client.rng("batches"), loss=client_loss(self.class_weights, client), correct=correct
        )
        scale = 1 / (self.local.lr * gradient_weight(self.local.momentum, steps))
        # c_k^+ - c_k = -c + (x - y)/(K eta)
        change = {name: (start[name] - y) * scale - c[name] for name, y in parameters(model).items()}
        client.state |= {name: own[name] + change[name] for name in own}
        return Variates(weights=state(model), change=change, num_records=len(client.train))

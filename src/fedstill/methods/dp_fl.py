"""DP-FL: FedAvg with DP-SGD at every client and constant noise; FedKADP's simplest baseline.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016
(arXiv:1607.00133), Algorithm 1, as the local training of McMahan et al. 2017.

Differs from the papers: each record's gradient is clipped, batches are Poisson samples at a public rate, the divisor is
the expected batch size, and clients have equal weights, since their numbers of records are private.
"""

from torch import nn
from typing_extensions import override

from fedstill.methods.averaging import sample, weighted_mean
from fedstill.methods.parts.private_rounds import PrivateRounds, TrainedModel, claimed, end_early
from fedstill.privacy.per_record import check_alone
from fedstill.protocol import Client, Federation, Method, Parameters, load, parameters, step


class DPFL(PrivateRounds, Method):
    """The mean of models that clients train by DP-SGD, round after round."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model, noise = fed.new_model(), self.noise_multiplier  # w_0, sigma
        check_alone(model)
        event = self.local.event(noise)
        for round in fed.rounds(self.rounds, model):
            able = fed.able(event)
            if not able:
                end_early(fed, round, event, noise)
                break
            chosen = sample(fed, self.participation, round, able)  # S_t
            replies = fed.ask(self.update, to=chosen, weights=parameters(model), noise=noise)
            load(model, weighted_mean((1, reply.weights.value) for reply in replies))  # w_t = 1/N sum_k w_k
            round.log(
                accuracy=fed.evaluate(model),
                epsilon=fed.spent(),
                claimed=claimed(fed, self, [noise] * round.number),
                noise=noise,
            )
        return model

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> TrainedModel:
        """Take E steps of DP-SGD from the server's model."""
        mechanism = self.local.mechanism(client.new_model(weights), noise)
        return TrainedModel(weights=client.release(mechanism, client.train))

"""DP-FL: FedAvg by DP-SGD at every client, with constant noise; FedKADP's plainest baseline.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016
(arXiv:1607.00133), Algorithm 1, as the local training of McMahan et al. 2017.

Differs from the papers: gradients of single records are clipped, batches are Poisson samples at a public rate, and the
divisor is the batch to expect, never a count of records.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedstill.methods.averaging import weighted_mean
from fedstill.methods.private_rounds import PrivateRounds
from fedstill.protocol import Client, Federation, Parameters, Released, Reply, parameters, step


class Trained(Reply):
    """A client's model after DP-SGD from the server's."""

    weights: Released[Parameters]


class DPFL(PrivateRounds):
    """DP-SGD at the clients, averaged."""

    def exchange(
        self, fed: Federation, chosen: Sequence[int], model: nn.Module, controls: dict[str, Tensor], now: int
    ) -> dict[str, Tensor]:
        """``w_t = 1/N sum_k w_k``, all clients alike: how many records they have is nobody's business."""
        told: dict[str, Any] = {name: float(value) for name, value in controls.items()}
        replies = fed.ask(self.update, to=chosen, weights=parameters(model), **told)
        return weighted_mean((1, reply.weights.value) for reply in replies)

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Trained:
        """E steps of DP-SGD from the server's model."""
        mechanism = self.local.mechanism(client.new_model(weights), noise)
        return Trained(weights=client.release(mechanism, client.train, adaptive=self.adaptive))

"""DP-FL: FedAvg by DP-SGD at every client, with constant noise; FedKADP's plainest baseline.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016
(arXiv:1607.00133), Algorithm 1, as the local training of McMahan et al. 2017.

Differs from the papers: gradients of single records are clipped, batches are Poisson samples at a public rate, and the
divisor is the batch to expect, never a count of records.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from fedstill.methods.private_rounds import PrivateRounds, Trained, mean_of, private_training
from fedstill.protocol import Client, Federation, Parameters, parameters, step


class DPFL(PrivateRounds):
    """DP-SGD at the clients, averaged."""

    def exchange(
        self, fed: Federation, chosen: Sequence[int], model: nn.Module, controls: dict[str, Tensor], now: int
    ) -> dict[str, Tensor]:
        """See `PrivateRounds.exchange`."""
        noise = float(controls["noise"])
        return mean_of(fed.ask(self.update, to=chosen, weights=parameters(model), noise=noise))

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Trained:
        """E steps of DP-SGD from the server's model."""
        return private_training(client, self, weights, noise)

"""FedAvg whose clients fine-tune the result on their own records: the plainest personalised baseline.

McMahan et al., AISTATS 2017 (arXiv:1602.05629), with local fine-tuning as Yu, Bagdasaryan, Shmatikov 2020
(arXiv:2002.04758) and many others do it.

Differs from the paper: nothing in FedAvg; every client tunes all weights before its model is judged, and sends nothing
of that.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from fedstill.methods.fedavg import FedAvg
from fedstill.protocol import Client
from fedstill.train.sgd import SGD


class FedAvgFT(FedAvg):
    """Federated averaging, and each client's own fine-tuning of what comes out."""

    personal: ClassVar[bool] = True
    tuning: SGD = SGD()
    """What a client does with the server's model before it uses it."""

    def personal_model(self, client: Client, shared: Mapping[str, Tensor]) -> nn.Module:
        """The server's model after some more epochs on the client's records."""
        model = super().personal_model(client, shared)
        self.tuning.fit(model, client.train, client.rng("tuning"))
        return model

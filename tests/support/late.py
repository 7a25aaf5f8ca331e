"""Methods whose clients fail as long as a file says so."""

import os
from pathlib import Path

from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.fedavg import FedAvg, Update
from fedstill.methods.fedavg_p import FedAvgP
from fedstill.methods.fedrep import Body, FedRep, Shared
from fedstill.methods.parts.private_heads import HeadToSum
from fedstill.protocol import Client, State, step

AWAY = "FEDSTILL_TEST_AWAY"
"""Names the folder where a file called by a client's number keeps it away."""


def _check(client: Client) -> None:
    if (Path(os.environ[AWAY]) / str(client.id)).exists():
        raise ConnectionError("away")


class LateModels(FedAvg):
    """FedAVG."""

    @step
    def update(self, client: Client, weights: State) -> Update:
        """As there, if it is there."""
        _check(client)
        return FedAvg.update.function(self, client, weights)


class LateHeads(FedAvgP):
    """FedAVG+P, whose clients are away only after they have released."""

    @step
    def train_head(self, client: Client, features: PublicFeatures) -> HeadToSum:
        """As there, if it is still there afterwards."""
        reply = FedAvgP.train_head.function(self, client, features)
        _check(client)
        return reply


class LateRep(FedRep):
    """FedRep."""

    @step
    def update(self, client: Client, shared: Shared) -> Body:
        """As there, if it is there."""
        _check(client)
        return FedRep.update.function(self, client, shared)

"""REAL: clients send some of their real images, and the server trains on them.

The baseline of FedGM (Chen, Zhou, Jiang, Electronics 2024, 13(10), 1815, section 4.6): the same bytes as an upload of
synthetic images, and no privacy at all.

Differs from the paper, which says nothing of the choice: images are drawn at random, or as DREAM chooses
representatives.
"""

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import nn

from fedstill.distill.representatives import choose
from fedstill.methods.surrogate import ImageSet, packed, train_on, union
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.condensation import CondensedTraining


class Real(Method):
    """Clients send a few of their real images: what any synthetic set has to beat."""

    ipc: PositiveInt = 10
    """Images of every class that a client holds; all of a class that has fewer."""
    choice: Literal["random", "representatives"] = "random"
    """Any records, or one near the middle of each k-means cluster of a random network's features."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    def server(self, fed: Federation) -> nn.Module:
        """Train on the union of what the clients sent."""
        limit = self.ipc * fed.num_classes
        images = union(fed, fed.ask(self.select, at_most={"n": limit}))
        fed.show("real images sent", images)
        return train_on(fed, images, self.training)

    @step
    def select(self, client: Client) -> ImageSet:
        """``ipc`` records of every class."""
        rng = client.rng("choice")
        net = client.new_model()
        chosen = []
        for label in torch.unique(client.train.labels).tolist():
            index = torch.nonzero(client.train.labels == label).flatten()
            if self.choice == "random":
                kept = torch.randperm(len(index), generator=rng)[: self.ipc].to(index.device)
            else:
                kept = choose(client.train[index], net, self.ipc, rng)
            chosen.append(index[kept])
        return packed(client.train[torch.cat(chosen)])

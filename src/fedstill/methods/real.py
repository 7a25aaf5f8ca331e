"""REAL: clients send some of their real images, and the server trains on them.

The baseline of FedGM (Chen, Zhou, Jiang, Electronics 2024, 13(10), 1815, section 4.6): as many bytes as an upload of
synthetic images, and no privacy.

Differs from the paper, which does not say how images are chosen: at random, or as DREAM chooses representatives.
"""

from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.coreset import choose
from fedstill.methods.parts.surrogate import (
    ImageSet,
    VectorSet,
    VectorUpload,
    collect,
    image_reply,
    train_on,
    vector_reply,
)
from fedstill.protocol import Client, Federation, Method, Records, Step, step
from fedstill.train.condensation import CondensedTraining


class Real(VectorUpload, Method):
    """One upload of a few real images, the baseline for synthetic images."""

    ipc: PositiveInt = 10
    """Images of every class that a client has; all images of a class with fewer."""
    choice: Literal["random", "representatives"] = "random"
    """Random records, or one near the centre of each k-means cluster of a random network's features."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        select: Step[Any] = self.select_vectors if fed.like.are_vectors else self.select
        images = collect(fed, fed.ask(select, at_most={"n": self.ipc * fed.num_classes}), "real images sent")
        return train_on(fed, images, self.training)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' choice, on which their replies depend."""
        return type(self), self.ipc, self.choice, self.vectors

    @step
    def select(self, client: Client) -> ImageSet:
        """Choose ``ipc`` records of every class."""
        return image_reply(self._chosen(client))

    @step
    def select_vectors(self, client: Client) -> VectorSet:
        """Choose ``ipc`` records of every class if they are vectors."""
        return vector_reply(self._chosen(client), client.train.num_classes, self)

    def _chosen(self, client: Client) -> Records:
        rng, net = client.rng("choice"), client.new_model()
        chosen = []
        for label in torch.unique(client.train.labels).tolist():
            index = torch.nonzero(client.train.labels == label).flatten()
            if self.choice == "random":
                positions = torch.randperm(len(index), generator=rng)[: self.ipc].to(index.device)
            else:
                positions = choose(client.train[index], net, self.ipc, rng)
            chosen.append(index[positions])
        return client.train[torch.cat(chosen)]

"""FedGM: clients distil their records into a few images by gradient matching and send them once.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
Algorithm 1.

Differs from the paper (docs/methods/fedgm.md has the whole list):

* the label step (Algorithm 4) is a method of its own, `fedstill.methods.fedgm_labels`; the guarantee here is "none";
* many new networks with a step or two each, in place of 300 networks with 100 steps: after a few updates the gradient
  of a single class vanishes and carries no signal;
* the distance, which the paper leaves open, is DC's grouped cosine; the squared error is an option;
* pixels stay in [0, 1] and are rounded to 8 bits: an upload is one byte a pixel, and the server trains on the rounded;
* all clients match gradients at the same sequence of random networks, drawn from the run's seed.
"""

from functools import partial
from typing import Any

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.formation import check_divides, unfolded
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.methods.surrogate import (
    ImageSet,
    VectorSet,
    VectorUpload,
    collect,
    image_reply,
    random_net,
    train_on,
    vector_reply,
)
from fedstill.protocol import Client, Federation, Method, Records, Step, step
from fedstill.train.condensation import CondensedTraining


class FedGM(VectorUpload, Method):
    """One upload of synthetic images whose gradients match those of the real images."""

    ipc: PositiveInt = 10
    """Synthetic images of every class that a client has; with --matching.formation 2 each holds four."""
    matching: GradientMatching = GradientMatching()
    """Settings of a client's synthesis."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        check_divides(self.matching.formation, fed.like.shape)
        distil: Step[Any] = self.distil_vectors if fed.like.are_vectors else self.distil
        images = collect(fed, fed.ask(distil, at_most={"n": self.ipc * fed.num_classes}))  # S = S_1 u ... u S_K
        used = unfolded(images, self.matching.formation) if isinstance(images, Records) else images
        return train_on(fed, used, self.training)

    @step
    def distil(self, client: Client) -> ImageSet:
        """Fit S_k by gradient matching, from the client's records alone."""
        return image_reply(self._fit(client))

    @step
    def distil_vectors(self, client: Client) -> VectorSet:
        """Fit S_k if records are vectors."""
        return vector_reply(self._fit(client), client.train.num_classes, self)

    def _fit(self, client: Client) -> Records:
        nets = partial(random_net, client)
        return synthesise(client.train, nets, self.ipc, self.matching, client.rng("images"))

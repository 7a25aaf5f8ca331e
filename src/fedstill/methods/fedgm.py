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

import torch
from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.pool import check_divides, unfolded
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.evaluation import outputs
from fedstill.methods.parts.surrogate import (
    ImageSet,
    SoftImageSet,
    VectorSet,
    VectorUpload,
    collect,
    image_reply,
    random_net,
    soft_union,
    train_on,
    vector_reply,
)
from fedstill.protocol import Client, Federation, Method, Records, Step, step
from fedstill.train.condensation import CondensedTraining
from fedstill.train.sgd import SGD


class FedGM(VectorUpload, Method):
    """One upload of synthetic images whose gradients match those of the real images."""

    ipc: PositiveInt = 10
    """Synthetic images of every class that a client has; with --matching.formation 2 each holds four."""
    matching: GradientMatching = GradientMatching()
    """Settings of a client's synthesis."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""
    soft_labels: bool = False
    """Send, in place of an image's class, the logits of a network trained on the client's records."""
    teacher: SGD = SGD(epochs=20)
    """A client's training of that network."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        check_divides(self.matching.formation, fed.like.shape)
        if self.soft_labels:
            if fed.like.are_vectors or self.matching.formation > 1:
                raise ValueError(
                    f"soft labels are for stored images that hold one image each, but the records are "
                    f"{'vectors' if fed.like.are_vectors else 'images'} and formation is {self.matching.formation}; "
                    "leave --soft-labels out"
                )
            return train_on(fed, soft_union(fed, fed.ask(self.distil_soft, at_most=self._at_most(fed))), self.training)
        distil: Step[Any] = self.distil_vectors if fed.like.are_vectors else self.distil
        images = collect(fed, fed.ask(distil, at_most=self._at_most(fed)))  # S = S_1 u ... u S_K
        return train_on(fed, self.opened(images) if isinstance(images, Records) else images, self.training)

    @override
    def opened(self, sent: Records) -> Records:
        return unfolded(sent, self.matching.formation)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' synthesis, on which their replies depend."""
        return type(self), self.ipc, self.matching, self.vectors, self.teacher if self.soft_labels else None

    @step
    def distil(self, client: Client) -> ImageSet:
        """Fit S_k by gradient matching, from the client's records alone."""
        return image_reply(self._fit(client))

    @step
    def distil_soft(self, client: Client) -> SoftImageSet:
        """Fit S_k, and let a network trained on the client's records label it."""
        images, model = self._fit(client), client.new_model()
        self.teacher.fit(model, client.train, client.rng("teacher"))
        return SoftImageSet(images=images.images, logits=torch.cat(outputs(model, images)))

    @step
    def distil_vectors(self, client: Client) -> VectorSet:
        """Fit S_k if records are vectors."""
        return vector_reply(self._fit(client), client.train.num_classes, self)

    def _at_most(self, fed: Federation) -> dict[str, int]:
        return {"n": self.ipc * fed.num_classes}

    def _fit(self, client: Client) -> Records:
        nets = partial(random_net, client)
        return synthesise(client.train, nets, self.ipc, self.matching, client.rng("images"))

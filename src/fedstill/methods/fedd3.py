"""FedD3: each client distils its records into a few images, without a network, and sends them once.

Song, Liu, Chen, Festag, Trinitis, Schulz, Knoll, "Federated learning via decentralized dataset distillation in
resource-constrained edge environments", IJCNN 2023 (arXiv:2208.11311).

Differs from the paper (docs/methods/fedd3.md has the whole list):

* images have the data set's normalisation, which the server tests with, not the client's own, and are sent in 8 bits;
* kernel inducing points are fitted until their loss stops falling, not until a batch of ten records is predicted right;
* the model after the server's last epoch is the result, not the best one on the test set.
"""

from typing import Any, Literal

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.distill.coreset import Coreset, centres
from fedstill.distill.kip import KIP, inducing_points
from fedstill.methods.parts.surrogate import (
    ImageSet,
    ValueSet,
    VectorSet,
    VectorUpload,
    collect,
    image_reply,
    value_reply,
    vector_reply,
)
from fedstill.protocol import Client, Federation, Method, Step, step
from fedstill.train.sgd import SGD


class FedD3(VectorUpload, Method):
    """One upload of a few images: kernel inducing points, or centres of clusters."""

    images: PositiveInt = 10
    """Number of a client's images, over all its classes."""
    instance: Literal["kip", "coreset"] = "kip"
    """Kind of images: kernel inducing points, or centres of clusters."""
    kip: KIP = KIP()
    """Settings of --instance kip."""
    coreset: Coreset = Coreset()
    """Settings of --instance coreset."""
    pixels: Literal["uint8", "float32"] = "uint8"
    """Type of the pixels sent: one byte each, or four bytes as published."""
    training: SGD = SGD(lr=0.001, batch_size=50, epochs=500)
    """The server's training on the images of all clients."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        distil: Step[Any] = self.distil if self.pixels == "uint8" else self.distil_values
        if fed.like.are_vectors:
            distil = self.distil_vectors
        images = collect(fed, fed.ask(distil, at_most={"n": self.images}))  # the union of the clients' images
        model = fed.new_model()
        progress = fed.progress("training at the server")
        self.training.fit(model, images, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
        return model

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' images, on which their replies depend."""
        return type(self), self.images, self.instance, self.kip, self.coreset, self.pixels, self.vectors

    @step
    def distil(self, client: Client) -> ImageSet:
        """Fit the client's images and round them to 8 bits."""
        return image_reply(self._fit(client).rounded(client.train.num_classes, client.train.normalisation))

    @step
    def distil_values(self, client: Client) -> ValueSet:
        """Fit the client's images; send real-valued pixels."""
        return value_reply(self._fit(client), client.train.num_classes)

    @step
    def distil_vectors(self, client: Client) -> VectorSet:
        """Fit the client's examples if records are vectors."""
        return vector_reply(self._fit(client), client.train.num_classes, self)

    def _fit(self, client: Client) -> Examples:
        rng = client.rng("images")
        if self.instance == "kip":
            return inducing_points(client.train, self.images, self.kip, rng)
        return centres(client.train, self.images, self.coreset, rng)

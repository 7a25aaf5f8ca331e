"""FedD3: clients distil a handful of images, each on its own and without any network, and send them once.

Song, Liu, Chen, Festag, Trinitis, Schulz, Knoll, "Federated learning via decentralized dataset distillation in
resource-constrained edge environments", IJCNN 2023 (arXiv:2208.11311).

Differs from the paper (docs/methods/fedd3.md has the whole list):

* images have the data set's normalisation, which the server tests with, not the client's own; are sent in 8 bits;
* kernel inducing points are fitted until their loss no longer falls, not until ten records happen to be right;
* the last epoch at the server counts, not the best one on the test set.
"""

from typing import Any, Literal

from pydantic import PositiveInt
from torch import nn

from fedstill.distill.coreset import Coreset, centres
from fedstill.distill.kip import KIP, inducing_points
from fedstill.methods.surrogate import ImageSet, ValueSet, packed, packed_values, received
from fedstill.protocol import Client, Federation, Method, Step, step
from fedstill.records import Examples
from fedstill.train.sgd import SGD


class FedD3(Method):
    """One upload of a few images: kernel inducing points, or centres of clusters."""

    images: PositiveInt = 10
    """Images of a client, of all its classes together."""
    instance: Literal["kip", "coreset"] = "kip"
    """Kind of images: kernel inducing points, or centres of clusters."""
    kip: KIP = KIP()
    """Settings of --instance kip."""
    coreset: Coreset = Coreset()
    """Settings of --instance coreset."""
    pixels: Literal["uint8", "float32"] = "uint8"
    """Type of the pixels sent: one byte each, or four as published."""
    training: SGD = SGD(lr=0.001, batch_size=50, epochs=500)
    """The server's training on the images of all clients."""

    def server(self, fed: Federation) -> nn.Module:
        """Train on the union of the clients' images."""
        asked: Step[Any] = self.distil if self.pixels == "uint8" else self.distil_values
        images = received(fed, fed.ask(asked, at_most={"n": self.images}))
        model = fed.new_model()
        progress = fed.progress("training at the server")
        self.training.fit(model, images, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
        return model

    @step
    def distil(self, client: Client) -> ImageSet:
        """The client's images, in 8 bits."""
        made = self._made(client)
        return packed(made.rounded(client.train.num_classes, client.train.normalisation))

    @step
    def distil_values(self, client: Client) -> ValueSet:
        """The client's images, as they were optimised."""
        return packed_values(self._made(client), client.train.num_classes)

    def _made(self, client: Client) -> Examples:
        rng = client.rng("images")
        if self.instance == "kip":
            return inducing_points(client.train, self.images, self.kip, rng)
        return centres(client.train, self.images, self.coreset, rng)

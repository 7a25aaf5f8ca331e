"""FedDM: clients distil images that look to networks around the server's as their records do, round after round.

Xiong, Wang, Cheng, Yu, Hsieh, "FedDM: iterative distribution matching for communication-efficient federated learning",
CVPR 2023 (arXiv:2207.09653), Algorithm 1.

Differs from the paper (docs/methods/feddm.md has the whole list):

* images are made of pixels in [0, 1] and sent in 8 bits; ``pixels="float32"`` sends what was optimised, four times as
  many bytes;
* the server trains freely from its last model; the paper keeps it within rho of that (``within=True``).
"""

from typing import Any, Literal

from pydantic import PositiveInt, model_validator
from torch import nn

from fedstill.distill.distribution_matching import DistributionMatching, fit_images, sphere_around
from fedstill.methods.surrogate import ImageSet, ValueSet, packed, packed_values, received
from fedstill.protocol import Client, Federation, Method, State, Step, state, step
from fedstill.records import Examples
from fedstill.train.sgd import SGD, ball_constraint


class FedDM(Method):
    """Synthetic images for networks around the server's, anew in every round."""

    rounds: PositiveInt = 20
    """Communication rounds; with 1, images are made for networks around a random one."""
    ipc: PositiveInt = 10
    """Synthetic images of every class that a client holds enough records of."""
    matching: DistributionMatching = DistributionMatching(min_records=10)
    """Settings of a client's fit."""
    pixels: Literal["uint8", "float32"] = "uint8"
    """Type of the pixels sent: one byte each, or four as published."""
    training: SGD = SGD(weight_decay=5e-4, batch_size=256, epochs=500)
    """The server's training in one round, on the images of all clients, from its last model."""
    within: bool = False
    """Keep the trained model within rho of the model that the images were made for."""

    @model_validator(mode="after")
    def _bounded(self) -> "FedDM":
        if self.within and not self.matching.rho:
            raise ValueError("within keeps the server in a ball of radius matching.rho, which is 0; give it a radius")
        return self

    def server(self, fed: Federation) -> nn.Module:
        """The server's loop."""
        model = fed.new_model()  # w_0
        limit = {"n": self.ipc * fed.num_classes}
        for round in fed.rounds(self.rounds, model):
            asked: Step[Any] = self.distil if self.pixels == "uint8" else self.distil_values
            images = received(fed, fed.ask(asked, at_most=limit, weights=state(model)))
            rng, progress = fed.rng("training", round.number), fed.progress("training at the server")
            bound = ball_constraint(model, self.matching.rho) if self.within else None
            self.training.fit(model, images, rng, bound=bound, on_epoch=progress, checkpoint=fed.epochs)  # w_{r+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def distil(self, client: Client, weights: State) -> ImageSet:
        """S_k around w_r, in 8 bits."""
        made = self._made(client, weights)
        return packed(made.rounded(client.train.num_classes, client.train.normalisation))

    @step
    def distil_values(self, client: Client, weights: State) -> ValueSet:
        """S_k around w_r, as it was optimised."""
        return packed_values(self._made(client, weights), client.train.num_classes)

    def _made(self, client: Client, weights: State) -> Examples:
        nets = sphere_around(client.new_model(weights), self.matching.rho, client.rng("networks"))
        return fit_images(client.train, nets, self.ipc, self.matching.for_records(client.train), client.rng("images"))

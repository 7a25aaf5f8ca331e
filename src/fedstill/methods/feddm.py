"""FedDM: each round, clients fit images whose features match those of their records in networks near the server's.

Xiong, Wang, Cheng, Yu, Hsieh, "FedDM: iterative distribution matching for communication-efficient federated learning",
CVPR 2023 (arXiv:2207.09653), Algorithm 1.

Differs from the paper (docs/methods/feddm.md has the whole list):

* pixels stay in [0, 1] and are sent in 8 bits; ``pixels="float32"`` sends the optimised values in four times the bytes;
* the server trains from its last model without a constraint; the paper stays within rho of it (``within=True``).
"""

from typing import Any, Literal

from pydantic import PositiveInt, model_validator
from torch import nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.distill.distribution_matching import DistributionMatching, fit_images, sphere_around
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
from fedstill.protocol import Client, Federation, Method, State, Step, state, step
from fedstill.train.sgd import SGD, ball_constraint


class FedDM(VectorUpload, Method):
    """Synthetic images for networks near the server's, fitted anew in every round."""

    rounds: PositiveInt = 20
    """Communication rounds. With 1, images are fitted at networks near a random one."""
    ipc: PositiveInt = 10
    """Synthetic images of every class of which a client has enough records."""
    matching: DistributionMatching = DistributionMatching(min_records=10)
    """Settings of a client's fit."""
    pixels: Literal["uint8", "float32"] = "uint8"
    """Type of the pixels sent: one byte each, or four bytes as published."""
    training: SGD = SGD(weight_decay=5e-4, batch_size=256, epochs=500)
    """The server's training in one round, on the images of all clients, from its last model."""
    within: bool = False
    """Keep the trained model within rho of the model that the images were fitted for."""

    @model_validator(mode="after")
    def _bounded(self) -> "FedDM":
        if self.within and not self.matching.rho:
            raise ValueError("within needs a radius, but matching.rho is 0; set it above 0, or leave within out")
        return self

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        distil: Step[Any] = self.distil if self.pixels == "uint8" else self.distil_values
        if fed.like.are_vectors:
            distil = self.distil_vectors
        limit = {"n": self.ipc * fed.num_classes}
        for round in fed.rounds(self.rounds, model):
            images = collect(fed, fed.ask(distil, at_most=limit, weights=state(model)))
            rng, progress = fed.rng("training", round.number), fed.progress("training at the server")
            bound = ball_constraint(model, self.matching.rho) if self.within else None
            self.training.fit(model, images, rng, bound=bound, on_epoch=progress, checkpoint=fed.epochs)  # w_{r+1}
            round.log(accuracy=fed.evaluate(model))
        return model

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' fit, on which their replies to the first weights, w_0, depend."""
        return type(self), self.ipc, self.matching, self.pixels, self.vectors

    @step
    def distil(self, client: Client, weights: State) -> ImageSet:
        """Fit S_k at networks near w_r and round it to 8 bits."""
        return image_reply(self._fit(client, weights).rounded(client.train.num_classes, client.train.normalisation))

    @step
    def distil_values(self, client: Client, weights: State) -> ValueSet:
        """Fit S_k at networks near w_r; send real-valued pixels."""
        return value_reply(self._fit(client, weights), client.train.num_classes)

    @step
    def distil_vectors(self, client: Client, weights: State) -> VectorSet:
        """Fit S_k at networks near w_r if records are vectors."""
        return vector_reply(self._fit(client, weights), client.train.num_classes, self)

    def _fit(self, client: Client, weights: State) -> Examples:
        nets = sphere_around(client.new_model(weights), self.matching.rho, client.rng("networks"))
        return fit_images(client.train, nets, self.ipc, self.matching.for_records(client.train), client.rng("images"))

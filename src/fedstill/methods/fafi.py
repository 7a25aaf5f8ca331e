"""FAFI: clients align features with prototypes, and the server adds their features up.

Zeng, Huang, Zhou, Wu, Wan, Chen, Cai, "Does one-shot give the best shot? Mitigating model inconsistency in one-shot
federated learning", ICML 2025 (openreview.net/forum?id=2XvF67vbCK).

Differs from the paper (docs/methods/fafi.md has the whole list):

* losses, order and constants are those of the authors' code (zenghui9977/FAFI_ICML25);
* each record has random views of its own; the code draws one view for a batch;
* the weights of the last linear layer are the prototypes, so that a client sends nothing beside its model;
* the fusion with equal informativeness, by records, is the default, as in the code;
* the result is evaluated in eval mode; the code's networks are in train mode, with the statistics of test batches.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.base.seeds import draw_seed, stream
from fedstill.distill.boosting import clipped
from fedstill.distill.fusion import FusedModel, PrototypeNetwork, alignment_loss, prototypes, rebuilt
from fedstill.protocol import Client, Count, Federation, Method, Public, Reply, State, load, state, step
from fedstill.train.augment import Views
from fedstill.train.sgd import SGD

_CLIP = 1.0
"""Largest length of a client's gradient, as in the authors' code."""

Draw = Annotated[NonNegativeInt, Public()]


class TrainedModel(Reply):
    """A client's model, whose last layer holds the prototypes."""

    weights: State
    num_records: Count


class FAFI(Method):
    """One upload of models with aligned features, which the server fuses without training."""

    rebuilds: ClassVar[bool] = True
    images_only: ClassVar[bool] = True
    local: SGD = SGD(lr=0.05, batch_size=512, epochs=300)
    """A client's training."""
    views: Views = Views(scale=(0.2, 1.0))
    """The two random views of a record in each step; ``flip`` 0 for digits and letters."""
    temperature: PositiveFloat = 0.07
    """Divisor of the similarities of two views in the contrastive loss."""
    fusion: Literal["records", "uniform", "informative"] = "records"
    """Weights of the clients' features: their records, all alike, or all alike times the feature's distance from the
    client's feature of noise."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        networks, records = list[nn.Module](), list[int]()
        for reply in fed.ask(self.train, draw=draw_seed(fed.rng("prototypes"))):
            networks.append(fed.new_model())
            load(networks[-1], reply.weights)
            records.append(reply.num_records)
        by_records = self.fusion == "records"
        shares = torch.tensor([n / sum(records) if by_records else 1 / len(records) for n in records])
        noise = None
        if self.fusion == "informative":
            noise = torch.randn(1, *fed.like.shape, generator=fed.rng("noise")).to(fed.device)
        return FusedModel(networks, shares.to(fed.device), noise)

    @step
    def train(self, client: Client, draw: Draw) -> TrainedModel:
        """Self-alignment: train features and prototypes together, from the start that all clients share."""
        model, normalise = client.new_model(), client.train.normalisation.apply
        means = prototypes(model)
        with torch.no_grad():
            means.copy_(torch.randn(means.shape, generator=stream(draw, "prototypes")))

        def both_views(pixels: Tensor, rng: torch.Generator) -> Tensor:
            return normalise(torch.cat([self.views(pixels, rng), self.views(pixels, rng)]))

        def loss(output: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
            features, means = output
            return alignment_loss(features, means, y, self.temperature)

        self.local.fit(
            PrototypeNetwork(model),
            Examples(client.train.pixels(), client.train.labels),
            client.rng("batches"),
            loss=loss,
            augment=both_views,
            correct=clipped(_CLIP),
        )
        return TrainedModel(weights=state(model), num_records=len(client.train))

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' training, on which their replies depend."""
        return type(self).train, self.local, self.views, self.temperature

    @override
    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        return rebuilt(network, weights)

"""FedRD: personal projections that stay at the clients, synthetic representations, one shared task network.

Chen, "Personalized federated learning method based on dataset distillation" (in Chinese), section III, Algorithm 1.

Differs from the paper (docs/methods/fedrd.md has the whole list):

* distances between means are squared, as in distribution matching, and representations start as real ones;
* clients and server train by Adam, as in the paper's text; its algorithm says SGD;
* a client trains its projection once more, under the last task network, before its model is evaluated;
* there are ten representations of a class, the paper's number for Fashion-MNIST; it has 30 for other data.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from jaxtyping import Float32
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill import schema
from fedstill.base.records import Examples
from fedstill.distill.distribution_matching import DistributionMatching, fit_representations
from fedstill.evaluation import mode_of
from fedstill.methods.parts.surrogate import concatenate
from fedstill.models.projected import Projected
from fedstill.protocol import (
    Client,
    Federation,
    Labels,
    Method,
    Records,
    Reply,
    Shared,
    load_own,
    own_part,
    shared_part,
    step,
)
from fedstill.train.augment import FULL_STRATEGY
from fedstill.train.sgd import Adam


class Representations(Reply):
    """Labelled synthetic representations of four bytes a value."""

    values: Float32[Tensor, "n 1 height width"]
    labels: Labels


class FedRD(Method):
    """Personal projections, shared representations, one task network."""

    images_only: ClassVar[bool] = True
    personal: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds."""
    dpc: PositiveInt = 10
    """Representations of every class of which a client has enough records."""
    projection: Adam = Adam(lr=0.01, batch_size=256, epochs=10)
    """A client's training of its projection in one round, under the server's task network."""
    matching: DistributionMatching = DistributionMatching(
        logits=False, batch_statistics=True, augment=FULL_STRATEGY, min_records=10
    )
    """A client's fit of its representations."""
    training: Adam = Adam(lr=0.01, batch_size=256, epochs=100)
    """The server's training of the task network in one round, on all representations."""

    @override
    def own(self, model: nn.Module) -> frozenset[str]:
        return projected(model, "fedrd").projection_names  # of w_k, the weights of varphi_k

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = projected(fed.new_model(), "fedrd")  # theta_0
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(
                self.represent, at_most={"n": self.dpc * fed.num_classes}, shared=shared_part(self, model)
            )
            examples = Examples(*concatenate(fed, ((r.values, r.labels) for r in replies)))  # S = S_1 u ... u S_K
            rng, progress = fed.rng("training", round.number), fed.progress("training at the server")
            self.training.fit(model.task, examples, rng, on_epoch=progress, checkpoint=fed.epochs)  # theta_{r+1}
            fed.show("representations", pictures(examples, fed))
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def represent(self, client: Client, shared: Shared) -> Representations:
        """Train w_k, then fit S_k by distribution matching."""
        model = self.personal_model(client, shared)
        client.state |= own_part(self, model)
        records, rng = client.train, client.rng("representations")
        matching = self.matching.for_records(records)
        examples = fit_representations(records, model.projection, _tasks(client), self.dpc, matching, rng)
        return Representations(values=examples.inputs(), labels=schema.compact(examples.labels, records.num_classes))

    @override
    def personal_model(self, client: Client, shared: Mapping[str, Tensor]) -> Projected:
        model = projected(client.new_model(shared), "fedrd")
        load_own(self, model, client.state)
        train_projection(model, self.projection, client)  # w_k by CE(phi(varphi(x)), y)
        return model


def projected(model: nn.Module, method: str) -> Projected:
    """``model`` as a `Projected`; a ValueError if it is another network."""
    if not isinstance(model, Projected):
        raise ValueError(
            f"{method} needs a network in two parts, not a {type(model).__name__}; take --model projected, or "
            "projected:width=32"
        )
    return model


def train_projection(model: Projected, training: Adam, client: Client) -> None:
    """Train the projection on the client's records; the task network and its batch statistics stay fixed."""

    def loss(representations: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.task(representations), labels)  # CE(phi(varphi(x)), y)

    with mode_of(model.task, training=False):
        training.fit(model.projection, client.train, client.rng("projection"), loss=loss)


def _tasks(client: Client) -> Callable[[int], nn.Module]:
    """psi: a new random task network for every step."""
    rng = client.rng("networks")

    def draw(_: int) -> nn.Module:
        number = 1 + int(torch.randint(2**40, (), generator=rng))
        return projected(client.new_model(draw=number), "fedrd").task

    return draw


def pictures(examples: Examples, fed: Federation) -> Records:
    """Grey pictures of ten representations a class, from the smallest value (black) to the largest (white)."""
    low, high = examples.inputs().aminmax()
    grey = ((examples.inputs() - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    first = [torch.nonzero(examples.labels == c).flatten()[:10] for c in range(fed.num_classes)]
    return Records(grey, examples.labels, fed.num_classes, fed.like.normalisation)[torch.cat(first)]

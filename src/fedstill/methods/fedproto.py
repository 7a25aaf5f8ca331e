"""FedProto: clients exchange the mean features of their classes, the prototypes, and keep their models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022
(arXiv:2105.00243), Algorithm 1.

Differs from the paper (docs/methods/fedproto.md has the whole list):

* clients predict with their classifiers, not by the nearest prototype;
* a global prototype is the plain mean over the clients that have the class, as in the authors' code, unless
  ``weighting="records"``;
* all clients have the run's architecture and start from the same random network; in the authors' code each has its own.
"""

from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float32, Int64
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill import models
from fedstill.evaluation import outputs
from fedstill.methods.averaging import Participation, Weighting, sample
from fedstill.protocol import Client, Federation, Method, Reply, load, own_part, state, step
from fedstill.schema import Below
from fedstill.train.sgd import SGD

Means = Float32[Tensor, "classes features"]
Counts = Annotated[Int64[Tensor, " classes"], Below(2**40)]


class Prototypes(Reply):
    """The mean features of each class, a client's or all clients'; zeros for a class without records."""

    means: Means
    counts: Counts


class FedProto(Method):
    """Personal models that agree on the mean features of each class."""

    personal: ClassVar[bool] = True
    rounds: PositiveInt = 20
    """Communication rounds (T)."""
    local: SGD = SGD(momentum=0.5)
    """A client's training in one round."""
    pull: NonNegativeFloat = 1.0
    """Weight of the distance between a record's features and its class's global prototype (lambda)."""
    participation: Participation = 1.0
    """Share of the clients asked in each round, drawn anew each time."""
    weighting: Weighting = "uniform"
    """Weights of a class's clients in its prototype: all alike, as in the authors' code, or by their records of it."""

    @override
    def own(self, model: nn.Module) -> frozenset[str]:
        return frozenset(state(model))  # a client keeps its whole model

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # stands for the clients' models in `evaluate`; nothing of it is shared
        width = models.feature_width(model, fed.like.shape)
        counts = torch.zeros(fed.num_classes, dtype=torch.int64)
        known = {"means": torch.zeros(fed.num_classes, width), "counts": counts}  # global prototypes
        for round in fed.rounds(self.rounds, known):
            asked = sample(fed, self.participation, round)
            replies = fed.ask(self.update, to=asked, exactly={"features": width}, known=Prototypes(**known))
            load(known, global_prototypes(known, replies, self.weighting))
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, known: Prototypes) -> Prototypes:
        """LocalUpdate(i, C): E epochs on CE + lambda L_R from the client's own model; then its prototypes C_i."""
        model = self.personal_model(client, {})
        both = models.FeaturesAndLogits(model)
        targets, pulls = known.means.to(client.device), (known.counts > 0).to(client.device)

        def loss(output: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
            features, logits = output
            distance = ((features - targets[y]).square() * pulls[y][:, None]).mean()  # L_R; 0 for an unknown class
            return cross_entropy(logits, y) + self.pull * distance

        self.local.fit(both, client.train, client.rng("batches"), loss=loss)
        client.state |= own_part(self, model)
        features = torch.cat(outputs(both, client.train, of=lambda x: both(x)[0]))
        counts = client.train.class_counts()
        sums = features.new_zeros(len(counts), features.shape[1]).index_add_(0, client.train.labels, features)
        return Prototypes(means=sums / counts.clamp_min(1)[:, None], counts=counts)


def global_prototypes(
    known: dict[str, Tensor], replies: Iterable[Prototypes], weighting: Weighting
) -> dict[str, Tensor]:
    """The weighted mean of the clients' prototypes of each class; of a class that nobody has, the one ``known``."""
    sums = known["means"].new_zeros(known["means"].shape, dtype=torch.float64)
    total, counts = sums.new_zeros(len(sums)), torch.zeros_like(known["counts"])
    for reply in replies:
        weight = reply.counts.double() if weighting == "records" else (reply.counts > 0).double()
        sums += weight[:, None] * reply.means
        total += weight
        counts += reply.counts
    means = torch.where(total[:, None] > 0, sums / total.clamp_min(1)[:, None], known["means"].double())
    return {"means": means, "counts": torch.where(total > 0, counts, known["counts"])}

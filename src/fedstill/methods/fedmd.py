"""FedMD: clients with models of their own learn from the mean of all clients' logits on public images.

Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019 (arXiv:1910.03581), Algorithm 1.

Differs from the paper (docs/methods/fedmd.md has the whole list):

* trainings have a fixed number of epochs, and Adam begins anew in each; the authors' code stops the first two early by
  test records and keeps Adam from round to round;
* public classes have a classifier of their own, which is dropped after the transfer;
* each client is evaluated on its own test records.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float32
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import l1_loss
from typing_extensions import override

from fedstill.base.records import Examples, Records
from fedstill.base.seeds import draw_seed, stream
from fedstill.evaluation import outputs
from fedstill.protocol import (
    Client,
    Count,
    Federation,
    Method,
    Public,
    Reply,
    load_own,
    own_part,
    public_images,
    state,
    step,
)
from fedstill.train.extractor import learn_public_classes
from fedstill.train.sgd import Adam

Draw = Annotated[NonNegativeInt, Public()]


class TrainedModel(Reply):
    """The end of a client's training."""

    num_records: Count


class Scores(Reply):
    """A client's logits for the round's public images."""

    logits: Float32[Tensor, "images classes"]


class FedMD(Method):
    """Personal models of any architecture that agree on public images."""

    personal: ClassVar[bool] = True
    mixed: ClassVar[bool] = True
    needs_public: ClassVar[str] = "labelled"
    rounds: PositiveInt = 20
    """Communication rounds (P)."""
    pretrain: Literal["labels", "none"] = "labels"
    """First training of a client's model: on the public records with their labels, or none, for images without any."""
    transfer: Adam = Adam(batch_size=128, epochs=20)
    """A client's training on the public records, before the rounds."""
    local: Adam = Adam(batch_size=32, epochs=25)
    """A client's training on its own records after that, before the rounds."""
    images: PositiveInt = 5000
    """Public images of one round (|d_j|), drawn anew each time; all of them if there are fewer."""
    digest: Adam = Adam(batch_size=256, epochs=1)
    """A client's training towards the clients' mean logits in one round."""
    revisit: Adam = Adam(batch_size=32, epochs=2)
    """A client's training on its own records in one round."""

    @override
    def own(self, model: nn.Module) -> frozenset[str]:
        return frozenset(state(model))  # a client keeps its whole model

    @override
    def server(self, fed: Federation) -> nn.Module:
        public, model = public_images(fed.public, "fedmd"), fed.new_model()  # stands for the clients' in `evaluate`
        if self.pretrain == "labels" and public.num_classes < 2:
            raise ValueError(
                "fedmd begins with the labels of the public records, which have none; name some with labels, or take "
                "--pretrain none"
            )
        fed.ask(self.begin)
        count = min(self.images, len(public))
        for round in fed.rounds(self.rounds):
            draw = draw_seed(fed.rng("public images", round.number))  # d_j, a random subset of D_0
            consensus = mean_logits(fed.ask(self.communicate, exactly={"images": count}, draw=draw))  # f~(x_i^0)
            fed.ask(self.learn, draw=draw, consensus=consensus)
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def begin(self, client: Client) -> TrainedModel:
        """Transfer learning: train f_k on the public D_0 and then on the client's D_k."""
        return self._stored(client, self._first(client))

    @step
    def communicate(self, client: Client, draw: Draw) -> Scores:
        """Compute the class scores f_k(x_i^0) of the round's public images."""
        model = self._current(client)
        return Scores(logits=torch.cat(outputs(model, self.drawn(client, draw))))

    @step
    def learn(self, client: Client, draw: Draw, consensus: Float32[Tensor, "images classes"]) -> TrainedModel:
        """Digest: train f_k towards the consensus. Revisit: train f_k on D_k."""
        model = self._current(client)
        targets = Examples(self.drawn(client, draw), consensus.to(client.device))
        self.digest.fit(model, targets, client.rng("digest"), loss=score_distance)
        self.revisit.fit(model, client.train, client.rng("revisit"))
        return self._stored(client, model)

    @override
    def personal_model(self, client: Client, shared: Mapping[str, Tensor]) -> nn.Module:
        model = client.new_model(draw=1 + client.id, architecture=client.architecture)
        load_own(self, model, client.state)
        return model

    def _first(self, client: Client) -> nn.Module:
        model = self.personal_model(client, {})
        if self.pretrain == "labels":
            learn_public_classes(model, public_images(client.public, "fedmd"), self.transfer, client.rng("transfer"))
        self.local.fit(model, client.train, client.rng("local"))
        return model

    def _current(self, client: Client) -> nn.Module:
        """The client's model; one that missed the beginning is trained now, as a random one would spoil the mean."""
        if not client.state:
            self._stored(client, self._first(client))
        return self.personal_model(client, {})

    def _stored(self, client: Client, model: nn.Module) -> TrainedModel:
        client.state |= own_part(self, model)
        return TrainedModel(num_records=len(client.train))

    def drawn(self, client: Client, draw: int) -> Records:
        """The public images of a round: the same for all who know its number ``draw``."""
        public = public_images(client.public, "fedmd")
        order = torch.randperm(len(public), generator=stream(draw, "public images"))
        return public[order[: self.images].to(public.labels.device)]


def mean_logits(replies: Iterable[Scores]) -> Float32[Tensor, "images classes"]:
    """The plain mean of the clients' logits: the consensus with c_k = 1/m."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for reply in replies:
        total, count = total + reply.logits.double(), count + 1
    return (total / count).float()


def score_distance(logits: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    """``mean_ij |f_k(x_i)_j - f~(x_i)_j|``, as in the authors' code; the paper only says "to approach"."""
    return l1_loss(logits, targets)

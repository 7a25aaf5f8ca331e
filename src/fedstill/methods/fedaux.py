"""FedAUX: rounds of federated averaging, each followed by distillation with certainty weights.

Sattler, Korjakow, Rischke, Samek, "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning", 2021
(arXiv:2102.02514), Algorithm 1.

Differs from the paper (docs/methods/fedaux.md has the whole list):

* the scores are sound by default (as in `fedstill.methods.fedauxfdp`) and released once, before the rounds; the models
  leave without protection, so the guarantee is "none" whatever the scores cost;
* negatives and distillation images are disjoint; everything predicts in eval mode; buffers are averaged like weights.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float32
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from fedstill.distill.ensemble import Ensemble
from fedstill.evaluate import outputs
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.distillation import FLOOR, DistillingMethod, ScoreTraining, split_public
from fedstill.methods.heads import Mean, Projection, Space, Weights, needed, space
from fedstill.privacy.logistic import logits
from fedstill.protocol import Client, Federation, Public, Records, Released, Reply, State, load, state, step
from fedstill.train.adam import Adam

Number = Annotated[NonNegativeInt, Public()]


class Score(Reply):
    """A private score head, and whose."""

    client: Number
    score: Released[Float32[Tensor, " coefficients"]]


class Update(Reply):
    """A client's model after its local training."""

    client: Number
    weights: State


class FedAUX(DistillingMethod):
    """Averaging and weighted distillation, round after round, from a pretrained network."""

    runs_model: ClassVar[bool] = True

    rounds: PositiveInt = 20
    """Communication rounds after the scores."""
    local: Adam = Adam()
    """A client's training in one round."""
    scores: ScoreTraining = ScoreTraining()
    """The heads behind the weights; they have the budget to themselves, whatever their share."""

    def server(self, fed: Federation) -> nn.Module:
        """Scores once; then train, average and distil."""
        here = space(fed, self.extractor, self.space, "fedaux")  # h_0
        public = needed(fed.public, "fedaux")
        images = public[split_public(public, self.negatives)[0]]
        model = fed.new_model()
        load(model, here.weights)
        rows = here.rows(model, images)
        certainty = {
            r.client: logits(r.score.value.to(rows), rows, self.scale(here), self.head.bias).sigmoid().float() + FLOOR
            for r in fed.ask(self.train_score, exactly=here.exactly, **here.payload)
            if r.client in fed.clients  # a reply may claim any number
        }
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(self.update, to=sorted(certainty), weights=state(model))
            load(model, weighted_mean((1, r.weights) for r in replies))
            ensemble = Ensemble(self.distillation.outputs)
            for number, said in self._teachers(fed, replies, images):
                if number in certainty:
                    ensemble.add(said, certainty[number])
            self.distillation.distil(model, images, ensemble.targets(), fed.rng("distillation", round.number))
            round.log(accuracy=fed.evaluate(model))
        return model

    def _teachers(
        self, fed: Federation, replies: Sequence[Update], images: Records
    ) -> Iterator[tuple[int, Float32[Tensor, "n classes"]]]:
        teacher = fed.new_model()
        for reply in replies:
            load(teacher, reply.weights)
            yield reply.client, torch.cat(outputs(teacher, images))

    @step
    def train_score(self, client: Client, weights: Weights, mean: Mean, projection: Projection, radius: float) -> Score:
        """alpha_k, private."""
        here = Space(weights, mean, projection, radius)
        model = client.new_model(weights)
        rows = here.rows(model, client.train)
        return Score(client=client.id, score=self.score_head(client, here, model, rows, self.scores.penalty))

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Local training from the server's model."""
        model = client.new_model(weights)
        self.local.fit(model, client.train, client.rng("batches"))
        return Update(client=client.id, weights=state(model))

"""FedAUX: rounds of federated averaging, each followed by distillation with certainty weights.

Sattler, Korjakow, Rischke, Samek, "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning", 2021
(arXiv:2102.02514), Algorithm 1.

Differs from the paper (docs/methods/fedaux.md has the whole list):

* the scores are sound by default (as in `fedstill.methods.fedauxfdp`) and released once, before the rounds; the models
  are sent without protection, so the guarantee is "none" whatever the scores cost;
* negatives and distillation images are disjoint; all predictions are in eval mode; buffers are averaged like weights.
"""

from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float32
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.weights import load, state
from fedstill.distill.ensemble import Ensemble
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.evaluation import outputs
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.parts.distillation import FLOOR, HeadDistillation, ScoreTraining, negative_rows
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.private_heads import PrivateHeads, head_inputs, score_head
from fedstill.protocol import Client, Federation, Method, Public, Released, Reply, State, public_images, step
from fedstill.train.sgd import Adam

Number = Annotated[NonNegativeInt, Public()]


class Score(Reply):
    """A private score head and its client's number."""

    client: Number
    score: Released[Float32[Tensor, " coefficients"]]


class Update(Reply):
    """A client's model after its local training."""

    client: Number
    weights: State


class FedAUX(HeadDistillation, PrivateHeads, Method):
    """Rounds of averaging and weighted distillation, from a pretrained network."""

    rebuilds: ClassVar[bool] = False  # the final network is the run's own
    protects: ClassVar[str] = ""
    rounds: PositiveInt = 20
    """Communication rounds after the scores."""
    local: Adam = Adam()
    """A client's training in one round."""
    scores: ScoreTraining = ScoreTraining()
    """Training of the certainty-score heads. They use the whole privacy budget; ``share`` is ignored."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        public = public_images(fed.public, "fedaux")
        features = public_features(fed, self, "fedaux")  # h_0
        images = public[split_public(public, self.negatives)[0]]  # D_distill
        model, teacher = fed.new_model(), fed.new_model()
        load(model, features.weights)
        x = head_inputs(features.rows(model, images), features, self)  # h_0(x)
        certainty = {
            r.client: (x @ r.score.value.to(x)).sigmoid().float() + FLOOR  # s_k(x)
            for r in fed.ask(self.train_score, exactly=features.exactly, features=features)  # alpha_k
        }
        for round in fed.rounds(self.rounds, model):
            replies = fed.ask(self.update, to=sorted(certainty), weights=state(model))
            load(model, weighted_mean((1, r.weights) for r in replies))
            ensemble = Ensemble(self.distillation.outputs)
            for reply in replies:
                if reply.client in certainty:
                    load(teacher, reply.weights)
                    ensemble.add(torch.cat(outputs(teacher, images)), certainty[reply.client])  # f_k(x)
            self.distillation.distil(model, images, ensemble.targets(), fed.rng("distillation", round.number))
            round.log(accuracy=fed.evaluate(model))
        return model

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return *super().first_reply, self.scores, self.negatives

    @step
    def train_score(self, client: Client, features: PublicFeatures) -> Score:
        """Train alpha_k with noise, the score head: the client's records against the negatives."""
        model = client.new_model(features.weights)
        rows = features.rows(model, client.train)  # h_0(x), x in D_k
        negatives = negative_rows(client, features, model, self.negatives, "fedaux")  # h_0(x), x in D^-
        alpha = client.release(score_head(client, features, self, negatives, self.scores.penalty), rows)
        return Score(client=client.id, score=alpha.map(Tensor.float))

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Train from the server's model."""
        model = client.new_model(weights)
        self.local.fit(model, client.train, client.rng("batches"))
        return Update(client=client.id, weights=state(model))

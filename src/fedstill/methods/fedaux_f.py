"""FedAUX+F: FedAUX with a frozen extractor, class heads without noise and certainty scores with noise.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 5.

Differs from the paper (docs/methods/fedaux-f.md has the whole list): as `fedstill.methods.fedauxfdp`; the class heads
are sent without protection, so the guarantee is "none" whatever the scores cost.
"""

from typing import Any, ClassVar

from jaxtyping import Float32
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.distill.ensemble import Ensemble
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.methods.parts.distillation import (
    FLOOR,
    HeadDistillation,
    ScoreTraining,
    distil_student,
    initial_student,
    negative_rows,
)
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.private_heads import PrivateHeads, head_inputs, score_head
from fedstill.models.heads import LinearHead
from fedstill.protocol import Client, Federation, Method, Released, Reply, public_images, step
from fedstill.train.sgd import Adam


class OpenHead(Reply):
    """An unprotected class head, which may reveal anything about the records, and a private score head."""

    head: Float32[Tensor, "classes coefficients"]
    score: Released[Float32[Tensor, " coefficients"]]


class FedAUXF(HeadDistillation, PrivateHeads, Method):
    """FedAUXfdp with unprotected class heads, trained by Adam."""

    protects: ClassVar[str] = ""
    local: Adam = Adam(epochs=40)
    """A client's training of its class head."""
    scores: ScoreTraining = ScoreTraining()
    """Training of the certainty-score heads. They use the whole privacy budget; ``share`` is ignored."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        public = public_images(fed.public, "fedaux-f")
        features = public_features(fed, self, "fedaux-f")  # h_0
        replies = fed.ask(self.train_open, exactly=features.exactly, features=features)  # beta_k, alpha_k
        student = initial_student(fed, features, (r.head for r in replies), self, self.student)
        images = public[split_public(public, self.negatives)[0]]  # D_distill
        x = head_inputs(features.rows(student.trunk, images), features, self)  # h_0(x)
        ensemble = Ensemble(self.distillation.outputs)
        for reply in replies:
            certainty = (x @ reply.score.value.to(x)).sigmoid() + FLOOR  # s_k(x)
            ensemble.add(x @ reply.head.to(x).T, certainty)  # f_k(x)
        return distil_student(fed, student, images, x, ensemble.targets(), self.distillation)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return *super().first_reply, self.local, self.scores, self.negatives

    @step
    def train_open(self, client: Client, features: PublicFeatures) -> OpenHead:
        """Train beta_k by Adam on the frozen extractor, without protection, and alpha_k with noise."""
        model = client.new_model(features.weights)
        rows = features.rows(model, client.train)  # h_0(x), x in D_k
        x = head_inputs(rows, features, self).float()
        beta = LinearHead(x.new_zeros(client.train.num_classes, x.shape[1]))
        self.local.fit(beta, Examples(x, client.train.labels), client.rng("batches"))
        negatives = negative_rows(client, features, model, self.negatives, "fedaux-f")  # h_0(x), x in D^-
        alpha = client.release(score_head(client, features, self, negatives, self.scores.penalty), rows)
        return OpenHead(head=beta.weight.detach(), score=alpha.map(Tensor.float))

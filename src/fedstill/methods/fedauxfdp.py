"""FedAUXfdp: one upload of two private heads, distilled with certainty weights on public images.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), Algorithm 1.

Differs from the paper (docs/methods/fedauxfdp.md has the whole list):

* ``privacy="sound"`` (the default): the sum of losses with a fixed public penalty, rows clipped to a public radius, a
  penalised bias, a public class list, the analytic Gaussian, and one budget for both heads. "published" takes the
  paper's heads; the guarantee then says why their claim does not hold;
* negatives and distillation images are disjoint (FedAUX's code also distils on 80 % of the negatives);
* heads see whitened public features; the student starts from the mean head unless ``student="fresh"``;
* all predictions are in eval mode, so that none depends on its batch.
"""

from typing import Any

from jaxtyping import Float32
from torch import Tensor, nn
from typing_extensions import override

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
from fedstill.methods.parts.private_heads import PrivateHeads, class_head, head_inputs, score_head
from fedstill.protocol import Client, Federation, Method, Released, Reply, public_images, step


class TwoHeads(Reply):
    """A private class head, and a private head that tells the client's records from public ones."""

    head: Released[Float32[Tensor, "classes coefficients"]]
    score: Released[Float32[Tensor, " coefficients"]]


class FedAUXfdp(HeadDistillation, PrivateHeads, Method):
    """A student of the private heads; on each image, a head's weight is its client's certainty score."""

    scores: ScoreTraining = ScoreTraining()
    """Training of the certainty-score heads."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        public = public_images(fed.public, "fedauxfdp")
        features = public_features(fed, self, "fedauxfdp")  # h_0, pretrained on public images
        replies = fed.ask(self.train_heads, exactly=features.exactly, features=features)  # beta_k, alpha_k
        student = initial_student(fed, features, (r.head.value for r in replies), self, self.student)
        images = public[split_public(public, self.negatives)[0]]  # D_distill
        x = head_inputs(features.rows(student.trunk, images), features, self)  # h_0(x)
        ensemble = Ensemble(self.distillation.outputs)
        for reply in replies:
            certainty = (x @ reply.score.value.to(x)).sigmoid() + FLOOR  # s_k(x)
            ensemble.add(x @ reply.head.value.to(x).T, certainty)  # f_k(x)
        targets = ensemble.targets()  # softmax(sum_k s_k(x) f_k(x) / sum_k s_k(x))
        return distil_student(fed, student, images, x, targets, self.distillation)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return *super().first_reply, self.scores, self.negatives

    @step
    def train_heads(self, client: Client, features: PublicFeatures) -> TwoHeads:
        """Train beta_k on the client's classes and alpha_k against the negatives, with noise, within one budget."""
        model, share = client.new_model(features.weights), self.scores.share
        rows = features.rows(model, client.train)  # h_0(x), x in D_k
        negatives = negative_rows(client, features, model, self.negatives, "fedauxfdp")  # h_0(x), x in D^-
        classes = class_head(client, features, self, 1 - share)
        scores = score_head(client, features, self, negatives, self.scores.penalty, share)
        beta = client.release(classes, (rows, client.train.labels))
        alpha = client.release(scores, rows)
        return TwoHeads(head=beta.map(Tensor.float), score=alpha.map(Tensor.float))

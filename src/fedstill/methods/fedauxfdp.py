"""FedAUXfdp: one upload of two private heads, distilled with certainty weights on public images.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), Algorithm 1.

Differs from the paper (docs/methods/fedauxfdp.md has the whole list):

* ``privacy="sound"`` (the default): a fixed public penalty beside the sum of losses, rows clipped to a public radius, a
  penalised bias, a public class list, the analytic Gaussian, and one budget for both heads. "published" takes the
  paper's heads, whose printed guarantee says why they don't hold;
* negatives and distillation images are disjoint (in FedAUX's code 80 % of the negatives are distilled on too);
* heads see public features after a public whitening; the student starts from the mean head unless ``student="fresh"``;
* everything predicts in eval mode, so that no prediction depends on its batch.
"""

from jaxtyping import Float32
from torch import Tensor, nn

from fedstill.methods.distillation import DistillingMethod, ScoreTraining
from fedstill.methods.heads import Head, Mean, Projection, Space, Weights, space
from fedstill.protocol import Client, Federation, Released, step


class TwoHeads(Head):
    """A class head, and a head that tells the client's records from public ones."""

    score: Released[Float32[Tensor, " coefficients"]]


class FedAUXfdp(DistillingMethod):
    """A student of the private heads, each weighted by how sure it is that an image is like its client's records."""

    scores: ScoreTraining = ScoreTraining()
    """The heads behind the weights."""

    def server(self, fed: Federation) -> nn.Module:
        """Send the extractor, distil the weighted heads into one network."""
        here = space(fed, self.extractor, self.space, "fedauxfdp")  # h_0
        replies = fed.ask(self.train_heads, exactly=here.exactly, **here.payload)  # beta_k, alpha_k
        model = self.begin(fed, here, (r.head.value for r in replies))
        return self.distil(fed, here, model, ((r.head.value, r.score.value) for r in replies))

    @step
    def train_heads(
        self, client: Client, weights: Weights, mean: Mean, projection: Projection, radius: float
    ) -> TwoHeads:
        """Both heads of the client, within one budget."""
        here, share = Space(weights, mean, projection, radius), self.scores.share
        model = client.new_model(weights)
        rows = here.rows(model, client.train)
        return TwoHeads(
            head=self.class_head(client, here, rows, 1 - share),
            score=self.score_head(client, here, model, rows, self.scores.penalty, share),
        )

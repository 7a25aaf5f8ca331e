"""FedAUX+F: FedAUX with a frozen extractor: class heads without noise, certainty scores with it.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 4.

Differs from the paper (docs/methods/fedaux-f.md has the whole list): as `fedstill.methods.fedauxfdp`; the class heads
leave without protection, so the guarantee is "none" whatever the scores cost.
"""

from jaxtyping import Float32
from torch import Tensor, nn

from fedstill.methods.distillation import DistillingMethod, ScoreTraining
from fedstill.methods.heads import LinearHead, Mean, Projection, Rows, Space, Weights, space
from fedstill.privacy.logistic import extend
from fedstill.protocol import Client, Federation, Released, Reply, step
from fedstill.train.adam import Adam


class OpenHead(Reply):
    """A class head as it was trained, which may tell anything, and a private score head."""

    head: Float32[Tensor, "classes coefficients"]
    score: Released[Float32[Tensor, " coefficients"]]


class FedAUXF(DistillingMethod):
    """FedAUXfdp without its protection of the class heads, which Adam trains."""

    local: Adam = Adam(epochs=40)
    """A client's training of its class head."""
    scores: ScoreTraining = ScoreTraining()
    """The heads behind the weights; they have the budget to themselves, whatever their share."""

    def server(self, fed: Federation) -> nn.Module:
        """Send the extractor, distil the weighted heads into one network."""
        here = space(fed, self.extractor, self.space, "fedaux-f")  # h_0
        replies = fed.ask(self.train_open, exactly=here.exactly, **here.payload)  # beta_k, alpha_k
        model = self.begin(fed, here, (r.head for r in replies))
        return self.distil(fed, here, model, ((r.head, r.score.value) for r in replies))

    @step
    def train_open(
        self, client: Client, weights: Weights, mean: Mean, projection: Projection, radius: float
    ) -> OpenHead:
        """beta_k by Adam on the frozen extractor; alpha_k private."""
        here = Space(weights, mean, projection, radius)
        model = client.new_model(weights)
        rows = here.rows(model, client.train)
        x = extend(rows, self.scale(here), self.head.bias).float()
        head = LinearHead(x.new_zeros(client.train.num_classes, x.shape[1]))
        self.local.fit(head, Rows(x, client.train.labels), client.rng("batches"))
        score = self.score_head(client, here, model, rows, self.scores.penalty)
        return OpenHead(head=head.weight.detach().cpu(), score=score)

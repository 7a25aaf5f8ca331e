"""FedAVG+P: the mean of private heads on a public extractor; the first baseline of FedAUXfdp.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 5.

Differs from the paper (docs/methods/fedavg-p.md has the whole list):

* ``privacy="sound"`` (the default) takes heads whose noise a theorem covers; "published" takes the paper's;
* heads see whitened public features, so that clipping and penalty act on the directions that separate classes.
"""

from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.methods.parts.private_heads import Head, PrivateHeads, class_head, mean_head
from fedstill.protocol import Client, Federation, Method, step


class FedAvgP(PrivateHeads, Method):
    """The plain mean of private heads on public features; no training at the server."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedavg-p")  # h_0
        replies = fed.ask(self.train_head, exactly=features.exactly, features=features)  # beta_k
        return head_model(fed, features, mean_head(r.head.value for r in replies), self)

    @step
    def train_head(self, client: Client, features: PublicFeatures) -> Head:
        """Train beta_k = argmin sum CE + Lambda/2 |beta|^2, and add noise."""
        rows = features.rows(client.new_model(features.weights), client.train)  # h_0(x), x in D_k
        beta = client.release(class_head(client, features, self), (rows, client.train.labels))
        return Head(head=beta.map(Tensor.float))

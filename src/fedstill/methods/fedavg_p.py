"""FedAVG+P: the mean of private heads on a public extractor; the first baseline of FedAUXfdp.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 5.

Differs from the paper (docs/methods/fedavg-p.md has the whole list):

* ``privacy="sound"`` (the default) takes heads whose noise a theorem covers; "published" takes the paper's;
* heads see whitened public features, so that clipping and penalty act on the directions that separate classes.
"""

from torch import nn
from typing_extensions import override

from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.methods.parts.private_heads import HeadToSum, PrivateHeads, mean_of_sum, release_head
from fedstill.protocol import Client, Federation, Method, step


class FedAvgP(PrivateHeads, Method):
    """The plain mean of private heads on public features; no training at the server."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedavg-p")  # h_0
        if fed.masked and not self.sound:
            raise ValueError("privacy is 'published', whose heads are no whole numbers to mask; use --sums open")
        heads = fed.sum(self.train_head, exactly=features.exactly, features=features)  # sum_k beta_k
        return head_model(fed, features, mean_of_sum(fed, heads, features, self), self)

    @step
    def train_head(self, client: Client, features: PublicFeatures) -> HeadToSum:
        """Train beta_k = argmin sum CE + Lambda/2 |beta|^2, and add noise."""
        rows = features.rows(client.new_model(features.weights), client.train)  # h_0(x), x in D_k
        return release_head(client, rows, features, self)

"""FedAVG+P: the mean of private heads on a public extractor; the first baseline of FedAUXfdp.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 4.

Differs from the paper (docs/methods/fedavg-p.md has the whole list):

* ``privacy="sound"`` (the default) takes heads whose noise a theorem covers; "published" takes the paper's;
* heads see public features after a public whitening, so that clipping and penalty act on what tells classes apart.
"""

from torch import nn

from fedstill.methods.heads import HeadMethod, final, mean_head, space
from fedstill.protocol import Federation


class FedAvgP(HeadMethod):
    """The plain mean of private heads on public features; no training at the server."""

    def server(self, fed: Federation) -> nn.Module:
        """Send the extractor, average the heads."""
        here = space(fed, self.extractor, self.space, "fedavg-p")  # h_0
        replies = fed.ask(self.train_head, exactly=here.exactly, **here.payload)  # beta_k
        return final(fed, here, mean_head(r.head.value for r in replies), self.head.bias, self.published)

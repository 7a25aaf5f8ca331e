"""FedD+P: private heads on a public extractor, distilled with equal weights; the second baseline of FedAUXfdp.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 4.

Differs from the paper (docs/methods/fedd-p.md has the whole list): as `fedstill.methods.fedavg_p`, and the student
starts from the mean of the heads unless ``student="fresh"``.
"""

from torch import nn

from fedstill.methods.distillation import DistillingMethod
from fedstill.methods.heads import space
from fedstill.protocol import Federation


class FedDP(DistillingMethod):
    """A student of the private heads, all of equal weight, on public images."""

    def server(self, fed: Federation) -> nn.Module:
        """Send the extractor, distil the heads into one network."""
        here = space(fed, self.extractor, self.space, "fedd-p")  # h_0
        replies = fed.ask(self.train_head, exactly=here.exactly, **here.payload)  # beta_k
        model = self.begin(fed, here, (r.head.value for r in replies))
        return self.distil(fed, here, model, ((r.head.value, None) for r in replies))

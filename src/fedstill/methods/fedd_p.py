"""FedD+P: private heads on a public extractor, distilled with equal weights; the second baseline of FedAUXfdp.

Hoech, Rischke, Mueller, Samek, "FedAUXfdp: Differentially Private One-Shot Federated Distillation", 2022
(arXiv:2205.14960), section 5.

Differs from the paper (docs/methods/fedd-p.md has the whole list): as `fedstill.methods.fedavg_p`, and the student
starts from the mean of the heads unless ``student="fresh"``.
"""

from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.ensemble import Ensemble
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.methods.parts.distillation import HeadDistillation, distil_student, initial_student
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.private_heads import Head, PrivateHeads, class_head, head_inputs
from fedstill.protocol import Client, Federation, Method, public_images, step


class FedDP(HeadDistillation, PrivateHeads, Method):
    """A student of the private heads, with equal weights, on public images."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        public = public_images(fed.public, "fedd-p")
        features = public_features(fed, self, "fedd-p")  # h_0
        replies = fed.ask(self.train_head, exactly=features.exactly, features=features)  # beta_k
        student = initial_student(fed, features, (r.head.value for r in replies), self, self.student)
        images = public[split_public(public, self.negatives)[0]]
        x = head_inputs(features.rows(student.trunk, images), features, self)  # h_0(x)
        ensemble = Ensemble(self.distillation.outputs)
        for reply in replies:
            ensemble.add(x @ reply.head.value.to(x).T)  # f_k(x)
        return distil_student(fed, student, images, x, ensemble.targets(), self.distillation)

    @step
    def train_head(self, client: Client, features: PublicFeatures) -> Head:
        """Train beta_k = argmin sum CE + Lambda/2 |beta|^2, and add noise."""
        rows = features.rows(client.new_model(features.weights), client.train)  # h_0(x), x in D_k
        beta = client.release(class_head(client, features, self), (rows, client.train.labels))
        return Head(head=beta.map(Tensor.float))

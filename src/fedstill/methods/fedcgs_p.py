"""FedCGS's personal form: clients train models of their own, with features near the global class means.

Guan, Zhou, Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025 (arXiv:2503.06962), the
part on personalised heterogeneous clients.

Differs from the paper (docs/methods/fedcgs-p.md has the whole list):

* means and distances are those of the public map's rows, which are whitened and clipped, unless ``space.whiten`` is
  false;
* clients send what they send for FedCGS, one Gaussian release by default; the means need a part of it only.
"""

from contextlib import suppress
from typing import ClassVar

from jaxtyping import Float32
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill import models
from fedstill.base.errors import Diverged
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts import gaussians
from fedstill.methods.parts.feature_sums import add_up
from fedstill.methods.parts.moments import MomentSums, Sums, release_moments, sizes
from fedstill.methods.parts.on_features import public_features
from fedstill.privacy.logistic import extend
from fedstill.protocol import Client, Federation, Method, Reply, load, own_part, state, step
from fedstill.train.sgd import SGD

Means = Float32[Tensor, "classes dims"]


class Personalised(Reply):
    """An empty reply: the model stays at the client."""


class FedCGSP(MomentSums, Method):
    """Personal models from a public extractor, pulled to the global class means of its features."""

    rebuilds: ClassVar[bool] = False  # the final network is the run's own
    personal: ClassVar[bool] = True
    local: SGD = SGD()
    """A client's training of its own model."""
    pull: NonNegativeFloat = 1.0
    """Weight of the squared distance between a record's row and its class's global mean (lambda)."""

    @override
    def own(self, model: nn.Module) -> frozenset[str]:
        return frozenset(state(model))  # a client keeps its whole model

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedcgs-p")
        sums = fed.sum(self.sum_up, exactly=sizes(fed, features, self), features=features)  # A_k, N_k
        classes = gaussians.classes_of(add_up(sums, self, fed.delta, fed.device))
        means = (classes.means * classes.present[:, None]).float().cpu()  # mu_c; 0 for a class without records
        fed.ask(self.personalise, features=features, means=means)
        model = fed.new_model()  # stands for the clients' models in `evaluate`
        load(model, features.weights)
        return model

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> Sums:
        """Release the class sums, the sums of products and the counts."""
        return release_moments(client, features, self)

    @step
    def personalise(self, client: Client, features: PublicFeatures, means: Means) -> Personalised:
        """Train the client's model on CE + lambda |r(x) - mu_y|^2, from the public extractor."""
        model = client.new_model(features.weights)
        client.state |= own_part(self, model)
        targets = means.to(client.device)
        known = targets.norm(dim=1) > 0
        mean, projection = features.mean.to(client.device), features.projection.to(client.device)

        def loss(output: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
            rows = extend((output[0] - mean) @ projection, features.radius, self.bias)[:, :-1].float()
            distance = ((rows - targets[y]).square().sum(1) * known[y]).mean()  # 0 for an unknown class
            total: Tensor = cross_entropy(output[1], y) + self.pull * distance
            return total

        with suppress(Diverged):  # an error would reveal something about the records; the extractor stays
            self.local.fit(models.FeaturesAndLogits(model), client.train, client.rng("batches"), loss=loss)
            client.state |= own_part(self, model)
        return Personalised()

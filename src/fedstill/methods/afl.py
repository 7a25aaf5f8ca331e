"""AFL, analytic federated learning: one upload, and the least-squares head of all clients' records in closed form.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
Pre-trained Models", CVPR 2025 (arXiv:2405.16240), Algorithm 1.

Differs from the paper (docs/methods/afl.md has the whole list):

* clients send the sums C_k = X_k^T X_k and X_k^T Y_k in place of C_k + gamma I and their own heads: the paper's
  aggregation law and its removal of gamma give the same head from either;
* a small ridge stays, and more of it under noise;
* scores have a temperature, so that their softmax is near to probabilities;
* one Gaussian release by default; features are whitened and clipped with public numbers.
"""

from typing import ClassVar

from jaxtyping import Float64
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.feature_sums import Spectrum, Total, add_up, solve
from fedstill.methods.parts.moments import MomentSums, Sums, release_moments, sizes
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.methods.parts.temperatures import tempered
from fedstill.protocol import Client, Federation, Method, step


class AFL(MomentSums, Method):
    """One upload of sums; the server solves for the least-squares head of all records."""

    numeric: ClassVar[bool] = True
    ridge: PositiveFloat = 1.0
    """Multiple of the identity added to the sums of products of all clients (lambda)."""
    noise_ridge: NonNegativeFloat = 0.7
    """More of it, as a multiple of the largest eigenvalue that the noise is expected to have."""
    spectrum: Spectrum = "clamped"
    """Eigenvalues of the noisy sums of products: negative ones count as 0, or the noise's spread is undone."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "afl")
        sums = fed.sum(self.sum_up, exactly=sizes(fed, features, self), features=features)  # C_k, X_k^T Y_k
        total = add_up(sums, self, fed.delta, fed.device)
        return head_model(fed, features, tempered(self.head(total), total, self.damping(total)), self)

    def head(self, total: Total) -> Float64[Tensor, "classes p"]:
        """W^T with ``W = (sum_k C_k + lambda I)^-1 sum_k X_k^T Y_k``; of a number, Y is less its mean."""
        products, mean = total.matrix(), total.middle
        right = total.first.T - mean * products[:, -1:] / total.bias
        head = solve(products, right, self.damping(total), noise=total.noise, spectrum=self.spectrum).T
        head[:, -1] += mean / total.bias
        return head

    def damping(self, total: Total) -> float:
        """The multiple of the identity, lambda, with what the noise in the sums adds to it."""
        return self.ridge + self.noise_ridge * total.noise

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> Sums:
        """Release C_k and X_k^T Y_k."""
        return release_moments(client, features, self)

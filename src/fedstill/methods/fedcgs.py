"""FedCGS: one upload of feature statistics, and the Gaussian classifier of all clients' records in closed form.

Guan, Zhou, Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025 (arXiv:2503.06962).

Differs from the paper (docs/methods/fedcgs.md has the whole list):

* the covariance is that within classes, as in linear discriminant analysis; ``covariance="total"`` takes that of all
  records, as the authors' code;
* a small ridge, and more of it under noise;
* one Gaussian release by default, which includes the counts; features are whitened and clipped with public numbers.
"""

from typing import Literal

from jaxtyping import Float64
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts import gaussians
from fedstill.methods.parts.feature_sums import Spectrum, Total, add_up, solve
from fedstill.methods.parts.moments import MomentSums, Sums, release_moments, sizes
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.protocol import Client, Federation, Method, step


class FedCGS(MomentSums, Method):
    """One upload of sums; the server's head is the Gaussian classifier with one covariance for all classes."""

    covariance: Literal["within", "total"] = "within"
    """Covariance of the records around their class means, or around the mean of all, as in the authors' code."""
    ridge: NonNegativeFloat = 1e-5
    """Multiple of the identity added to the covariance of rows, whose length is at most 1."""
    noise_ridge: NonNegativeFloat = 0.5
    """More of it, as a multiple of the largest eigenvalue that the noise is expected to have."""
    spectrum: Spectrum = "clamped"
    """Eigenvalues of the noisy sums of products: negative ones count as 0, or the noise's spread is undone."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedcgs")
        sums = fed.sum(self.sum_up, exactly=sizes(fed, features, self), features=features)  # A_k, B_k, N_k
        total = add_up(sums, self, fed.delta, fed.device)
        return head_model(fed, features, self.head(total), self)

    def head(self, total: Total) -> Float64[Tensor, "classes p"]:
        """``w_c = Sigma^-1 mu_c`` and ``b_c = log(N_c / N) - mu_c^T Sigma^-1 mu_c / 2``."""
        classes = gaussians.classes_of(total)  # mu_c, N_c
        matrix = total.matrix()[:-1, :-1]
        sigma = classes.within(matrix) if self.covariance == "within" else classes.total(matrix)
        noise = total.noise / classes.size
        ridge = self.ridge + self.noise_ridge * total.noise / classes.size
        weights = solve(sigma, classes.means.T, ridge, noise=noise, spectrum=self.spectrum).T
        return gaussians.linear_head(weights, classes)

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> Sums:
        """Release the class sums A_k, the sums of products B_k and the counts N_k."""
        return release_moments(client, features, self)

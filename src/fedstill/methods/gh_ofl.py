"""GH-OFL: one upload of feature statistics, from which the server makes a Gaussian classifier: NB, LDA or QDA.

Turazza, Picone, Mamei, "The Gaussian-Head OFL Family: One-Shot Federated Learning from Client Global Statistics", ICLR
2026 (arXiv:2602.01186).

Differs from the paper (docs/methods/gh-ofl.md has the whole list):

* FisherMix is a linear head, as in the authors' code, but its samples have the covariance within all classes;
* Proto-Hyper is not here;
* naive Bayes takes its variances from the upload of LDA, so that one release serves both;
* one Gaussian release by default, which includes the counts; features are whitened and clipped with public numbers.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float64
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.settings import Share
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts import gaussians
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.gaussians import FisherMix
from fedstill.methods.parts.moments import MomentSums, Sums, release_moments, row_model, sizes
from fedstill.methods.parts.on_features import head_model, public_features
from fedstill.models.heads import Quadratic
from fedstill.protocol import Client, Federation, Method, step


class GHOFL(MomentSums, Method):
    """One upload of sums; the server's head is a Gaussian classifier of a kind to choose."""

    classifier: Literal["nb", "lda", "qda", "fisher-mix"] = "lda"
    """Covariances: one for all classes, diagonal (nb) or full (lda), or one for each class (qda), which takes as many
    times the bytes as there are classes; or a head trained on samples of lda's Gaussians (fisher-mix)."""
    fisher_mix: FisherMix = FisherMix()
    """Settings of --classifier fisher-mix."""
    shrinkage: Share = 0.05
    """Share of the identity, times the mean variance, in a covariance."""
    noise_ridge: NonNegativeFloat = 0.5
    """Multiple of the identity added to a covariance: of the largest eigenvalue that the noise is expected to have."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features, by_class = public_features(fed, self, "gh-ofl"), self.classifier == "qda"
        exactly = sizes(fed, features, self, by_class=by_class)
        sums = fed.sum(self.sum_up, exactly=exactly, features=features)  # A_k, N_k, B_k or S_k
        total = add_up(sums, self, fed.delta, fed.device)
        if self.classifier != "qda":
            head = self.trained_head(total, fed) if self.classifier == "fisher-mix" else self.head(total)
            return head_model(fed, features, head, self)
        return nn.Sequential(row_model(fed, features, self), self.quadratic(total).float().to(fed.device))

    def head(self, total: Total) -> Float64[Tensor, "classes p"]:
        """``w_c = Sigma^-1 mu_c`` and ``b_c = log(N_c / N) - mu_c^T Sigma^-1 mu_c / 2``."""
        classes, factor = self._classes(total)
        return gaussians.linear_head(classes.means @ factor @ factor.T, classes)

    def trained_head(self, total: Total, fed: Federation) -> Float64[Tensor, "classes p"]:
        """FisherMix: a head trained on samples of the classes' Gaussians."""
        classes, factor = self._classes(total)
        return self.fisher_mix.head(classes, factor, fed.rng("samples"), fed.rng("training"))

    def quadratic(self, total: Total) -> Quadratic:
        """``log(N_c / N) - log det(Sigma_c) / 2 - (x - mu_c)^T Sigma_c^-1 (x - mu_c) / 2``.

        A class of fewer than two records has no covariance of its own and takes the one within all classes.
        """
        classes = gaussians.classes_of(total)
        matrices = [total.matrix(c)[:-1, :-1] for c in range(len(classes.means))]
        everything = sum((m for m, here in zip(matrices, classes.present, strict=True) if here), 0 * matrices[0])
        factors = []
        for mean, count, matrix in zip(classes.means, classes.counts.tolist(), matrices, strict=True):
            if count < 2 and classes.size:  # under noise all classes may count as absent
                sigma, records = classes.within(everything), classes.size
            else:
                sigma, records = matrix / count - torch.outer(mean, mean), count
            factors.append(self._factor(sigma, total.noise / records))
        stacked = torch.stack(factors)
        constants = classes.log_priors + torch.linalg.slogdet(stacked).logabsdet
        return Quadratic(classes.means, stacked, constants)

    def _classes(self, total: Total) -> tuple[gaussians.Classes, Float64[Tensor, "d d"]]:
        """The means and counts, and the `_factor` of the covariance within classes."""
        classes = gaussians.classes_of(total)
        sigma = classes.within(total.matrix()[:-1, :-1])
        if self.classifier == "nb":
            sigma = sigma.diagonal().clamp_min(0).diag()
        return classes, self._factor(sigma, total.noise / classes.size)

    def _factor(self, sigma: Float64[Tensor, "d d"], noise: float) -> Float64[Tensor, "d d"]:
        """F with ``F F^T`` the inverse of the covariance after shrinkage; its negative eigenvalues count as 0."""
        values, vectors = torch.linalg.eigh(sigma)
        values = values.clamp_min(0)
        shrunk = (1 - self.shrinkage) * values + self.shrinkage * values.mean() + self.noise_ridge * noise
        factor: Tensor = vectors * shrunk.clamp_min(1e-12).rsqrt()
        return factor

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> Sums:
        """Release the class sums, the counts, and the sums of products of all records or of each class."""
        return release_moments(client, features, self, by_class=self.classifier == "qda")

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return (*super().first_reply, "by class") if self.classifier == "qda" else super().first_reply

    @override
    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        if self.classifier != "qda":
            return super().rebuild(network, weights)
        parts: dict[str, dict[str, Tensor]] = {"0": {}, "1": {}}
        for name, value in weights.items():
            place, _, rest = name.partition(".")
            parts[place][rest] = value
        return nn.Sequential(super().rebuild(network, parts["0"]), Quadratic(**parts["1"]))

"""Gaussian mixtures of feature rows: their fit at a client, and samples from them at the server (FedPFT)."""

import warnings
from typing import Literal

import torch
from jaxtyping import Float, Float64
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from fedstill.base.settings import Settings
from fedstill.privacy.second_moments import entries, unpacked, upper

Fitted = tuple[Float64[Tensor, " k"], Float64[Tensor, "k d"], Float64[Tensor, "k entries"]]
"""Weights, means and covariances of a mixture; the covariances as `Mixture.entries` counts them."""

_LEAST = 1e-6
"""Variance added to every direction, as scikit-learn's ``reg_covar``; that of a single record."""


class Mixture(Settings):
    """Settings of the mixture of one class's rows."""

    components: PositiveInt = 10
    """Number of Gaussians of a class (K); as many as its records if these are fewer."""
    covariance: Literal["diag", "spherical", "full"] = "diag"
    """Covariance of a Gaussian: one variance for each direction, one for all, or all entries."""
    iterations: PositiveInt = 100
    """Maximum number of steps of expectation and maximisation."""
    tolerance: NonNegativeFloat = 1e-3
    """Increase of the mean log likelihood of a record below which the fit ends."""

    def entries(self, dims: int) -> int:
        """Number of values of one covariance: 1, ``dims``, or the upper triangle row by row."""
        return {"spherical": 1, "diag": dims, "full": entries(dims)}[self.covariance]

    def fit(self, rows: Float[Tensor, "n d"], seed: int) -> Fitted:
        """The mixture of ``rows`` by EM from k-means; missing components have zeros."""
        fitted = self._fit(rows.double().cpu(), seed)
        missing = self.components - len(fitted[0])
        weights, means, covariances = (torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in fitted)
        return weights, means, covariances

    def _fit(self, wide: Float64[Tensor, "n d"], seed: int) -> Fitted:
        if len(wide) == 1:
            variances = torch.full((1, wide.shape[1]), _LEAST, dtype=torch.float64)
            return torch.ones(1, dtype=torch.float64), wide, self._packed(torch.diag_embed(variances))
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture  # imported here because it is slow to load

        mixture = GaussianMixture(
            min(self.components, len(wide)),
            covariance_type=self.covariance,
            max_iter=self.iterations,
            tol=self.tolerance,
            reg_covar=_LEAST,
            random_state=seed,
        )
        with warnings.catch_warnings():  # the last step will do; k-means warns of equal records
            warnings.simplefilter("ignore", ConvergenceWarning)
            mixture.fit(wide.numpy())
        covariances = torch.from_numpy(mixture.covariances_)
        if self.covariance == "full":
            packed = self._packed(covariances)
        else:
            packed = covariances.reshape(len(covariances), -1)
        return torch.from_numpy(mixture.weights_), torch.from_numpy(mixture.means_), packed

    def _packed(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, "k entries"]:
        if self.covariance == "full":
            return matrices[:, upper(matrices.shape[1])]
        variances = matrices.diagonal(dim1=1, dim2=2)
        return variances if self.covariance == "diag" else variances.mean(1, keepdim=True)

    def draw(self, fitted: Fitted, count: int, rng: torch.Generator) -> Float64[Tensor, "count d"]:
        """Samples of a mixture; whatever a client sent as its parameters, negative weights and variances count as 0."""
        weights, means, covariances = (part.double().cpu() for part in fitted)
        shares = weights.clamp_min(0) + 1e-12
        chosen = torch.multinomial(shares, count, replacement=True, generator=rng)
        drawn = torch.randn(count, means.shape[1], dtype=torch.float64, generator=rng)
        for k in torch.bincount(chosen).nonzero().flatten().tolist():
            drawn[chosen == k] = means[k] + self._coloured(drawn[chosen == k], covariances[k])
        return drawn

    def _coloured(self, white: Float64[Tensor, "n d"], covariance: Float64[Tensor, " entries"]) -> Tensor:
        if self.covariance == "full":
            return coloured(white, unpacked(covariance, white.shape[1]))
        return white * covariance.clamp_min(0).sqrt()


def coloured(white: Float64[Tensor, "n d"], covariance: Float64[Tensor, "d d"]) -> Float64[Tensor, "n d"]:
    """Standard normal rows with the given covariance, whose negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(covariance)
    rows: Tensor = white @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return rows

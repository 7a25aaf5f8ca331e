"""SAFLe: one upload of sums of bucketed features, and a sum of embeddings for a head, in closed form.

Bacellar, Munir, Franca, Lima, Marculescu, John, "Single-Round Scalable Analytic Federated Learning", CVPR 2026
(arXiv:2512.03336): bits of features, shuffled into groups, each of which selects an embedding; the sum of embeddings is
a linear regression on sparse rows, so that AFL's sums apply.

Differs from the paper (docs/methods/safle.md has the whole list):

* thresholds are quantiles of public images' features;
* clients send sums of products and one solve follows, as in AFL;
* scores have a temperature, as in AFL;
* one Gaussian release by default: a sparse row has as many ones as groups, so its length is public.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Float64
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from typing_extensions import override

from fedstill.distill.public_map import PublicFeatures, PublicMap
from fedstill.methods.parts.feature_sums import Total, add_up, solve
from fedstill.methods.parts.moments import (
    Embedding,
    MomentSums,
    Sums,
    release_moments,
    row_model,
    sizes,
    whole_steps,
)
from fedstill.methods.parts.on_features import public_features
from fedstill.methods.parts.temperatures import tempered
from fedstill.models.heads import Bucketed, Buckets, Order, Thresholds
from fedstill.privacy.integer_sums import constant_steps
from fedstill.privacy.logistic import extend
from fedstill.protocol import Client, Federation, Method, load, public_images, step


class SAFLe(MomentSums, Method):
    """One upload of sums of bucketed features; the server solves for embeddings whose sum classifies."""

    space: PublicMap = PublicMap(dims=64)
    """Map of the features to the rows that are bucketed."""
    buckets: Buckets = Buckets()
    """Bits of a row and their groups."""
    ridge: PositiveFloat = 1.0
    """Multiple of the identity added to the sums of products of all clients (lambda)."""
    noise_ridge: NonNegativeFloat = 0.7
    """More of it, as a multiple of the largest eigenvalue that the noise is expected to have."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "safle")
        dims = features.projection.shape[1]
        thresholds = self.buckets.quantiles(self._public_rows(fed, features)).cpu()
        order = torch.randperm(dims * self.buckets.thresholds, generator=fed.rng("shuffle"))
        exactly = sizes(fed, features, self, dims=self.buckets.width(dims))
        sums = fed.sum(self.sum_up, exactly=exactly, features=features, thresholds=thresholds, order=order)
        total = add_up(sums, self, fed.delta, fed.device)
        embeddings, bias = self.embeddings(total, whole_steps(self, fed.masked))
        head = Bucketed(embeddings.float(), bias.float(), thresholds, order)
        return nn.Sequential(row_model(fed, features, self), head.to(fed.device))

    def embeddings(
        self, total: Total, steps: int | None = None
    ) -> tuple[Float64[Tensor, "groups values classes"], Float64[Tensor, " classes"]]:
        """``(sum_k Z_k^T Z_k + lambda I)^-1 sum_k Z_k^T Y_k`` by group and value, and the coefficient of the bias.

        Args:
            total: the sums.
            steps: those of whole numbers; None for real ones.
        """
        ridge = self.ridge + self.noise_ridge * total.noise
        w = solve(total.matrix(), total.first.T, ridge, noise=total.noise)
        w = tempered(w.T, total, ridge).T
        groups = (len(w) - 1) >> self.buckets.group
        scale = math.sqrt(1 - self.bias**2) / self._radius(groups, steps)  # a 1 of a sparse row in the sums
        return (scale * w[:-1]).view(groups, 2**self.buckets.group, -1), self.bias * w[-1]

    def _radius(self, groups: int, steps: int | None) -> float:
        """The length to which rows are clipped; with steps, for which a 1 of a row becomes a whole number of them.

        All ones of all records are one number, so that its rounding would not cancel.
        """
        if steps is None:
            return math.sqrt(groups)
        entry = math.isqrt((steps**2 - constant_steps(self.bias, steps) ** 2) // groups)
        return math.sqrt(1 - self.bias**2) * steps / entry if entry else math.sqrt(groups)

    def _public_rows(self, fed: Federation, features: PublicFeatures) -> Float[Tensor, "n dims"]:
        public, model = public_images(fed.public, "safle"), fed.new_model()
        load(model, features.weights)
        some = torch.randperm(len(public), generator=fed.rng("thresholds"))[: self.space.records]
        return self._scaled(features.rows(model, public[some]), features)

    def _scaled(self, rows: Float[Tensor, "n dims"], features: PublicFeatures) -> Float[Tensor, "n dims"]:
        """Rows clipped and scaled as in `row_model`; on the CPU, where a row's bits depend on no other row."""
        return extend(rows.cpu(), features.radius, self.bias)[:, :-1].float().to(rows.device)

    @step
    def sum_up(self, client: Client, features: PublicFeatures, thresholds: Thresholds, order: Order) -> Sums:
        """Release Z_k^T Z_k and Z_k^T Y_k of the sparse rows."""
        dims = features.projection.shape[1]
        embedding = Embedding(
            self.buckets.width(dims),
            self._radius(self.buckets.groups(dims), whole_steps(self, client.masked)),
            lambda rows: self.buckets.sparse(self._scaled(rows, features), thresholds, order),
        )
        return release_moments(client, features, self, embedding=embedding)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return *super().first_reply, self.buckets

    @override
    def rebuild(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        parts: dict[str, dict[str, Tensor]] = {"0": {}, "1": {}}
        for name, value in weights.items():
            place, _, rest = name.partition(".")
            parts[place][rest] = value
        return nn.Sequential(super().rebuild(network, parts["0"]), Bucketed(**parts["1"]))

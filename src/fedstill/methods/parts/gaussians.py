"""Gaussians of classes: mixtures, heads from means and covariances, and mixing by Fisher information."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Le
from jaxtyping import Float16, Float32, Float64, Int64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import schema
from fedstill.base.records import Examples
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Settings
from fedstill.distill.mixtures import Fitted, Mixture
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.feature_sums import Total
from fedstill.privacy.class_gaussians import PublishedGaussians
from fedstill.privacy.mechanisms import clipped
from fedstill.privacy.second_moments import upper
from fedstill.protocol import Client, Labels, Released, Reply
from fedstill.schema import Below
from fedstill.train.sgd import Adam

Counts = Annotated[Int64[Tensor, " n"], Below(2**40, least=1)]


class Mixtures(Reply):
    """A mixture of the rows of each class that the client has, in half precision; absent components weigh 0."""

    labels: Labels
    counts: Counts
    weights: Float16[Tensor, "n components"]
    means: Float16[Tensor, "n components dims"]
    covariances: Float16[Tensor, "n components entries"]

    def fitted(self) -> Iterator[tuple[int, int, Fitted]]:
        """Class, number of records and mixture, one after another."""
        for i, (label, count) in enumerate(zip(self.labels.tolist(), self.counts.tolist(), strict=True)):
            yield int(label), int(count), (self.weights[i], self.means[i], self.covariances[i])


class NoisyGaussians(Reply):
    """A Gaussian of the rows of each class that the client has, with the paper's noise; rows have length at most 1."""

    labels: Released[Labels]
    counts: Released[Counts]
    means: Released[Float32[Tensor, "n dims"]]
    covariances: Released[Float32[Tensor, "n entries"]]

    def fitted(self, radius: float) -> Iterator[tuple[int, int, Fitted]]:
        """Class, number of records and mixture of one component, of rows of length at most ``radius``."""
        means, covariances = self.means.value * radius, self.covariances.value * radius**2
        for i, (label, count) in enumerate(zip(self.labels.value.tolist(), self.counts.value.tolist(), strict=True)):
            yield int(label), int(count), (torch.ones(1), means[i : i + 1], covariances[i : i + 1])


def fit_mixtures(client: Client, features: PublicFeatures, unit: float, mixture: Mixture) -> Mixtures:
    """Fit a mixture to the client's rows of each class, divided by ``unit``, by EM."""
    rows = clipped(features.rows(client.new_model(features.weights), client.train), features.radius).cpu() / unit
    labels, rng = client.train.labels.cpu(), client.rng("mixtures")
    counts = torch.bincount(labels)
    present = counts.nonzero().flatten()
    fitted = [mixture.fit(rows[labels == label], draw_seed(rng) % 2**32) for label in present]
    weights, means, covariances = (torch.stack(parts).half() for parts in zip(*fitted, strict=True))
    kinds = schema.compact(present, client.train.num_classes)
    return Mixtures(labels=kinds, counts=counts[present], weights=weights, means=means, covariances=covariances)


def release_gaussians(client: Client, features: PublicFeatures, epsilon: float) -> NoisyGaussians:
    """Release the mean and the covariance of each class as the paper does."""
    rows = features.rows(client.new_model(features.weights), client.train).cpu()
    mechanism = PublishedGaussians(radius=features.radius, epsilon=epsilon, delta=client.delta)
    found = client.release(mechanism, (rows, client.train.labels.cpu()))
    mask = upper(rows.shape[1])
    return NoisyGaussians(
        labels=found.map(lambda each: schema.compact(each.classes, client.train.num_classes)),
        counts=found.map(lambda each: each.counts),
        means=found.map(lambda each: each.means.float()),
        covariances=found.map(lambda each: each.covariances[:, mask].float()),
    )


ABSENT = -1e9
"""Logit of a class without records."""


@dataclass(frozen=True)
class Classes:
    """Means and numbers of records of the classes; the rows are without their constant feature.

    Attributes:
        means: mu_c, ``(classes, d)``.
        counts: N_c, ``(classes,)``, at least 1, or the standard deviation of their noise.
        present: whether a class seems to have records, ``(classes,)``.
        bias: value of the constant feature.
    """

    means: Float64[Tensor, "classes d"]
    counts: Float64[Tensor, " classes"]
    present: Tensor
    bias: float

    @property
    def size(self) -> float:
        """Number of all records, N."""
        return float(self.counts[self.present].sum())

    @property
    def log_priors(self) -> Float64[Tensor, " classes"]:
        """``log(N_c / N)``; very low for absent classes."""
        return torch.where(self.present, (self.counts / self.size).log(), ABSENT)

    def within(self, matrix: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
        """The covariance of all records around their class means; ``matrix`` is G without the constant."""
        weighted = self.means * (self.counts * self.present)[:, None]
        return (matrix - weighted.T @ self.means) / self.size

    def total(self, matrix: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
        """The unbiased covariance of all records around their mean."""
        mean = (self.counts * self.present) @ self.means / self.size
        return (matrix - self.size * torch.outer(mean, mean)) / max(self.size - 1, 1)


def classes_of(total: Total) -> Classes:
    """The means and counts of the classes.

    Under noise, a class whose count is within one standard deviation of it counts as absent, and means longer than any
    row are shortened.
    """
    std = total.count_std
    counts = total.first[:, -1] / total.bias
    present = counts > max(std, 0.5)
    if not bool(present.any()):
        present = counts == counts.max()
    floor = max(std, 1.0)
    means = total.first[:, :-1] / counts.clamp_min(floor)[:, None]
    means = means / means.norm(dim=1, keepdim=True).clamp_min(1.0)
    return Classes(means, counts.clamp_min(floor), present, total.bias)


def linear_head(weights: Float64[Tensor, "classes d"], classes: Classes) -> Float64[Tensor, "classes d+1"]:
    """The head with ``w_c = Sigma^-1 mu_c``, the ``weights``, and ``b_c = log(N_c / N) - mu_c^T w_c / 2``."""
    constants = classes.log_priors - (weights * classes.means).sum(1) / 2
    return torch.cat([weights, constants[:, None] / classes.bias], 1)


class FisherMix(Settings):
    """Settings of the head that is trained on samples."""

    energy: Annotated[PositiveFloat, Le(1)] = 0.99
    """Share of the variance between classes, relative to that within, that the subspace keeps."""
    samples: PositiveInt = 5000
    """Samples of each class."""
    temperature: PositiveFloat = 0.85
    """Factor of the samples' standard deviations."""
    training: Adam = Adam(weight_decay=5e-4, batch_size=1024, epochs=60)
    """Training of the head on the samples."""

    def subspace(self, classes: Classes, factor: Float64[Tensor, "d d"]) -> Float64[Tensor, "d k"]:
        """Fisher's directions V: eigenvectors of the covariance between classes relative to that within.

        ``factor`` is F with ``F F^T`` the inverse of the covariance within classes; ``V^T Sigma V`` is the identity.
        """
        weights = (classes.counts * classes.present / classes.size)[:, None]
        centred = classes.means - (weights * classes.means).sum(0)
        _, values, directions = torch.linalg.svd(weights.sqrt() * centred @ factor, full_matrices=False)
        shares = values.square().cumsum(0) / values.square().sum().clamp_min(1e-300)
        kept = min(int((shares < self.energy).sum()) + 1, len(values))
        subspace: Tensor = factor @ directions[:kept].T
        return subspace

    def head(
        self, classes: Classes, factor: Float64[Tensor, "d d"], samples: torch.Generator, training: torch.Generator
    ) -> Float64[Tensor, "classes d+1"]:
        """The linear head on rows that is trained on samples in the subspace; absent classes have none."""
        subspace = self.subspace(classes, factor)
        present = torch.nonzero(classes.present).flatten()
        centres = (classes.means @ subspace)[present].repeat_interleave(self.samples, 0).cpu()
        x = centres + self.temperature * torch.randn(centres.shape, dtype=torch.float64, generator=samples)
        with isolated(0):  # the start is 0
            head = nn.Linear(subspace.shape[1], len(classes.means))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        labels = present.cpu().repeat_interleave(self.samples)
        self.training.fit(head, Examples(x.float(), labels), training)
        weights = head.weight.detach().double().to(subspace) @ subspace.T
        return torch.cat([weights, head.bias.detach().double().to(subspace)[:, None] / classes.bias], 1)

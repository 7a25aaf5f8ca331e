"""FedPFT's uploads: a mixture, or one noisy Gaussian, of the rows of each class that a client has."""

from collections.abc import Iterator
from typing import Annotated

import torch
from jaxtyping import Float16, Float32, Int64
from torch import Tensor

from fedstill import schema
from fedstill.distill.mixtures import Fitted, Mixture
from fedstill.distill.public_map import PublicFeatures
from fedstill.privacy.class_gaussians import PublishedGaussians
from fedstill.privacy.mechanisms import clipped
from fedstill.privacy.second_moments import upper
from fedstill.protocol import Client, Labels, Released, Reply
from fedstill.schema import Below
from fedstill.seeds import draw_seed

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

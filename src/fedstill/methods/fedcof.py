"""FedCOF: one upload of class means, between which the server sees the classes' covariances, and a ridge regression.

Goswami, Magistri, Wang, Twardowski, Bagdanov, van de Weijer, "Covariances for Free: Exploiting Mean Distributions for
Training-free Federated Learning", NeurIPS 2025 (arXiv:2412.14326), Algorithm 1.

Differs from the paper (docs/methods/fedcof.md has the whole list):

* rows have a constant, so that the head has a bias; features are whitened and clipped with public numbers;
* the shrinkage is in units of a row's mean square entry, and a class without records is never predicted;
* scores have a temperature, as in AFL;
* with ``epsilon``, clients release noisy sums of each class in place of means, one for each class.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Lt
from jaxtyping import Float32, Float64, Int64
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from fedstill.base.settings import Epsilon
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.feature_sums import solve
from fedstill.methods.parts.gaussians import ABSENT, Counts
from fedstill.methods.parts.on_features import OnFeatures, head_model, public_features
from fedstill.methods.parts.temperatures import temperature
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.logistic import extend
from fedstill.privacy.mechanisms import ClassSums
from fedstill.protocol import Client, Federation, Labels, Method, Released, Reply, step
from fedstill.schema import compact

_SURE = 4.0
"""Standard deviations of a noisy count from which a client's mean of a class is compared with those of others."""


class ClassMeans(Reply):
    """The mean row of each class that the client has, or of each group of its records, and their numbers."""

    labels: Labels
    counts: Counts
    means: Float32[Tensor, "n dims"]


class NoisySums(Reply):
    """Noisy sums, by class, of rows and of their constant."""

    sums: Released[Float32[Tensor, "classes moments"]]


@dataclass(frozen=True)
class Sent:
    """Sums of rows of one class at one client, as many as clients sent.

    Attributes:
        labels: their classes, ``(m,)``.
        sums: n_kc mu_kc, ``(m, p)``, whose last column counts records, times the constant feature.
        noise: standard deviation of the noise in each entry; 0 without noise.
    """

    labels: Int64[Tensor, " m"]
    sums: Float64[Tensor, "m p"]
    noise: float = 0.0


class FedCOF(OnFeatures, Method):
    """One upload of class means; the server estimates the classes' covariances from them."""

    protects: ClassVar[str] = ""
    epsilon: Epsilon = None
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    means: PositiveInt = 1
    """Means of each of a client's classes, of groups of at least two records drawn at random; more than one for few
    clients, as two means show a covariance and one shows none."""
    shrinkage: PositiveFloat = 1.0
    """Multiple of the identity added to the covariance of a class (gamma), in units of 1 / d, a row's mean square."""
    bias: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Value of the constant feature, which gives the bias and, under noise, counts records."""

    @model_validator(mode="after")
    def _releasable(self) -> "FedCOF":
        if self.epsilon is not None and self.means > 1:
            raise ValueError(
                f"means is {self.means}, but with an epsilon each class has one noisy sum; set means to 1, or epsilon "
                "to None"
            )
        return self

    @property
    @override
    def claims(self) -> str:
        return "" if self.epsilon is None else "record"

    @property
    @override
    def constant(self) -> float:
        return self.bias

    @override
    def server(self, fed: Federation) -> nn.Module:
        features = public_features(fed, self, "fedcof")
        dims = features.projection.shape[1]
        self._check_size(dims, fed)
        if self.epsilon is None:
            most = {"n": self.means * fed.num_classes}
            sent = self.added(fed.ask(self.average, exactly={"dims": dims}, at_most=most, features=features))
        else:
            replies = fed.ask(self.sum_up, exactly={"moments": dims + 1}, features=features)
            sums = torch.cat([reply.sums.value.double() for reply in replies])
            noise = release_noise(self.epsilon, fed.delta)
            sent = Sent(torch.arange(fed.num_classes).repeat(len(sums) // fed.num_classes), sums, noise)
        head, factor = self.head(sent, fed.num_classes)
        head[head[:, -1] != ABSENT / self.bias] *= factor
        return head_model(fed, features, head, self)

    def _check_size(self, dims: int, fed: Federation) -> None:
        """Compare an upload with the limit of a message, before a client works or releases anything."""
        size = 4 * self.means * fed.num_classes * (dims + 1)
        if size > fed.max_bytes:
            raise ValueError(
                f"each client would send {size / 1e6:.0f} MB, the means of {dims} features of {fed.num_classes} "
                f"classes, but the limit is {fed.max_bytes / 1e6:.0f} MB; use a smaller --space.dims or --means, or a "
                "larger --max-message-mb"
            )

    def added(self, replies: Iterable[ClassMeans]) -> Sent:
        """The sums that clients' means and counts stand for; a mean longer than any row is shortened."""
        labels, sums = [], []
        for reply in replies:
            means = reply.means.double()
            means /= means.norm(dim=1, keepdim=True).clamp_min(1)
            constant = means.new_full((len(means), 1), self.bias)
            labels.append(reply.labels.long())
            sums.append(torch.cat([means, constant], 1) * reply.counts[:, None])
        return Sent(torch.cat(labels), torch.cat(sums))

    def head(self, sent: Sent, num_classes: int) -> tuple[Float64[Tensor, "classes p"], float]:
        """``w_c = G^-1 N_c mu_c`` over its length, with ``G = sum_c (N_c - 1)(Sigma_c + gamma I) + N mu mu^T``.

        And the `temperature` of the scores of the classes that are present; 1 under noise.
        """
        sums = sent.sums.new_zeros(num_classes, sent.sums.shape[1]).index_add_(0, sent.labels, sent.sums)  # N_c mu_c
        counts = sums[:, -1] / self.bias  # N_c
        clients = len(sent.labels) / num_classes  # under noise, where each client sends all classes
        present = counts > max(math.sqrt(clients) * sent.noise / self.bias, 0.5)
        if not bool(present.any()):
            present = counts == counts.max()
        total = sums[present].sum(0)
        gram = torch.outer(total, total) / (total[-1] / self.bias).clamp_min(1)  # N mu mu^T
        gamma = self.shrinkage / (len(total) - 1) * torch.eye(len(total)).to(gram)
        for label in present.nonzero().flatten().tolist():
            weight = (counts[label] - 1).clamp_min(1e-6)  # single records alone would leave G singular
            gram += weight * (self.covariance(sent, label) + gamma)
        head = normalize(solve(gram, sums.T, 0.0).T)
        own = head[present]
        factor = 1.0
        if not sent.noise:
            factor = temperature(sums[present] @ own.T, own @ gram @ own.T, counts[present], len(gram))
        head[~present] = 0
        head[~present, -1] = ABSENT / self.bias
        return head, factor

    def covariance(self, sent: Sent, label: int) -> Float64[Tensor, "p p"]:
        """``Sigma_c = sum_k n_k (mu_k - mu)(mu_k - mu)^T / (K - 1)`` of a class's K means; 0 for one.

        Under noise, of the clients that seem to have many records of it; noise of the deviation s widens it by about
        the mean of ``s^2 / n_k`` in every direction, and through the counts by ``s^2 / (b^2 n_k) mu mu^T``.
        """
        sums = sent.sums[sent.labels == label]
        counts = sums[:, -1] / self.bias
        sure = counts > max(_SURE * sent.noise / self.bias, 0.5)
        sums, counts = sums[sure], counts[sure]
        rows = sums / counts[:, None]  # mu_k
        deviations = (rows - sums.sum(0) / counts.sum()) * counts.sqrt()[:, None]
        return deviations.T @ deviations / max(len(rows) - 1, 1)

    @step
    def average(self, client: Client, features: PublicFeatures) -> ClassMeans:
        """The mean of the rows of each class or, for several means, of random groups of its records."""
        rows, labels, rng = self._rows(client, features)[:, :-1], client.train.labels.cpu(), client.rng("groups")
        kinds, counts, means = [], [], []
        for label in torch.unique(labels).tolist():
            index = torch.nonzero(labels == label).flatten()
            groups = max(1, min(self.means, len(index) // 2))
            order = index[torch.randperm(len(index), generator=rng)] if groups > 1 else index
            for group in order.tensor_split(groups):
                kinds.append(label)
                counts.append(len(group))
                means.append(rows[group].mean(0))
        named = compact(torch.tensor(kinds), client.train.num_classes)
        return ClassMeans(labels=named, counts=torch.tensor(counts), means=torch.stack(means).float())

    @step
    def sum_up(self, client: Client, features: PublicFeatures) -> NoisySums:
        """Release the sum of the rows of each class."""
        rows = self._rows(client, features), client.train.labels.cpu()
        mechanism = ClassSums(client.train.num_classes, 1.0, release_noise(self.epsilon, client.delta))
        return NoisySums(sums=client.release(mechanism, rows).map(Tensor.float))

    def _rows(self, client: Client, features: PublicFeatures) -> Float64[Tensor, "n p"]:
        """Rows of length at most 1, the constant last; on the CPU, where a row's bits depend on no other row."""
        rows = features.rows(client.new_model(features.weights), client.train)
        return extend(rows.cpu(), features.radius, self.bias)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return type(self), self.extractor, self.space, self.epsilon, self.means, self.bias

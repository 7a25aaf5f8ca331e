"""Shared parts of the methods with private linear heads on public features: FedAVG+P, FedD+P and the FedAUX methods.

Settings of a head's training and the mechanisms that they define; public features; the resulting model.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Float32, Float64, Num
from pydantic import FiniteFloat, PositiveFloat
from torch import Tensor
from typing_extensions import override

from fedstill.base.settings import Epsilon, Settings
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.parts.on_features import OnFeatures
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import IntegerHead
from fedstill.privacy.logistic import (
    LEAST_PENALTY,
    BinaryHead,
    LogisticHead,
    PublishedBinaryHead,
    PublishedLogisticHead,
    extend,
)
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.sum_ranges import check_length
from fedstill.protocol import Client, Federation, Released, Reply, Summation, Summed


class Head(Reply):
    """A private linear classifier on the public features; the last column is the bias."""

    head: Released[Float32[Tensor, "classes coefficients"]]


class HeadToSum(Reply):
    """The same, of which the server uses the sum over clients: whole steps where sums are masked."""

    head: Summed[Num[Tensor, "classes coefficients"]]


Penalty = Annotated[FiniteFloat, Ge(LEAST_PENALTY)]


class HeadTraining(Settings):
    """Training of a client's class head."""

    penalty: Penalty | None = None
    """Lambda, the weight of the penalty when losses are summed; the sensitivity is sqrt(2) / Lambda. By default
    ``logit_noise`` determines it."""
    logit_noise: PositiveFloat = 1.0
    """Standard deviation of a logit's noise. The default Lambda is sqrt(2) noise multipliers over it, at least 0.3."""
    bias: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Value of the constant feature, whose coefficients are the penalised bias."""
    lam: PositiveFloat = 0.01
    """For privacy=published: the paper's lambda, the weight of the penalty when losses are averaged."""
    scaling: Literal["paper", "repository"] = "paper"
    """For privacy=published: lambda times the number of records, as in the paper, or lambda alone, as in the code."""

    def weight(self, noise_multiplier: float) -> float:
        """Lambda for noise of this many sensitivities."""
        return self.penalty or max(0.3, math.sqrt(2) * noise_multiplier / self.logit_noise)


class PrivateHeads(OnFeatures):
    """Settings of the public features, and of the privacy and training of a client's heads on them."""

    protects: ClassVar[str] = "record"
    epsilon: Epsilon = 1.0
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Heads whose noise a theorem covers, or the paper's heads, whose claimed guarantee does not hold."""
    head: HeadTraining = HeadTraining()
    """A client's training of its class head."""

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """The method, and the settings on which a client's features and its class head depend."""
        return type(self), self.epsilon, self.privacy, self.extractor, self.space, self.head

    @property
    @override
    def constant(self) -> float:
        return self.head.bias

    @property
    @override
    def clips(self) -> bool:
        return self.sound

    @property
    def sound(self) -> bool:
        """Whether heads clip rows to a public radius and add sound noise."""
        return self.privacy == "sound"


def head_inputs(
    rows: Float[Tensor, "n d"], features: PublicFeatures, settings: PrivateHeads
) -> Float64[Tensor, "n d+1"]:
    """Inputs of the heads: rows with the constant feature, clipped if heads are sound."""
    return extend(rows, features.radius if settings.sound else None, settings.head.bias)


def class_head(
    client: Client, features: PublicFeatures, settings: PrivateHeads, share: float = 1.0
) -> Mechanism[tuple[Tensor, Tensor], Tensor]:
    """The mechanism that trains and releases a class head on a client's rows and labels.

    ``share`` is a part of the privacy budget: of ``1 / sigma^2`` for sound noise, of epsilon for published noise.
    """
    classes, head = client.train.num_classes, settings.head
    if not settings.sound:
        return PublishedLogisticHead(
            num_classes=classes,
            lam=head.lam,
            epsilon=_published_epsilon(settings.epsilon) * share,
            delta=client.delta,
            bias=head.bias,
            scaling=head.scaling,
        )
    multiplier = release_noise(settings.epsilon, client.delta, precision_share=share)
    return _sound_head(features, settings, classes, head.weight(multiplier), multiplier)


def _sound_head(
    features: PublicFeatures, settings: PrivateHeads, classes: int, penalty: float, noise: float
) -> LogisticHead:
    return LogisticHead(
        num_classes=classes,
        penalty=penalty,
        radius=features.radius,
        noise_multiplier=noise,
        bias=settings.head.bias,
    )


def release_head(
    client: Client, rows: Float[Tensor, "n d"], features: PublicFeatures, settings: PrivateHeads
) -> HeadToSum:
    """Train a class head on a client's rows and release it to a sum."""
    labelled = (rows, client.train.labels)
    if client.masked:
        whole = _integer_head(features, settings, client.train.num_classes, client.delta, client.adders)
        return HeadToSum(head=client.release(whole, labelled).map(Tensor.cpu))
    return HeadToSum(head=client.release(class_head(client, features, settings), labelled).map(Tensor.float))


def mean_of_sum(
    fed: Federation, summed: Summation[HeadToSum], features: PublicFeatures, settings: PrivateHeads
) -> Float32[Tensor, "classes coefficients"]:
    """The plain mean of the heads in a sum.

    Raises:
        OutOfRange: whole numbers that no heads and no noise give.
    """
    total, clients = summed.total.head.value, len(summed.clients)
    if total.is_floating_point():
        return (total / clients).float()
    whole = _integer_head(features, settings, fed.num_classes, fed.delta, summed.adders)
    assert summed.records is not None  # masked sums state it
    longest = math.ceil(whole.reach(summed.records, clients) / clients)
    check_length(whole, total, clients, longest, clients, "heads")
    return (total.double() * (whole.step / clients)).float()


def _integer_head(
    features: PublicFeatures, settings: PrivateHeads, classes: int, delta: float, adders: int
) -> IntegerHead:
    """The mechanism of masked heads, the same at clients and server; a client's own share of noise sets Lambda."""
    multiplier = release_noise(settings.epsilon, delta)
    head = _sound_head(features, settings, classes, settings.head.weight(multiplier / math.sqrt(adders)), 0.0)
    width = features.exactly["coefficients"] - 1
    return IntegerHead(head=head, features=width, noise_multiplier=multiplier, adders=adders)


def score_head(
    client: Client,
    features: PublicFeatures,
    settings: PrivateHeads,
    negatives: Float[Tensor, "m d"],
    penalty: float,
    share: float = 1.0,
) -> Mechanism[Float[Tensor, "n d"], Tensor]:
    """The mechanism that trains and releases a score head: a client's rows against public ``negatives``.

    ``penalty`` is Lambda, as `ScoreTraining.penalty`; ``share`` is as for `class_head`.
    """
    if not settings.sound:
        return PublishedBinaryHead(
            lam=settings.head.lam,
            epsilon=_published_epsilon(settings.epsilon) * share,
            delta=client.delta,
            bias=settings.head.bias,
            scaling=settings.head.scaling,
            negatives=negatives,
        )
    return BinaryHead(
        penalty=penalty,
        radius=features.radius,
        noise_multiplier=release_noise(settings.epsilon, client.delta, precision_share=share),
        bias=settings.head.bias,
        negatives=negatives,
    )


def _published_epsilon(epsilon: Epsilon) -> float:
    """The epsilon of the classic formula; in place of None, one so large that hardly any noise remains."""
    return 1e12 if epsilon is None else epsilon


def mean_head(heads: Iterable[Tensor]) -> Float32[Tensor, "classes coefficients"]:
    """The plain mean of the clients' heads."""
    doubles = [head.double() for head in heads]
    return (torch.stack(doubles).sum(0) / len(doubles)).float()

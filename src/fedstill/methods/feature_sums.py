"""Noisy class sums of features, to which a server fits images or representations (FedGM-records, FedRD-records).

A client sums its rows, measured from a public centre, by class, with a constant that counts them; `ClassSums` adds the
noise.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Float32
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill import models
from fedstill.distill.embedding import embed
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.mechanisms import ClassSums
from fedstill.protocol import Client, Federation, Public, Records, Released, Reply
from fedstill.settings import Epsilon, Settings, Share

Centre = Annotated[Float32[Tensor, " dims"], Public()]


class Embedding(Reply):
    """Noisy sums of unit features and of a constant, by class."""

    sums: Released[Float32[Tensor, "classes dims"]]


class Summing(Settings):
    """The sums of features and their release."""

    epsilon: Epsilon = 1.0
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    nets: PositiveInt = 16
    """Random networks whose features are summed."""
    count_share: Share = 0.01
    """Share of a row's squared length that is the constant by which records are counted."""


def ball(nets: Sequence[nn.Module], public: Records | None) -> tuple[Tensor, float]:
    """Centre and radius of the rows: the public images' mean and 90 % quantile of distances; without any, 0 and 1."""
    if public is None:
        return torch.zeros(1), 1.0
    rows = embed(nets, public[:5000])
    centre = rows.mean(0)
    return centre.cpu(), float((rows - centre).norm(dim=1).quantile(0.9))


def row_size(fed: Federation, nets: Sequence[nn.Module]) -> dict[str, int]:
    """The size of a client's sums, for `Federation.ask`: the features of all networks, and the constant."""
    return {"dims": sum(models.feature_width(net, fed.like.shape) for net in nets) + 1}


def summed(client: Client, rows: Tensor, centre: Tensor, radius: float, settings: Summing) -> Embedding:
    """The release A_k of a client's rows ``(n, d)``, measured from ``centre``, with a constant to count them by."""
    near = rows - centre.to(client.device)
    constant = near.new_full((len(near), 1), radius * math.sqrt(settings.count_share))
    near = torch.cat([near * math.sqrt(1 - settings.count_share), constant], 1)
    mechanism = ClassSums(client.train.num_classes, radius, release_noise(settings.epsilon, client.delta))
    sums = client.release(mechanism, (near, client.train.labels))
    return Embedding(sums=sums.map(Tensor.float))


def means_of(
    fed: Federation, replies: Sequence[Embedding], centre: Tensor, radius: float, settings: Summing
) -> Float[Tensor, "classes d"]:
    """Each class's mean row over all clients, by their releases."""
    total = sum(reply.sums.value.double() for reply in replies)  # A = sum_k A_k
    sums = torch.as_tensor(total, device=fed.device)
    counts = (sums[:, -1:] / (radius * math.sqrt(settings.count_share))).clamp_min(1.0)
    means: Tensor = sums[:, :-1] / (math.sqrt(1 - settings.count_share) * counts) + centre.to(fed.device)
    return means

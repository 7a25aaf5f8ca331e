"""Noisy class sums of features, to which a server fits images or representations (FedGM-records, FedRD-records).

A client subtracts a public centre from its rows of features, appends a constant that counts them, and sums them by
class; `ClassSums` adds the noise.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

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
    """Noisy sums, by class, of unit features and of a constant."""

    sums: Released[Float32[Tensor, "classes dims"]]


_ALIKE = 1e-6
"""Largest difference of rows, relative to the longest, that is rounding."""


class Summing(Settings):
    """Settings of the sums of features and their release."""

    images_only: ClassVar[bool] = True
    protects: ClassVar[str] = "record"
    epsilon: Epsilon = 1.0
    """Privacy cost of a client's upload at the run's delta; None adds no noise and guarantees nothing."""
    nets: PositiveInt = 16
    """Random networks whose features are summed."""
    count_share: Share = 0.01
    """Share of a row's squared length for the constant that counts records."""


def public_ball(nets: Sequence[nn.Module], public: Records | None) -> tuple[Tensor, float]:
    """Centre and radius to clip rows: the public rows' mean and 90 % quantile of distances; 0 and 1 without any."""
    if public is None:
        return torch.zeros(1), 1.0
    rows = embed(nets, public[:5000])
    centre = rows.mean(0)
    radius = float((rows - centre).norm(dim=1).quantile(0.9))
    if radius <= _ALIKE * float(rows.norm(dim=1).max()):
        raise ValueError("all public images have the same features, which bound no row; name others with --public")
    return centre.cpu(), radius


def row_size(fed: Federation, nets: Sequence[nn.Module]) -> dict[str, int]:
    """Length of a row for `Federation.ask`: the features of all networks, and the constant."""
    return {"dims": sum(models.feature_width(net, fed.like.shape) for net in nets) + 1}


def release_sums(client: Client, rows: Tensor, centre: Tensor, radius: float, settings: Summing) -> Embedding:
    """Release A_k, the class sums of a client's rows ``(n, d)`` relative to ``centre`` and of a constant."""
    relative = rows - centre.to(client.device)
    constant = relative.new_full((len(relative), 1), radius * math.sqrt(settings.count_share))
    relative = torch.cat([relative * math.sqrt(1 - settings.count_share), constant], 1)
    mechanism = ClassSums(client.train.num_classes, radius, release_noise(settings.epsilon, client.delta))
    sums = client.release(mechanism, (relative, client.train.labels))
    return Embedding(sums=sums.map(Tensor.float))


def class_means(
    fed: Federation, replies: Sequence[Embedding], centre: Tensor, radius: float, settings: Summing
) -> Float[Tensor, "classes d"]:
    """Each class's mean row over all clients, from their releases."""
    total = sum(reply.sums.value.double() for reply in replies)  # A = sum_k A_k
    sums = torch.as_tensor(total, device=fed.device)
    counts = (sums[:, -1:] / (radius * math.sqrt(settings.count_share))).clamp_min(1.0)
    means: Tensor = sums[:, :-1] / (math.sqrt(1 - settings.count_share) * counts) + centre.to(fed.device)
    return means

"""FedGM with record-level differential privacy: one noisy release from each client, images fitted to it afterwards.

Huang et al., "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815, sends
images that are functions of the records and so can't protect them. This is what can be kept of it.

Differs from the paper (docs/methods/fedgm-records.md has the whole list):

* clients release the sums of their records' features by class, with noise, over random networks that everybody derives
  from the run's seed; that is the gradient of the last layer at uniform predictions, released once;
* the server fits the images, to the sum over clients; that is post-processing and costs nothing;
* all classes have their row and ``ipc`` images, whatever a client holds; nothing starts from a real image.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Float32
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.embedding import ImageFitting, embed, unit
from fedstill.methods.heads import Epsilon, Share
from fedstill.methods.surrogate import train_on
from fedstill.privacy.accounting import share_noise
from fedstill.privacy.mechanisms import ClassSums
from fedstill.protocol import Client, Federation, Method, Public, Records, Released, Reply, Settings, step
from fedstill.train.server import ServerTraining

Centre = Annotated[Float32[Tensor, " dims"], Public()]


class Embedding(Reply):
    """Noisy sums of unit features and of a constant, by class."""

    sums: Released[Float32[Tensor, "classes dims"]]


class Summing(Settings):
    """How features are summed and released."""

    epsilon: Epsilon = 1.0
    """What a client's upload may cost at the run's delta; None adds no noise and guarantees nothing."""
    nets: PositiveInt = 16
    """Random networks whose features are summed."""
    count_share: Share = 0.01
    """Of a row's squared length that is the constant by which records are counted."""


class FedGMRecords(Summing, Method):
    """Images fitted to one private release of class-wise feature sums."""

    ipc: PositiveInt = 10
    """Synthetic images of every class."""
    fitting: ImageFitting = ImageFitting()
    """How the server fits the images."""
    training: ServerTraining = ServerTraining()
    """The server's training on them."""

    def server(self, fed: Federation) -> nn.Module:
        """Add the releases up, fit images to them, train on the images."""
        nets = [fed.new_model(draw=1 + i) for i in range(self.nets)]
        centre, radius = ball(nets, fed.public)
        width = sum(unit(net, torch.zeros(1, *fed.shape, device=fed.device)).shape[1] for net in nets)
        replies = fed.ask(self.sum_up, exactly={"dims": width + 1}, centre=centre, radius=radius)
        means = means_of(fed, replies, centre, radius, self)
        fitted = self.fitting.fit(nets, means, self.ipc, fed.like, fed.rng("images"), fed.progress("fitting images"))
        fed.show("synthetic", fitted)
        return train_on(fed, fitted, self.training)

    @step
    def sum_up(self, client: Client, centre: Centre, radius: float) -> Embedding:
        """A_k: clipped rows summed by class, and noise."""
        nets = [client.new_model(draw=1 + i) for i in range(self.nets)]
        return summed(client, embed(nets, client.train), centre, radius, self)


def ball(nets: Sequence[nn.Module], public: Records | None) -> tuple[Tensor, float]:
    """What rows are measured from, and their largest length: the public images' mean and 90 % quantile, or 0 and 1."""
    if public is None:
        return torch.zeros(1), 1.0
    rows = embed(nets, public[:5000])
    centre = rows.mean(0)
    return centre.cpu(), float((rows - centre).norm(dim=1).quantile(0.9))


def summed(client: Client, rows: Tensor, centre: Tensor, radius: float, settings: Summing) -> Embedding:
    """The release A_k of a client's rows ``(n, d)``, measured from ``centre``, with a constant to count them by."""
    near = rows - centre.to(client.device)
    constant = near.new_full((len(near), 1), radius * math.sqrt(settings.count_share))
    near = torch.cat([near * math.sqrt(1 - settings.count_share), constant], 1)
    mechanism = ClassSums(client.train.num_classes, radius, share_noise(settings.epsilon, client.delta))
    sums = client.release(mechanism, (near, client.train.labels))
    return Embedding(sums=sums.map(lambda a: a.float().cpu()))


def means_of(
    fed: Federation, replies: Sequence[Embedding], centre: Tensor, radius: float, settings: Summing
) -> Float[Tensor, "classes d"]:
    """Each class's mean row over all clients, as their releases have it."""
    total = sum(reply.sums.value.double() for reply in replies)  # A = sum_k A_k
    sums = torch.as_tensor(total, device=fed.device)
    counts = (sums[:, -1:] / (radius * math.sqrt(settings.count_share))).clamp_min(1.0)
    means: Tensor = sums[:, :-1] / (math.sqrt(1 - settings.count_share) * counts) + centre.to(fed.device)
    return means

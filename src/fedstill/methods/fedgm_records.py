"""FedGM with record-level differential privacy: each client sends one noisy release, and the server fits images to it.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815, sends
images that are functions of the records and so can't protect them. This method protects the records.

Differs from the paper (docs/methods/fedgm-records.md has the whole list):

* clients release noisy class sums of their records' features in random networks drawn from the run's seed: the gradient
  of the last layer at uniform predictions;
* the server fits the images, to the sum over clients, which is post-processing and costs nothing;
* every class has a row and ``ipc`` images, whatever classes a client has; no image starts from a real one.
"""

from typing import Any

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.embedding import ImageFitting, embed
from fedstill.methods.parts.feature_sums import (
    Centre,
    FeatureSums,
    Summing,
    class_means,
    public_ball,
    release_sums,
    row_size,
)
from fedstill.methods.parts.surrogate import train_on
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.condensation import CondensedTraining


class FedGMRecords(Summing, Method):
    """Images fitted to one private release of class-wise feature sums."""

    ipc: PositiveInt = 10
    """Synthetic images of every class."""
    fitting: ImageFitting = ImageFitting()
    """The server's fit of the images."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        nets = [fed.new_model(draw=1 + i) for i in range(self.nets)]
        centre, radius = public_ball(nets, fed.public)
        sums = fed.sum(self.sum_up, exactly=row_size(fed, nets), centre=centre, radius=radius)
        means = class_means(fed, sums, centre, radius, self)
        images = self.fitting.fit(nets, means, self.ipc, fed.like, fed.rng("images"), fed.progress("fitting images"))
        fed.show("synthetic", images)
        return train_on(fed, images, self.training)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the released sums."""
        return type(self), self.epsilon, self.nets, self.count_share

    @step
    def sum_up(self, client: Client, centre: Centre, radius: float) -> FeatureSums:
        """Release A_k: clipped rows summed by class, with noise."""
        nets = [client.new_model(draw=1 + i) for i in range(self.nets)]
        return release_sums(client, embed(nets, client.train), centre, radius, self)

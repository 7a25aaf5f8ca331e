"""FedGM with record-level differential privacy: one noisy release from each client, images fitted to it afterwards.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815, sends
images that are functions of the records and so can't protect them. This method protects them.

Differs from the paper (docs/methods/fedgm-records.md has the whole list):

* clients release the sums of their records' features by class, with noise, over random networks from the run's seed;
  that is the gradient of the last layer at uniform predictions, released once;
* the server fits the images, to the sum over clients; that is post-processing and costs nothing;
* all classes have their row and ``ipc`` images, whatever classes a client has; nothing starts from a real image.
"""

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.embedding import ImageFitting, embed
from fedstill.methods.feature_sums import Centre, Embedding, Summing, ball, means_of, row_size, summed
from fedstill.methods.surrogate import train_on
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.condensation import CondensedTraining


class FedGMRecords(Summing, Method):
    """Images fitted to one private release of class-wise feature sums."""

    ipc: PositiveInt = 10
    """Synthetic images of every class."""
    fitting: ImageFitting = ImageFitting()
    """The server's fit of the images."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on them."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        nets = [fed.new_model(draw=1 + i) for i in range(self.nets)]
        centre, radius = ball(nets, fed.public)
        replies = fed.ask(self.sum_up, exactly=row_size(fed, nets), centre=centre, radius=radius)
        means = means_of(fed, replies, centre, radius, self)
        fitted = self.fitting.fit(nets, means, self.ipc, fed.like, fed.rng("images"), fed.progress("fitting images"))
        fed.show("synthetic", fitted)
        return train_on(fed, fitted, self.training)

    @step
    def sum_up(self, client: Client, centre: Centre, radius: float) -> Embedding:
        """A_k: clipped rows summed by class, and noise."""
        nets = [client.new_model(draw=1 + i) for i in range(self.nets)]
        return summed(client, embed(nets, client.train), centre, radius, self)

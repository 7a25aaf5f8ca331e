"""FedGM: clients distil their records into a few images by gradient matching and send them once.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
Algorithm 1.

Differs from the paper (docs/methods/fedgm.md has the whole list):

* the label step (Algorithm 4) is a method of its own, `fedstill.methods.fedgm_labels`; the guarantee here is "none";
* many new networks with a step or two each, in place of 300 networks with 100 steps: after a few updates the gradient
  of a single class vanishes and carries no signal;
* the distance, which the paper leaves open, is DC's grouped cosine; the squared error is an option;
* pixels stay in [0, 1] and are rounded to 8 bits: an upload is one byte a pixel, and the server trains on the rounded;
* all clients match gradients at the same sequence of random networks, drawn from the run's seed.
"""

from functools import partial

from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.distill.formation import check_divides, unfolded
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.methods.surrogate import ImageSet, image_reply, random_net, train_on, union
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.condensation import CondensedTraining


class FedGM(Method):
    """One upload of synthetic images whose gradients match those of the real images."""

    ipc: PositiveInt = 10
    """Synthetic images of every class that a client has; with --matching.formation 2 each holds four."""
    matching: GradientMatching = GradientMatching()
    """Settings of a client's synthesis."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        images = union(fed, fed.ask(self.distil, at_most={"n": self.ipc * fed.num_classes}))  # S = S_1 u ... u S_K
        fed.show("synthetic", images)
        check_divides(self.matching.formation, images.shape)
        return train_on(fed, unfolded(images, self.matching.formation), self.training)

    @step
    def distil(self, client: Client) -> ImageSet:
        """Fit S_k by gradient matching, from the client's records alone."""
        nets = partial(random_net, client)
        return image_reply(synthesise(client.train, nets, self.ipc, self.matching, client.rng("images")))

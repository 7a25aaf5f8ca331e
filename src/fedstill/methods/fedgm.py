"""FedGM: clients distil their records into a few images by gradient matching and send them once.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
Algorithm 1.

Differs from the paper (docs/methods/fedgm.md has the whole list):

* the label step (Algorithm 4) is a method of its own, `fedstill.methods.fedgm_labels`; the guarantee here is "none";
* many fresh networks with a step or two each in place of 300 networks with 100 steps: the gradient of one class
  vanishes after a few updates and carries no signal then;
* the distance, which the paper leaves open, is DC's grouped cosine; the squared error is an option;
* pixels live in [0, 1] and are rounded to 8 bits, so an upload is one byte a pixel and the server trains on just that;
* all clients match at the same sequence of random networks, which they derive from the run's seed.
"""

from functools import partial

from pydantic import PositiveInt
from torch import nn

from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.methods.surrogate import ImageSet, packed, random_net, train_on, union
from fedstill.protocol import Client, Federation, Method, step
from fedstill.train.condensation import CondensedTraining


class FedGM(Method):
    """One upload of synthetic images, made by matching the gradients of the real ones."""

    ipc: PositiveInt = 10
    """Synthetic images of every class that a client holds."""
    matching: GradientMatching = GradientMatching()
    """Settings of a client's synthesis."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    def server(self, fed: Federation) -> nn.Module:
        """Train on the union of the clients' synthetic sets."""
        limit = self.ipc * fed.num_classes
        images = union(fed, fed.ask(self.distil, at_most={"n": limit}))  # S = S_1 u ... u S_K
        fed.show("synthetic", images)
        return train_on(fed, images, self.training)

    @step
    def distil(self, client: Client) -> ImageSet:
        """S_k by gradient matching, from the client's records alone."""
        nets = partial(random_net, client)
        return packed(synthesise(client.train, nets, self.ipc, self.matching, client.rng("images")))

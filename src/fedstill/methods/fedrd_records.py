"""FedRD with record-level differential privacy: one noisy release, representations fitted to it, projections kept.

Chen, "Personalized federated learning method based on dataset distillation" (in Chinese), sends representations that
are functions of the records and of a projection trained on them. This is what can be kept of it.

Differs from the paper (docs/methods/fedrd-records.md has the whole list):

* one exchange of anything private: under a public projection, the same for all, clients release the sums by class of
  random task networks' features, with noise; the server fits representations to the sum over clients;
* personal projections are trained afterwards, under the task network that came of it, and never leave.
"""

from contextlib import suppress

import torch
from pydantic import PositiveInt
from torch import nn

from fedstill.distill.embedding import ImageFitting, embed, unit
from fedstill.methods.feature_sums import Centre, Embedding, Summing, ball, means_of, summed
from fedstill.methods.fedrd import UnderTask, personal_part, pictures
from fedstill.models.projected import Projected
from fedstill.protocol import Client, Federation, Method, Reply, Shared, step
from fedstill.train.adam import Adam
from fedstill.train.sgd import Diverged


class Personalised(Reply):
    """Nothing: the projection stays."""


class FedRDRecords(Summing, Method):
    """Representations fitted to one private release; personal projections that never leave."""

    dpc: PositiveInt = 10
    """Representations of every class."""
    fitting: ImageFitting = ImageFitting()
    """How the server fits them; nothing augments them."""
    training: Adam = Adam(lr=0.01, batch_size=256, epochs=100)
    """The server's training of the task network on them."""
    projection: Adam = Adam(lr=0.001, batch_size=256, epochs=10)
    """A client's training of its projection, from the public one, under the task network."""

    def own(self, model: nn.Module) -> frozenset[str]:
        """varphi_k."""
        return personal_part(model)

    def server(self, fed: Federation) -> nn.Module:
        """Add the releases up, fit representations to them, train the task network, let clients adapt to it."""
        model = fed.new_model()
        assert personal_part(model)
        assert isinstance(model, Projected)
        nets = [_under(model, fed.new_model(draw=1 + i)) for i in range(self.nets)]
        centre, radius = ball(nets, fed.public)
        width = sum(unit(net, torch.zeros(1, *fed.shape, device=fed.device)).shape[1] for net in nets)
        replies = fed.ask(self.sum_up, exactly={"dims": width + 1}, centre=centre, radius=radius)
        means = means_of(fed, replies, centre, radius, self)
        rng = fed.rng("representations")
        noise = fed.like.normalisation.apply(torch.rand(self.dpc * fed.num_classes, *fed.shape, generator=rng))
        with torch.no_grad():
            start = model.projection(noise.to(fed.device))
        tasks = [net.task for net in nets]
        made = self.fitting.fit_values(tasks, means, start, rng, fed.progress("fitting representations"))
        fed.show("representations", pictures(made, fed))
        progress = fed.progress("training at the server")
        self.training.fit(model.task, made, fed.rng("training"), on_epoch=progress, keep=fed.epochs)
        fed.ask(self.adapt, shared=self.shared(model))
        return model

    @step
    def sum_up(self, client: Client, centre: Centre, radius: float) -> Embedding:
        """A_k: features under the public projection, clipped, summed by class, and noise."""
        model = client.new_model()
        nets = [_under(model, client.new_model(draw=1 + i)) for i in range(self.nets)]
        return summed(client, embed(nets, client.train), centre, radius, self)

    @step
    def adapt(self, client: Client, shared: Shared) -> Personalised:
        """w_k by CE(phi(varphi(x)), y); it stays."""
        model = self.personal_model(client, shared)
        assert isinstance(model, Projected)
        with suppress(Diverged):  # the server chose the network: nobody may learn from an error what it did to records
            self.projection.fit(UnderTask(model), client.train, client.rng("projection"))
            self.keep(client, model)
        return Personalised()


def _under(public: nn.Module, net: nn.Module) -> Projected:
    """A random network under the projection that is everybody's."""
    assert isinstance(net, Projected)
    assert isinstance(public, Projected)
    net.projection = public.projection
    return net

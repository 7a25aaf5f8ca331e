"""FedRD with record-level differential privacy: representations fitted to one noisy release, personal projections.

Chen, "Personalized federated learning method based on dataset distillation" (in Chinese), sends representations that
are functions of the records and of a projection trained on them. This method protects the records.

Differs from the paper (docs/methods/fedrd-records.md has the whole list):

* clients send one private release: noisy class sums of the features of random task networks on a public projection; the
  server fits representations to the sum over clients;
* personal projections are trained afterwards, with the resulting task network, and never leave the clients.
"""

from contextlib import suppress

import torch
from pydantic import PositiveInt
from torch import nn
from typing_extensions import override

from fedstill.base.errors import Diverged
from fedstill.distill.embedding import ImageFitting, embed
from fedstill.methods.fedrd import pictures, projected, train_projection
from fedstill.methods.parts.feature_sums import (
    Centre,
    FeatureSums,
    Summing,
    class_means,
    public_ball,
    release_sums,
    row_size,
)
from fedstill.models.projected import Projected
from fedstill.protocol import Client, Federation, Method, Reply, Shared, own_part, shared_part, step
from fedstill.train.sgd import Adam


class Personalised(Reply):
    """An empty reply: the projection stays at the client."""


class FedRDRecords(Summing, Method):
    """Representations fitted to one private release; personal projections that never leave the clients."""

    dpc: PositiveInt = 10
    """Representations of every class."""
    fitting: ImageFitting = ImageFitting()
    """The server's fit of the representations, without augmentation."""
    training: Adam = Adam(lr=0.01, batch_size=256, epochs=100)
    """The server's training of the task network on the representations."""
    projection: Adam = Adam(lr=0.001, batch_size=256, epochs=10)
    """A client's training of its projection: from the public one, with the task network fixed."""

    @override
    def own(self, model: nn.Module) -> frozenset[str]:
        return projected(model, "fedrd-records").projection_names  # of w_k, the weights of varphi_k

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = projected(fed.new_model(), "fedrd-records")
        nets = [_with_projection(model, fed.new_model(draw=1 + i)) for i in range(self.nets)]
        centre, radius = public_ball(nets, fed.public)
        sums = fed.sum(self.sum_up, exactly=row_size(fed, nets), centre=centre, radius=radius)
        means = class_means(fed, sums, centre, radius, self)
        rng = fed.rng("representations")
        noise = fed.like.normalisation.apply(torch.rand(self.dpc * fed.num_classes, *fed.like.shape, generator=rng))
        with torch.no_grad():
            start = model.projection(noise.to(fed.device))
        tasks = [net.task for net in nets]
        examples = self.fitting.fit_values(tasks, means, start, rng, fed.progress("fitting representations"))
        fed.show("representations", pictures(examples, fed))
        progress = fed.progress("training at the server")
        self.training.fit(model.task, examples, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
        fed.ask(self.adapt, shared=shared_part(self, model))
        return model

    @step
    def sum_up(self, client: Client, centre: Centre, radius: float) -> FeatureSums:
        """Release A_k: features on the public projection, clipped and summed by class, with noise."""
        model = projected(client.new_model(), "fedrd-records")
        nets = [_with_projection(model, client.new_model(draw=1 + i)) for i in range(self.nets)]
        return release_sums(client, embed(nets, client.train), centre, radius, self)

    @step
    def adapt(self, client: Client, shared: Shared) -> Personalised:
        """Train w_k by CE(phi(varphi(x)), y); it stays at the client."""
        model = projected(self.personal_model(client, shared), "fedrd-records")
        with suppress(Diverged):  # the server chose the network, so an error would reveal something about the records
            train_projection(model, self.projection, client)
            client.state |= own_part(self, model)
        return Personalised()


def _with_projection(public: Projected, net: nn.Module) -> Projected:
    """The task network of ``net`` with the public projection."""
    random = projected(net, "fedrd-records")
    random.projection = public.projection
    return random

"""REAL: clients send a few of their real images, or crops of them, and the server trains on them.

The baseline of FedGM (Chen, Zhou, Jiang, Electronics 2024, 13(10), 1815, section 4.6): as many bytes as an upload of
synthetic images, and no privacy. With crops and soft labels it is the control for distillation that needs none: Sun,
Shi, Yu, Lin, "On the Diversity and Realism of Distilled Dataset" (RDED), CVPR 2024 (arXiv:2312.03526).

Differs from the paper, which does not say how images are chosen (docs/methods/real.md has RDED's list):

* at random, as DREAM chooses representatives, or as RDED chooses crops;
* several images in one image, and soft labels, are RDED's and IDC's, not FedGM's.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from jaxtyping import Float32, UInt8
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.distill.coreset import choose
from fedstill.distill.distillates import CoreSet
from fedstill.distill.ensemble import distillation_loss
from fedstill.distill.pool import check_divides, fold, unfolded
from fedstill.evaluation import mode_of, outputs
from fedstill.methods.parts.surrogate import (
    ImageSet,
    VectorSet,
    VectorUpload,
    collect,
    image_reply,
    train_on,
    vector_reply,
)
from fedstill.protocol import Client, Federation, Method, Records, Reply, Step, step
from fedstill.train.condensation import CondensedTraining
from fedstill.train.sgd import SGD


class LabelledPictures(Reply):
    """8-bit images, and a network's logits for each picture in them: four bytes for each class of each picture."""

    images: Annotated[UInt8[Tensor, "n channels height width"], MinLen(1)]
    logits: Float32[Tensor, "n pictures classes"]


class Real(VectorUpload, Method):
    """One upload of a few real images, the baseline for synthetic images."""

    ipc: PositiveInt = 10
    """Images of every class that a client has; all images of a class with fewer."""
    choice: Literal["random", "representatives", "crops"] = "random"
    """Random records, or one near the centre of each k-means cluster of a random network's features, or those crops of
    records of which a network trained on the client's records is surest (RDED)."""
    crops: CoreSet = CoreSet(pool=300, crops=5)
    """Settings of --choice crops."""
    formation: PositiveInt = 1
    """N for N^2 pictures of one class in each image, reduced to 1/N of their sides; the server enlarges them."""
    soft_labels: Literal["none", "client", "server"] = "none"
    """Labels: the pictures' classes, the logits of a network trained on the client's records, or those of the server's
    first network for every augmented batch, on which it trains a second one."""
    teacher: SGD = SGD(epochs=20)
    """A client's training of the network that chooses crops and gives labels."""
    temperature: PositiveFloat = 4.0
    """Temperature of the server's soft labels."""
    training: CondensedTraining = CondensedTraining()
    """The server's training on the images of all clients."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        self._check(fed)
        most = {"n": self.ipc * fed.num_classes}
        if self.soft_labels == "client":
            labelled = fed.ask(self.select_labelled, exactly={"pictures": self.formation**2}, at_most=most)
            pairs = [(r.images.to(fed.device), r.logits.to(fed.device).flatten(0, 1)) for r in labelled]
            images, logits = (torch.cat(part) for part in zip(*pairs, strict=True))
            kinds = logits[:: self.formation**2].argmax(1)
            sent = Records(images, kinds, fed.num_classes, fed.like.normalisation)
            fed.show("real images sent", sent)
            return train_on(fed, Examples(self.opened(sent), logits.softmax(1)), self.training)
        select: Step[Any] = self.select_vectors if fed.like.are_vectors else self.select
        found = collect(fed, fed.ask(select, at_most=most), "real images sent")
        pictures = self.opened(found) if isinstance(found, Records) else found
        first = train_on(fed, pictures, self.training)
        return self._second(fed, pictures, first) if self.soft_labels == "server" else first

    def _second(self, fed: Federation, pictures: Records | Examples, first: nn.Module) -> nn.Module:
        """A new network, trained on what the ``first`` one says of each augmented batch, in eval mode."""
        model, progress = fed.new_model(draw=1), fed.progress("training on soft labels")

        def loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                said = first(x)
            return distillation_loss(output, said, self.temperature)

        with mode_of(first, training=False):
            rng = fed.rng("second training")
            self.training.fit(model, pictures, rng, on_epoch=progress, checkpoint=fed.epochs, loss=loss)
        return model

    def _check(self, fed: Federation) -> None:
        """Refuse settings that records have no form for."""
        check_divides(self.formation, fed.like.shape)
        for name, value in (("choice", self.choice), ("soft_labels", self.soft_labels)):
            if fed.like.are_vectors and value in ("crops", "client"):
                raise ValueError(f"{name} is {value!r}, which is for images, but the records are vectors; leave it out")

    @override
    def opened(self, sent: Records) -> Records:
        return unfolded(sent, self.formation)

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' choice, on which their replies depend."""
        labelled, cropped = self.soft_labels == "client", self.choice == "crops"
        network = self.teacher if labelled or cropped else None
        crops = self.crops if cropped else None
        return type(self), self.ipc, self.choice, self.vectors, self.formation, labelled, crops, network

    @step
    def select(self, client: Client) -> ImageSet:
        """Choose ``ipc`` images of every class."""
        return image_reply(self._chosen(client, self._trained(client) if self.choice == "crops" else None))

    @step
    def select_labelled(self, client: Client) -> LabelledPictures:
        """Choose ``ipc`` images of every class, and let a network trained on the client's records label their pictures.

        It sees them as the server will.
        """
        model = self._trained(client)
        images = self._chosen(client, model)
        logits = torch.cat(outputs(model, self.opened(images)))
        return LabelledPictures(images=images.images, logits=logits.view(len(images), self.formation**2, -1))

    @step
    def select_vectors(self, client: Client) -> VectorSet:
        """Choose ``ipc`` records of every class if they are vectors."""
        return vector_reply(self._chosen(client, None), client.train.num_classes, self)

    def _trained(self, client: Client) -> nn.Module:
        model = client.new_model()
        self.teacher.fit(model, client.train, client.rng("teacher"))
        return model

    def _chosen(self, client: Client, trained: nn.Module | None) -> Records:
        """Images of every class, of ``formation**2`` pictures each; the ``trained`` network chooses crops."""
        rng, net, count = client.rng("choice"), client.new_model(), self.ipc * self.formation**2
        images, labels = [], []
        for label in torch.unique(client.train.labels).tolist():
            part = client.train.of_class(label)
            if self.choice == "crops" and trained is not None:
                pixels, _ = self.crops.choose(part, trained, count, rng)
                images.append(self._stored(pixels))
            else:
                if self.choice == "random":
                    positions = torch.randperm(len(part), generator=rng)[:count].to(part.labels.device)
                else:
                    positions = choose(part, net, count, rng)
                some = part[positions]
                images.append(some.images if self.formation == 1 else self._stored(some.pixels()))
            labels.append(part.labels[:1].expand(len(images[-1])))
        return replace(client.train, images=torch.cat(images), labels=torch.cat(labels))

    def _stored(self, pixels: Float32[Tensor, "m c h w"]) -> UInt8[Tensor, "n c h w"]:
        """8-bit images that hold all pictures, of which the first fill up the last image."""
        each = self.formation**2
        pixels = pixels[torch.arange(-(-len(pixels) // each) * each, device=pixels.device) % len(pixels)]
        return (fold(pixels, self.formation) * 255).round().to(torch.uint8)

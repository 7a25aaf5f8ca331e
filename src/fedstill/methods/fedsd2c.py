"""FedSD2C: clients send latents of a few perturbed records, from which a public decoder makes the server's images.

Zhang, Liu, Wang, "One-shot federated learning via synthetic distiller-distillate communication", NeurIPS 2024
(arXiv:2412.05186), sections 3.2 to 3.4.

Differs from the paper (docs/methods/fedsd2c.md has the whole list):

* the autoencoder is a small one, trained at the server on public images, in place of Stable Diffusion XL's;
* clients send their logits for the decoded images; the authors' code gives their models to the server;
* classes with few records are sent too.
"""

from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le, MinLen
from jaxtyping import Float32
from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Examples, Records
from fedstill.base.weights import flattened, load_flat
from fedstill.distill.boosting import cosine
from fedstill.distill.distillates import Autoencoding, CoreSet, LatentDescent, amplitude_mixed, decoded
from fedstill.distill.ensemble import distillation_loss
from fedstill.distill.pool import to_bytes
from fedstill.evaluation import outputs
from fedstill.protocol import Client, Federation, Method, Reply, public_images, step
from fedstill.train.augment import VIEWS, View
from fedstill.train.sgd import SGD


class Distillates(Reply):
    """Latents of a client's images, and its model's logits for what they decode to."""

    latents: Annotated[Float32[Tensor, "images depth rows columns"], MinLen(1)]
    logits: Float32[Tensor, "images classes"]


class FedSD2C(Method):
    """One upload of latents, fitted to a core-set of the client's records."""

    needs_public: ClassVar[str] = "images"
    images_only: ClassVar[bool] = True
    local: SGD = SGD(weight_decay=1e-4, batch_size=128, epochs=100)
    """A client's training of the classifier that chooses and labels its images."""
    ipc: PositiveInt = 50
    """Images of each of a client's classes."""
    coding: Autoencoding = Autoencoding()
    """The autoencoder."""
    core: CoreSet = CoreSet()
    """Choice of a class's records."""
    perturbation: Annotated[float, Ge(0), Le(1)] = 0.8
    """Share of another record's Fourier amplitudes in the start of an image (lambda), from 0 to 1."""
    fitting: LatentDescent = LatentDescent()
    """Fitting of the latents to the records' features."""
    training: SGD = SGD(lr=0.02, weight_decay=1e-4, batch_size=128, epochs=100)
    """The server's training; its learning rate falls along half a cosine."""
    student_view: View = "none"
    """Augmentation of the decoded images: none, random shifts, random flips, or both."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        public, coding = public_images(fed.public, "fedsd2c"), self.coding.network(fed.like, fed.rng("autoencoder"))
        coding = coding.to(fed.device)
        self.coding.fit(coding, public, fed.rng("autoencoder's batches"), checkpoint=fed.epochs)
        depth, rows, columns = coding.grid
        replies = fed.ask(
            self.distil,
            exactly={"depth": depth, "rows": rows, "columns": columns},
            at_most={"images": self.ipc * fed.num_classes},
            autoencoder=flattened(coding),
        )
        pairs = [(decoded(coding, reply.latents.to(fed.device)), reply.logits.to(fed.device)) for reply in replies]
        pixels, logits = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        images = Records(to_bytes(pixels, self.fitting.lr), logits.argmax(1), fed.num_classes, fed.like.normalisation)
        fed.show("synthetic", images)
        model, progress = fed.new_model(), fed.progress("training at the server")
        number = self.training.passes(len(images))
        for epoch in fed.epochs(number, model):
            rate = cosine(self.training.lr, epoch, number)
            self.training.model_copy(update={"lr": rate, "epochs": 1}).fit(
                model,
                Examples(images, logits),
                fed.rng("training", epoch),
                augment=VIEWS[self.student_view],
                loss=lambda output, x, teacher: distillation_loss(output, teacher),
            )
            progress(epoch, number)
        return model

    @step
    def distil(self, client: Client, autoencoder: Float32[Tensor, " values"]) -> Distillates:
        """Train a classifier; choose, perturb and encode records of each class; fit their latents and label them."""
        model, rng, normalise = client.new_model(draw=1 + client.id), client.rng("core-set"), client.train.normalisation
        self.local.fit(model, client.train, client.rng("batches"))
        coding = self.coding.network(client.train, client.rng("autoencoder")).to(client.device)
        load_flat(coding, autoencoder)
        (black, white), targets, starts, labels = normalise.limits(client.device), [], [], []
        for label in torch.nonzero(client.train.class_counts()).flatten().tolist():
            chosen = self.core.choose(client.train.of_class(label), model, self.ipc, rng)
            x, donors = (normalise.apply(pixels) for pixels in chosen)
            start = amplitude_mixed(x, donors, self.perturbation).clamp(black, white)
            with torch.no_grad():
                starts.append(coding.encode((start - black) / (white - black)))
            targets.append(x)
            labels.append(torch.full((len(x),), label, device=client.device))
        target, z, y = torch.cat(targets), torch.cat(starts), torch.cat(labels)
        latents = self.fitting.fit(z, target, y, coding, model, normalise)
        images = Examples(normalise.apply(decoded(coding, latents)), latents.new_zeros(len(latents)))
        return Distillates(latents=latents, logits=torch.cat(outputs(model, images)))

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the first request, the autoencoder's, and of the clients' work."""
        return type(self).distil, self.local, self.ipc, self.coding, self.core, self.perturbation, self.fitting

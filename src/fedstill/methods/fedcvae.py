"""FedCVAE: clients send the decoders of autoencoders, and the server trains on images that the decoders make.

Heinbaugh, Luz-Ricca, Shao, "Data-free one-shot federated learning under very high statistical heterogeneity", ICLR 2023
(openreview.net/forum?id=_hb4vM3jspB), Algorithms 1 (FedCVAE-Ens) and 2 (FedCVAE-KD).

Differs from the paper (docs/methods/fedcvae.md has the whole list):

* images keep their size, with a black edge inside the networks; the authors resize all to 32 x 32;
* the images that the classifier is trained on are rounded to 8 bits;
* the classifier is the run's model, and sees normalised images.
"""

import copy
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Float32, Int64
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base.records import Records
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.weights import flattened, load_flat
from fedstill.distill.cvae import decoded, shares, train_cvae, train_decoder, truncated_normal, with_class
from fedstill.distill.pool import to_bytes
from fedstill.models.autoencoders import CVAE
from fedstill.protocol import Client, Federation, Method, Reply, step
from fedstill.schema import Below
from fedstill.train.sgd import Adam


class Decoded(Reply):
    """A client's decoder as one vector of its state, and its number of records of each class."""

    values: Float32[Tensor, " values"]
    counts: Annotated[Int64[Tensor, " classes"], Below(2**40)]


class FedCVAE(Method):
    """One upload of each client's decoder; the server trains a classifier on the decoders' images."""

    images_only: ClassVar[bool] = True
    aggregate: Literal["ensemble", "distilled"] = "ensemble"
    """Images of the clients' decoders (FedCVAE-Ens), or of one that is distilled from them (FedCVAE-KD)."""
    latents: PositiveInt = 10
    """Length of a latent vector."""
    beta: NonNegativeFloat = 1.0
    """Weight of the latents' divergence from N(0, I)."""
    local: Adam = Adam(epochs=15)
    """A client's training of its autoencoder."""
    truncation: Annotated[float, Gt(0), Le(6)] = 3.0
    """Latents of images are drawn from N(0, 1) truncated to this distance from 0. FedCVAE-KD's code takes 1."""
    images: PositiveInt = 5000
    """Images that the classifier is trained on, and as many that the server's decoder is trained on."""
    distillation: Adam = Adam(lr=0.01, epochs=7)
    """The training of the server's decoder, with --aggregate distilled."""
    training: Adam = Adam(epochs=10)
    """The classifier's training."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        one = self._cvae(fed.like, fed.rng("decoder")).decoder.to(fed.device)
        size = len(flattened(one))
        decoders, counts = [], []
        for reply in fed.ask(self.train, exactly={"values": size}):  # (theta_k, p_k, n_k)
            decoders.append(copy.deepcopy(one))
            load_flat(decoders[-1], reply.values)
            counts.append(reply.counts)
        if not sum(int(count.sum()) for count in counts):
            raise ValueError(
                "the clients have 0 records, which gives no classes to make images of; at least 1 is needed"
            )
        codes, pixels, labels = self._samples(decoders, counts, fed.rng("images"))
        if self.aggregate == "distilled":
            rng = fed.rng("distillation")
            train_decoder(one, codes, pixels, self.distillation, rng, checkpoint=fed.epochs)
            uniform = torch.ones(fed.num_classes, dtype=torch.int64)
            codes, pixels, labels = self._samples([one], [uniform], fed.rng("classifier's images"))
        images = Records(to_bytes(pixels, self.local.lr), labels, fed.num_classes, fed.like.normalisation)
        fed.show("synthetic", images[:100])
        model, progress = fed.new_model(), fed.progress("training at the server")
        self.training.fit(model, images, fed.rng("training"), on_epoch=progress, checkpoint=fed.epochs)
        return model

    @step
    def train(self, client: Client) -> Decoded:
        """Train the autoencoder; the encoder stays."""
        model = self._cvae(client.train, client.rng("weights")).to(client.device)
        train_cvae(model, client.train, self.beta, self.local, client.rng("batches"))
        return Decoded(values=flattened(model.decoder), counts=client.train.class_counts())

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' training, on which their replies depend."""
        return train_cvae, self.latents, self.beta, self.local

    def _cvae(self, like: Records, rng: torch.Generator) -> CVAE:
        channels, height, width = like.shape
        with isolated(draw_seed(rng)):
            return CVAE((channels, height, width), like.num_classes, self.latents)

    def _samples(self, decoders: list[Any], counts: list[Tensor], rng: torch.Generator) -> tuple[Tensor, ...]:
        """Codes, pixels and classes of ``images`` images, in proportion to the records of each client and class."""
        parts = []
        numbers = shares([int(count.sum()) for count in counts], self.images)
        for decoder, count, number in zip(decoders, counts, numbers, strict=True):
            z = truncated_normal(number, self.latents, self.truncation, rng)
            labels = torch.multinomial(count.double(), number, replacement=True, generator=rng) if number else count[:0]
            codes = with_class(z, labels, decoder.num_classes).to(next(decoder.parameters()).device)
            parts.append((codes, decoded(decoder, codes), labels.to(codes.device)) if number else None)
        return tuple(torch.cat(part) for part in zip(*filter(None, parts), strict=True))

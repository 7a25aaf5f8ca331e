"""Training of conditional variational autoencoders, and samples from their decoders: FedCVAE's parts.

Heinbaugh, Luz-Ricca, Shao, "Data-free one-shot federated learning under very high statistical heterogeneity", ICLR
2023, and the authors' code (ceh-2000/fed_cvae: ``utils.py``, ``users/user_fed_cvae_kd.py``, ``servers/``).
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, one_hot

from fedstill.base.records import Examples, Normalisation, Records
from fedstill.evaluation import outputs
from fedstill.models.autoencoders import CVAE, Decoder
from fedstill.train.sgd import Adam, Epochs


def reconstruction_loss(logits: Float[Tensor, "n c h w"], pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, ""]:
    """Sum over pixels, mean over images: cross-entropy for one channel, else the squared error of the sigmoid."""
    if logits.shape[1] == 1:
        return binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(pixels)
    return mse_loss(logits.sigmoid(), pixels, reduction="sum") / len(pixels)


def latent_divergence(mean: Float[Tensor, "n d"], log_variance: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """``mean_i KL(N(mean_i, diag exp(log_variance_i)) || N(0, I))``."""
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()


def train_cvae(model: CVAE, records: Records, beta: float, training: Adam, rng: torch.Generator) -> None:
    """Train encoder and decoder in place by ``reconstruction_loss + beta latent_divergence``, with one latent a record.

    ``rng`` draws the batches and the latents.
    """

    def loss(output: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = output
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        recovered = model.decoder(with_class(z, y, records.num_classes))
        return reconstruction_loss(recovered, x) + beta * latent_divergence(mean, log_variance)

    channels = records.shape[0]
    pixels = dataclasses.replace(records, normalisation=Normalisation((0.0,) * channels, (1.0,) * channels))
    training.fit(model, pixels, rng, loss=loss)


def train_decoder(
    decoder: Decoder,
    codes: Float[Tensor, "n d"],
    pixels: Float[Tensor, "n c h w"],
    training: Adam,
    rng: torch.Generator,
    checkpoint: Epochs | None = None,
) -> None:
    """Train ``decoder`` in place to make other decoders' ``pixels`` from the same latents and classes."""

    def loss(output: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        return reconstruction_loss(output, targets)

    training.fit(decoder, Examples(codes, pixels), rng, loss=loss, checkpoint=checkpoint)


def with_class(z: Float[Tensor, "n d"], labels: Int64[Tensor, " n"], num_classes: int) -> Float[Tensor, "n d+classes"]:
    """Latents and one-hot classes side by side: a decoder's input."""
    return torch.cat([z, one_hot(labels, num_classes).to(z.dtype)], 1)


def truncated_normal(count: int, size: int, limit: float, rng: torch.Generator) -> Float[Tensor, "count size"]:
    """Independent draws of N(0, 1) given that they lie in ``[-limit, limit]``."""
    half = math.erf(limit / math.sqrt(2))
    u = torch.rand(count, size, generator=rng, dtype=torch.float64) * 2 - 1
    return (math.sqrt(2) * torch.erfinv(half * u)).clamp(-limit, limit).float()


def shares(counts: Sequence[int], total: int) -> list[int]:
    """``total`` images divided among clients in proportion to their records, rounded down.

    The last client that has records gets the rest.
    """
    parts = [count * total // sum(counts) for count in counts]
    last = max(k for k, count in enumerate(counts) if count)
    parts[last] += total - sum(parts)
    return parts


def decoded(decoder: Decoder, codes: Float[Tensor, "n d"]) -> Float[Tensor, "n c h w"]:
    """The decoder's images, pixels in [0, 1], in eval mode."""
    return torch.cat(outputs(decoder, Examples(codes, torch.zeros(len(codes))), of=lambda x: decoder(x).sigmoid()))

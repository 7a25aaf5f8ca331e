"""FedCVAE's losses, networks and samples against its authors' formulas, worked out another way."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import run
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.base.weights import flattened
from fedstill.distill.cvae import (
    decoded,
    latent_divergence,
    reconstruction_loss,
    shares,
    train_cvae,
    train_decoder,
    truncated_normal,
    with_class,
)
from fedstill.methods.fedcvae import FedCVAE
from fedstill.models.autoencoders import CVAE, Decoder
from fedstill.train.sgd import Adam

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums in another order


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(0, *shape), dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_reconstruction_loss_and_its_gradient_are_the_published_ones(channels: int) -> None:
    logits, pixels = drawn(4, channels, 6, 5).requires_grad_(), drawn(4, channels, 6, 5).sigmoid()
    p = torch.sigmoid(logits)
    per_pixel = -(pixels * p.log() + (1 - pixels) * (1 - p).log()) if channels == 1 else (p - pixels) ** 2
    published = per_pixel.flatten(1).sum(1).mean()
    found = reconstruction_loss(logits, pixels)
    torch.testing.assert_close(found, published, **EXACT)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, published)), **EXACT)


def test_the_divergence_of_the_latents_is_that_of_torch() -> None:
    mean, log_variance = drawn(5, 3).requires_grad_(), (drawn(3, 5).T * 0.7).requires_grad_()
    each = kl_divergence(
        Normal(mean, (log_variance / 2).exp()), Normal(torch.zeros(3).double(), torch.ones(3).double())
    )
    published, found = each.sum(1).mean(), latent_divergence(mean, log_variance)
    torch.testing.assert_close(found, published, **EXACT)
    both = [mean, log_variance]
    for own, theirs in zip(torch.autograd.grad(found, both), torch.autograd.grad(published, both), strict=True):
        torch.testing.assert_close(own, theirs, **EXACT)


def test_the_networks_have_the_published_layers() -> None:
    """32 x 32, one channel, 10 latents, 10 classes; sizes of the authors' layers by hand."""
    with isolated(0):
        model = CVAE((1, 32, 32), 10, 10)
    convolutions = [(64, 64), (64, 32), (32, 32), (32, 1)]
    decoder = 21 * 256 + sum(16 * a * b + b for a, b in convolutions) + 2 * (64 + 32 + 32)
    encoder = sum(16 * a * b + b for a, b in [(1, 32), (32, 32), (32, 64), (64, 64)]) + 2 * (32 + 32 + 64 + 64)
    encoder += 257 * 500 + 501 * 20
    assert sum(p.numel() for p in model.decoder.parameters()) == decoder == 120_961
    assert sum(p.numel() for p in model.encoder.parameters()) == encoder
    assert [m.eps for m in model.decoder.modules() if isinstance(m, nn.BatchNorm2d)] == [1e-3] * 3


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 20)], ids=str)
def test_images_of_other_sizes_keep_theirs(shape: tuple[int, int, int]) -> None:
    with isolated(0):
        model = CVAE(shape, 3, 4)
    mean, log_variance = model(torch.rand(2, *shape))
    assert mean.shape == log_variance.shape == (2, 4)
    assert model.decoder(with_class(mean, torch.tensor([0, 2]), 3)).shape == (2, *shape)


def test_a_last_batch_of_one_image_can_be_trained_on() -> None:
    records = bars(33)
    with isolated(0):
        model = CVAE(records.shape, 2, 3)
    train_cvae(model, records, 1.0, Adam(epochs=1), stream(0))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_latents_are_normal_within_the_limit() -> None:
    z = truncated_normal(40_000, 2, 1.0, stream(0)).flatten()
    assert float(z.abs().max()) <= 1
    variance = 1 - 2 * math.exp(-0.5) / math.sqrt(2 * math.pi) / math.erf(1 / math.sqrt(2))  # of the truncated normal
    assert float(z.var()) == pytest.approx(variance, rel=0.02)  # its deviation over draws is 0.3 %
    assert not float(truncated_normal(40_000, 2, 3.0, stream(0)).var()) == pytest.approx(variance, rel=0.02)
    assert abs(float(z.mean())) < 0.01


def test_images_are_divided_by_records() -> None:
    assert shares([100, 300, 50], 100) == [22, 66, 12]
    assert shares([1, 1, 0], 5) == [2, 3, 0]
    assert shares([7], 5) == [5]


def bars(count: int) -> Records:
    """Class 0: a bright upper half; class 1: a bright lower half; noise on both."""
    labels = torch.arange(count) % 2
    images = torch.randint(0, 40, (count, 1, 16, 16), generator=stream(1), dtype=torch.uint8)
    images[labels == 0, :, :8] += 200
    images[labels == 1, :, 8:] += 200
    return Records(images, labels, 2, Normalisation((0.5,), (0.3,)))


@pytest.mark.slow
def test_a_decoder_learns_its_classes_and_a_second_one_learns_them_from_it() -> None:
    records = bars(128)
    with isolated(0):
        model, student = CVAE(records.shape, 2, 3), Decoder(records.shape, 2, 3)
    train_cvae(model, records, 1.0, Adam(epochs=40), stream(2))
    labels = torch.arange(64) % 2
    codes = with_class(truncated_normal(64, 3, 3.0, stream(3)), labels, 2)
    pixels = decoded(model.decoder, codes)
    train_decoder(student, codes, pixels, Adam(lr=0.01, epochs=15), stream(4))
    for images in (pixels, decoded(student, codes)):
        upper, lower = images[:, 0, :8].mean((1, 2)), images[:, 0, 8:].mean((1, 2))
        assert ((upper > lower) == (labels == 0)).double().mean() > 0.95
    before = model.decoder.training
    assert before  # sampling restores the mode


@pytest.mark.slow
def test_only_the_decoder_leaves_the_client(digits: Any, tmp_path: Path) -> None:
    method = FedCVAE(local=Adam(epochs=1), images=40, training=Adam(epochs=1))
    _, fed = run(method, digits, tmp_path, clients=2)
    size = len(flattened(CVAE(digits.train.shape, 10, 10).decoder))
    for client in range(2):
        assert size * 4 < len(fed.journal.read_reply(0, "train", client)) < size * 4 + 1000


LONG = pytest.mark.skipif("FEDSTILL_SLOW" not in os.environ, reason="12 s of a core; set FEDSTILL_SLOW=1")


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["ensemble", pytest.param("distilled", marks=LONG)])
def test_it_learns_digits_from_clients_that_share_no_class(aggregate: Any, digits: Any, tmp_path: Path) -> None:
    order = [torch.nonzero(digits.train.labels % 2 == k).flatten().numpy() for k in range(2)]
    method = FedCVAE(aggregate=aggregate, local=Adam(epochs=8), images=1000, training=Adam(epochs=4))
    model, fed = run(method, digits, tmp_path, clients=[(part, part[:5]) for part in order])  # type: ignore[arg-type]
    accuracy = fed.evaluate(model)
    assert accuracy is not None and accuracy > 0.5  # chance is 0.1; one client alone reaches 0.5 at most


@pytest.mark.slow
def test_the_distilled_form_leaves_the_global_generator_alone(digits: Any, tmp_path: Path) -> None:
    method = FedCVAE(
        aggregate="distilled", local=Adam(epochs=1), images=30, distillation=Adam(epochs=1), training=Adam(epochs=1)
    )
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(method, digits, tmp_path, clients=2)
    assert torch.equal(torch.get_rng_state(), before)

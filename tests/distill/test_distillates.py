"""FedSD2C's core-set, Fourier mixture and latents against formulas written out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from small import noise_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.records import Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.distillates import (
    Autoencoding,
    CoreSet,
    LatentDescent,
    amplitude_mixed,
    decoded,
    distillate_loss,
)
from fedstill.models.autoencoders import Autoencoder
from fedstill.train.sgd import Adam


def network(seed: int) -> nn.Module:
    with isolated(seed):
        return models.build("convnet:width=4,depth=2", (1, 8, 8), 10).eval()


def coding(seed: int = 0, shape: tuple[int, int, int] = (1, 8, 8)) -> Autoencoder:
    with isolated(seed):
        return Autoencoder(shape, 2, 4)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_the_mixture_has_the_mixed_amplitudes_and_the_images_own_phases(share: float) -> None:
    x, donors = torch.randn(2, 3, 2, 7, 8, generator=stream(0), dtype=torch.float64)
    mixed = amplitude_mixed(x, donors, share)
    for i in range(3):
        for channel in range(2):
            own, other = (np.fft.fft2(v[i, channel].numpy()) for v in (x, donors))
            amplitudes = (1 - share) * np.abs(own) + share * np.abs(other)
            expected = np.fft.ifft2(amplitudes * np.exp(1j * np.angle(own))).real
            np.testing.assert_allclose(
                mixed[i, channel].numpy(), expected, rtol=0, atol=1e-13
            )  # float64, values near 1


def test_the_core_set_has_the_easiest_records_and_donors_are_the_hardest_others(digits: Any) -> None:
    part, net = digits.train.of_class(3)[:20], network(0)
    whole = CoreSet(crops=1, smallest=1.0)  # no crop, so that pixels tell which record it is
    with torch.no_grad():
        losses = cross_entropy(net(part.inputs()), part.labels, reduction="none")
    order = losses.argsort()
    chosen, donors = whole.choose(part, net, 6, stream(1))

    def index_of(pixels: Tensor) -> list[int]:
        distances = (part.pixels()[:, None] - pixels).square().flatten(2).sum(2)
        assert float(distances.min(0).values.max()) < 1e-8
        return distances.argmin(0).tolist()

    assert sorted(index_of(chosen)) == sorted(order[:6].tolist())
    assert index_of(chosen) != order[:6].tolist()  # in a random order
    assert index_of(donors) == order.flip(0)[:6].tolist()
    few, their_donors = whole.choose(part[:4], net, 6, stream(1))
    assert sorted(index_of(few)) == [0, 1, 2, 3]
    assert sorted(index_of(their_donors)) == [0, 1, 2, 3]
    five, repeated = whole.choose(part[:6], net, 5, stream(1))
    assert len(five) == 5
    assert len(set(index_of(repeated))) == 1  # the only other record


def test_of_a_record_s_crops_the_easiest_counts(digits: Any) -> None:
    part, net = digits.train.of_class(3)[:8], network(0)

    def hardest(crops: int) -> float:
        chosen, _ = CoreSet(crops=crops).choose(part, net, 8, stream(1))
        with torch.no_grad():
            return float(cross_entropy(net(part.normalisation.apply(chosen)), part.labels))

    assert hardest(12) < hardest(1)


@pytest.mark.parametrize("ce", [0.0, 0.01])
def test_the_loss_and_its_gradient_are_the_formula_s(ce: float) -> None:
    net, code = network(0).double(), coding().double()
    z = torch.randn(5, 2, 2, 2, generator=stream(2), dtype=torch.float64).requires_grad_()
    labels = torch.arange(5)
    wanted = models.features(net, torch.randn(5, 1, 8, 8, generator=stream(3), dtype=torch.float64)).detach()
    x = code.decode(z)
    features = models.features(net, x)
    log_p = net(x) - net(x).logsumexp(1, keepdim=True)
    expected = ((features - wanted) ** 2).sum() / features.numel() - ce * log_p[torch.arange(5), labels].mean()
    found = distillate_loss(net, x, wanted, labels, ce)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_the_steps_are_adamw_s_with_half_a_cosine(digits: Any) -> None:
    """Two steps by hand: decay, moments with .5 and .9, their corrections; rates lr and lr / 2."""
    net, code, part = network(0).double(), coding().double(), digits.train[:3]
    z = torch.randn(3, 2, 2, 2, generator=stream(4), dtype=torch.float64)
    target, scale = part.inputs().double(), part.normalisation
    found = LatentDescent(steps=2, lr=0.1, weight_decay=0.5).fit(z, target, part.labels, code, net, scale)
    wanted = models.features(net, target).detach()
    m, v = torch.zeros_like(z), torch.zeros_like(z)
    for t, rate in ((1, 0.1), (2, 0.05)):
        z = z.detach().requires_grad_()
        loss = (models.features(net, scale.apply(code.decode(z))) - wanted).square().mean()
        (g,) = torch.autograd.grad(loss, z)
        m, v = 0.5 * m + 0.5 * g, 0.9 * v + 0.1 * g**2
        z = z * (1 - rate * 0.5) - rate * (m / (1 - 0.5**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
    torch.testing.assert_close(found, z.detach(), rtol=1e-9, atol=1e-12)


def test_latents_come_nearer_to_the_records_features(digits: Any) -> None:
    net, part = network(0), digits.train[:150]  # two batches
    settings = Autoencoding(width=8, training=Adam(epochs=20, lr=3e-3))
    code = settings.network(part, stream(5))
    settings.fit(code, part, stream(6))
    with torch.no_grad():
        start = code.encode(part.pixels().flip(2))
        assert float(code.encode(part.pixels()).std()) == pytest.approx(1, rel=1e-4)
    after = LatentDescent(steps=20, lr=0.1).fit(start, part.inputs(), part.labels, code, net, part.normalisation)

    def distance(z: Tensor) -> float:
        x = part.normalisation.apply(decoded(code, z))
        return float((models.features(net, x) - models.features(net, part.inputs())).square().mean())

    with torch.no_grad():
        assert distance(after) < 0.7 * distance(start)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 10)])
def test_the_autoencoder_keeps_the_shape(shape: tuple[int, int, int]) -> None:
    code = coding(shape=shape)
    x = torch.rand(2, *shape, generator=stream(7))
    assert code(x).shape == x.shape
    z = code.encode(x)
    assert tuple(z.shape[1:]) == code.grid == (2, math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digits", "noise"])
def test_training_explains_some_of_the_pixels_variance(kind: str, digits: Any) -> None:
    """A decoder that saturates explains nothing: all its images are black."""
    part: Records = digits.train[:300] if kind == "digits" else noise_images(digits, 300)()
    settings = Autoencoding(width=8, training=Adam(epochs=10, lr=3e-3))
    code = settings.network(part, stream(5))
    settings.fit(code, part, stream(6))
    with torch.no_grad():
        error = float((code(part.pixels()) - part.pixels()).square().mean())
    assert error < 0.95 * float(part.pixels().var(0).mean())  # black images: more than all of it

"""Wavelet scattering: features without training, which can't contain anything private.

Bruna, Mallat 2013 (arXiv:1203.1513), two orders, with groups of channels normalised as before the private linear
classifier of Tramer, Boneh 2021 (arXiv:2011.11660). The filters are Morlet wavelets by formula.
"""

import math
from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, group_norm, interpolate

_SMALL = 32
"""Largest side of images whose maps are not averaged by default."""
_POSITIONS = 8
"""Positions a side of the maps of larger images by default."""


class Scattering(nn.Module):
    """Moduli of wavelet transforms, smoothed and sampled at every ``2^scales``-th pixel, and a linear classifier.

    With J scales and L angles, each image channel gives ``1 + J L + L^2 J (J - 1) / 2`` feature maps. Their size and
    their cost grow with the image, so large images are reduced and the maps averaged: without that, an RGB image of 224
    x 224 has 762,048 features.

    Args:
        shape: channels, height and width of an image.
        num_classes: number of outputs.
        scales: J, octaves of wavelets.
        angles: L, directions of wavelets in half a turn.
        groups: number of groups in which feature maps are normalised to mean 0 and variance 1; 0 for none.
        side: images with a longer side are reduced to this one first; 0 for never.
        grid: positions a side of a map, at most; maps with more are averaged. 0 for all of images of up to 32 x 32, and
            for 8 of larger ones.

    Raises:
        ValueError: the images' sides are not multiples of ``2^scales`` or too short, or ``groups`` does not divide the
            number of maps.
    """

    filters: Tensor
    smooth: Tensor

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        *,
        scales: Annotated[int, Ge(1), Le(4)] = 2,
        angles: Annotated[int, Ge(1), Le(16)] = 8,
        groups: Annotated[int, Ge(0)] = 27,
        side: Annotated[int, Ge(0)] = 64,
        grid: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.size = height, width = _reduced(height, width, side, 2**scales)
        if min(height, width) < 2 ** (scales + 1) or height % 2**scales or width % 2**scales:
            raise ValueError(
                f"images of {height} x {width} do not fit {scales} scales of wavelets; both sides must be multiples of "
                f"{2**scales} from {2 ** (scales + 1)} on"
            )
        maps = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        if groups and maps * channels % groups:
            raise ValueError(
                f"groups={groups} does not divide the {maps * channels} feature maps; choose 0 or a divisor"
            )
        self.groups = groups
        self.step = 2**scales
        self._in_reals = False
        waves = [
            [_morlet(height, width, 0.8 * 2**j, math.pi * i / angles, 0.75 * math.pi / 2**j) for i in range(angles)]
            for j in range(scales)
        ]
        self.register_buffer("filters", torch.stack([torch.stack(row) for row in waves]), persistent=False)
        self.register_buffer("smooth", _gaussian(height, width, 0.8 * 2**scales), persistent=False)
        positions = height // self.step, width // self.step
        by = max(1, math.ceil(max(positions) / (grid or (_POSITIONS if max(height, width) > _SMALL else math.inf))))
        self.grid = math.ceil(positions[0] / by), math.ceil(positions[1] / by)
        self.classifier = nn.Linear(maps * channels * math.prod(self.grid), num_classes)

    def avoid_complex_numbers(self) -> None:
        """Compute from now on with pairs of real numbers, as ONNX lacks complex ones; results differ by rounding."""
        self._in_reals = True
        for name in ("filters", "smooth"):
            setattr(self, name, torch.view_as_real(getattr(self, name)).movedim(-1, 0).contiguous())

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """The scattering coefficients."""
        if torch.compiler.is_compiling():  # an exported program takes any number of images
            return self._scatter(x)
        return torch.cat([self._scatter(some) for some in torch.split(x, 32)])  # such a batch stays in the cache

    def _scatter(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        if x.shape[2:] != self.size:
            x = interpolate(x, self.size, mode="bilinear", antialias=True)
        maps = (_scattered_in_reals(self, x) if self._in_reals else self._scattered(x)).flatten(1, 2)
        if maps.shape[2:] != self.grid:
            maps = adaptive_avg_pool2d(maps, self.grid)
        return (group_norm(maps, self.groups) if self.groups else maps).flatten(1)

    def _scattered(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c k h2 w2"]:
        spectrum = torch.fft.fft2(x)[:, :, None]
        parts = [self._low(spectrum, 0)]
        for j, waves in enumerate(self.filters):
            first = self._modulus(spectrum, waves, 0, j)  # (n, c, angles, h, w)
            parts.append(self._low(first, j))
            for wider in range(j + 1, len(self.filters)):
                others = _coarse(self.filters[wider], 2**j)
                second = self._modulus(first[:, :, :, None], others, j, wider)  # (n, c, angles, angles, h, w)
                parts.append(self._low(second, wider).flatten(2, 3))
        return torch.cat(parts, 2)

    def _modulus(
        self, spectrum: Complex[Tensor, "n c *k h w"], wave: Complex[Tensor, "*k h w"], at: int, scale: int
    ) -> Complex[Tensor, "n c *k h2 w2"]:
        """The spectrum of ``|x * wave|`` at every ``2^scale``-th pixel, from a spectrum at every ``2^at``-th."""
        modulus: Tensor = torch.fft.fft2(torch.fft.ifft2(_fold(spectrum * wave, 2 ** (scale - at))).abs())
        return modulus

    def _low(self, spectrum: Complex[Tensor, "n c *k h w"], at: int) -> Float[Tensor, "n c *k h2 w2"]:
        smooth: Tensor = torch.fft.ifft2(_fold(spectrum * _coarse(self.smooth, 2**at), self.step // 2**at)).real
        return smooth

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


Parts = tuple[Tensor, Tensor]
"""The real and the imaginary parts of complex numbers."""


def _scattered_in_reals(net: Scattering, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c k h2 w2"]:
    """As `Scattering._scattered`, by matrices of sines and cosines in place of fast transforms."""

    def low(spectrum: Parts, at: int) -> Tensor:
        return _transform(_folded(_times(spectrum, _coarse(net.smooth, 2**at)), net.step // 2**at), inverse=True)[0]

    def modulus(spectrum: Parts, wave: Tensor, by: int) -> Parts:
        real, imaginary = _transform(_folded(_times(spectrum, wave), by), inverse=True)
        length = (real**2 + imaginary**2).sqrt()
        return _transform((length, torch.zeros_like(length)))

    real, imaginary = _transform((x, torch.zeros_like(x)))
    spectrum = real[:, :, None], imaginary[:, :, None]
    parts = [low(spectrum, 0)]
    scales = net.filters.shape[1]
    for j in range(scales):
        first = modulus(spectrum, net.filters[:, j], 2**j)
        parts.append(low(first, j))
        for wider in range(j + 1, scales):
            each = first[0][:, :, :, None], first[1][:, :, :, None]
            second = modulus(each, _coarse(net.filters[:, wider], 2**j), 2 ** (wider - j))
            parts.append(low(second, wider).flatten(2, 3))
    return torch.cat(parts, 2)


def _times(spectrum: Parts, wave: Float[Tensor, "2 *k h w"]) -> Parts:
    (a, b), (c, d) = spectrum, (wave[0], wave[1])
    return a * c - b * d, a * d + b * c


def _folded(spectrum: Parts, by: int) -> Parts:
    return _fold(spectrum[0], by), _fold(spectrum[1], by)


def _transform(values: Parts, *, inverse: bool = False) -> Parts:
    """The discrete Fourier transform of the last two axes, or its inverse."""
    real, imaginary = values
    for _ in range(2):  # one axis, then the other
        number = real.shape[-1]
        turns = torch.outer(*[torch.arange(number)] * 2) % number * (2 * math.pi / number)
        c, d = turns.double().cos(), (turns if inverse else -turns).double().sin()
        c, d = ((part / number if inverse else part).to(real.dtype) for part in (c, d))
        real, imaginary = real @ c - imaginary @ d, real @ d + imaginary @ c
        real, imaginary = real.transpose(-1, -2), imaginary.transpose(-1, -2)
    return real, imaginary


def _reduced(height: int, width: int, side: int, step: int) -> tuple[int, int]:
    """The size of an image whose longer side is at most ``side``, in multiples of ``step`` if it changes."""
    longer = max(height, width)
    if not side or longer <= side:
        return height, width
    height, width = (max(2 * step, round(n * side / longer / step) * step) for n in (height, width))
    return height, width


def _fold(spectrum: Complex[Tensor, "*n h w"], by: int) -> Complex[Tensor, "*n h2 w2"]:
    """The spectrum of an image reduced to every ``by``-th pixel in both directions (as kymatio samples)."""
    *rest, height, width = spectrum.shape
    if by == 1:
        return spectrum
    folded: Tensor = spectrum.reshape(*rest, by, height // by, by, width // by).mean((-4, -2))
    return folded


def _coarse(wave: Complex[Tensor, "*k h w"], by: int) -> Complex[Tensor, "*k h2 w2"]:
    """A filter's spectrum on the grid of every ``by``-th pixel."""
    return _fold(wave, by) * by**2


def _grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    y, x = (torch.arange(n, dtype=torch.float64) - n // 2 for n in (height, width))
    return y[:, None], x[None, :]


def _morlet(height: int, width: int, sigma: float, angle: float, frequency: float) -> Complex[Tensor, "h w"]:
    """The spectrum of a Morlet wavelet of mean 0: a wave in a Gaussian window, twice as wide across the wave."""
    y, x = _grid(height, width)
    along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    window = torch.exp(-(along**2 + (across / 2) ** 2) / (2 * sigma**2))
    wave = window * torch.exp(1j * frequency * along)
    wave = wave - window * (wave.sum() / window.sum())
    spectrum: Tensor = torch.fft.fft2(torch.fft.ifftshift(wave / window.sum()))
    return spectrum.to(torch.complex64)


def _gaussian(height: int, width: int, sigma: float) -> Complex[Tensor, "h w"]:
    y, x = _grid(height, width)
    window = torch.exp(-(x**2 + y**2) / (2 * sigma**2))
    spectrum: Tensor = torch.fft.fft2(torch.fft.ifftshift(window / window.sum()))
    return spectrum.to(torch.complex64)

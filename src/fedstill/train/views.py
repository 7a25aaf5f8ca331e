"""Random views of image batches for learning without labels: SimCLR's augmentations."""

import math
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Float
from pydantic import AfterValidator, PositiveFloat
from torch import Tensor

from fedstill.records import luminance
from fedstill.settings import Settings

Images = Float[Tensor, "n c h w"]
PerImage = Float[Tensor, " n"]
Probability = Annotated[float, Ge(0), Le(1)]

_CROPS = 10
"""Number of crops to try, as in torchvision, until one fits into the image."""


def _ordered(limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] > limits[1]:
        raise ValueError(
            f"the limits {limits[0]:g} and {limits[1]:g} are in the wrong order; give the smaller one first"
        )
    return limits


class Views(Settings):
    """A random view of an image: crop and resize, flip, change of colours, gray (arXiv:2002.05709, appendix A).

    Saturation, hue and gray do not change images with another number of channels than 3.
    """

    scale: Annotated[
        tuple[Annotated[float, Gt(0), Le(1)], Annotated[float, Gt(0), Le(1)]], AfterValidator(_ordered)
    ] = (0.08, 1.0)
    """Smallest and largest share of the image's area that a crop covers, before it is resized to the whole."""
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_ordered)] = (3 / 4, 4 / 3)
    """Smallest and largest width of a crop as a multiple of its height."""
    flip: Probability = 0.5
    """Probability of a left-right flip; 0 for digits and letters."""
    jitter: Probability = 0.8
    """Probability of a change of colours."""
    brightness: Probability = 0.4
    """Strength b: pixels are multiplied by a factor in [1 - b, 1 + b]."""
    contrast: Probability = 0.4
    """Strength c: distances from the image's mean luminance are multiplied by a factor in [1 - c, 1 + c]."""
    saturation: Probability = 0.4
    """Strength s: distances from each pixel's luminance are multiplied by a factor in [1 - s, 1 + s]."""
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Strength h: hues turn by up to h of the colour circle in both directions."""
    gray: Probability = 0.2
    """Probability of a grey view."""

    def __call__(self, pixels: Images, rng: torch.Generator) -> Images:
        """A view of each image, of the same shape, in [0, 1] as ``pixels``; ``rng`` is a CPU generator."""
        n, channels, height, width = pixels.shape
        device = pixels.device
        top, left, rows, columns = (v.to(device) for v in self._crops(n, height, width, rng))
        flips, jitters, grays, *factors = torch.rand(7, n, generator=rng).to(device)
        order = torch.randperm(4, generator=rng).tolist()

        down = _places(top, rows, height)
        across = _places(left, columns, width)
        across = torch.where((flips < self.flip)[:, None], across.flip(1), across)
        x = _weights(down, height)[:, None] @ pixels @ _weights(across, width)[:, None].mT

        jittered = jitters < self.jitter  # factors do not change the others
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        drawn = [(2 * u - 1) * s * jittered for u, s in zip(factors, strengths, strict=True)]
        for index in order:
            x = (_brighten, _contrast, _saturate, _turn)[index](x, drawn[index])
        if channels != 3:
            return x
        return torch.where((grays < self.gray)[:, None, None, None], luminance(x), x)

    def _crops(self, n: int, height: int, width: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of a crop of each image, in whole pixels, ``(n,)`` each."""
        low, high = self.ratio
        shares = self.scale[0] + (self.scale[1] - self.scale[0]) * torch.rand(n, _CROPS, generator=rng)
        ratios = torch.exp(math.log(low) + math.log(high / low) * torch.rand(n, _CROPS, generator=rng))
        corners = torch.rand(n, 2, generator=rng)
        rows = (height * width * shares / ratios).sqrt().round()
        columns = (height * width * shares * ratios).sqrt().round()
        fits = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
        first = fits.int().argmax(1, keepdim=True)  # the first of equals
        # If none fits, the largest crop of a permitted ratio from the middle.
        whole = min(float(height), round(width / low)), min(float(width), round(height * high))
        some = fits.any(1)
        rows = torch.where(some, rows.gather(1, first)[:, 0], whole[0])
        columns = torch.where(some, columns.gather(1, first)[:, 0], whole[1])
        corners = torch.where(some[:, None], corners, 0.5)
        top = (corners[:, 0] * (height - rows + 1)).floor().minimum(height - rows)
        left = (corners[:, 1] * (width - columns + 1)).floor().minimum(width - columns)
        return top, left, rows, columns


def _places(start: PerImage, size: PerImage, out: int) -> Float[Tensor, "n out"]:
    """Centres of ``out`` pixels spread over ``size``, in pixels, limited to the crop."""
    steps = (torch.arange(out, device=start.device) + 0.5) / out
    places = steps * size[:, None] - 0.5
    return start[:, None] + places.clamp(min=0).minimum(size[:, None] - 1)


def _weights(places: Float[Tensor, "n out"], size: int) -> Float[Tensor, "n out size"]:
    """Linear interpolation weights of ``size`` pixels for the values at ``places``."""
    return (1 - (places[:, :, None] - torch.arange(size, device=places.device)).abs()).clamp(min=0)


def _brighten(x: Images, change: PerImage) -> Images:
    return (x * (1 + change[:, None, None, None])).clamp(0, 1)


def _contrast(x: Images, change: PerImage) -> Images:
    mean = luminance(x).mean((1, 2, 3), keepdim=True)
    return (mean + (x - mean) * (1 + change[:, None, None, None])).clamp(0, 1)


def _saturate(x: Images, change: PerImage) -> Images:
    if x.shape[1] != 3:
        return x
    gray = luminance(x)
    return (gray + (x - gray) * (1 + change[:, None, None, None])).clamp(0, 1)


def _turn(x: Images, turns: PerImage) -> Images:
    """Turn each pixel's hue by ``turns`` of the colour circle, from RGB to HSV and back."""
    if x.shape[1] != 3:
        return x
    red, green, blue = (x[:, i : i + 1] for i in range(3))
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    sixth = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(
        value == red,
        (green - blue) / sixth,
        torch.where(value == green, 2 + (blue - red) / sixth, 4 + (red - green) / sixth),
    )
    # k: sixths of the circle from where a channel begins to fall from value; it lacks chroma from 1 to 3.
    offsets = torch.tensor((5.0, 3.0, 1.0), device=x.device)[:, None, None]
    k = (offsets + hue + 6 * turns[:, None, None, None]) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

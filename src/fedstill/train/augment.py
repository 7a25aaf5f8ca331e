"""Differentiable augmentation of image batches.

Zhao, Bilen, "Dataset condensation with differentiable siamese augmentation", ICML 2021 (arXiv:2102.08259), section 3.2
and the authors' code (``utils.py``, ``DiffAugment``). kornia would not do: it draws from the global generator, so it
can't repeat a draw on a second batch.

Yun, Han, Oh, Chun, Choe, Yoo, "CutMix: regularization strategy to train strong classifiers with localizable features",
ICCV 2019 (arXiv:1905.04899), section 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Float, Int64
from pydantic import AfterValidator, PositiveFloat
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy

from fedstill.base.records import luminance
from fedstill.base.settings import Settings
from fedstill.train.sgd import Augment

Images = Float[Tensor, "n c h w"]
Uniforms = Float[Tensor, "m draws"]

FULL_STRATEGY = "color_crop_cutout_flip_scale_rotate"
"""All operations, for photographs and clothes; for digits, leave ``flip`` out."""
_DRAWS = 3
_CROP, _CUTOUT, _SCALE, _ROTATE = 0.125, 0.5, 1.2, 15.0


@dataclass(frozen=True)
class Transform:
    """One drawn augmentation, which every call repeats exactly.

    Attributes:
        operation: one of the six names, or "none".
        uniforms: parameters in [0, 1): ``(1, 3)`` shared by all images, or ``(n, 3)``, one set for each image.
    """

    operation: str
    uniforms: Uniforms

    def __call__(self, x: Images) -> Images:
        """Augmented images of the same shape; gradients flow to ``x``.

        Raises:
            ValueError: the parameters were drawn for another number of images, or ``x`` are no images.
        """
        if x.ndim != 4 and self.operation != "none":
            raise ValueError(f"the augmentation {self.operation!r} is for images, not for vectors; use none")
        u = self.uniforms.to(x.device, x.dtype)
        if len(u) not in (1, len(x)):
            raise ValueError(f"the transform was drawn for {len(u)} images but got {len(x)}; draw it with n={len(x)}")
        return _OPERATIONS[self.operation](x, u)


class DSA:
    """A set of augmentations, from which each draw takes one uniformly.

    Operations (u: uniform on [0, 1), H: height in pixels): "color" brightness ``x + (u - .5)``, then saturation
    ``(x - mean over channels) 2u + mean``, then contrast ``(x - mean of image)(u + .5) + mean``; "crop" a shift by up
    to round(H / 8) pixels with zero fill; "cutout" a zero square of side H / 2 at a random centre; "flip" left-right
    with probability one half; "scale" of both axes independently by 1/1.2 to 1.2; "rotate" by -15 to 15 degrees.

    Args:
        strategy: operation names joined by "_", or "none".

    Raises:
        ValueError: the strategy names an unknown operation.
    """

    def __init__(self, strategy: str = FULL_STRATEGY) -> None:
        self.operations = tuple(strategy.split("_"))
        for name in self.operations:
            if name not in _OPERATIONS:
                raise ValueError(
                    f"strategy={strategy!r} names the unknown operation {name!r}; "
                    f"join some of {', '.join(_OPERATIONS)} with '_'"
                )

    def draw(self, rng: torch.Generator, n: int | None = None) -> Transform:
        """Draw one operation with its parameters.

        Args:
            rng: a CPU generator; the number of values drawn from it does not depend on the operation.
            n: number of images with separate parameters; ``None`` is the siamese mode, in which all images of every
                batch share one set.
        """
        index = int(torch.randint(len(self.operations), (), generator=rng))
        uniforms = torch.rand(1 if n is None else n, _DRAWS, generator=rng)
        return Transform(self.operations[index], uniforms)

    def __call__(self, x: Images, rng: torch.Generator) -> Images:
        """Augment a batch by one operation with separate parameters for every image, as an `Augment` of ``SGD.fit``."""
        return self.draw(rng, len(x))(x)


def crop(x: Images, rng: torch.Generator) -> Images:
    """Shift each image by up to round(H / 8) pixels in both directions, with zero fill.

    For 28 or 32 pixels a side this is a random crop of the image padded by 4 pixels.
    """
    return DSA("crop")(x, rng)


def flip(x: Images, rng: torch.Generator) -> Images:
    """Flip each image left to right with probability one half."""
    return DSA("flip")(x, rng)


def crop_flip(x: Images, rng: torch.Generator) -> Images:
    """Crop, then flip: the usual augmentation of CIFAR-10."""
    return flip(crop(x, rng), rng)


def _color(x: Images, u: Uniforms) -> Images:
    brightness, saturation, contrast = (u[:, i, None, None, None] for i in range(3))
    x = x + (brightness - 0.5)
    grey = x.mean(1, keepdim=True)
    x = (x - grey) * (2 * saturation) + grey
    mean = x.mean((1, 2, 3), keepdim=True)
    return (x - mean) * (contrast + 0.5) + mean


def _crop(x: Images, u: Uniforms) -> Images:
    n, _, height, width = x.shape
    rows, columns = (_window(_shift(u[:, i], size), size) for i, size in ((0, height), (1, width)))
    inside = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    mask = (inside[0][:, None, :, None] & inside[1][:, None, None, :]).to(x.dtype)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    if len(u) == 1:
        return x[:, :, rows[0]][..., columns[0]] * mask
    image = torch.arange(n, device=x.device)[:, None, None]
    return x.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1) * mask


def _cutout(x: Images, u: Uniforms) -> Images:
    masks = []
    for i, size in ((0, x.shape[2]), (1, x.shape[3])):
        side = _round(size * _CUTOUT)
        start = _integer(u[:, i], size + 1 - side % 2) - side // 2
        position = _window(-start, size)
        masks.append((position >= 0) & (position < side))
    return x * ~(masks[0][:, None, :, None] & masks[1][:, None, None, :])


def _flip(x: Images, u: Uniforms) -> Images:
    return torch.where(u[:, 0, None, None, None] < 0.5, x.flip(3), x)


def _scale(x: Images, u: Uniforms) -> Images:
    factors = u[:, :2] * (_SCALE - 1 / _SCALE) + 1 / _SCALE
    return _affine(x, torch.diag_embed(factors))


def _rotate(x: Images, u: Uniforms) -> Images:
    angle = (u[:, 0] - 0.5) * (2 * _ROTATE * math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    return _affine(x, torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1))


def _affine(x: Images, matrix: Float[Tensor, "m 2 2"]) -> Images:
    theta = functional.pad(matrix, (0, 1)).expand(len(x), 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _shift(u: Float[Tensor, " m"], size: int) -> Int64[Tensor, " m"]:
    most = _round(size * _CROP)
    return _integer(u, 2 * most + 1) - most


def _integer(u: Float[Tensor, " m"], bound: int) -> Int64[Tensor, " m"]:
    """Integers uniform on [0, bound); the clamp is for ``u * bound`` that rounds up to ``bound``."""
    return (u * bound).long().clamp(max=bound - 1)


def _window(shift: Int64[Tensor, " m"], size: int) -> Int64[Tensor, "m size"]:
    return torch.arange(size, device=shift.device) + shift[:, None]


def _round(value: float) -> int:
    return int(value + 0.5)


_OPERATIONS: dict[str, Callable[[Images, Uniforms], Images]] = {
    "color": _color,
    "crop": _crop,
    "cutout": _cutout,
    "flip": _flip,
    "scale": _scale,
    "rotate": _rotate,
    "none": lambda x, u: x,
}


def _known(strategy: str) -> str:
    DSA(strategy)
    return strategy


Strategy = Annotated[str, AfterValidator(_known)]
"""A strategy as a setting, checked for unknown operations."""

View = Literal["none", "crop", "flip", "crop_flip"]
"""Augmentation of a batch: none, random shift, random left-right flip, or both."""

VIEWS: Mapping[View, Callable[[Images, torch.Generator], Images] | None] = {
    "none": None,
    "crop": crop,
    "flip": flip,
    "crop_flip": crop_flip,
}
"""The function of each view."""


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
        top, left, rows, columns = (v.to(device) for v in self.crops(n, height, width, rng))
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
            x = (brighten, contrast, saturate, turn)[index](x, drawn[index])
        if channels != 3:
            return x
        return torch.where((grays < self.gray)[:, None, None, None], luminance(x), x)

    def crops(self, n: int, height: int, width: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def brighten(x: Images, change: PerImage) -> Images:
    """Multiply each image by ``1 + change``, and clip it to [0, 1]."""
    return (x * (1 + change[:, None, None, None])).clamp(0, 1)


def contrast(x: Images, change: PerImage) -> Images:
    """Multiply each image's distance from its mean luminance by ``1 + change``, and clip it to [0, 1]."""
    mean = luminance(x).mean((1, 2, 3), keepdim=True)
    return (mean + (x - mean) * (1 + change[:, None, None, None])).clamp(0, 1)


def saturate(x: Images, change: PerImage) -> Images:
    """Multiply each pixel's distance from its luminance by ``1 + change``, and clip it to [0, 1]; gray stays."""
    if x.shape[1] != 3:
        return x
    gray = luminance(x)
    return (gray + (x - gray) * (1 + change[:, None, None, None])).clamp(0, 1)


def turn(x: Images, turns: PerImage) -> Images:
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


class CutMix:
    """An augmentation of batches and the loss that belongs to its latest batch, for ``SGD.fit``.

    Args:
        probability: share of the batches that are mixed.
        before: augmentation of a batch before it is mixed.
    """

    def __init__(self, probability: float, before: Augment) -> None:
        self._probability, self._before = probability, before
        self.partners: Int64[Tensor, " n"] | None = None
        self.kept = 1.0

    def augment(self, x: Float[Tensor, "n c h w"], rng: torch.Generator) -> Float[Tensor, "n c h w"]:
        """The batch with one random rectangle of each image from another one; ``rng`` is a CPU generator.

        The rectangle's share of the area is uniform on [0, 1] and its centre uniform; the part outside is cut off.
        """
        x = self._before(x, rng)
        mixed, share, row, column = torch.rand(4, generator=rng).tolist()
        self.partners = None
        if mixed >= self._probability:
            return x
        (top, bottom), (left, right) = (
            _span(size, math.sqrt(share), centre) for size, centre in ((x.shape[2], row), (x.shape[3], column))
        )
        self.partners = torch.randperm(len(x), generator=rng).to(x.device)
        self.kept = 1 - (bottom - top) * (right - left) / (x.shape[2] * x.shape[3])
        result = x.clone()
        result[:, :, top:bottom, left:right] = x[self.partners, :, top:bottom, left:right]
        return result

    def loss(self, output: Float[Tensor, "n classes"], x: Tensor, y: Int64[Tensor, " n"]) -> Float[Tensor, ""]:
        """``k CE(output, y) + (1 - k) CE(output, y of the partners)``, k the share of the area that stayed."""
        own = cross_entropy(output, y)
        if self.partners is None:
            return own
        return self.kept * own + (1 - self.kept) * cross_entropy(output, y[self.partners])


def _span(size: int, share: float, centre: float) -> tuple[int, int]:
    """First and last edge of an interval of ``share`` of ``size`` pixels around ``centre``, within the image."""
    half, middle = int(size * share) // 2, int(size * centre)
    return max(0, middle - half), min(size, middle + half)

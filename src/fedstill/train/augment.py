"""Differentiable augmentation of image batches.

Zhao, Bilen, "Dataset condensation with differentiable siamese augmentation", ICML 2021 (arXiv:2102.08259), section 3.2
and the authors' code (``utils.py``, ``DiffAugment``). kornia would not do: it draws from the global generator, so it
can't repeat a draw on a second batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import AfterValidator
from torch import Tensor
from torch.nn import functional

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

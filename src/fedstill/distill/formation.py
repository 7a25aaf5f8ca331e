"""Multi-formation: a stored image holds several smaller ones, which are enlarged before use.

Kim, Kim, Oh, Yun, Song, Jeong, Ha, Song, "Dataset condensation via efficient synthetic-data parameterization" (IDC),
ICML 2022 (arXiv:2205.14959), section 4, uniform multi-formation.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from fedstill.records import Records


def unfold(images: Float[Tensor, "n c h w"], parts: int) -> Float[Tensor, "n*parts**2 c h w"]:
    """The ``parts**2`` images that each stored image holds, row by row, enlarged bilinearly; differentiable."""
    if parts == 1:
        return images
    n, c, h, w = images.shape
    grid = images.reshape(n, c, parts, h // parts, parts, w // parts).permute(0, 2, 4, 1, 3, 5)
    return interpolate(grid.reshape(-1, c, h // parts, w // parts), size=(h, w), mode="bilinear", align_corners=False)


def fold(images: Float[Tensor, "n*parts**2 c h w"], parts: int) -> Float[Tensor, "n c h w"]:
    """Stored images that hold ``parts**2`` images each, reduced by averaging square blocks of pixels."""
    if parts == 1:
        return images
    m, c, h, w = images.shape
    grid = avg_pool2d(images, parts).reshape(m // parts**2, parts, parts, c, h // parts, w // parts)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c, h, w)


def unfolded(records: Records, parts: int) -> Records:
    """The records that 8-bit stored images hold, rounded to 8 bits."""
    if parts == 1:
        return records
    pixels = torch.cat([unfold(chunk.float(), parts) for chunk in torch.split(records.images, 256)])
    labels = records.labels.repeat_interleave(parts**2)
    return Records(pixels.round().to(torch.uint8), labels, records.num_classes, records.normalisation)


def check_divides(parts: int, shape: tuple[int, ...]) -> None:
    """A ValueError if ``parts`` is not 1 and records are vectors, or it does not divide both sides of the images."""
    if parts > 1 and len(shape) == 1:
        raise ValueError(f"formation={parts} needs images, but the records are vectors of {shape[0]} numbers; take 1")
    if any(side % parts for side in shape[1:]):
        raise ValueError(
            f"formation={parts} does not divide images of {shape[1]}x{shape[2]} pixels; take a divisor of both sides"
        )

"""Pictures of any size, depth and mode as 8-bit images of one size (``--size``): resized, and cropped at the centre."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedstill.data.decode import Split

if TYPE_CHECKING:
    from PIL.Image import Image

_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes of gray pictures of 16 bits."""
_GRAY = ("1", "L", "LA", "La", *_DEEP)


def fitted(image: "Image", size: int, name: str) -> NDArray[np.uint8]:
    """Pixels ``(size, size, 1 or 3)`` of the largest centred square of a picture.

    The picture is turned as its EXIF tag says and laid over white where it is transparent; 16 bits become 8 by division
    by 257, after resizing; other modes than gray become RGB. Sizes change by Pillow's bilinear filter, which averages
    over all pixels that a smaller one covers.

    Args:
        image: a decoded picture.
        size: height and width of the result.
        name: words for the picture, for error messages.

    Raises:
        ValueError: the picture has real-valued pixels, or more than 16 bits.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    gray = image.mode in _GRAY
    if image.mode in _DEEP:
        wide = np.asarray(image).astype(np.float32)
        if wide.min() < 0 or wide.max() > 65535:
            raise ValueError(
                f"{name} has values from {wide.min():.0f} to {wide.max():.0f}, but 16 bits go from 0 to 65535; save it "
                "with 16 or 8 bits"
            )
        image = Image.fromarray(wide)
    elif image.mode == "F":
        raise ValueError(f"{name} has real-valued pixels, whose range is not known; save it with 8 or 16 bits")
    elif image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("L" if gray else "RGB")
    else:
        image = image.convert("L" if gray else "RGB")
    square = ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    pixels = np.asarray(square)
    if pixels.dtype != np.uint8:
        pixels = (pixels / 257).round().clip(0, 255).astype(np.uint8)
    return pixels.reshape(size, size, -1)


def resized(read: Callable[[], tuple[Split, Split | None]], size: int) -> tuple[Split, Split | None]:
    """The splits that ``read`` returns, with images that already are arrays resized too.

    Raises:
        ValueError: the records are no images.
    """
    train, test = read()
    return _split(train, size), None if test is None else _split(test, size)


def _split(split: Split, size: int) -> Split:
    from PIL import Image

    if split.images.ndim != 4:
        raise ValueError("--size is for images, but the records are none; leave it out")
    if split.images.shape[2:] == (size, size):
        return split
    images = np.empty((*split.images.shape[:2], size, size), np.uint8)
    for i, pixels in enumerate(split.images):
        picture = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        images[i] = fitted(picture, size, f"image {i}").transpose(2, 0, 1)
    return replace(split, images=images)

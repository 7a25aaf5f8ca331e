"""A picture's file as the model beside this file takes it.

    import torch
    from pixels import read

    images = torch.from_numpy(read("scan.png", channels=1))

A picture is turned as its EXIF tag says and laid over white where it is transparent; gray of 16 bits becomes gray of 8
bits by division by 257. A file with several pictures, a colour for a model of gray pictures, and values of which nobody
knows the range are a ValueError of one sentence. It needs numpy and Pillow; of DICOM, export PNG.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes of gray of more than 8 bits."""
_CLEAR = ("LA", "La", "PA", "RGBA", "RGBa")
"""Its modes with transparency."""
_ONE = ("MPO", "PSD", "ICO", "ICNS")
"""Formats whose further frames are the same picture."""
_BITS, _PHOTOMETRIC = 258, 262
"""Tags of TIFF: bits of a channel, and whether the least value is white."""


def read(picture: str | Path, channels: int) -> NDArray[np.uint8]:
    """One picture, uint8 ``(1, channels, height, width)``.

    Args:
        picture: the path of its file.
        channels: 1 for a model of gray pictures, 3 for one of colours (the first number of ``shape`` in
            ``config.json``).

    Raises:
        ValueError: the file is none of one picture, or has colours for a model of gray ones, or real values, or more
            than 8 bits a channel in colour.
    """
    with Image.open(picture) as image:
        frames = 1 if image.format in _ONE else getattr(image, "n_frames", 1)
        if frames > 1:
            raise ValueError(f"{picture} has {frames} pictures; save the one that counts as a file of its own")
        bits = _depth(image)
        if image.mode == "F" or (bits > 8 and not image.mode.startswith("I")):
            raise ValueError(f"{picture} has {bits} bits a channel in mode {image.mode}; save it with 8")
        is_negative = image.format == "TIFF" and image.mode in _DEEP and _tag(image, _PHOTOMETRIC) == 0
        pixels = _pixels(ImageOps.exif_transpose(image), is_negative, str(picture))
    if channels == 1 and not (pixels == pixels[:, :, :1]).all():
        raise ValueError(f"{picture} is in colour, but the model takes gray pictures; make it gray as those were made")
    colours = np.broadcast_to(pixels, (*pixels.shape[:2], 3))[:, :, :channels]
    return np.array(colours.transpose(2, 0, 1)[None], order="C")


def _pixels(image: Image.Image, is_negative: bool, name: str) -> NDArray[np.uint8]:
    """The colours ``(height, width, 1 or 3)``."""
    gray = image.mode in ("1", "L", "LA", "La", *_DEEP)
    if image.mode in _DEEP:
        wide = np.asarray(image).astype(np.float64)
        if wide.min() < 0 or wide.max() > 65535:
            raise ValueError(f"{name} has values from {wide.min():.0f} to {wide.max():.0f}; save it with 8 or 16 bits")
        if image.mode == "I" and 0 < wide.max() < 256:
            raise ValueError(f"{name} has values up to {wide.max():.0f} in 32 bits; save it with 8 or 16 bits")
        return np.rint((65535 - wide if is_negative else wide) / 257).astype(np.uint8)[:, :, None]
    if image.mode in _CLEAR or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    found = np.asarray(image.convert("L" if gray else "RGB"))
    return found.reshape(*found.shape[:2], -1)


def _depth(image: Any) -> int:
    """Bits of a channel of a PNG or TIFF file, of which Pillow drops all but 8 in colours; 8 for others."""
    if image.format == "TIFF":
        bits = _tag(image, _BITS) or 8
        return max(bits) if isinstance(bits, tuple) else int(bits)
    if image.format != "PNG":
        return 8
    with open(image.filename, "rb") as file:
        return file.read(25)[24]  # in the header IHDR


def _tag(image: Any, tag: int) -> Any:
    return image.tag_v2.get(tag)

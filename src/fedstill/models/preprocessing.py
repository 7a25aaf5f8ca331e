"""Preparation of images for pretrained networks, as their ``preprocessor_config.json`` describes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate, pad

_MODES = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}
"""Pillow's number of a resampling filter -> torch's name."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_SMALL = 384
"""ConvNeXt's smallest side that is resized without a crop."""


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, a central crop, and normalisation of pixels in [0, 1].

    Attributes:
        shortest: length of the shorter side after resizing; 0 for none.
        size: height and width after resizing, in place of ``shortest``; empty for none.
        crop: height and width of the central crop, padded with black where the image is smaller; empty for none.
        resample: Pillow's number of the filter: 0 nearest, 2 bilinear, 3 bicubic.
        mean: of each channel; one number is for all. Three make gray images colour images.
        std: standard deviations, likewise.
    """

    shortest: int = 0
    size: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()
    resample: int = 2
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def read(cls, folder: Path, side: int) -> Self:
        """The preparation that the files of a model describe; ``side`` pixels a side if there are none.

        Raises:
            ValueError: it takes a filter that torch lacks.
        """
        file = next((folder / name for name in _FILES if (folder / name).exists()), None)
        facts = {} if file is None else json.loads(file.read_text("utf-8"))
        facts = facts.get("image_processor", facts)
        found = cls._resizing(facts, side)
        resample = int(facts.get("resample", 2))
        if resample not in _MODES:
            raise ValueError(f"{str(file)!r} resizes by filter {resample}; only {sorted(_MODES)} are supported")
        mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
        if facts.get("do_normalize", True):
            mean, std = tuple(facts.get("image_mean", mean)), tuple(facts.get("image_std", std))
        else:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(**found, resample=resample, mean=mean, std=std)

    @staticmethod
    def _resizing(facts: Mapping[str, Any], side: int) -> dict[str, Any]:
        size, cropped = facts.get("size", side), facts.get("crop_size", side)
        if facts.get("crop_pct") is not None and isinstance(size, dict) and "shortest_edge" in size:  # ConvNeXt's
            edge = int(size["shortest_edge"])
            if edge >= _SMALL:
                return {"size": (edge, edge)}
            return {"shortest": int(edge / facts["crop_pct"]), "crop": (edge, edge)}
        found: dict[str, Any] = {}
        if facts.get("do_resize", True):
            if isinstance(size, dict) and "shortest_edge" in size:
                found["shortest"] = int(size["shortest_edge"])
            else:
                found["size"] = _pair(size)
        if facts.get("do_center_crop", False):
            found["crop"] = _pair(cropped)
        return found

    def __call__(self, image: UInt8[Tensor, "c h w"]) -> Float[Tensor, "1 c h w"]:
        """The input of one image."""
        return self.batch(image[None])

    def batch(self, x: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The inputs of images of one size; each of the two passes of resizing rounds to 8 bits, as Pillow's."""
        if (size := self.resized(*x.shape[2:])) != tuple(x.shape[2:]):
            x = interpolate(x, size, mode=_MODES[self.resample], antialias=self.resample != 0)
        if self.crop:
            x = _central(x, *self.crop)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (x / 255 - mean) / std  # three means make three channels of one

    def resized(self, height: int, width: int) -> tuple[int, ...]:
        """Height and width of an image after resizing, before the crop."""
        if self.size:
            return self.size
        if not self.shortest:
            return height, width
        shorter, longer = sorted((height, width))
        other = int(self.shortest * longer / shorter)
        return (self.shortest, other) if height <= width else (other, self.shortest)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return int(size), int(size)


def _central(x: Tensor, height: int, width: int) -> Tensor:
    """The central part of images, padded with 0 where they are smaller."""
    missing = [max(0, want - have) for want, have in ((height, x.shape[2]), (width, x.shape[3]))]
    if any(missing):
        x = pad(x, (missing[1] // 2, missing[1] - missing[1] // 2, missing[0] // 2, missing[0] - missing[0] // 2))
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]

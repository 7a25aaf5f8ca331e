"""Labelled images held as one uint8 tensor: what a client trains on, a server tests on and a synthetic set is."""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation of pixels in [0, 1]; ``normalised = (pixel - mean) / std``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """Map pixels in [0, 1] to the space the models see."""
        mean, std = (torch.tensor(v, dtype=pixels.dtype, device=pixels.device) for v in (self.mean, self.std))
        return (pixels - mean[:, None, None]) / std[:, None, None]


@dataclass(frozen=True)
class Records:
    """``n`` labelled images, 8 bits a channel.

    Attributes:
        images: pixels, ``(n, channels, height, width)``.
        labels: classes, ``(n,)``, each in ``[0, num_classes)``.
        num_classes: how many classes the task has (not how many occur here).
        normalisation: of the data set the images belong to.
    """

    images: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]
    num_classes: int
    normalisation: Normalisation

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        c, h, w = self.images.shape[1:]
        return c, h, w

    def __getitem__(self, index: Tensor | slice) -> "Records":
        return Records(self.images[index], self.labels[index], self.num_classes, self.normalisation)

    def to(self, device: torch.device | str) -> "Records":
        """The same records on another device."""
        return Records(self.images.to(device), self.labels.to(device), self.num_classes, self.normalisation)

    def pixels(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "n c h w"]:
        """Images as float32 in [0, 1]."""
        return self.images[index].to(torch.float32).div_(255)

    def inputs(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "n c h w"]:
        """Images as float32, normalised: what the models see."""
        return self.normalisation.apply(self.pixels(index))

    def of_class(self, label: int) -> "Records":
        """The records of one class."""
        return self[torch.nonzero(self.labels == label).flatten()]

    def class_counts(self) -> Int64[Tensor, " classes"]:
        """How many records each class has, ``(num_classes,)``."""
        return torch.bincount(self.labels, minlength=self.num_classes)


class Examples(Protocol):
    """What can be trained on: `Records`, or any other set with normalised inputs and labels."""

    @property
    def labels(self) -> Tensor:
        """Classes ``(n,)``, or what else the loss takes, a row for each record."""

    def inputs(self, index: Tensor | slice = ...) -> Tensor:
        """Normalised float32 images at the given positions, ``(n, c, h, w)``."""

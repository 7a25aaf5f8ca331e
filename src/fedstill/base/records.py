"""Labelled sets: records (8-bit images, or vectors) and examples (inputs of a network)."""

import hashlib
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped, UInt8
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel of images, with pixels in [0, 1], or of each column of vectors.

    ``normalised = (value - mean) / std``. One number is for all columns.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The inputs of the models: normalised pixels ``(n, c, h, w)``, or normalised vectors ``(n, d)``."""
        mean, std = (torch.tensor(v, dtype=values.dtype, device=values.device) for v in (self.mean, self.std))
        if values.ndim == 2:
            return (values - mean) / std
        return (values - mean[:, None, None]) / std[:, None, None]

    def limits(self, device: torch.device) -> tuple[Float[Tensor, "c 1 1"], Float[Tensor, "c 1 1"]]:
        """The normalised values of black (pixel 0) and of white (pixel 1)."""
        black, white = (self.apply(torch.full((1, len(self.mean), 1, 1), v, device=device))[0] for v in (0.0, 1.0))
        return black, white


AS_THEY_ARE = Normalisation((0.0,), (1.0,))
"""The normalisation of vectors that are inputs already."""


@dataclass(frozen=True)
class Records:
    """``n`` labelled images, 8 bits a channel, or ``n`` labelled vectors.

    Attributes:
        images: pixels, ``(n, channels, height, width)``; or vectors of ``d`` numbers (rows of a table, features).
        labels: classes, ``(n,)``, each in ``[0, num_classes)``.
        num_classes: number of the task's classes, whether they occur here or not.
        normalisation: normalisation of the task's images, or scale of the columns of its vectors.
        targets: the number to predict of each record, ``(n,)``, scaled to [-1, 1] by its public range; None for
            classes. The labels of such records are all 0, and there is one class.
    """

    images: UInt8[Tensor, "n c h w"] | Float32[Tensor, "n d"]
    labels: Int64[Tensor, " n"]
    num_classes: int
    normalisation: Normalisation
    targets: Float64[Tensor, " n"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image, or the length of one vector."""
        return tuple(self.images.shape[1:])

    @property
    def are_vectors(self) -> bool:
        """Whether the records are vectors in place of images."""
        return self.images.ndim == 2

    def __getitem__(self, index: Tensor | slice) -> "Records":
        return replace(self, images=self.images[index], labels=self.labels[index], targets=_at(self.targets, index))

    def to(self, device: torch.device | str) -> "Records":
        """The same records on another device."""
        targets = None if self.targets is None else self.targets.to(device)
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), targets=targets)

    def pixels(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "n ..."]:
        """Images as float32 in [0, 1]; vectors as they are."""
        if self.are_vectors:
            return self.images[index]
        return self.images[index].to(torch.float32).div_(255)

    def inputs(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "n ..."]:
        """Images or vectors as normalised float32: the inputs of the models."""
        return self.normalisation.apply(self.pixels(index))

    def normalised(self) -> "Records":
        """Vectors as networks see them, to be normalised no further."""
        assert self.are_vectors, "images have 8 bits"
        return replace(self, images=self.inputs(), normalisation=AS_THEY_ARE)

    def limits(self) -> tuple[Tensor, Tensor] | None:
        """The normalised values of black and of white, as `Normalisation.limits`; None for vectors."""
        return None if self.are_vectors else self.normalisation.limits(self.images.device)

    def of_class(self, label: int) -> "Records":
        """The records of one class."""
        return self[torch.nonzero(self.labels == label).flatten()]

    def class_counts(self) -> Int64[Tensor, " classes"]:
        """Number of records of each class, ``(num_classes,)``."""
        return torch.bincount(self.labels, minlength=self.num_classes)


def _at(values: Tensor | None, index: Tensor | slice) -> Tensor | None:
    return None if values is None else values[index]


def answers(records: "Trainable") -> Tensor:
    """What a model is to predict: the numbers of records whose target is one, and the labels of all others."""
    targets: Tensor | None = getattr(records, "targets", None)
    return records.labels if targets is None else targets


def check(records: Records, what: str) -> None:
    """Check records that a caller made, called ``what`` in the error.

    Raises:
        ValueError: there are none, or images, labels, classes and normalisation do not fit together.
    """
    images, labels = records.images, records.labels
    vectors = isinstance(images, Tensor) and images.ndim == 2 and images.dtype == torch.float32
    if not vectors and (not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4):
        raise ValueError(
            f"{what} images are {_kind(images)}; they must be a uint8 tensor (n, channels, height, width), and vectors "
            "a float32 tensor (n, d)"
        )
    if vectors and not all(images[i : i + 4096].isfinite().all() for i in range(0, len(images), 4096)):
        raise ValueError(f"{what} vectors have values that are not finite; correct them or drop these records")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
        raise ValueError(f"{what} labels are {_kind(labels)}; they must be an int64 tensor (n,)")
    if not len(images) or len(images) != len(labels):
        raise ValueError(f"there are {len(images)} {what} images and {len(labels)} labels; give as many, at least one")
    if int(labels.min()) < 0 or int(labels.max()) >= records.num_classes:
        raise ValueError(
            f"{what} labels go from {int(labels.min())} to {int(labels.max())}; with {records.num_classes} classes "
            f"they must be in 0 to {records.num_classes - 1}"
        )
    sizes = len(records.normalisation.mean), len(records.normalisation.std)
    if sizes != (images.shape[1],) * 2 and not (vectors and sizes == (1, 1)):
        raise ValueError(
            f"{what} images have {images.shape[1]} channels, their normalisation has {sizes[0]}, {sizes[1]}"
        )


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Trainable(Protocol):
    """Any labelled set that a network can be trained on, for example `Records` and `Examples`."""

    @property
    def labels(self) -> Tensor:
        """Classes ``(n,)``, or a row of targets for each input, which the loss interprets."""

    def inputs(self, index: Tensor | slice = ...) -> Tensor:
        """Float32 network inputs at the given positions, ``(n, ...)``."""


@dataclass(frozen=True)
class Examples:
    """Network inputs with labels: synthetic images, feature rows, or images with soft labels.

    Attributes:
        x: float inputs ``(n, ...)``, normalised; or another set, whose inputs are used and whose labels are not.
        labels: classes ``(n,)``, or a row of targets for each input ``(n, classes)``.
    """

    x: Float[Tensor, "n ..."] | Trainable
    labels: Shaped[Tensor, "n ..."]

    def inputs(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "k ..."]:
        """Network inputs at the given positions."""
        return self.x[index] if isinstance(self.x, Tensor) else self.x.inputs(index)

    def rounded(self, num_classes: int, normalisation: Normalisation) -> Records:
        """The images as 8-bit records: pixels clamped to [0, 1] and rounded."""
        values = self.inputs()
        black, white = normalisation.limits(values.device)
        pixels = ((values - black) / (white - black)).clamp(0, 1)
        return Records((pixels * 255).round().to(torch.uint8), self.labels, num_classes, normalisation)


def luminance(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
    """Grey images: of three channels by the weights of ITU-R BT.601, of another number by their mean."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = (images[:, i : i + 1] for i in range(3))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def in_words(shape: tuple[int, ...]) -> str:
    """The shape of a record, ``(c, h, w)`` or ``(d,)``, in words."""
    return f"vectors of {shape[0]} numbers" if len(shape) == 1 else f"images of {' x '.join(map(str, shape))}"


def twins(records: Tensor, others: Tensor) -> Tensor:
    """Whether each of ``records`` equals one of ``others`` to the bit; both ``(n, ...)``, of any type."""
    found = torch.zeros(len(records), dtype=torch.bool)
    if records.shape[1:] != others.shape[1:] or records.dtype != others.dtype:
        return found
    keys, known = _keys(records), _keys(others)
    alike = np.flatnonzero(np.isin(keys, known))
    digests = {_digest(others[int(i)]) for i in np.flatnonzero(np.isin(known, keys[alike]))}
    for i in alike.tolist():
        found[i] = _digest(records[i]) in digests
    return found


def _keys(records: Tensor) -> NDArray[np.uint64]:
    """A number for each record, equal for equal ones: a random sum of its bytes, eight at a time."""
    flat = records.flatten(1).contiguous().cpu().numpy()
    rows = flat.view(np.uint8).reshape(len(flat), -1) if flat.size else np.empty((len(flat), 0), np.uint8)
    wide = -(-rows.shape[1] // 8)
    weights = np.random.default_rng(0).integers(0, 1 << 64, wide, np.uint64)
    keys = np.zeros(len(rows), np.uint64)
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        padded = np.zeros((len(some), 8 * wide), np.uint8)
        padded[:, : rows.shape[1]] = some
        keys[start : start + _ROWS] = (padded.view(np.uint64) * weights).sum(1, dtype=np.uint64)
    return keys


_ROWS = 4096
"""Number of records whose keys are computed at a time."""


def _digest(record: Tensor) -> bytes:
    return hashlib.blake2b(record.cpu().numpy().tobytes(), digest_size=16).digest()

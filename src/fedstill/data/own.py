"""Data sets of tensors and of torch's data sets: `from_torch`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedstill.data import cache, sources, vectors
from fedstill.data.completion import complete
from fedstill.data.decode import Split
from fedstill.errors import front_door

Pairs = Dataset[Any] | tuple[Any, Any]
_ROUNDING = 1e-3
"""Largest distance of 255 times a float pixel from an integer."""


@front_door
def from_torch(
    train: Pairs,
    test: Pairs | None = None,
    *,
    class_names: Sequence[str] = (),
    columns: Mapping[str, Sequence[int] | Sequence[str]] | None = None,
    name: str = "own",
) -> sources.DataSet:
    """A data set for ``run(..., data=...)``, held in memory; its normalisation is that of its own train records.

    Args:
        train: a pair of records and labels, or a ``torch.utils.data.Dataset`` whose items are such pairs, read once.
            Records are tensors or arrays of one shape: images, ``(h, w)`` or ``(c, h, w)`` with 1 or 3 channels, uint8
            or floats k / 255; or vectors ``(d,)`` of numbers. Labels are integers from 0.
        test: test records; without any, a fifth of each class of ``train`` is held out, always the same records.
        class_names: names of the classes in order; by default their numbers, up to the largest label.
        columns: integers or texts for ``by:COLUMN``, one for each record of ``train``.
        name: name of the data set in messages.

    Raises:
        InputError: records differ in shape, are neither images nor vectors, have values that are not finite, or do not
            fit the labels; one sentence.
    """
    named = tuple(map(str, class_names))
    own = {key: np.asarray(values) for key, values in (columns or {}).items()}
    first = _split(train, f"the train split of {name!r}", named, own)
    second = None if test is None else _split(test, f"the test split of {name!r}", named, {})
    for key, values in own.items():
        if values.shape != first.labels.shape:
            raise ValueError(
                f"column {key!r} of {name!r} has {len(values)} values, but there are {len(first.labels)} train "
                "records; give one for each"
            )
    entry = complete(first, second, name)
    return sources.data_set(entry, cache.fingerprint(entry), name)


def _split(pairs: Pairs, where: str, class_names: tuple[str, ...], columns: dict[str, np.ndarray]) -> Split:
    x, y = pairs if isinstance(pairs, tuple) else _items(pairs, where)
    records, labels = _array(x), _array(y)
    if not len(records):
        raise ValueError(f"{where} has 0 records; it needs at least 1")
    if labels.shape != (len(records),) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"the labels of {where} are {labels.dtype} of shape {labels.shape}, but {len(records)} integers from 0 are "
            "needed, one for each record"
        )
    if records.ndim == 2 and records.dtype.kind in "biuf":
        found = vectors.of_array(records, where)
        rounding = vectors.rounding(records, found)
        return Split(found, labels.astype(np.int64), class_names, columns, rounding=rounding)
    return Split(_pixels(records, where), labels.astype(np.int64), class_names, columns)


def _items(data: Dataset[Any], where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """All records and all labels of a data set, each item read once."""
    items: Iterable[Any] = data if hasattr(data, "__iter__") else (data[i] for i in range(len(data)))  # type: ignore[arg-type]
    records, labels = [], []
    for i, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(f"item {i} of {where} is a {type(item).__name__}, but a pair (record, label) is needed")
        records.append(_array(item[0]))
        labels.append(int(item[1]))
        if records[-1].shape != records[0].shape:
            raise ValueError(
                f"record {i} of {where} has shape {records[-1].shape}, but record 0 has {records[0].shape}; give all "
                "records one shape"
            )
    return np.stack(records) if records else np.empty(0), np.array(labels, np.int64)


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _pixels(images: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Images ``(n, h, w)`` or ``(n, c, h, w)`` as uint8 ``(n, c, h, w)``."""
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"the records of {where} have shape {images.shape[1:]}; images are (h, w), (1, h, w) or (3, h, w), vectors "
            "are (d,)"
        )
    if images.dtype.kind == "f":
        pixels = torch.from_numpy(images) * 255
        rounded = pixels.round()
        if not ((pixels - rounded).abs() <= _ROUNDING).all() or rounded.min() < 0 or rounded.max() > 255:
            raise ValueError(
                f"the images of {where} are floats other than k / 255 for k = 0 .. 255, but records have 8 bits; give "
                "the pixels before any normalisation"
            )
        return np.ascontiguousarray(rounded.to(torch.uint8).numpy())
    if images.dtype != np.uint8:
        raise ValueError(f"the images of {where} are {images.dtype}; they must be uint8, or floats k / 255")
    return np.ascontiguousarray(images)

"""Completion of what a reader found: held-out test records, class names, normalisation; and checks of the whole."""

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.data import cache, texts, vectors
from fedstill.data.decode import Split
from fedstill.data.names import Known
from fedstill.data.partition import local_test_split
from fedstill.files import is_utf8
from fedstill.records import Normalisation
from fedstill.seeds import numpy_stream

FOUND = "classes_found"
"""The note whether the classes' names are those that occur among the records."""
HELD_OUT = "held_out"
"""The note whether the test records were drawn from the train records."""


def complete(train: Split, test: Split | None, name: str, known: Known | None = None) -> cache.CacheEntry:
    """The cache entry of a data set, with a test split, class names and a normalisation if it lacks them.

    Args:
        train: the train split.
        test: the test split, or None to hold out a fifth of each class.
        name: name of the data set for error messages.
        known: facts about it.

    Raises:
        ValueError: the splits do not match, or a class is absent or out of range.
    """
    if held_out := test is None:
        train, test = _hold_out(train)
    class_names = train.class_names or (known.class_names if known else ())
    class_names = class_names or _numbers(train, name)
    _check(train, test, class_names, name)
    if train.texts:
        scaled: dict[str, Any] = {}
    elif train.images.ndim == 2:
        if train.rounding is not None:  # those of test records are measured with the train records' deviations
            worst = train.rounding if test.rounding is None else np.maximum(train.rounding, test.rounding)
            vectors.check_rounding(worst, train.images, repr(name), train.features)
        normalisation, columns = vectors.scale(train.images)
        constant = vectors.column_name(columns[0], train.features) if columns else ""
        scaled = {**asdict(normalisation), "constant": constant}
    else:
        scaled = asdict((known and known.normalisation) or _normalisation(train.images))
    return cache.CacheEntry(
        arrays=arrays_of(train, test) | {f"column-{i}": column for i, column in enumerate(train.columns.values())},
        facts={"class_names": list(class_names), **scaled, "columns": list(train.columns)},
        notes={FOUND: train.is_text and known is None, HELD_OUT: held_out, "features": list(train.features)},
    )


def _hold_out(split: Split) -> tuple[Split, Split]:
    """The fixed, class-stratified 80/20 split of data without a test split."""
    rng = numpy_stream(0, "data", "held-out test split")
    indices = np.arange(len(split.labels))
    train, test = local_test_split(indices, fraction=0.2, rng=rng, labels=split.labels)
    return split.take(train), split.take(test)


def _check(train: Split, test: Split, class_names: tuple[str, ...], name: str) -> None:
    for split, what in ((train, "train"), (test, "test")):
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= len(class_names)))
        if len(wrong):
            raise ValueError(
                f"record {wrong[0]} of the {what} split of {name!r} has the class {split.labels[wrong[0]]}, but "
                f"classes are 0..{len(class_names) - 1}; correct it or drop the record"
            )
    for class_name in class_names:
        if not is_utf8(class_name):
            raise ValueError(f"the class {class_name!r} of {name!r} is not UTF-8; rename it")
    if (absent := _absent(train.labels, len(class_names))) is not None:
        raise _without_records(f"class {absent} ({class_names[absent]}) of {name!r}")
    if test.class_names and test.class_names != train.class_names:
        raise ValueError(
            f"the test split of {name!r} names its classes {', '.join(test.class_names[:5])}..., the train split "
            f"{', '.join(class_names[:5])}...; give both the same classes in the same order"
        )
    if train.images.shape[1:] != test.images.shape[1:] or train.images.dtype != test.images.dtype:
        raise ValueError(
            f"the test records of {name!r} are {_size(test)}, but the train records are {_size(train)}; convert them "
            "to one size"
        )
    if train.features != test.features:
        differing = next(a for a, b in zip(train.features, test.features, strict=True) if a != b)
        raise ValueError(
            f"the train split of {name!r} has the column {differing!r} where the test split has another; give both the "
            "same columns in the same order"
        )


def _numbers(train: Split, name: str) -> tuple[str, ...]:
    """Classes that have numbers in place of names: a number that no record could reach would take all memory."""
    most = max(0, int(train.labels.max()))
    if most >= len(train.labels) and (absent := _absent(train.labels, most + 1)) is not None:
        raise _without_records(f"class {absent} ({absent}) of {name!r}")
    return tuple(str(label) for label in range(most + 1))


def _absent(labels: NDArray[np.int64], classes: int) -> int | None:
    """The first of the classes 0..``classes`` - 1 without a record, or None."""
    present = np.unique(labels[labels >= 0])
    gaps = np.flatnonzero(present != np.arange(len(present)))
    first = int(gaps[0]) if len(gaps) else len(present)
    return first if first < classes else None


def _without_records(what: str) -> ValueError:
    return ValueError(
        f"{what} has 0 train records, but each class needs at least 1; add records, or leave the class out and number "
        "the others from 0"
    )


def _size(split: Split) -> str:
    kind = {4: "images of", 2: "vectors of", 1: "texts"}[split.images.ndim]
    return f"{kind} {' x '.join(map(str, split.images.shape[1:]))}".strip()


def _normalisation(images: NDArray[np.uint8]) -> Normalisation:
    """Exact mean and standard deviation of each channel, from the histogram of its 256 values."""
    counts = np.zeros((images.shape[1], 256))
    for chunk in np.array_split(images, -(-len(images) // 1000)):  # bincount works on a copy 8 times as large
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in chunk.swapaxes(0, 1)]
    shares = counts / counts.sum(1, keepdims=True)
    values = np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return Normalisation(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def arrays_of(train: Split, test: Split) -> dict[str, np.ndarray]:
    """The records and labels of both splits, as a cache entry has them."""
    arrays: dict[str, np.ndarray] = {}
    for name, split in (("train", train), ("test", test)):
        arrays |= texts.packed(split.images.tolist(), name) if split.texts else {f"{name}-images": split.images}
        arrays[f"{name}-labels"] = split.labels
    return arrays

"""What is public of a data set, by the loader's own knowledge: published records, and facts that no record decided.

A name, a place, a folder, a cache or an object that somebody gives makes no record public. Published are the records
with the content that is known of a data set, wherever they come from.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base.records import Records
from fedstill.data import cache
from fedstill.data.names import Known
from fedstill.data.places import Reading, Source
from fedstill.data.walk import CSV

FOUND = "classes_found"
"""The note whether the classes' names are those that occur among the records."""
CLASSES = "list of classes", "number of classes"
"""Facts about classes among `fedstill.data.sources.DataSet.measured`."""
COLUMNS = "list of columns"
"""The fact there about CSV files without a schema: one cell that is no number takes its column from every vector."""


def content(train: tuple[NDArray[Any], NDArray[np.int64]], test: tuple[NDArray[Any], NDArray[np.int64]]) -> str:
    """A digest of the records and labels of both splits, whatever their order.

    It is that of the sorted digests of the records: a sum of these, for example, would be known to be the same for
    records that somebody makes for it (Wagner 2002, "A Generalized Birthday Problem").
    """
    found = [
        hashlib.sha256(what.encode() + record.tobytes() + str(label).encode()).digest()
        for what, split in (("train", train), ("test", test))
        for record, label in zip(*split, strict=True)
    ]
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


_contents: dict[str, str] = {}
"""The content of the records that this process has looked at, by their fingerprint."""


def is_published(source: Source, entry: cache.CacheEntry, fingerprint: str) -> bool:
    """Whether the records are those published under a known name, by their content, as they came.

    What the cache says of the content is not believed: it is computed from the records, once in a process.
    """
    stated = source.known.content if source.known is not None else ""
    if not stated or source.reading.size is not None:
        return False
    names = [f"{split}-{what}" for split in ("train", "test") for what in ("images", "labels")]
    if not all(name in entry.arrays for name in names):  # texts, or the records of one site
        return False
    if fingerprint not in _contents:
        first, second, third, fourth = (entry.arrays[name] for name in names)
        _contents[fingerprint] = content((first, second), (third, fourth))
    return _contents[fingerprint] == stated


def is_same(one: Records, other: Records) -> bool:
    """Whether both have the same records and labels."""
    return (
        one.images.dtype == other.images.dtype
        and torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and one.targets is None is other.targets
    )


def measured_columns(place: Path, reading: Reading) -> tuple[str, ...]:
    """`COLUMNS` of CSV files without a schema; other tables say themselves which columns have numbers."""
    if reading.schema is not None or not place.exists():
        return ()
    files = [place] if place.is_file() else place.rglob("*")
    return (COLUMNS,) if any(file.suffix.lower() in CSV for file in files) else ()


def numbers_are_names(classes: Sequence[str]) -> bool:
    """Whether whole numbers as labels are names of these classes, and not places in their list.

    They are if a name is a number, but not that of its place. What other records have decides nothing.
    """
    return any(name.isascii() and name.isdigit() and name != str(at) for at, name in enumerate(classes))


def places_of_numbers(classes: Sequence[str]) -> tuple[str, ...]:
    """The names of classes whose places whole numbers are; none if numbers are names of their own."""
    return () if numbers_are_names(classes) else tuple(classes)


def measured_classes(names: tuple[str, ...], known: Known | None, *, published: bool, found: bool) -> tuple[str, ...]:
    """Words on what the labels tell of the classes: names that are ``found``, or numbers up to the largest label.

    Args:
        names: the classes' names.
        known: facts about the data set of this name, which may be somebody's own records all the same.
        published: whether the records are published.
        found: whether the names are those that occur among the records.
    """
    if published:
        return ()
    if found:
        return CLASSES[:1]
    stated = known.class_names if known is not None else ()
    return CLASSES[1:] if names != stated and names == tuple(map(str, range(len(names)))) else ()

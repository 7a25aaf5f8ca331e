"""What is public of a data set, by the loader's own knowledge: published records, and facts that no record decided.

A name, a place, a folder or an object that somebody gives makes no record public. Published are the records that the
loader itself had from where a known data set is published, and copies with the content that is known of it.
"""

import hashlib

import torch

from fedstill.base.records import Records
from fedstill.data import cache
from fedstill.data.decode import Split
from fedstill.data.names import Known
from fedstill.data.places import Source

FOUND = "classes_found"
"""The note whether the classes' names are those that occur among the records."""
CLASSES = "list of classes", "number of classes"
"""Facts about classes among `fedstill.data.sources.DataSet.measured`."""


def content(train: Split, test: Split) -> str:
    """A digest of records and labels of both splits, whatever their order and their other columns.

    It is that of the sorted digests of the records: a sum of these, for example, would be known to be the same for
    records that somebody makes for it (Wagner 2002, "A Generalized Birthday Problem").
    """
    found = [
        hashlib.sha256(what.encode() + record.tobytes() + str(label).encode()).digest()
        for what, split in (("train", train), ("test", test))
        for record, label in zip(split.images, split.labels, strict=True)
    ]
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def is_published(source: Source, entry: cache.CacheEntry) -> bool:
    """Whether the records are those published under a known name: by their content, if it is known, or their place."""
    stated = source.known.content if source.known is not None else ""
    if stated and source.reading.size is None:
        return bool(entry.notes.get("content") == stated)
    return source.published


def is_same(one: Records, other: Records) -> bool:
    """Whether both have the same records and labels."""
    return (
        one.images.dtype == other.images.dtype
        and torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and one.targets is None is other.targets
    )


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

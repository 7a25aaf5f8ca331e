"""Places of data: what a name or a path stands for, a data set of scikit-learn, a file or folder here, or the hub's."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fedstill.base.errors import InputError
from fedstill.base.files import expanded
from fedstill.base.lookup import nfc, suggestion
from fedstill.data import decode, pictures, walk
from fedstill.data.names import KNOWN, Known
from fedstill.data.pictures import Fit
from fedstill.data.readers import Splits, Stated, read_digits, read_folder, read_hub, read_npz, read_parquet
from fedstill.data.table_schema import TableSchema

LARGEST = 4096
"""Largest height and width of resized images, in pixels."""
_READERS = 10
"""Version of the readers of files: increased if the same files give other records or columns than before."""


@dataclass(frozen=True)
class Reading:
    """How a source is read.

    Attributes:
        size: height and width to which images are fitted, in pixels; None as they are.
        label: the column of the classes; None for one with a usual name.
        group: the column whose values stay together when test records are drawn, such as patients; None for the
            default (`fedstill.data.sources.complete`), ``"none"`` for records by themselves.
        schema: the public description of a table's columns; it names the classes' column too.
        clients: number of clients among which the values of ``group`` are dealt, if the partition names it: with as
            many values or fewer, each client has records of each split.
    """

    size: int | None = None
    label: str | None = None
    group: str | None = None
    clients: int | None = None
    schema: TableSchema | None = None

    def __post_init__(self) -> None:
        for name in ("label", "group"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, nfc(value))

    @classmethod
    def of_task(
        cls,
        *,
        partition: str,
        label: str | None,
        group: str | None,
        clients: int | None,
        schema: TableSchema | None,
        size: int | None = None,
    ) -> "Reading":
        """How the settings of a task say; a partition by a column makes it that of groups where no other is named."""
        rule, _, column = partition.partition(":")
        group = group or (None if schema is None else schema.group)
        if group is None and rule == "by":
            return cls(size, label, column, clients, schema)
        return cls(size, label, group, schema=schema)

    @property
    def persons(self) -> str:
        """The column that somebody states to tell whose a record is, which so is no feature; empty for none.

        The columns of a schema are its own, and one that deals records to clients may be a fact of each.
        """
        is_stated = self.group != "none" and self.clients is None and self.schema is None
        return (self.group or "") if is_stated else ""

    @property
    def words(self) -> str:
        """The reading in the name of a cache entry; empty for the default one."""
        return ", ".join(f"{f.name} {v}" for f in fields(self) if (v := getattr(self, f.name)) is not None)


OWN = "own"
"""Name of records that a program gives as an object."""
AS_IT_IS = Reading()


@dataclass(frozen=True)
class Source:
    """A source of data; ``location`` is unique to it, and ``state`` changes when its content changes."""

    name: str
    location: str
    state: str
    read: Callable[[], Splits]
    known: Known | None = None
    reading: Reading = AS_IT_IS

    @property
    def folder(self) -> str:
        """The name of its cache entry."""
        place = self.location + (f", read with {self.reading.words}" if self.reading.words else "")
        tag = hashlib.sha256(place.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_]+', '-', self.name)}-{tag}"


class UnknownData(InputError):
    """A name that stands for no data set.

    Args:
        name: the name.
        others: what else it may be here.
    """

    def __init__(self, name: str, others: Sequence[str] = ()) -> None:
        kinds = [
            "a folder of parquet or CSV files or of images",
            "a .parquet, .csv or .npz file",
            "a Hugging Face id 'owner/name'",
        ]
        *first, last = [*kinds, *others]
        if name == OWN:
            super().__init__(
                f"'{OWN}' stands for records that a program gave as an object, which no file has; give them again as "
                "data=..., or run on a file"
            )
            return
        super().__init__(
            f"{name!r} is neither a known data set ({', '.join(KNOWN)}) nor an existing file or folder, here or in "
            f"$FEDSTILL_DATA ({_root() or 'not set'}); give {', '.join(first)} or {last}"
            f"{suggestion(name, [*others, *KNOWN])}"
        )


def find(name: str, reading: Reading = AS_IT_IS) -> Source:
    """The source that a name, path or hub id stands for, in the order of `fedstill.data.sources.load_data`.

    Args:
        name: the name, path or id.
        reading: how to read it.

    Raises:
        ValueError: there is no such source, or the size is out of range.
    """
    size = reading.size
    if size is not None and not 1 <= size <= LARGEST:
        raise ValueError(f"--size is {size}; it must be from 1 to {LARGEST} pixels")
    fit = size and (lambda image, words: pictures.fitted(image, size, words))
    if reading.schema is not None and reading.label not in (None, reading.schema.target):
        raise ValueError(
            f"--label-column is {reading.label!r}, but the schema's target is {reading.schema.target!r}; leave one out"
        )
    source = replace(_found(name, fit or None, reading.schema or reading.label), reading=reading)
    return source if size is None else replace(source, read=partial(decode.resized, source.read, size))


def _found(name: str, fit: Fit | None, label: Stated) -> Source:
    known = KNOWN.get(name)
    if known is not None and isinstance(label, TableSchema):
        raise ValueError(f"--schema describes a table of one's own, but {name!r} is a known data set; leave it out")
    if known is not None and label is not None:
        raise ValueError(f"--label-column is {label!r}, but the classes of {name!r} are known; leave it out")
    if name == "digits":
        return Source(name, "scikit-learn", f"{known} {version('scikit-learn')}", read_digits, known)
    root = _root()
    is_path = name.startswith((".", "~", "/"))
    candidates = ([root / name] if root and not is_path else []) + ([] if known else [expanded(name)])
    path = next((path.resolve() for path in candidates if name and path.exists()), None)
    if path is not None:
        state = f"{known} {_files_state(path)} {_READERS}"
        return Source(name if known else path.stem, str(path), state, _reader(path, known, fit, label), known)
    hub = known.hub if known else name
    if hub is None or is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub):
        raise UnknownData(name)
    read = partial(read_hub, hub, known, name, fit, label)
    state = f"{known} hub {hub} {_READERS}"
    return Source(name, f"hub {hub}", state, read, known)


def _reader(path: Path, known: Known | None, fit: Fit | None, label: Stated) -> Callable[[], Splits]:
    """The reader of a file or folder here."""
    if path.is_dir():
        return partial(read_folder, path, known, fit, label)
    if path.suffix.lower() in (*walk.TABLES, *walk.CSV):
        return partial(read_parquet, path, fit, label)
    return partial(read_npz, path, label)


def _root() -> Path | None:
    """``$FEDSTILL_DATA``, if it is set."""
    folder = os.environ.get("FEDSTILL_DATA")
    return expanded(folder) if folder else None


def local_copy(name: str) -> Path | None:
    """The path of a data set under ``FEDSTILL_DATA``, or None."""
    root = _root()
    return root / name if root and (root / name).exists() else None


def own_place(name: str) -> Path | None:
    """The file or folder here that a name stands for in `fedstill.data.sources.load`; None for a known data set."""
    if name in KNOWN:
        return None
    found = local_copy(name) or expanded(name)
    return found.resolve() if found.exists() else None


def is_own(name: str) -> bool:
    """Whether a name that `fedstill.data.sources.load` takes is that of a file or folder here, no known data set's."""
    return own_place(name) is not None


def _files_state(path: Path) -> str:
    """A checksum of the names, sizes and times of a file, or of all files below a folder.

    The time of the last change of the entry (``st_ctime``) is no user's to set, unlike that of the last writing.
    """
    files = [path] if path.is_file() else sorted(file for file in walk.files(path) if file.is_file())
    stats = ((file, file.stat()) for file in files)
    lines = (f"{file.relative_to(path)} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for file, s in stats)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()

"""Places of data: what a name or a path stands for, a data set of scikit-learn, a file or folder here, or the hub's."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fedstill.base.errors import InputError
from fedstill.base.lookup import suggestion
from fedstill.data import decode
from fedstill.data.decode import Fit
from fedstill.data.names import KNOWN, Known
from fedstill.data.readers import Splits, read_digits, read_folder, read_hub, read_npz, read_parquet

LARGEST = 4096
"""Largest height and width of resized images, in pixels."""
_READERS = 3
"""Version of the readers of files: increased if the same files give other records or columns than before."""


@dataclass(frozen=True)
class Source:
    """A source of data; ``location`` is unique to it, and ``state`` changes when its content changes."""

    name: str
    location: str
    state: str
    read: Callable[[], Splits]
    known: Known | None = None
    size: int | None = None

    @property
    def folder(self) -> str:
        """The name of its cache entry."""
        place = self.location + (f" in {self.size} pixels" if self.size else "")
        tag = hashlib.sha256(place.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_]+', '-', self.name)}-{tag}"


class UnknownData(InputError):
    """A name that stands for no data set.

    Args:
        name: the name.
        others: what else it may be here.
    """

    def __init__(self, name: str, others: Sequence[str] = ()) -> None:
        kinds = ["a folder of parquet files or of images", "a .parquet or .npz file", "a Hugging Face id 'owner/name'"]
        *first, last = [*kinds, *others]
        super().__init__(
            f"{name!r} is neither a known data set ({', '.join(KNOWN)}) nor an existing file or folder, here or in "
            f"$FEDSTILL_DATA ({_root() or 'not set'}); give {', '.join(first)} or {last}"
            f"{suggestion(name, [*others, *KNOWN])}"
        )


def find(name: str, size: int | None = None) -> Source:
    """The source that a name, path or hub id stands for, in the order of `fedstill.data.sources.load_data`.

    Args:
        name: the name, path or id.
        size: height and width that images are fitted to, in pixels; as they are by default.

    Raises:
        ValueError: there is no such source, or the size is out of range.
    """
    fit = size and (lambda image, words: decode.fitted(image, size, words))
    source = _found(name, fit or None)
    if size is None:
        return source
    if not 1 <= size <= LARGEST:
        raise ValueError(f"--size is {size}; it must be from 1 to {LARGEST} pixels")
    return replace(source, size=size, read=partial(decode.resized, source.read, size))


def _found(name: str, fit: Fit | None) -> Source:
    known = KNOWN.get(name)
    if name == "digits":
        return Source(name, "scikit-learn", f"{known} {version('scikit-learn')}", read_digits, known)
    root = _root()
    is_path = name.startswith((".", "~", "/"))
    candidates = ([root / name] if root and not is_path else []) + ([] if known else [Path(name).expanduser()])
    path = next((path.resolve() for path in candidates if name and path.exists()), None)
    if path is not None:
        if path.is_file():
            read = partial(read_parquet, path, fit=fit) if path.suffix == ".parquet" else partial(read_npz, path)
        else:
            read = partial(read_folder, path, known, fit)
        state = f"{known} {_files_state(path)} {_READERS}"
        return Source(name if known else path.stem, str(path), state, read, known)
    hub = known.hub if known else name
    if hub is None or is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub):
        raise UnknownData(name)
    return Source(name, f"hub {hub}", f"{known} hub {hub}", partial(read_hub, hub, known, name, fit), known)


def _root() -> Path | None:
    """``$FEDSTILL_DATA``, if it is set."""
    folder = os.environ.get("FEDSTILL_DATA")
    return Path(folder).expanduser() if folder else None


def local_copy(name: str) -> Path | None:
    """The path of a data set under ``FEDSTILL_DATA``, or None."""
    root = _root()
    return root / name if root and (root / name).exists() else None


def is_own(name: str) -> bool:
    """Whether a name that `fedstill.data.sources.load` takes is that of a file or folder here, no known data set's."""
    return name not in KNOWN and (local_copy(name) is not None or Path(name).expanduser().exists())


def _files_state(path: Path) -> str:
    """A checksum of the names, sizes and times of a file, or of all files below a folder.

    The time of the last change of the entry (``st_ctime``) is no user's to set, unlike that of the last writing.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    stats = ((file, file.stat()) for file in files)
    lines = (f"{file.relative_to(path)} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for file, s in stats)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()

"""Loading of data sets: known names, folders, NumPy files and the Hugging Face hub, through a cache of decoded data."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedstill.data import cache, resize, texts
from fedstill.data.completion import FOUND, arrays_of, complete
from fedstill.data.decode import Fit
from fedstill.data.names import KNOWN, Known
from fedstill.data.readers import Splits, read_digits, read_folder, read_hub, read_npz, read_parquet
from fedstill.errors import front_door
from fedstill.lookup import suggestion
from fedstill.records import Normalisation, Records

LARGEST = 4096
"""Largest height and width of resized images, in pixels."""
_READERS = 3
"""Version of the readers of files: increased if the same files give other records or columns than before."""


CLASSES = "list of classes", "number of classes"
"""Facts about classes among `DataSet.measured`."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A classification task: records to deal to clients, and records to test on.

    `load_data` and `from_torch` make it. Made by hand, it has to say which of its facts are private (``measured``).

    Attributes:
        name: the known name, the hub's id, or the last part of the path.
        train: records to partition; images are mapped from the cache file, so processes share their pages.
        test: records to test on, with the same classes, shape and normalisation.
        class_names: one for each class.
        columns: other integer and text columns of ``train``, each ``(len(train),)``, for the rule ``by:COLUMN``.
        fingerprint: SHA-256 of the content; equal data from any source have an equal fingerprint.
        measured: the facts that were computed from the train records and so are not public, each of which ends a run's
            guarantee unless its settings state it: ``"normalisation"`` of images, ``"scale"`` of vectors, ``"list of
            classes"``, ``"number of classes"``. ``()`` claims that all are public.
        constant: a column of vectors that has one value in all train records, in words, if there is one: it has no
            scale.
        features: names of the columns of a table's vectors, in their order.
    """

    name: str
    train: Records
    test: Records
    class_names: tuple[str, ...]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    fingerprint: str
    measured: tuple[str, ...]
    constant: str = ""
    features: tuple[str, ...] = ()


@front_door
def load_data(data: str | Path, *, size: int | None = None, cache_dir: str | Path | None = None) -> DataSet:
    """Load a data set; the first call decodes it, later calls map the decoded cache.

    ``data`` is looked up in this order:

    1. a name in :data:`fedstill.data.names.KNOWN` (``digits`` comes with scikit-learn);
    2. ``$FEDSTILL_DATA/<name_or_path>``, for a known name and for any other that does not start with ``.``, ``~`` or
       ``/``;
    3. a path to a folder of parquet files in the hub's layout (``train-*.parquet``, ``test-*.parquet``), to a folder
       that ``datasets``' ``save_to_disk`` wrote, to a folder of images (``train/<class>/*``, ``test/<class>/*``; see
       `fedstill.data.image_folder`), to a parquet file, or to an ``.npz`` file with ``x_train, y_train, x_test,
       y_test`` as Keras names them (images, uint8 ``(n, h, w)`` or ``(n, h, w, c)``; or vectors ``(n, d)``);
    4. the Hugging Face hub: the known name's id, or ``owner/name`` itself.

    Without a test split (``test``, ``validation``, ``valid`` or ``val``), a fifth of each class is held out, always the
    same records. Without a known normalisation, it is computed from the train split, by channel or by column (a
    constant one gets a standard deviation of 1).

    Args:
        data: a known name, a path or a hub id; a `Path` is that of a file or folder, whatever its name.
        size: height and width of the images (`fedstill.data.resize.fitted`); as they are by default, if all are alike.
        cache_dir: folder of decoded data; by default ``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``.

    Raises:
        InputError: there are no such data, or they are neither equally sized 8-bit images nor finite vectors of one
            length, with classes ``0 .. C-1`` that each occur in the train split.
    """
    return load(place_of(data), size=size, cache_dir=None if cache_dir is None else Path(cache_dir))


def load(name_or_path: str, *, size: int | None = None, cache_dir: Path | None = None) -> DataSet:
    """`load_data` for the package's own modules; its errors are plain ``ValueError``."""
    source, entry, fingerprint = _cached(name_or_path, size, cache_dir)
    if "mean" not in entry.facts:
        raise ValueError(f"the records of {name_or_path!r} are texts; turn them into vectors with --features")
    return data_set(entry, fingerprint, source.name, source.known)


def place_of(data: str | Path) -> str:
    """A name or path as `load` takes it; a relative `Path` begins with ``./``, so that it is no known name.

    Raises:
        ValueError: it is of another type.
    """
    if not isinstance(data, str | Path):
        raise ValueError(f"the data are {data!r}; give a name or a path, as 'digits' or './scans'")
    text = str(data)
    return text if isinstance(data, str) or data.is_absolute() or text.startswith((".", "~")) else f"./{text}"


def _cached(name_or_path: str, size: int | None, cache_dir: Path | None) -> tuple["_Source", cache.CacheEntry, str]:
    source = _find(name_or_path, size)
    folder = (cache_dir or cache.default_folder()) / source.folder
    return source, *cache.cached(folder, source.state, lambda: complete(*source.read(), source.name, source.known))


def data_set(entry: cache.CacheEntry, fingerprint: str, name: str, known: Known | None = None) -> DataSet:
    """The data set of a cache entry of images or vectors (`fedstill.data.completion.complete`)."""
    class_names = tuple(entry.facts["class_names"])
    normalisation = Normalisation(tuple(entry.facts["mean"]), tuple(entry.facts["std"]))
    train, test = (
        Records(
            torch.from_numpy(entry.arrays[f"{split}-images"]),
            torch.from_numpy(entry.arrays[f"{split}-labels"]),
            len(class_names),
            normalisation,
        )
        for split in ("train", "test")
    )
    columns = {column: entry.arrays[f"column-{i}"] for i, column in enumerate(entry.facts["columns"])}
    scale = ("scale" if train.are_vectors else "normalisation",) * (known is None or known.normalisation is None)
    return DataSet(
        name=name,
        train=train,
        test=test,
        class_names=class_names,
        columns=columns,
        fingerprint=fingerprint,
        measured=scale + _measured_classes(class_names, known, found=bool(entry.notes.get(FOUND))),
        constant=str(entry.facts.get("constant", "")),
        features=tuple(entry.notes.get("features", ())),
    )


def _measured_classes(names: tuple[str, ...], known: Known | None, *, found: bool) -> tuple[str, ...]:
    """What the labels tell of the classes, in words: names that are ``found``, or numbers up to the largest label."""
    if known is not None:
        return ()
    if found:
        return CLASSES[:1]
    return CLASSES[1:] if names == tuple(map(str, range(len(names)))) else ()


class Part(NamedTuple):
    """One site's records of a task; classes may be absent.

    Attributes:
        train: images ``(n, channels, height, width)`` or vectors ``(n, d)``, and labels ``(n,)``, of the train split.
        test: the same of the test split; empty if there is none.
        class_names: names of the classes; empty if the source has none.
    """

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    class_names: tuple[str, ...]


def load_part(path: str, *, size: int | None = None, cache_dir: Path) -> Part:
    """Read a site's own records from a folder or an ``.npz`` file, as `load` does.

    Args:
        path: the folder or file.
        size: height and width of the images, as for `load`.
        cache_dir: folder of decoded data, so that the images are decoded again only after a change.

    Raises:
        ValueError: there are no such data, they can't be read, or the cache can't be written.
    """
    raw = load_raw_part(path, size=size, cache_dir=cache_dir)
    if isinstance(raw.train[0], list) or isinstance(raw.test[0], list):
        raise ValueError(f"the records of {path!r} are texts; turn them into vectors with --features")
    return Part((raw.train[0], raw.train[1]), (raw.test[0], raw.test[1]), raw.class_names)


class Raw(NamedTuple):
    """Records as a source has them, for a backbone: images, vectors or texts.

    Attributes:
        name: name of the data set.
        train: images ``(n, c, h, w)``, vectors ``(n, d)`` or texts of the train split, and labels ``(n,)``.
        test: the same of the test split.
        class_names: names of the classes; empty if a site's source has none.
        columns: as `DataSet.columns`.
        fingerprint: as `DataSet.fingerprint`.
        measured: what came from the labels (`DataSet.measured`).
    """

    name: str
    train: tuple[torch.Tensor | list[str], torch.Tensor]
    test: tuple[torch.Tensor | list[str], torch.Tensor]
    class_names: tuple[str, ...]
    columns: dict[str, np.ndarray]
    fingerprint: str
    measured: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a record; empty for texts."""
        records = self.train[0]
        return () if isinstance(records, list) else tuple(records.shape[1:])


def load_raw(data: "str | DataSet", *, size: int | None = None, cache_dir: Path | None = None) -> Raw:
    """A data set without a normalisation; its records may be texts.

    Args:
        data: an argument of `load`, or a data set.
        size: as for `load`.
        cache_dir: as for `load`.

    Raises:
        ValueError: as `load`.
    """
    if isinstance(data, DataSet):
        train, test = ((records.images, records.labels) for records in (data.train, data.test))
        counted = tuple(fact for fact in data.measured if fact in CLASSES)
        return Raw(data.name, train, test, data.class_names, data.columns, data.fingerprint, counted)
    source, entry, fingerprint = _cached(data, size, cache_dir)
    return _raw(source, entry, fingerprint)


def load_raw_part(path: str, *, size: int | None = None, cache_dir: Path) -> Raw:
    """A site's own records, which may be texts; arguments and errors as of `load_part`."""
    source = _find(path, size)
    entry, fingerprint = cache.cached(cache_dir / source.folder, source.state, lambda: _part(source))
    return _raw(source, entry, fingerprint)


def _raw(source: "_Source", entry: cache.CacheEntry, fingerprint: str) -> Raw:
    def split(name: str) -> tuple[torch.Tensor | list[str], torch.Tensor]:
        labels = torch.from_numpy(entry.arrays[f"{name}-labels"])
        if f"{name}-images" not in entry.arrays:
            return texts.unpacked(entry.arrays, name), labels
        return torch.from_numpy(entry.arrays[f"{name}-images"]), labels

    columns = {column: entry.arrays[f"column-{i}"] for i, column in enumerate(entry.facts.get("columns", ()))}
    names = tuple(entry.facts["class_names"])
    measured = _measured_classes(names, source.known, found=bool(entry.notes.get(FOUND)))
    return Raw(source.name, split("train"), split("test"), names, columns, fingerprint, measured)


def _part(source: "_Source") -> cache.CacheEntry:
    train, test = source.read()
    if len(train.labels) and train.labels.min() < 0:
        raise ValueError(f"{source.location!r} has the class {train.labels.min()}; classes are counted from 0")
    test = test or train.take(np.empty(0, np.int64))
    names = train.class_names or (source.known.class_names if source.known else ())
    return cache.CacheEntry(arrays=arrays_of(train, test), facts={"class_names": list(names)})


@dataclass(frozen=True)
class _Source:
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


def _find(name: str, size: int | None = None) -> _Source:
    fit = size and (lambda image, words: resize.fitted(image, size, words))
    source = _found(name, fit or None)
    if size is None:
        return source
    if not 1 <= size <= LARGEST:
        raise ValueError(f"--size is {size}; it must be from 1 to {LARGEST} pixels")
    return replace(source, size=size, read=partial(resize.resized, source.read, size))


def _found(name: str, fit: Fit | None) -> _Source:
    known = KNOWN.get(name)
    if name == "digits":
        return _Source(name, "scikit-learn", f"{known} {version('scikit-learn')}", read_digits, known)
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
        return _Source(name if known else path.stem, str(path), state, read, known)
    hub = known.hub if known else name
    if hub is None or is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub):
        raise ValueError(
            f"{name!r} is neither a known data set ({', '.join(KNOWN)}) nor an existing file or folder, here or in "
            f"$FEDSTILL_DATA ({root or 'not set'}); give a folder of parquet files or of images, a .parquet or .npz "
            f"file or a Hugging Face id 'owner/name'{suggestion(name, KNOWN)}"
        )
    return _Source(name, f"hub {hub}", f"{known} hub {hub}", partial(read_hub, hub, known, name, fit), known)


def _root() -> Path | None:
    """``$FEDSTILL_DATA``, if it is set."""
    folder = os.environ.get("FEDSTILL_DATA")
    return Path(folder).expanduser() if folder else None


def local_copy(name: str) -> Path | None:
    """The path of a data set under ``FEDSTILL_DATA``, or None."""
    root = _root()
    return root / name if root and (root / name).exists() else None


def is_own(name: str) -> bool:
    """Whether a name that `load` takes is that of a file or folder here, and of no known data set."""
    return name not in KNOWN and (local_copy(name) is not None or Path(name).expanduser().exists())


def _files_state(path: Path) -> str:
    """A checksum of the names, sizes and modification times of a file, or of all files below a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    lines = (f"{file.relative_to(path)} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

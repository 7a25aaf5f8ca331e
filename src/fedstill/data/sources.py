"""Loading of data sets: known names, folders, NumPy files and the Hugging Face hub, through a cache of decoded data."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.data import cache, texts, vectors
from fedstill.data.decode import Split
from fedstill.data.names import KNOWN, Known
from fedstill.data.partition import local_test_split
from fedstill.data.readers import Splits, read_digits, read_folder, read_hub, read_npz, read_parquet
from fedstill.lookup import suggestion
from fedstill.records import Normalisation, Records
from fedstill.seeds import numpy_stream

_FOLDERS = 2
"""Version of the readers of folders: increased if the same folder gives other records or columns than before."""


@dataclass(frozen=True)
class DataSet:
    """A classification task: records to deal to clients, and records to test on.

    Attributes:
        name: the known name, the hub's id, or the last part of the path.
        train: records to partition; images are mapped from the cache file, so processes share their pages.
        test: records to test on, with the same classes, shape and normalisation.
        class_names: one for each class.
        columns: other integer and text columns of ``train``, each ``(len(train),)``, for the rule ``by:COLUMN``.
        fingerprint: SHA-256 of the content; equal data from any source have an equal fingerprint.
    """

    name: str
    train: Records
    test: Records
    class_names: tuple[str, ...]
    columns: dict[str, np.ndarray]
    fingerprint: str
    measured: tuple[str, ...] = ()
    """Facts of the task that were computed from the train records, in words, and so are not public."""
    constant: str = ""
    """A column of vectors that has one value in all train records, in words, if there is one: it has no scale."""


def load(name_or_path: str, *, cache_dir: Path | None = None) -> DataSet:
    """Load a data set; the first call decodes it, later calls map the decoded cache.

    ``name_or_path`` is looked up in this order:

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
        name_or_path: a known name, a path or a hub id.
        cache_dir: folder of decoded data; by default ``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``.

    Raises:
        ValueError: there are no such data, or they are neither equally sized 8-bit images nor finite vectors of one
            length, with classes ``0 .. C-1`` that each occur in the train split.
    """
    source = _find(name_or_path)
    folder = (cache_dir or cache.default_folder()) / source.folder
    entry, fingerprint = cache.cached(folder, source.state, lambda: _entry(source))
    if "mean" not in entry.facts:
        raise ValueError(f"the records of {name_or_path!r} are texts; turn them into vectors with --features")
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
    columns = {name: entry.arrays[f"column-{i}"] for i, name in enumerate(entry.facts["columns"])}
    known = source.known
    numbered = class_names == tuple(map(str, range(len(class_names))))  # up to the largest label
    scale = "scale" if train.are_vectors else "normalisation"
    found = {scale: known is None or known.normalisation is None, "number of classes": not known and numbered}
    measured = tuple(name for name, is_measured in found.items() if is_measured)
    constant = str(entry.facts.get("constant", ""))
    return DataSet(source.name, train, test, class_names, columns, fingerprint, measured, constant)


load_data = load
"""The name of `load` in the package `fedstill`."""


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


def load_part(path: str, *, cache_dir: Path) -> Part:
    """Read a site's own records from a folder or an ``.npz`` file, as `load` does.

    Args:
        path: the folder or file.
        cache_dir: folder of decoded data, so that the images are decoded again only after a change.

    Raises:
        ValueError: there are no such data, they can't be read, or the cache can't be written.
    """
    source = _find(path)
    entry, _ = cache.cached(cache_dir / source.folder, source.state, lambda: _part(source))
    if "train-images" not in entry.arrays:
        raise ValueError(f"the records of {path!r} are texts; turn them into vectors with --features")
    splits = ((entry.arrays[f"{split}-images"], entry.arrays[f"{split}-labels"]) for split in ("train", "test"))
    train, test = ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in splits)
    return Part(train, test, tuple(entry.facts["class_names"]))


def _part(source: "_Source") -> cache.CacheEntry:
    train, test = source.read()
    if len(train.labels) and train.labels.min() < 0:
        raise ValueError(f"{source.location!r} has the class {train.labels.min()}; classes are counted from 0")
    test = test or train.take(np.empty(0, np.int64))
    names = train.class_names or (source.known.class_names if source.known else ())
    return cache.CacheEntry(arrays=_arrays(train, test), facts={"class_names": list(names)})


def _arrays(train: Split, test: Split) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, split in (("train", train), ("test", test)):
        arrays |= texts.packed(split.images.tolist(), name) if split.texts else {f"{name}-images": split.images}
        arrays[f"{name}-labels"] = split.labels
    return arrays


@dataclass(frozen=True)
class _Source:
    """A source of data; ``location`` is unique to it, and ``state`` changes when its content changes."""

    name: str
    location: str
    state: str
    read: Callable[[], Splits]
    known: Known | None = None

    @property
    def folder(self) -> str:
        """The name of its cache entry."""
        tag = hashlib.sha256(self.location.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_]+', '-', self.name)}-{tag}"


def _find(name: str) -> _Source:
    known = KNOWN.get(name)
    if name == "digits":
        return _Source(name, "scikit-learn", f"{known} {version('scikit-learn')}", read_digits, known)
    root = _root()
    is_path = name.startswith((".", "~", "/"))
    candidates = ([root / name] if root and not is_path else []) + ([] if known else [Path(name).expanduser()])
    path = next((path.resolve() for path in candidates if name and path.exists()), None)
    if path is not None:
        if path.is_file():
            read = partial(read_parquet if path.suffix == ".parquet" else read_npz, path)
        else:
            read = partial(read_folder, path, known)
        state = f"{known} {_files_state(path)}" + (f" {_FOLDERS}" if path.is_dir() else "")
        return _Source(name if known else path.stem, str(path), state, read, known)
    hub = known.hub if known else name
    if hub is None or is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub):
        raise ValueError(
            f"{name!r} is neither a known data set ({', '.join(KNOWN)}) nor an existing file or folder, here or in "
            f"$FEDSTILL_DATA ({root or 'not set'}); give a folder of parquet files or of images, a .parquet or .npz "
            f"file or a Hugging Face id 'owner/name'{suggestion(name, KNOWN)}"
        )
    return _Source(name, f"hub {hub}", f"{known} hub {hub}", partial(read_hub, hub, known, name), known)


def _root() -> Path | None:
    """``$FEDSTILL_DATA``, if it is set."""
    folder = os.environ.get("FEDSTILL_DATA")
    return Path(folder).expanduser() if folder else None


def local_copy(name: str) -> Path | None:
    """The path of a known data set under ``FEDSTILL_DATA``, or None."""
    root = _root()
    return root / name if root and (root / name).exists() else None


def _files_state(path: Path) -> str:
    """A checksum of the names, sizes and modification times of a file, or of all files below a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    lines = (f"{file.relative_to(path)} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _entry(source: _Source) -> cache.CacheEntry:
    """Read a source, add a test split, class names and normalisation if it lacks them, and check it."""
    train, test = source.read()
    if test is None:
        train, test = _hold_out(train)
    class_names = train.class_names or (source.known.class_names if source.known else ())
    class_names = class_names or tuple(str(label) for label in range(max(0, train.labels.max()) + 1))
    _check(train, test, class_names, source.name)
    if train.texts:
        scaled: dict[str, Any] = {}
    elif train.images.ndim == 2:
        normalisation, columns = vectors.scale(train.images)
        constant = vectors.column_name(columns[0], train.features) if columns else ""
        scaled = {**asdict(normalisation), "constant": constant}
    else:
        scaled = asdict((source.known and source.known.normalisation) or _normalisation(train.images))
    return cache.CacheEntry(
        arrays=_arrays(train, test) | {f"column-{i}": column for i, column in enumerate(train.columns.values())},
        facts={"class_names": list(class_names), **scaled, "columns": list(train.columns)},
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
    absent = np.flatnonzero(np.bincount(train.labels, minlength=len(class_names)) == 0)
    if len(absent):
        raise ValueError(
            f"class {absent[0]} ({class_names[absent[0]]}) of {name!r} has 0 train records, but each class needs at "
            "least 1; add records, or leave the class out and number the others from 0"
        )
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

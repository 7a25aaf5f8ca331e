"""Loading of data sets: known names, folders, NumPy files and the Hugging Face hub, through a cache of decoded data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base.errors import front_door
from fedstill.base.files import is_utf8
from fedstill.base.lookup import twins as twin_names
from fedstill.base.records import Normalisation, Records, twins
from fedstill.base.seeds import numpy_stream
from fedstill.base.settings import MOST_CLASSES
from fedstill.data import cache, vectors
from fedstill.data.decode import Split
from fedstill.data.names import PERSON, UNIT, Known
from fedstill.data.partition import group_split, local_test_split
from fedstill.data.places import AS_IT_IS, Reading, Source, find
from fedstill.data.published import CLASSES, FOUND, is_published, is_same, measured_classes, measured_columns

HELD_OUT = "held_out"
"""The note whether the test records were drawn from the train records."""


def complete(
    train: Split, test: Split | None, name: str, known: Known | None = None, reading: Reading = AS_IT_IS
) -> cache.CacheEntry:
    """The cache entry of a data set, with a test split, class names and a normalisation if it lacks them.

    Test records are drawn by record and class, or by whole values of a column (`_group`).

    Args:
        train: the train split.
        test: the test split, or None to hold out a fifth.
        name: name of the data set for error messages.
        known: facts about it.
        reading: the column whose values stay together.

    Raises:
        ValueError: the splits do not match, or a class is absent or out of range.
    """
    if persons := reading.persons:
        train, test = train.without(persons), test and test.without(persons)
    group = _group(train, name, known, reading)
    held_out = test is None
    if test is None:
        train, test = _hold_out(train, group)
        what = "a fifth of each class" if train.targets is None else "a fifth"
        what = f"a fifth, whole values of {group!r}" if group else what
        test = replace(test, origin=f"{what}, held out of {train.origin or 'the train records'}")
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
    arrays = {f"column-{i}": column for i, column in enumerate(train.columns.values())}
    shared = [column for column in train.columns if column in test.columns]
    arrays |= {f"test-column-{i}": test.columns[column] for i, column in enumerate(shared)}
    copies = 0 if train.texts else int(twins(*(torch.from_numpy(split.images) for split in (test, train))).sum())
    return cache.CacheEntry(
        arrays=arrays_of(train, test) | arrays,
        facts={"class_names": list(class_names), **scaled, "columns": list(train.columns), **train.facts},
        notes={
            FOUND: train.is_text,
            HELD_OUT: held_out,
            "test_columns": shared,
            "group": group,
            "copies": copies,
            "origin": [
                f"{what}: {len(s.labels):,} records, {s.origin or 'as given'}" for what, s in _both(train, test)
            ],
            "remarks": _remarks(train, test, class_names, group, copies),
        },
    )


def _group(train: Split, name: str, known: Known | None, reading: Reading) -> str:
    """The column whose values stay on one side of every split; empty for none.

    It is the one that the user names; or that of ``by:COLUMN``, if it has more values than there are clients; or, in
    somebody's own data, one with the name of a unit such as a patient, of which some has several records.

    Raises:
        ValueError: the user's column is not there.
    """
    group, columns = reading.group, train.columns
    if group == "none":
        return ""
    if group is not None and reading.clients is None:
        if gaps := train.gaps.get(group):
            raise _with_gaps(group, gaps, name)
        if group not in columns:
            there = ", ".join(columns) or "none"
            raise ValueError(f"--group is {group!r}, but the columns of {name!r} are: {there}; name one of them")
        return group
    if group in columns and len(np.unique(columns[group])) > (reading.clients or 0):
        return str(group)
    if known is not None:
        return ""
    units = (column for column in columns if UNIT.fullmatch(column) and column != group)
    counts = {unit: len(np.unique(columns[unit])) for unit in units}  # eye = 0 or 1 is a fact of a record
    found = next((unit for unit, n in counts.items() if 3 - bool(PERSON.fullmatch(unit)) <= n < len(train.labels)), "")
    some = (column for column, gaps in train.gaps.items() if gaps < len(train.labels))  # an empty one groups nothing
    gapped = next((column for column in some if (PERSON if found else UNIT).fullmatch(column)), None)
    if gapped is not None and not PERSON.fullmatch(found):  # an eye or a lesion is no person
        raise _with_gaps(gapped, train.gaps[gapped], name)
    return found


def _with_gaps(column: str, gaps: int, name: str) -> ValueError:
    return ValueError(
        f"the column {column!r} of {name!r} has {gaps:,} gaps, and nobody knows whose those records are; give each a "
        "value of its own, drop them, name another column with --group, or say --group none if none belong together"
    )


def _hold_out(split: Split, group: str) -> tuple[Split, Split]:
    """The fixed 80/20 split of data without a test split, by class or by whole values of the column ``group``.

    A class whose records all would be test records, as one of a single record or patient, stays in train.
    """
    rng = numpy_stream(0, "data", "held-out test split")
    indices, groups = np.arange(len(split.labels)), split.columns.get(group)
    train, test = divided(indices, 0.2, rng, split.labels, groups)
    lost = np.isin(split.labels, np.setdiff1d(split.labels, split.labels[train]))
    if lost.any():
        back = lost if groups is None else np.isin(groups, groups[lost])
        train, test = np.union1d(train, indices[back]), test[~back[test]]
        if not len(test):
            raise ValueError(
                "no record can be held out as a test record, since each class would lose its last one; give a test "
                "split, or more records"
            )
    return split.take(train), split.take(test)


def divided(
    indices: NDArray[np.int64],
    fraction: float,
    rng: np.random.Generator,
    labels: NDArray[np.int64],
    groups: np.ndarray | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Train and test records: of each class a fraction, or whole groups, if there are some (`partition`)."""
    if groups is None:
        return local_test_split(indices, fraction=fraction, rng=rng, labels=labels)
    return group_split(indices, fraction=fraction, rng=rng, labels=labels, groups=groups)


def _remarks(train: Split, test: Split, class_names: Sequence[str], group: str, copies: int) -> list[str]:
    """Sentences on what was left out of the records, and on what looks wrong."""
    found = [*dict.fromkeys((*train.remarks, *test.remarks))]
    counts = "accuracy counts" if train.targets is None else "errors count"
    if copies:
        what = "in all values" if train.images.ndim == 2 else "to the pixel"
        found.append(f"{copies:,} of {len(test.labels):,} test records equal a train record {what}: {counts} them too")
    alike: dict[str, list[str]] = {}
    for name in class_names:
        if name.isascii() and name.isdigit():
            alike.setdefault(name.lstrip("0"), []).append(repr(name))
    if zeros := [" and ".join(names) for names in alike.values() if len(names) > 1]:
        found.append(f"classes differ in zeros only; if they are one, rename them: {', '.join(zeros)}")
    for same in twin_names(class_names):
        names = ", ".join(map(repr, same))
        found.append(f"the classes {names} differ in capitals or blanks only; if they are one, rename them")
    for column, values in train.columns.items():
        if column not in test.columns or not (column == group or UNIT.fullmatch(column)):
            continue
        if pairs := twin_names(sorted({*map(str, values), *map(str, test.columns[column])})):
            names = ", ".join(map(repr, pairs[0]))
            found.append(f"values of {column!r} differ in capitals or blanks only, and count as several: {names}")
        if both := len(np.intersect1d(values, test.columns[column])):
            found.append(f"values of {column!r} with records in train and in test: {both:,}; {counts} them too")
    return found


def _both(train: Split, test: Split) -> tuple[tuple[str, Split], tuple[str, Split]]:
    return ("train", train), ("test", test)


def _check(train: Split, test: Split, class_names: tuple[str, ...], name: str) -> None:
    for what, split in _both(train, test):
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= len(class_names)))
        if len(wrong):
            raise ValueError(
                f"record {wrong[0]} of the {what} split of {name!r} has the class {split.labels[wrong[0]]}, but "
                f"classes are 0..{len(class_names) - 1}; correct it or drop the record"
            )
    if train.targets is not None and np.ptp(train.targets) == 0:
        raise ValueError(f"the target {class_names[0]!r} of {name!r} has one value in all train records; name another")
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
    if lone := sorted({*train.features} ^ {*test.features}):
        where = "train" if lone[0] in train.features else "test"
        raise ValueError(
            f"the column {lone[0]!r} of numbers is in the {where} split of {name!r} alone; give both the same columns, "
            "of one type (codes such as 010 are texts)"
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
        arrays |= cache.packed(split.images.tolist(), name) if split.texts else {f"{name}-images": split.images}
        arrays[f"{name}-labels"] = split.labels
        if split.targets is not None:
            arrays[f"{name}-targets"] = split.targets
    return arrays


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
        test_columns: those of them that ``test`` has too, each ``(len(test),)``.
        fingerprint: SHA-256 of the content; equal data from any source have an equal fingerprint.
        measured: the facts that were computed from the train records and so are not public, each of which ends a run's
            guarantee unless its settings state it: ``"normalisation"`` of images, ``"scale"`` of vectors, ``"list of
            classes"``, ``"number of classes"``. ``()`` claims that all are public.
        constant: a column of vectors that has one value in all train records, in words, if there is one: it has no
            scale.
        features: names of the columns of a table's vectors, in their order.
        held_out: whether the test records were drawn from the train records, so that each of these had a part in it.
        source: the fingerprint of the records from which a backbone made these; empty for records as they came.
        pictures: the shape of the images from which a backbone made these; empty for others.
        known: whether the records are those that are published under the name of a known data set, by their content: a
            name that somebody gives, or a place, makes no data public.
        group: the column whose values stay on one side of every split; empty for none.
        copies: number of test records that equal a train record; None where nobody counted.
        origin: a sentence for each split on the files that it took.
        remarks: sentences on what was left out of the records, and on what looks wrong.
    """

    name: str
    train: Records
    test: Records
    class_names: tuple[str, ...]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    test_columns: dict[str, np.ndarray] = field(default_factory=dict)
    fingerprint: str
    measured: tuple[str, ...]
    constant: str = ""
    features: tuple[str, ...] = ()
    held_out: bool = False
    source: str = ""
    pictures: tuple[int, ...] = ()
    known: bool = False
    group: str = ""
    copies: int | None = None
    origin: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@front_door
def load_data(
    data: str | Path,
    *,
    size: int | None = None,
    label_column: str | None = None,
    group: str | None = None,
    cache_dir: str | Path | None = None,
) -> DataSet:
    """Load a data set; the first call decodes it, later calls map the decoded cache.

    ``data`` is looked up in this order:

    1. a name in :data:`fedstill.data.names.KNOWN` (``digits`` comes with scikit-learn);
    2. ``$FEDSTILL_DATA/<data>``, for a known name and for any other that does not start with ``.``, ``~`` or
       ``/``;
    3. a path to a folder of parquet files (``train-*.parquet``, ``test/part-0.parquet``; `fedstill.data.walk`), to a
       folder that ``datasets``' ``save_to_disk`` wrote, to a folder of images (``train/<class>/*``,
       ``test/<class>/*``; `fedstill.data.image_folder`), to a parquet file, or to an ``.npz`` file with ``x_train,
       y_train, x_test, y_test`` as Keras names them, or ``train_images, train_labels, ...`` as MedMNIST does (images,
       uint8 ``(n, h, w)`` or ``(n, h, w, c)``; or vectors ``(n, d)``);
    4. the Hugging Face hub: the known name's id, or ``owner/name`` itself.

    Without a test split (``test``, ``validation``, ``valid`` or ``val``), a fifth of each class is held out, always the
    same records; with a column such as ``patient``, a fifth of the records, of whole patients. Without a known
    normalisation, it is computed from the train split, by channel or by column (a constant one gets a standard
    deviation of 1).

    Args:
        data: a known name, a path or a hub id; a `Path` is that of a file or folder, whatever its name.
        size: height and width of the images (`fedstill.data.pictures.fitted`); as they are, if all are alike.
        label_column: column of the classes; by default ``label``, ``labels``, ``fine_label`` or ``target``, or the
            folders.
        group: column whose values stay on one side of the split into train and test; ``"none"`` for records by
            themselves. By default one with a name such as ``patient`` or ``subject_id``.
        cache_dir: folder of decoded data; by default ``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``.

    Raises:
        InputError: there are no such data, or they are neither equally sized 8-bit images nor finite vectors of one
            length, with classes ``0 .. C-1`` that each occur in the train split.
    """
    return load(place_of(data), Reading(size, label_column, group), None if cache_dir is None else Path(cache_dir))


def load(name_or_path: str, reading: Reading = AS_IT_IS, cache_dir: Path | None = None) -> DataSet:
    """`load_data` for the package's own modules; its errors are plain ``ValueError``."""
    source, entry, fingerprint = _cached(name_or_path, reading, cache_dir)
    if "mean" not in entry.facts:
        raise ValueError(f"the records of {name_or_path!r} are texts; turn them into vectors with --features")
    published = _is_published(source, entry, fingerprint, cache_dir)
    found = data_set(entry, fingerprint, source.name, source.known, published=published)
    if found.features:
        found = replace(found, measured=(*found.measured, *measured_columns(Path(source.location), reading)))
    if found.known:
        _PLACES[fingerprint] = name_or_path, reading, cache_dir
    return found


_PLACES: dict[str, tuple[str, Reading, Path | None]] = {}
"""From where this process loaded published records, by their fingerprint."""


def verified(data: DataSet) -> DataSet:
    """``data``, which are `DataSet.known` only if they still have the records and labels that `load` gave them.

    A data set is an object that anybody may change: `dataclasses.replace` keeps ``known`` beside other records.
    """
    if not data.known:
        return data
    place = _PLACES.get(data.fingerprint)
    if place is None:
        return replace(data, known=False)
    first = load(*place)
    return replace(data, known=is_same(data.train, first.train) and is_same(data.test, first.test))


def fingerprint(name_or_path: str, reading: Reading = AS_IT_IS) -> str:
    """The `DataSet.fingerprint` of what `load` would return, also of texts."""
    return _cached(name_or_path, reading, None)[2]


def place_of(data: str | Path) -> str:
    """A name or path as `load` takes it; a relative `Path` begins with ``./``, so that it is no known name.

    Raises:
        ValueError: it is of another type.
    """
    if not isinstance(data, str | Path):
        raise ValueError(
            f"the data are a {type(data).__name__}; give a name or a path, as 'digits' or './scans', or what "
            "from_torch returns"
        )
    text = str(data)
    return text if isinstance(data, str) or data.is_absolute() or text.startswith((".", "~")) else f"./{text}"


def _cached(name_or_path: str, reading: Reading, cache_dir: Path | None) -> tuple[Source, cache.CacheEntry, str]:
    source = find(name_or_path, reading)
    folder = (cache_dir or cache.default_folder()) / source.folder
    return source, *cache.cached(
        folder, source.state, lambda: complete(*source.read(), source.name, source.known, reading)
    )


def _is_published(source: Source, entry: cache.CacheEntry, fingerprint: str, cache_dir: Path | None) -> bool:
    """Whether the records are published ones; of images of another size, whether those are that they were made from."""
    if source.known is not None and source.known.content and source.reading.size is not None:
        try:
            source, entry, fingerprint = _cached(source.name, replace(source.reading, size=None), cache_dir)
        except ValueError:  # pictures of several sizes, say
            return False
    return is_published(source, entry, fingerprint)


def data_set(
    entry: cache.CacheEntry, fingerprint: str, name: str, known: Known | None = None, *, published: bool = False
) -> DataSet:
    """The data set of a cache entry of images or vectors (`fedstill.data.sources.complete`)."""
    class_names = tuple(entry.facts["class_names"])
    normalisation = Normalisation(tuple(entry.facts["mean"]), tuple(entry.facts["std"]))
    train, test = (
        Records(
            torch.from_numpy(entry.arrays[f"{split}-images"]),
            torch.from_numpy(entry.arrays[f"{split}-labels"]),
            len(class_names),
            normalisation,
            torch.from_numpy(entry.arrays[f"{split}-targets"]) if f"{split}-targets" in entry.arrays else None,
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
        measured=scale + measured_classes(class_names, known, published=published, found=bool(entry.notes.get(FOUND))),
        known=published,
        constant=str(entry.facts.get("constant", "")),
        features=tuple(entry.facts.get("features", ())),
        held_out=bool(entry.notes.get(HELD_OUT)),
        **_also(entry),
    )


def _also(entry: cache.CacheEntry) -> dict[str, Any]:
    """The facts of an entry that data sets and `Raw` records have alike."""
    columns = entry.notes.get("test_columns", ())
    return {
        "test_columns": {column: entry.arrays[f"test-column-{i}"] for i, column in enumerate(columns)},
        "group": str(entry.notes.get("group", "")),
        "copies": entry.notes.get("copies"),
        "origin": tuple(entry.notes.get("origin", ())),
        "remarks": tuple(entry.notes.get("remarks", ())),
    }


class SiteRecords(NamedTuple):
    """One site's records of a task; classes may be absent.

    Attributes:
        train: images ``(n, channels, height, width)`` or vectors ``(n, d)``, and labels ``(n,)``, of the train split.
        test: the same of the test split; empty if there is none.
        class_names: names of the classes; empty if the source has none.
        fingerprint: SHA-256 of the source's content, as `DataSet.fingerprint`.
        columns: names of the columns of a table's vectors.
        remarks: as `DataSet.remarks`.
    """

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    class_names: tuple[str, ...]
    fingerprint: str
    columns: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def load_part(path: str, reading: Reading = AS_IT_IS, *, cache_dir: Path) -> SiteRecords:
    """Read a site's own records from a folder or an ``.npz`` file, as `load` does.

    Args:
        path: the folder or file.
        reading: how to read it.
        cache_dir: folder of decoded data, so that the images are decoded again only after a change.

    Raises:
        ValueError: there are no such data, they can't be read, or the cache can't be written.
    """
    raw = load_raw_part(path, reading, cache_dir=cache_dir)
    if isinstance(raw.train[0], list) or isinstance(raw.test[0], list):
        raise ValueError(f"the records of {path!r} are texts; turn them into vectors with --features")
    train, test = (raw.train[0], raw.train[1]), (raw.test[0], raw.test[1])
    return SiteRecords(train, test, raw.class_names, raw.fingerprint, raw.features, raw.remarks)


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
        held_out: as `DataSet.held_out`.
        features: names of the columns of vectors, as `DataSet.features`.
        known: as `DataSet.known`.
        group: as `DataSet.group`.
        copies: as `DataSet.copies`.
        origin: as `DataSet.origin`.
        remarks: as `DataSet.remarks`.
        test_columns: as `DataSet.test_columns`.
    """

    name: str
    train: tuple[torch.Tensor | list[str], torch.Tensor]
    test: tuple[torch.Tensor | list[str], torch.Tensor]
    class_names: tuple[str, ...]
    columns: dict[str, np.ndarray]
    fingerprint: str
    measured: tuple[str, ...]
    held_out: bool = False
    features: tuple[str, ...] = ()
    known: bool = False
    group: str = ""
    copies: int | None = None
    origin: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    test_columns: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a record; empty for texts."""
        records = self.train[0]
        return () if isinstance(records, list) else tuple(records.shape[1:])


def load_raw(data: "str | DataSet", reading: Reading = AS_IT_IS, *, cache_dir: Path | None = None) -> Raw:
    """A data set without a normalisation; its records may be texts.

    Args:
        data: an argument of `load`, or a data set.
        reading: how to read it.
        cache_dir: as for `load`.

    Raises:
        ValueError: as `load`.
    """
    if isinstance(data, DataSet):
        train, test = ((records.images, records.labels) for records in (data.train, data.test))
        counted = tuple(fact for fact in data.measured if fact in CLASSES)
        facts = verified(data).known, data.group, data.copies, data.origin, data.remarks
        own = data.class_names, data.columns, data.fingerprint, counted, data.held_out
        return Raw(data.name, train, test, *own, data.features, *facts, data.test_columns)
    source, entry, fingerprint = _cached(data, reading, cache_dir)
    return _raw(source, entry, fingerprint, published=_is_published(source, entry, fingerprint, cache_dir))


def load_raw_part(path: str, reading: Reading = AS_IT_IS, *, cache_dir: Path) -> Raw:
    """A site's own records, which may be texts; arguments and errors as of `load_part`."""
    source = find(path, reading)
    entry, fingerprint = cache.cached(cache_dir / source.folder, source.state, lambda: entry_of(source))
    return _raw(source, entry, fingerprint, published=False)


def _raw(source: Source, entry: cache.CacheEntry, fingerprint: str, *, published: bool) -> Raw:
    def split(name: str) -> tuple[torch.Tensor | list[str], torch.Tensor]:
        labels = torch.from_numpy(entry.arrays[f"{name}-labels"])
        if f"{name}-images" not in entry.arrays:
            return cache.unpacked(entry.arrays, name), labels
        return torch.from_numpy(entry.arrays[f"{name}-images"]), labels

    columns = {column: entry.arrays[f"column-{i}"] for i, column in enumerate(entry.facts.get("columns", ()))}
    names = tuple(entry.facts["class_names"])
    measured = measured_classes(names, source.known, published=published, found=bool(entry.notes.get(FOUND)))
    return Raw(
        source.name,
        split("train"),
        split("test"),
        names,
        columns,
        fingerprint,
        measured,
        bool(entry.notes.get(HELD_OUT)),
        tuple(entry.facts.get("features", ())),
        known=published,
        **_also(entry),
    )


def entry_of(source: Source) -> cache.CacheEntry:
    """Read and check the records of ``source``, as the cache keeps them.

    Raises:
        ValueError: a class is negative or above the limit.
    """
    train, test = source.read()
    test = test or train.take(np.empty(0, np.int64))
    labels = np.concatenate([train.labels, test.labels])
    if len(labels) and labels.min() < 0:
        raise ValueError(f"{source.location!r} has the class {labels.min()}; classes are counted from 0")
    if len(labels) and labels.max() >= MOST_CLASSES:
        raise ValueError(
            f"{source.location!r} has the class {labels.max()}, but there are at most {MOST_CLASSES} classes; number "
            "them from 0, in the order of all sites"
        )
    names = train.class_names or (source.known.class_names if source.known else ())
    remarks = [*dict.fromkeys((*train.remarks, *test.remarks))]
    facts = {"class_names": list(names), **train.facts}
    return cache.CacheEntry(arrays=arrays_of(train, test), facts=facts, notes={"remarks": remarks})

"""Readers of what people bring: folders, parquet, hub ids, .npz files, objects in memory."""

import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedstill.base.errors import first_line
from fedstill.base.lookup import nfc, repeated
from fedstill.data import image_folder, vectors, walk
from fedstill.data.csv_files import UNCLEAR, read_csv
from fedstill.data.decode import (
    Split,
    class_names_of,
    composed,
    composed_names,
    from_table,
    no_classes,
    numbered,
    plain_types,
    with_all_names,
    without_index,
)
from fedstill.data.names import Known
from fedstill.data.pictures import Fit
from fedstill.data.table_schema import TableSchema

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


Splits = tuple[Split, Split | None]
Stated = str | TableSchema | None
"""The column of the classes, if somebody states it, or the schema of the table, which names it."""

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target")


def read_digits() -> Splits:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, 0..16 scaled to 0..255; no test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)
    return Split(pixels[:, None], digits.target.astype(np.int64)), None


def read_folder(path: Path, known: Known | None, fit: Fit | None = None, label: Stated = None) -> Splits:
    """A folder of parquet files in the hub's layout, of ``datasets``' ``save_to_disk``, or of images."""
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _read_saved(path, known, fit, label)
    config = path / known.config if known and known.config else path
    found = walk.walk(config if config.is_dir() else path)
    if found.pictures:
        images = image_folder.read(found, labels_of(known, label), stated=label is not None)
        taken = {split: f"{table.num_rows:,} images{_below(table, split)}" for split, table in images.items()}
        return _read_tables(taken, images.__getitem__, str(path), known, found, fit, label)
    if not found.tables:
        beside = f", but {walk.kinds(found.others)} that cannot be read" if found.others else ""
        raise ValueError(
            f"{str(path)!r} has 0 images and 0 parquet or CSV files{beside}; lay images out as train/<class>/<image>, "
            "write tables as parquet or CSV, or give a folder written by datasets' save_to_disk"
        )
    walk.check_tables(found)
    tables: dict[str, list[tuple[Path, str]]] = {}
    for file, place in zip(found.tables, walk.table_places(found.tables, found.root), strict=True):
        tables.setdefault(place.split or "train", []).append((file, "/".join(place.folders)))
    taken = {split: walk.some([str(file) for file, _ in files]) for split, files in tables.items()}
    return _read_tables(
        taken, lambda split: unified(found.root, tables[split], label), str(path), known, found, fit, label
    )


def _below(table: "pa.Table", split: str) -> str:
    """Words on the folders of a split's images."""
    if image_folder.FOLDER not in table.column_names:
        return ""
    folders = sorted(set(table[image_folder.FOLDER].to_pylist()))
    return f" in {len(folders)} folders ({walk.some(folders)})"


def unified(root: Path, files: Sequence[tuple[Path, str]], label: Stated = None) -> "pa.Table":
    """The rows of several parquet or CSV files with the same columns, in any order and in types that fit together.

    Args:
        root: the folder of the files.
        files: each file, relative to ``root``, and the folder that its column ``folder`` names, if these differ.
        label: the schema, if the values of CSV files are to stay texts.

    Raises:
        ValueError: a file cannot be read, or has other columns or types than the first.
    """
    import pyarrow as pa

    several = len({folder for _, folder in files}) > 1
    tables: list[pa.Table] = []
    stated: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for file, folder in files:
        table = read_table(root / file, as_text=isinstance(label, TableSchema))
        if several and image_folder.FOLDER not in table.column_names:
            table = table.append_column(image_folder.FOLDER, pa.array([nfc(folder)] * table.num_rows, pa.string()))
        if tables and {*table.column_names} != {*tables[0].column_names}:  # only some files have pandas' index
            bare = [without_index(one, labels_of(None, label))[0] for one in (*tables, table)]
            tables, table = bare[:-1], bare[-1]
        if tables and (differing := {*table.column_names} ^ {*tables[0].column_names}):
            column = min(differing)
            here, there = (file, files[0][0]) if column in table.column_names else (files[0][0], file)
            raise ValueError(
                f"{str(here)!r} of {str(root)!r} has the column {column!r}, but {str(there)!r} has not; give all files "
                "of a split the same columns"
            )
        _check_names(root, file, table, stated)
        tables.append(table.select(tables[0].column_names) if tables else table)
    try:
        found = pa.concat_tables(_with_shared_codes(tables), promote_options="permissive")
        return found.replace_schema_metadata(_metadata(tables, [file for file, _ in files]))
    except pa.ArrowException as error:
        raise _other_type(root, files, tables) from error


def _metadata(tables: Sequence["pa.Table"], files: Sequence[Path]) -> dict[bytes, bytes]:
    """Those of the first table, with the first index of pandas, and which file may have signs of thousands."""
    found = dict(tables[0].schema.metadata or {})
    unclear = [file for file, table in zip(files, tables, strict=True) if UNCLEAR in (table.schema.metadata or {})]
    found |= {UNCLEAR: str(unclear[0]).encode() if len(unclear) < len(tables) else b""} if unclear else {}
    for table in tables:
        own = table.schema.metadata or {}
        if b"pandas" in own and len(without_index(table, ())[0].column_names) < table.num_columns:
            return found | {b"pandas": own[b"pandas"]}
    return found


def _with_shared_codes(tables: Sequence["pa.Table"], names: Collection[str] = ()) -> list["pa.Table"]:
    """The tables with texts in place of integers in columns where another file has codes, as ``010``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = list(tables)
    for name in names or tables[0].column_names:
        texts = [table[name] for table in tables if vectors.is_text(table.schema.field(name).type)]
        if not 0 < len(texts) < len(tables):
            continue
        if all(pc.all(pc.match_substring_regex(column.drop_null(), r"^\s*\d+\s*$")).as_py() for column in texts):
            for i, table in enumerate(found):
                if pa.types.is_integer(table.schema.field(name).type):
                    place = table.schema.get_field_index(name)
                    found[i] = table.set_column(place, name, table[name].cast(pa.string()))
    return found


def _check_names(root: Path, file: Path, table: "pa.Table", stated: dict[str, tuple[Path, tuple[str, ...]]]) -> None:
    """Refuse a file whose classes have other numbers than those of an earlier one, by the names that both state."""
    for column in table.column_names:
        here = class_names_of(table.schema.metadata, column)
        earlier, there = stated.setdefault(column, (file, here)) if here else (file, here)
        if here != there:
            at = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(here), len(there)) if at is None else at
            said, before = (repr(names[at]) if at < len(names) else "no class" for names in (here, there))
            raise ValueError(
                f"class {at} of the column {column!r} is {said} in {str(file)!r} of {str(root)!r}, but {before} in "
                f"{str(earlier)!r}; write all files with one list of classes (ClassLabel)"
            )


def _other_type(root: Path, files: Sequence[tuple[Path, str]], tables: Sequence["pa.Table"]) -> ValueError:
    """The error about the first column of a type that does not fit that of the first file."""
    import pyarrow as pa

    first = tables[0]
    for (file, _), table in zip(files, tables, strict=True):
        for name in first.column_names:
            try:
                pa.concat_tables([first.select([name]), table.select([name])], promote_options="permissive")
            except pa.ArrowException:
                kinds = table.schema.field(name).type, first.schema.field(name).type
                return ValueError(
                    f"the column {name!r} of {str(file)!r} in {str(root)!r} has type {kinds[0]}, but {kinds[1]} in "
                    f"{str(files[0][0])!r}; write it with one type in all files"
                )
    return ValueError(f"the tables of {str(root)!r} do not fit together; write them with one schema")


def read_table(path: Path, *, as_text: bool = False) -> "pa.Table":
    """The rows of a parquet or CSV file; categories become their values, and those of CSV stay texts if asked.

    Raises:
        ValueError: it cannot be read, or has two columns of one name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() in walk.CSV:
        return read_csv(path, as_text=as_text)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := repeated(names):
                raise ValueError(f"{str(path)!r} has two columns {twice!r}; rename or drop one")
            return plain_types(file.read())
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be read ({_reason(error)}); copy it again") from error


def read_parquet(path: Path, fit: Fit | None = None, label: Stated = None) -> Splits:
    """One parquet or CSV file, without a test split."""
    return _read_tables(
        {"train": repr(path.name)},
        lambda _: read_table(path, as_text=isinstance(label, TableSchema)),
        *(str(path), None, None, fit, label),
    )


def _read_saved(path: Path, known: Known | None, fit: Fit | None, label: Stated) -> Splits:
    """Splits that ``save_to_disk`` of a ``Dataset`` or a ``DatasetDict`` wrote."""

    def load() -> "Mapping[str, datasets.Dataset]":
        import datasets

        saved = datasets.load_from_disk(str(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}

    return _read_datasets(load, str(path), known, "save it again with datasets' save_to_disk", fit, label)


def read_hub(hub: str, known: Known | None, name: str, fit: Fit | None = None, label: Stated = None) -> Splits:
    """A repository on the Hugging Face hub, or its copy in the cache of ``datasets``.

    ``name`` is the folder of a local copy in ``FEDSTILL_DATA``, for the error message.
    """
    advice = (
        "check the id; without a network, run "
        f"'hf download {hub} --repo-type dataset --local-dir {name}' elsewhere and put the folder at "
        f"$FEDSTILL_DATA/{name}"
        + ("" if "FEDSTILL_DATA" in os.environ else " (set FEDSTILL_DATA to a folder of data sets)")
    )

    if Path(hub).exists():
        raise ValueError(
            f"{str(Path(hub).resolve())!r} would be read in place of the hub's {hub!r}; start elsewhere, or name that "
            f"folder itself: './{hub}'"
        )

    def load() -> "datasets.DatasetDict":
        import datasets  # imported here because it takes 0.7 s

        with _offline_unless(_is_reachable(hub)):
            return datasets.load_dataset(hub, known.config if known else None)

    return _read_datasets(load, hub, known, advice, fit, label)


def read_datasets(load: "Callable[[], Mapping[str, datasets.Dataset]]", where: str, label: Stated) -> Splits:
    """Data sets of Hugging Face's ``datasets`` in memory, by split; ``label`` is the column of classes, if stated."""
    return _read_datasets(load, where, None, "give a datasets.Dataset or DatasetDict", None, label)


def rows_of(data: "datasets.Dataset", where: str) -> "pa.Table":
    """The rows of a data set of Hugging Face, of the columns that its format has.

    Raises:
        ValueError: it has a transform, which its rows as they are stored have not.
    """
    if data.format["type"] == "custom":
        raise ValueError(
            f"{where} has a transform (with_transform), which is not applied; apply it with map, or drop it"
        )
    table: pa.Table = data.select_columns(list(data.format["columns"])).with_format("arrow")[:]
    return table


def read_frame(table: "pa.Table", where: str, label: Stated) -> Splits:
    """An Arrow table in memory; ``label`` is the column of classes, if it is stated."""
    return _read_tables({"train": where}, lambda _: plain_types(table), where, None, Path(), None, label)


def _is_reachable(hub: str) -> bool:
    """Whether the hub replies at all; `datasets` itself tries for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub, timeout=10)
    except HfHubHTTPError:  # a reply, with a reason that `datasets` reports
        return True
    except Exception:  # its HTTP client differs between versions
        return False
    return True


@contextmanager
def _offline_unless(reachable: bool) -> Iterator[None]:
    """Let `datasets` use nothing but its cache if the hub can't be reached."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not reachable
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _read_datasets(
    load: Callable[[], "Mapping[str, datasets.Dataset]"],
    where: str,
    known: Known | None,
    advice: str,
    fit: Fit | None,
    label: Stated,
) -> Splits:
    try:
        splits = load()
    except Exception as error:  # `datasets` passes on any error of the network, the hub and the parsers
        raise ValueError(f"{where!r} cannot be loaded ({_reason(error)}); {advice}") from error

    if other := next((type(data).__name__ for data in splits.values() if not hasattr(data, "num_rows")), None):
        raise ValueError(f"{where} are of type {other}; give a datasets.Dataset or DatasetDict, whose rows are counted")
    if not splits:
        raise ValueError(f"{where} have no split; give one that is called 'train'")

    def table(split: str) -> "pa.Table":
        from datasets import Image

        data = splits[split]
        for name, feature in data.features.items():
            if isinstance(feature, Image):
                data = data.cast_column(name, Image(decode=False))
        return rows_of(data, where)

    taken = {name: f"{data.num_rows:,} rows" for name, data in splits.items()}
    return _read_tables(taken, table, where, known, Path(), fit, label)


def _read_tables(
    taken: Mapping[str, str],
    table: Callable[[str], "pa.Table"],
    where: str,
    known: Known | None,
    place: walk.Walk | Path | None,
    fit: Fit | None,
    label: Stated,
) -> Splits:
    """Choose the train and the test split and decode them.

    Args:
        taken: words on the origin of each split.
        table: gives the rows of a split.
        where: the source, for error messages.
        known: facts about it.
        place: the folder of relative paths of images, or what lies below it; None if each image has its bytes.
        fit: makes pictures alike.
        label: the column of the classes, if it is stated.
    """
    taken, table = _by_column(taken, table, _roles(known, label))
    train, test = _chosen(list(taken), where, known)
    folder = place.root if isinstance(place, walk.Walk) else place
    columns: list[str] = []

    given = {split: composed_names(table(split)) for split in (train, test) if split and _are_csv(place)}
    if len(given) == 2:  # a CSV file has no types
        shared = {*given[train].column_names} & {*given[str(test)].column_names} - {*labels_of(known, label)}
        given = dict(zip(given, _with_shared_codes(list(given.values()), shared), strict=True))

    def read(split: str) -> Split:
        rows = given[split] if split in given else composed_names(table(split))
        rows = rows.select(
            [*(c for c in columns if c in rows.column_names), *(c for c in rows.column_names if c not in columns)]
        )
        columns.extend(rows.column_names)
        image, place = (known.image,) if known else (), f"the split {split!r} of {where!r}"
        rows, told = label.encode(rows, place) if isinstance(label, TableSchema) else (rows, ())
        found = from_table(
            rows,
            place,
            image=image + _IMAGE_COLUMNS,
            label=labels_of(known, label),
            folder=folder,
            fit=fit,
            schema=label if isinstance(label, TableSchema) else None,
        )
        return replace(found, origin=taken[split], remarks=(*told, *found.remarks))

    rest = [f"{name!r} ({taken[name]})" for name in taken if name not in (train, test)]
    remarks = (f"not used: the split{'s' * (len(rest) > 1)} {', '.join(rest)}",) if rest else ()
    if isinstance(place, walk.Walk) and place.unread:
        remarks = (*remarks, place.unread)
    first = read(train)
    first = replace(first, remarks=(*first.remarks, *remarks))
    return (first, None) if not test else with_all_names(first, read(test), where)


def _are_csv(place: walk.Walk | Path | None) -> bool:
    """Whether the source is a folder of CSV files."""
    return isinstance(place, walk.Walk) and any(file.suffix.lower() in walk.CSV for file in place.tables)


_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "fold", "phase")
"""Names of a column that may tell the split of each row, in small letters."""


def _roles(known: Known | None, label: Stated) -> tuple[str, ...]:
    """Columns that have a meaning of their own, whatever their names."""
    if isinstance(label, TableSchema):
        return (*label.columns, label.target, *filter(None, (label.group, label.site)))
    return labels_of(known, label)


def _by_column(
    taken: Mapping[str, str], table: Callable[[str], "pa.Table"], roles: Collection[str] = ()
) -> "tuple[Mapping[str, str], Callable[[str], pa.Table]]":
    """The splits of a source that has one only, by its column of words for splits, if there is such a column."""
    import pyarrow.compute as pc

    if len(taken) > 1:
        return taken, table
    (only,) = taken
    rows = table(only)
    for name in rows.column_names:
        if name in roles or name.casefold() not in _SPLIT_COLUMNS or not vectors.is_text(rows.schema.field(name).type):
            continue
        words = [word for word in pc.unique(rows[name]).to_pylist() if word is not None]
        splits = {word: walk.SPLITS.get(word.casefold().strip()) for word in words}
        if "train" in splits.values() and (len(words) > 1 or rows[name].null_count):
            _check_words(name, splits, rows[name].null_count, taken[only])
            parts = {word: rows.filter(pc.equal(rows[name], word)).drop_columns([name]) for word in words}
            told = {word: f"{taken[only]}, column {name!r} = {word!r}" for word in words}
            return told, parts.__getitem__
    return taken, {only: rows}.__getitem__


def _check_words(name: str, splits: Mapping[str, str | None], gaps: int, where: str) -> None:
    """Refuse a column of splits with other words or gaps beside: whose records would be trained on, nobody knows."""
    other = next((word for word, split in splits.items() if split is None), None)
    if other is not None or gaps:
        has = f"{gaps} gaps" if other is None else f"{other!r}"
        raise ValueError(
            f"the column {name!r} of {where} tells splits, but has {has} beside "
            f"{', '.join(repr(word) for word, split in splits.items() if split)}; write train, validation or test in "
            "each row, or rename the column"
        )


def _chosen(names: Sequence[str], where: str, known: Known | None) -> tuple[str, str | None]:
    """The names of the train and the test split; a name that is a word for a split, in any letters, is that split."""
    of_word: dict[str, str] = {}
    for name in names:
        other = of_word.setdefault(walk.SPLITS.get(name.casefold(), name), name)
        if other != name and (known is None or known.test not in (other, name)):
            raise ValueError(f"{where!r} has the splits {other!r} and {name!r}, which are one; rename or drop one")
    train = names[0] if len(names) == 1 else of_word.get("train")
    if train is None:
        raise ValueError(f"{where!r} has the splits {', '.join(names)}, but 'train' is needed; rename one of them")
    if known and known.test in names and known.test != train:
        return train, known.test
    return train, next((of_word[name] for name in ("test", "validation") if of_word.get(name, train) != train), None)


def _reason(error: Exception) -> str:
    """The kind of an error of another library, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def labels_of(known: Known | None, stated: Stated = None) -> tuple[str, ...]:
    """Possible names of the label column, best first; the ``stated`` one alone, if there is one."""
    if isinstance(stated, TableSchema):
        return (stated.target,)
    if stated is not None:
        return (stated,)
    return ((known.label,) if known else ()) + _LABEL_COLUMNS


_NAMES = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}
"""Names of a split's records and labels: Keras', then MedMNIST's, whose validation records are left out."""
_READ = {name for pairs in _NAMES.values() for pair in pairs for name in pair}
_NO_COLUMNS = _READ | {"val_images", "val_labels"}


def read_npz(path: Path, label: Stated = None) -> tuple[Split, Split | None]:
    """``x_train, y_train, x_test, y_test``, or ``train_images, train_labels, ...``: images, or vectors ``(n, d)``.

    Other 1-d arrays as long as the train labels are columns.

    Raises:
        ValueError: the file cannot be read, or an array is missing or does not fit.
    """
    if path.suffix.lower() not in (".npz", ""):
        raise ValueError(
            f"{str(path)!r} is no .parquet, .csv or .npz file, and others are not read; write a table as .parquet, "
            "arrays with numpy.savez, or unpack an archive and give the folder"
        )
    if isinstance(label, TableSchema):
        raise ValueError("--schema describes the columns of a table, which an .npz file has not; leave it out")
    if label is not None:
        raise ValueError(f"--label-column is {label!r}, but an .npz file has its classes in y_train; leave it out")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        # never unpickle: a pickle from another machine can run any program
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
        if other := next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None):
            raise ValueError(f"{other} is no array")
    except Exception as error:  # zipfile, zlib and NumPy raise different kinds of errors
        raise ValueError(
            f"{str(path)!r} is not a readable .npz file of plain arrays ({_reason(error)}); write it with "
            "numpy.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from error
    train = _split(arrays, "train", path)
    if train is None:
        raise ValueError(
            f"{str(path)!r} holds the arrays {', '.join(arrays) or 'none'}, but x_train and y_train are needed; "
            "rename them"
        )
    test = _split(arrays, "test", path)
    if left := [name for name in arrays if name not in _READ and name not in train.columns]:
        train = replace(
            train, remarks=(*train.remarks, f"not read: the array{'s' * (len(left) > 1)} {', '.join(left)}")
        )
    return (train, None) if test is None else with_all_names(train, test, str(path))


def _split(arrays: dict[str, np.ndarray], split: str, path: Path) -> Split | None:
    """One split, or None without its records."""
    x, y = next((names for names in _NAMES[split] if names[0] in arrays), ("", ""))
    if not x:
        return None
    images, where = arrays[x], f"{x} in {str(path)!r}"
    are_vectors = images.ndim == 2 and images.dtype.kind in "biuf"
    if not are_vectors and (
        images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    ):
        raise ValueError(
            f"{where} is {images.dtype} of shape {images.shape}, but images are uint8 (0..255) of shape (n, h, w) or "
            "(n, h, w, 1 or 3), and vectors are numbers of shape (n, d); convert them"
        )
    if not images.size:
        raise ValueError(f"{where} has the shape {images.shape}: there is no record in it; add records")
    if y not in arrays:
        raise ValueError(f"{str(path)!r} has {x}, but no {y}; add it, with the class of each record ({len(images)})")
    labels, class_names = _classes(arrays[y], len(images), f"{y} in {str(path)!r}")
    columns = {
        name: composed(array)
        for name, array in arrays.items()
        if name[:2] not in ("x_", "y_")
        and name not in _NO_COLUMNS
        and array.shape == (len(images),)
        and array.dtype.kind in "iuU"
        and split == "train"
    }
    rounding = None
    if are_vectors:
        found = vectors.of_array(images, where)
        rounding = vectors.rounding(images, found)
    else:
        found = np.ascontiguousarray(images.reshape(*images.shape[:3], -1).transpose(0, 3, 1, 2))
    return Split(found, labels, class_names, columns, bool(class_names), rounding=rounding)


def _classes(labels: np.ndarray, number: int, where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The class of each record, and the classes' names, sorted, if the labels are names."""
    if labels.shape not in ((number,), (number, 1)):
        raise ValueError(
            f"{where} has the shape {labels.shape}, but there are {number} records; give one label for each, in the "
            "order of the records"
        )
    labels = labels.reshape(-1)
    if labels.dtype.kind in "Ub":
        return numbered([str(value) for value in labels.tolist()])
    if labels.dtype.kind not in "iu":
        raise no_classes(f"{where} is {labels.dtype}")
    return labels.astype(np.int64), ()

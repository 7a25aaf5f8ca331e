"""Data sets of objects in memory: tensors, arrays, frames, data sets of torch and of Hugging Face, one per client."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedstill.base.errors import front_door
from fedstill.base.lookup import nfc, repeated
from fedstill.data import cache, pictures, sources, vectors
from fedstill.data.decode import Split, composed, in_order, numbered, with_all_names
from fedstill.data.names import PERSON
from fedstill.data.places import AS_IT_IS, OWN, Reading, find
from fedstill.data.published import COLUMNS, measured_columns, numbers_are_names
from fedstill.data.readers import read_datasets, read_frame
from fedstill.data.sources import complete
from fedstill.data.table_schema import TableSchema, number_of
from fedstill.schema import short

if TYPE_CHECKING:
    import pyarrow as pa

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
    name: str = OWN,
) -> sources.DataSet:
    """A data set for ``run(..., data=...)``, held in memory; its normalisation is that of its own train records.

    Args:
        train: a pair of records and labels, or a ``torch.utils.data.Dataset`` whose items are such pairs, read once.
            Records are tensors or arrays of one shape: images, ``(h, w)`` or ``(c, h, w)`` with 1 or 3 channels, uint8
            or floats k / 255; or vectors ``(d,)`` of numbers. Labels are whole numbers from 0, or names of classes.
        test: test records; without any, a fifth of each class of ``train`` is held out, always the same records.
        class_names: names of the classes in order; by default their numbers, up to the largest label, or the labels'
            names, sorted.
        columns: integers or texts for ``by:COLUMN``, one for each record of ``train``.
        name: name of the data set in messages.

    Raises:
        InputError: records differ in shape, are neither images nor vectors, have values that are not finite, or do not
            fit the labels.
    """
    if isinstance(class_names, str | Set) or not all(isinstance(n, str | int) for n in class_names):
        raise ValueError(f"class_names are {class_names!r}; give a list of names, in the order of their numbers")
    named = tuple(nfc(str(name)) for name in class_names)
    if twice := repeated(named):
        raise ValueError(f"class_names have {twice!r} twice; give each class a name of its own")
    own = {key: _whole(key, values, name) for key, values in (columns or {}).items()}
    first = _split(train, f"the train split of {name!r}", named, own)
    second = None if test is None else _split(test, f"the test split of {name!r}", named, {})
    if second is not None:
        first, second = with_all_names(first, second, name)
    for key, values in own.items():
        if values.shape != first.labels.shape:
            raise ValueError(
                f"column {key!r} of {name!r} has {len(values)} values, but there are {len(first.labels)} train "
                "records; give one for each"
            )
    entry = complete(first, second, name)
    return sources.data_set(entry, cache.fingerprint(entry), name)


def _whole(key: str, values: Any, name: str) -> np.ndarray:
    """The values of a column, without gaps."""
    gaps = f"column {key!r} of {name!r} has gaps, or values of several types; give each record one text"
    if isinstance(values, list | tuple) and _odd(values) is not None:
        raise ValueError(gaps)
    found = array_of(values, f"the values of {key!r} of {name!r}")
    items = list(values) if isinstance(values, list | tuple) else found.reshape(-1).tolist()
    if all(isinstance(item, str) for item in items):
        return composed(np.array(items))
    if found.dtype.kind not in "iufb" or not np.isfinite(found).all():
        raise ValueError(gaps)
    return found


def _odd(values: Sequence[Any]) -> int | None:
    """The place of the first value that is no text where others are; None if all are alike in this."""
    texts = [isinstance(value, str) for value in values]
    return texts.index(False) if any(texts) and not all(texts) else None


def _split(pairs: Pairs, where: str, class_names: tuple[str, ...], columns: dict[str, np.ndarray]) -> Split:
    x, y = pairs if isinstance(pairs, tuple) else _items(pairs, where)
    records, labels = array_of(x, f"the records of {where}"), array_of(y, f"the labels of {where}")
    if not len(records):
        raise ValueError(f"{where} has 0 records; it needs at least 1")
    if labels.shape != (len(records),):
        raise ValueError(
            f"the labels of {where} have shape {labels.shape}, but there are {len(records)} records; give each one "
            "label, a whole number from 0 or a name"
        )
    numbers, names = _classes(labels, where, class_names)
    is_text = names != class_names
    if records.ndim == 2 and records.dtype.kind in "biuf":
        found = _apart(vectors.of_array(records, where), records)
        return Split(found, numbers, names, columns, is_text, rounding=vectors.rounding(records, found))
    return Split(_apart(_pixels(records, where), records), numbers, names, columns, is_text)


def _apart(found: NDArray[Any], given: NDArray[Any]) -> NDArray[Any]:
    """``found``, copied where it is the caller's own memory, which may change before a run."""
    return found.copy() if np.may_share_memory(found, given) else found


def _classes(labels: NDArray[Any], where: str, names: tuple[str, ...]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The class of each record, and the classes' names: ``names``, or the labels', sorted, if these are names."""
    if labels.dtype.kind in "iu":
        return _by_places(labels, names, where), names
    values = [_label(value, i, where) for i, value in enumerate(labels.tolist())]
    kinds = [isinstance(value, str) for value in values]
    if not any(kinds):
        return _by_places(np.array(values, np.int64), names, where), names
    if not all(kinds):
        other = kinds.index(not kinds[0])
        raise ValueError(
            f"item {other} of {where} has the label {values[other]!r}, but item 0 has {values[0]!r}; give all labels "
            "as numbers or all as names"
        )
    for i, value in enumerate(values):
        if names and nfc(str(value)) not in names:
            raise ValueError(
                f"item {i} of {where} has the label {value!r}, which is none of the class_names {', '.join(names)}; "
                "add it to them or drop the item"
            )
    return numbered(list(map(str, values)), names)


def _by_places(labels: NDArray[Any], names: Sequence[str], where: str) -> NDArray[np.int64]:
    """The places of integers in a list of names: they are these, or names where one is another number than its place.

    Raises:
        ValueError: they are names, and one is none of the list.
    """
    if labels.dtype.kind == "u" and len(labels) and labels.max() >= 2**63:
        raise ValueError(
            f"{where} has the class {labels.max()}; classes are names, or whole numbers from 0 to 2^63 - 1"
        )
    return _by_names(labels, names, where, "the") if numbers_are_names(names) else labels.astype(np.int64)


def _by_names(labels: NDArray[Any], names: Sequence[str], where: str, whose: str) -> NDArray[np.int64]:
    """The places of integers that are names of a list.

    Raises:
        ValueError: one is none of them.
    """
    place = {int(name): i for i, name in enumerate(names) if name.isascii() and name.isdigit()}
    if other := [label for label in np.unique(labels).tolist() if label not in place]:
        raise ValueError(
            f"{where} has the class {other[0]}, an integer, but {whose} classes are {', '.join(names[:5])}; give all "
            "clients' classes names, or all numbers"
        )
    return np.array([place[label] for label in labels.tolist()], np.int64)


def _label(value: Any, i: int, where: str) -> int | str:
    """A label: a whole number, or a name."""
    array = array_of(value, f"the label of item {i} of {where}")
    if array.size == 1 and array.dtype.kind in "Ub":
        return str(array.item())
    if array.size == 1 and array.dtype.kind in "iuf" and float(array.item()).is_integer():
        if abs(number := int(array.item())) < 2**63:
            return number
    raise ValueError(
        f"item {i} of {where} has the label {short(value)}, but a class is one whole number from 0 or one name; number "
        "the classes, with the argmax of a one-hot label, or with bins of a measured value"
    )


def _items(data: Dataset[Any], where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """All records and all labels of a data set, each item read once."""
    if not hasattr(data, "__iter__") and not hasattr(data, "__len__"):
        raise ValueError(f"{where} is a {type(data).__name__} without a length; give it __len__ or __iter__")
    items: Iterable[Any] = data if hasattr(data, "__iter__") else (data[i] for i in range(len(data)))  # type: ignore[arg-type]
    records: list[NDArray[Any]] = []
    labels: list[int | str] = []
    for i, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(f"item {i} of {where} is a {type(item).__name__}, but a pair (record, label) is needed")
        records.append(array_of(item[0], f"record {i} of {where}"))
        labels.append(_label(item[1], i, where))
        if records[-1].shape != records[0].shape:
            raise ValueError(
                f"record {i} of {where} has shape {records[-1].shape}, but record 0 has {records[0].shape}; give all "
                "records one shape"
            )
    return np.stack(records) if records else np.empty(0), np.array(labels, object)


def _check_list(values: Sequence[Any], where: str) -> None:
    """Refuse what NumPy would read without a word: gaps among texts, and rows whose masks it drops.

    Raises:
        ValueError: some values are texts and others are none, or some rows are masked.
    """
    if (odd := _odd(values)) is not None:
        raise ValueError(f"{where} are texts, but item {odd} is none; give all as texts, or drop it")
    if any(isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any() for value in values):
        raise ValueError(f"{where} have masked values; fill them, as with .filled(0), or drop the records")


def array_of(values: Any, where: str) -> NDArray[Any]:
    """Numbers, names or a picture as an array; a picture of Pillow's as ``(c, h, w)``, with its own colours.

    Raises:
        ValueError: they are no rectangle, or some are masked, complex or times; ``where`` is their name.
    """
    if isinstance(values, Tensor):
        values = (values if values.layout == torch.strided else values.to_dense()).detach().cpu()
        numbers: NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return numbers
    if type(values).__module__.startswith("PIL."):
        return pictures.exact(values, where, is_file=False).transpose(2, 0, 1)
    if hasattr(values, "toarray"):  # a sparse matrix of SciPy
        values = values.toarray()
    if isinstance(values, list | tuple):
        _check_list(values, where)
    if _are_pictures(values):
        values = [array_of(one, f"item {i} of {where}") for i, one in enumerate(values)]
        if other := next((i for i, one in enumerate(values) if one.shape != values[0].shape), 0):
            raise ValueError(
                f"item {other} of {where} has shape {values[other].shape}, but item 0 has {values[0].shape}; give all "
                "pictures one size and the same colours"
            )
    try:
        found: NDArray[Any] = np.asarray(values)
    except ValueError as error:  # of NumPy, about lists of several lengths
        raise ValueError(f"{where} have several lengths; give all one shape") from error
    if isinstance(values, np.ma.MaskedArray) and (number := int(np.ma.getmaskarray(values).sum())):
        raise ValueError(f"{where} have {number:,} masked values; fill them, as with .filled(0), or drop the records")
    if found.dtype.kind in "cmM":
        raise ValueError(f"{where} are {found.dtype}, but numbers are real; turn them into such")
    return found


def _are_pictures(values: Any) -> bool:
    """Whether they are a list of Pillow's pictures."""
    return isinstance(values, list | tuple) and bool(values) and type(values[0]).__module__.startswith("PIL.")


def _pixels(images: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Images ``(n, h, w)`` or ``(n, c, h, w)`` as uint8 ``(n, c, h, w)``."""
    if images.dtype == object:
        raise ValueError(f"the records of {where} are of several types (object); give numbers, or the table itself")
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


# What a run takes ----------------------------------------------------------------------------------------------------

CLIENT = "client"
"""Column of the number of the client of records that were given client by client."""


def reading_of(settings: Mapping[str, Any]) -> Reading:
    """How an object is read under the settings of a task that say how.

    Raises:
        ValueError: the schema's file is none.
    """
    schema = None if settings.get("schema_file") is None else TableSchema.read(settings["schema_file"])
    partition, label = str(settings.get("partition", "")), settings.get("label_column")
    label = str(label) if isinstance(label, int) else label  # a frame's columns may have numbers for names
    return Reading.of_task(
        partition=partition, label=label, group=settings.get("group"), clients=settings.get("clients"), schema=schema
    )


def given(data: Any, reading: Reading = AS_IT_IS) -> tuple[sources.DataSet, int | None]:
    """The data set of an object that a caller has, and the number of clients if it is a sequence, one for each.

    Args:
        data: a pair of records and labels (arrays, tensors or lists); a pandas, polars or Arrow table with a column of
            classes, or a pair of it and that column's name; a ``datasets.Dataset`` or ``DatasetDict``; a
            ``torch.utils.data.Dataset``; or a list or tuple of these, or of paths: the records of each client.
        reading: the column of classes of tables, and that of groups.

    Raises:
        ValueError: it is none of these, or does not fit (by type and shape; no value is in the message).
    """
    if not isinstance(data, list | tuple) or _is_pair(data):
        train, test = _splits(data, "the data", reading)
        entry = complete(train, test, OWN, reading=reading)
        return sources.data_set(entry, cache.fingerprint(entry), OWN), None
    if not data:
        raise ValueError("the data are an empty list; give one data set for each client")
    parts = [_splits(one, f"client {i}'s data", reading) for i, one in enumerate(data)]
    _check_persons([train for train, _ in parts], reading)
    if persons := reading.persons:
        parts = [(train.without(persons), test and test.without(persons)) for train, test in parts]
    train = _joined([train for train, _ in parts], marked=True)
    tests = [test for _, test in parts if test is not None]
    if tests and len(tests) < len(parts):
        without = next(i for i, (_, test) in enumerate(parts) if test is None)
        raise ValueError(f"client {without}'s data have no test records, but others' have; give all some, or none")
    entry = complete(train, _joined(tests) if tests else None, OWN, reading=reading)
    found = sources.data_set(entry, cache.fingerprint(entry), OWN)
    files = [Path(one) for one in data if isinstance(one, str | Path)]
    if found.features and any(measured_columns(file, reading) for file in files):
        found = replace(found, measured=(*found.measured, COLUMNS))
    return found, len(parts)


def records_of(data: Any, reading: Reading = AS_IT_IS) -> tuple[Split, bool]:
    """Labelled records to judge a model by: the test split of a source that has one, else all of them.

    Args:
        data: as for `given`, but one data set.
        reading: the column of classes of tables, and the size of images.

    Returns:
        The records, and whether they are all that the source has, in its order.

    Raises:
        ValueError: as `given`.
    """
    train, test = _splits(data, "the data", reading)
    if test is None:
        return train, True
    count = len(test.labels)
    told = f"judged are the {count:,} records of the test split, of {count + len(train.labels):,}"
    return replace(test, remarks=(told, *test.remarks)), False


def _check_persons(parts: Sequence[Split], reading: Reading) -> None:
    """Refuse a column of persons that some clients alone have, unless persons do not matter."""
    columns = [{*part.columns, *part.gaps} for part in parts]
    for column in sorted({name for each in columns for name in each if PERSON.fullmatch(name)}):
        have = [column in each for each in columns]
        if not all(have) and reading.group is None:
            raise ValueError(
                f"client {have.index(True)}'s records have the column {column!r} of persons, and those of client "
                f"{have.index(False)} have none of this name; name both alike, or say --group none"
            )


def _is_pair(data: Sequence[Any]) -> bool:
    """Whether a sequence of two is records and their labels, not two clients' data sets."""
    if len(data) == 2 and is_frame(data[0]) and isinstance(data[1], str | int):
        return str(data[1]) in table(data[0], "the data").column_names  # else the path of another client's data
    others = (tuple, Path, Dataset, Mapping)
    if len(data) == 2 and is_frame(data[0]) and not (isinstance(data[1], others) or hasattr(data[1], "features")):
        return np.ndim(_column(data[1])) == 1  # a frame of features and a column of classes
    if len(data) != 2 or any(is_frame(part) or isinstance(part, Dataset | str | Path) for part in data):
        return False
    records, labels = data
    if isinstance(labels, tuple) or isinstance(records, tuple):
        return False
    try:
        return np.ndim(labels) <= 2 and (_are_pictures(records) or np.ndim(records) >= 2)
    except ValueError:  # of NumPy, about lists of several lengths: two pairs, say
        return False


def is_frame(data: Any) -> bool:
    """Whether an object is a table: one of pandas, polars or Arrow."""
    kinds = ("to_arrow", "to_parquet", "to_pylist")
    return any(hasattr(data, kind) for kind in kinds) and hasattr(data, "columns")


def _column(labels: Any) -> Any:
    """The only column of a frame; what is no such frame as it is."""
    if not is_frame(labels):
        return labels
    found = table(labels, "the labels")
    return found.column(0).to_numpy() if found.num_columns == 1 else np.empty((0, found.num_columns))


def _splits(data: Any, where: str, reading: Reading) -> tuple[Split, Split | None]:
    """The decoded splits of one object."""
    kind = type(data).__module__.partition(".")[0]
    if isinstance(data, str | Path):
        source = find(sources.place_of(data), replace(reading, group=None, clients=None))
        train, test = source.read()
        if source.known is not None and not train.class_names:
            names = source.known.class_names
            return replace(train, class_names=names), test and replace(test, class_names=names)
        return train, test
    if kind == "datasets":
        saved = data if isinstance(data, Mapping) else {"train": data}
        return read_datasets(lambda: saved, where, reading.schema or reading.label)
    if isinstance(data, tuple | list) and len(data) == 2 and is_frame(data[0]):
        _check_index(data[0], data[1], where)
        return _read_pair(table(data[0], where), data[1], where, reading)
    if is_frame(data):
        return read_frame(table(data, where), where, reading.schema or reading.label)
    if reading.schema is not None:
        raise ValueError(f"the schema describes the columns of a table, which {where} have not; give a table")
    if isinstance(data, Dataset) or (isinstance(data, tuple | list) and len(data) == 2):
        return _split(data if isinstance(data, Dataset) else (data[0], data[1]), where, (), {}), None
    shape = f" of shape {tuple(data.shape)}" if hasattr(data, "shape") else ""
    raise ValueError(
        f"{where} are a {type(data).__module__}.{type(data).__qualname__}{shape}; give a name or a path, a pair "
        "(X, y), a pandas, polars or Arrow table, a Dataset of torch or of Hugging Face, or a list of these, one for "
        "each client"
    )


def _check_index(frame: Any, labels: Any, where: str) -> None:
    """Refuse a pandas column of classes whose index has the frame's values in another order: rows pair by place.

    Raises:
        ValueError: it has.
    """
    own, other = getattr(frame, "index", None), getattr(labels, "index", None)
    if own is None or other is None or callable(own) or callable(other) or len(own) != len(other):
        return
    if own.is_unique and not own.equals(other) and own.sort_values().equals(other.sort_values()):
        raise ValueError(
            f"the classes of {where} have the index of the rows in another order; align them, as with y.loc[X.index], "
            "or drop an index that means nothing: y.to_numpy()"
        )


def _read_pair(given: "pa.Table", labels: Any, where: str, reading: Reading) -> tuple[Split, Split | None]:
    """The splits of a table, and of the name of its column of classes or the classes themselves."""
    import pyarrow as pa

    schema = reading.schema
    if isinstance(labels, str | int):
        labels = str(labels)  # a frame's columns may have numbers for names
        if schema is not None and labels != schema.target:
            raise ValueError(f"the classes of {where} are in {labels!r}, but the schema's are in {schema.target!r}")
        return read_frame(given, where, schema or labels)
    name = schema.target if schema is not None else reading.label or "label"
    if name in given.column_names:
        raise ValueError(
            f"{where} have a column {name!r} beside the classes that were given with them; drop it, or give its name"
        )
    try:
        column = pa.array(array_of(_column(labels), f"the labels of {where}"))
    except pa.ArrowException as error:
        raise ValueError(f"the labels of {where} have several types; give all as numbers or all as names") from error
    return read_frame(given.append_column(name, column), where, schema or name)


def table(frame: Any, where: str, columns: Sequence[str] | None = None) -> "pa.Table":
    """A pandas, polars or Arrow frame as an Arrow table; an index is in it if it has a name.

    ``columns`` names those to take, if they are there, of an index too.

    Raises:
        ValueError: a column has values of several types, or numbers of more than 64 bits; without a value.
    """
    import pyarrow as pa

    wanted = None if columns is None else {*columns}
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table):
        if wanted is None:
            _refuse_twins([nfc(name) for name in frame.column_names], where)
            return frame
        names = [nfc(name) for name in frame.column_names if nfc(name) in wanted]
        _refuse_twins(names, where)
        return frame.select([name for name in frame.column_names if nfc(name) in wanted]).rename_columns(names)
    if wanted is not None:
        frame = frame[[name for name in frame.columns if nfc(_text_of(name)) in wanted]]
    try:
        if hasattr(frame, "to_arrow"):  # polars, whose column of objects has their addresses as bytes
            found: pa.Table = frame.to_arrow()
            if any(pa.types.is_fixed_size_binary(field.type) for field in found.schema):
                raise pa.ArrowInvalid("objects")
            return found
        import pandas as pd

        _refuse_twins([nfc(str(column)) for column in frame.columns], where)
        if any(isinstance(kind, pd.SparseDtype) for kind in frame.dtypes):
            frame = frame.apply(lambda one: one.sparse.to_dense() if isinstance(one.dtype, pd.SparseDtype) else one)
        indexes = [name for name in frame.index.names if name is not None and (wanted is None or name in wanted)]
        return pa.Table.from_pandas(frame, preserve_index=bool(indexes))
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"{where} have {_mixed(frame)}; give each column one type, and numbers of 64 bits") from error


def _text_of(name: object) -> str:
    """The name of a pandas column as Arrow has it, of several levels too."""
    return str(tuple(map(str, name))) if isinstance(name, tuple) else str(name)


def _refuse_twins(names: Sequence[str], where: str) -> None:
    if twice := repeated(names):
        raise ValueError(f"{where} have two columns {twice!r}; drop one")


def _mixed(frame: Any) -> str:
    """Words on the first column of a pandas frame that Arrow cannot take; its message may have a value."""
    import pyarrow as pa

    for name in frame.columns:
        try:
            pa.array(frame[name], from_pandas=True)
        except (pa.ArrowException, OverflowError):
            return f"a column {str(name)!r} of several types, or of numbers of more than 64 bits"
    return "an index of several types"


def _named(parts: Sequence[Split]) -> tuple[tuple[str, ...], list[Split]]:
    """The names of classes that have numbers, as the first client states them, and all parts numbered by them."""
    names = next((part.class_names for part in parts if part.class_names), ())
    numbered = []
    for i, part in enumerate(parts):
        if part.class_names and part.class_names != names and part.targets is None:
            if sorted(part.class_names) != sorted(names):
                raise ValueError(
                    f"client {i}'s classes are {', '.join(part.class_names)}, but another client's "
                    f"{', '.join(names)}; give all the same"
                )
            part = part.numbered(names)
        elif names and not part.class_names:
            part = replace(part, labels=_by_names(part.labels, names, f"client {i}", "another client's"))
        numbered.append(part)
    return names, numbered


def _check_numbers(names: Sequence[str]) -> None:
    """Refuse classes of several clients whose names are one number, as 1 and 1.0: a gap makes a column's decimals.

    Raises:
        ValueError: there are such.
    """
    known: dict[float, str] = {}
    for name in names:
        if (number := number_of(name)) is not None and (other := known.setdefault(number, name)) != name:
            raise ValueError(f"clients have the classes {other!r} and {name!r}, which are one number; write them alike")


def _shared_persons(parts: Sequence[Split]) -> list[str]:
    """Remarks on persons of several clients, as where each hospital counts its own patients from 1."""
    found = []
    for column in (c for c in parts[0].columns if PERSON.fullmatch(c) and len(parts) > 1):
        each = [np.unique(part.columns[column].astype(str)) for part in parts if column in part.columns]
        if shared := int((np.unique(np.concatenate(each), return_counts=True)[1] > 1).sum()):
            found.append(
                f"{shared:,} values of {column!r} are at several clients and count as the same persons; if they are "
                "others, put each client's name before them"
            )
    return found


def _in_order(part: Split, features: tuple[str, ...]) -> Split:
    """A client's records with the columns of numbers in this order."""
    order = [part.features.index(name) for name in features]
    if not order:
        return part
    rounding = None if part.rounding is None else part.rounding[order]
    return replace(part, images=part.images[:, order], features=features, rounding=rounding)


def _of_several(parts: Sequence[Split], marked: bool) -> list[str]:
    """Remarks on what several clients' records have in common."""
    found = _shared_persons(parts)
    if marked and any(CLIENT in part.columns for part in parts):
        found.append(f"the column {CLIENT!r} has the numbers of clients, not your own values; rename yours")
    return found


def _joined(splits: Sequence[Split], *, marked: bool = False) -> Split:
    """The records of several clients as one split; classes that are names are numbered over all."""
    first = splits[0]
    if any(split.is_text != first.is_text for split in splits):
        raise ValueError("the labels of some clients' data are names, those of others numbers; give all the same kind")
    names = tuple(in_order(name for split in splits for name in split.class_names)) if first.is_text else ()
    _check_numbers(names)
    parts = [split.numbered(names) if names else split for split in splits]
    if not names:
        names, parts = _named(parts)
    ordered = []
    for i, part in enumerate(parts):
        if lone := sorted({*part.features} ^ {*first.features}):
            here, there = (i, 0) if lone[0] in part.features else (0, i)
            other = "texts there (codes such as 010 are texts)" if lone[0] in parts[there].columns else "not"
            raise ValueError(
                f"client {here}'s records have the column {lone[0]!r} of numbers, and those of client {there} have "
                f"{other}; give all the same columns, of one type"
            )
        if part.images.shape[1:] != first.images.shape[1:]:
            raise ValueError(
                f"client {i}'s records have shape {part.images.shape[1:]}, those of client 0 "
                f"{first.images.shape[1:]}; give all the same"
            )
        ordered.append(_in_order(part, first.features))
    shared = [c for c in first.columns if all(c in part.columns for part in ordered)]
    columns = {c: np.concatenate([part.columns[c] for part in ordered]) for c in shared}
    if marked:
        columns[CLIENT] = np.repeat(np.arange(len(ordered)), [len(part.labels) for part in ordered])
    images = np.concatenate([part.images for part in ordered])
    labels = np.concatenate([part.labels for part in ordered])
    errors = [part.rounding for part in ordered if part.rounding is not None]
    named = {column for part in ordered for column in (*part.columns, *part.gaps)} - {*columns}
    gaps = {c: sum(0 if c in p.columns else p.gaps.get(c, len(p.labels)) for p in ordered) for c in sorted(named)}
    return Split(
        images,
        labels,
        names,
        columns,
        first.is_text,
        first.features,
        np.max(errors, axis=0) if errors else None,
        remarks=(*dict.fromkeys(remark for part in ordered for remark in part.remarks), *_of_several(ordered, marked)),
        targets=None if first.targets is None else np.concatenate([part.targets for part in ordered]),
        gaps=gaps,
    )

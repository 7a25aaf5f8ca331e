"""Decoding of tables into records of one shape, 8-bit images or vectors, with integer classes."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedstill.base.lookup import nfc
from fedstill.data import pictures, vectors
from fedstill.data.csv_files import GAPS
from fedstill.data.names import PERSON, UNIT
from fedstill.data.pictures import Fit
from fedstill.data.table_schema import TableSchema

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT_COLUMNS = ("text", "sentence")


@dataclass(frozen=True)
class Split:
    """One decoded split.

    Attributes:
        images: images, uint8 ``(n, channels, height, width)``; vectors, float32 ``(n, d)``; or texts, objects ``(n,)``.
        labels: int64, ``(n,)``.
        class_names: names from the source; empty if it has none.
        columns: other integer and text columns without missing values, each ``(n,)``.
        is_text: whether the source has a class's name in place of its number, so that ``class_names`` are only those
            that occur, sorted.
        features: names of the columns of a table's vectors.
        rounding: largest error of each column by the rounding to float32; None if there is none.
        origin: words on the files that it is from.
        remarks: sentences on what was left out, or looks wrong.
        gaps: number of missing values of each column that would be among ``columns`` without them.
        targets: numbers to predict, scaled to [-1, 1] by a schema, ``(n,)``; None for classes.
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...] = ()
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    is_text: bool = False
    features: tuple[str, ...] = ()
    rounding: NDArray[np.float64] | None = None
    origin: str = ""
    remarks: tuple[str, ...] = ()
    targets: NDArray[np.float64] | None = None
    gaps: dict[str, int] = field(default_factory=dict)

    @property
    def texts(self) -> bool:
        """Whether the records are texts."""
        return self.images.dtype == object

    @property
    def facts(self) -> dict[str, list[str]]:
        """The names of a table's columns, which are a part of what its numbers say; nothing of other records."""
        return {"features": list(self.features)} if self.features else {}

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """The records at ``indices``."""
        columns = {name: column[indices] for name, column in self.columns.items()}
        targets = None if self.targets is None else self.targets[indices]
        return replace(self, images=self.images[indices], labels=self.labels[indices], columns=columns, targets=targets)

    def without(self, feature: str) -> "Split":
        """The records without a feature that tells whose they are, with a remark; as they are, if it is none.

        Of whole numbers with a point, as ``3.0``, it becomes one of the columns.
        """
        if feature not in self.features:
            return self
        at = self.features.index(feature)
        values, columns = self.images[:, at], self.columns
        if feature not in columns:
            if (values != np.rint(values)).any() or (np.abs(values) >= 2**24).any():
                raise ValueError(
                    f"--group is {feature!r}, a column of numbers that are not whole or of 2^24 and more; write them "
                    "as whole numbers or texts"
                )
            columns = {**columns, feature: values.astype(np.int64)}
        if len(self.features) == 1:
            raise ValueError(f"the only column of numbers is {feature!r}, which tells whose records are; add features")
        return replace(
            self,
            images=np.delete(self.images, at, axis=1),
            columns=columns,
            features=self.features[:at] + self.features[at + 1 :],
            rounding=None if self.rounding is None else np.delete(self.rounding, at),
            remarks=(*self.remarks, vectors.WHOSE.format(feature)),
        )

    def numbered(self, class_names: tuple[str, ...]) -> "Split":
        """The same records with the classes numbered as in ``class_names``, which has all of theirs."""
        table = np.array([class_names.index(name) for name in self.class_names], np.int64)
        return replace(self, labels=table[self.labels], class_names=class_names)


def with_all_names(train: Split, test: Split, name: str) -> tuple[Split, Split]:
    """Both splits with the classes of both in the order of their names, if their labels are names.

    Raises:
        ValueError: one has names and the other numbers.
    """
    if not (train.is_text or test.is_text):
        return train, test
    if not (train.is_text and test.is_text):
        raise ValueError(f"one split of {name!r} has names as labels and the other numbers; give both the same kind")
    names = tuple(in_order((*train.class_names, *test.class_names)))
    return train.numbered(names), test.numbered(names)


def from_table(
    table: "pa.Table",
    where: str,
    *,
    image: Sequence[str],
    label: Sequence[str],
    folder: Path | None = Path(),
    fit: Fit | None = None,
    schema: TableSchema | None = None,
) -> Split:
    """Decode an Arrow table in the layout of Hugging Face ``datasets``.

    Args:
        table: a table with columns of images (encoded bytes, or a struct of ``bytes`` and ``path``), of numbers
            (`fedstill.data.vectors.of_table`) or of texts, and of classes.
        where: name of the split for error messages.
        image: possible names of the image column, best first; without one, records are vectors or texts.
        label: possible names of the label column, best first.
        folder: base folder of relative image paths; None if each image has its bytes.
        fit: makes pictures of any size and depth alike; without it, images that are not are refused.
        schema: the schema that has made the columns (`TableSchema.encode`).

    Raises:
        ValueError: a column is missing, there are no records, classes are neither integers nor names, or an image can't
            be read, differs from the first in size, has more colours, has more than 8 bits a channel (with ``fit``, in
            colour or with transparency) or is transparent.
    """
    image_column = _image_column(table, image)
    label_column = _label_column(table, label, where)
    table, remarks = without_index(plain_types(table), (image_column, label_column))
    if table.num_rows == 0:
        raise ValueError(f"{where} has 0 records, it needs at least 1; check that its files were copied whole")
    targets = table[label_column].to_numpy() if schema is not None and schema.range is not None else None
    labels, class_names, is_text = (
        _classes(table, label_column, where)
        if targets is None
        else (np.zeros(len(targets), np.int64), (label_column,), False)
    )
    units = _units(table, (image_column, label_column))
    persons = [n for n in units if schema is None and PERSON.fullmatch(n) and not _has_texts(table, n)]
    odd = [] if schema is not None else _fractions(table, {*units, label_column})
    table_of = None
    if image_column is not None:
        cells = (cell for batch in table.select([image_column]).to_batches() for cell in batch.column(0).to_pylist())
        records: NDArray[Any] = _decode(cells, table.num_rows, where, folder, fit)
    elif table_of := vectors.of_table(
        table.drop_columns(persons), label_column, where, labels, checked=schema is not None
    ):
        if odd:
            raise ValueError(
                f"the column {odd[0]!r} of {where} tells whose a record is, but has numbers that are not whole or "
                "beyond 2^53; write them as texts or whole numbers, or rename it"
            )
        records, remarks = table_of.vectors, (*remarks, *table_of.remarks, *map(vectors.WHOSE.format, persons))
        _refuse_second_label(table_of.names, label_column, label, where)
    else:
        image_column = text_column(table, label_column, image, where)
        records = np.array(table[image_column].to_pylist(), dtype=object)
    if odd:
        remarks = (*remarks, f"no columns to group by, as their numbers are not whole: {', '.join(odd)}")
    others = _others(table, (image_column, label_column)) | units
    gaps = {name: column.null_count for name, column in others.items() if column.null_count}
    columns = {name: composed(np.asarray(c.to_pylist())) for name, c in others.items() if name not in gaps}
    if gaps:
        listed = ", ".join(f"{name} ({count:,} of {table.num_rows:,})" for name, count in gaps.items())
        remarks = (*remarks, f"no columns to group or partition by, as they have gaps: {listed}")
    split = Split(records, labels, class_names, columns, is_text, remarks=remarks, targets=targets, gaps=gaps)
    return split if table_of is None else replace(split, features=table_of.names, rounding=table_of.rounding)


def _image_column(table: "pa.Table", names: Sequence[str]) -> str | None:
    """The first of the names that a column has, unless its values are numbers."""
    kinds = {field.name: field.type for field in table.schema}
    return next((name for name in names if name in kinds and not vectors.has_numbers(kinds[name])), None)


def _has_texts(table: "pa.Table", name: str) -> bool:
    return vectors.is_text(table.schema.field(name).type)


def _fractions(table: "pa.Table", others: Collection[str]) -> list[str]:
    """The columns of numbers beside ``others`` that are called as persons are, but are not whole."""
    import pyarrow as pa

    numbers = (column.name for column in table.schema if pa.types.is_floating(column.type))
    return [name for name in numbers if PERSON.fullmatch(name) and name not in others]


def _others(table: "pa.Table", taken: Sequence[str | None]) -> "dict[str, pa.ChunkedArray]":
    """The columns of integers and of texts but those that are ``taken``."""
    import pyarrow as pa

    kept = (column for column in table.schema if column.name not in taken)
    return {c.name: table[c.name] for c in kept if pa.types.is_integer(c.type) or vectors.is_text(c.type)}


def _units(table: "pa.Table", others: Sequence[str | None]) -> "dict[str, pa.ChunkedArray]":
    """The columns whose names say whose a record is: whole floats are numbers there, and some words are gaps."""
    names = [name for name in table.column_names if UNIT.fullmatch(name) and name not in others]
    found = {name: _of_unit(table[name]) for name in names}
    return {name: column for name, column in found.items() if column is not None}


def _of_unit(column: "pa.ChunkedArray") -> "pa.ChunkedArray | None":
    """A column of whose a record is, with whole numbers as integers and words for gaps as gaps; or None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
        whole = pc.if_else(pc.is_finite(column), column, None)
        if not pc.all(pc.and_(pc.equal(whole, pc.floor(whole)), pc.less(pc.abs(whole), 2.0**53))).as_py():
            return None
        return whole.cast(pa.int64(), safe=False)
    if pa.types.is_null(column.type) or pa.types.is_integer(column.type):
        return column
    if not vectors.is_text(column.type):
        return None
    known = pc.is_in(pc.utf8_lower(pc.utf8_trim_whitespace(column)), pa.array(sorted({*GAPS, "unknown"})))
    return pc.if_else(known, None, column)


def composed(values: np.ndarray) -> np.ndarray:
    """Texts with composed letters (`nfc`); numbers as they are."""
    if values.dtype.kind != "U":
        return values
    found, codes = np.unique(values, return_inverse=True)
    return np.array([nfc(text) for text in found.tolist()])[codes]


def _refuse_second_label(features: Sequence[str], label: str, others: Sequence[str], where: str) -> None:
    """Refuse a column of vectors that is called as a column of classes is.

    Raises:
        ValueError: there is one.
    """
    known = {name.casefold() for name in others}
    if second := next((name for name in features if name.casefold() in known), None):
        raise ValueError(
            f"{where} has the columns {label!r} and {second!r}, each of which may be the class; drop one of them"
        )


def without_index(table: "pa.Table", keep: Sequence[str | None]) -> "tuple[pa.Table, tuple[str, ...]]":
    """The table without the columns of a pandas index, which number the records before a shuffle, and a remark.

    An index stays that ``keep`` names, or whose name says whose the records are (`UNIT`).
    """
    stated = (table.schema.pandas_metadata or {}).get("index_columns", ())
    index = {name for name in table.column_names if re.fullmatch(r"__index_level_\d+__|Unnamed: \d+", name)}
    index.update(name for name in stated if isinstance(name, str))
    left = [name for name in table.column_names if name in index and name not in keep and not UNIT.fullmatch(name)]
    words = (f"not read, as pandas' index: {', '.join(left)}",) if left else ()
    return table.select([name for name in table.column_names if name not in left]), words


def plain_types(table: "pa.Table") -> "pa.Table":
    """The table with the values of categories in place of their codes, and texts and tensors of one type each."""
    import pyarrow as pa

    for i, column in enumerate(table.schema):
        kind = column.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
            if isinstance(kind, pa.BaseExtensionType):  # intervals, say
                decoded = [chunk.dictionary_decode() for chunk in table[i].chunks]
                table = table.set_column(i, column.name, pa.chunked_array(decoded, kind))
        if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
            kind = pa.string()
        if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "pandas.period":  # its storage is a count
            texts = [None if value != value else str(value) for value in table[i].to_pandas()]
            table = table.set_column(i, column.name, pa.array(texts, pa.string()))
        elif isinstance(kind, pa.BaseExtensionType):  # a tensor of fixed shape, say
            table = table.set_column(i, column.name, pa.chunked_array([c.storage for c in table[i].chunks]))
        elif kind != column.type:
            table = table.set_column(i, column.name, table[i].cast(kind))
    return composed_names(table)


def composed_names(table: "pa.Table") -> "pa.Table":
    """The table with composed letters in the names of its columns (`nfc`)."""
    names = [nfc(name) for name in table.column_names]
    if names == table.column_names:
        return table
    return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)


def text_column(table: "pa.Table", label: str, image: Sequence[str], where: str) -> str:
    """The column of the records' texts: the one named "text" or "sentence", or the only one."""
    texts = [n for n in table.column_names if n != label and vectors.is_text(table.schema.field(n).type)]
    name = next((name for name in _TEXT_COLUMNS if name in texts), texts[0] if len(texts) == 1 else None)
    if name is None and texts:
        raise ValueError(
            f"{where} has texts in {len(texts)} columns ({', '.join(texts)}); name the one with the records "
            f"{_TEXT_COLUMNS[0]!r}"
        )
    if name is None:
        if person := next((name for name in table.column_names if name != label and PERSON.fullmatch(name)), None):
            raise ValueError(
                f"{where} has no column of numbers but {person!r}, which tells whose a record is; add some"
            )
        raise ValueError(
            f"{where} has the columns {', '.join(table.column_names)}, none of which is the image column "
            f"({' or '.join(image)}), has numbers or has texts; rename the one that holds the images"
        )
    if table[name].null_count:
        raise ValueError(f"column {name!r} of {where} has {table[name].null_count} gaps; drop records without a text")
    return name


def numbered(texts: Sequence[str], names: tuple[str, ...] = ()) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The number of the class of each text, ``(n,)``, and the classes' names: ``names``, or the texts', sorted.

    Names are compared with composed letters; names that all are numbers are sorted by these.
    """
    of_text = {text: nfc(text) for text in set(texts)}
    names = names or tuple(in_order(of_text.values()))
    numbers = {nfc(name): number for number, name in enumerate(names)}
    return np.array([numbers[of_text[text]] for text in texts], np.int64), names


def in_order(names: Iterable[str]) -> list[str]:
    """Different names, sorted: by number, if all are numbers."""
    found = set(names)
    if all(name.isascii() and name.isdigit() for name in found):
        return sorted(found, key=lambda name: (int(name), name))
    return sorted(found)


def no_classes(what: str) -> ValueError:
    """The error about labels that are neither whole numbers nor names; ``what`` says which and of what type."""
    return ValueError(
        f"{what}, but classes are integers from 0 or names; convert it, as with .astype(int) if they are whole "
        "numbers, and divide measured values into bins"
    )


def _classes(table: "pa.Table", name: str, where: str) -> tuple[NDArray[np.int64], tuple[str, ...], bool]:
    """The classes of the column ``name``, their names, and whether the column has names in place of numbers."""
    import pyarrow as pa

    column = table[name]
    if column.null_count:
        raise ValueError(f"column {name!r} of {where} has {column.null_count} gaps; drop records without a class")
    if pa.types.is_boolean(column.type):
        return *numbered([str(value) for value in column.to_pylist()]), True
    if vectors.is_text(column.type):
        return *numbered(column.to_pylist()), True
    if any(check(column.type) for check in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)):
        raise ValueError(f"column {name!r} of {where} has bytes, but classes are names or integers; decode it to texts")
    if not pa.types.is_integer(column.type):
        raise no_classes(f"column {name!r} of {where} has type {column.type}")
    return column.to_numpy().astype(np.int64), class_names_of(table.schema.metadata, name), False


def _label_column(table: "pa.Table", names: Sequence[str], where: str) -> str:
    for name in names:
        if name in table.column_names:
            return name
    raise ValueError(
        f"{where} has the columns {', '.join(table.column_names)}, none of which is the label column "
        f"({' or '.join(names)}); name the one that holds the classes with --label, or rename it"
    )


def class_names_of(metadata: dict[bytes, bytes] | None, label: str) -> tuple[str, ...]:
    """The names in the ``ClassLabel`` feature that ``datasets`` writes into the schema; empty without one."""
    try:
        found: Any = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError):
        return ()
    for key in ("info", "features", label, "names"):
        found = found.get(key) if isinstance(found, dict) else None
    return tuple(map(nfc, found)) if isinstance(found, list) and all(isinstance(name, str) for name in found) else ()


def _decode(cells: Iterable[Any], count: int, where: str, folder: Path | None, fit: Fit | None) -> NDArray[np.uint8]:
    """Decode ``count`` images to ``(n, c, h, w)``; the first one sets the size and the number of channels.

    There is one thread, since a pool takes 1.7 times as long for images of 32 x 32 (waiting for the interpreter lock).
    """
    images: NDArray[np.uint8] | None = None
    for i, cell in enumerate(cells):
        name = f"image {i} of {where}"
        encoded, path = (cell["bytes"], cell["path"]) if isinstance(cell, dict) else (cell, None)
        if encoded is None and path is None:
            raise ValueError(f"{name} is missing; drop the record or add its image")
        name += f" ({path})" if path else ""
        image = pictures.opened(encoded if encoded is not None else _inside(folder, str(path), name), name)
        pixels = fit(image, name) if fit else pictures.exact(image, name)
        if images is None:
            height, width, channels = pixels.shape
            images = np.empty((count, channels, height, width), np.uint8)
        pixels = pictures.with_channels(pixels, images.shape[1], name)
        if pixels.shape[:2] != images.shape[2:]:
            raise ValueError(
                f"{name} has height x width {pixels.shape[0]} x {pixels.shape[1]}, but the first image has "
                f"{images.shape[2]} x {images.shape[3]}; give --size N to crop and resize all to N x N"
            )
        images[i] = pixels.transpose(2, 0, 1)
    assert images is not None, "no records"
    return images


def _inside(folder: Path | None, path: str, name: str) -> Path:
    """The place of a picture, unless it could change unseen: only the files of a folder are watched."""
    if folder is None:
        raise ValueError(f"{name} has a path alone, whose file may change unseen; write its bytes into the table")
    place = folder / path
    if folder != Path() and not Path(os.path.abspath(place)).is_relative_to(os.path.abspath(folder)):
        raise ValueError(f"{name} lies outside of {str(folder)!r}; move it there, or write its bytes into the table")
    return place


def resized(read: Callable[[], tuple[Split, Split | None]], size: int) -> tuple[Split, Split | None]:
    """The splits that ``read`` returns, with images that already are arrays resized too.

    Raises:
        ValueError: the records are no images.
    """
    train, test = read()
    return _split(train, size), None if test is None else _split(test, size)


def _split(split: Split, size: int) -> Split:
    from PIL import Image

    if split.images.ndim != 4:
        raise ValueError("--size is for images, but the records are none; leave it out")
    if split.images.shape[2:] == (size, size):
        return split
    images = np.empty((*split.images.shape[:2], size, size), np.uint8)
    for i, pixels in enumerate(split.images):
        picture = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        images[i] = pictures.fitted(picture, size, f"image {i}").transpose(2, 0, 1)
    return replace(split, images=images)

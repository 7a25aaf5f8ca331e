"""Records that are vectors: rows of a table, or a list of numbers for each record; and the scale of their columns."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.base.records import Normalisation

if TYPE_CHECKING:
    import pyarrow as pa

WIDEST = 10_000
"""Largest length of a vector: the scale of its columns is in the description of the run."""
_LOSS = 1e-3
"""Largest error by the rounding to float32, in standard deviations of a column."""
_FEWEST = 20
"""Fewest records of which a column is suspected to be no feature."""
_SAMPLE, _MOST = 2000, 500
"""Number of records by which a column is judged first, and of values of a column that may tell the class."""
_SHOWN = 8
"""Number of columns in a remark."""
WHOSE = "not in the vectors, as it tells whose a record is (rename it, if it does not): {}"
"""A remark on a column of numbers."""
_NUMBER = re.compile(r"\s*[-+]?\d{1,3}(?:[.,'\u00a0 ]?\d{3})*(?:[.,]\d*)?(?:[eE][-+]?\d+)?\s*|\s*[-+]?\d*[.,]\d+\s*")
_DIGITS = 6
"""Significant digits of a measured scale, which the description of a run has as text."""


def of_array(values: NDArray[Any], where: str, names: Sequence[str] = ()) -> NDArray[np.float32]:
    """Numbers ``(n, d)`` as float32.

    Args:
        values: integers, floats or booleans.
        where: name of the numbers for error messages.
        names: names of the columns, if they have some.

    Raises:
        ValueError: there are too many columns or none, or a number is NaN, infinite or too large for float32; with its
            record and column.
    """
    if not 1 <= values.shape[1] <= WIDEST:
        raise ValueError(
            f"{where} has {values.shape[1]} columns, but vectors have 1 to {WIDEST:,}; give fewer columns, by a "
            "projection for example"
        )
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(values, dtype=np.float32)
    finite = np.isfinite(vectors)
    if not finite.all():
        row, column = np.argwhere(~finite)[0].tolist()
        raise ValueError(
            f"record {row} of {where} has {values[row, column]} in {column_name(column, names)}; each value must be a "
            "finite number, so fill the gap or drop the record"
        )
    return vectors


def rounding(values: NDArray[Any], vectors: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """The largest error of each column of ``vectors``, which are ``values`` as float32; None if there can be none."""
    if np.can_cast(values.dtype, np.float32):
        return None
    error = np.zeros(values.shape[1])
    for exact, some in zip(_pieces(values), _pieces(vectors), strict=True):
        error = np.maximum(error, np.abs(exact - some.astype(np.float64)).max(0, initial=0.0))
    return error


def check_rounding(
    error: NDArray[np.float64], vectors: NDArray[np.float32], where: str, names: Sequence[str] = ()
) -> None:
    """Refuse a column whose differences float32 loses, such as seconds since 1970 within an hour.

    Args:
        error: the largest error of each column (`rounding`).
        vectors: the train records.
        where: name of the records for error messages.
        names: names of the columns, if they have some.

    Raises:
        ValueError: there is such a column.
    """
    mean, std = _moments(vectors)
    lossy = np.flatnonzero((vectors != vectors[:1]).any(0) & (error > _LOSS * std))
    if len(lossy):
        column = int(lossy[0])
        raise ValueError(
            f"{column_name(column, names)} of {where} has a standard deviation of {std[column]:.3g} around "
            f"{mean[column]:.6g}, which float32 rounds by up to {error[column]:.3g}; subtract a constant such as "
            f"{mean[column]:.6g} from this column in all splits and at all sites, or drop it"
        )


def column_name(column: int, names: Sequence[str]) -> str:
    """A column in an error message: its number from 0, or its name."""
    return f"column {names[column]!r}" if names else f"column {column}"


class Table(NamedTuple):
    """Vectors of a table, the names of their columns if it has a column for each number, and their `rounding`.

    ``remarks`` are sentences on columns that were left out or look as if they were no features.
    """

    vectors: NDArray[np.float32]
    names: tuple[str, ...]
    rounding: NDArray[np.float64] | None
    remarks: tuple[str, ...] = ()


def of_table(
    table: "pa.Table", label: str, where: str, labels: NDArray[np.int64], *, checked: bool = False
) -> Table | None:
    """The vectors of an Arrow table; None if no column has numbers.

    A vector is the row's list in the only column of lists. Without one, it has the numbers and booleans of all columns
    except ``label``, in the order of the table; texts are left out.

    Args:
        table: the rows.
        label: the column of the classes.
        where: name of the table for error messages.
        labels: the class of each row, for remarks on columns that tell it.
        checked: whether texts are what they should be, as a schema's columns of sites and persons are.

    Raises:
        ValueError: there are several columns of lists, the lists differ in length, a value is missing, not finite or
            changed by float64, a column numbers the rows, or one has neither numbers nor texts, but dates, say, or
            numbers as texts.
    """
    import pyarrow as pa

    names = [name for name in table.column_names if name != label]
    lists = [name for name in names if _is_list(table.schema.field(name).type)]
    if len(lists) > 1:
        raise ValueError(
            f"{where} has lists of numbers in {len(lists)} columns ({', '.join(lists)}), but a record is 1 vector; "
            "keep one of them"
        )
    if lists:
        rows = _rows(table[lists[0]], f"column {lists[0]!r} of {where}")
        found = of_array(rows, where)
        others = [name for name in names if name != lists[0] and is_number(table.schema.field(name).type)]
        left = (f"not in the vectors: {_listed(others)}, beside the lists of {lists[0]!r}",) if others else ()
        return Table(found, (), rounding(rows, found), left)
    numeric = [name for name in names if is_number(table.schema.field(name).type)]
    texts = [column.name for column in table.schema if column.name in names and is_text(column.type)]
    if not numeric:
        return None
    for column in table.schema:
        if column.name in names and not is_number(column.type) and not is_text(column.type):
            raise ValueError(
                f"column {column.name!r} of {where} has type {column.type}, which no vector has; turn it into numbers "
                "or drop the column"
            )
    for name in () if checked else texts:
        _refuse_numbers(table[name], name, where)
    values, classes = np.empty((table.num_rows, len(numeric)), np.float64), len(np.unique(labels))
    remarks = [f"not in the vectors, as they are texts: {_listed(texts)}"] if texts else []
    for i, name in enumerate(numeric):
        column = table[name]
        if column.null_count:
            raise ValueError(
                f"column {name!r} of {where} has {column.null_count} gaps; fill them, or drop the records or the column"
            )
        values[:, i] = column.cast(pa.float64(), safe=False).to_numpy()
        if pa.types.is_integer(column.type):
            _check_integers(column, values[:, i], name, where)
        remarks += _telling(values[:, i], labels, classes, name, whole=pa.types.is_integer(column.type))
    found = of_array(values, where, numeric)
    return Table(found, tuple(numeric), rounding(values, found), tuple(remarks))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _refuse_numbers(column: "pa.ChunkedArray", name: str, where: str) -> None:
    """Refuse a column of texts that all are numbers, some with a decimal sign, such as ``3,5`` of a spreadsheet."""
    import pyarrow.compute as pc

    first = next((text for text in column.to_pylist() if text and text.strip()), "")
    if not _NUMBER.fullmatch(first):
        return
    texts = [text for text in pc.unique(column).to_pylist() if text and text.strip()]
    if all(_NUMBER.fullmatch(text) for text in texts) and (odd := next((t for t in texts if set(t) & set(".,")), None)):
        raise ValueError(
            f"column {name!r} of {where} has numbers as texts, such as {odd!r}; write them as numbers, as with "
            "pandas.read_csv(..., decimal=','), or drop the column"
        )


def _check_integers(column: "pa.ChunkedArray", values: NDArray[np.float64], name: str, where: str) -> None:
    """Refuse integers that number the rows, or that float64 changes.

    Raises:
        ValueError: they do.
    """
    wide = np.abs(values) >= 2.0**53
    if wide.any():
        exact = column.to_numpy()
        row = int(np.flatnonzero(wide)[0])
        if any(int(a) != int(b) for a, b in zip(exact[wide], values[wide], strict=True)):
            raise ValueError(
                f"column {name!r} of {where} has integers such as {exact[row]}, which a vector of float32 cannot hold; "
                "subtract a constant from this column in all splits and at all sites, or drop it, as with an id"
            )
    if len(values) >= _FEWEST and values.min() in (0, 1) and values.max() - values.min() == len(values) - 1:
        if len(np.unique(values)) == len(values):
            raise ValueError(
                f"column {name!r} of {where} numbers the records from {values.min():.0f} to {values.max():.0f}, as an "
                "index does, from which a model learns their order; drop it"
            )


def _telling(
    values: NDArray[np.float64], labels: NDArray[np.int64], classes: int, name: str, *, whole: bool
) -> list[str]:
    """A remark on a column that has another value in each record, as ids have, or that tells the class."""
    number = len(values)
    if number < _FEWEST:
        return []
    most = max(2 * classes, min(number // 10, _MOST))
    for count in (min(number, _SAMPLE), number):  # most columns are told to be features by some of their values
        found, codes = np.unique(values[:count], return_inverse=True)
        distinct = whole and len(found) == count
        _, places = np.unique(labels[:count], return_inverse=True)  # a label may be any integer of 64 bits
        pairs = len(np.unique(codes * (int(places.max()) + 1) + places))
        telling = classes > 1 and len(found) <= most and pairs == len(found)
        if not distinct and not telling:
            return []
    if distinct:
        return [f"the column {name!r} has another integer in each record; if it is an id, drop it"]
    if len(found) > 1:
        return [f"the column {name!r} tells the class of every record; if it is the class in other words, drop it"]
    return []


def is_number(kind: "pa.DataType") -> bool:
    """Whether a column of this type has numbers or booleans."""
    import pyarrow as pa

    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def is_text(kind: "pa.DataType") -> bool:
    """Whether a column of this type has texts."""
    import pyarrow as pa

    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string))


def has_numbers(kind: "pa.DataType") -> bool:
    """Whether a column's values are numbers or lists of numbers."""
    return is_number(kind) or _is_list(kind)


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(kind) for check in checks) and is_number(kind.value_type)


def _rows(column: "pa.ChunkedArray", where: str) -> NDArray[Any]:
    """The lists of a column as one array; they are equally long and without gaps."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column)
    if lengths.null_count:
        raise ValueError(f"{where} has {lengths.null_count} gaps; drop the records without a vector")
    counts = lengths.to_numpy()
    other = np.flatnonzero(counts != counts[0])
    if len(other):
        raise ValueError(
            f"record {other[0]} in {where} has {counts[other[0]]} numbers, but record 0 has {counts[0]}; give all "
            "records vectors of one length"
        )
    flat = pc.list_flatten(column)
    if flat.null_count:
        raise ValueError(f"{where} has {flat.null_count} gaps inside its lists; fill them or drop the records")
    return np.asarray(flat.to_numpy()).reshape(len(counts), -1)


def scale(vectors: NDArray[np.float32]) -> tuple[Normalisation, tuple[int, ...]]:
    """Mean and standard deviation of each column, to six digits, and the constant columns, which get the deviation 1.

    Numbers are rounded since they stand in every description of the run.
    """
    mean, std = _moments(vectors)
    constant = (vectors == vectors[:1]).all(0)
    std[constant | (std == 0)] = 1.0
    rounded = ([float(f"{value:.{_DIGITS}g}") for value in values.tolist()] for values in (mean, std))
    means, stds = map(tuple, rounded)
    return Normalisation(means, stds), tuple(np.flatnonzero(constant).tolist())


def _moments(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of each column."""
    mean = values.mean(0, dtype=np.float64)
    squares = np.zeros(values.shape[1])
    for some in _pieces(values):
        squares += np.square(some - mean).sum(0)
    return mean, np.sqrt(squares / len(values))


def _pieces(values: NDArray[Any]) -> list[NDArray[Any]]:
    """Blocks of 10,000 records, so that there is no float64 copy of all."""
    return np.array_split(values, -(-len(values) // 10_000))

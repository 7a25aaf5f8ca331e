"""CSV files as people have them: marks, separators, quotes and decimal signs."""

import csv
import io
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.base.lookup import nfc

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK = 16 << 20
"""Bytes that are read at a time, of which no row may have more."""
_SNIFFED = 64 * 1024
"""Characters of a file by which its separator is found."""


def read_csv(path: Path, *, as_text: bool) -> "pa.Table":
    """The rows of a CSV file: UTF-8 with or without a mark, separated by commas, semicolons, tabs or bars.

    Args:
        path: the file.
        as_text: whether all values stay texts, for a schema; otherwise types are found, and gaps are null.

    Raises:
        ValueError: it is no UTF-8, has no separator, two columns of one name, or a row of another length.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 (byte {error.start}); save it again as 'CSV UTF-8', as spreadsheets call it"
        ) from error
    text = text.lstrip("\r\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    try:
        separator, header = _header(text, path)
        if '"' in text:  # Arrow takes the rest of a file for a cell whose quote nobody closes
            _check_quotes(text, separator)
    except csv.Error as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as CSV ({error}); give each quoted cell a quote at both of its ends, and "
            "double those within"
        ) from error
    names = _names(header, path)
    decimal = "," if separator == ";" and re.search(r";\s*-?\d+,\d", text[:_SNIFFED]) else "."
    types = dict.fromkeys(header, pa.string()) if as_text else None
    try:
        table = arrow.read_csv(
            _native(text.encode()),
            read_options=arrow.ReadOptions(block_size=_BLOCK),
            parse_options=arrow.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=arrow.ConvertOptions(
                column_types=types,
                strings_can_be_null=True,
                null_values=[""] if as_text else ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "?"],
                decimal_point=decimal,
            ),
        )
    except pa.ArrowException as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        raise ValueError(
            f"{str(path)!r} cannot be read as CSV ({reason}); give each row as many cells as the header"
        ) from error
    return table.rename_columns(names)


def _native(content: bytes) -> "pa.BufferReader":
    """A file without a Python object in it, which Arrow's threads would release while the program ends: it aborts."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    sink.write(content)
    return pa.BufferReader(sink.getvalue())


def _check_quotes(text: str, separator: str) -> None:
    before = csv.field_size_limit(len(text) + 1)
    try:
        deque(csv.reader(io.StringIO(text), delimiter=separator, strict=True), maxlen=0)
    finally:
        csv.field_size_limit(before)


def _header(text: str, path: Path) -> tuple[str, list[str]]:
    """The separator and the cells of the first row."""
    first = next(csv.reader(io.StringIO(text[:_SNIFFED]), delimiter="\x00"), [""])[0] if text.strip() else ""
    separator = max(",;\t|", key=first.count)
    if not first.count(separator):
        raise ValueError(f"{str(path)!r} has one column ({first[:40]!r}); separate columns by commas or semicolons")
    return separator, next(csv.reader(io.StringIO(text), delimiter=separator))


def _names(header: Sequence[str], path: Path) -> list[str]:
    """The names of the columns."""
    names = [nfc(name.strip()) for name in header]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{str(path)!r} has two columns {twice!r}; rename or drop one")
    if "" in names and names.index("") > 0:
        raise ValueError(f"{str(path)!r} has a column without a name, number {names.index('') + 1}; name or drop it")
    return ["Unnamed: 0" if name == "" else name for name in names]

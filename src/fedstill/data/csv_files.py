"""CSV files as people have them: marks, separators, quotes, decimal signs and codes that look like numbers."""

import csv
import io
import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.base.lookup import nfc, repeated

if TYPE_CHECKING:
    import pyarrow as pa

    Marked = tuple[str, pa.ChunkedArray]

_BLOCK = 16 << 20
"""Bytes that are read at a time, of which no row may have more."""
_SNIFFED, _ROWS = 64 * 1024, 20
"""Characters and rows of a file by which its separator is found."""
_NULLS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "?")
GAPS = {"", "na", "n/a", "nan", "null", "none", "?", ".", "-", "<na>", "nat"}
"""Texts that stand for a gap, in small letters."""
_NUMBER = r"^\s*[+-]?(\d+|\d*[.,]\d+)([eE][+-]?\d+)?\s*$"
THOUSANDS = r"[+-]?[1-9]\d{0,2}[.,]\d{3}"
"""Numbers whose sign may separate thousands, or be decimal."""
_CODE, _LONG = r"^\s*0[\dxX]", r"^\s*\d{19,}\s*$"
"""What Arrow takes for a number, though it loses zeros, a base or digits."""
UNCLEAR = b"fedstill signs may separate thousands"
"""Key in the metadata of a table of texts whose numbers with a sign may have one of thousands.

Its value is empty, or the name of the first such file if the table has rows of others beside.
"""


def read_csv(path: Path, *, as_text: bool, fewest: int = 2, gaps: bool = False) -> "pa.Table":
    """The rows of a CSV file: UTF-8 with or without a mark, separated by commas, semicolons, tabs or bars.

    A column of numbers of which one begins with a needless zero, as ``010``, has texts: they are codes.

    Args:
        path: the file.
        as_text: whether all values stay texts, for a schema; otherwise types are found, and gaps are null.
        fewest: least number of columns.
        gaps: whether an empty line of a file with one column is a gap; otherwise empty lines are left out.

    Raises:
        ValueError: it is no UTF-8, has no separator, two columns of one name, a row of another length, or numbers
            whose sign may be a decimal sign or one of thousands.
    """
    import pyarrow as pa

    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 (byte {error.start}); save it again as 'CSV UTF-8', as spreadsheets call it"
        ) from error
    text = text.lstrip("\r\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    stated = re.match(r'"?sep=([,;\t|])"?\r?\n', text)  # Excel's own line
    text = text[stated.end() :] if stated else text
    try:
        separator = stated[1] if stated else _separator(text, path, fewest)
        header = next(csv.reader(io.StringIO(text), delimiter=separator), [""])
        if '"' in text:  # Arrow takes the rest of a file for a cell whose quote nobody closes
            _check_quotes(text, separator)
    except csv.Error as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as CSV ({error}); give each quoted cell a quote at both of its ends, and "
            "double those within"
        ) from error
    names, content = _names(header, path), _native(text.encode())
    parsed = partial(_parsed, content, path, separator, gaps=gaps and len(header) == 1)
    all_texts = dict.fromkeys(header, pa.string())
    if as_text:
        texts = parsed(column_types=all_texts, null_values=[""])
        found = _named(texts, names, path)
        if separator != "," or '"' in text:  # a comma within a cell needs one of them
            commas, _, all_unclear = _signs(texts)
            if all_unclear and (commas or separator != ","):
                return found.replace_schema_metadata({UNCLEAR: b""})
        return found
    texts = parsed(column_types=all_texts) if separator == ";" else None
    table = parsed(decimal_point="." if texts is None else _decimal_sign(texts, path))
    if separator in "\t|" and _may_have_thousands(table):
        texts = parsed(column_types=all_texts)
        _check_points(texts, path)
    if _may_have_codes(content, separator, table):
        table = _with_codes(table, texts or parsed(column_types=all_texts))
    return _named(table, names, path)


def _named(table: "pa.Table", names: list[str], path: Path) -> "pa.Table":
    """The table with ``names``, without the last column if a separator at the end of each line makes it."""
    if names[-1] == "" and len(names) > 1:
        if table[-1].null_count < table.num_rows:
            raise ValueError(f"{str(path)!r} has a column without a name, number {len(names)}; name or drop it")
        table, names = table.select(range(len(names) - 1)), names[:-1]
    return table.rename_columns(names)


def _may_have_codes(content: "pa.Buffer", separator: str, table: "pa.Table") -> bool:
    """Whether a cell begins with a zero before another digit, or is too long for a number; fast, for most have none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    letters = np.frombuffer(content, np.uint8)
    ahead, behind = np.zeros(256, bool), np.zeros(256, bool)
    ahead[list(f'{separator}\n\t" '.encode())] = behind[list(b"0123456789xX")] = True
    zeros = np.flatnonzero(letters[1:-1] == ord("0"))
    if bool((ahead[letters[zeros]] & behind[letters[zeros + 2]]).any()):
        return True
    floats = [column for column in table.columns if pa.types.is_floating(column.type)]
    return any((most := pc.max(pc.abs(column)).as_py()) is not None and most >= 2.0**59 for column in floats)


def _parsed(content: "pa.Buffer", path: Path, separator: str, *, gaps: bool = False, **options: Any) -> "pa.Table":
    """What Arrow reads of a file's content; ``gaps``: whether an empty line is one."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    try:
        return arrow.read_csv(
            pa.BufferReader(content),
            read_options=arrow.ReadOptions(block_size=_BLOCK),
            parse_options=arrow.ParseOptions(delimiter=separator, newlines_in_values=True, ignore_empty_lines=not gaps),
            convert_options=arrow.ConvertOptions(
                **{"null_values": list(_NULLS), "strings_can_be_null": True, **options},
            ),
        )
    except pa.ArrowException as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        raise ValueError(
            f"{str(path)!r} cannot be read as CSV ({reason}); give each row as many cells as the header"
        ) from error


def _signs(texts: "pa.Table") -> "tuple[list[Marked], list[Marked], bool]":
    """The columns of numbers with commas, those with points, and whether all such numbers look like thousands."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, list[Marked]] = {",": [], ".": []}
    gaps = pa.array(sorted(GAPS))
    for name in texts.column_names:
        some = texts[name].drop_null()
        words = pc.utf8_lower(pc.utf8_trim_whitespace(some))
        some = some.filter(pc.invert(pc.is_in(words, gaps)))
        if not len(some) or not pc.all(pc.match_substring_regex(some, _NUMBER)).as_py():
            continue
        signed = {sign: some.filter(pc.match_substring(some, sign)) for sign in found}
        for sign, cells in signed.items():
            if len(cells) and not all(map(len, signed.values())):  # of both, it stays a text, which is refused
                found[sign].append((name, cells))
    marked = [cells for some in found.values() for _, cells in some]
    thousands = all(pc.all(pc.match_substring_regex(cells, f"^{THOUSANDS}$")).as_py() for cells in marked)
    return found[","], found["."], bool(marked) and thousands


def _decimal_sign(texts: "pa.Table", path: Path) -> str:
    """The decimal sign of a file with semicolons, in which either may separate thousands.

    Raises:
        ValueError: columns differ in it, or all numbers with a sign look like thousands.
    """
    commas, points, is_unclear = _signs(texts)
    if commas and points:
        raise ValueError(
            f"{str(path)!r} has commas in the column {commas[0][0]!r}, as in {commas[0][1][0].as_py()!r}, and points "
            f"in {points[0][0]!r}, as in {points[0][1][0].as_py()!r}; write all numbers with one decimal sign"
        )
    if is_unclear:
        raise _unclear(*(commas or points)[0], path)
    return "," if commas else "."


def _unclear(name: str, cells: "pa.ChunkedArray", path: Path) -> ValueError:
    first = cells[0].as_py()
    whole, decimal = (re.sub("[.,]", other, first) for other in ("", "."))
    return ValueError(
        f"{str(path)!r} has {first!r} in the column {name!r}, which may be {whole} or {decimal}; write numbers "
        "without a sign of thousands, and no decimals with three digits alone"
    )


_ENOUGH = 20
"""Different decimals without needless zeros, of which all have three digits once in eight times by chance."""


def _check_points(texts: "pa.Table", path: Path) -> None:
    """Refuse columns whose points separate thousands: all of them can, and numbers below 1,000 have none.

    Raises:
        ValueError: there is such a column.
    """
    import pyarrow.compute as pc

    for name, cells in _signs(texts)[1]:
        plain = texts[name].drop_null()
        plain = plain.filter(pc.match_substring_regex(plain, r"^\s*[+-]?\d+\s*$"))
        all_small = pc.all(pc.match_substring_regex(plain, r"^\s*[+-]?\d{1,3}\s*$")).as_py()
        may = pc.all(pc.match_substring_regex(cells, f"^{THOUSANDS}$")).as_py()
        if may and len(pc.unique(cells)) >= _ENOUGH and len(plain) and all_small:
            raise _unclear(name, cells, path)


def _may_have_thousands(table: "pa.Table") -> bool:
    """Whether a column of decimals has none that only a decimal point explains; fast, for most have some."""
    import pyarrow as pa

    floats = [column.drop_null().to_numpy() for column in table.columns if pa.types.is_floating(column.type)]
    wide = (np.abs(column[column != 0]) for column in floats)
    return any(
        len(column)
        and column.min() >= 1
        and column.max() < 1000
        and bool((np.abs(column * 1000 - np.rint(column * 1000)) < 1e-6).all())
        for column in wide
    )


def _with_codes(table: "pa.Table", texts: "pa.Table") -> "pa.Table":
    """The table with texts in place of numbers in columns of codes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for i, column in enumerate(table.schema):
        is_float = pa.types.is_floating(column.type)
        if not (is_float or pa.types.is_integer(column.type)):
            continue
        pattern = f"{_CODE}|{_LONG}" if is_float else _CODE
        if pc.any(pc.match_substring_regex(texts[i], pattern)).as_py():
            table = table.set_column(i, column.name, texts[i])
    return table


def _native(content: bytes) -> "pa.Buffer":
    """A file without a Python object in it, which Arrow's threads would release while the program ends: it aborts."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    sink.write(content)
    return sink.getvalue()


def _check_quotes(text: str, separator: str) -> None:
    before = csv.field_size_limit(len(text) + 1)
    try:
        deque(csv.reader(io.StringIO(text), delimiter=separator, strict=True), maxlen=0)
    finally:
        csv.field_size_limit(before)


def _separator(text: str, path: Path, fewest: int) -> str:
    """The sign that parts each of the first rows into as many cells as the header; the most cells, if several do."""
    some = text[:_SNIFFED]
    widths: Mapping[str, list[int]] = {
        sign: [len(row) for row in islice(csv.reader(io.StringIO(some), delimiter=sign), _ROWS) if row]
        for sign in "\t|;,"
    }
    whole = {sign: rows[:-1] if len(some) < len(text) and len(rows) > 1 else rows for sign, rows in widths.items()}
    separator = max(whole, key=lambda sign: (len({*whole[sign]}) == 1 and whole[sign][0] > 1, *whole[sign][:1]))
    if max(whole[separator][:1], default=0) < fewest:
        first = text.partition("\n")[0].strip()
        raise ValueError(f"{str(path)!r} has one column ({first[:40]!r}); separate columns by commas or semicolons")
    return separator if whole[separator] and whole[separator][0] > 1 else ","


def _names(header: Sequence[str], path: Path) -> list[str]:
    """The names of the columns."""
    names = [nfc(name.strip()) for name in header]
    if twice := repeated(names):
        raise ValueError(f"{str(path)!r} has two columns {twice!r}; rename or drop one")
    if "" in names[:-1] and names.index("") > 0:
        raise ValueError(f"{str(path)!r} has a column without a name, number {names.index('') + 1}; name or drop it")
    return ["Unnamed: 0" if at == 0 and name == "" else name for at, name in enumerate(names)]

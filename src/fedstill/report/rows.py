"""Rows of a table for the model beside this file, which a schema describes.

    from rows import Model

    model = Model(".")                          # or Model(".", onnx=True), with the package onnxruntime
    model.predict("new_patients.csv")           # or a list of dictionaries, or a pandas, polars or Arrow table

A column that is absent, a value of another kind, one that the schema refuses outside of its range or categories, and a
gap where nothing stands for one, are a ValueError of one sentence. Values that the schema clips or takes for others are
counted in a warning. It needs numpy, and torch or onnxruntime; the schema is in ``config.json``.
"""

import csv
import io
import json
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAPS = {"", "na", "n/a", "nan", "null", "none", "?", ".", "-", "<na>", "nat"}
_TRUE, _FALSE = {"true", "t", "yes", "y", "1", "1.0"}, {"false", "f", "no", "n", "0", "0.0"}
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}[.,][0-9]{3}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_CELL = re.compile(r"[+-]?([0-9]+|[0-9]*[.,][0-9]+)([eE][+-]?[0-9]+)?")
_DAY = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{1,2}(:\d{2}){0,2}([.,]\d+)?( ?[AaPp][Mm])?( ?(Z|UTC|[+-]\d{2}(:?\d{2})?))?)?"
)


class Model:
    """A published model that takes raw rows.

    Args:
        folder: the folder of ``config.json`` and of the program.
        onnx: whether ONNX Runtime computes, in place of torch.
    """

    def __init__(self, folder: str | Path = ".", *, onnx: bool = False) -> None:
        place = Path(folder)
        self.facts: dict[str, Any] = json.loads((place / "config.json").read_text("utf-8"))
        self._session: Any = None
        if onnx:
            import onnxruntime

            self._session = onnxruntime.InferenceSession(
                (place / "model.onnx").read_bytes(), providers=["CPUExecutionProvider"]
            )
        else:
            import torch

            content = io.BytesIO((place / "model.pt2").read_bytes())  # torch opens no path whose letters a locale lacks
            self._program = torch.export.load(content).module()

    def outputs(self, table: Any) -> NDArray[Any]:
        """Logits ``(n, classes)``; or the number in its unit, ``(n, 1)``."""
        values = codes(records_of(table), self.facts["schema"])
        for sentence in beyond(values, self.facts["schema"]):
            warnings.warn(sentence, stacklevel=2)
        found = self._computed(values)
        if not np.isfinite(found).all():
            raise ValueError(f"the outputs of row {int(np.argmax(~np.isfinite(found).all(1)))} are not finite")
        return found

    def _computed(self, values: NDArray[np.float64]) -> NDArray[Any]:
        if self._session is not None:
            found: NDArray[Any] = self._session.run(None, {"records": values})[0]
            return found
        import torch

        with torch.no_grad():
            computed: NDArray[Any] = self._program(torch.from_numpy(values)).numpy()
        return computed

    def probabilities(self, table: Any) -> NDArray[Any]:
        """Probabilities of the classes ``(n, classes)``, in the order of ``class_names`` in ``config.json``."""
        if "class_names" not in self.facts:
            raise ValueError(f"the model predicts a number, {self.facts['target']!r}, not classes; call predict")
        logits = self.outputs(table)
        powers: NDArray[Any] = np.exp(logits - logits.max(1, keepdims=True))
        shares: NDArray[Any] = powers / powers.sum(1, keepdims=True)
        return shares

    def predict(self, table: Any) -> NDArray[Any]:
        """Names of the predicted classes, by the threshold of ``config.json``; or the numbers in their unit; ``(n,)``.

        Args:
            table: rows as `records_of` takes them.
        """
        if "class_names" not in self.facts:
            numbers: NDArray[Any] = self.outputs(table)[:, 0]
            return numbers
        likely, decision = self.probabilities(table), self.facts.get("decision", {})
        names = np.array(self.facts["class_names"])
        if "threshold" not in decision:
            chosen: NDArray[Any] = names[likely.argmax(1)]
            return chosen
        sign = self.facts["class_names"].index(decision["positive"])
        found: NDArray[Any] = np.where(likely[:, sign] >= decision["threshold"], names[sign], names[1 - sign])
        return found


def records_of(table: Any) -> list[Mapping[str, Any]]:
    """Rows as dictionaries: of a CSV file's path (UTF-8), a pandas, polars or Arrow table, or dictionaries.

    Raises:
        ValueError: it is none of them, or two columns have one name.
    """
    if isinstance(table, str | Path):
        try:
            return _of_csv(Path(table).read_text("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(table)!r} is not UTF-8 (byte {error.start}); save it again as CSV UTF-8") from None
    names = [str(name) for name in getattr(table, "column_names", getattr(table, "columns", ()))]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the table has two columns {twice!r}; rename or drop one")
    for name in ("to_dicts", "to_pylist"):
        if hasattr(table, name):
            return list(getattr(table, name)())
    rows = table.to_dict("records") if hasattr(table, "iterrows") else table
    found: list[Any] = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Mapping) else [None]
    if not all(isinstance(row, Mapping) for row in found):
        raise ValueError("the rows are no table; give a list of dictionaries, a CSV file's path or a table of pandas")
    return found


class Pointed(str):
    """A cell of a file without commas as separators whose numbers with a point all may have it between thousands."""

    __slots__ = ()


def _separator(text: str) -> str:
    """The sign that parts each of the first rows into as many cells as the header; the most cells, if several do."""
    some, widths = text[:65536], {}
    for sign in "\t|;,":
        rows = [len(row) for row in islice(csv.reader(io.StringIO(some, newline=""), delimiter=sign), 20) if row]
        widths[sign] = rows[:-1] if len(some) < len(text) and len(rows) > 1 else rows
    return max(widths, key=lambda sign: (len({*widths[sign]}) == 1 and widths[sign][0] > 1, *widths[sign][:1]))


def _are_unclear(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all numbers with a sign, in columns of numbers with one, look like thousands, and some has a point."""
    marked: list[str] = []
    for column in zip(*rows, strict=True):
        cells = [text for cell in column if (text := _text(cell)) and not is_gap(text)]
        signed = {sign: [text for text in cells if sign in text] for sign in ",."}
        if all(map(_CELL.fullmatch, cells)) and not all(signed.values()):
            marked += [*signed[","], *signed["."]]
    return any("." in text for text in marked) and all(_THOUSANDS.fullmatch(text) for text in marked)


def _of_csv(text: str) -> list[Mapping[str, Any]]:
    text = text.lstrip("\r\n")
    stated = re.match(r'"?sep=([,;\t|])"?\r?\n', text)  # Excel's own line
    text = text[stated.end() :] if stated else text
    separator = stated[1] if stated else _separator(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    before = csv.field_size_limit(len(text) + 1)
    try:
        found = list(reader)
    except csv.Error as error:
        raise ValueError(f"the file cannot be read as CSV ({error}); give each quoted cell two quotes") from None
    finally:
        csv.field_size_limit(before)
    names = [_text(name) for name in found.pop(0)] if found else []
    if not names:
        raise ValueError("the file has no header; its first row names the columns")
    found = [row or [""] for row in found] if len(names) == 1 else [row for row in found if row]  # an empty line
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the file has two columns {twice!r}; rename or drop one")
    for at, row in enumerate(found):
        if len(row) != len(names):
            raise ValueError(f"row {at} has {len(row)} cells, but the header has {len(names)}; correct it")
    kind = Pointed if separator != "," and _are_unclear(found) else str
    return [dict(zip(names, map(kind, row), strict=True)) for row in found]


def codes(rows: Iterable[Mapping[str, Any]], schema: Mapping[str, Any]) -> NDArray[np.float64]:
    """Rows as the program takes them, ``(n, columns)``: a number for each column of the schema, NaN for a gap.

    Raises:
        ValueError: a column is absent, or the schema refuses a value; with the row, counted from 0.
    """
    rows, found = list(rows), []
    numbers = [name for name, column in schema["columns"].items() if column["kind"] == "number"]
    has_commas = _has_commas(rows, numbers)
    columns = {name: {**column, "has_commas": has_commas} for name, column in schema["columns"].items()}
    for at, row in enumerate(rows):
        if absent := next((name for name in columns if name not in row), None):
            alike = {str(name).strip().casefold(): name for name in row}
            near = get_close_matches(absent.strip().casefold(), alike, 1)
            hint = f"did you mean {alike[near[0]]!r}" if near else f"the model takes {', '.join(columns)}"
            raise ValueError(f"row {at} has no column {absent!r}; {hint}")
        try:
            found.append([_checked(row[name], column, name) for name, column in columns.items()])
        except ValueError as error:
            raise ValueError(f"row {at}: {error}") from None
    return np.array(found, np.float64).reshape(len(found), len(columns))


def _checked(value: Any, column: Mapping[str, Any], name: str) -> float:
    if is_gap(value, column["values"]):
        if column["missing"] is None:
            raise ValueError(f"column {name!r} has a gap, for which nothing stands; fill it or drop the row")
        return math.nan
    try:
        number = code(value, column)
    except ValueError as error:
        raise ValueError(f"column {name!r} has {str(value)!r}, {error}") from None
    if column["kind"] in ("number", "date") and column["outside"] == "refuse":
        low, high = (code(bound, column) for bound in column["range"])
        if not low <= number <= high:
            shown = " to ".join(f"{bound:g}" if isinstance(bound, int | float) else bound for bound in column["range"])
            times = f" ({number / high:.3g} times the largest; another unit?)" if 0 < 5 * high < number else ""
            raise ValueError(f"column {name!r} has {value}, outside of {shown}{times}; correct it")
    return number


def beyond(values: NDArray[np.float64], schema: Mapping[str, Any]) -> list[str]:
    """Sentences on the values of `codes` that the program clips to a range, or takes for a category's others."""
    found = []
    for at, (name, column) in enumerate(schema["columns"].items()):
        own = values[:, at]
        if column["kind"] in ("number", "date") and column["outside"] == "clip":
            low, high = (code(bound, column) for bound in column["range"])
            number, what = ((own < low) | (own > high)).sum(), f"clipped to {column['range']}"
        elif column["kind"] == "category" and column["outside"] == "other":
            number, what = (own == len(column["values"])).sum(), "in no category (other)"
        else:
            continue
        if number:
            found.append(f"{number} of {len(own)} values of column {name!r} are {what}")
    return found


def code(value: Any, column: Mapping[str, Any]) -> float:
    """The number of a value that is no gap.

    A number is itself, a date the day since 1 January of year 1, which is day 1, a boolean 0 or 1, and a category its
    place in the column's values, or their number if it is none of them and the schema has a place for others.
    """
    text, kind = _text(value), column["kind"]
    if kind == "number":
        if "," in text and "." in text:
            raise ValueError("with comma and point; write numbers with one decimal sign alone")
        is_unclear = "," in text or isinstance(value, Pointed)
        if is_unclear and _THOUSANDS.fullmatch(text) and _may_be(float(whole := re.sub("[.,]", "", text)), column):
            raise ValueError(f"which may be {whole} or {text.replace(',', '.')}0; write it as one of these")
        if not _NUMBER.fullmatch(text := text.replace(",", ".")):
            raise ValueError("which is no number; correct it")
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("which is not finite; correct it")
        return number
    if kind == "date":
        try:
            return float(date.fromisoformat(text[: 10 * bool(_DAY.fullmatch(text))]).toordinal())
        except ValueError:
            raise ValueError("which is no day; write dates as YYYY-MM-DD") from None
    if kind == "boolean":
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError("which is neither true nor false; correct it")
        return float(text.lower() in _TRUE)
    values = list(column["values"])
    if isinstance(value, bool | np.bool_):
        text = next((word for word in values if word.lower() == text), text)
    if text not in values:
        alike = [word for word in values if _plain(word) == _plain(text) is not None]
        text = alike[0] if len(alike) == 1 else text
    if text not in values and column["outside"] != "other":
        raise ValueError(f"which is none of {', '.join(values[:8])}; correct it")
    return float(values.index(text) if text in values else len(values))


def _may_be(number: float, column: Mapping[str, Any]) -> bool:
    """Whether a number is not far from a column's range; False where the table's commas are decimal."""
    most = max(map(abs, column.get("range") or (math.inf,)))
    return not column.get("has_commas") and abs(number) <= 10 * most


def _has_commas(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Whether a comma in the columns of numbers is surely decimal.

    Raises:
        ValueError: some cells have commas, and others points.
    """
    texts = {name: [row[name].strip() for row in rows if isinstance(row.get(name), str)] for name in names}
    found = {sign: [name for name in names if any(_one(sign, text) for text in texts[name])] for sign in ",."}
    if all(found.values()):
        raise ValueError(
            f"the rows have numbers with commas in column {found[','][0]!r} and with points in column "
            f"{found['.'][0]!r}; write all with one decimal sign, and without a sign of thousands"
        )
    return any(_one(",", text) and not _THOUSANDS.fullmatch(text) for name in names for text in texts[name])


def _one(sign: str, text: str) -> bool:
    return sign in text and len(text) > 1 and text.count(",") + text.count(".") == 1


def is_gap(value: Any, words: Iterable[str] = ()) -> bool:
    """Whether a value, or its text, stands for a gap; a text of ``words``, which a schema has as values, does not."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if not isinstance(value, str) and value != value:  # a NaN of any type
        return True
    return (text := _text(value)).lower() in _GAPS and text not in words


def _text(value: Any) -> str:
    """A value as text in composed letters without outer blanks, a whole number without a fraction."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        return str(value).removesuffix(".0")
    return unicodedata.normalize("NFC", str(value).strip())


def _plain(text: str) -> float | None:
    """The number of a text without leading zeros, which codes have: 1 and 1.0 are one category."""
    return float(text) if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text) else None

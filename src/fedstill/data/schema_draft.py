"""Drafts of a table's schema, from an example, for a person to check."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedstill.data.csv_files import UNCLEAR
from fedstill.data.names import PERSON
from fedstill.data.table_schema import DAY, FALSE, TRUE, Unclear, number_of, numbers_of, refuse_thousands, texts_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_MOST_CLASSES = 20
"""Most numbers of a target that is drafted as classes."""
_MOST_VALUES = 50
"""Most values of a column that is drafted as a category."""
_CODE = r"0[\dxX].*"
"""A text that is no number, whatever its digits: its zeros tell it from others."""
_HEADER = """\
# A draft from {rows} rows of {name}. Ranges and categories stand in it as these rows have them: replace them by public
# numbers (a data dictionary, what can be measured at all) before anybody else gets this file.
"""
_SITES = {"site", "hospital", "centre", "center", "provider"}
"""Names of columns of sites, in small letters."""
_ITEM = re.compile(r"[\[,]\n {4}")
"""What stands before an item of a list in TOML with an item in each line."""


def draft(table: "pa.Table", target: str | None, name: str) -> str:
    """A schema for a person to check, as TOML.

    Args:
        table: an example, with types or texts.
        target: the column of the classes, or of the number to predict; None for one called as such, or the last with
            few values.
        name: name of the example.

    Raises:
        ValueError: no column can be the target.
    """
    import tomli_w

    frame = table.to_pandas(ignore_metadata=True)
    texts = {column: texts_of(frame[column], _nones(frame[column])) for column in frame}
    is_unclear = UNCLEAR in (table.schema.metadata or {})
    if target is None:
        target = next((c for c in frame if c.casefold() in ("label", "labels", "target", "class", "outcome")), None)
        target = target or next((c for c in reversed(list(frame)) if texts[c].nunique() == 2), None)
    if target is None or target not in frame:
        raise ValueError(f"{name} has the columns {', '.join(frame)}; say with --target which one has the classes")
    columns: dict[str, Any] = {}
    left: dict[str, str] = {}
    roles: dict[str, str] = {}
    ids = [c for c in frame if c != target and (PERSON.fullmatch(c) or c.casefold() == "id")]
    if ids:
        roles["group"] = max(ids, key=lambda c: c.casefold() != "id")  # an id may number the rows
    for column in (c for c in frame if c != target and c != roles.get("group")):
        if column.casefold() in _SITES and "site" not in roles:
            roles["site"] = column
        elif PERSON.fullmatch(column):
            left[column] = "it tells whose a record is"
        elif isinstance(found := _drafted(frame[column], texts[column], is_unclear=is_unclear), dict):
            columns[column] = found
        else:
            left[column] = found
    content = {
        "target": target,
        **_drafted_target(frame[target], texts[target], is_unclear=is_unclear),
        **roles,
        "columns": columns,
    }
    lines = _ITEM.sub(lambda at: "[" if at[0][0] == "[" else ", ", tomli_w.dumps(content)).replace(",\n]", "]")
    ignored = "".join(f"# left out: {column!r} ({why})\n" for column, why in left.items())
    return _HEADER.format(rows=len(frame), name=name) + ignored + lines


def _nones(values: "pd.Series[Any]") -> list[str]:
    """The spellings of "none" in a column of texts, where it is a value as often as a gap."""
    return [text for text in set(values.dropna().astype(str).str.strip()) if text.lower() == "none"]


def _numbers(values: "pd.Series[Any]", texts: "pd.Series[Any]", where: str, *, is_unclear: bool) -> NDArray[np.float64]:
    """The numbers of a column; an error if it has others, or points that may separate thousands."""
    if is_unclear:
        refuse_thousands(texts, where, (-np.inf, np.inf), ".")
    return numbers_of(values, where)


def _drafted_target(values: "pd.Series[Any]", texts: "pd.Series[Any]", *, is_unclear: bool) -> dict[str, Any]:
    """The classes of a target, or the range of one that has more numbers than classes have."""
    classes = sorted(texts.dropna().unique().tolist())
    if len(classes) > _MOST_CLASSES and not texts.str.fullmatch(_CODE).any():
        try:
            numbers = _numbers(values, texts, f"the target {values.name!r}", is_unclear=is_unclear)
        except Unclear:
            raise
        except ValueError:
            pass
        else:
            return {"range": [_outer(np.nanmin(numbers), -1), _outer(np.nanmax(numbers), 1)]}
    alike = {number_of(text): text for text in reversed(classes)}  # 1 and 1.0 are one class
    return {"classes": [text for text in classes if number_of(text) is None or alike[number_of(text)] == text]}


def _drafted(values: "pd.Series[Any]", texts: "pd.Series[Any]", *, is_unclear: bool) -> dict[str, Any] | str:
    """The settings of a column, or the reason to leave it out."""
    present = texts.dropna()
    gaps = len(present) < len(texts)
    distinct = set(present)
    is_code = bool(present.str.fullmatch(_CODE).any())
    if len(distinct) < 2:
        return "it has one value"
    if {text.lower() for text in distinct} <= TRUE | FALSE:
        return {"kind": "boolean"} | ({"missing": False} if gaps else {})
    if present.str.fullmatch(DAY).all():
        days = sorted(text[:10] for text in distinct)
        return {"kind": "date", "range": [days[0], days[-1]]} | ({"missing": days[len(days) // 2]} if gaps else {})
    try:
        numbers = np.empty(0) if is_code else _numbers(values, texts, "it", is_unclear=is_unclear)
    except Unclear as error:
        return str(error)
    except ValueError:
        numbers = np.empty(0)
    if not len(numbers):
        if len(distinct) > _MOST_VALUES or len(distinct) == len(present):
            return f"texts with {len(distinct)} values"
        return {"kind": "category", "values": sorted(distinct)} | ({"missing": present.mode()[0]} if gaps else {})
    some = numbers[~np.isnan(numbers)]
    if len(distinct) == len(present) > 20 and (some == np.round(some)).all():
        return "another whole number in each row, as ids have"
    middle = float(f"{np.median(some):.3g}")
    settings = {"kind": "number", "range": [_outer(some.min(), -1), _outer(some.max(), 1)]}
    return settings | ({"missing": middle} if gaps else {})


def _outer(value: float, way: int) -> float:
    """A number of two digits at or beyond ``value``."""
    if value == 0:
        return 0.0
    step = 10.0 ** (np.floor(np.log10(abs(value))) - 1)
    found = (np.floor if way < 0 else np.ceil)(value / step) * step
    return float(f"{found:.6g}")

"""A public schema by which a site turns the rows of its table into vectors.

A schema is a TOML file that everybody has before anybody reads a record: what each column is, its range or its
categories, what stands for a gap, the target, and the columns of the site and of the person. One-hot columns and scales
follow from it, the same at every site, so that nothing of them is measured from records.

    target = "died"
    classes = ["no", "yes"]     # or, of a target that is a number, range = [1, 75]
    group = "patient"

    [columns.age]
    kind = "number"
    range = [0, 110]
    missing = 60

    [columns.ward]
    kind = "category"
    values = ["surgery", "medicine"]
    outside = "other"
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError, field_validator, model_validator
from typing_extensions import override

from fedstill.base.errors import InputError
from fedstill.base.files import expanded
from fedstill.base.lookup import nfc, repeated, suggestion
from fedstill.base.settings import Settings, read_toml, sentence
from fedstill.data.csv_files import GAPS, THOUSANDS, UNCLEAR

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TRUE, FALSE = {"true", "t", "yes", "y", "1", "1.0"}, {"false", "f", "no", "n", "0", "0.0"}
DAY = r"\d{4}-\d{2}-\d{2}([T ]\d{1,2}(:\d{2}){0,2}([.,]\d+)?( ?[AaPp][Mm])?( ?(Z|UTC|[+-]\d{2}(:?\d{2})?))?)?"
"""The form of a date, which may have a time of day."""
_ANY = (-np.inf, np.inf)
_FAR = 10
"""Times the limits of a column beyond which nobody means a number."""
Scalar = float | str


class Column(Settings):
    """One column of a table."""

    kind: Literal["number", "category", "boolean", "date"]
    """Numbers are scaled by ``range`` to [-1, 1], dates likewise by days, categories become a column for each value."""
    range: tuple[Scalar, Scalar] | None = None
    """Least and largest value, public: of numbers, or of dates as YYYY-MM-DD."""
    values: tuple[str, ...] = ()
    """All categories."""
    missing: bool | float | str | None = None
    """Value that stands for a gap, with a further column that tells gaps; without one, a gap is refused."""
    outside: Literal["refuse", "clip", "other"] = "refuse"
    """What becomes of a value outside of ``range`` (clip it) or ``values`` (a category of its own)."""

    @field_validator("values", "missing")
    @classmethod
    def _composed(cls, value: Any) -> Any:
        return _as_cells(value)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        ranged = self.kind in ("number", "date")
        if ranged and self.range is None:
            raise ValueError(f"a column of kind {self.kind!r} needs its range, as range = [0, 110]")
        if self.kind == "category" and not self.values:
            raise ValueError("a column of kind 'category' needs its values, as values = ['a', 'b']")
        if self.values and self.kind != "category" or self.range is not None and not ranged:
            raise ValueError(f"values are for categories and a range is for numbers and dates; this is a {self.kind}")
        if len(set(self.values)) < len(self.values):
            raise ValueError(f"values names {next(v for v in self.values if self.values.count(v) > 1)!r} twice")
        if self.outside == {"category": "clip"}.get(self.kind, "other"):
            raise ValueError(f"outside is {self.outside!r}, which a column of kind {self.kind!r} can't do")
        if ranged:
            low, high = self.bounds
            if not low < high:
                raise ValueError(f"the range {list(self.range or ())} is empty; give the least value, then the largest")
            if 2 * (high - low) == np.inf:
                raise ValueError(f"the range {list(self.range or ())} is too wide; give one that values can have")
        if self.missing is not None and self.kind == "category" and self.missing not in (*self.values, "other"):
            raise ValueError(f"missing is {self.missing!r}, which is not one of the values")
        if self.missing is not None and self.kind == "boolean" and str(self.missing).lower() not in TRUE | FALSE:
            raise ValueError(f"missing is {self.missing!r}, which is neither true nor false")
        if self.outside == "other" and "other" in self.values:
            raise ValueError("values has 'other', and outside = 'other' makes a second one; rename the category")
        return self

    @property
    def unfit(self) -> str:
        """Why no record could have the value that stands for gaps; empty if one could."""
        if self.missing is None or self.range is None:
            lost = self.missing == "other" and self.outside != "other" not in self.values
            return "missing is 'other', which is none of its values; set outside = 'other'" if lost else ""
        low, high, value = *self.bounds, np.nan
        with suppress(ValueError):
            value = np.nan if isinstance(self.missing, bool) else self.number(self.missing)
        fits = low <= value <= high or (self.outside == "clip" and not np.isnan(value))
        return "" if fits else f"missing is {self.missing!r}, which is no {self.kind} of the range {list(self.range)}"

    def number(self, value: Scalar) -> float:
        """A value of a ranged column as a number, of a date the days since 1 January of year 1; or ValueError."""
        return _day(value) if self.kind == "date" else float(value)

    @property
    def is_true(self) -> bool:
        """Whether a gap of a boolean column counts as true."""
        return str(self.missing).lower() in TRUE

    @property
    def bounds(self) -> tuple[float, float]:
        """The range as numbers; days since 1 January of year 1 for dates."""
        assert self.range is not None
        return self.number(self.range[0]), self.number(self.range[1])


def _as_cells(value: Any) -> Any:
    """Texts as those of cells are compared: with composed letters, without outer blanks."""
    if isinstance(value, tuple):
        return tuple(map(_as_cells, value))
    return nfc(value.strip()) if isinstance(value, str) else value


def _day(value: object) -> float:
    with suppress(ValueError):
        return float(date.fromisoformat(str(value)[:10]).toordinal())
    raise ValueError(f"{value!r} is no date; write it as YYYY-MM-DD")


class TableSchema(Settings):
    """The public description of a table: the same at the server and at every site."""

    target: str
    """Column of the classes, or of the number to predict."""
    classes: tuple[str, ...] = ()
    """All classes, in order; none if the target is a number."""
    range: tuple[float, float] | None = None
    """Least and largest value of a target that is a number, public: they bound what one record can do to a model."""
    outside: Literal["refuse", "clip"] = "refuse"
    """What becomes of a target outside of ``range``."""
    columns: dict[str, Column]
    """Columns that a model uses; others are left out."""
    group: str | None = None
    """Column of the person (or whatever keeps together), whose values stay on one side of every split."""
    site: str | None = None
    """Column of the site, for --partition by:COLUMN."""

    @field_validator("classes")
    @classmethod
    def _composed(cls, value: Any) -> Any:
        return _as_cells(value)

    @field_validator("columns", "target", "group", "site")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Names with composed letters, as those of tables are."""
        if isinstance(value, dict):
            return {nfc(name): column for name, column in value.items()}
        return value if value is None else nfc(value)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.columns:
            raise ValueError("columns names no column, so that a record would be empty")
        if self.range is not None:
            self._check_range(self.range)
        elif len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"classes is {list(self.classes)}; name each class once, and two at least (a number as the target has "
                "a range in their place, as range = [1, 75])"
            )
        for name in (self.target, self.group, self.site):
            if name in self.columns:
                raise ValueError(f"{name!r} is a column of the model, and the target, the group or the site; drop one")
        names = [*self.features, *dict.fromkeys(filter(None, (self.target, self.group, self.site)))]
        if twice := repeated(names):
            raise ValueError(f"two columns would be called {twice!r}, one of them made of another; rename a column")
        return self

    def _check_range(self, bounds: tuple[float, float]) -> None:
        if self.classes:
            raise ValueError(
                f"the target {self.target!r} has classes and a range; keep classes, or the range of a number"
            )
        if not -np.inf < bounds[0] < bounds[1] < np.inf:
            raise ValueError(f"the range {list(bounds)} of the target is empty; give the least value, then the largest")

    @classmethod
    def read(cls, path: str | Path) -> "TableSchema":
        """Read the file.

        Raises:
            ValueError: it can't be read, or a setting is invalid; with the column.
        """
        place = expanded(path)
        none = f"there is no schema {str(path)!r}; draft one with fedstill data schema FILE"
        found = read_toml(cls, place, f"the schema {str(path)!r}", none)
        for name, column in found.columns.items():
            if column.unfit:
                raise ValueError(f"the schema {str(path)!r} is invalid: columns.{name}: {column.unfit}")
        return found

    @classmethod
    def kept(cls, content: Mapping[str, Any], where: str) -> "TableSchema":
        """The schema that a run has kept.

        Raises:
            ValueError: it is refused today; ``where`` names the run.
        """
        try:
            return cls(**content)
        except ValidationError as error:
            raise ValueError(f"the schema that {where} has kept is refused: {sentence(error, kind=cls)}") from error

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        later = {"range", "outside"} if self.range is None else set()
        return hashlib.sha256(self.model_dump_json(exclude=later).encode()).hexdigest()

    @override
    def __str__(self) -> str:  # stands in the name of a cache entry
        return f"schema {self.digest[:16]}"

    @override
    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the numbers of a vector, in order."""
        return tuple(name for column in self.columns for name in self._names(column))

    @property
    def _bounds(self) -> dict[str, tuple[float, float]]:
        """The range of each column of numbers."""
        return {name: column.bounds for name, column in self.columns.items() if column.kind == "number"}

    def _names(self, name: str) -> list[str]:
        column = self.columns[name]
        own = [name]
        if column.kind == "category":
            own = [f"{name}={value}" for value in (*column.values, *["other"] * (column.outside == "other"))]
        return [*own, *[f"{name} is missing"] * (column.missing is not None)]

    def vectors(self, table: "pa.Table", where: str) -> tuple[NDArray[np.float32], list[str]]:
        """The vectors ``(n, d)`` of rows that need no target, group or site; else as `encode`."""
        _check_present([*self.columns], table, where)
        frame = _with_points(table.select([*self.columns]), self._bounds, where)
        remarks: list[str] = []
        columns = self._encoded(frame, where, remarks)
        return np.stack([columns[name].astype(np.float32) for name in self.features], 1), remarks

    def _encoded(self, frame: "pd.DataFrame", where: str, remarks: list[str]) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for name, column in self.columns.items():
            parts = _encoded(frame[name], column, f"column {name!r} of {where}", remarks)
            found |= dict(zip(self._names(name), parts, strict=True))
        return found

    def encode(self, table: "pa.Table", where: str) -> tuple["pa.Table", tuple[str, ...]]:
        """A table of numbers, the target, the group and the site; and sentences on values that were clipped.

        Args:
            table: the rows as they are.
            where: name of the table for error messages.

        Raises:
            ValueError: a column is absent, or a value is none of its kind, outside of its range or categories, or a
                gap where no value stands for one; with the value, the limit and the remedy.
        """
        import pyarrow as pa

        needed = [*self.columns, self.target, *filter(None, (self.group, self.site))]
        _check_present(needed, table, where)
        bounds = self._bounds | ({} if self.range is None else {self.target: self.range})
        frame = _with_points(table.select(list(dict.fromkeys(needed))), bounds, where)
        remarks: list[str] = []
        found: dict[str, Any] = self._encoded(frame, where, remarks)
        target = f"column {self.target!r} of {where}"
        if self.range is None:
            found[self.target] = _target(frame[self.target], self.classes, target)
        else:
            numbers = Column(kind="number", range=self.range, outside=self.outside)
            found[self.target] = _target_numbers(frame[self.target], numbers, target, remarks)
        for name in dict.fromkeys(filter(None, (self.group, self.site))):
            found[name] = _places(frame[name], f"column {name!r} of {where}")
        left = [name for name in table.column_names if name not in needed]
        if left:
            remarks.append(f"not in the schema, so not read: {', '.join(left[:8])}{', ...' * (len(left) > 8)}")
        return pa.table(found), tuple(remarks)


def _check_present(needed: Sequence[str], table: "pa.Table", where: str) -> None:
    if absent := next((name for name in needed if name not in table.column_names), None):
        near = suggestion(absent, table.column_names)
        raise ValueError(f"{where} has no column {absent!r}, which the schema names{near or '; rename one of them'}")
    for name in needed:
        if (kind := table.schema.field(name).type).num_fields:
            raise ValueError(f"column {name!r} of {where} has type {kind}; write it as texts or numbers")


def texts_of(values: "pd.Series[Any]", words: Collection[str] = ()) -> "pd.Series[Any]":
    """Values as texts in composed letters without outer blanks, whole numbers without a fraction; gaps are None.

    ``words`` are no gaps, whatever else they stand for elsewhere: a schema has them as values.
    """
    import pandas as pd

    if pd.api.types.infer_dtype(values, skipna=True) == "boolean":
        said = {word.lower(): word for word in words}
        values = values.map({True: said.get("true", "true"), False: said.get("false", "false")})
    texts = values.astype("string").str.strip().map(nfc, na_action="ignore").astype("string")
    if pd.api.types.is_float_dtype(values):
        texts = texts.str.removesuffix(".0")
    if numbers := _by_number(words):
        known = {*words}
        texts = texts.map(
            lambda text: text if text in known else numbers.get(number_of(text), text), na_action="ignore"
        )
    texts = texts.astype("string")  # which a column of gaps alone would not be
    return texts.mask(texts.str.lower().isin(GAPS) & ~texts.isin([*words]))


def _by_number(words: Collection[str]) -> dict[float | None, str]:
    """The words that are numbers, by these: 1 and 1.0 are one value, whichever a file, a frame or a schema has."""
    numbers = [number_of(word) for word in words]
    return {n: word for n, word in zip(numbers, words, strict=True) if n is not None and numbers.count(n) == 1}


def number_of(text: str) -> float | None:
    """The number of a text without leading zeros, which codes have."""
    return float(text) if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text) else None


def _places(values: "pd.Series[Any]", where: str) -> list[str]:
    """The site or the person of each record."""
    texts = texts_of(values)
    if gaps := int(texts.isna().sum()):
        raise ValueError(
            f"{where} has {gaps} gaps, and those records would be one site's or one person's; give each its own, or "
            "drop them"
        )
    found: list[str] = texts.to_list()
    return found


def _target(values: "pd.Series[Any]", classes: Sequence[str], where: str) -> list[str]:
    texts = texts_of(values, classes)
    if texts.isna().any():
        raise ValueError(f"{where} has {int(texts.isna().sum())} gaps; drop the records without a class")
    if wrong := sorted(set(texts) - set(classes)):
        near = suggestion(wrong[0], classes)
        raise ValueError(
            f"{where} has the class {wrong[0]!r}, which is none of {', '.join(classes)}"
            f"{near or '; correct it, or the schema'}"
        )
    found: list[str] = texts.to_list()
    return found


def _target_numbers(values: "pd.Series[Any]", target: Column, where: str, remarks: list[str]) -> NDArray[np.float64]:
    """The numbers to predict, scaled to [-1, 1] by their range."""
    numbers = numbers_of(values, where, target.bounds)
    gaps = np.isnan(numbers)
    if gaps.any():
        raise ValueError(f"{where} has {int(gaps.sum())} gaps; drop the records without a target")
    return _in_range(numbers, target, where, remarks)


def _encoded(values: "pd.Series[Any]", column: Column, where: str, remarks: list[str]) -> Iterator[NDArray[np.float32]]:
    """The numbers of a column, and whether each is a gap, if a value stands for gaps."""
    if column.kind in ("number", "date"):
        numbers = numbers_of(values, where, column.bounds) if column.kind == "number" else _days(values, where)
        gaps = np.isnan(numbers)
        yield _scaled(numbers, gaps, column, where, remarks)
    elif column.kind == "boolean":
        texts = texts_of(values).str.lower()
        gaps = texts.isna().to_numpy()
        known = texts.isin(TRUE | FALSE).to_numpy() | gaps
        if not known.all():
            raise ValueError(
                f"{where} has {values[~known].iloc[0]!r}, which is neither true nor false; make it a category"
            )
        yield np.where(gaps, float(column.is_true), texts.isin(TRUE).to_numpy(dtype=float)).astype(np.float32)
    else:
        texts = texts_of(values, column.values)
        gaps = texts.isna().to_numpy()
        filled = texts.fillna(str(column.missing)) if column.missing is not None else texts
        unknown = ~filled.isin(column.values).to_numpy() & ~(gaps & (column.missing is None))
        other = unknown.copy()
        if column.outside == "refuse" and unknown.any():
            first = texts[unknown].iloc[0]
            raise ValueError(
                f"{where} has {first!r}, which is none of {', '.join(column.values[:8])}"
                f"{suggestion(str(first), column.values)}; add it to values at every site, or set outside = 'other'"
            )
        for value in column.values:
            yield (filled == value).fillna(False).to_numpy(dtype=np.float32)
        if column.outside == "other":
            if unknown.any():
                remarks.append(f"{int(unknown.sum())} of {len(values)} values of {where} are in no category (other)")
            yield other.astype(np.float32)
    if column.missing is not None:
        yield gaps.astype(np.float32)
    elif gaps.any():
        raise ValueError(f"{where} has {int(gaps.sum())} gaps; say what stands for one (missing), or drop the records")


def _scaled(
    numbers: NDArray[np.float64], gaps: NDArray[np.bool_], column: Column, where: str, remarks: list[str]
) -> NDArray[np.float32]:
    if column.missing is not None:
        numbers = np.where(gaps, column.number(column.missing), numbers)
    return _in_range(numbers, column, where, remarks).astype(np.float32)


def _in_range(numbers: NDArray[np.float64], column: Column, where: str, remarks: list[str]) -> NDArray[np.float64]:
    """Numbers scaled to [-1, 1] by the column's range."""
    low, high = column.bounds
    beyond = (numbers < low) | (numbers > high)
    if beyond.any() and column.outside == "refuse":
        value = numbers[beyond][0]
        times = f" ({value / high:.3g} times the largest; another unit?)" if 0 < 5 * high < value else ""
        shown = date.fromordinal(int(value)) if column.kind == "date" else f"{value:g}"
        raise ValueError(
            f"{where} has {shown}, outside of {list(column.range or ())}{times}, in {int(beyond.sum())} of "
            f"{len(numbers)} records; correct them, widen the range at every site, or set outside = 'clip'"
        )
    if beyond.any():
        remarks.append(
            f"{int(beyond.sum())} of {len(numbers)} values of {where} are clipped to {list(column.range or ())}"
        )
    scaled: NDArray[np.float64] = (np.clip(numbers, low, high) - low) * (2 / (high - low)) - 1
    return scaled


def numbers_of(values: "pd.Series[Any]", where: str, bounds: tuple[float, float] = _ANY) -> NDArray[np.float64]:
    """Numbers, also of texts with a decimal point or a decimal comma; gaps are NaN.

    Texts whose commas may all separate thousands, as ``1,088``, are refused unless all such thousands are far from
    ``bounds``; of points, `_with_points` decides by all columns.
    """
    import pandas as pd

    if pd.api.types.is_bool_dtype(values):
        raise ValueError(f"{where} has truth values, but the schema says numbers; give numbers, or set another kind")
    if pd.api.types.is_numeric_dtype(values):
        found: NDArray[np.float64] = values.to_numpy(dtype=np.float64, na_value=np.nan)
        if np.isinf(found).any():
            raise ValueError(f"{where} has an infinite value; correct it")
        return found
    if pd.api.types.is_datetime64_any_dtype(values):
        raise ValueError(f"{where} has dates, but the schema says numbers; set kind = 'date'")
    texts = texts_of(values)
    if texts.str.contains(",", regex=False).any():
        if texts.str.contains(".", regex=False).any():
            both = texts[texts.str.contains(",", regex=False, na=False)].iloc[0]
            raise ValueError(
                f"{where} has commas and points, as in {both!r}; write numbers with one decimal sign alone"
            )
        refuse_thousands(texts, where, bounds, ",")
        texts = texts.str.replace(",", ".", regex=False)
    found = pd.to_numeric(texts, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = ~np.isfinite(found) & ~texts.isna().to_numpy()
    if wrong.any():
        raise ValueError(f"{where} has {values[wrong].iloc[0]!r}, which is no number; correct it, or set another kind")
    return found


class Unclear(InputError):
    """A number that may be one of two."""


def refuse_thousands(
    texts: "pd.Series[Any]", where: str, bounds: tuple[float, float], sign: str, unclear: str = ""
) -> None:
    """Refuse texts whose ``sign`` may separate thousands in all of them, if some such number is near ``bounds``.

    With the name of one of several files that is ``unclear``, the texts of others do not speak for it.

    Raises:
        Unclear: it may.
    """
    marked = texts[texts.str.contains(sign, regex=False, na=False)]
    whole = marked.str.fullmatch(THOUSANDS)
    if not unclear and not whole.all():  # 1,5 or 0,125 has a decimal comma
        return
    marked = marked[whole]
    thousands, most = marked.str.replace(sign, "", regex=False).astype(float), max(map(abs, bounds))
    if not (meant := marked[thousands.abs() <= _FAR * most]).empty:
        one, other = (meant.iloc[0].replace(sign, to) for to in ("", "."))
        why = f", as may all numbers with a sign in {unclear!r}" if unclear else ""
        raise Unclear(f"{where} has {meant.iloc[0]!r}, which may be {one} or {other}0{why}; write it as one of these")


def _with_points(table: "pa.Table", bounds: Mapping[str, tuple[float, float]], where: str) -> "pd.DataFrame":
    """The table with decimal points in its columns of numbers, if a comma in one of them is surely decimal.

    ``bounds`` are those of each column of numbers.

    Raises:
        ValueError: other columns have points, so that one of the two separates thousands; or all signs of a file may
            do so.
    """
    import pandas as pd

    frame = table.to_pandas(ignore_metadata=True)
    given = {name: frame[name] for name in bounds if pd.api.types.infer_dtype(frame[name]) == "string"}
    texts = {name: texts_of(some) for name, some in given.items()}
    marks: dict[bytes, bytes] = table.schema.metadata or {}
    for name, some in texts.items() if UNCLEAR in marks else ():
        for sign in ",.":
            refuse_thousands(some, f"column {name!r} of {where}", bounds[name], sign, marks[UNCLEAR].decode())
    if not any(some.str.contains(",", regex=False, na=False).any() for some in texts.values()):
        return frame
    found = {
        sign: [name for name, some in texts.items() if some.str.fullmatch(rf"[^.,]*[{sign}][^.,]*").any()]
        for sign in ",."
    }
    if {*found[","]} & {*found["."]}:  # which `numbers_of` refuses
        return frame
    if all(found.values()):
        raise ValueError(
            f"{where} has numbers with commas in column {found[','][0]!r} and with points in column {found['.'][0]!r}; "
            "write all with one decimal sign, and without a sign of thousands"
        )
    commas = [texts[name][texts[name].str.contains(",", regex=False, na=False)] for name in found[","]]
    if all(some.str.fullmatch(THOUSANDS).all() for some in commas):  # none of which is surely decimal
        return frame
    clean = [name for name in found[","] if not texts[name].str.contains(".", regex=False, na=False).any()]
    return frame.assign(**{name: texts[name].str.replace(",", ".", regex=False) for name in clean})


def _days(values: "pd.Series[Any]", where: str) -> NDArray[np.float64]:
    """Days since 1 January of year 1, of dates or of texts YYYY-MM-DD; gaps are NaN."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(values) and values.notna().any():
        raise ValueError(f"{where} has numbers, but the schema says dates; set kind = 'number', or write YYYY-MM-DD")
    texts = texts_of(values)
    good = texts.str.fullmatch(DAY)
    if not good.fillna(True).all():
        first = texts[~good.fillna(True).to_numpy(dtype=bool)].iloc[0]
        raise ValueError(f"{where} has {first!r}; write dates as YYYY-MM-DD, which every country reads alike")
    found = pd.to_datetime(texts.str[:10], format="%Y-%m-%d", errors="coerce")
    wrong = found.isna().to_numpy() & ~texts.isna().to_numpy()
    if wrong.any():
        raise ValueError(f"{where} has {texts[wrong].iloc[0]!r}, which is no day of a calendar")
    since: NDArray[np.float64] = (found - pd.Timestamp("1970-01-01")).dt.days.to_numpy(np.float64, na_value=np.nan)
    return since + date(1970, 1, 1).toordinal()

"""A finished model's predictions of records of which nobody has told the class."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base.errors import InputError, front_door
from fedstill.base.files import expanded, path_of, write_secret
from fedstill.base.lookup import nfc, suggestion
from fedstill.data import own
from fedstill.data.decode import text_column
from fedstill.data.unlabelled import Pictures, is_table, plain, rows
from fedstill.data.walk import CSV
from fedstill.experiment.trained import Trained, load_model
from fedstill.measures import decide
from fedstill.report.record import RunRecord, read_run

if TYPE_CHECKING:
    import pyarrow as pa
    from pandas import DataFrame

_AT_A_TIME = 256
"""Pictures that are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts of n records, in their order.

    Attributes:
        class_names: the model's classes, C; the name of the number alone, if it predicts one.
        predicted: names of the predicted classes, or numbers in their unit, ``(n,)``.
        probabilities: of each class, ``(n, C)``; None for numbers.
        columns: texts that tell which record each is: the path of its picture below the folder, or columns of its row.
        told: sentences on what was read: pictures that were resized, values that were clipped, columns left out.
    """

    class_names: tuple[str, ...]
    predicted: NDArray[Any]
    probabilities: NDArray[np.float64] | None
    columns: Mapping[str, Sequence[Any]]
    told: tuple[str, ...] = ()

    def to_pandas(self) -> "DataFrame":
        """A row for each record: its `columns`, ``predicted``, and ``probability of CLASS`` for each class."""
        from pandas import DataFrame, Series

        found: dict[str, Any] = dict(self.columns)
        for name, values in self.columns.items():
            if None in values:  # whole numbers with a gap would become decimals
                found[name] = Series(values, dtype=object)
        found["predicted"] = self.predicted
        if self.probabilities is not None:
            found |= {f"probability of {name}": self.probabilities[:, c] for c, name in enumerate(self.class_names)}
        return DataFrame(found).rename_axis("record")

    def save(self, path: str | Path) -> None:
        """Write `to_pandas` as a CSV file whose first column numbers the records from 0; its owner alone may read it.

        Raises:
            InputError: there is such a file.
        """
        save_rows(self.to_pandas(), path, numbered=True)


def save_rows(frame: "DataFrame", path: str | Path, *, numbered: bool) -> None:
    """Write predictions of people's records as a CSV file that its owner alone may read.

    Args:
        frame: a row for each record.
        path: the new file.
        numbered: whether the first column has the frame's index.

    Raises:
        InputError: there is such a file.
    """
    place = expanded(path_of(path, "the file for the predictions"))
    if place.exists():
        raise InputError(f"{str(place)!r} exists; name a new file for the predictions")
    write_secret(place, frame.to_csv(index=numbered).encode())


@front_door
def predict(
    model: Trained | RunRecord | str | Path,
    data: Any,
    *,
    positive: str | int | None = None,
    threshold: float | None = None,
    keep: Sequence[str] = (),
) -> Predictions:
    """Predict the classes, or the numbers, of the records in a file, a folder or a frame, which need no labels.

    Arrays and lists of texts in memory are for the methods ``predict`` and ``predict_proba`` of `load_model`.

    Args:
        model: the model of `load_model`, or a finished run or its folder.
        data: a CSV or parquet file or a pandas, polars or Arrow table, whose columns are found by name, or turned into
            the model's by the run's schema; of texts, their column is "text", "sentence" or the only one. Or a folder
            of pictures with all folders in it, or one picture; those of another size than the run's are cropped and
            resized to it.
        positive: the class of two that ``threshold`` is for, or the number that is its name; by default the last.
        threshold: probability from which it is predicted; by default the likelier class is.
        keep: columns of the table that go into the result as they are, such as a patient's number.

    Raises:
        InputError: there is no such file, it is of another kind than the model's records, a column is missing, a value
            does not fit, or a record's outputs are no numbers.
    """
    if isinstance(keep, str):
        raise ValueError(f"keep is {keep!r}; give a list of columns, as [{keep!r}]")
    folder = model if isinstance(model, Trained) else path_of(model, "the model")
    found = folder if isinstance(folder, Trained) else load_model(folder)
    sign = found.decided(positive, threshold)
    size = None if isinstance(folder, Trained) else read_run(folder).config["experiment"].get("size")
    outputs, columns, told = _of_frame(found, data, keep) if own.is_frame(data) else _of_place(found, data, keep, size)
    if found.target is not None:
        return Predictions(found.class_names, outputs, None, columns, told)
    chosen = decide(outputs, sign, None if threshold is None else float(threshold))
    return Predictions(found.class_names, np.array(found.class_names)[chosen], outputs, columns, told)


Found = tuple[NDArray[np.float64], Mapping[str, Sequence[Any]], tuple[str, ...]]
"""Probabilities ``(n, C)`` or numbers ``(n,)``, the columns of `Predictions`, and its sentences."""


def _outputs(model: Trained, records: Any) -> NDArray[np.float64]:
    """Probabilities ``(n, C)``, or numbers ``(n,)``."""
    found = model.predict_proba(records) if model.target is None else model.predict(records)
    return np.asarray(found, dtype=np.float64)


def _of_frame(model: Trained, frame: Any, keep: Sequence[str]) -> Found:
    """The outputs of the rows of a frame."""
    return _of_table(model, plain(own.table(frame, "the data"), "the data have"), "the data", keep)


def _of_place(model: Trained, data: Any, keep: Sequence[str], size: int | None) -> Found:
    """The outputs of the rows of a file, or of the pictures of a folder."""
    if not isinstance(data, str | Path):
        raise ValueError(
            f"the data are {type(data).__name__}; give a file, a folder or a table; arrays and lists of texts are for "
            "fedstill.load_model(run).predict"
        )
    place = expanded(path_of(data, "the data"))
    if not place.exists():
        raise ValueError(f"{str(place)!r} is no file or folder here; give a table or a folder of pictures")
    if is_table(place):
        return _of_file(model, place, keep)
    if keep:
        raise ValueError(f"keep is {', '.join(keep)}, but {str(place)!r} is no table; leave it out")
    return _of_pictures(model, place, size)


def _of_file(model: Trained, place: Path, keep: Sequence[str]) -> Found:
    """The outputs of the rows of a table's file."""
    as_written = keep and model.schema is None and place.suffix.lower() in CSV
    written = rows(place, as_text=True) if as_written else None
    return _of_table(model, rows(place, as_text=model.schema is not None), repr(str(place)), keep, written)


def _of_table(
    model: Trained, table: "pa.Table", where: str, keep: Sequence[str], written: "pa.Table | None" = None
) -> Found:
    """The outputs of the rows of a table; what is kept of them is as in ``written``, or as in the table."""
    keep = [nfc(name) for name in keep]
    kept = _kept(where, table if written is None else written, keep)
    if model.schema is not None:
        needed = tuple(model.schema.columns)
        vectors, told = model.schema.vectors(table, where)
        return _outputs(model, vectors), kept, (*told, *_left(table, needed, keep))
    if model.columns:
        return _outputs(model, table), kept, _left(table, model.columns, keep)
    if model.features is not None and model.backbone(model.pictures).takes == "texts":
        column = text_column(table, "", (), where)
        return _outputs(model, table[column].to_pylist()), kept, _left(table, (column,), keep)
    of_pictures = model.features is not None or len(model.shape) == 3
    what = "pictures; give a folder of them" if of_pictures else "vectors without names; give arrays to Trained.predict"
    raise ValueError(f"{where} is a table, but the model takes {what}")


def _left(table: "pa.Table", needed: Sequence[str], keep: Sequence[str]) -> tuple[str, ...]:
    """A sentence on the columns that the model does not take."""
    left = [name for name in table.column_names if name not in {*needed, *keep}]
    return (f"not the model's, so not read: {', '.join(left[:8])}{', ...' * (len(left) > 8)}",) if left else ()


def _kept(where: str, table: "pa.Table", keep: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The columns of a table that go into the result."""
    for name in keep:
        if name not in table.column_names:
            near = suggestion(name, table.column_names) or f"; it has {', '.join(table.column_names[:20])}"
            raise ValueError(f"{where} has no column {name!r} to keep{near}")
        if name in ("record", "predicted") or name.startswith("probability of "):
            raise ValueError(f"the column {name!r} cannot be kept, as the result has one of this name; rename it")
    return {name: table[name].to_pylist() for name in keep}


def _of_pictures(model: Trained, place: Path, size: int | None) -> Found:
    """The outputs of all pictures below a folder, of which few are in memory at a time."""
    shape = model.shape if model.features is None else model.pictures
    of_rows = f"{str(place)!r} is no table, but the model takes the rows of one; give a CSV or parquet file"
    if len(shape) == 1:
        raise ValueError(of_rows)
    side = size or model.side
    given = Pictures.below(place)
    pixels = given.pixels(shape[0] if shape else None, side)
    found, changed = [], Counter[str]()
    while some := [*islice(pixels, _AT_A_TIME)]:
        changed.update(words for _, done in some for words in done)
        images = torch.from_numpy(np.stack([one for one, _ in some]))
        if model.features is not None and model.backbone(tuple(images.shape[1:])).takes == "texts":
            raise ValueError(of_rows)
        found.append(_outputs(model, images))
    of_all = f"of {len(given.files):,} pictures"
    told = [*(f"{number:,} {of_all} {words}" for words, number in sorted(changed.items())), given.unread]
    return np.concatenate(found), {"file": [str(file) for file in given.files]}, tuple(filter(None, told))

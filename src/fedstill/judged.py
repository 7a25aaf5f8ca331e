"""A finished model judged on labelled records: which these are, its predictions, and what follows from them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base.errors import front_door
from fedstill.base.files import path_of
from fedstill.base.lookup import suggestion
from fedstill.base.records import twins
from fedstill.data import own
from fedstill.data.decode import Split
from fedstill.data.names import KNOWN
from fedstill.data.places import Reading, is_own, local_copy, own_place
from fedstill.data.sources import DataSet, Raw, load, load_raw, place_of
from fedstill.data.table_schema import TableSchema
from fedstill.evaluation import Numbers, in_unit
from fedstill.experiment.config import Experiment
from fedstill.experiment.trained import Trained, load_model
from fedstill.measures import Scores
from fedstill.predictions import save_rows
from fedstill.report import caveats
from fedstill.report.record import RunRecord, read_run
from fedstill.runs.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model's predictions on labelled records, counted (C classes).

    Attributes:
        class_names: the model's classes.
        confusion: records by true (rows) and predicted class, int64 ``(C, C)``.
        scores: the true classes and the model's probabilities, for `fedstill.measures`.
        told: sentences on what was read: which records, values that were clipped or in no category, columns left out.
        whole: whether the records are all of the data, in their order.
    """

    class_names: tuple[str, ...]
    confusion: NDArray[np.int64]
    scores: Scores
    told: tuple[str, ...] = ()
    whole: bool = False

    @property
    def records(self) -> int:
        """Number of records."""
        return int(self.confusion.sum())

    @property
    def persons(self) -> NDArray[Any] | None:
        """The person of each record, ``(n,)``; None where nobody is known."""
        return self.scores.persons

    @property
    def accuracy(self) -> float:
        """Share of the records whose class was predicted, in [0, 1]."""
        return float(np.trace(self.confusion) / self.records)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy (Wilson 1927), for records drawn independently."""
        return caveats.interval(int(np.trace(self.confusion)), self.records)

    @property
    def recalls(self) -> dict[str, float]:
        """Share of the records of each class that were found, in [0, 1], by the class's name; without empty classes."""
        counts, right = self.confusion.sum(1), np.diag(self.confusion)
        return {self.class_names[c]: float(right[c] / counts[c]) for c in np.flatnonzero(counts)}

    @property
    def balanced_accuracy(self) -> float:
        """Mean of `recalls`."""
        return float(np.mean([*self.recalls.values()]))

    def measures(self) -> "DataFrame":
        """All measures of `fedstill.measures`, a row each, with 95 % intervals by resampling records or persons.

        Columns: ``measure``, ``value``, ``low``, ``high``.
        """
        from pandas import DataFrame

        values, bounds = self.scores.measures(), self.scores.intervals()
        rows = [(name, value, *(bounds[name] or (None, None))) for name, value in values.items()]
        return DataFrame(rows, columns=["measure", "value", "low", "high"])

    def save(self, path: str | Path) -> None:
        """Write a CSV file, for its owner alone, with a row for each record: true and predicted class, probabilities.

        Its first column numbers the records from 0 as in the data, if these are judged as a ``whole``.

        Raises:
            InputError: there is such a file.
        """
        names, scores = self.class_names, self.scores
        columns: dict[str, Any] = {"true": [names[c] for c in scores.true]}
        columns |= {"predicted": [names[c] for c in scores.predicted]}
        columns |= {f"probability of {name}": scores.probabilities[:, c] for c, name in enumerate(names)}
        _save(columns, self.persons, self.whole, path)

    @property
    def remarks(self) -> list[str]:
        """What was read, and what the accuracy hides: classes never predicted, one that explains it, few records."""
        return [*self.told, *caveats.of_model(self.confusion, lambda label: self.class_names[label])]


@dataclass(frozen=True, eq=False)
class NumberEvaluation:
    """A model's predictions of a number on labelled records.

    Attributes:
        target: name of the number.
        numbers: true and predicted numbers, and the persons, for `fedstill.evaluation`.
        told: as of `Evaluation`.
        whole: as of `Evaluation`.
    """

    target: str
    numbers: Numbers
    told: tuple[str, ...] = ()
    whole: bool = False

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.numbers.true)

    @property
    def persons(self) -> NDArray[Any] | None:
        """The person of each record, ``(n,)``; None where nobody is known."""
        return self.numbers.persons

    @property
    def remarks(self) -> list[str]:
        """What was read: sentences on what an accuracy hides are for classes."""
        return [*self.told]

    def measures(self) -> "DataFrame":
        """``rmse``, ``mae`` and ``r2``, a row each as of `Evaluation.measures`."""
        from pandas import DataFrame

        found = {name: bounds for name, bounds in self.numbers.described().items() if name != "records"}
        rows = [(name, *bounds) for name, bounds in found.items()]
        return DataFrame(rows, columns=["measure", "value", "low", "high"])

    def save(self, path: str | Path) -> None:
        """Write a CSV file with a row for each record: true and predicted value; numbered as `Evaluation.save` does.

        Raises:
            InputError: there is such a file.
        """
        columns = {"true": self.numbers.true, "predicted": self.numbers.predicted}
        _save(columns, self.persons, self.whole, path)


def _save(columns: dict[str, Any], persons: NDArray[Any] | None, whole: bool, path: str | Path) -> None:
    """Write a CSV file with a row for each record, its number in data judged as a whole, and its person if known."""
    from pandas import DataFrame

    frame = DataFrame(columns if persons is None else {**columns, "person": persons})
    save_rows(frame.rename_axis("record"), path, numbered=whole)


@front_door
def evaluate(
    model: Trained | RunRecord | str | Path,
    data: Any,
    *,
    label_column: str | None = None,
    group: str | None = None,
    positive: str | int | None = None,
    threshold: float | None = None,
) -> Evaluation | NumberEvaluation:
    """Judge a model's predictions on labelled records, which it finds by the names of classes and columns.

    A model that predicts a number is judged by its errors (`NumberEvaluation`).

    Args:
        model: the model of `load_model`, or a finished run or its folder.
        data: as for `run`, one data set: the records of a pair ``(X, y)`` or a table, or those of its test split, if a
            column tells splits; the test records of a `DataSet` and of data by name, also of the path that the run
            trained on, where a fifth was held out, as long as it has the records of then; the test split of any other
            path, or all its records if it has none. `Evaluation.told` says which these are, and how many of them equal
            the run's train records, if the run's own data are still in their place.
        label_column: the column of the classes of a table; by default one with a usual name, or that of the run.
        group: the column of the person, whose records are resampled together for intervals; by default that of the run.
        positive: the class of two that sensitivity is of, or the number that is its name; by default the last.
        threshold: probability from which it is predicted; by default the likelier class is.

    Raises:
        InputError: a class is not the model's, a column is missing, records have another shape, or there are none.
    """
    folder = model if isinstance(model, Trained) else path_of(model, "the model")
    found = folder if isinstance(folder, Trained) else load_model(folder)
    sign = found.decided(positive, threshold)
    threshold = None if threshold is None else float(threshold)
    if found.target is not None:
        if isinstance(folder, Trained):
            raise ValueError("a number is judged by its run's schema; give the run or its folder in place of the model")
        return _judge_numbers(found, data, _Past.of(read_run(folder)), label_column, group)
    run = None if isinstance(folder, Trained) else _Past.of(read_run(folder))
    schema = found.schema if run is None else run.schema
    records, labels, names, columns, persons, told, whole = _judged(data, run, schema, label_column, found.side, group)
    if not len(labels):
        raise ValueError("the data have 0 records; accuracy needs at least 1")
    if not names:
        names = tuple(map(str, range(int(labels.max()) + 1)))
    places = np.array([found.class_names.index(name) if name in found.class_names else -1 for name in names])
    true = places[labels]
    if (true < 0).any():
        unknown = names[int(labels[true < 0][0])]
        raise ValueError(
            f"the data have records of the class {unknown!r}, but the model's classes are "
            f"{', '.join(found.class_names[:20])}; name the classes as the model does"
        )
    if columns and found.columns:
        if lacking := next((name for name in found.columns if name not in columns), None):
            raise ValueError(
                f"the data lack the column {lacking!r}, with numbers; the model takes {', '.join(found.columns)}"
            )
        records = records[:, [columns.index(name) for name in found.columns]]
    records = _of_colours(records, found)
    classes = len(found.class_names)
    likely = np.asarray(found.predict_proba(records), dtype=np.float64)
    scores = Scores(found.class_names, true, likely, persons, sign, threshold)
    counts = np.bincount(true * classes + scores.predicted, minlength=classes**2).reshape(classes, classes)
    if run is not None:
        told += run.repeated(data, records)
    return Evaluation(found.class_names, counts, scores, told, whole)


def _of_colours(records: Any, model: Trained) -> Any:
    """Gray pictures for a model of coloured ones, and gray ones that are stored with colours for one of gray ones.

    Raises:
        ValueError: pictures have colours, and the model takes gray ones.
    """
    shape = model.shape if model.features is None else model.pictures
    if len(shape) != 3 or not isinstance(records, np.ndarray) or records.ndim != 4 or records.shape[1] == shape[0]:
        return records
    if records.shape[1] == 1:
        return np.repeat(records, shape[0], 1)
    if shape[0] == 1 and (coloured := (records != records[:, :1]).any((1, 2, 3))).any():
        number = f"{int(coloured.sum()):,} of {len(records):,} pictures are"
        raise ValueError(f"{number} in colour, but the model takes gray ones; convert them as the run's were")
    return records[:, :1] if shape[0] == 1 else records


class _Past(NamedTuple):
    """How a finished run read its records, and which they were.

    Attributes:
        experiment: its settings.
        schema: its schema as it was then.
        place: the file or folder of somebody's own records, or their name.
        asked_sites: whether real sites had the records.
        records: their fingerprint (`DataSet.fingerprint`), before a backbone made vectors of them.
        group: the column of persons, by which it divided them; empty for none.
    """

    experiment: Experiment
    schema: TableSchema | None
    place: str
    asked_sites: bool
    records: str | None
    group: str

    @classmethod
    def of(cls, record: RunRecord) -> "_Past":
        """That of a run."""
        experiment = Experiment(**record.config["experiment"])
        place = record.config.get("data_path") or experiment.data
        asked_sites = RunFolder(record.folder).asked_sites
        records = record.summary.get("records")
        return cls(experiment, record.table_schema, place, asked_sites, records, record.persons)

    @property
    def reading(self) -> Reading:
        """How its data set was read."""
        return self.experiment.reading_by(self.schema)

    def is_of(self, data: Any) -> bool:
        """Whether the data are a name or a place of the run's own, of which all but the held-out ones are no test."""
        if not isinstance(data, str | Path):
            return False
        name = place_of(data)
        found = own_place(name)
        return name == self.experiment.data if found is None else found == own_place(self.place)

    def data(self) -> Raw | None:
        """The run's records as their place here has them; None if it has others today, or none."""
        if self.asked_sites or not (self.place == "digits" or local_copy(self.place) or is_own(self.place)):
            return None
        with suppress(ValueError, OSError):
            found = load_raw(self.place, self.reading)
            return found if found.fingerprint == self.records else None
        return None

    def repeated(self, data: Any, records: Any) -> tuple[str, ...]:
        """A sentence on those of the ``records`` of other data that the run may have trained on, by their values."""
        if self.is_of(data) or (isinstance(data, DataSet) and data.fingerprint == self.records):
            return ()
        if (own := self.data()) is None:
            return ("how many of these records the run trained on is unknown, as its own are in no place here",)
        trained = own.train[0]
        if isinstance(trained, list) or isinstance(records, list):
            known = {*trained} if isinstance(trained, list) else set()
            number = sum(isinstance(one, str) and one in known for one in records)
        else:
            number = int(twins(torch.from_numpy(np.ascontiguousarray(records)), trained).sum())
        if not number:
            return ()
        part = ", of which --limit took a part" if self.experiment.limit else ""
        return (
            f"{number:,} of {len(records):,} records have the values of a train record of the run's data{part}: the "
            "measures count them too, and say less of new records",
        )


class _Labelled(NamedTuple):
    """Records to judge a model by.

    Attributes:
        records: images, vectors or texts.
        labels: their classes, ``(n,)``.
        class_names: names of the classes; none if labels are numbers.
        columns: names of the columns of vectors.
        persons: the person of each record; None where nobody is known.
        told: sentences on what was read.
        whole: whether they are all of the data, in their order.
    """

    records: Any
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    columns: tuple[str, ...]
    persons: NDArray[Any] | None
    told: tuple[str, ...]
    whole: bool


def _judged(
    data: Any, run: _Past | None, schema: TableSchema | None, label: str | None, size: int | None, group: str | None
) -> _Labelled:
    """Records to judge a model of classes by; ``size`` is that of its images."""
    trained = _check_columns(data, run, schema, label)
    changed: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    if isinstance(data, str | Path) and (trained or str(data) in KNOWN):
        if run is not None and trained:
            found = load_raw(place_of(data), run.reading)
            changed = _changed(data, found.fingerprint, run)
        else:
            place = place_of(data)
            found, resized = _of_size(lambda of: load_raw(place, Reading(label=label, size=of)), size, run)
        data = data if changed else found
    if isinstance(data, DataSet):
        data = load_raw(data)
    if isinstance(data, Raw):
        records, labels = data.test
        images = records if isinstance(records, list) else records.numpy()
        persons, told = _persons(data.test_columns, run, schema, group, data.group)
        told = (_part(len(labels), len(data.train[1]), data.held_out), *resized, *data.remarks, *told)
        return _Labelled(images, labels.numpy(), data.class_names, data.features, persons, told, False)
    label = label or (None if run is None or schema is not None else run.experiment.label_column)
    size = size if isinstance(data, str | Path) else None

    def read(of: int | None) -> tuple[Split, bool]:
        return own.records_of(data, Reading(label=label, size=of, schema=schema))

    (split, whole), resized = _of_size(read, size, run)
    persons, told = _persons(split.columns, run, schema, group)
    images = split.images.tolist() if split.texts else split.images
    told = (*changed, *resized, *split.remarks, *told)
    return _Labelled(images, split.labels, split.class_names, split.features, persons, told, whole)


def _of_size(read: Callable[[int | None], R], size: int | None, run: _Past | None) -> tuple[R, tuple[str, ...]]:
    """What ``read(size)`` gives; and a sentence, if its pictures had another size, which the run did not ask for."""
    if size is None or (run is not None and run.experiment.size is not None):
        return read(size), ()
    try:
        found = read(None)
    except ValueError as error:  # pictures of several sizes or forms, or what ``size`` does not mend
        told = (f"pictures were read as --size {size} reads them, since {str(error).partition(';')[0]}",)
        return read(size), told
    if _side(found) in (None, (size, size)):
        return found, ()
    return read(size), (f"pictures were cropped and resized to {size} x {size}, the size of the run's",)


def _side(found: Any) -> tuple[int, ...] | None:
    """Height and width of the pictures that were read; None of other records."""
    shape = found.shape if isinstance(found, Raw) else np.shape(found[0].images)[1:]
    return tuple(shape[1:]) if len(shape) == 3 else None


def _part(judged: int, others: int, held_out: bool) -> str:
    return (
        f"judged are the {judged:,} records {'that were held out' if held_out else 'of the test split'}, of "
        f"{judged + others:,}"
    )


def _changed(data: str | Path, fingerprint: str, run: _Past | None) -> tuple[str, ...]:
    """A sentence, if the place of the run's records has others now, of which nothing was held out."""
    if run is None or run.records in (None, fingerprint):
        return ()
    return (
        f"{str(data)!r} has other records now than the run was made of: it is read as new data, whatever the run has "
        "trained on among them",
    )


def _check_columns(data: Any, run: _Past | None, schema: TableSchema | None, label: str | None) -> bool:
    """Whether the data are the run's own; raises if they were read otherwise than the run reads.

    Raises:
        ValueError: ``label`` is another column than the run's, or a data set was read without the run's schema.
    """
    trained = run is not None and run.is_of(data)
    expected = None if run is None else run.experiment.label_column
    expected = expected if schema is None else schema.target
    if label not in (None, expected) and (trained or schema is not None):
        where = "a column with a usual name" if expected is None else repr(expected)
        raise ValueError(f"label_column is {label!r}, but the run read its classes from {where}; leave it out")
    if isinstance(data, DataSet) and schema is not None:
        raise ValueError("the data set was read without the run's schema; give the table, or its place")
    return trained


def _persons(
    columns: Mapping[str, NDArray[Any]],
    run: _Past | None,
    schema: TableSchema | None,
    stated: str | None,
    usual: str = "",
) -> tuple[NDArray[Any] | None, tuple[str, ...]]:
    """The person of each record, by the column that is ``stated``, or the run's; and a sentence if that is absent."""
    of_run = schema.group if schema is not None else None if run is None else run.experiment.group or run.group
    group = stated or of_run or usual
    if group in ("", "none") or group in columns:
        return columns.get(group), ()
    if stated is not None:
        near = suggestion(stated, columns) or ("; name it as the schema's group" if schema is not None else "")
        raise ValueError(f"the data have no column {stated!r}{near or '; name the one with the person of each record'}")
    return None, (f"the data have no column {group!r}, so that intervals are of records, not of persons",)


def _judge_numbers(model: Trained, data: Any, run: _Past, label: str | None, group: str | None) -> NumberEvaluation:
    """The errors of a model on records that the run's schema reads."""
    assert model.target is not None
    changed, whole = tuple[str, ...](), False
    loaded = load(place_of(data), run.reading) if _check_columns(data, run, run.schema, label) else None
    if loaded is not None and (changed := _changed(data, loaded.fingerprint, run)):
        loaded = None
    if loaded is not None:
        images, targets, columns = loaded.test.images.numpy(), loaded.test.targets, loaded.test_columns
        true = None if targets is None else targets.numpy()
        told = (_part(len(loaded.test), len(loaded.train), loaded.held_out), *loaded.remarks)
    else:
        split, whole = own.records_of(data, Reading(schema=run.schema, group=group))
        images, true, columns = split.images, split.targets, split.columns
        told = (*changed, *split.remarks, *run.repeated(data, images))
    if true is None or not len(true):
        raise ValueError(f"the data have no numbers {model.class_names[0]!r}; give a table that the run's schema reads")
    persons, more = _persons(columns, run, run.schema, group)
    said = np.asarray(model.predict(images), dtype=np.float64)
    numbers = Numbers(in_unit(true, model.target), said, persons)
    return NumberEvaluation(model.class_names[0], numbers, (*told, *more), whole)

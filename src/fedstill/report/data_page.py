"""``fedstill data show``: plots of partitions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fedstill.base import files
from fedstill.data import sources
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import Task, share_out
from fedstill.report import figures, html
from fedstill.report.markup import joined, part
from fedstill.report.record import RunRecord
from fedstill.schema import clean

_SHADES = " ░▒▓█"
_MOST_CLIENTS = 40
_MOST_CLASSES = 20
_MOST_FEATURES = 20


def show(experiment: Experiment, out: Path | None) -> Iterator[Table | Text]:
    """Plot the records of each class at each client, with ``out`` as a page too.

    Raises:
        ValueError: the data cannot be read or partitioned in this way; one sentence.
    """
    task, data = share_out(experiment, None), sources.load(experiment.data, experiment.reading)
    counts = task.counts()
    yield Text(f"{experiment.data}, {experiment.partition}: {len(task.parts)} clients, {counts.sum()} records")
    yield Text(_about(task, _values(data)))
    if data.features:
        yield Text(f"vectors of the columns: {_features(data)}")
    yield from map(Text, (*data.origin, *_grouped(data), *data.remarks))
    yield _heat(counts, task.class_names, task.values)
    if out is not None:
        write_counts(out, f"{experiment.data}, {experiment.partition}", counts, task.class_names)
        yield Text(f"page: {out}")


def _grouped(data: sources.DataSet) -> list[str]:
    """A sentence on the records that splits keep together."""
    if not data.group:
        return []
    sizes = np.unique(data.columns[data.group], return_counts=True)[1]
    return [f"splits keep all records of a {data.group!r} on one side (--group): {len(sizes)} of up to {sizes.max()}"]


def _values(data: sources.DataSet) -> dict[str, int]:
    """The columns for ``by:COLUMN``, each with its number of different values."""
    return {name: len(np.unique(values)) for name, values in data.columns.items()}


def _features(data: sources.DataSet) -> str:
    """The first and the last columns of a table's vectors."""
    names = [clean(name, 40) for name in data.features]
    half = _MOST_FEATURES // 2
    return ", ".join(names if len(names) <= _MOST_FEATURES else [*names[:half], "...", *names[-half:]])


def _about(task: Task, own: Mapping[str, int]) -> str:
    shape = task.train.shape
    kind = f"vectors of {shape[0]} numbers" if task.train.are_vectors else f"images, {' x '.join(map(str, shape))}"
    text = f"{kind}; {len(task.class_names)} classes; {len(task.test)} test records; columns for by:COLUMN: "
    return text + (", ".join(f"{clean(name, 40)} ({count} values)" for name, count in own.items()) or "none")


def numbers(experiment: Experiment, out: Path | None) -> dict[str, Any]:
    """The facts of `show`.

    ``counts`` is a row of each client with the number of its records of each class, ``values`` is the column of the
    partition by:COLUMN with its values at each client, ``shape`` is ``(c, h, w)`` of images or ``(d,)`` of vectors,
    ``features`` are the columns of a table's vectors, and ``columns`` are those for ``by:COLUMN``, each with its number
    of values. ``group`` is the column whose values stay on one side of a split, ``copied_test_records`` the number of
    test records that equal a train record; ``origin`` tells what each split took, ``remarks`` what looks wrong.
    """
    task, data = share_out(experiment, None), sources.load(experiment.data, experiment.reading)
    counts = task.counts()
    if out is not None:
        write_counts(out, f"{experiment.data}, {experiment.partition}", counts, task.class_names)
    return {
        "data": experiment.data,
        "partition": experiment.partition,
        "clients": len(task.parts),
        "records": int(counts.sum()),
        "test_records": len(task.test),
        "shape": task.train.shape,
        "features": data.features,
        "columns": _values(data),
        "class_names": task.class_names,
        "group": data.group,
        "copied_test_records": data.copies,
        "origin": data.origin,
        "remarks": data.remarks,
        "counts": counts.tolist(),
        "values": dict(task.values),
    }


def write_counts(out: Path, title: str, counts: np.ndarray, class_names: tuple[str, ...]) -> None:
    """Write the page of each client's number of records of each class, ``(clients, classes)``."""
    record = RunRecord(out, "", {"experiment": {}, "method": {}}, {}, class_names=class_names, counts=counts)
    heat, dots = figures.records_per_client(record), figures.bubbles(record)
    assert heat is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = html.figure(heat, "partition", figures.BLANK) + html.figure(dots, "bubbles", figures.AREA)
    body = html.section("Records per client and class", drawn)
    files.write_bytes(out, html.framed(title, joined(part("opening", title), body)).encode())


def _heat(counts: np.ndarray, class_names: tuple[str, ...], values: Mapping[str, list[list[str]]]) -> Table:
    """Clients by classes, darker for more records; sums include the classes that are not shown."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("client", justify="right", no_wrap=True)
    for name in values:
        table.add_column(Text(clean(name, 20)), overflow="fold", min_width=20)
    table.add_column("records", justify="right", no_wrap=True)
    shown = min(counts.shape[1], _MOST_CLASSES)
    for label in range(shown):
        table.add_column(Text(clean(class_names[label])[:6]), justify="center")
    if shown < counts.shape[1]:
        table.add_column(f"and {counts.shape[1] - shown} more")
    top = max(counts.max(), 1)
    for client, row in enumerate(counts[:_MOST_CLIENTS]):
        shades = [_SHADES[int(np.ceil(n / top * (len(_SHADES) - 1)))] * 2 for n in row[:shown]]
        held = (Text(clean(", ".join(of_column[client]), 40)) for of_column in values.values())
        table.add_row(str(client), *held, str(row.sum()), *shades)
    if len(counts) > _MOST_CLIENTS:
        table.add_row("...", *([""] * len(values)), f"{len(counts) - _MOST_CLIENTS} more")
    return table

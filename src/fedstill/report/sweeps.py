"""Sweeps: runs of the same methods with several values of one setting, or of two."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.report import settings
from fedstill.report.record import RunRecord
from fedstill.report.tasks import Row, Task, words_of

_JUDGES = ("validation", "local_test")
"""Settings of a task that decide on which records its models are evaluated."""
FEWEST_LABELS = 3
"""Number of labels of one method, each with its own value of a setting, that make a sweep."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """The rows of a sweep; all other settings of a method are the same at all values.

    Attributes:
        keys: the one or two settings that vary.
        values: the values of each, as text, in order.
        series: the row of each method at each value; a value may be missing.
        levels: other methods on the same task, which do not have the setting.
        task: the tasks of the rows, in words.
    """

    keys: tuple[str, ...]
    values: tuple[list[str], ...]
    series: dict[str, dict[tuple[str, ...], Row]]
    levels: dict[str, Row]
    task: str

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows that vary."""
        return [run for line in self.series.values() for row in line.values() for run in row.runs]

    @property
    def axis(self) -> tuple[str, list[float]] | None:
        """Name and numbers of the axis of a sweep over one number; None if the values are no numbers."""
        if len(self.keys) != 1 or (found := settings.numbers(self.values[0])) is None:
            return None
        prefix, numbers = found
        return (f"{self.keys[0]}: {prefix}" if prefix else self.keys[0]), numbers

    @property
    def heading(self) -> str:
        """The settings, in words."""
        return " and ".join(self.keys)


def find(tasks: Sequence[Task]) -> list[Sweep]:
    """The sweeps over one or two settings among the finished runs, those with most rows first.

    Accuracies on different records are in different sweeps, as those on the validation records and on the test set.
    """
    series: dict[tuple[str, ...], list[Row]] = {}
    for task in tasks:
        for row in task.ranked:
            judge = (settings.words(row.settings.get(key)) for key in _JUDGES)
            series.setdefault((_line(task, row), *judge), []).append(row)
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, list[Row]]] = {}
    for (name, *_), rows in series.items():
        for part in _connected(rows):
            keys = settings.differing([row.settings for row in part])
            if len(part) > 1 and len(keys) in (1, 2):
                shared = tuple(settings.words(part[0].settings.get(key)) for key in settings.TASK if key not in keys)
                lines = found.setdefault((tuple(keys), shared), {})
                lines[name if name not in lines else f"{name} ({len(lines) + 1})"] = part
    sweeps = [_sweep(key[0], lines, tasks) for key, lines in found.items()]
    return sorted(sweeps, key=lambda sweep: -sum(map(len, sweep.series.values())))


def names(found: Sequence[Sweep], tasks: Sequence[Task]) -> list[str]:
    """The names of a page's lines: those of sweeps first, whose pictures so get the most different colours."""
    first = [name for sweep in found for name in (*sweep.series, *sweep.levels)]
    return list(dict.fromkeys([*first, *(row.name for task in tasks for row in task.rows)]))


def _line(task: Task, row: Row) -> str:
    """The name of the line that a row is a point of: its label, or its method where labels stand for values."""
    method = settings.method_name(row.runs[0])
    labels = [other.label for other in task.ranked if settings.method_name(other.runs[0]) == method]
    return method if len(set(labels)) == len(labels) >= FEWEST_LABELS else row.label


def _connected(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in parts that one can walk through by changing one setting at a time."""
    parts: list[list[Row]] = []
    for row in rows:
        near = [part for part in parts if any(len(settings.differing([row.settings, r.settings])) == 1 for r in part)]
        parts = [part for part in parts if part not in near] + [[row, *(r for part in near for r in part)]]
    return parts


def _sweep(keys: tuple[str, ...], lines: dict[str, list[Row]], tasks: Sequence[Task]) -> Sweep:
    rows = [row for line in lines.values() for row in line]
    values = tuple(_ordered([settings.words(row.settings.get(key)) for row in rows]) for key in keys)
    series = {
        name: {tuple(settings.words(row.settings.get(key)) for key in keys): row for row in line}
        for name, line in lines.items()
    }
    inside = [task for task in tasks if any(row in task.rows for row in rows)]
    others = [row for row in inside[0].ranked if row not in rows] if len(inside) == 1 else []
    words = inside[0].words if len(inside) == 1 else words_of(run for task in inside for run in task.runs)
    return Sweep(keys, values, series, {row.name: row for row in others}, words)


def _ordered(values: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(values))
    found = settings.numbers(distinct)
    return [value for _, value in sorted(zip(found[1], distinct, strict=True))] if found else distinct

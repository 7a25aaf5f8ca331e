"""Results of tasks whose target is a number: errors with their intervals, for tables, pages and cards."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.report.groups import Group, Row
from fedstill.report.record import RunRecord, measure_words

HEADINGS = ("RMSE", "R2")
"""Columns of a table of results in place of the accuracy."""
NAMES = {"rmse": "RMSE", "mae": "MAE", "r2": "R2"}
"""The measures by their keys in ``numbers.json``, in the order in which they are shown."""
MEANING = "RMSE: root mean squared error, in the target's unit; R2: share of the variance that is explained."


def is_numeric(task: Group) -> bool:
    """Whether the target of the task is a number."""
    return any(run.summary.get("errors") for run in task.runs)


def cells(row: Row) -> tuple[str, ...]:
    """The errors of a row under `HEADINGS`: mean ± sample standard deviation over seeds, or a dash."""
    return tuple(measure_words([run.error(key) for run in row.runs]) for key in ("rmse", "r2"))


def of_run(run: RunRecord) -> tuple[str, ...]:
    """The same of one run."""
    return tuple(measure_words([run.error(key)]) for key in ("rmse", "r2"))


def bounded(measure: Sequence[float | None]) -> str:
    """A measure with its 95 % interval, as ``4.684 (4.306 to 5.094)``."""
    value, low, high = measure
    if value is None:
        return "–"
    return f"{value:.4g}" + ("" if low is None or high is None else f" ({low:.4g} to {high:.4g})")


def measures(errors: Mapping[str, Any]) -> dict[str, str]:
    """An entry of ``numbers.json``: each measure by its name, with its interval."""
    return {name: bounded(errors[key]) for key, name in NAMES.items()}


def finding(task: Group, *, named: bool = True) -> str:
    """The row of a task with the smallest error, in a sentence; ``named`` begins it with the task."""
    scored = [row for row in task.rows if row.finished and row.error is not None]
    text = f"On {task.words}, " if named else ""
    if not scored:
        return f"No finished run on {task.words} has an error."
    best = scored[0]
    rmse, share = cells(best)
    of = "" if len(scored) == 1 else f", the smallest of {len(scored)}"
    return f"{text}{best.name} has a root mean squared error of {rmse}{of}, and R2 {share}."


def by_value(task: Group) -> tuple[tuple[str, ...], list[tuple[str, ...]], str] | None:
    """The error on the test records of each value of the partition's column, as of each hospital, with the first seed.

    Returns:
        Headings, a line for each value, and a caption; None without such a column.
    """
    found = {row.name: (row.runs[0].numbers or {}).get("by_value") for row in task.rows if row.finished}
    columns = {name: one["values"] for name, one in found.items() if one}
    if not columns:
        return None
    values = next(iter(columns.values()))
    lines = [
        (value, f"{entry['records']:,}", *(bounded(each[value]["rmse"]) for each in columns.values()))
        for value, entry in values.items()
    ]
    name = task.rows[0].runs[0].summary["partition"].partition(":")[2]
    caption = f"RMSE on the test records of each {name} with 95 % intervals (bootstrap), first seed."
    return (name, "test records", *columns), lines, caption

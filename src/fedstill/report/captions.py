"""Captions: what figures show, and from which data, split, clients, seeds and commit they come."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedstill.report.record import RunRecord
from fedstill.report.settings import task_settings
from fedstill.report.tasks import Task

COURSE = "Other numbers logged after each round; means over seeds."
CLASSES = "Recall (sensitivity), mean over seeds."
SINGLE = "a method with a single value"
_SHORT = 10
"""Number of digits of a commit."""


def of_bytes(plot: Any) -> str:
    """What a figure of accuracy against bytes shows: bars are named where it has some."""
    bars = any(
        np.isfinite(np.array(trace.error_y.array, float)).any() for trace in _traces(plot) if trace.error_y.array
    )
    return "Mean over seeds; bars span one sample standard deviation. " * bars + "Up and to the left is better."


def of_lines(plot: Any, dotted: str) -> str:
    """What a figure of lines shows: its bands, and the lines that are ``dotted``, where it has some."""
    parts = []
    if any(trace.fill == "toself" for trace in _traces(plot)):
        parts.append("Mean over seeds, with a band of one sample standard deviation.")
    if any(trace.line.dash == "dot" for trace in _traces(plot)):
        parts.append(f"Dotted: {dotted}.")
    return " ".join(parts)


def _traces(plot: Any) -> Iterable[Any]:
    return () if plot is None else plot.data


def source(task: Task) -> str:
    """Data, partition, clients, model and seeds of a task, and the version and commits of its runs, as a sentence."""
    return source_of(task.runs, task.words)


def source_of(records: Iterable[RunRecord], words: str) -> str:
    """As `source`, for some runs on a task that ``words`` name."""
    runs = list(records)
    models = _distinct(task_settings(run)["model"] for run in runs)
    seeds = sorted({int(run.summary["seed"]) for run in runs})
    some = ", ".join(map(str, seeds)) if seeds[-1] - seeds[0] != len(seeds) - 1 or len(seeds) < 4 else ""
    parts = [
        f"Data: {words}",
        *([f"model {', '.join(models)}"] if "model " not in words else []),
        f"seed{'s' if len(seeds) > 1 else ''} {some or f'{seeds[0]} to {seeds[-1]}'}",
        *(f"fedstill {version}" for version in _distinct(run.summary.get("version") for run in runs)),
    ]
    starts = [start for run in runs for start in run.environment]
    own, theirs = (_distinct(start.get(key) for start in starts) for key in ("commit", "folder_commit"))
    parts += [f"commit {_short(commit)}" for commit in own]
    parts += [f"working folder at commit {_short(commit)}" for commit in theirs if commit not in own]
    return "; ".join(parts) + "."


def _short(commit: str) -> str:
    digits, plus, changes = commit.partition("+")
    return digits[:_SHORT] + plus + changes


def _distinct(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))

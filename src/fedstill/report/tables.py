"""The tables of results: a row per method and setting, with mean and spread over seeds."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import console as rich_console
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fedstill.report import caveats, groups, guarantees, regression
from fedstill.report.groups import Group, Row, group
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, measure_words, plain


def recall(run: RunRecord) -> NDArray[np.float64] | None:
    """The share of each class's records that were predicted right, ``(C,)``; NaN for a class without records."""
    if run.confusion is None:
        return None
    tested = run.confusion.sum(axis=1)
    right: NDArray[np.float64] = np.diag(run.confusion) / np.where(tested > 0, tested, np.nan)
    return right


def balanced_accuracy(run: RunRecord) -> float | None:
    """The mean recall over the classes that have test records; None without a confusion matrix."""
    rates = recall(run)
    if rates is None or np.isnan(rates).all():
        return None
    return float(np.nanmean(rates))


def recalls(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Recall of each class by the name of the row, mean over seeds; empty if runs have different classes."""
    rates = {row.name: [r for r in map(recall, row.runs) if r is not None] for row in rows}
    rates = {name: some for name, some in rates.items() if some}
    if len({len(rate) for some in rates.values() for rate in some}) != 1:
        return {}
    return {name: np.mean(some, axis=0) for name, some in rates.items()}


def confusion(row: Row) -> NDArray[Any] | None:
    """The confusion matrix summed over the row's runs; None without one, or if runs have different classes."""
    matrices = [run.confusion for run in row.runs if run.confusion is not None]
    if not matrices or len({matrix.shape for matrix in matrices}) > 1:
        return None
    return np.sum(matrices, axis=0)  # type: ignore[no-any-return]


def shares(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """A confusion matrix in percent of each true class; NaN where there are no records."""
    with np.errstate(invalid="ignore"):
        percent = 100 * matrix / matrix.sum(axis=1, keepdims=True)
    return np.where(matrix > 0, percent, np.nan)


RESULTS = ("accuracy, %", "up/client", "down/client", "rounds", "guarantee", "seconds")
BALANCED = "balanced, %"
"""The column of the mean recall of the classes, if it is another number than the accuracy."""
_FAR = 0.01
"""Distance from the accuracy, in [0, 1], from which balanced accuracy is shown."""
OVER_CLIENTS = "over clients"
"""The column of the spread of the clients' own accuracies, in percentage points, if clients evaluate."""
STATE = "state"
"""The column of a table with unfinished runs."""
_LEFT_OUT = ("seconds", "rounds", OVER_CLIENTS)
"""Columns that a narrow terminal lacks, the first of them first."""
_OWN_PLACE = {"round", "accuracy", "log_loss", "spread_over_clients", "bytes_up", "bytes_down", "seconds"}
"""Logged numbers with their own columns or figures."""
_ERRORS = {"rmse", "r2"}
"""Logged numbers that the table of a task with a number as the target has."""
_SHOWN = 3
"""Number of folders that a sentence names."""
_ACCURACIES = {"ensemble", "average", "clients_alone"}
"""Logged numbers that are accuracies in [0, 1], and are shown in percent (`fedstill.methods.parts.model_uploads`)."""


def rows(records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """The rows of the table: task by task, in each the most accurate method first; numbers are means over seeds.

    ``label`` is the name in tables and ``method`` the method's. Every row has the task's settings, and every setting
    that distinguishes rows of one method (None where a method has no such setting). ``accuracy`` is in [0, 1] or None,
    ``accuracy_spread`` its sample standard deviation over seeds (None with one seed), ``rmse``, its spread, ``mae`` and
    ``r2`` the errors if the target of some task is a number, ``balanced_accuracy`` the mean recall of the classes,
    ``data_set`` the first digits of the digest of all records, where a name stands for several, ``spread_over_clients``
    the sample standard deviation of the clients' accuracies (None without). ``guarantee`` has all facts of the weakest
    guarantee of the seeds, and ``epsilon`` and ``delta`` are its own, unrounded or None.
    """
    tasks = group(records)
    columns = list(dict.fromkeys(column for task in tasks for column in task.columns))
    shown = [key for key in groups.TASK if key in ("data", "partition", "clients", "model") or _varies(key, tasks)]
    table, numeric = [], any(map(regression.is_numeric, tasks))
    named = groups.data_sets_are_named(task.runs[0] for task in tasks)
    for task, row in [(one, row) for one in tasks for row in one.rows]:
        task_settings = groups.task_settings(row.runs[0])
        guarantee = row.guarantee if row.finished else None
        finite = guarantee if guarantee is not None and guarantees.is_finite(guarantee) else None
        table.append(
            {
                **{key: task_settings[key] for key in shown},
                **({} if named else {"data_set": groups.data_set(row.runs[0])}),
                "label": row.label,
                "method": groups.method_name(row.runs[0]),
                **{key: row.settings.get(key) for key in columns if key not in shown},
                "state": row.runs[0].state if len(row.runs) == 1 or row.finished else "unfinished",
                "accuracy": row.accuracy,
                "accuracy_spread": row.spread,
                **(_errors(row) if numeric else {}),
                **(_measured(task, row) if any(one.measure for one in tasks) else {}),
                "balanced_accuracy": row.mean(balanced_accuracy),
                "seeds": len(row.runs),
                "bytes_up_per_client": row.mean_of("bytes_up_per_client"),
                "bytes_down_per_client": row.mean_of("bytes_down_per_client"),
                "rounds": row.mean_of("rounds"),
                "guarantee": guarantees.as_json(guarantee),
                "epsilon": finite and finite.epsilon,
                "delta": finite and finite.delta,
                "seconds": row.mean_of("seconds"),
                "spread_over_clients": row.mean(_spread_over_clients),
            }
        )
    return table


def _errors(row: Row) -> dict[str, float | None]:
    """Means of the errors over seeds, and the sample standard deviation of the first; None without any."""
    spread = None if row.error is None else row.deviation(lambda run: run.error("rmse"))
    mae, r2 = (row.mean(partial(RunRecord.error, name=name)) for name in ("mae", "r2"))
    return {"rmse": row.error, "rmse_spread": spread, "mae": mae, "r2": r2}


def _measured(task: Group, row: Row) -> dict[str, Any]:
    return {"measure": task.measure, "measured": None if task.measure is None else row.measured(task.measure)}


def _varies(key: str, tasks: Sequence[Group]) -> bool:
    return len({str(groups.task_settings(task.runs[0])[key]) for task in tasks}) > 1


def headings(task: Group) -> tuple[str, ...]:
    """The headings of `cells`."""
    state = [STATE] if not all(row.finished for row in task.rows) else []
    apart = [OVER_CLIENTS] if any(row.mean(_spread_over_clients) is not None for row in task.rows) else []
    results = [*_scores(task), *([BALANCED] if _unbalanced(task) else []), *RESULTS[1:]]
    return ("method", *task.columns, *state, *results, *apart)


def _scores(task: Group) -> tuple[str, ...]:
    """The headings of the main measures, that which was asked for first."""
    usual = regression.HEADINGS if regression.is_numeric(task) else RESULTS[:1]
    return usual if _shown_anyway(task.measure) else (str(task.measure), *usual)


def _shown_anyway(measure: str | None) -> bool:
    return measure in (None, "accuracy", "rmse", "r2")


def _unbalanced(task: Group) -> bool:
    """Whether a row's balanced accuracy is far from its accuracy, and not the measure that stands first."""
    if task.measure == "balanced-accuracy":
        return False
    pairs = ((row.mean(balanced_accuracy), row.accuracy) for row in task.rows if row.finished)
    return any(mean is not None and own is not None and abs(mean - own) >= _FAR for mean, own in pairs)


def text_columns(task: Group) -> tuple[int, ...]:
    """The numbers of the columns of `cells` that hold words."""
    top = headings(task)
    found = {"method", STATE, "guarantee"}
    values = {key: [v for row in task.rows if (v := row.settings.get(key)) is not None] for key in task.columns}
    found |= {key for key in task.columns if groups.numeric(values[key]) is None}
    return tuple(i for i, heading in enumerate(top) if heading in found)


def cells(task: Group) -> list[tuple[str, ...]]:
    """The table of a task as text."""
    top = headings(task)
    table = []
    for row in task.rows:
        seconds, first = row.mean_of("seconds"), task.measure or ""
        all_cells = {
            first: measure_words([run.measured(first) for run in row.runs]),
            "method": row.label,
            STATE: row.runs[0].state,
            "accuracy, %": accuracy_words(row.accuracy, row.spread),
            **dict(zip(regression.HEADINGS, regression.cells(row), strict=True)),
            BALANCED: accuracy_words(row.mean(balanced_accuracy), None),
            "up/client": human_bytes(row.mean_of("bytes_up_per_client")),
            "down/client": human_bytes(row.mean_of("bytes_down_per_client")),
            "rounds": f"{row.mean_of('rounds'):.4g}",
            "guarantee": guarantees.words(row.guarantee) if row.finished else "–",
            "seconds": f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}",
            OVER_CLIENTS: _points(row.mean(_spread_over_clients)),
        }
        own = {key: _setting(row, key) for key in task.columns}
        table.append(tuple(own[heading] if heading in own else all_cells[heading] for heading in top))
    return table


def _setting(row: Row, key: str) -> str:
    return groups.value_words(row.settings.get(key))


def each_seed(task: Group) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and a line for each run: the settings of its row, its seed, its results and its folder."""
    numeric = regression.is_numeric(task)
    top = ("method", *task.columns, "seed", *_scores(task), "up/client", "down/client", "seconds", "folder")
    lines = [
        (
            row.label,
            *(_setting(row, key) for key in task.columns),
            str(run.summary["seed"]),
            *(() if _shown_anyway(task.measure) else (measure_words([run.measured(str(task.measure))]),)),
            *(regression.of_run(run) if numeric else (accuracy_words(run.summary["accuracy"], None),)),
            human_bytes(run.summary["bytes_up_per_client"]),
            human_bytes(run.summary["bytes_down_per_client"]),
            f"{run.summary['seconds']:.1f}",
            str(run.folder),
        )
        for row in task.rows
        for run in row.runs
    ]
    return top, lines


def logged(task: Group) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Other numbers logged after the last round: headings, and a row for each method; means over seeds."""
    last: dict[str, dict[str, list[float]]] = {}
    for row in task.rows:
        values = last.setdefault(row.name, {})
        for name, value in (pair for run in row.runs if run.metrics for pair in others(run.metrics[-1]).items()):
            if name in _ERRORS and regression.is_numeric(task):
                continue
            values.setdefault(name, []).append(value)
    names = list(dict.fromkeys(name for values in last.values() for name in values))

    def cell(name: str, values: list[float] | None) -> str:
        if values is None:
            return "–"
        return accuracy_words(float(np.mean(values)), None) if name in _ACCURACIES else f"{np.mean(values):.4g}"

    lines = [(row, *(cell(name, values.get(name)) for name in names)) for row, values in last.items() if values]
    return ("method", *(f"{name}, %" if name in _ACCURACIES else name for name in names)), lines


def others(metric: Mapping[str, Any]) -> dict[str, float]:
    """The method's own finite numbers in a line of ``metrics.jsonl``."""
    return {
        name: float(value)
        for name, value in metric.items()
        if name not in _OWN_PLACE and isinstance(value, int | float) and math.isfinite(value)
    }


def blocks(task: Group) -> list[tuple[str, Group]]:
    """The task in two parts with a heading each, if some rows have a guarantee with an epsilon and some none.

    Accuracies of both are no comparison of methods: noise costs some.
    """
    private = [row for row in task.rows if row.finished and guarantees.is_finite(row.guarantee)]
    others = [row for row in task.rows if row not in private]
    if not private or not others:
        return [("", task)]
    return [("without privacy", replace(task, rows=others)), ("with differential privacy", replace(task, rows=private))]


def remarks(task: Group) -> list[str]:
    """Sentences on what the accuracies of a task hide (`fedstill.report.caveats`), and on runs that are in no row."""
    return [*caveats.of_rows([(row.name, row.runs) for row in task.rows if row.finished]), *_left_out(task)]


def _left_out(task: Group) -> Iterator[str]:
    if some := task.left_out:
        which = ", ".join(str(run.folder) for run in some[:_SHOWN]) + (" and others" if len(some) > _SHOWN else "")
        runs = "1 run is" if len(some) == 1 else f"{len(some)} runs are"
        yield f"{runs} not in the table, as another of the same label, settings and seed is: {which}."


def row_remarks(row: Row) -> list[str]:
    """Those of one row alone."""
    return caveats.of_rows([(row.name, row.runs)] * row.finished)


def caption(task: Group) -> str:
    """The caption of a task's table, without its `remarks`."""
    seeds = sorted({len(row.runs) for row in task.rows})
    evaluated = " or ".join(dict.fromkeys(run.summary["judged_on"] for run in task.runs))
    more = " Over clients: the sample standard deviation of their own accuracies, in points."
    more = more if OVER_CLIENTS in headings(task) else ""
    if task.measure is not None and len(task.rows) > 1:
        more = f" Ranked by {task.measure}.{more}"
    more = " Balanced: mean recall of the classes." * (BALANCED in headings(task)) + more
    if STATE in headings(task):
        more += " Unfinished runs: the last accuracy and the bytes logged so far."
    measure = "Accuracy"
    if regression.is_numeric(task):
        measure, more = "Errors", f" {regression.MEANING}{more}"
    if seeds == [1]:
        return f"{measure} on {evaluated}; one seed, so the spread over seeds is unknown.{more}"
    over = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"{measure} on {evaluated}: mean ± sample standard deviation over {over} seeds.{more}"


def terminal(records: Sequence[RunRecord]) -> rich_console.Group:
    """The tables for the terminal, one per task; a narrow one lacks columns rather than parts of numbers."""
    tasks = group(records)
    shown: list[RenderableType] = []
    for task in tasks:
        parts = blocks(task)
        for i, (heading, part) in enumerate(parts):
            words = ", ".join(filter(None, (task.words if len(tasks) > 1 else "", heading)))
            shown.append(_Fitting(part, plain(words) if words else None, last=i == len(parts) - 1))
        shown += [plain(sentence) for sentence in remarks(task)]
    return rich_console.Group(*shown)


@dataclass(frozen=True)
class _Fitting:
    """A task's table with as many columns as the console is wide."""

    task: Group
    title: Text | None
    last: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        top, lines = headings(self.task), cells(self.task)
        shown = dict(enumerate(top))
        widths = {i: max(len(line[i]) for line in (top, *lines)) for i in shown}
        folded = {i: min(10, widths[i]) for i in text_columns(self.task)}
        for heading in _LEFT_OUT:
            if sum((widths | folded)[i] + 2 for i in shown) > options.max_width and heading in top:
                del shown[top.index(heading)]
        style: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
        words = plain(caption(self.task)) if self.last else None
        table = Table(title=self.title, title_justify="left", caption=words, caption_justify="left", **style)
        for i, heading in shown.items():
            if i in folded:
                table.add_column(plain(heading), overflow="fold", min_width=folded[i])
            else:
                table.add_column(plain(heading), justify="right", no_wrap=heading not in self.task.columns)
        for line in lines:
            table.add_row(*(plain(line[i]) for i in shown))  # rich would parse [brackets] in a label otherwise
        yield table


def _spread_over_clients(run: RunRecord) -> float | None:
    spread = run.summary.get("spread_over_clients")
    return None if spread is None else float(spread)


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"

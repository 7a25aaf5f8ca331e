"""The results of a sweep: a table with the best settings of each method, its files, and what the report says of it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill.base import files
from fedstill.experiment import config
from fedstill.experiment.sweep import Outcome, Try, words
from fedstill.report import export
from fedstill.report.page import write_report
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, read_run

HEADINGS = ("method", "tries", "best settings", "validation", "test", "up/client")


def budget(outcome: Outcome) -> str:
    """The tuning of each method and the state of the test set, in sentences."""
    sweep = outcome.sweep
    searched = [entry for entry in sweep.entries if entry.space]
    share, seeds = f"{100 * sweep.experiment.validation:g} %", len(sweep.plan.seeds)
    kind = "a grid" if sweep.plan.search == "grid" else "optuna"
    over = f"{seeds} seeds each" if seeds > 1 else "one seed each"
    whose = "each client's training records" if sweep.experiment.local_test else "the training records"
    measure = sweep.experiment.chosen_measure
    text = f"Settings chosen by {measure} on validation records ({share} of {whose}), from {kind}, {over}: "
    if not searched:
        text += "no method has settings to try. "
    elif sweep.has_equal_budgets():
        text += f"{searched[0].tries} tries for each method. "
    else:
        text += f"unequal budgets, {', '.join(f'{e.tries} tries for {e.label}' for e in searched)}. "
    plain = [entry.label for entry in sweep.entries if not entry.space]
    text += f"Without a search: {', '.join(plain)}. " if plain and searched else ""
    if former := outcome.former:
        text += (
            f"More was tried: {', '.join(f'{count} runs of {label}' for label, count in former.items())} in the folder "
            "are of what the file had before it was edited. "
        )
    if private := [entry.label for entry in searched if _has_guarantee(outcome.best(entry.label))]:
        text += f"The epsilon of {', '.join(private)} does not count this choice. "
    test = "Each client's test set" if sweep.experiment.local_test else "The test set"
    if outcome.tests:
        return text + f"{test} was opened once, for the best settings of each method."
    return text + f"{test} is closed; --final opens it, for the best settings of each method."


def _has_guarantee(one: Try | None) -> bool:
    return one is not None and read_run(one.folders[0]).guarantee.holds


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """A dictionary per method, the best by validation first; an accuracy is in [0, 1], None if every try failed."""
    table, names, worst = [], _names(outcome), -math.inf
    measure = outcome.sweep.experiment.chosen_measure
    for label, tries in outcome.tries.items():
        best, test = outcome.best(label), outcome.tests.get(label)
        table.append(
            {
                "label": label,
                "method": names[label],
                "tries": len(tries),
                "failed": sum(one.score is None for one in tries),
                "best": None if best is None else best.point,
                "validation": best and best.value,
                "validation_spread": best and best.spread,
                "test": test and test.value,
                "test_spread": test and test.spread,
                "bytes_up_per_client": None if best is None else _bytes_up(test or best),
                "folder": None if best is None else str((test or best).folders[0].parent),
            }
        )

    def rank(row: dict[str, Any]) -> float:
        return worst if row["validation"] is None else config.goodness(measure, row["validation"])

    return sorted(table, key=rank, reverse=True)


def _names(outcome: Outcome) -> dict[str, str]:
    """The method's name of each label."""
    return {entry.label: entry.name for entry in outcome.sweep.entries}


def _bytes_up(one: Try) -> float | None:
    runs = [read_run(folder) for folder in one.folders] if one.values is not None else []
    return sum(float(run["bytes_up_per_client"]) for run in runs) / len(runs) if runs else None


def terminal(outcome: Outcome) -> Table:
    """The table for the terminal."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.caption, table.caption_justify = Text(budget(outcome)), "left"
    measure = outcome.sweep.experiment.chosen_measure
    unit = ", %" if measure == "accuracy" else f" {measure}"
    for heading in HEADINGS:
        name = heading + unit * (heading in ("validation", "test"))
        table.add_column(Text(name), justify="left" if heading in ("method", "best settings") else "right")
    for row in rows(outcome):
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        sent = row["bytes_up_per_client"]
        table.add_row(
            Text(row["label"]),
            f"{row['tries']}{failed}",
            Text("–" if row["best"] is None else words(row["best"])),
            _words(measure, row["validation"], row["validation_spread"]),
            _words(measure, row["test"], row["test_spread"]),
            "–" if sent is None else human_bytes(sent),
        )
    return table


def _words(measure: str, mean: float | None, spread: float | None) -> str:
    if measure == "accuracy" or mean is None:
        return accuracy_words(mean, spread)
    return f"{mean:.4g}" + ("" if spread is None else f" ± {spread:.2g}")


def write(outcome: Outcome, out: Path, command: str) -> Path:
    """Write ``sweep.json``, ``sweep.csv`` (a row a try), the tables and the page to ``out``; returns the page."""
    every = {label: [_line(one) for one in tries] for label, tries in outcome.tries.items()}
    content = {"budget": budget(outcome), "best": rows(outcome), "tries": every}
    files.write_json(out / "sweep.json", content)
    names = _names(outcome)
    lines = [{"label": label, "method": names[label], **line} for label, some in every.items() for line in some]
    files.write_bytes(out / "sweep.csv", export.csv_text(_level(lines)).encode())
    records, page = _records(outcome), out / "report.html"
    export.write_tables(records, out)
    write_report(records, page, command=command, note=budget(outcome))
    return page


def _line(one: Try) -> dict[str, Any]:
    return {
        **one.point,
        "validation": one.value,
        "validation_spread": one.spread,
        "failure": one.failure or None,
        "folder": str(one.folders[0].parent),
    }


def _level(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = list(dict.fromkeys(key for line in lines for key in line))
    return [{key: line.get(key) for key in keys} for line in lines]


def _records(outcome: Outcome) -> list[RunRecord]:
    """The finished runs, those on the test set first."""
    shown = [*outcome.tests.values(), *(one for tries in outcome.tries.values() for one in tries)]
    folders = dict.fromkeys(folder for one in shown if one.values is not None for folder in one.folders)
    return [read_run(folder) for folder in folders]

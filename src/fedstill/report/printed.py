"""The page's figures for a paper, as wide as a column: PDF or SVG, and their captions in LaTeX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstill.base import files
from fedstill.report import drawing, export, figures, groups, sections
from fedstill.report.drawing import Kind, Plot
from fedstill.report.export import latex
from fedstill.report.groups import Group, group
from fedstill.report.record import RunRecord, close_if_private

_POINTS = 72 / 2.54
"""Points of a centimetre."""


@dataclass(frozen=True)
class Printed:
    """A figure: the name of its files, the plot and its caption."""

    name: str
    plot: Plot
    caption: str


def chosen(records: Sequence[RunRecord]) -> Iterator[Printed]:
    """The figures of the report's page, and the partition as bubbles."""
    tasks = group(records)
    found = groups.find(tasks)
    look = figures.styles(groups.names(found, tasks))
    for i, sweep in enumerate(found):
        plot = figures.over_setting(sweep, look)
        about = f"Accuracy by {sweep.heading}. {sections.sweep_caption(sweep, plot)}"
        yield from _one("sweep", i, len(found), plot, about)
    for i, task in enumerate(tasks):
        for name, plot, about in _of(task, look):
            yield from _one(name, i, len(tasks), plot, about)


def _of(task: Group, look: figures.Look) -> Iterator[tuple[str, Plot | None, str]]:
    of = export.source(task)
    sent, rounds = figures.accuracy_against_bytes(task.ranked, look), figures.accuracy_per_round(task.rows, look)
    yield "bytes", next(iter(sent.values()), None), f"Accuracy against bytes. {export.of_bytes(sent)} {of}"
    lines = filter(None, ("Accuracy per round.", export.of_lines(rounds, export.SINGLE), of))
    yield "rounds", rounds, " ".join(lines)
    yield "course", figures.course(task.rows, look), f"{export.COURSE} {of}"
    record = next((run for run in task.runs if run.counts is not None), None)
    if record is not None:
        yield (
            "partition",
            figures.records_per_client(record),
            sections.partition_caption(record, figures.BLANK),
        )
        yield "bubbles", figures.bubbles(record), sections.partition_caption(record, figures.AREA)
    yield "classes", figures.per_class_accuracy(task.ranked, look), f"{export.CLASSES} {of}"
    if task.ranked:
        best = task.ranked[0]
        about = f"Confusion matrix of {best.name}, in percent of the true class. {of}"
        yield "confusion", figures.confusion(best), about


def _one(name: str, number: int, total: int, plot: Plot | None, caption: str) -> Iterator[Printed]:
    if plot is not None:
        yield Printed(f"{name}-{number + 1}" if total > 1 else name, plot, caption)


def write(records: Sequence[RunRecord], out: Path, kinds: Sequence[Kind], width: float) -> list[Path]:
    """Write each figure in each format, and ``figures.tex`` with their captions, to ``out``.

    Args:
        records: the runs.
        out: the folder.
        kinds: the formats.
        width: the width of all figures in cm.

    Returns:
        The files.
    """
    every = list(chosen(records))
    written = []
    for one in every:
        for kind in kinds:
            content = drawing.printed(one.plot, kind, width * _POINTS, one.name, one.caption)
            files.write_bytes(out / f"{one.name}.{kind}", content)
            written.append(out / f"{one.name}.{kind}")
    text = "% \\usepackage{graphicx}\n" + "".join(
        f"\n\\begin{{figure}}\n\\centering\n\\includegraphics[width=\\columnwidth]{{{one.name}}}\n"
        f"\\caption{{{latex(one.caption)}}}\n\\label{{fig:{one.name}}}\n\\end{{figure}}\n"
        for one in every
    )
    files.write_bytes(out / "figures.tex", text.encode())
    written.append(out / "figures.tex")
    close_if_private(records, written)
    return written

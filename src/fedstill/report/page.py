"""The report of runs: one HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from fedstill.base import files
from fedstill.base.errors import front_door
from fedstill.report import export, figures, groups, html, pareto, sections
from fedstill.report.drawing import Plot
from fedstill.report.groups import Group, group
from fedstill.report.markup import joined, part
from fedstill.report.record import RunRecord, Runs, close_if_private, records_of
from fedstill.report.sections import sheet


@front_door
def write_report(
    records: Runs,
    path: str | Path,
    *,
    command: str | None = None,
    note: str = "",
) -> None:
    """Write the report of one or more runs to ``path``, atomically.

    Args:
        records: a run or several, by their records or folders; those of one label and settings are a method's seeds.
        path: the HTML file, which is overwritten.
        command: the command of all runs, such as a comparison; each run's command is shown if None.
        note: a paragraph below the title, as on how settings were chosen.

    Raises:
        InputError: there are no records, or ``path`` is a folder.
    """
    place = files.path_of(path, "path")
    if place.is_dir():
        raise ValueError(f"path is the folder {place}; give a file in it, as {place / 'report.html'}")
    write_page(records_of(records), place, command=command, note=note)


def write_page(
    records: Sequence[RunRecord],
    path: str | Path,
    *,
    command: str | None = None,
    note: str = "",
    fronts: Sequence[pareto.Picture] = (),
) -> None:
    """`write_report` with pictures of accuracy against costs, ``fronts``, as `pareto.pictures` makes them."""
    if not records:
        raise ValueError("a report needs at least one run; give the folder of one")
    files.write_bytes(Path(path), _page(records, command, note, fronts).encode(errors="replace"))
    close_if_private(records, [Path(path)])


def _page(records: Sequence[RunRecord], command: str | None, note: str, fronts: Sequence[pareto.Picture]) -> str:
    tasks = group(records)
    found = groups.find(tasks)
    look = figures.styles(groups.names(found, tasks))
    title = sections.page_title(tasks)
    parts = {f"Accuracy by {sweep.heading}": sections.sweep(sweep, look, i) for i, sweep in enumerate(found)}
    if len(tasks) == 1:
        lead = sections.finding(tasks[0])
        parts = {"Results": sections.results(tasks[0]), **parts, **_details(tasks[0], look, 0)}
    else:
        lead = sections.overview(tasks)
        parts |= {task.words: _one_of_several(task, look, i) for i, task in enumerate(tasks)}
    parts["Pareto fronts"] = pareto.section(fronts)
    parts["Privacy guarantees"] = sections.privacy(tasks)
    parts["Reproduce"] = sections.reproduce(records, tasks, command)
    anchors = {heading: f"part-{i}" for i, heading in enumerate(parts) if parts[heading]}
    body = [part("opening", title, _unbroken(lead), note)]
    body += [part("contents", anchors)] if len(anchors) >= 4 else []
    body += [html.section(heading, parts[heading], name=anchor) for heading, anchor in anchors.items()]
    return html.framed(title, joined(*body, sections.footer(records)))


def _unbroken(text: str) -> str:
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _details(task: Group, look: figures.Look, number: int) -> dict[str, Markup]:
    """The parts of a task after the results, by heading; some may be empty."""

    def figure(plot: Plot | Mapping[figures.Way, Plot] | None, name: str, caption: str) -> Markup:
        return html.figure(plot, f"{name}-{number}", f"{caption} {export.source(task)}".strip())

    sent, rounds = figures.accuracy_against_bytes(task.ranked, look), figures.accuracy_per_round(task.rows, look)
    return {
        "Accuracy against bytes": figure(sent, "bytes", export.of_bytes(sent)),
        "Accuracy per round": figure(rounds, "rounds", export.of_lines(rounds, export.SINGLE)),
        "Other numbers per round": figure(figures.course(task.rows, look), "course", export.COURSE),
        "Records per client and class": sections.partition(task, number),
        "Sample images": sheet(task.rows),
        "Accuracy per class": sections.per_class(task, look, number),
        "Accuracy of each client": sections.clients(task),
        "Accuracy on the records of each value": sections.by_value(task),
        "Errors on the records of each value": sections.errors_by_value(task),
        "Refused replies": sections.refusals(task),
    }


def _one_of_several(task: Group, look: figures.Look, number: int) -> Markup:
    """A task's finding and table, and its details folded."""
    details = _details(task, look, number)
    body = joined(*(html.section(heading, content, 3) for heading, content in details.items()))
    lead = part("paragraph", _unbroken(sections.finding(task, named=False)))
    return lead + sections.results(task) + html.folded("Figures, images and classes", body)

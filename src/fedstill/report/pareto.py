"""Accuracy against what it costs, one point for each row of runs: the Pareto fronts, as a table and as figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from fedstill.report import guarantees, html, scatter, settings
from fedstill.report.record import RunRecord
from fedstill.report.tasks import Row, group, setting_words
from fedstill.report.words import accuracy_words, human_bytes, plain

_APART = ("model", "models")
"""Settings of a task in which the points of a picture may differ."""
HEADINGS = ("method", "accuracy, %", "up/client", "epsilon", "seconds", "on the front of")


@dataclass(frozen=True)
class Point:
    """Runs that differ in their seed only; numbers are means over seeds.

    Attributes:
        name: their label, with the settings and the model that tell it from others of the picture.
        method: the method's name.
        accuracy: in [0, 1].
        spread: sample standard deviation of the accuracy over seeds; None with one seed.
        up: bytes that a client sends.
        epsilon: of the weakest guarantee for records, or infinity without one.
        seconds: duration of a run.
        seeds: number of runs.
        exposed: number of the clients' records that nothing protects, if there is a guarantee and they were counted.
    """

    name: str
    method: str
    accuracy: float
    spread: float | None
    up: float
    epsilon: float
    seconds: float
    seeds: int
    exposed: int | None = None


@dataclass(frozen=True)
class Picture:
    """The points of one task, whatever their model; the most accurate first.

    Attributes:
        words: data, partition and clients, and on which records the models are evaluated.
        points: the points.
    """

    words: str
    points: list[Point]

    def fronts(self) -> dict[str, list[Point]]:
        """For each cost the points that no other dominates, cheapest first; no front of a cost that all share."""
        found = {}
        for name, cost in COSTS.items():
            if len({cost(point) for point in self.points}) > 1:
                found[name] = front(self.points, cost)
        return found


class _Source(NamedTuple):
    """Records: their backbone, or None, and their fingerprint, which is that of vectors where there is a backbone."""

    features: str | None
    fingerprint: str


COSTS: dict[str, Callable[[Point], float]] = {
    "bytes": lambda point: point.up,
    "epsilon": lambda point: point.epsilon,
    "seconds": lambda point: point.seconds,
}
"""What a point costs, by name."""
_AXES = {
    "bytes": "bytes up per client",
    "epsilon": "epsilon per record at the runs' delta",
    "seconds": "seconds of a run",
}


def front(points: Iterable[Point], cost: Callable[[Point], float]) -> list[Point]:
    """The points to which no other is preferable: at most their cost, at least their accuracy, and better in one."""
    every = list(points)

    def dominated(point: Point) -> bool:
        return any(
            cost(other) <= cost(point)
            and other.accuracy >= point.accuracy
            and (cost(other), other.accuracy) != (cost(point), point.accuracy)
            for other in every
        )

    return sorted((p for p in every if not dominated(p)), key=lambda p: (cost(p), p.accuracy))


def pictures(records: Iterable[RunRecord]) -> list[Picture]:
    """A picture of each data set, partition and number of clients with at least two finished rows of runs."""
    rows: dict[tuple[str, ...], dict[_Source, list[Row]]] = {}
    for task in group(record for record in records if record.finished):
        for row in task.ranked:
            shared, source = _key(row.runs[0])
            rows.setdefault(shared, {}).setdefault(source, []).append(row)
    return [_picture(some) for found in rows.values() for some in _together(found) if len(some) > 1]


def _together(found: Mapping[_Source, list[Row]]) -> list[list[Row]]:
    """The rows with those of images and of their features as one, unless some records have changed between runs."""
    names = [source.features for source in found]
    if len(set(names)) == len(names):  # each backbone, and the images, have one fingerprint
        return [[row for some in found.values() for row in some]]
    return list(found.values())


def _key(record: RunRecord) -> tuple[tuple[str, ...], _Source]:
    """What runs in a picture share, and the source of their records."""
    facts = settings.task_settings(record)
    shared = tuple(f"{key}={facts[key]}" for key in settings.TASK if key not in _APART)
    return shared, _Source(facts.get("features"), str(record.config.get("fingerprint")))


def _picture(rows: Sequence[Row]) -> Picture:
    labels = [row.label for row in rows]
    names = [row.label if labels.count(row.label) == 1 else row.name for row in rows]
    models = [str(settings.task_settings(row.runs[0])["model"]) for row in rows]
    names = [name if names.count(name) == 1 else f"{name} [{model}]" for name, model in zip(names, models, strict=True)]
    points = [_point(row, name) for row, name in zip(rows, names, strict=True)]
    points.sort(key=lambda point: (-point.accuracy, point.up, point.name))
    first = rows[0].runs[0]
    facts = settings.task_settings(first)
    more = [f"{facts['limit']:,} records"] if facts["limit"] else []
    return Picture(f"{setting_words(first, more)}, {first.summary['judged_on']}", points)


def _point(row: Row, name: str) -> Point:
    assert row.accuracy is not None
    guarantee = row.guarantee
    holds = guarantees.is_finite(guarantee) and guarantee.unit == "record"
    return Point(
        name=name,
        method=settings.method_name(row.runs[0]),
        accuracy=row.accuracy,
        spread=row.spread,
        up=row.mean_of("bytes_up_per_client"),
        epsilon=float(guarantee.epsilon or 0.0) if holds else math.inf,
        seconds=row.mean_of("seconds"),
        seeds=len(row.runs),
        exposed=guarantee.exposed if holds else None,
    )


def lines(found: Iterable[Picture]) -> list[dict[str, Any]]:
    """The points as JSON, with the costs on whose fronts they are; ``epsilon`` is None without a guarantee."""
    return [
        {
            "task": picture.words,
            "label": point.name,
            "method": point.method,
            "accuracy": point.accuracy,
            "accuracy_spread": point.spread,
            "seeds": point.seeds,
            "bytes_up_per_client": point.up,
            "epsilon": point.epsilon if math.isfinite(point.epsilon) else None,
            "exposed": point.exposed,
            "seconds": point.seconds,
            "front": [cost for cost, best in picture.fronts().items() if point in best],
        }
        for picture in found
        for point in picture.points
    ]


def cells(picture: Picture) -> list[tuple[str, ...]]:
    """The table of a picture as text, below `HEADINGS`."""
    fronts = picture.fronts()
    return [
        (
            point.name,
            accuracy_words(point.accuracy, point.spread),
            human_bytes(point.up),
            _epsilon_words(point),
            f"{point.seconds:.1f}" if point.seconds < 100 else f"{point.seconds:.0f}",
            ", ".join(cost for cost, best in fronts.items() if point in best) or "–",
        )
        for point in picture.points
    ]


def _epsilon_words(point: Point) -> str:
    if not math.isfinite(point.epsilon):
        return "none"
    return guarantees.round_up(point.epsilon) + guarantees.exposed_words(point.exposed)


def terminal(found: Sequence[Picture]) -> Group:
    """The tables for the terminal."""
    return Group(*(_terminal(picture) for picture in found))


def _terminal(picture: Picture) -> Table:
    title = plain(f"Pareto fronts: {picture.words}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(HEADINGS):
        table.add_column(plain(heading), justify="left" if i in (0, len(HEADINGS) - 1) else "right", overflow="fold")
    for line in cells(picture):
        table.add_row(*(plain(cell) for cell in line))
    return table


def figures(picture: Picture) -> dict[str, str]:
    """An SVG for each cost, with the front as a line."""
    drawn = {}
    for cost, best in picture.fronts().items():
        value = COSTS[cost]
        dots = [
            scatter.Dot(point.name, point.method, value(point), 100 * point.accuracy, point in best)
            for point in picture.points
        ]
        drawn[cost] = scatter.svg(dots, _AXES[cost], picture.words, _UNITS[cost])
    return drawn


_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": lambda value: human_bytes(value).replace(".00 ", " ").replace(".0 ", " "),
    "epsilon": lambda value: f"{value:g}",
    "seconds": lambda value: f"{value:g} s",
}


def section(found: Sequence[Picture]) -> str:
    """The part of the page: for each picture its figures and its table."""
    text = ""
    for picture in found:
        text += f"<h3>{escape(picture.words)}</h3>\n"
        for figure in figures(picture).values():
            text += f'<figure class="pareto">\n<div class="scroll" tabindex="0">\n{figure}</div>\n'
            text += f"<figcaption>{escape(_NOTE)}</figcaption>\n</figure>\n"
        text += html.data_table(HEADINGS, cells(picture), (0, len(HEADINGS) - 1))
    return text


_NOTE = "Line and names: the front, points to which no other is preferable. Up and to the left is better."

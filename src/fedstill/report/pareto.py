"""Accuracy against what it costs, one point for each row of runs: the Pareto fronts, as a table and as figures."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from fedstill.report import figures, groups, guarantees, html
from fedstill.report.drawing import Axis, Line, Plot, themed_svg
from fedstill.report.groups import Row, group
from fedstill.report.markup import part
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, plain

_LOGARITHMIC = 90.0
"""Largest accuracy in per cent from which errors have a logarithmic axis."""
_LEVELS = (0, 20, 40, 60, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)


@dataclass(frozen=True)
class Dot:
    """A point.

    Attributes:
        name: its name, shown beside it on the front and when the pointer is over it.
        kind: its name in the legend, which decides colour and marker.
        x: its cost: 0 and infinity are drawn at the edges.
        y: its value on the vertical axis.
        best: whether it is on the front.
        cost: the cost in words.
    """

    name: str
    kind: str
    x: float
    y: float
    best: bool
    cost: str = ""


def scatter(dots: Sequence[Dot], x_words: str, tick_words: Callable[[float], str]) -> Plot:
    """The dots on a logarithmic horizontal axis, the best joined by steps and named.

    Args:
        dots: one or more points.
        x_words: the name of the horizontal axis.
        tick_words: a cost in words.
    """
    place_x, x_axis = _horizontal([dot.x for dot in dots], x_words, tick_words)
    place_y, y_axis = _vertical([dot.y for dot in dots])
    best = sorted((dot for dot in dots if dot.best), key=lambda dot: (dot.x, dot.y))
    lines = [Line("", [place_x(dot.x) for dot in best], [place_y(dot.y) for dot in best], "#888888", steps=True)]
    look = figures.styles(sorted({dot.kind for dot in dots}))  # the same in all pictures of the same methods
    for (kind, (colour, marker)), is_best in itertools.product(look.items(), (False, True)):
        some = [dot for dot in dots if dot.kind == kind and dot.best == is_best]
        xs, ys = [place_x(dot.x) for dot in some], [place_y(dot.y) for dot in some]
        tips = [f"{dot.name}: {dot.y:.2f} %, {dot.cost or tick_words(dot.x)}" for dot in some]
        opacity = 1.0 if is_best else 0.55
        lines.append(Line(kind, xs, ys, colour, marker, "", sizes=7.0, opacity=opacity, tips=tips))
    names = [(place_x(dot.x), place_y(dot.y), dot.name) for dot in best]
    return Plot(x_axis, [y_axis], [line for line in lines if line.x], names=names)


def _horizontal(
    values: Sequence[float], name: str, tick_words: Callable[[float], str]
) -> tuple[Callable[[float], float], Axis]:
    """The place of each value on an axis of powers of ten; 0 is near the left edge, infinity near the right."""
    inner = [math.log10(value) for value in values if 0 < value < math.inf]
    low, high = (min(inner), max(inner)) if inner else (0.0, 1.0)
    margin = max(0.05 * (high - low), 0.1)
    low, high = low - margin, high + margin
    apart = 0.12 * (high - low)
    left = low - apart if 0.0 in values else low
    right = high + apart if math.inf in values else high

    def place(value: float) -> float:
        if value <= 0:
            return left + 0.2 * apart
        return right - 0.2 * apart if value == math.inf else math.log10(value)

    ticks = [(math.log10(mark), tick_words(mark)) for mark in figures.log_ticks(low, high)] if inner else []
    ticks = [(place(0.0), "0")] * (0.0 in values) + ticks + [(place(math.inf), "none")] * (math.inf in values)
    return place, Axis(name, range=(left, right), ticks=ticks)


def _vertical(values: Sequence[float]) -> tuple[Callable[[float], float], Axis]:
    """The place of each accuracy in per cent, and its axis.

    From 90 % on, the error 100 - accuracy has a logarithmic axis: 98 and 99 are then as far apart as 80 and 90.
    """
    low, high = min(values), max(values)
    if high >= _LOGARITHMIC:
        errors = [100 - value for value in values if value < 100]
        least = min(errors, default=1.0) / (4 if high == 100 else 1.25)  # 100 has no logarithm: it is the upper edge
        most = min(max(100 - low, 2 * least) * 1.15, 100.0)

        def place(value: float) -> float:
            return -math.log10(max(100 - value, least))

        levels = _levels(100 - most, 100 - least) + ([100.0] if high == 100 else [])
        ticks = [(place(level), f"{level:g}") for level in levels]
        return place, Axis("accuracy, % (log of the error)", range=(-math.log10(most), place(100.0)), ticks=ticks)
    step = next((s for s in (0.5, 1, 2, 5, 10, 20) if (high - low) / s <= 8), 20)
    bottom = math.floor((low - 0.1 * step) / step) * step
    top = math.ceil((high + 0.1 * step) / step) * step
    levels = [bottom + i * step for i in range(round((top - bottom) / step) + 1)]
    return float, Axis("accuracy, %", range=(bottom, top), ticks=[(level, f"{level:g}") for level in levels])


def _levels(low: float, high: float) -> list[float]:
    """Accuracies for an axis of errors: round errors, or steps of equal size where fewer than three of them fit."""
    found = [level for level in _LEVELS if low <= level <= high]
    for digits in range(5):
        for step in (5, 2, 1):
            if len(found) >= 3:
                return found
            size = step / 10**digits
            found = [round(i * size, digits) for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    return found


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
        conditions: on whom and on what epsilon rests, in words (`guarantees.conditions`).
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
    conditions: str = ""


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
    facts = groups.task_settings(record)
    shared = tuple(f"{key}={facts[key]}" for key in groups.TASK if key not in _APART)
    return shared, _Source(facts.get("features"), str(record.config.get("fingerprint")))


def _picture(rows: Sequence[Row]) -> Picture:
    labels = [row.label for row in rows]
    names = [row.label if labels.count(row.label) == 1 else row.name for row in rows]
    models = [str(groups.task_settings(row.runs[0])["model"]) for row in rows]
    names = [name if names.count(name) == 1 else f"{name} [{model}]" for name, model in zip(names, models, strict=True)]
    points = [_point(row, name) for row, name in zip(rows, names, strict=True)]
    points.sort(key=lambda point: (-point.accuracy, point.up, point.name))
    first = rows[0].runs[0]
    words = groups.words_of(run for row in rows for run in row.runs)
    return Picture(f"{words}, {first.summary['judged_on']}", points)


def _point(row: Row, name: str) -> Point:
    assert row.accuracy is not None
    guarantee = row.guarantee
    holds = guarantees.is_finite(guarantee) and guarantee.unit == "record"
    return Point(
        name=name,
        method=groups.method_name(row.runs[0]),
        accuracy=row.accuracy,
        spread=row.spread,
        up=row.mean_of("bytes_up_per_client"),
        epsilon=float(guarantee.epsilon or 0.0) if holds else math.inf,
        seconds=row.mean_of("seconds"),
        seeds=len(row.runs),
        exposed=guarantee.exposed if holds else None,
        conditions=guarantees.conditions(guarantee) if holds else "",
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
            "conditions": point.conditions.strip(" ,;"),
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
    return guarantees.round_up(point.epsilon) + point.conditions + guarantees.exposed_words(point.exposed)


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


def cost_plots(picture: Picture) -> dict[str, Plot]:
    """A figure for each cost, with the front as a line."""
    drawn = {}
    for cost, best in picture.fronts().items():
        value = COSTS[cost]
        dots = [
            Dot(point.name, point.method, value(point), 100 * point.accuracy, point in best, _cost_words(cost, point))
            for point in picture.points
        ]
        drawn[cost] = scatter(dots, _AXES[cost], _UNITS[cost])
    return drawn


def _cost_words(cost: str, point: Point) -> str:
    if cost == "bytes":
        return f"{human_bytes(point.up)} up"
    return f"epsilon {_epsilon_words(point)}" if cost == "epsilon" else f"{point.seconds:.1f} s"


def cost_figures(picture: Picture, costs: Collection[str] = tuple(COSTS)) -> dict[str, str]:
    """An SVG for each of some costs, as a file for other pages."""
    titles = {cost: f"Accuracy against {_AXES[cost]}: {picture.words}" for cost in COSTS}
    plots = {cost: replace(plot, title=titles[cost]) for cost, plot in cost_plots(picture).items() if cost in costs}
    return {cost: themed_svg(plot, cost, titles[cost]) for cost, plot in plots.items()}


_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": figures.short_bytes,
    "epsilon": lambda value: f"{value:g}",
    "seconds": lambda value: f"{value:g} s",
}


def section(found: Sequence[Picture]) -> Markup:
    """The part of the page: for each picture its figures and its table."""
    text = Markup()
    for i, picture in enumerate(found):
        text += part("heading", picture.words, 3)
        for cost, plot in cost_plots(picture).items():
            text += html.figure(plot, f"front-{cost}-{i}", _NOTE)
        text += html.data_table(HEADINGS, cells(picture), (0, len(HEADINGS) - 1))
    return text


_NOTE = "Line and names: the front, points to which no other is preferable. Up and to the left is better."

"""Accuracy against what it costs, one point for each row of runs: the Pareto fronts, as a table and as figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from fedstill.report import figures, groups, guarantees, html
from fedstill.report.groups import Row, group, setting_words
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, plain

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 170, 50, 48
_LOGARITHMIC = 90.0
"""Largest accuracy in per cent from which errors have a logarithmic axis."""
_LEVELS = (0, 20, 40, 60, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)
_COLUMN = 110
"""Width of each column of the legend after the first."""


@dataclass(frozen=True)
class Dot:
    """A point.

    Attributes:
        name: its name, shown beside it on the front and when the pointer is over it.
        kind: its name in the legend, which decides colour and marker.
        x: its cost: 0 and infinity are drawn at the edges.
        y: its value on the vertical axis.
        best: whether it is on the front.
    """

    name: str
    kind: str
    x: float
    y: float
    best: bool


def svg(dots: Sequence[Dot], x_words: str, about: str, tick_words: Callable[[float], str]) -> str:
    """The dots on a logarithmic horizontal axis, the best joined by steps.

    Args:
        dots: one or more points.
        x_words: the name of the horizontal axis.
        about: the task, below the title.
        tick_words: a cost in words.
    """
    place_x, ticks = _horizontal([dot.x for dot in dots], tick_words)
    place_y, levels, y_words = _vertical([dot.y for dot in dots])
    look = figures.styles(sorted({dot.kind for dot in dots}))  # the same in all pictures of the same methods
    title = f"Accuracy against {x_words}"
    parts = [
        f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="31">{escape(about)}</text>',
    ]
    for level in levels:
        y = place_y(level)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ccc" stroke-width="0.6"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
    for x, words in ticks:
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#ccc" stroke-width="0.6"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(words)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_words)}</text>')
    parts.append(f'<text transform="translate(14 {_HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{y_words}</text>')
    best = sorted((dot for dot in dots if dot.best), key=lambda dot: (dot.x, dot.y))
    if best:
        path = f"M{place_x(best[0].x):.1f} {place_y(best[0].y):.1f}"
        path += "".join(f"H{place_x(dot.x):.1f}V{place_y(dot.y):.1f}" for dot in best[1:])
        parts.append(f'<path class="front" d="{path}" fill="none" stroke="#888" stroke-width="1.5"/>')
    for dot in dots:
        parts.append(_marker(dot, place_x(dot.x), place_y(dot.y), *look[dot.kind]))
    parts += _names(best, place_x, place_y)
    legend, width = _legend(look)
    parts += legend
    style = 'font-family="sans-serif" font-size="11" fill="#222"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {style} viewBox="0 0 {width} {_HEIGHT}" role="img"'
    page = f'<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>'
    return "\n".join([f'{head} aria-label="{escape(title)}: {escape(about)}">', page, *parts, "</svg>\n"])


def _horizontal(
    values: Sequence[float], tick_words: Callable[[float], str]
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """The place of each value on a log axis, and its ticks; 0 is on the left edge, infinity on the right."""
    inner = [math.log10(value) for value in values if 0 < value < math.inf]
    low, high = (min(inner), max(inner)) if inner else (0.0, 1.0)
    margin = max(0.05 * (high - low), 0.1)
    low, high = low - margin, high + margin
    left = _LEFT + (50 if 0.0 in values else 0)
    right = _WIDTH - _RIGHT - (50 if math.inf in values else 0)

    def place(value: float) -> float:
        if value <= 0:
            return _LEFT + 10.0
        if value == math.inf:
            return _WIDTH - _RIGHT - 10.0
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    steps = (1,) if high - low > 3 else (1, 3) if high - low > 1.2 else (1, 2, 5)
    decades = range(math.floor(low), math.ceil(high) + 1)
    marks = [s * 10.0**d for d in decades for s in steps if low <= math.log10(s * 10.0**d) <= high]
    ticks = [(place(mark), tick_words(mark)) for mark in marks] if inner else []
    ticks += [(place(0.0), "0")] if 0.0 in values else []
    ticks += [(place(math.inf), "none")] if math.inf in values else []
    return place, ticks


def _vertical(values: Sequence[float]) -> tuple[Callable[[float], float], list[float], str]:
    """The place of each accuracy in per cent, ticks, and the name of the axis.

    From 90 % on, the error 100 - accuracy has a logarithmic axis: 98 and 99 are then as far apart as 80 and 90.
    """
    low, high = min(values), max(values)
    height = _HEIGHT - _TOP - _BOTTOM
    if high >= _LOGARITHMIC:
        errors = [100 - value for value in values if value < 100]
        least = min(errors, default=1.0) / (4 if high == 100 else 1.25)  # 100 has no logarithm: it is the upper edge
        most = min(max(100 - low, 2 * least) * 1.15, 100.0)
        span = math.log(most / least)

        def place(value: float) -> float:
            return _TOP + math.log(max(100 - value, least) / least) / span * height

        ticks = _levels(100 - most, 100 - least) + ([100.0] if high == 100 else [])
        return place, ticks, "accuracy, % (log of the error)"
    step = next((s for s in (0.5, 1, 2, 5, 10, 20) if (high - low) / s <= 8), 20)
    bottom = math.floor((low - 0.1 * step) / step) * step
    top = math.ceil((high + 0.1 * step) / step) * step

    def place_linearly(value: float) -> float:
        return _TOP + (top - value) / (top - bottom) * height

    levels = [bottom + i * step for i in range(round((top - bottom) / step) + 1)]
    return place_linearly, levels, "accuracy, %"


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


def _marker(dot: Dot, x: float, y: float, colour: str, symbol: str) -> str:
    about = f"<title>{escape(dot.name)}: {dot.y:.2f} %</title>"
    place = f'transform="translate({x - 13:.1f} {y - 7:.1f})" fill="{colour}" opacity="{1 if dot.best else 0.55}"'
    return f'<g class="dot" {place}>{html.SHAPES[symbol]}{about}</g>'


def _names(best: Sequence[Dot], place_x: Callable[[float], float], place_y: Callable[[float], float]) -> list[str]:
    """The names on the front, each beside its dot where it covers the least of other names and dots."""
    places = [(place_x(dot.x), place_y(dot.y)) for dot in best]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    parts = []
    for dot, (x, y) in zip(best, places, strict=True):
        width = 6.0 * len(dot.name)
        beside = [(x - width / 2, y - 9), (x - width / 2, y + 17), (x + 9, y + 4), (x - 9 - width, y + 4)]
        beside += [(x + 4, y + 17), (x - 4 - width, y - 9)]
        boxes = []
        for left, base in beside:
            start = min(max(left, _LEFT + 2), _WIDTH - _RIGHT - width)
            boxes.append((start, base - 9, start + width, base + 2))
        box = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        parts.append(f'<text x="{box[0]:.1f}" y="{box[1] + 9:.1f}">{escape(dot.name)}</text>')
    return parts


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Area that two boxes (left, top, right, bottom) share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0)


def _legend(look: dict[str, tuple[str, str]]) -> tuple[list[str], int]:
    """A line for each kind, and the width of the picture with all of them."""
    height = 19 if len(look) <= (_HEIGHT - _TOP) // 19 else 13
    lines = (_HEIGHT - _TOP) // height
    parts = []
    for i, (kind, (colour, symbol)) in enumerate(look.items()):
        x, y = _WIDTH - _RIGHT + 14 + i // lines * _COLUMN, _TOP + 8 + i % lines * height
        parts.append(f'<g transform="translate({x - 13} {y - 7})" fill="{colour}">{html.SHAPES[symbol]}</g>')
        parts.append(f'<text class="kind" x="{x + 10}" y="{y + 4}">{escape(kind)}</text>')
    return parts, _WIDTH + (len(look) - 1) // lines * _COLUMN


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
    facts = groups.task_settings(first)
    more = [f"{facts['limit']:,} records"] if facts["limit"] else []
    return Picture(f"{setting_words(first, more)}, {first.summary['judged_on']}", points)


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


def cost_figures(picture: Picture) -> dict[str, str]:
    """An SVG for each cost, with the front as a line."""
    drawn = {}
    for cost, best in picture.fronts().items():
        value = COSTS[cost]
        dots = [
            Dot(point.name, point.method, value(point), 100 * point.accuracy, point in best) for point in picture.points
        ]
        drawn[cost] = svg(dots, _AXES[cost], picture.words, _UNITS[cost])
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
        for figure in cost_figures(picture).values():
            text += f'<figure class="pareto">\n<div class="scroll" tabindex="0">\n{figure}</div>\n'
            text += f"<figcaption>{escape(_NOTE)}</figcaption>\n</figure>\n"
        text += html.data_table(HEADINGS, cells(picture), (0, len(HEADINGS) - 1))
    return text


_NOTE = "Line and names: the front, points to which no other is preferable. Up and to the left is better."

"""The report's figures: a `Plot` of each, which `fedstill.report.drawing` draws for pages and papers.

Colour-blind readers can distinguish the colours (after Okabe and Ito, 2008), whose medium lightness suits white and
black pages; each label has its own marker too.

``look`` has the colour and the marker of each row's name, so that a method looks the same in all figures of a page.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from fedstill.report import tables
from fedstill.report.drawing import MANY_CLIENTS, PAGE_WIDTH, POINTS, Axis, Heat, Line, Plot
from fedstill.report.groups import Row, Series
from fedstill.report.record import RunRecord, human_bytes
from fedstill.report.tables import others

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#C56A9C", "#A67C00", "#3A93CE", "#7F7F7F")
MARKERS = "osD^PX*v"
ACCURACY = Axis("accuracy, %")

Look = dict[str, tuple[str, str]]

Way = Literal["up and down", "up", "down"]
"""Direction of the bytes: both, sent by clients, or received by clients."""

WAYS: tuple[Way, ...] = ("up and down", "up", "down")


def styles(labels: Iterable[str]) -> Look:
    """Colour and marker of each label; distinct for up to 56 labels."""
    return {label: (PALETTE[i % 7], MARKERS[i % 8]) for i, label in enumerate(labels)}


def level(label: str, look: Look, xs: Sequence[float], value: float, words: str) -> Line:
    """A dotted horizontal line at ``value`` percent with a marker at both ends."""
    colour, marker = look[label]
    tips = [f"{label}, {words}: {value:.2f} %"] * 2
    return Line(label, xs, [value, value], colour, marker, ":", tips=tips)


def band(label: str, look: Look, xs: Sequence[float], values: Sequence[Sequence[float]], unit: str) -> Line:
    """The mean of the values at each x, with a band of one sample standard deviation where there are several."""
    colour, marker = look[label]
    mean = [float(np.mean(some)) for some in values]
    spread = [float(np.std(some, ddof=1)) if len(some) > 1 else 0.0 for some in values]
    apart = [f" ± {s:.2f}" if len(some) > 1 else "" for s, some in zip(spread, values, strict=True)]
    tips = [f"{label}, {unit} {x:g}: {m:.2f}{a} %" for x, m, a in zip(xs, mean, apart, strict=True)]
    wide = spread if any(len(some) > 1 for some in values) else ()
    return Line(label, xs, mean, colour, marker if len(xs) <= POINTS else "", spread=wide, tips=tips)


def class_axis(name: str, record: RunRecord, num_classes: int, ends: tuple[float, float] | None = None) -> Axis:
    """An axis of class names; without them if there are many."""
    ticks = [(float(c), class_text(record, c, 14)) for c in range(num_classes)] if num_classes <= 25 else []
    return Axis(name, range=ends, ticks=ticks, grid=False)


def class_text(record: RunRecord, label: int, longest: int = 60) -> str:
    """The name of a class, shortened to ``longest`` characters."""
    name = record.class_name(label)
    return name if len(name) <= longest else name[: longest - 1] + "…"


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between two powers of ten, ``10**low`` and ``10**high``."""
    steps = (1,) if high - low > 2.5 else (1, 3) if high - low > 1 else (1, 2, 5)
    ticks = [s * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for s in steps]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]


def short_bytes(value: float) -> str:
    """Bytes as a tick has them: ``10 kB``."""
    return human_bytes(value).replace(".00 ", " ").replace(".0 ", " ")


def _matrix_height(num_classes: int, each: int = 24) -> float:
    """Height of a figure with a row for each class, as a share of its width."""
    return max(260, min(640, each * num_classes + 140)) / 512


def accuracy_against_bytes(rows: Sequence[Row], look: Look) -> dict[Way, Plot]:
    """Accuracy against bytes per client by way: up and down, up, and down; those that have something to show."""
    drawn = {way: accuracy_against_bytes_of(rows, look, way) for way in WAYS}
    return {way: plot for way, plot in drawn.items() if plot is not None}


def accuracy_against_bytes_of(rows: Sequence[Row], look: Look, way: Way) -> Plot | None:
    """Accuracy against bytes per client, on a log axis; a method of many rounds is a line through its rounds.

    A method without bytes is a dotted level, as a log axis has no 0. None for a single point.
    """
    groups = {row.name: row for row in rows if row.accuracy is not None}
    totals = {label: float(np.mean([_bytes(run, way) for run in row.runs])) for label, row in groups.items()}
    if not any(totals.values()):
        return None
    lines = {label: _path_line(row, totals[label], look, way) for label, row in groups.items() if totals[label]}
    seen = [x for line in lines.values() for x in line.x]
    if len(seen) == 1 and len(groups) == 1:
        return None
    low, high = math.log10(min(seen)), math.log10(max(seen))
    margin = max(0.1 + 0.05 * (high - low), 0.5 - 0.5 * (high - low))
    low, high = low - margin, high + margin
    for label in (label for label in groups if not totals[label]):
        accuracy = groups[label].accuracy
        assert accuracy is not None
        lines[label] = level(label, look, [10**low, 10**high], 100 * accuracy, "no bytes")
    ticks = [(tick, short_bytes(tick)) for tick in log_ticks(low, high)]
    axis = Axis(f"bytes per client, {way}", log=True, range=(10**low, 10**high), ticks=ticks)
    return Plot(axis, [ACCURACY], [lines[label] for label in groups])


def _path_line(row: Row, total: float, look: Look, way: Way) -> Line:
    """A method's rounds, and its end as a larger marker with a bar of its spread."""
    assert row.accuracy is not None
    colour, marker = look[row.name]
    points = [(x, y) for x, y in zip(*_path(row.runs, way), strict=True) if 0 < x < 0.999 * total]
    sizes = [4.0] * len(points) + [9.0]
    bars = [0.0] * len(points) + [100 * (row.spread or 0.0)]
    points.append((total, row.accuracy))
    tips = [f"{row.name}: {human_bytes(x)} per client, {100 * y:.2f} %" for x, y in points]
    xs, ys = [x for x, _ in points], [100 * y for _, y in points]
    spread = bars if row.spread else ()
    return Line(row.name, xs, ys, colour, marker, spread=spread, bars=True, sizes=sizes, tips=tips)


def accuracy_per_round(rows: Sequence[Row], look: Look) -> Plot | None:
    """Mean accuracy after each round, with a band of one sample standard deviation over seeds.

    A method of one round is a dotted level. None if no run has more than one round with an accuracy.
    """
    series = {row.name: _by_round(row.runs) for row in rows}
    last = max((max(rounds) for rounds in series.values() if rounds), default=0)
    if not any(len(rounds) > 1 for rounds in series.values()):
        return None
    lines = []
    for row in rows:
        rounds = series[row.name]
        if len(rounds) > 1:
            xs = sorted(rounds)
            lines.append(band(row.name, look, xs, [[100 * value for value in rounds[x]] for x in xs], "round"))
        elif row.accuracy is not None:
            words = "one round" if row.runs[0].summary["rounds"] == 1 else "at the end"
            lines.append(level(row.name, look, [1, last], 100 * row.accuracy, words))
    return Plot(Axis("round", integer=True), [ACCURACY], lines)


def over_setting(sweep: Series, look: Look) -> Plot | None:
    """Accuracy against a number that varies, with a band over seeds; the axis is logarithmic over a decade or more.

    None if the setting is no number.
    """
    if (axis := sweep.axis) is None:
        return None
    name, numbers = axis
    place = dict(zip(sweep.values[0], numbers, strict=True))
    lines = []
    for label, line in sweep.series.items():
        points = [(place[value], row) for (value,), row in line.items()]
        points.sort(key=lambda point: point[0])
        values = [[100 * a for run in row.runs if (a := run.summary["accuracy"]) is not None] for _, row in points]
        lines.append(band(label, look, [x for x, _ in points], values, name))
    for label, row in sweep.levels.items():
        assert row.accuracy is not None
        ends = [min(numbers), max(numbers)]
        lines.append(level(label, look, ends, 100 * row.accuracy, "without the setting"))
    logarithmic = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    ticks = [(x, f"{x:g}") for x in numbers] if len(numbers) <= 12 else None
    if ticks is None and logarithmic:
        ticks = [(x, f"{x:g}") for x in log_ticks(math.log10(min(numbers)), math.log10(max(numbers)))]
    return Plot(Axis(name, log=logarithmic, ticks=ticks), [ACCURACY], lines)


def course(rows: Sequence[Row], look: Look) -> Plot | None:
    """Other numbers logged in more than one round, one panel each; means over seeds."""
    series: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        for metric in (metric for run in row.runs for metric in run.metrics):
            for name, value in others(metric).items():
                series.setdefault(name, {}).setdefault(row.name, {}).setdefault(metric["round"], []).append(value)
    names = [name for name, some in sorted(series.items()) if any(len(rounds) > 1 for rounds in some.values())]
    if not names:
        return None
    lines = []
    for panel, name in enumerate(names):
        for label, rounds in series[name].items():
            xs = sorted(rounds)
            ys = [float(np.mean(rounds[x])) for x in xs]
            tips = [f"{label}, round {x}: {name} {y:.4g}" for x, y in zip(xs, ys, strict=True)]
            colour, marker = look[label]
            lines.append(Line(label, xs, ys, colour, marker if len(xs) <= POINTS else "", tips=tips, panel=panel))
    height = (160 * len(names) + 120) / 512
    return Plot(Axis("round", integer=True), [Axis(name) for name in names], lines, height=height)


def per_class_accuracy(rows: Sequence[Row], look: Look) -> Plot | None:
    """Recall of each class, mean over seeds: one marker per method and class."""
    rates = tables.recalls(rows)
    if not rates:
        return None
    named = next(run for row in rows for run in row.runs if run.confusion is not None)
    num_classes = len(next(iter(rates.values())))
    lines = []
    for label, recall in rates.items():
        colour, marker = look[label]
        xs = [c for c in range(num_classes) if np.isfinite(recall[c])]
        ys = [100 * float(recall[c]) for c in xs]
        tips = [f"{label}, class {class_text(named, c)}: {y:.1f} %" for c, y in zip(xs, ys, strict=True)]
        size = 8.0 if num_classes <= 20 else 5.0
        lines.append(Line(label, xs, ys, colour, marker, "", sizes=size, opacity=0.85, tips=tips))
    return Plot(class_axis("class", named, num_classes, (-0.5, num_classes - 0.5)), [Axis("recall, %")], lines)


def confusion(row: Row) -> Plot | None:
    """Confusion matrix in percent of each class, summed over the runs of one method."""
    total = tables.confusion(row)
    if total is None:
        return None
    size, shares = len(total), tables.shares(total)
    names = [class_text(row.runs[0], c) for c in range(size)]

    def tip(true: int, found: int) -> str:
        return f"{names[true]} predicted as {names[found]}: {shares[true, found]:.1f} % of the class"

    axes = (class_axis(name, row.runs[0], size) for name in ("predicted class", "true class"))
    heat = Heat(shares, 100.0, tip)
    return Plot(next(axes), [next(axes)], heat=heat, height=_matrix_height(size, 30))


def _bytes(run: RunRecord, way: Way) -> float:
    return sum(float(run.summary[f"bytes_{one}_per_client"]) for one in way.split(" and "))


def _path(runs: Sequence[RunRecord], way: Way) -> tuple[list[float], list[float]]:
    """Mean bytes per client and mean accuracy after each logged round."""
    points: dict[int, list[tuple[float, float]]] = {}
    names = [f"bytes_{one}" for one in way.split(" and ")]
    for run in runs:
        everything = sum(run.summary[name] for name in names)
        for metric in run.metrics:
            if everything and None not in (metric["accuracy"], *(metric[name] for name in names)):
                share = sum(metric[name] for name in names) / everything
                points.setdefault(metric["round"], []).append((share * _bytes(run, way), metric["accuracy"]))
    means = [np.mean(points[round], axis=0) for round in sorted(points)]
    return [float(mean[0]) for mean in means], [float(mean[1]) for mean in means]


def _by_round(runs: Sequence[RunRecord]) -> dict[int, list[float]]:
    rounds: dict[int, list[float]] = {}
    for metric in (metric for run in runs for metric in run.metrics):
        if metric["accuracy"] is not None:
            rounds.setdefault(metric["round"], []).append(metric["accuracy"])
    return rounds


BLANK = "Blank: no records."
AREA = "The area of a bubble is the number of records."
"""What a reader of `records_per_client` and of `bubbles` has to know."""


def records_per_client(record: RunRecord) -> Plot | None:
    """Records of each class at each client as a heat map; blank for none.

    More than `drawing.MANY_CLIENTS` clients are ordered by their largest class.
    """
    if record.counts is None or not record.counts.size:
        return None
    counts = record.counts
    num_clients, num_classes = counts.shape
    order = np.arange(num_clients)
    few = num_clients <= MANY_CLIENTS
    if not few:
        order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    shown = counts[order].T
    values = np.where(shown > 0, shown.astype(np.float64), np.nan)
    heat = Heat(values, float(counts.max()), lambda label, place: _held(record, int(order[place]), label))
    name = "client" if few else "clients, ordered by their largest class"
    axis = Axis(name, ticks=_clients(num_clients) if few else [], grid=False)
    return Plot(axis, [class_axis("class", record, num_classes)], heat=heat, height=_matrix_height(num_classes))


def bubbles(record: RunRecord) -> Plot | None:
    """Clients by classes, as papers draw a partition: the area of a bubble is the number of records.

    None for more than `drawing.MANY_CLIENTS` clients.
    """
    if record.counts is None or not record.counts.any() or len(record.counts) > MANY_CLIENTS:
        return None
    num_clients, num_classes = record.counts.shape
    clients, labels = np.nonzero(record.counts)
    count = record.counts[clients, labels]
    height = _matrix_height(num_classes)
    room = min(0.8 * PAGE_WIDTH / num_clients, 0.7 * PAGE_WIDTH * height / num_classes)
    sizes = min(18.0, 0.9 * room) * np.sqrt(count / count.max())
    tips = [_held(record, int(k), int(c)) for k, c in zip(clients, labels, strict=True)]
    line = Line("", clients.tolist(), labels.tolist(), PALETTE[0], "o", "", sizes=sizes, opacity=0.8, tips=tips)
    axis = Axis("client", range=(-0.7, num_clients - 0.3), ticks=_clients(num_clients))
    return Plot(axis, [class_axis("class", record, num_classes, (num_classes - 0.3, -0.7))], [line], height=height)


def _clients(number: int) -> list[tuple[float, str]]:
    """Ticks for clients: for each, or for every fifth."""
    return [(float(k), str(k)) for k in range(0, number, 1 if number <= 12 else 5)]


def _held(record: RunRecord, client: int, label: int) -> str:
    assert record.counts is not None
    return f"client {client}, class {class_text(record, label)}: {record.counts[client, label]:,} records"

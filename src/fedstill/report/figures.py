"""The style of the report's figures: colours, markers, axes and legends.

Colour-blind readers can distinguish the colours (after Okabe and Ito, 2008), whose medium lightness suits white and
black pages; each label has its own marker too. Labels are escaped, since plotly parses HTML in its texts.

``look`` has the colour and the marker of each row's name, so that a method looks the same in all figures of a page.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Literal

import numpy as np

from fedstill.report import tables
from fedstill.report.groups import Row, Sweep
from fedstill.report.record import RunRecord, human_bytes
from fedstill.report.tables import others

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#C56A9C", "#A67C00", "#3A93CE", "#7F7F7F")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
AMOUNTS = ((0.0, "rgba(31,119,196,0.15)"), (1.0, "rgba(31,119,196,1)"))  # transparent at 0, for light and dark pages
GRID = "rgba(128,128,128,0.28)"
MANY_CLIENTS = 50


def styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each label; distinct for up to 56 labels."""
    return {label: (PALETTE[i % 7], SYMBOLS[i % 8]) for i, label in enumerate(labels)}


def axes(x: str, y: str) -> Any:
    """An empty figure with named axes, in the report's style."""
    import plotly.graph_objects as go

    axis = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True, "title": {"standoff": 8}}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=380,
        margin={"l": 50, "r": 12, "t": 30, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8a8a8a", "activecolor": "#0072B2"},
        dragmode=False,  # so that touching a figure scrolls the page
        showlegend=False,  # the page has legends that wrap, and that act on all figures at once
    )
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def line_style(label: str, look: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Colour, marker and legend entry of a label's traces."""
    colour, symbol = look[label]
    name = escape(label)
    return {
        "name": name,
        "legendgroup": name,
        "line": {"color": colour, "width": 2},
        "marker_color": colour,
        "marker_symbol": symbol,
    }


def add_level(
    figure: Any, label: str, look: dict[str, tuple[str, str]], xs: list[float], level: float, text: str
) -> None:
    """Draw a dotted horizontal line with a marker at both ends."""
    style = line_style(label, look)
    style["line"] = {**style["line"], "dash": "dot"}
    hover = f"{text}<br>%{{y:.2f}} %"
    figure.add_scatter(x=xs, y=[level, level], mode="lines+markers", hovertemplate=hover, **style)


def add_band(
    figure: Any, label: str, look: dict[str, tuple[str, str]], xs: Sequence[float], values: Sequence[Sequence[float]]
) -> None:
    """Draw the mean of the values at each x, with a band of one sample standard deviation where there are several."""
    mean = np.array([np.mean(some) for some in values])
    spread = np.array([np.std(some, ddof=1) if len(some) > 1 else 0.0 for some in values])
    style = line_style(label, look)
    if any(len(some) > 1 for some in values):
        figure.add_scatter(
            x=[*xs, *xs[::-1]],
            y=np.concatenate([mean + spread, (mean - spread)[::-1]]),
            fill="toself",
            fillcolor=faded(look[label][0]),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=style["legendgroup"],
        )
    mode = "lines+markers" if len(xs) <= 40 else "lines"
    texts = [f"{m:.2f}" + (f" ± {s:.2f}" if len(v) > 1 else "") for m, s, v in zip(mean, spread, values, strict=True)]
    figure.add_scatter(x=xs, y=mean, mode=mode, customdata=texts, hovertemplate="%{x}<br>%{customdata} %", **style)


def heat_scale(columns: int, most: float) -> dict[str, Any]:
    """Colour scale of a heat map whose largest value is ``most``."""
    gap = 1 if columns <= MANY_CLIENTS else 0
    scale = {"colorscale": AMOUNTS, "zmin": 0, "zmax": most or 1.0}  # plotly starts at the smallest value otherwise
    return {**scale, "xgap": gap, "ygap": gap, "colorbar": {"thickness": 10, "outlinewidth": 0, "xpad": 4}}


def class_axis(update: Any, record: RunRecord, num_classes: int) -> None:
    """Label an axis with the class names."""
    names = [class_text(record, c, 14) for c in range(num_classes)]
    update(tickvals=list(range(num_classes)), ticktext=names, showticklabels=num_classes <= 25, showgrid=False)


def class_text(record: RunRecord, label: int, longest: int = 60) -> str:
    """The escaped name of a class, shortened to ``longest`` characters."""
    name = record.class_name(label)
    return escape(name if len(name) <= longest else name[: longest - 1] + "…")


def faded(colour: str) -> str:
    """``"#rrggbb"`` as a transparent colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def plot_height(pixels: int) -> int:
    """``pixels``, within the limits of the page."""
    return max(260, min(640, pixels))


Look = dict[str, tuple[str, str]]

Way = Literal["up and down", "up", "down"]
"""Direction of the bytes: both, sent by clients, or received by clients."""

WAYS: tuple[Way, ...] = ("up and down", "up", "down")


def accuracy_against_bytes(rows: Sequence[Row], look: Look) -> Any | None:
    """Accuracy against bytes per client up and down, up, and down, in one figure.

    Each trace has its way in ``meta``; ``layout.meta.ways`` has the axis of each way. Only the first way is visible.
    """
    drawn = {way: one for way in WAYS if (one := accuracy_against_bytes_of(rows, look, way)) is not None}
    if not drawn:
        return None
    figure = next(iter(drawn.values()))
    first = next(iter(drawn))
    figure.layout.meta = {"ways": {way: _axis(one) for way, one in drawn.items()}}
    figure.update_traces(meta=first)
    for way, one in drawn.items():
        if way != first:
            figure.add_traces([trace.update(meta=way, visible=False) for trace in one.data])
    return figure


def _axis(figure: Any) -> dict[str, Any]:
    axis = figure.layout.xaxis
    parts = {"range": list(axis.range), "tickvals": list(axis.tickvals), "ticktext": list(axis.ticktext)}
    return {f"xaxis.{key}": value for key, value in parts.items()} | {"xaxis.title.text": axis.title.text}


def accuracy_against_bytes_of(rows: Sequence[Row], look: Look, way: Way) -> Any | None:
    """Accuracy against bytes per client, on a log axis; a method of many rounds is a line through its rounds.

    A method without bytes is a dotted level, as a log axis has no 0. None for a single point.
    """
    groups = {row.name: row for row in rows if row.accuracy is not None}
    totals = {label: float(np.mean([_bytes(run, way) for run in row.runs])) for label, row in groups.items()}
    if not any(totals.values()):
        return None
    figure = axes(f"bytes per client, {way}", "accuracy, %")
    seen = [total for total in totals.values() if total]
    for label, row in groups.items():
        assert row.accuracy is not None
        if not totals[label]:
            continue
        apart = 100 * row.spread if row.spread else math.nan
        xs, ys = _path(row.runs, way)
        earlier = [(x, y) for x, y in zip(xs, ys, strict=True) if 0 < x < 0.999 * totals[label]]
        seen += [x for x, _ in earlier]
        points = [*earlier, (totals[label], row.accuracy)]
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[100 * y for _, y in points],
            mode="lines+markers",
            marker={"size": [5] * len(earlier) + [12], "opacity": 1, "line": {"width": 0}},
            error_y={"type": "data", "array": [math.nan] * len(earlier) + [apart], "thickness": 1.5},
            customdata=[human_bytes(x) for x, _ in points],
            hovertemplate="%{customdata} per client<br>%{y:.2f} %",
            **line_style(label, look),
        )
    if len(seen) == 1 and len(groups) == 1:
        return None
    low, high = math.log10(min(seen)), math.log10(max(seen))
    margin = max(0.1 + 0.05 * (high - low), 0.5 - 0.5 * (high - low))
    low, high = low - margin, high + margin
    for label in (label for label in groups if not totals[label]):
        level = groups[label].accuracy
        assert level is not None
        add_level(figure, label, look, [10**low, 10**high], 100 * level, "no bytes")
    steps = (1,) if high - low > 2.5 else (1, 3) if high - low > 1 else (1, 2, 5)
    ticks = [s * 10.0**d for d in range(math.floor(low), math.ceil(high)) for s in steps]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    texts = [human_bytes(tick).replace(".00 ", " ").replace(".0 ", " ") for tick in ticks]
    figure.update_xaxes(type="log", range=[low, high], tickvals=ticks, ticktext=texts, tickangle=0)
    return figure


def accuracy_per_round(rows: Sequence[Row], look: Look) -> Any | None:
    """Mean accuracy after each round, with a band of one sample standard deviation over seeds.

    A method of one round is a dotted level. None if no run has more than one round with an accuracy.
    """
    series = {row.name: _by_round(row.runs) for row in rows}
    last = max((max(rounds) for rounds in series.values() if rounds), default=0)
    if not any(len(rounds) > 1 for rounds in series.values()):
        return None
    figure = axes("round", "accuracy, %")
    for row in rows:
        rounds = series[row.name]
        if len(rounds) > 1:
            xs = sorted(rounds)
            add_band(figure, row.name, look, xs, [[100 * value for value in rounds[x]] for x in xs])
        elif row.accuracy is not None:
            text = "one round" if row.runs[0].summary["rounds"] == 1 else "at the end"
            add_level(figure, row.name, look, [1, last], 100 * row.accuracy, text)
    figure.update_xaxes(tickformat="d", dtick=1 if last <= 12 else None)
    return figure


def over_setting(sweep: Sweep, look: Look) -> Any | None:
    """Accuracy against a number that varies, with a band over seeds; the axis is logarithmic over a decade or more.

    None if the setting is no number.
    """
    if (axis := sweep.axis) is None:
        return None
    name, numbers = axis
    place = dict(zip(sweep.values[0], numbers, strict=True))
    figure = axes(escape(name), "accuracy, %")
    for label, line in sweep.series.items():
        points = [(place[value], row) for (value,), row in line.items()]
        points.sort(key=lambda point: point[0])
        values = [[100 * a for run in row.runs if (a := run.summary["accuracy"]) is not None] for _, row in points]
        add_band(figure, label, look, [x for x, _ in points], values)
    for label, row in sweep.levels.items():
        assert row.accuracy is not None
        add_level(figure, label, look, [min(numbers), max(numbers)], 100 * row.accuracy, "without the setting")
    ticks: dict[str, Any] = {"tickvals": numbers, "ticktext": [f"{x:g}" for x in numbers], "tickangle": 0}
    if len(numbers) > 12:
        ticks = {}
    logarithmic = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    figure.update_xaxes(type="log" if logarithmic else "linear", **ticks)
    return figure


def course(rows: Sequence[Row], look: Look) -> Any | None:
    """Other numbers logged in more than one round, one panel each; means over seeds."""
    series: dict[str, dict[str, dict[int, list[float]]]] = {}
    for line in rows:
        for metric in (metric for run in line.runs for metric in run.metrics):
            for name, value in others(metric).items():
                series.setdefault(name, {}).setdefault(line.name, {}).setdefault(metric["round"], []).append(value)
    names = [name for name, lines in sorted(series.items()) if any(len(rounds) > 1 for rounds in lines.values())]
    if not names:
        return None
    figure = axes("round", "")
    gap = 0.25 / len(names)
    for row, name in enumerate(names):
        bottom = 1 - (row + 1 - gap) / len(names)
        axis = "" if row == 0 else str(row + 1)
        same = {key: value for key, value in figure.layout.yaxis.to_plotly_json().items() if key != "title"}
        figure.update_layout(
            {f"yaxis{axis}": {**same, "domain": [bottom, 1 - row / len(names)], "title": {"text": escape(name)}}}
        )
        for label, rounds in series[name].items():
            xs = sorted(rounds)
            style = line_style(label, look) | {"showlegend": name == names[0] or label not in series[names[0]]}
            hover = f"round %{{x}}<br>{escape(name)} %{{y:.4g}}"
            ys = [float(np.mean(rounds[x])) for x in xs]
            mode = "lines+markers" if len(xs) <= 40 else "lines"
            figure.add_scatter(x=xs, y=ys, mode=mode, yaxis=f"y{axis}", hovertemplate=hover, **style)
    figure.update_xaxes(tickformat="d", anchor="y" if len(names) == 1 else f"y{len(names)}")
    figure.update_layout(height=160 * len(names) + 120)
    return figure


def per_class_accuracy(rows: Sequence[Row], look: Look) -> Any | None:
    """Recall of each class, mean over seeds: one marker per method and class."""
    rates = tables.recalls(rows)
    if not rates:
        return None
    named = next(run for row in rows for run in row.runs if run.confusion is not None)
    figure = axes("class", "recall, %")
    num_classes = len(next(iter(rates.values())))
    names = [class_text(named, c) for c in range(num_classes)]
    for label, recall in rates.items():
        style = line_style(label, look)
        style["marker"] = {"size": 11 if num_classes <= 20 else 7, "opacity": 0.85}
        figure.add_scatter(
            x=np.arange(num_classes),
            y=100 * recall,
            mode="markers",
            customdata=names,
            hovertemplate="class %{customdata}<br>%{y:.1f} %",
            **style,
        )
    class_axis(figure.update_xaxes, named, num_classes)
    figure.update_xaxes(range=[-0.5, num_classes - 0.5])
    return figure


def confusion(row: Row) -> Any | None:
    """Confusion matrix in percent of each class, summed over the runs of one method."""
    total = tables.confusion(row)
    if total is None:
        return None
    size = len(total)
    figure = axes("predicted class", "true class")
    names = np.array([class_text(row.runs[0], c) for c in range(size)])
    figure.add_heatmap(
        z=tables.shares(total),
        customdata=np.stack(np.broadcast_arrays(names[:, None], names[None, :]), axis=-1),
        hovertemplate="%{customdata[0]} predicted as %{customdata[1]}<br>%{z:.1f} % of the class<extra></extra>",
        hoverongaps=False,
        **heat_scale(size, 100.0),
    )
    class_axis(figure.update_xaxes, row.runs[0], size)
    class_axis(figure.update_yaxes, row.runs[0], size)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=plot_height(30 * size + 160))
    return figure


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


def records_per_client(record: RunRecord) -> Any | None:
    """Records of each class at each client as a heat map; blank for none.

    More than `figures.MANY_CLIENTS` clients are ordered by their largest class.
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
    figure = axes("client" if few else "clients, ordered by their largest class", "class")
    figure.add_heatmap(
        z=np.where(shown > 0, shown.astype(np.float64), np.nan),
        customdata=np.broadcast_to(order, shown.shape),
        text=np.broadcast_to([[class_text(record, c)] for c in range(num_classes)], shown.shape),
        hovertemplate="client %{customdata}<br>class %{text}<br>%{z:d} records<extra></extra>",
        hoverongaps=False,
        **heat_scale(num_clients, float(counts.max())),
    )
    figure.update_xaxes(showgrid=False, showticklabels=few, tickformat="d")
    if num_clients <= 12:
        figure.update_xaxes(dtick=1)
    class_axis(figure.update_yaxes, record, num_classes)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=plot_height(24 * num_classes + 140))
    return figure


def bubbles(record: RunRecord) -> Any | None:
    """Clients by classes, as papers draw a partition: the area of a bubble is the number of records.

    None for more than `figures.MANY_CLIENTS` clients.
    """
    if record.counts is None or not record.counts.any() or len(record.counts) > MANY_CLIENTS:
        return None
    num_clients, num_classes = record.counts.shape
    client, label = np.nonzero(record.counts)
    count = record.counts[client, label]
    figure = axes("client", "class")
    widest = min(26.0, 620.0 / num_clients, 480.0 / num_classes)  # pixels from one bubble to the next
    figure.add_scatter(
        x=client,
        y=label,
        mode="markers",
        marker={
            "color": PALETTE[0],
            "opacity": 0.8,
            "size": count,
            "sizemode": "area",
            "sizeref": float(count.max()) / (widest**2 / 2),  # plotly doubles it
            "line": {"width": 0},
        },
        text=[class_text(record, int(c)) for c in label],
        hovertemplate="client %{x}<br>class %{text}<br>%{marker.size:d} records<extra></extra>",
    )
    figure.update_xaxes(range=[-0.7, num_clients - 0.3], tickformat="d", dtick=1 if num_clients <= 12 else None)
    class_axis(figure.update_yaxes, record, num_classes)
    figure.update_yaxes(range=[num_classes - 0.3, -0.7])
    figure.update_layout(height=plot_height(24 * num_classes + 140))
    return figure

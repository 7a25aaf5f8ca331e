"""The report's figures, as plotly figures; None if the runs have no data for a figure.

Given the same records, each function uses the same colour and marker for a method.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.report import figures
from fedstill.report.record import RunRecord
from fedstill.report.tables import accuracy, group, human_bytes, others

Way = Literal["up and down", "up", "down"]
"""Direction of the bytes: both, sent by clients, or received by clients."""


def accuracy_against_bytes(records: Sequence[RunRecord], way: Way = "up and down") -> Any | None:
    """Accuracy against bytes per client, on a log axis; a method of many rounds is a line through its rounds.

    A method without bytes is a dotted level, as a log axis has no 0. None for a single point.
    """
    groups = {label: runs for label, runs in group(records).items() if accuracy(runs)[0] is not None}
    totals = {label: float(np.mean([_bytes(run, way) for run in runs])) for label, runs in groups.items()}
    if not any(totals.values()):
        return None
    figure, look = figures.axes(f"bytes per client, {way}", "accuracy, %"), figures.styles(group(records))
    seen = [total for total in totals.values() if total]
    for label, runs in groups.items():
        mean, spread = accuracy(runs)
        assert mean is not None
        if not totals[label]:
            continue
        apart = 100 * spread if spread else math.nan
        xs, ys = _path(runs, way)
        earlier = [(x, y) for x, y in zip(xs, ys, strict=True) if 0 < x < 0.999 * totals[label]]
        seen += [x for x, _ in earlier]
        points = [*earlier, (totals[label], mean)]
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[100 * y for _, y in points],
            mode="lines+markers",
            marker={"size": [5] * len(earlier) + [12], "opacity": 1, "line": {"width": 0}},
            error_y={"type": "data", "array": [math.nan] * len(earlier) + [apart], "thickness": 1.5},
            customdata=[human_bytes(x) for x, _ in points],
            hovertemplate="%{customdata} per client<br>%{y:.2f} %",
            **figures.line_style(label, look),
        )
    if len(seen) == 1 and len(groups) == 1:
        return None
    low, high = math.log10(min(seen)), math.log10(max(seen))
    margin = max(0.1 + 0.05 * (high - low), 0.5 - 0.5 * (high - low))
    low, high = low - margin, high + margin
    for label in (label for label in groups if not totals[label]):
        level = accuracy(groups[label])[0]
        assert level is not None
        figures.add_level(figure, label, look, [10**low, 10**high], 100 * level, "no bytes")
    steps = (1,) if high - low > 2.5 else (1, 3) if high - low > 1 else (1, 2, 5)
    ticks = [s * 10.0**d for d in range(math.floor(low), math.ceil(high)) for s in steps]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    texts = [human_bytes(tick).replace(".00 ", " ").replace(".0 ", " ") for tick in ticks]
    figure.update_xaxes(type="log", range=[low, high], tickvals=ticks, ticktext=texts, tickangle=0)
    return figure


def accuracy_per_round(records: Sequence[RunRecord]) -> Any | None:
    """Mean accuracy after each round, with a band of one sample standard deviation over seeds.

    A method of one round is a dotted level. None if no run has more than one round with an accuracy.
    """
    groups = group(records)
    series = {label: _by_round(runs) for label, runs in groups.items()}
    last = max((max(rounds) for rounds in series.values() if rounds), default=0)
    if not any(len(rounds) > 1 for rounds in series.values()):
        return None
    figure, look = figures.axes("round", "accuracy, %"), figures.styles(groups)
    for label, rounds in series.items():
        final = accuracy(groups[label])[0]
        if len(rounds) <= 1:
            if final is not None:
                text = "one round" if groups[label][0].summary["rounds"] == 1 else "at the end"
                figures.add_level(figure, label, look, [1, last], 100 * final, text)
            continue
        xs = sorted(rounds)
        mean = np.array([100 * np.mean(rounds[x]) for x in xs])
        spread = np.array([100 * np.std(rounds[x], ddof=1) if len(rounds[x]) > 1 else 0.0 for x in xs])
        style = figures.line_style(label, look)
        figure.add_scatter(
            x=[*xs, *xs[::-1]],
            y=np.concatenate([mean + spread, (mean - spread)[::-1]]),
            fill="toself",
            fillcolor=figures.faded(look[label][0]),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=style["legendgroup"],
        )
        mode = "lines+markers" if len(xs) <= 40 else "lines"
        figure.add_scatter(x=xs, y=mean, mode=mode, hovertemplate="round %{x}<br>%{y:.2f} %", **style)
    figure.update_xaxes(tickformat="d", dtick=1 if last <= 12 else None)
    return figure


def course(records: Sequence[RunRecord]) -> Any | None:
    """Other numbers logged in more than one round, one panel each; means over seeds."""
    groups = group(records)
    series: dict[str, dict[str, dict[int, list[float]]]] = {}
    for label, runs in groups.items():
        for metric in (metric for run in runs for metric in run.metrics):
            for name, value in others(metric).items():
                series.setdefault(name, {}).setdefault(label, {}).setdefault(metric["round"], []).append(value)
    names = [name for name, lines in sorted(series.items()) if any(len(rounds) > 1 for rounds in lines.values())]
    if not names:
        return None
    figure, look = figures.axes("round", ""), figures.styles(groups)
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
            style = figures.line_style(label, look) | {"showlegend": name == names[0] or label not in series[names[0]]}
            hover = f"round %{{x}}<br>{escape(name)} %{{y:.4g}}"
            ys = [float(np.mean(rounds[x])) for x in xs]
            mode = "lines+markers" if len(xs) <= 40 else "lines"
            figure.add_scatter(x=xs, y=ys, mode=mode, yaxis=f"y{axis}", hovertemplate=hover, **style)
    figure.update_xaxes(tickformat="d", anchor="y" if len(names) == 1 else f"y{len(names)}")
    figure.update_layout(height=160 * len(names) + 120)
    return figure


def records_per_client(record: RunRecord) -> Any | None:
    """Records of each class at each client as a heat map; blank for none.

    More than `figures.MANY_CLIENTS` clients are ordered by their largest class.
    """
    if record.counts is None or not record.counts.size:
        return None
    counts = record.counts
    num_clients, num_classes = counts.shape
    order = np.arange(num_clients)
    few = num_clients <= figures.MANY_CLIENTS
    if not few:
        order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    shown = counts[order].T
    figure = figures.axes("client" if few else "clients, ordered by their largest class", "class")
    figure.add_heatmap(
        z=np.where(shown > 0, shown.astype(np.float64), np.nan),
        customdata=np.broadcast_to(order, shown.shape),
        text=np.broadcast_to([[figures.class_text(record, c)] for c in range(num_classes)], shown.shape),
        hovertemplate="client %{customdata}<br>class %{text}<br>%{z:d} records<extra></extra>",
        hoverongaps=False,
        **figures.heat_scale(num_clients, float(counts.max())),
    )
    figure.update_xaxes(showgrid=False, showticklabels=few, tickformat="d")
    if num_clients <= 12:
        figure.update_xaxes(dtick=1)
    figures.class_axis(figure.update_yaxes, record, num_classes)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=figures.plot_height(24 * num_classes + 140))
    return figure


def per_class_accuracy(records: Sequence[RunRecord]) -> Any | None:
    """Accuracy on each class, mean over seeds: one marker per method and class."""
    groups = group(records)
    rates = {label: [r for r in map(_recall, runs) if r is not None] for label, runs in groups.items()}
    rates = {label: recalls for label, recalls in rates.items() if recalls}
    if not rates or len({len(recall) for recalls in rates.values() for recall in recalls}) > 1:
        return None
    named = next(run for run in records if run.confusion is not None)
    figure, look = figures.axes("class", "accuracy, %"), figures.styles(groups)
    num_classes = len(next(iter(rates.values()))[0])
    names = [figures.class_text(named, c) for c in range(num_classes)]
    for label, recalls in rates.items():
        mean = 100 * np.mean(recalls, axis=0)
        hover = "class %{customdata}<br>%{y:.1f} %"
        style = figures.line_style(label, look)
        style["marker"] = {"size": 11 if num_classes <= 20 else 7, "opacity": 0.85}
        figure.add_scatter(
            x=np.arange(num_classes), y=mean, mode="markers", customdata=names, hovertemplate=hover, **style
        )
    figures.class_axis(figure.update_xaxes, named, num_classes)
    figure.update_xaxes(range=[-0.5, num_classes - 0.5])
    return figure


def confusion(runs: Sequence[RunRecord]) -> Any | None:
    """Confusion matrix in percent of each class, summed over the runs of one method."""
    tables = [run.confusion for run in runs if run.confusion is not None]
    if not tables or len({table.shape for table in tables}) > 1:
        return None
    total = np.sum(tables, axis=0)
    size = len(total)
    figure = figures.axes("predicted class", "true class")
    names = np.array([figures.class_text(runs[0], c) for c in range(size)])
    with np.errstate(invalid="ignore"):
        percent = 100 * total / total.sum(axis=1, keepdims=True)
    figure.add_heatmap(
        z=np.where(total > 0, percent, np.nan),
        customdata=np.stack(np.broadcast_arrays(names[:, None], names[None, :]), axis=-1),
        hovertemplate="%{customdata[0]} predicted as %{customdata[1]}<br>%{z:.1f} % of the class<extra></extra>",
        hoverongaps=False,
        **figures.heat_scale(size, 100.0),
    )
    figures.class_axis(figure.update_xaxes, runs[0], size)
    figures.class_axis(figure.update_yaxes, runs[0], size)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=figures.plot_height(30 * size + 160))
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


def _recall(run: RunRecord) -> NDArray[np.float64] | None:
    if run.confusion is None:
        return None
    tested = run.confusion.sum(axis=1)
    right: NDArray[np.float64] = np.diag(run.confusion) / np.where(tested > 0, tested, np.nan)
    return right

"""The report's figures for a paper: drawn by matplotlib from the page's own figures, as wide as a column.

Every figure of the page is a plotly figure; here its traces and axes are drawn again, so a printed figure shows what
the page shows. plotly's own export needs a browser.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.base import errors, files
from fedstill.report import export, figures, groups, sections
from fedstill.report.export import latex
from fedstill.report.groups import Task, group
from fedstill.report.record import RunRecord

Kind = Literal["pdf", "svg"]

_INCH = 2.54
_MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X", "star": "*",
    "triangle-down": "v",
}  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.size": 7.0,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#888888",
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "pdf.fonttype": 42,  # text that can be selected and that journals accept
    "svg.fonttype": "none",
    "svg.hashsalt": "fedstill",  # the same runs give the same file
}
_LETTERS = 16
"""Number of characters side by side for which an inch has room."""
_LINE = 0.17
"""Height of a legend's line in inches."""
_MOST_CELLS = 4000
"""Number of cells up to which a heat map is drawn by lines."""


@dataclass(frozen=True)
class Printed:
    """A figure: the name of its files, the plotly figure and its caption."""

    name: str
    plot: Any
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


def _of(task: Task, look: figures.Look) -> Iterator[tuple[str, Any | None, str]]:
    of = export.source(task)
    sent, rounds = figures.accuracy_against_bytes(task.ranked, look), figures.accuracy_per_round(task.rows, look)
    yield "bytes", sent, f"Accuracy against bytes. {export.of_bytes(sent)} {of}"
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


def _one(name: str, number: int, total: int, plot: Any | None, caption: str) -> Iterator[Printed]:
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

    Raises:
        ValueError: matplotlib is not installed.
    """
    every = list(chosen(records))
    written = []
    for one in every:
        for kind in kinds:
            files.write_bytes(out / f"{one.name}.{kind}", drawn(one, kind, width))
            written.append(out / f"{one.name}.{kind}")
    text = "% \\usepackage{graphicx}\n" + "".join(
        f"\n\\begin{{figure}}\n\\centering\n\\includegraphics[width=\\columnwidth]{{{one.name}}}\n"
        f"\\caption{{{latex(one.caption)}}}\n\\label{{fig:{one.name}}}\n\\end{{figure}}\n"
        for one in every
    )
    files.write_bytes(out / "figures.tex", text.encode())
    return [*written, out / "figures.tex"]


def drawn(one: Printed, kind: Kind, width: float) -> bytes:
    """A figure as a file, ``width`` cm wide."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"matplotlib is not installed; {errors.install('figures')}") from error
    import io

    with mpl.rc_context(_STYLE):
        figure = _figure(Figure, one.plot, width / _INCH)
        target = io.BytesIO()
        facts = {"Title": one.name, "CreationDate": None} if kind == "pdf" else {"Title": one.name, "Date": None}
        about = {"Subject": one.caption} if kind == "pdf" else {"Description": one.caption}
        figure.savefig(target, format=kind, metadata={**facts, **about})
    return target.getvalue()


def _figure(make: Any, plot: Any, width: float) -> Any:
    layout = plot.layout
    traces = [trace for trace in plot.data if trace.visible is not False]
    panels = sorted({trace.yaxis or "y" for trace in traces}, key=lambda name: int(name[1:] or 1))
    heats = any(trace.type == "heatmap" for trace in traces)
    tall = layout.height / 96 * 0.62 if heats or layout.height > 380 else 0.62 * width
    letters = round(_LETTERS * width)
    entries, columns = _entries(traces, letters)
    lines = sum(str(entry.get_label()).count("\n") + 1 for entry in entries) / columns
    figure = make(figsize=(width, max(1.6, tall) + _LINE * math.ceil(lines)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for trace in (trace for trace in traces if (trace.yaxis or "y") == panel):
            (_heat if trace.type == "heatmap" else _scatter)(figure, axis, trace)
        _dress(axis, layout[f"yaxis{panel[1:]}"], "y", letters)
        axis.spines[["top", "right"]].set_visible(heats)
    _dress(axes[-1], layout.xaxis, "x", letters)
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, handlelength=1.6)
    return figure


def _scatter(figure: Any, axis: Any, trace: Any) -> None:
    x, y = (np.asarray(values, dtype=float) for values in (trace.x, trace.y))
    if trace.fill == "toself":
        axis.fill(x, y, color=_rgba(trace.fillcolor), linewidth=0)
        return
    colour = trace.line.color or trace.marker.color
    if "lines" in trace.mode:
        style = {"dot": ":", "dash": "--"}.get(trace.line.dash or "", "-")
        axis.plot(x, y, color=colour, linewidth=1.1, linestyle=style)
    if "markers" in trace.mode:
        pixels = np.asarray(6.0 if trace.marker.size is None else trace.marker.size, dtype=float)
        area = (0.45 * pixels) ** 2
        if trace.marker.sizemode == "area":  # bubbles, whose largest one fills its cell
            area = pixels / trace.marker.sizeref / 2
        marker = _MARKERS.get(trace.marker.symbol or "circle", "o")
        axis.scatter(x, y, s=area, color=colour, marker=marker, linewidths=0, zorder=3, clip_on=False)
    if trace.error_y.array is not None:
        apart = np.nan_to_num(np.asarray(trace.error_y.array, dtype=float))
        axis.errorbar(x, y, yerr=apart, fmt="none", ecolor=colour, elinewidth=0.9, capsize=1.5)


def _heat(figure: Any, axis: Any, trace: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    z = np.asarray(trace.z, dtype=float)
    down, across = z.shape
    colours = LinearSegmentedColormap.from_list("amounts", [_over_white(colour) for _, colour in figures.AMOUNTS])
    edges: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.4} if across <= figures.MANY_CLIENTS else {}
    places = np.arange(across + 1) - 0.5, np.arange(down + 1) - 0.5
    cells = np.ma.masked_invalid(z)
    mesh = axis.pcolormesh(*places, cells, cmap=colours, vmin=trace.zmin, vmax=trace.zmax, **edges)
    mesh.set_rasterized(z.size > _MOST_CELLS)
    bar = figure.colorbar(mesh, ax=axis, pad=0.02, aspect=30)
    bar.outline.set_visible(False)


def _dress(axis: Any, source: Any, side: str, letters: int) -> None:
    """Name, scale, range and ticks of an axis."""

    def call(name: str, *values: Any, **more: Any) -> None:
        getattr(axis, name.format(side))(*values, **more)

    call("set_{}label", textwrap.fill(_text(source.title.text or ""), letters - 6))
    if source.type == "log":
        call("set_{}scale", "log")
    if source.range is not None:
        ends = source.range if source.type != "log" else [10**end for end in source.range]
        call("set_{}lim", *ends)
    if source.autorange == "reversed":
        call("set_{}lim", *sorted(getattr(axis, f"get_{side}lim")(), reverse=True))
    if source.showticklabels is False:
        call("set_{}ticks", [])
    elif source.tickvals is not None:
        texts = source.ticktext if source.ticktext is not None else [f"{value:g}" for value in source.tickvals]
        ticks = list(zip(source.tickvals, (_text(str(text)) for text in texts), strict=True))
        if side == "x":
            ticks = ticks[:: math.ceil(len(ticks) * max(len(text) for _, text in ticks) / letters)]
        call("set_{}ticks", [value for value, _ in ticks], [text for _, text in ticks])
        getattr(axis, f"{side}axis").set_ticks([], minor=True)
    elif source.tickformat == "d":
        from matplotlib.ticker import MaxNLocator

        getattr(axis, f"{side}axis").set_major_locator(MaxNLocator("auto", integer=True))
    if source.showgrid is not False:
        axis.grid(axis=side, color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)


def _entries(traces: Sequence[Any], letters: int) -> tuple[list[Any], int]:
    """The entries of the legend, one for each name, and its number of columns; none for a single name."""
    from matplotlib.lines import Line2D

    named = {trace.name: trace for trace in traces if trace.name and trace.type == "scatter"}
    if len(named) < 2:
        return [], 1
    entries = [
        Line2D(
            [],
            [],
            color=trace.line.color or trace.marker.color,
            linewidth=1.1 if "lines" in trace.mode else 0,
            linestyle=":" if trace.line.dash == "dot" else "-",
            marker=_MARKERS.get(trace.marker.symbol, "o"),
            markersize=3.5,
            markeredgewidth=0,
            label=textwrap.fill(_text(name), letters - 6),
        )
        for name, trace in named.items()
    ]
    longest = max(len(line) for entry in entries for line in str(entry.get_label()).split("\n"))
    return entries, max(1, min(4, letters // (longest + 6)))


def _text(words: str) -> str:
    """Plotly's text, which is HTML, as matplotlib's, in which a dollar begins a formula."""
    return unescape(words).replace("$", r"\$")


def _rgba(colour: str) -> tuple[float, float, float, float]:
    """``rgba(r,g,b,a)`` as matplotlib has it."""
    red, green, blue, alpha = (float(part) for part in colour.removeprefix("rgba(").removesuffix(")").split(","))
    return red / 255, green / 255, blue / 255, alpha


def _over_white(colour: str) -> tuple[float, float, float]:
    *parts, alpha = _rgba(colour)
    red, green, blue = (1 - alpha + alpha * part for part in parts)
    return red, green, blue

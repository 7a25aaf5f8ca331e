"""Drawing of figures by matplotlib: a `Plot`, which is data only, becomes an SVG or a PDF.

The SVG of a page takes its colours from the page, so that it suits light and dark ones, needs no script, and has the
value of each point and cell as a ``<title>``, which browsers show under the pointer. A paper's figure is the same plot
in black on white.
"""

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

Kind = Literal["pdf", "svg"]

POINTS = 40
"""Number of a line's points up to which each has a marker and a value under the pointer; of more, some have."""
MANY_CLIENTS = 50
BLUE = "#1f77c4"
"""Colour of a heat map's largest value; smaller ones are more transparent."""
PAGE_WIDTH = 400.0
"""Width of a page's figure in its own units; as many letters fit as a telephone shows in a readable size."""
_FONT = 10.5
_INK = "#010203"  # stands for the reader's colour of text
_BLACK = "#222222"
_THEME = (
    "svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e4e8ec;background:#14171b}}"
    "[pointer-events]:hover{stroke:currentColor;stroke-width:1.5}"
)
_SMALLEST = 115.0
"""Least height of a figure without its legend, in points."""
_MOST_CELLS = 600
"""Number of cells up to which each is an element with a title; more are one image."""
_FOREIGN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML, and so an SVG, can't hold."""
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        name: its name.
        log: whether it is logarithmic.
        range: its ends; None for those of the data.
        ticks: values and texts of the ticks; None for those that matplotlib finds.
        integer: whether it has integers only.
        grid: whether it has lines across.
    """

    name: str
    log: bool = False
    range: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    integer: bool = False
    grid: bool = True


@dataclass(frozen=True)
class Line:
    """Points of one name, joined or not.

    Attributes:
        name: its name in the legend; empty for none.
        x: the horizontal places, finite.
        y: the vertical places, finite.
        colour: ``#rrggbb``, or None for that of the text.
        marker: matplotlib's letter for the marker; empty for none.
        dash: matplotlib's style of the line; empty for points that are not joined.
        steps: whether the line goes by steps, first to the right.
        spread: half the height of a band around each point, or of a bar if ``bars``.
        bars: whether the spread is shown by bars.
        sizes: diameters of the markers in points at a font of 10 points; one number for all.
        opacity: of the markers.
        tips: the value of each point in words; empty for none.
        panel: number of the panel.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | None = None
    marker: str = ""
    dash: str = "-"
    steps: bool = False
    spread: Sequence[float] = ()
    bars: bool = False
    sizes: Sequence[float] | float = 5.0
    opacity: float = 1.0
    tips: Sequence[str] = ()
    panel: int = 0


@dataclass(frozen=True)
class Heat:
    """A matrix as colours.

    Attributes:
        values: ``(rows, columns)``; NaN is blank.
        most: the value of the strongest colour; 0 has a faint one.
        tip: the value of a cell in words, by row and column.
    """

    values: NDArray[np.float64]
    most: float
    tip: Callable[[int, int], str]


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        x: the horizontal axis of all panels.
        y: the vertical axis of each panel, from top to bottom.
        lines: the lines.
        heat: the matrix, if the figure is a heat map.
        height: height without the legend as a share of the width.
        title: words above, for a figure that is shown alone.
        names: texts beside points, moved where they cover the least of each other: x, y and text.
    """

    x: Axis
    y: Sequence[Axis]
    lines: Sequence[Line] = ()
    heat: Heat | None = None
    height: float = 0.62
    title: str = ""
    names: Sequence[tuple[float, float, str]] = field(default=())


def page_svg(plot: Plot, name: str, caption: str) -> str:
    """The plot as an element ``<svg id="figure-{name}">`` of a page, in the page's colours and font."""
    root = _svg(plot, name, caption)
    root.set("id", f"figure-{name}")
    root.set("class", "plot")
    return ElementTree.tostring(root, "unicode")


def themed_svg(plot: Plot, name: str, caption: str) -> str:
    """The plot as a file that other pages show, dark where the reader prefers that."""
    root = _svg(plot, name, caption)
    style = ElementTree.Element("style")
    style.text = _THEME
    root.insert(0, style)
    root.set("xmlns", _SVG[1:-1])
    return ElementTree.tostring(root, "unicode") + "\n"


def printed(plot: Plot, kind: Kind, width: float, name: str, caption: str) -> bytes:
    """The plot as a file for a paper, in black on white.

    Args:
        plot: the figure.
        kind: the format.
        width: width in points.
        name: the title in the file's facts.
        caption: the description in the file's facts.
    """
    facts = {"Title": name} | ({"CreationDate": None, "Subject": caption} if kind == "pdf" else {"Date": None})
    return _saved(plot, kind, width, 7.0, _BLACK, name, facts | ({"Description": caption} if kind == "svg" else {}))


def _saved(plot: Plot, kind: Kind, width: float, font: float, ink: str, name: str, facts: dict[str, Any]) -> bytes:
    from matplotlib import style as styles
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    target, own = io.BytesIO(), style(font, ink, name)
    with styles.context(["default", own]), warnings.catch_warnings():  # whatever the user has set for figures
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # pages have the reader's fonts
        figure = arranged(plot, width, font, ink)
        for part in (figure, *figure.axes):
            part.patch.set(facecolor="none", edgecolor="none")
        canvas = FigureCanvasSVG(figure) if kind == "svg" else FigureCanvasPdf(figure)
        getattr(canvas, f"print_{kind}")(target, metadata=facts)  # draws all once; `savefig` does so twice
    return _visible(target.getvalue().decode()).encode() if kind == "svg" else target.getvalue()


def _visible(text: str) -> str:
    """The text with a mark in place of each character that an SVG can't hold."""
    return _FOREIGN.sub("\N{REPLACEMENT CHARACTER}", text)


def style(font: float, ink: str, salt: str) -> dict[str, Any]:
    """Matplotlib's settings for a size of the font in points and a colour; equal ``salt`` gives equal files."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    sizes = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(sizes, font),
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, and is wider than a reader's font
        "text.parse_math": False,
        "axes.linewidth": 0.08 * font,
        "grid.alpha": 0.18,
        "grid.linewidth": 0.07 * font,
        "pdf.fonttype": 42,  # text that can be selected and that journals accept
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
    }


def arranged(plot: Plot, width: float, font: float, ink: str) -> Any:
    """The plot as a `matplotlib.figure.Figure`, within `style`; width and font in points."""
    from matplotlib.figure import Figure

    letters = round(1.6 * width / font)
    entries, columns = _entries(plot.lines, letters, font, ink)
    rows = itertools.zip_longest(*[iter(str(entry.get_label()).count("\n") + 1 for entry in entries)] * columns)
    legend = 1.6 * font * sum(max(filter(None, row)) for row in rows)
    size = width / 72, (max(_SMALLEST, plot.height * width) + legend) / 72
    figure = Figure(figsize=size, layout="constrained", dpi=72)
    panels = figure.subplots(len(plot.y), 1, sharex=True, squeeze=False)[:, 0]
    if plot.title:
        panels[0].set_title(textwrap.fill(plot.title, letters - 6), loc="left", fontsize=font)
    for i, line in enumerate(plot.lines):
        _draw(panels[line.panel], line, font / 10, ink, f"tips-{i}")
    if plot.heat is not None:
        _draw_heat(figure, panels[0], plot.heat)
    for panel, axis in zip(panels, plot.y, strict=True):
        _dress(panel, axis, "y", letters)
        panel.spines[["top", "right"]].set_visible(False)
    beside = max((len(text) for axis in plot.y for _, text in axis.ticks or ()), default=0)
    _dress(panels[-1], plot.x, "x", letters - beside - (8 if plot.heat is not None else 0))
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, handlelength=1.8)
    _place(figure, panels[0], plot.names, font)
    return figure


def _draw(axis: Any, line: Line, scale: float, ink: str, gid: str) -> None:
    colour = line.colour or ink
    x, y, spread = (np.asarray(values, dtype=float) for values in (line.x, line.y, line.spread))
    if line.dash:
        shape = "steps-post" if line.steps else "default"
        axis.plot(x, y, color=colour, linestyle=line.dash, linewidth=1.6 * scale, drawstyle=shape)
    if line.bars and spread.any():
        some = spread > 0
        bars: dict[str, Any] = {"color": colour, "elinewidth": 1.3 * scale, "capsize": 2 * scale}
        axis.errorbar(x[some], y[some], yerr=spread[some], fmt="none", **bars)
    elif len(spread):
        axis.fill_between(x, y - spread, y + spread, color=colour, alpha=0.18, linewidth=0)
    if line.marker or line.tips:
        places = pointed(line)
        area = np.broadcast_to((np.asarray(line.sizes, dtype=float) * scale) ** 2, x.shape)[places]
        look: dict[str, Any] = {"color": colour, "marker": line.marker or "o", "linewidths": 0, "zorder": 3}
        look |= {"clip_on": False, "gid": gid if line.tips else None, "alpha": line.opacity if line.marker else 0.0}
        axis.scatter(x[places], y[places], s=area, **look)


def pointed(line: Line) -> list[int]:
    """The numbers of the points that have a marker and a tip: all, or of a long line some `POINTS` with the last."""
    number = len(line.x)
    every = max(1, math.ceil(number / POINTS)) if line.dash else 1
    return sorted({*range(0, number, every), *range(number)[-1:]})


def _draw_heat(figure: Any, axis: Any, heat: Heat) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba

    colours = LinearSegmentedColormap.from_list("amounts", [to_rgba(BLUE, 0.15), to_rgba(BLUE)])
    scale = ScalarMappable(Normalize(0, heat.most or 1.0), colours)
    down, across = heat.values.shape
    rows, columns = np.nonzero(np.isfinite(heat.values))
    if heat.values.size > _MOST_CELLS:
        axis.imshow(scale.to_rgba(np.ma.masked_invalid(heat.values)), aspect="auto", interpolation="none")
    else:
        corners = 0.47 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
        cells = np.stack([columns, rows], axis=1)[:, None] + corners
        values = scale.to_rgba(heat.values[rows, columns])
        axis.add_collection(PolyCollection(list(cells), facecolors=values, linewidths=0, gid="cells"))
    axis.set_xlim(-0.5, across - 0.5)
    axis.set_ylim(down - 0.5, -0.5)
    bar = figure.colorbar(scale, ax=axis, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)


def _dress(panel: Any, axis: Axis, side: str, letters: int) -> None:
    """Name, scale, range and ticks of an axis."""
    from matplotlib.ticker import MaxNLocator

    own = panel.xaxis if side == "x" else panel.yaxis
    own.set_label_text(textwrap.fill(axis.name, letters - 6))
    if axis.log:
        getattr(panel, f"set_{side}scale")("log")
    if axis.range is not None:
        getattr(panel, f"set_{side}lim")(*axis.range)
    if axis.ticks is not None:
        ticks = list(axis.ticks)
        if side == "x" and ticks:
            ticks = ticks[:: math.ceil(len(ticks) * (1 + max(len(text) for _, text in ticks)) / letters)]
        own.set_ticks([value for value, _ in ticks], [text for _, text in ticks])
        own.set_ticks([], minor=True)
    elif axis.integer:
        own.set_major_locator(MaxNLocator("auto", integer=True))
    panel.grid(axis.grid, axis=side)
    panel.set_axisbelow(True)
    own.set_tick_params(which="both", length=0)


def _entries(lines: Sequence[Line], letters: int, font: float, ink: str) -> tuple[list[Any], int]:
    """The entries of the legend, one for each name, and its number of columns; none for a single name."""
    from matplotlib.lines import Line2D

    named = {line.name: line for line in reversed(lines) if line.name}
    if len(named) < 2:
        return [], 1
    width = letters - 6
    wrapped = {name: textwrap.fill(name, width) for name in dict.fromkeys(line.name for line in lines if line.name)}
    entries = [
        Line2D(
            [],
            [],
            color=named[name].colour or ink,
            linewidth=0.16 * font,
            linestyle=named[name].dash or "none",
            marker=named[name].marker or None,
            markersize=0.55 * font,
            markeredgewidth=0,
            label=text,
        )
        for name, text in wrapped.items()
    ]
    longest = max(len(line) for text in wrapped.values() for line in text.split("\n"))
    return entries, max(1, min(4, len(entries), letters // (longest + 6)))


Box = tuple[float, float, float, float]
"""Left, bottom, right and top in points."""


def _place(figure: Any, axis: Any, names: Sequence[tuple[float, float, str]], font: float) -> None:
    """Write each name beside its point, where it covers the least of other names and points."""
    if not names:
        return
    figure.draw_without_rendering()  # which arranges it
    points = [tuple(map(float, axis.transData.transform((x, y)))) for x, y, _ in names]
    taken: list[Box] = [(x - 0.5 * font, y - 0.5 * font, x + 0.5 * font, y + 0.5 * font) for x, y in points]
    edge = axis.get_window_extent()
    for (x, y), (*_, text) in zip(points, names, strict=True):
        wide, high, gap = 0.62 * font * len(text), font, 0.6 * font
        lefts = [(x - wide / 2, y + gap), (x - wide / 2, y - gap - high), (x + gap, y - high / 2)]
        lefts += [(x - gap - wide, y - high / 2), (x + gap, y - gap - high), (x - gap - wide, y + gap)]
        boxes: list[Box] = []
        for left, low in lefts:
            start = min(max(left, edge.x0), max(edge.x1 - wide, edge.x0))
            base = min(max(low, edge.y0), edge.y1 - high)
            boxes.append((start, base, start + wide, base + high))
        box = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        label = axis.annotate(text, box[:2], xycoords="figure points", annotation_clip=False, va="bottom")
        label.set_in_layout(False)


def _overlap(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0)


_NUMBERS = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r"#([\w.-]+)")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "points")


def _svg(plot: Plot, name: str, caption: str) -> ElementTree.Element:
    """Matplotlib's SVG without its facts, sizes, fonts and numbers of groups, with titles, in the reader's colour."""
    facts = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    content = _saved(plot, "svg", PAGE_WIDTH, _FONT, _INK, name, facts)
    root = ElementTree.fromstring(content.decode().replace(_INK, "currentColor"))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.text = element.text if element.tag == "text" else None
        element.tail = None
    _add_tips(root, plot)
    for element in root.iter():
        _shorten(element)
    used = {
        found for element in root.iter() for value in element.attrib.values() for found in _REFERENCE.findall(value)
    }
    _flatten(root, used)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": _visible(caption), "font-family": "system-ui, sans-serif"}
    root.attrib |= {"font-size": f"{_FONT:g}", "fill": "currentColor"}
    return root


def _add_tips(root: ElementTree.Element, plot: Plot) -> None:
    """Add the titles, in the order in which matplotlib draws the elements."""
    tips = {f"tips-{i}": [line.tips[k] for k in pointed(line)] for i, line in enumerate(plot.lines) if line.tips}
    if plot.heat is not None and plot.heat.values.size <= _MOST_CELLS:
        tips["cells"] = [plot.heat.tip(int(i), int(j)) for i, j in np.argwhere(np.isfinite(plot.heat.values))]
    for group in root.iter("g"):
        words = tips.get(group.get("id", ""))
        if words is not None:
            for element, text in zip(_marks(group), words, strict=True):
                _make_circle(element)
                element.set("pointer-events", "all")
                ElementTree.SubElement(element, "title").text = _visible(text)


def _make_circle(element: ElementTree.Element) -> None:
    """Turn an outline of curves, which is matplotlib's of a circle, into an element of a fifth of its length."""
    outline = element.get("d", "")
    if element.tag == "path" and "C" in outline:
        numbers = np.array([float(number) for number in re.findall(r"-?[\d.]+", outline)]).reshape(-1, 2)
        low, high = numbers.min(axis=0), numbers.max(axis=0)
        del element.attrib["d"]
        element.tag = "circle"
        x, y = (low + high) / 2
        element.attrib |= {"cx": f"{x:.2f}", "cy": f"{y:.2f}", "r": f"{(high[0] - low[0]) / 2:.2f}"}


def _marks(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """The drawn elements below, without definitions."""
    for child in element:
        if child.tag in ("use", "path"):
            yield child
        elif child.tag == "g":
            yield from _marks(child)


def _shorten(element: ElementTree.Element) -> None:
    """Write an element's style as attributes, and its numbers with two digits."""
    for pair in element.attrib.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in pair.partition(":"))
        if key == "font":
            key, value = "font-size", value.split()[0]
        if key and key != "font-family" and (key, value) not in _USUAL:
            element.set(key, value)
    for key in _GEOMETRY:
        if value := element.get(key, ""):
            element.set(key, " ".join(_NUMBERS.sub(_two_digits, value).split()))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if f"{_XLINK}href" in element.attrib:
        element.set("href", element.attrib.pop(f"{_XLINK}href", ""))


def _two_digits(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


_USUAL = {("font-size", f"{_FONT:g}px"), ("stroke-linecap", "butt"), ("fill", "currentColor"), ("stroke-width", "0")}
"""Attributes that elements have without saying so."""


def _flatten(element: ElementTree.Element, used: set[str]) -> None:
    """Remove names to which nothing refers, and groups without attributes."""
    children: list[ElementTree.Element] = []
    for child in element:
        _flatten(child, used)
        if child.get("id", "") not in used:
            child.attrib.pop("id", None)
        empty = child.tag in ("metadata", "style") or (child.tag in ("g", "defs") and not len(child))
        unseen = child.tag == "path" and child.get("fill") == "none" and child.get("stroke") is None
        blank = unseen and not len(child)  # one with a title is under the pointer
        if child.tag == "g" and not child.attrib:
            children += list(child)
        elif not empty and not blank:
            children.append(child)
    element[:] = children

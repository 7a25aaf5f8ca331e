"""The style of the report's figures: colours, markers, axes and legends.

Colour-blind readers can distinguish the colours (after Okabe and Ito, 2008), whose medium lightness suits white and
black pages; each label has its own marker too. Labels are escaped, since plotly parses HTML in its texts.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from fedstill.report.record import RunRecord

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

"""Parts of a report's page, which needs no network, no server and no other file: sections, tables, figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

# forbids the browser to fetch anything, whatever a label or a name contains
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

PLOT = '<div class="plot"'
PLOTLY = "plotly-cartesian.min.js"
"""plotly.js with its cartesian figures only, which is a third of the whole; see ``assets/README.md``."""

SHAPES = {
    "circle": '<circle cx="13" cy="7" r="4.5"/>',
    "square": '<rect x="9" y="3" width="8" height="8"/>',
    "diamond": '<path d="M13 1.5 18 7l-5 5.5L8 7z"/>',
    "triangle-up": '<path d="M13 2l5 9H8z"/>',
    "cross": '<path d="M11.5 2h3v3.5h3.5v3h-3.5V12h-3V8.5H8v-3h3.5z"/>',
    "x": '<path d="M10 2l3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3-3-3z"/>',
    "star": '<path d="M13 1l1.5 4.3H19l-3.6 2.7 1.4 4.5L13 9.8 9.2 12.5l1.4-4.5L7 5.3h4.5z"/>',
    "triangle-down": '<path d="M13 12l5-9H8z"/>',
}
"""Markers of figures, each in a box of 26 x 14 around (13, 7)."""
LONG = 24
"""Number of characters from which text makes a column wide."""

_DASHES = {"dot": "2 3", "dash": "5 3"}


def asset(name: str) -> str:
    """The content of a file in ``assets/``."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def framed(title: str, body: str) -> str:
    """A whole page, with plotly's script if there are figures."""
    plotly = f"<script>{asset(PLOTLY)}</script>\n" if PLOT in body else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n{plotly}</head>\n"
        f"<body>\n<main>\n{body}</main>\n<script>\n{asset('page.js')}</script>\n</body>\n</html>\n"
    )


def section(heading: str, content: str, level: int = 2, *, name: str = "") -> str:
    """A section; empty without content. ``name`` is the target of links to it."""
    target = f' id="{escape(name)}"' if name else ""
    head = f"<h{level}>{escape(heading)}</h{level}>"
    return f"<section{target}>\n{head}\n{content}</section>\n" if content else ""


def folded(summary: str, content: str) -> str:
    """Content that is hidden until a reader opens it; empty without content."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n" if content else ""


def commands(lines: Iterable[str]) -> str:
    """Commands, with a button that copies them."""
    words = (" ".join(f"<span>{escape(word)}</span>" for word in line.split(" ")) for line in lines)
    text = "".join(f"<code>{line}\n</code>" for line in words)
    return f'<div class="command"><pre>{text}</pre><button type="button" class="copy">Copy</button></div>\n'


def figure(plot: Any | None, name: str, caption: str) -> str:
    """A plotly figure with its legend and a caption; empty if there is none.

    Where ``layout.meta.ways`` has the axes of several views, a switch chooses between them.
    """
    if plot is None:
        return ""
    content = plot.to_json().replace("<", "\\u003c")  # no label ends the script element
    ways = list((plot.layout.meta or {}).get("ways", ()))
    return (
        f"<figure>\n{_legend(plot)}{_switch(ways, name)}"
        f'{PLOT} id="figure-{name}" style="height:{plot.layout.height}px" role="group" aria-label="{escape(caption)}">'
        f'</div><script type="application/json">{content}</script>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
    )


def _switch(ways: Sequence[str], name: str) -> str:
    if len(ways) < 2:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="{name}" value="{way}"{"" if i else " checked"}> {way}</label>'
        for i, way in enumerate(ways)
    )
    return f'<fieldset class="ways"><legend>Bytes</legend>{choices}</fieldset>\n'


def _legend(plot: Any) -> str:
    """A button for each name in the figure, which hides and shows it; none for a single name."""
    traces = {trace.name: trace for trace in plot.data if trace.name and trace.type == "scatter"}
    if len(traces) < 2:
        return ""
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-name="{name}">{_sample(trace)}{name}</button></li>'
        for name, trace in traces.items()  # names are escaped, since plotly reads HTML in them
    )
    return f'<ul class="key">{items}</ul>\n'


def _sample(trace: Any) -> str:
    colour = trace.line.color or trace.marker.color
    dash = _DASHES.get(trace.line.dash or "", "")
    line = f'<path d="M1 7h24" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    line = line if "lines" in trace.mode else ""
    shape = SHAPES.get(trace.marker.symbol or "", "")
    return f'<svg viewBox="0 0 26 14" aria-hidden="true" fill="{colour}">{line}{shape}</svg>'


def data_table(
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    words: Sequence[int],
    *,
    wide: Sequence[int] = (),
    caption: str = "",
) -> str:
    """A table; ``words`` are the columns of text, ``wide`` those of them with long text (found by length, too)."""
    lines = [tuple(line) for line in lines]
    wide = [*wide, *(i for i in words if any(len(line[i]) > LONG for line in lines))]
    kinds = [" ".join(["words"] * (i in words) + ["wide"] * (i in wide)) for i in range(len(headings))]
    head = "".join(f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(headings, kinds, strict=True))
    body = ""
    for line in lines:
        first, *rest = (escape(cell) for cell in line)
        body += f'<tr><th scope="row" class="{kinds[0]}">{first}</th>'
        body += "".join(f'<td class="{k}">{cell}</td>' for cell, k in zip(rest, kinds[1:], strict=True)) + "</tr>\n"
    return _scroll(f'<table class="data"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>', caption)


def matrix(
    corner: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[tuple[str, float | None]]],
    *,
    across: str = "",
    caption: str = "",
    dense: bool = False,
) -> str:
    """A heat map with numbers: each cell has a text, and a share in [0, 1] of the darkest colour or None.

    Args:
        corner: heading of the first column.
        columns: headings of the other columns.
        rows: the cells of each row by its heading.
        across: heading over all columns but the first.
        caption: a sentence below.
        dense: whether to use small cells.
    """
    over = f'<tr><td></td><th class="across" colspan="{len(columns)}">{escape(across)}</th></tr>' if across else ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in (corner, *columns))
    body = ""
    for heading, line in rows.items():
        styled = ((text, "" if share is None else f' style="--share:{0.55 * share:.3g}"') for text, share in line)
        cells = "".join(f"<td{style}>{escape(text)}</td>" for text, style in styled)
        body += f'<tr><th scope="row">{escape(heading)}</th>{cells}</tr>\n'
    kind = "dense" if dense else "long"
    table = f'<table class="matrix {kind}"><thead>{over}<tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
    return _scroll(table, caption)


def _scroll(table: str, caption: str) -> str:
    about = f'<p class="note">{escape(caption)}</p>\n' if caption else ""
    return f'<div class="scroll" tabindex="0">{table}</div>\n{about}'


def listed(value: object) -> str:
    """A value as indented JSON, for reading."""
    return f"<pre>{escape(json.dumps(value, indent=2, default=str))}</pre>\n"

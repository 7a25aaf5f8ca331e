"""Parts of a report's page, which needs no network, no server and no other file: sections, tables, figures."""

import json
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from fedstill.report import markup
from fedstill.report.drawing import Plot, page_svg
from fedstill.report.figures import Way
from fedstill.report.markup import part

# forbids the browser to fetch anything, whatever a label or a name contains
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

LONG = 24
"""Number of characters from which text makes a column wide."""


def framed(title: str, body: Markup) -> str:
    """A whole page."""
    return markup.page(title=title, body=body, policy=POLICY)


def section(heading: str, content: Markup, level: int = 2, *, name: str = "") -> Markup:
    """A section; empty without content. ``name`` is the target of links to it."""
    return part("section", heading, content, level, name) if content else Markup()


def folded(summary: str, content: Markup) -> Markup:
    """Content that is hidden until a reader opens it; empty without content."""
    return part("folded", summary, content) if content else Markup()


def commands(lines: Iterable[str]) -> Markup:
    """Commands, with a button that copies them."""
    return part("commands", [line.split(" ") for line in lines])


def figure(plot: Plot | Mapping[Way, Plot] | None, name: str, caption: str) -> Markup:
    """A figure with a caption, or several of which a reader chooses one by the direction of bytes; empty if none."""
    if not plot:
        return Markup()
    plots: dict[str, Plot] = {"": plot} if isinstance(plot, Plot) else {way: one for way, one in plot.items()}
    names = {way: f"{name}-{way.replace(' ', '-')}" if way else name for way in plots}
    return part("figure", name, {way: page_svg(one, names[way], caption) for way, one in plots.items()}, caption)


def data_table(
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    words: Sequence[int],
    *,
    wide: Sequence[int] = (),
    caption: str = "",
) -> Markup:
    """A table; ``words`` are the columns of text, ``wide`` those of them with long text (found by length, too)."""
    lines = [tuple(line) for line in lines]
    wide = [*wide, *(i for i in words if any(len(line[i]) > LONG for line in lines))]
    kinds = [" ".join(["words"] * (i in words) + ["wide"] * (i in wide)) for i in range(len(headings))]
    return part("data_table", headings, kinds, lines, caption)


def matrix(
    corner: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[tuple[str, float | None]]],
    *,
    across: str = "",
    caption: str = "",
    dense: bool = False,
) -> Markup:
    """A heat map with numbers: each cell has a text, and a share in [0, 1] of the darkest colour or None.

    Args:
        corner: heading of the first column.
        columns: headings of the other columns.
        rows: the cells of each row by its heading.
        across: heading over all columns but the first.
        caption: a sentence below.
        dense: whether to use small cells.
    """
    shown = {
        heading: [(text, None if share is None else f"{0.55 * share:.3g}") for text, share in line]
        for heading, line in rows.items()
    }
    return part("matrix", corner, columns, shown, across, caption, "dense" if dense else "long")


def listed(value: object) -> Markup:
    """A value as indented JSON, for reading."""
    return part("preformatted", json.dumps(value, indent=2, default=str))

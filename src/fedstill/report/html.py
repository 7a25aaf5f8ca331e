"""Parts of a report's page, which needs no network, no server and no other file: sections, tables, figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from fedstill.report.drawing import Plot, page_svg
from fedstill.report.figures import Way

# forbids the browser to fetch anything, whatever a label or a name contains
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

LONG = 24
"""Number of characters from which text makes a column wide."""


def asset(name: str) -> str:
    """The content of a file in ``assets/``."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def framed(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n"
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


def figure(plot: Plot | Mapping[Way, Plot] | None, name: str, caption: str) -> str:
    """A figure with a caption, or several of which a reader chooses one by the direction of bytes; empty if none."""
    if not plot:
        return ""
    drawn = {"": plot} if isinstance(plot, Plot) else plot
    svgs = ""
    for way, one in drawn.items():
        svg = page_svg(one, f"{name}-{way.replace(' ', '-')}" if way else name, caption)
        svgs += f'<div class="way" data-way="{way}">{svg}</div>\n' if len(drawn) > 1 else f"{svg}\n"
    return f"<figure>\n{_switch(list(drawn), name)}{svgs}<figcaption>{escape(caption)}</figcaption>\n</figure>\n"


def _switch(ways: Sequence[str], name: str) -> str:
    if len(ways) < 2:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="{name}" value="{way}"{"" if i else " checked"}> {way}</label>'
        for i, way in enumerate(ways)
    )
    return f'<fieldset class="ways"><legend>Bytes</legend>{choices}</fieldset>\n'


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

"""Functions that several commands use."""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedstill.base.errors import FedstillError

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from collections.abc import Collection, Iterable, Mapping

    from rich.console import Console, RenderableType
    from rich.table import Table

_WIDE = 160
"""Width of a table in a file or a pipe."""


class Bad(FedstillError):
    """An error of the user, printed as one sentence; exit code 2."""


def terminal(*, stderr: bool = False) -> "Console":
    """The console on standard output, or on standard error."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for main, which says how to go on

    return Terminal(stderr=stderr)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; numbers that JSON lacks become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str))


def finite(value: Any) -> Any:
    """``value`` with None for infinite numbers and NaN, in dictionaries and lists too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_found(found: "tuple[Mapping[str, Any], Iterable[RenderableType]]", *, as_json: bool) -> None:
    """Print facts as JSON, or the tables and lines of text that show them."""
    facts, parts = found
    if as_json:
        print_json(facts)
        return
    console = terminal()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def table(
    heads: Sequence[str], rows: "Iterable[Sequence[str]]", *, whole: "Collection[str]" = (), least: int = 1
) -> "Table":
    """A table of text under headings, without markup; unprintable characters are replaced.

    Args:
        heads: the headings.
        rows: the cells.
        whole: headings of columns whose cells stay on one line; those of the others are folded.
        least: the width to which the first column does not shrink.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from fedstill.report.record import plain

    columns = [
        Column(plain(head), overflow="fold", no_wrap=head in whole, min_width=least if place == 0 else None)
        for place, head in enumerate(heads)
    ]
    made = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        made.add_row(*map(plain, row))
    return made


def print_wide(table: "RenderableType") -> None:
    """Print a table, or several; in a file or a pipe it may be wider than a terminal."""
    console = terminal()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


def print_sentences(sentences: Iterable[str]) -> None:
    """Print sentences below a table, each whole."""
    for sentence in sentences:
        terminal().print(sentence, soft_wrap=True, markup=False, highlight=False)


def asks_help(words: Sequence[str]) -> bool:
    """Whether the words ask for a help text."""
    return bool({"-h", "--help"} & {*words})


def line_of(words: Sequence[str]) -> str:
    """The command line with these words."""
    return shlex.join(["fedstill", *words])


def usage(words: Sequence[str], text: str) -> bool:
    """Print a command's usage if ``words`` start with ``--help``; returns whether they do.

    Raises:
        SystemExit: with code 2, if there are no words.
    """
    if not words:
        print(text, file=sys.stderr)
        raise SystemExit(2)
    if words[0] in ("-h", "--help"):
        print(text)
        return True
    return False

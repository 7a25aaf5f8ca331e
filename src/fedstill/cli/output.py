"""Functions that several commands use."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstill.base.errors import FedstillError

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from collections.abc import Iterable, Mapping

    from rich.console import Console, RenderableType

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


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of text under headings; nothing without rows. Unprintable characters are replaced."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from fedstill.schema import clean

    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell, 300)) for cell in row))  # no markup: words of a server are among them
    print_wide(table)


def print_wide(table: "RenderableType") -> None:
    """Print a table, or several; in a file or a pipe it may be wider than a terminal."""
    console = terminal()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


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

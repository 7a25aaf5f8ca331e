"""Functions that several commands use."""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from rich.console import Console


class Bad(Exception):
    """An error of the user, printed as one sentence; exit code 2."""


def terminal() -> "Console":
    """The console on standard output."""
    from rich.console import Console

    return Console()


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


def no_more(words: Sequence[str]) -> None:
    """Refuse further arguments."""
    if words:
        raise Bad(f"'{words[0]}' is an unexpected argument")

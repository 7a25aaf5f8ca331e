"""What the commands share."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class Bad(Exception):
    """Something the user can mend: printed as one sentence, exit code 2."""


def terminal() -> "Console":
    """The terminal."""
    from rich.console import Console

    return Console()


def line_of(words: Sequence[str]) -> str:
    """The command line of ``words``, for the record."""
    return shlex.join(["fedstill", *words])


def no_more(words: Sequence[str]) -> None:
    """Refuse what is left over."""
    if words:
        raise Bad(f"'{words[0]}' is one word too many here")

"""Names that a user gives: suggestions for unknown ones, and code of the user's own."""

import difflib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def suggestion(word: str, words: Iterable[str]) -> str:
    """``"; did you mean WORD?"`` with the most similar of ``words``, or an empty text."""
    similar = difflib.get_close_matches(word, list(words), 1)
    return f"; did you mean {similar[0]}?" if similar else ""


def is_file(place: str) -> bool:
    """Whether ``place`` names code in a file, as ``path/to/file.py:name``, not in a module."""
    return place.rpartition(":")[0].endswith(".py")


def import_own(place: str) -> Any:
    """The object at ``package.module:name`` or ``path/to/file.py:name``.

    A file's folder joins Python's path, as if the file were a script, so that worker processes find the module too.

    Raises:
        ImportError: there is no such module or file, or another module has the file's name; one sentence.
        AttributeError: the module has no such name.
    """
    module, _, name = place.rpartition(":")
    if is_file(place):
        path = Path(module).expanduser().resolve()
        if not path.is_file():
            raise ImportError(f"there is no file {module}")
        _add(str(path.parent))
        found = import_module(path.stem).__file__
        if found is None or Path(found).resolve() != path:
            raise ImportError(f"Python has another module '{path.stem}', {found}; rename the file")
        module = path.stem
    return getattr(import_module(module), name)


def is_own(code: Callable[..., Any]) -> bool:
    """Whether a class or function is the user's own, not one of fedstill."""
    return code.__module__.partition(".")[0] != __name__.partition(".")[0]


@cache  # what Python has imported stays as it is when the file changes
def source_digest(code: Callable[..., Any]) -> str | None:
    """SHA-256 of the source file of a class or function; None for fedstill's own and for code without a file."""
    if not is_own(code):
        return None
    try:
        file = inspect.getsourcefile(code)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    except (OSError, TypeError):
        return None


def add_working_folder() -> None:
    """Let Python find modules in the working folder, after all others."""
    _add(os.getcwd())


def _add(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)

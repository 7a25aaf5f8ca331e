"""Names that a user gives: suggestions for unknown ones, and code of the user's own."""

import ast
import difflib
import hashlib
import inspect
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fedstill.base.files import expanded


def suggestion(word: str, words: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean WORD?"`` with the most similar of ``words`` after a prefix, or an empty text."""
    similar = difflib.get_close_matches(word, list(words), 1)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""


def is_label(name: object) -> bool:
    """Whether a name can be that of a row, which is also the name of a folder and the beginning of flags."""
    return isinstance(name, str) and name.replace("-", "_").isidentifier() and len(name.encode()) <= 200


def nfc(name: str) -> str:
    """The name with its letters composed, as equal names are then equal texts: a Mac writes files' names decomposed."""
    return unicodedata.normalize("NFC", name)


def twins(names: Iterable[str]) -> list[list[str]]:
    """Groups of different names that differ in capitals, blanks, unseen characters or a letter's composition only."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        seen = "".join(letter for letter in nfc(name) if unicodedata.category(letter) != "Cf")
        alike.setdefault(" ".join(seen.casefold().split()), []).append(name)
    return [group for group in alike.values() if len(group) > 1]


def repeated(names: Iterable[str]) -> str | None:
    """The first name that stands more than once; None if there is none."""
    return next((name for name, number in Counter(names).items() if number > 1), None)


def is_file(place: str) -> bool:
    """Whether ``place`` names code in a file, as ``path/to/file.py:name``, not in a module."""
    return place.rpartition(":")[0].endswith(".py")


def import_own(place: str) -> Any:
    """The object at ``package.module:name`` or ``path/to/file.py:name``.

    A file's folder joins Python's path, as if the file were a script, so that worker processes find the module too.

    Raises:
        ImportError: there is no such module or file, or another module has the file's name.
        AttributeError: the module has no such name.
    """
    module, _, name = place.rpartition(":")
    if is_file(place):
        path = expanded(module).resolve()
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
def source_digests(code: Callable[..., Any]) -> dict[str, str]:
    """SHA-256 of the source file of a class or function, under the empty name, and of the user's files that it imports.

    These are the modules and packages beside it, by their paths, also those that they import in turn; of an installed
    package, those of the same package. Empty for fedstill's own code and for code without a file.
    """
    while isinstance(code, partial):
        code = code.func
    first = _file_of(code) if is_own(code) else None
    if first is None or (content := _read(first)) is None:
        return {}
    depth = 0 if code.__module__ == "__main__" else code.__module__.count(".") + (first.name == "__init__.py")
    root = first.parents[min(depth, len(first.parents) - 1)]
    alone = "" if not {"site-packages", "dist-packages"} & {*root.parts} else code.__module__.partition(".")[0]
    found, left, seen = {first: content}, [first], {first.resolve()}
    while left:
        for place in _imported(found[this := left.pop()], this, root):
            if alone not in ("", _top(place, root)) or not _is_from(root, _top(place, root)):
                continue
            if (content := _read(place)) is not None and (real := place.resolve()) not in seen:  # links may be circular
                seen.add(real)
                found[place] = content
                left.append(place)
    digests = {place: hashlib.sha256(content).hexdigest() for place, content in sorted(found.items())}
    return {"": digests.pop(first), **{place.relative_to(root).as_posix(): digest for place, digest in digests.items()}}


def _file_of(code: Callable[..., Any]) -> Path | None:
    """The source file of the module that a class or function says it is in; None without one."""
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    with suppress(OSError, TypeError):
        file = file or inspect.getsourcefile(code)
    return Path(file).absolute() if file else None


def _is_from(root: Path, name: str) -> bool:
    """Whether Python's module of this name, if it has imported one, is below ``root``."""
    if name not in sys.modules:
        return True
    module = sys.modules[name]
    places = [file] if (file := getattr(module, "__file__", None)) else list(getattr(module, "__path__", ()))
    return any(Path(place).absolute().is_relative_to(root) for place in places)


def _read(file: Path) -> bytes | None:
    """The content of a file; None if there is none, or it cannot be read."""
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError:  # a name that is too long, say
        return None


def _imported(content: bytes, place: Path, root: Path) -> list[Path]:
    """The files below ``root`` that the code of a file may import, and those of the packages that it is in."""
    names: list[tuple[str, ...]] = [place.relative_to(root).parts[:-1]]
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not what Python has imported
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = place.relative_to(root).parts[: -node.level] if node.level else ()
            base = (*package, *(node.module.split(".") if node.module else ()))
            names += [base, *((*base, alias.name) for alias in node.names)]
    parts = {name[:length] for name in names for length in range(1, len(name) + 1)}
    places = [root.joinpath(*part) for part in sorted(parts) if part]
    return [file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py")]


def _top(place: Path, root: Path) -> str:
    """The name of the module or package directly below ``root`` that has a file."""
    return place.relative_to(root).parts[0].removesuffix(".py")


def add_working_folder() -> None:
    """Let Python find modules in the working folder, after all others."""
    _add(os.getcwd())


def _add(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)

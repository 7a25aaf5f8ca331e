"""The methods, one file each."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import fedstill
from fedstill.base import lookup
from fedstill.base.files import expanded

if TYPE_CHECKING:  # the names of the methods need no torch
    from fedstill.protocol import Method

TABLE = {
    module.replace("_", "-"): place
    for place in fedstill._PLACES.values()
    for package, _, module in (place.partition(":")[0].rpartition("."),)
    if package == __name__
}
"""Name on the command line -> ``module:class``, read from ``fedstill/__init__.pyi``. A new method is one file, one line
there and one page in docs/methods/."""


def find(name: str) -> type["Method"]:
    """The class of a method.

    Args:
        name: one of `TABLE`; for a method of your own, ``package.module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ValueError: there is no such method.
    """
    from fedstill.protocol import Method

    target = TABLE.get(name, name)
    if Path(target).suffix == ".py":
        raise ValueError(f"'{name}' is a file; {_classes_of(Path(target))}")
    if ":" not in target:
        near = lookup.suggestion(name, TABLE)
        hint = (
            f"{near} (all: fedstill methods)" if near else f"; choose {', '.join(TABLE)}, or file.py:Class of your own"
        )
        raise ValueError(f"there is no method '{name}'{hint}")
    try:
        kind = lookup.import_own(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"method '{name}' cannot be loaded ({error}); name a class in a file (mine.py:Class), in a module of the "
            "working folder or in an installed package (package.module:Class)"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"'{name}' is not a method; name a class derived from fedstill.protocol.Method")
    return kind


def _classes_of(file: Path) -> str:
    """Names to give in place of a file: its classes derived from a method of fedstill; the file is not run."""
    try:
        tree = ast.parse(expanded(file).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "msg", None) or error
        return f"it cannot be read ({why}); give a file with a class of your own (mine.py:Class)"
    known = {"Method", *(place.rpartition(":")[2] for place in TABLE.values())}
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).rpartition(".")[2] in known for b in node.bases):
            known.add(node.name)
            found.append(f"{file}:{node.name}")
    return f"name its class: {' or '.join(found) or f'{file}:Class'}"

"""What modules of fedstill declare, from their source: help texts and lists need none of the torch that these import.

A name's own statement is executed, with the constants, types, functions and classes that it names. Of a class, these
are its fields and class methods; limits and validators are left out, so its values are defaults to show, not settings
to run with.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import fedstill
from fedstill import methods
from fedstill.base.settings import Settings

_LIGHT = {
    "abc", "annotated_types", "collections.abc", "dataclasses", "math", "os", "pathlib", "pydantic", "typing",
    "typing_extensions",
}  # fmt: skip
"""Modules of other packages that may be imported."""


def declared(place: str) -> type[Settings]:
    """The class at ``module:class`` of fedstill, with its fields, their defaults and docstrings.

    Raises:
        LookupError: the class uses something that only an import can give.
    """
    kind = value(place)
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        raise LookupError(f"{place} is not a settings class")
    return kind


@cache
def constants(place: str) -> dict[str, Any]:
    """The class's docstring, as ``__doc__``, and those of its annotated values that are literals, inherited or its own.

    Raises:
        LookupError: there is no such class.
    """
    module, _, name = place.partition(":")
    statement = _bindings(module).get(name)
    if isinstance(statement, ast.ImportFrom):
        return constants(f"{statement.module}:{_original(statement, name)}")
    if not isinstance(statement, ast.ClassDef):
        raise LookupError(f"{place} is not a class")
    values: dict[str, Any] = {}
    for base in reversed(statement.bases):
        if isinstance(base, ast.Name) and _is_of_fedstill(module, base.id):
            values |= constants(f"{module}:{base.id}")
    for part in statement.body:
        if (
            isinstance(part, ast.AnnAssign)
            and isinstance(part.target, ast.Name)
            and isinstance(part.value, ast.Constant)
        ):
            values[part.target.id] = part.value.value
    return {**values, "__doc__": ast.get_docstring(statement)}


def docstring(module: str) -> str:
    """The docstring of a module of fedstill."""
    return ast.get_docstring(_tree(module)) or ""


def value(place: str) -> Any:
    """The value of the global name at ``module:name`` of fedstill.

    Raises:
        LookupError: it uses something that only an import can give.
    """
    module, _, name = place.partition(":")
    return _value(module, name)


def read(place: str) -> Any:
    """The value of the global name at ``module:name`` of fedstill: as `value`, or by an import where that fails."""
    try:
        return value(place)
    except Exception:
        return resolve_name(place)


@cache
def _value(module: str, name: str) -> Any:
    if module == Settings.__module__ or module in _LIGHT:
        return getattr(import_module(module), name)
    bindings = _bindings(module)
    statement = bindings.get(name)
    if isinstance(statement, ast.ImportFrom):
        return _value(str(statement.module), _original(statement, name))
    if isinstance(statement, ast.Import) and name in _LIGHT:
        return import_module(name)
    if statement is None or isinstance(statement, ast.Import):
        raise LookupError(f"{module} needs an import for {name}")
    statement = _Declarations().visit(statement)
    parts = statement.body if isinstance(statement, ast.FunctionDef) else [statement]
    needed = [n for part in parts for n in _loaded(part) if n in bindings and n != name]
    space = {"__name__": module, **{n: _value(module, n) for n in needed}}
    exec(compile(ast.Module([statement], []), str(_path(module)), "exec"), space)
    return space[name]


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text("utf-8"))


def _path(module: str) -> Path:
    package, *parts = module.split(".")
    path = Path(fedstill.__file__).parent.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if package != "fedstill" or not parts or not path.exists():
        raise LookupError(f"{module} is not a file of fedstill")
    return path


@cache
def _bindings(module: str) -> dict[str, ast.stmt]:
    """The statement that defines each global name of a module of fedstill."""
    return {name: part for part in _tree(module).body for name in _names(part)}


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _original(statement: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in statement.names if name == (alias.asname or alias.name))


def _is_of_fedstill(module: str, name: str) -> bool:
    statement = _bindings(module).get(name)
    return not isinstance(statement, ast.ImportFrom) or str(statement.module).startswith("fedstill.")


def _loaded(node: ast.AST) -> Iterator[str]:
    """The names that a statement reads when it is executed, without those in the bodies of functions."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield node.id
    elif not isinstance(node, ast.FunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from _loaded(child)


class _Declarations(ast.NodeTransformer):
    """Removes limits from types, annotations from functions, and all but fields and class methods from classes."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Expr) or _is_class_method(part)]
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        node.returns = None
        return node


def _is_class_method(part: ast.stmt) -> bool:
    marks = part.decorator_list if isinstance(part, ast.FunctionDef) else []
    return [ast.unparse(mark) for mark in marks] == ["classmethod"]


_CITED = re.compile(r"\b([A-Z][A-Za-z]*[a-z])(?: et al\.|, ).*?\b((?:19|20[0-2])\d+)\b", re.DOTALL)
_HEADINGS = ("method", "clients asked", "public data", "protects", "paper")


def facts(name: str) -> dict[str, Any]:
    """What `fedstill methods` says of a method.

    Returns:
        ``method``, ``description``, ``rounds`` (the default number), ``one_shot``, ``needs_public`` ("images",
        "labelled" or None), ``protects`` ("record", "label", "client" or None) and ``paper`` (first author and year).
    """
    place = methods.TABLE[name]
    values = constants(place)
    rounds = values.get("rounds", 1)
    return {
        "method": name,
        "description": values["__doc__"].strip().split("\n")[0],
        "rounds": rounds,
        "one_shot": rounds == 1,
        "needs_public": values["needs_public"] or None,
        "protects": values["protects"] or None,
        "paper": citation(docstring(place.partition(":")[0])),
    }


def citation(text: str) -> str:
    """First author and year of the first paper that a method's docstring cites; the author alone if it has no year."""
    if found := _CITED.search(text):
        return f"{found[1]} {found[2]}"
    return next(iter(re.findall(r"\n\n([A-Z][A-Za-z]*[a-z]), ", text)), "")


def listing() -> str:
    """The methods as a table of 80 columns."""
    rows = [_HEADINGS]
    lines = [""]
    for name in methods.TABLE:
        fact = facts(name)
        asked = "once" if fact["one_shot"] else f"{fact['rounds']} rounds"
        rows.append((name, asked, fact["needs_public"] or "-", fact["protects"] or "-", fact["paper"]))
        lines.append(textwrap.fill(fact["description"], 80, initial_indent="    ", subsequent_indent="    "))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(part for pair in zip(table, lines, strict=True) for part in pair if part)

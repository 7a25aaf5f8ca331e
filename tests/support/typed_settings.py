"""The content of ``src/fedstill/typed.py``; ``python tests/support/typed_settings.py`` writes it.

A type checker then knows the name and type of each setting, those in groups too, so that a misspelt one is an error
before anything runs.
"""

import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fedstill import attacks, methods
from fedstill.audits.whole_runs import AuditSettings
from fedstill.base.settings import Settings
from fedstill.experiment.config import Experiment
from fedstill.report.plan import Plan

FILE = Path(__file__).parents[2] / "src" / "fedstill" / "typed.py"
_HEAD = '''\
"""Names and types of all settings, for type checkers; ``tests/support/typed_settings.py`` writes this file.

`RunSettings` are those of the task and of every method; that a method has one of them is checked when it runs.
"""

# ruff: noqa: D101 - each dictionary is named after its class, whose fields have the docstrings

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

'''


def content() -> str:
    """The content of the file, formatted."""
    kinds = [methods.find(name) for name in methods.TABLE]
    others = {"AuditSettings": [AuditSettings], "PlanSettings": [Plan]}
    others["AttackSettings"] = [attacks.find(name) for name in attacks.ATTACKS]
    inside = [Experiment, *kinds, *(kind for some in others.values() for kind in some)]
    groups = list(dict.fromkeys(group for kind in inside for group in _groups(kind)))
    lines = [_HEAD, *(f"from {g.__module__} import {g.__name__} as {_name(g)[:-8]}" for g in groups), ""]
    for group in groups:
        lines += _dictionary(_name(group), "TypedDict", [group])
    lines += _dictionary("SharedSettings", "TypedDict", [Experiment], without=("data", "seed"))
    lines += _dictionary("RunSettings", "SharedSettings", kinds, without=tuple(Experiment.model_fields))
    lines[-1:] = ["    seed: int", ""]
    for name, some in others.items():
        lines += _dictionary(name, "TypedDict", some)
    command = [sys.executable, "-m", "ruff"]
    text = "\n".join(lines)
    for more in (["check", "-q", "--fix", "--exit-zero"], ["format", "-q"]):
        words = [*command, *more, "--stdin-filename", str(FILE), "-"]
        text = subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _groups(kind: type[Settings]) -> Iterator[type[Settings]]:
    """The classes of settings inside others, inner ones first."""
    for field in kind.model_fields.values():
        for one in (field.annotation, *get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, Settings):
                yield from _groups(one)
                yield one


def _name(group: type[Settings]) -> str:
    """The name of a group's dictionary, with its module, as two groups may have one name."""
    module = "".join(part.capitalize() for part in group.__module__.split(".")[-1].split("_"))
    return ("" if group.__name__.lower() == module.lower() else module) + group.__name__ + "Settings"


def _dictionary(name: str, base: str, kinds: Iterable[type[Settings]], without: tuple[str, ...] = ()) -> list[str]:
    fields: dict[str, dict[str, None]] = {}
    for kind in kinds:
        for key, field in kind.model_fields.items():
            if key not in without:
                paths = ["Path"] * (key == "schema_file")  # which a run's configuration keeps as a text
                fields.setdefault(key, {}).update(dict.fromkeys([*paths, *_words(field.annotation)]))
    return [
        f"class {name}({base}, total=False):",
        *(f"    {key}: {' | '.join(words)}" for key, words in sorted(fields.items())),
        "",
    ]


def _words(kind: Any) -> list[str]:
    """A type of a field as what a caller may give for it, one or the other."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _words(get_args(kind)[0])
    if origin is Literal:
        return [f"Literal[{value!r}]" for value in get_args(kind)]
    if origin in (Union, types.UnionType):
        return [word for one in get_args(kind) for word in _words(one)]
    if origin is tuple:
        one = _words(get_args(kind)[0])
        return [f"Sequence[{' | '.join(one)}]", *(one if ... in get_args(kind) and one in (["int"], ["float"]) else [])]
    if kind is type(None):
        return ["None"]
    if issubclass(kind, Settings):
        return [_name(kind)[:-8], _name(kind)]
    if kind is Path:
        return ["str", "Path"]
    assert kind in (int, float, str, bool), f"{kind} has no words yet"
    return [str(kind.__name__)]


if __name__ == "__main__":
    FILE.write_text(content())

"""All commands and their settings as one JSON Schema (draft 2020-12), made from the tree and its settings classes.

The schema describes one call as an object with one property, the command as it is typed after ``fedstill``:
``{"run fedgm": {"flags": {"--data": "digits", "--ipc": 10}}}``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from pydantic_core import to_jsonable_python

from fedstill import __version__
from fedstill.base.lookup import suggestion
from fedstill.base.settings import Settings
from fedstill.cli import parser
from fedstill.cli.command import Command, sections_of
from fedstill.cli.output import Bad
from fedstill.cli.parser import Section

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_READ = (
    "One call of fedstill: its only property is the command as it is typed after 'fedstill', its words come next, and "
    "its flags last. A flag that is true is typed alone, one that is false with 'no-' before its last part "
    "(--matching.no-anneal), null as None; values of a list and names and values of an object follow in a row. A flag "
    "that is left out has its default."
)


def document(tree: Mapping[str, Command], only: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON Schema of all commands of a tree, with types, ranges, defaults and help texts of their settings.

    Args:
        tree: the commands.
        only: the words of one command, as ``["run", "fedgm"]``; those that begin with them are described too.

    Raises:
        Bad: no command begins with these words.
    """
    name = " ".join(only)
    wanted = {
        call: _call(command) for call, command in _calls(tree, "") if f"{call} ".startswith(f"{name} " * bool(name))
    }
    if not wanted:
        raise Bad(f"there is no command '{name}'{suggestion(name, dict(_calls(tree, '')))} (fedstill --help)")
    shared = _share(wanted)
    return {
        "$schema": DRAFT,
        "title": f"Commands of fedstill {__version__}",
        "description": _READ,
        "type": "object",
        "properties": wanted,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
        "$defs": shared,
    }


def _share(calls: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas that flags of several commands have, by a name of each; a reference takes their place."""
    places: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for call in calls.values():
        flags = call["properties"]["flags"]["properties"]
        for flag, schema in flags.items():
            places.setdefault(json.dumps([flag, schema], sort_keys=True), []).append((flags, flag))
    shared: dict[str, Any] = {}
    for same in places.values():
        if len(same) > 1:
            flags, flag = same[0]
            name = next(one for n in count(1) if (one := flag[2:] + f"-{n}" * (n > 1)) not in shared)
            shared[name] = flags[flag]
            for flags, flag in same:
                flags[flag] = {"$ref": f"#/$defs/{name}"}
    return shared


def _calls(tree: Mapping[str, Command], before: str) -> Iterator[tuple[str, Command]]:
    """The commands by their names as they are typed, those below others too."""
    for name, command in tree.items():
        if command.run is not None or not command.below:
            yield f"{before}{name}", command
        yield from _calls(command.below, f"{before}{name} ")


def _call(command: Command) -> dict[str, Any]:
    """The schema of a command's words and flags; a method's name is a word, so its own flags may be any."""
    sections = sections_of(command, shown=False)
    flags: dict[str, Any] = {
        "type": "object",
        "properties": _flags(sections),
        "additionalProperties": False,
    }
    if command.raw and command.takes.startswith("METHOD"):
        flags["patternProperties"] = {"^--": {"description": "A flag of the method, or with its label before it."}}
    words: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "description": command.takes or "No words."}
    needs = bool(command.least) and not (command.raw and command.below)  # run --extend RUN names no method
    words |= {"minItems": command.least} if needs else {}
    if command.most is not None and not command.raw:
        words["maxItems"] = command.most
    about = command.about or (sections[-1].settings.__doc__ or "").strip().partition("\n\n")[0]
    found: dict[str, Any] = {
        "type": "object",
        "description": " ".join(about.split()),
        "properties": {"words": words, "flags": flags},
        "additionalProperties": False,
    }
    return found | ({"required": ["words"]} if needs else {})


def _flags(sections: Sequence[Section]) -> dict[str, Any]:
    """The flags of sections; one that several have (settings of all attacks) may be either's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for section in sections:
        for flag, schema in _of_section(section):
            if schema not in found.setdefault(flag, []):
                found[flag].append(schema)
    return {flag: schemas[0] if len(schemas) == 1 else {"anyOf": schemas} for flag, schemas in found.items()}


def _of_section(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    """The flags of settings, those of settings inside them with their names before."""
    settings, kind = section.settings, type(section.settings)
    fields = kind.model_json_schema()["properties"] if kind.model_fields else {}
    for name in kind.model_fields:
        default = getattr(settings, name)
        if name in section.without:
            continue
        if isinstance(default, Settings):
            yield from _of_section(Section(default, f"{section.prefix}{name}."))
            continue
        schema = dict(fields[name])
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
        yield parser.flag_of(section.prefix + name), schema | {"default": to_jsonable_python(default)}

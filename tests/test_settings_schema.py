"""``fedstill --schema``: every command and setting, as a JSON Schema that takes what the command line takes."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from fedstill import methods
from fedstill.cli import COMMANDS, main
from fedstill.cli.command import Command, sections_of
from fedstill.cli.parser import argument_parser
from fedstill.cli.settings_schema import document

try:
    import jsonschema
except ImportError:
    jsonschema = None
KINDS = {"array", "boolean", "integer", "null", "number", "object", "string"}


@cache
def schema() -> dict[str, Any]:
    return document(COMMANDS)


def commands(tree: Any = COMMANDS, before: str = "") -> Iterator[tuple[str, Command]]:
    for name, command in tree.items():
        if command.run or not command.below:
            yield before + name, command
        yield from commands(command.below, f"{before}{name} ")


def flags(name: str) -> dict[str, Any]:
    """The schemas of a command's flags, with what is shared in place."""
    given = schema()["properties"][name]["properties"]["flags"]["properties"]
    shared = schema()["$defs"]
    return {flag: shared[one["$ref"].removeprefix("#/$defs/")] if "$ref" in one else one for flag, one in given.items()}


def check_by_hand(found: Any) -> None:
    """Check what a schema is made of, for a machine without jsonschema."""
    assert isinstance(found, dict)
    assert isinstance(found.get("description", ""), str)
    assert found.get("type", "string") in KINDS
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"):
        assert isinstance(found.get(name, 0), int | float)
    for name in ("anyOf", "prefixItems"):
        for one in found.get(name, ()):
            check_by_hand(one)
    for name in ("properties", "patternProperties", "$defs"):
        for one in found.get(name, {}).values():
            check_by_hand(one)
    for name in ("items", "additionalProperties"):
        if not isinstance(one := found.get(name, True), bool):
            check_by_hand(one)
    if "$ref" in found:
        assert found["$ref"].removeprefix("#/$defs/") in schema()["$defs"]


def test_it_is_a_schema_of_draft_2020_12() -> None:
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    check_by_hand(schema())
    if jsonschema is not None:
        jsonschema.Draft202012Validator.check_schema(schema())


def test_every_command_and_flag_is_there() -> None:
    assert [name for name, _ in commands()] == [*schema()["properties"]]
    assert {f"run {name}" for name in methods.TABLE} <= {*schema()["properties"]}
    for name, command in commands():
        typed = {
            action.option_strings[0]  # one section at a time, as the settings of all attacks are among them
            for section in sections_of(command, shown=True)
            for action in argument_parser(name, "", [section])._actions
        }
        assert {*flags(name)} == typed - {"-h"}, name


@pytest.mark.parametrize(("name", "command"), [(name, command) for name, command in commands() if command.flags])
def test_each_flag_has_its_type_default_and_help_text(name: str, command: Command) -> None:
    for flag, one in flags(name).items():
        for part in one["anyOf"] if "anyOf" in one and "default" not in one else [one]:
            assert {"type", "anyOf", "enum", "const"} & {*part}, (name, flag)
            assert "default" in part and part["description"], (name, flag)
            if jsonschema is not None:
                jsonschema.Draft202012Validator(part).validate(part["default"])


CALLS = [
    ({"run fedgm": {"flags": {"--data": "digits", "--ipc": 10, "--matching.nets": 50}}}, True),
    ({"run fedgm": {"flags": {"--matching.no-such": 1}}}, False),
    ({"run fedgm": {"flags": {"--ipc": 0}}}, False),
    ({"run fedgm": {"flags": {"--threads": 257}}}, False),
    ({"run fedgm": {"flags": {"--noise": "loud"}}}, False),
    ({"run fedgm": {"words": ["more"]}}, False),
    ({"run": {"words": ["mine.py:Mine"], "flags": {"--own": 1}}}, True),
    ({"compare": {"words": ["fedavg", "fedgm"], "flags": {"--fedgm.ipc": 1, "--seeds": [0, 1]}}}, True),
    ({"runs tag": {"words": ["best", "runs/first"]}}, True),
    ({"runs tag": {"words": ["best"]}}, False),
    ({"report": {"words": ["runs"], "flags": {"--column-cm": 3}}}, False),
    ({"doctor": {"flags": {"--json": True}}}, True),
    ({"doctor": {}, "runs": {}}, False),
    ({"nosuch": {}}, False),
]


@pytest.mark.skipif(jsonschema is None, reason="needs jsonschema")
@pytest.mark.parametrize(("call", "fits"), CALLS)
def test_it_takes_the_calls_that_the_command_line_takes(call: dict[str, Any], fits: bool) -> None:
    assert jsonschema.Draft202012Validator(schema()).is_valid(call) == fits


def test_it_is_printed_whole_or_for_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--schema"])
    assert json.loads(capsys.readouterr().out) == schema()
    main(["--schema", "run", "fedgm"])
    (one,) = json.loads(capsys.readouterr().out)["properties"].items()
    assert one[0] == "run fedgm" and one[1]["properties"]["flags"]["properties"]["--ipc"]["exclusiveMinimum"] == 0
    main(["--schema", "site"])
    assert {*json.loads(capsys.readouterr().out)["properties"]} == {f"site {name}" for name in COMMANDS["site"].below}
    with pytest.raises(SystemExit) as end:
        main(["--schema", "run", "fedgn"])
    assert end.value.code == 2
    assert "there is no command 'run fedgn'; did you mean run fedgm?" in capsys.readouterr().err

"""A mapping in a YAML file."""

from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override


class _Plain(yaml.SafeLoader):
    """YAML without aliases, which can make a short text billions of values, and without a key that stands twice."""

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write its value out")
        return super().compose_node(parent, index)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line} has a list or mapping where a name must stand; write the name")
            if key.value in seen:
                raise yaml.YAMLError(f"'{key.value}' stands again in line {line}; write it once")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, expected: str) -> dict[str, Any]:
    """The mapping in a YAML file, without aliases and keys that stand twice.

    Args:
        path: the file.
        expected: what to give, for the message about a missing file.

    Raises:
        ValueError: the file is missing, is not YAML, or has something else; one sentence.
    """
    try:
        content = yaml.load(path.read_text("utf-8"), _Plain)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give {expected}") from None
    except (
        OSError,
        ValueError,
        LookupError,
        yaml.YAMLError,
        RecursionError,
    ) as error:  # of wrong dates and !!types too
        raise ValueError(f"{path} cannot be read as YAML: {_why(error)}") from error
    if content is None:
        raise ValueError(f"{path} is empty; write settings into it, one on a line, as data: digits")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of settings, one on a line, as data: digits")
    if other := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"{path} has {other[0]!r} where the name of a setting must stand; correct it")
    return content


def _why(error: Exception) -> str:
    """The reason, with the line and the column if YAML names them."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}; correct it there"

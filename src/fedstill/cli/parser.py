"""Flags derived from settings classes: argparse splits the words, pydantic converts and checks the values."""

import argparse
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from fedstill.base.lookup import suggestion
from fedstill.base.settings import Settings, sentence

S = TypeVar("S", bound=Settings)
_WIDEST = 100
_TRUTH = {"true", "false", "yes", "no", "on", "off"}
"""Values of a switch; beside other words, a number is one of these: ``site show --json FOLDER 1``."""
_FEW = 8
"""Number of flags up to which a message names them all."""
_LONGEST = 60
"""Characters of a list of choices beyond which a help text of 80 columns has no place for it."""
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Section(NamedTuple):
    """Settings of a command.

    Attributes:
        settings: the defaults.
        prefix: the beginning of each flag, as ``"fedavg."``.
        title: the title of the group in the help text.
        about: the text under this title.
        groups: title of each further group by the names of its settings, which stand there in place of under ``title``.
        without: settings without a flag.
    """

    settings: Settings
    prefix: str = ""
    title: str = "options"
    about: str = ""
    groups: Mapping[str, tuple[str, ...]] = {}
    without: tuple[str, ...] = ()


def parse(program: str, about: str, words: Sequence[str], sections: Sequence[Section]) -> list[Any]:
    """The sections' settings, changed by the flags in ``words``; ``--help`` prints the help text and exits.

    Args:
        program: the command, for the help text and messages.
        about: the help text's first paragraph, and ``Example:`` with a command.
        words: the words after the command, all of which belong to flags.
        sections: the settings that have flags.

    Raises:
        ValueError: a flag is unknown, or a value is missing or invalid; one sentence.
    """
    parser = argument_parser(program, about, sections)
    found, others = parser.parse_known_args([_hyphens(word) for word in words])
    if others:
        raise ValueError(_unknown(program, others[0], parser))
    return checked(sections, vars(found))


def split(
    program: str, about: str, words: Sequence[str], sections: Sequence[Section], *, takes: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The values of the flags in ``words``, for `checked`, and the words that belong to no flag; ``--help`` exits.

    Args:
        program: as for `parse`.
        about: as for `parse`.
        words: the words after the command.
        sections: as for `parse`.
        takes: the words that belong to no flag, for the help text.

    Raises:
        ValueError: a flag is unknown, or its value is missing; one sentence.
    """
    parser = argument_parser(program, about, sections, takes)
    found, others = parser.parse_known_args(list(_switched(parser, [_hyphens(word) for word in words])))
    if wrong := next((word for word in others if word.startswith("-")), None):
        raise ValueError(_unknown(program, wrong, parser))
    return vars(found), others


def checked(sections: Sequence[Section], given: Mapping[str, Any]) -> list[Any]:
    """The sections' settings with the values given for their flags.

    Raises:
        ValueError: a value is invalid; one sentence.
    """
    return [_changed(section, given) for section in sections]


def flags_text(program: str, sections: Sequence[Section]) -> str:
    """The flags' part of a help text."""
    return argument_parser(program, "", sections).format_help().partition("\n")[2]


def changed(base: S, values: Mapping[str, Any], flags: str = "--") -> S:
    """``base`` with other values of some settings, given as words, checked.

    Raises:
        ValueError: a value is invalid; one sentence.
    """
    try:
        return type(base)(**_merged(base, values))
    except ValidationError as error:
        raise ValueError(sentence(error, flags=flags)) from error


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument ([^\s/,]+)[^:]*: (expected .*)", message)
        if match is None:
            raise ValueError(message)
        number = re.search(r"\d+", match[2])
        needs = "a value" if number is None else f"{number[0]} values"
        raise ValueError(f"{match[1]} needs {needs} ({self.prog} --help)")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        super().__init__(prog, max_help_position=26, width=max(width, 40))

    @override
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Switch):
            return "/".join(action.option_strings)
        return super()._format_action_invocation(action)

    @override
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))
        return "\n\n".join(paragraphs)


class _Switch(argparse.Action):
    """``--flag``, ``--no-flag`` or ``--flag True``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        negated = option in self.option_strings[1:]
        if negated and values is not None:
            raise ValueError(f"{option} is {values!r}; give it no value")
        setattr(namespace, self.dest, not negated if values is None else values)


def _switched(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """The words, with a switch's value behind its name, so that another word after a switch is not taken for it."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        action = parser._option_string_actions.get(word)
        if isinstance(action, _Switch) and following.lower() not in _TRUTH:
            yield f"{action.option_strings[0]}={word == action.option_strings[0]}"
        else:
            yield word


def argument_parser(program: str, about: str, sections: Sequence[Section], takes: str = "") -> argparse.ArgumentParser:
    """The parser of the flags of these sections; its values are words, which `checked` checks."""
    about, _, example = about.partition("\n\nExample: ")
    parser = _Parser(
        prog=program,
        usage=" ".join([program, *takes.split(), *["[flags]"] * bool(sections)]),
        description=_plain(about),
        epilog=f"example: {example}" if example else None,
        formatter_class=_Help,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for section in sections:
        _add(parser, section)
    last = parser.add_argument_group("more")
    last.add_argument("-h", "--help", action="help", help="Show this text.")
    return parser


def _add(parser: argparse.ArgumentParser, section: Section) -> None:
    settings, prefix = section.settings, section.prefix
    titles = {name: title for title, names in section.groups.items() for name in names}
    fields = {name: field for name, field in type(settings).model_fields.items() if name not in section.without}
    nested = {name for name in fields if isinstance(getattr(settings, name), Settings)}
    for title in (section.title, *section.groups):
        names = [name for name in fields if titles.get(name, section.title) == title and name not in nested]
        about = (section.about if title == section.title else "") or None
        group = parser.add_argument_group(title, about) if names else None
        for name in names:
            assert group is not None
            _add_flag(group, prefix + name, fields[name], getattr(settings, name))
    for name in fields:
        if name in nested:
            inner = getattr(settings, name)
            about = _plain(fields[name].description or type(inner).__doc__ or "")
            _add(parser, Section(inner, f"{prefix}{name}.", flag_of(prefix + name)[2:], about))


def _add_flag(group: Any, place: str, field: Any, default: Any) -> None:
    kind, flag = bare(field.annotation), flag_of(place)
    text = _plain(field.description or "").replace("%", "%%") + _default(default)
    if kind is bool:
        before, dot, last = flag[2:].rpartition(".")
        names = (flag,) if last == "no" else (flag, f"--{before}{dot}no-{last}")
        group.add_argument(*names, action=_Switch, dest=place, nargs="?", help=text)
        return
    options: dict[str, Any] = {"metavar": _metavar(kind)}
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, list, set, frozenset):
        options["nargs"] = "*" if origin is not tuple or parts[-1] is Ellipsis else len(parts)
        options["metavar"] = _metavar(bare(parts[0]))
    elif origin is dict:
        options |= {"nargs": "*", "action": _Pairs, "metavar": " ".join(_metavar(bare(part)) for part in parts)}
    group.add_argument(flag, *_SHORTER.get(flag, ()), dest=place, help=text, **options)


_SHORTER = {"--label-column": ("--label",)}
"""Flag -> other names of it."""


class _Pairs(argparse.Action):
    """``--flag NAME VALUE NAME VALUE ...``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if len(values) % 2:
            raise ValueError(f"{option} needs pairs of a name and a value; {values[-1]!r} has no value")
        setattr(namespace, self.dest, dict(zip(values[::2], values[1::2], strict=True)))


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        choices = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        return choices if len(choices) <= _LONGEST else "NAME"  # whose help text names them
    return _METAVARS.get(kind, "VALUE")


def _default(value: Any) -> str:
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f" (default: {text})".replace("%", "%%")


def bare(annotation: Any) -> Any:
    """``annotation`` without pydantic's limits and without None."""
    if typing.get_origin(annotation) is Annotated:
        return bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return bare(next(part for part in typing.get_args(annotation) if part is not types.NoneType))
    return annotation


def flag_of(place: str) -> str:
    """The flag of a setting's dotted name, as ``--matching.nets``."""
    return "--" + place.replace("_", "-").strip("-")


def _hyphens(word: str) -> str:
    """The word with hyphens in a flag's name, in which underscores are accepted too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _plain(text: str) -> str:
    return re.sub(r"``?([^`]+)``?", r"\1", " ".join(text.split()))


def _unknown(program: str, word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"'{word}' is an unexpected argument ({program} --help)"
    name, flags = word.partition("=")[0], parser._option_string_actions
    inside = [flag for flag in flags if flag.rpartition(".")[2] == name.lstrip("-") and not flag.startswith("--no-")]
    if name in _OF_SOME:
        near = f" here; {_OF_SOME[name]}"
    elif meant := _ELSEWHERE.get(name):
        near = f"; did you mean {meant}?" if meant.split()[0] in flags else ""
    else:
        near = f"; did you mean {' or '.join(inside[:3])}?" if inside else suggestion(name, flags)
    own = [action.option_strings[0] for action in parser._actions if action.dest != "help"]
    if not near and len(own) <= _FEW:
        near = f"; this command takes {', '.join(own) or 'none'}"
    return f"there is no flag {name}{near} ({program} --help)"


_ELSEWHERE = {
    "--alpha": "--partition dirichlet:A",
    "--dataset": "--data",
    "--learning-rate": "--local.lr",
    "--n-clients": "--clients",
    "--num-clients": "--clients",
    "--num-rounds": "--rounds",
}
"""Names that other libraries give to flags."""
_OF_SOME = {"--class-weights": "FedAvg and its family have it, also LDP-FedAvg and DP-FedAvg"}
"""Flags of some methods, of which others are no misspelling."""


def _changed(section: Section, given: Mapping[str, Any]) -> Settings:
    """The section's settings with the words given for its flags."""
    values: dict[str, Any] = {}
    for place, value in given.items():
        name = place.removeprefix(section.prefix)
        if place.startswith(section.prefix) and has(section.settings, name):
            *path, last = name.split(".")
            inner = values
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
    return changed(section.settings, values, flag_of(section.prefix) if section.prefix else "--")


def has(settings: object, name: str) -> bool:
    """Whether the settings have one of this dotted name."""
    first, _, rest = name.partition(".")
    if not isinstance(settings, Settings) or first not in type(settings).model_fields:
        return False
    return not rest or has(getattr(settings, first), rest)


def _merged(base: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ``base`` was given, and ``values``; the default of another may depend on them."""
    merged = {name: getattr(base, name) for name in base.model_fields_set}
    for name, value in values.items():
        inner = getattr(base, name)
        if isinstance(inner, Settings) and isinstance(value, Mapping):
            merged[name] = _merged(inner, value)
        else:
            merged[name] = _value_of(value, type(base).model_fields[name].annotation)
    return merged


def _value_of(word: Any, annotation: Any) -> Any:
    """None or a choice that is no text, if the word stands for it; else the word, which pydantic converts.

    ``none`` is None too where a number may be absent; in place of a text it may be a name.
    """
    kind = bare(annotation)
    absent = ("None", "none") if kind in (int, float) else ("None",)
    if types.NoneType in typing.get_args(annotation) and word in absent:
        return None
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return next((choice for choice in choices if str(choice) == word), word)

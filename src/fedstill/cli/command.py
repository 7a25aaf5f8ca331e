"""A command, described once: dispatch, help texts and completion read the same tree."""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill import methods
from fedstill.cli.output import Bad, asks_help

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.base.settings import Settings
    from fedstill.cli.parser import Section


class Part(NamedTuple):
    """A settings class whose fields are flags of a command; named by its place, so that a tree imports nothing.

    Attributes:
        place: ``module:class``, or the name of a class in `fedstill.cli.flags`.
        title: the title of its flags in the help text.
        values: values of the settings that have no default.
        only: settings that have flags; all by default.
        without: settings without a flag.
    """

    place: str
    title: str = "options"
    values: Mapping[str, Any] = {}
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


FORM = Part("Format", "output")
"""The flag --json."""


class Command(NamedTuple):
    r"""A command of the tree.

    Attributes:
        run: the function, which gets the list of the words that belong to no flag, and the settings of each part of
            ``flags``; None if there are only the commands ``below``.
        takes: the words, as a help text names them: ``"FOLDER [RUN]"``, ``"TAG RUN ..."``.
        about: what the command does, in a help text; ``"...\n\nExample: ..."`` ends it with an example.
        flags: the settings that have flags.
        needs: the sentence if there are too few words, but the first, in place of a general one.
        below: commands that the first word names.
        choices: the words that a shell completes; by default files if there are ``takes``.
        raw: whether ``run`` gets all words as they are, because its flags depend on them.
    """

    run: Callable[..., None] | None = None
    takes: str = ""
    about: str = ""
    flags: tuple[str | Part, ...] = ()
    needs: str = ""
    below: "Mapping[str, Command]" = {}
    choices: tuple[str, ...] = ()
    raw: bool = False

    @property
    def least(self) -> int:
        """The number of words that the command needs."""
        return len(self.takes.partition("[")[0].replace("...", "").split())

    @property
    def most(self) -> int | None:
        """The largest number of words; None without a limit."""
        return None if "..." in self.takes else len(self.takes.split())


def start(command: Command, words: list[str], program: str) -> None:
    """`call` a command of the top; alone, one that needs words prints its help text to standard error.

    Raises:
        SystemExit: with code 2, if it needs words and there are none.
    """
    if words or command.raw or (command.run is not None and not command.least):
        call(command, words, program)
        return
    with redirect_stdout(sys.stderr), suppress(SystemExit):
        call(command, ["--help"], program)
    raise SystemExit(2)


def call(command: Command, words: list[str], program: str) -> None:
    """Run a command, or that below it which the first word names.

    Args:
        command: the command.
        words: the words after its name.
        program: its name, as ``"fedstill site"``.

    Raises:
        Bad: no command below has that name, or words are missing or too many.
        ValueError: a flag is wrong; one sentence.
    """
    if command.raw:
        assert command.run is not None, "it gets the words"
        command.run(words)
    elif words and words[0] in command.below:
        call(command.below[words[0]], words[1:], f"{program} {words[0]}")
    elif command.below and asks_help(words):
        print(overview(command, program))
    elif command.run is None:
        raise unknown(words[0], command.below, program)
    else:
        command.run(*read(command, words, program))


def overview(command: Command, program: str) -> str:
    """The help text of a command with others below it: its own words and flags, and a line for each of these."""
    about, _, example = command.about.partition("\n\nExample: ")
    own = f"usage: {program} {command.takes} [flags]\n       " if command.run else "usage: "
    rows = {f"{name} {one.takes}".strip(): one.about.partition("\n\n")[0] for name, one in command.below.items()}
    width = max(map(len, rows)) + 4
    lines = [
        textwrap.fill(text, 80, initial_indent=f"  {name:<{width - 2}}", subsequent_indent=" " * width)
        for name, text in rows.items()
    ]
    text = f"{own}{program} COMMAND ...\n\n{textwrap.fill(about, 80)}\n\ncommands:\n" + "\n".join(lines)
    if command.flags:
        from fedstill.cli import parser

        text += "\n" + parser.flags_text(program, sections_of(command, shown=True)).rstrip("\n")
    return f"{text}\n\nflags:   {program} COMMAND --help\nexample: {example}"


def unknown(word: str, commands: Mapping[str, Command], program: str, near: str = "") -> Bad:
    """The error that no command has this name, with the most similar one, or ``near``."""
    from fedstill.base.lookup import suggestion

    near = near or suggestion(word, commands) or f"; choose {', '.join(commands)}"
    name = f"{program} {word}".removeprefix("fedstill ")
    return Bad(f"there is no command '{name}'{near} ({program} --help)")


def read(command: Command, words: Sequence[str], program: str) -> list[Any]:
    """The words that belong to no flag, and the settings of each part, changed by the flags; ``--help`` exits.

    Raises:
        Bad: there are too few or too many words.
        ValueError: a flag is unknown, or a value is missing or invalid; one sentence.
    """
    from fedstill.cli import parser

    sections = sections_of(command, shown=asks_help(words))
    given, others = parser.split(program, command.about, words, sections, takes=command.takes)
    if len(others) < command.least or (others[:1] == [""] and command.takes.startswith("FOLDER")):
        alone = command.least == 1 or any(others[:1])
        raise Bad(command.needs if command.needs and alone else _missing(command.takes, others, program))
    if "" in others:
        raise Bad(
            f"word {others.index('') + 1} is empty, as of a variable that is not set; usage: {program} {command.takes}"
        )
    if command.most is not None and len(others) > command.most:
        word = others[command.most]
        settings = f"; its settings: fedstill run {word} --help" if word in methods.TABLE else f" ({program} --help)"
        raise Bad(f"'{word}' is an unexpected argument{settings}")
    return [others, *parser.checked(sections, given)]


def _missing(takes: str, others: Sequence[str], program: str) -> str:
    """The sentence that words are missing."""
    if any(others[:1]):
        return f"words are missing; usage: {program} {takes} ({program} --help)"
    group, first = program.split()[1], Path(takes.split()[0]).stem.lower()
    owner = f"{group}'s " if first == "folder" else ""
    return f"the {owner}{first} comes first: {program} {takes} ({program} --help)"


def sections_of(command: Command, *, shown: bool) -> "list[Section]":
    """The settings of a command's flags with their defaults; if ``shown``, only to be shown, which needs no torch."""
    return [_section(part if isinstance(part, Part) else Part(part), shown) for part in command.flags]


def _section(part: Part, shown: bool) -> "Section":
    from fedstill.cli.parser import Section

    kind = _kind(part.place, shown)
    hidden = [name for name in kind.model_fields if name in part.without or (part.only and name not in part.only)]
    return Section(kind(**part.values), title=part.title, without=tuple(hidden))


def _kind(place: str, shown: bool) -> "type[Settings]":
    if ":" not in place:
        place = f"fedstill.cli.flags:{place}"
    elif shown:
        from fedstill.cli.declared import declared

        with suppress(Exception):  # a declaration that needs more than its source has to be imported
            return declared(place)
    kind: type[Settings] = resolve_name(place)
    return kind

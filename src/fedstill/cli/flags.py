"""Command-line flags derived from settings classes: tyro parses the words, pydantic checks the values."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro
from pydantic import ValidationError

from fedstill import methods
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.protocol import Method
from fedstill.settings import Settings
from fedstill.sites.policy import SitePolicy

S = TypeVar("S", bound=Settings)
_EACH = "each"
_OUT = Annotated[Path | None, tyro.conf.arg(help="Folder of the results; an interrupted run there is resumed.")]


class RunFlags(NamedTuple):
    """The flags of ``fedstill run METHOD``."""

    experiment: Experiment
    method: Method
    out: Path | None


class CompareFlags(NamedTuple):
    """The flags of ``fedstill compare``; ``methods`` maps a label to a method's name and the method."""

    experiment: Experiment
    methods: dict[str, tuple[str, Method]]
    seeds: tuple[int, ...]
    out: Path | None


def defaults(kind: type[S]) -> S:
    """``kind`` with its defaults.

    Raises:
        ValueError: a setting has no default; one sentence.
    """
    try:
        return kind()
    except ValidationError as error:
        raise ValueError(config.sentence(error, flags="--")) from error


def parse_run(program: str, words: Sequence[str], experiment: Experiment, method: Method) -> RunFlags:
    """Flags of one run, on top of ``experiment`` and ``method``."""
    if clash := set(type(experiment).model_fields) & set(type(method).model_fields):
        raise ValueError(f"{type(method).__name__} and Experiment both have '{min(clash)}'; rename the method's field")
    parts = {"experiment": (_plain(experiment), ""), "method": (_plain(method), "")}
    usage = f"{type(method).__doc__ or ''}\n\nExample: {program} --data digits --clients 5 --out runs/first"
    parsed = _parse(program, usage, words, parts, [("out", _OUT, None)])
    return RunFlags(_settings(experiment, parsed.experiment, "--"), _settings(method, parsed.method, "--"), parsed.out)


def parse_compare(program: str, words: Sequence[str], entries: Sequence[str]) -> CompareFlags:
    """Flags of a comparison; ``entries`` are ``METHOD`` or ``LABEL=METHOD``."""
    chosen: dict[str, tuple[str, Method]] = {}
    for entry in entries:
        label, _, name = entry.rpartition("=")
        label = label or name
        if not label.replace("-", "_").isidentifier():
            raise ValueError(f"'{label}' is not a label; use letters, digits, - and _: {_word(label)}={name}")
        if label in chosen:
            raise ValueError(f"'{label}' is given twice; use another label for one, as {label}-2={name}")
        if twin := next((other for other in chosen if _key(other) == _key(label)), None):
            raise ValueError(f"the labels '{twin}' and '{label}' would share flags; rename one of them")
        if label == _EACH:
            raise ValueError(f"the label '{label}' is reserved for all methods (--{_EACH}.); use another for {name}")
        chosen[label] = (name, defaults(methods.find(name)))
    parts = {"experiment": (_plain(Experiment(), without=("seed",)), "")}
    parts |= {_key(label): (_plain(method), _key(label).removeprefix("_")) for label, (_, method) in chosen.items()}
    usage = (
        "Run several methods on the same clients and seeds: fedstill compare METHOD|LABEL=METHOD ... [flags]. "
        f"A method's flags start with its label; --{_EACH}.SETTING applies to every method with the setting. "
        "Example: fedstill compare fedavg once=fedavg fedgm --data digits --once.rounds 1 --fedgm.ipc 5 --seeds 0 1 2"
    )
    words = _expanded(words, {label: method for label, (_, method) in chosen.items()})
    seeds = Annotated[tuple[int, ...], tyro.conf.arg(help="Seeds; each method runs once for each.")]
    parsed = _parse(program, usage, words, parts, [("seeds", seeds, (0,)), ("out", _OUT, None)])
    if not chosen:
        raise ValueError(f"there is no method to compare; name methods before the flags ({', '.join(methods.TABLE)})")
    if len(set(parsed.seeds)) < len(parsed.seeds) or not parsed.seeds or min(parsed.seeds) < 0:
        raise ValueError(f"--seeds is {' '.join(map(str, parsed.seeds))}; seeds must be different numbers of 0 or more")
    checked = {
        label: (name, _settings(method, getattr(parsed, _key(label)), f"--{label}."))
        for label, (name, method) in chosen.items()
    }
    return CompareFlags(_settings(Experiment(), parsed.experiment, "--"), checked, parsed.seeds, parsed.out)


def _expanded(words: Sequence[str], chosen: Mapping[str, Method]) -> list[str]:
    """Replace ``--each.SETTING`` by the flags of all methods with the setting, except flags already in ``words``."""
    groups: list[list[str]] = [[]]
    for word in words:
        groups += [[]] if word.startswith("--") else []
        groups[-1].append(word)
    own = {group[0].partition("=")[0].replace("_", "-") for group in groups if group}
    expanded: list[str] = []
    for group in groups:
        flag, *values = group or [""]
        name, equals, value = flag.partition("=")
        if not name.startswith(f"--{_EACH}."):
            expanded += group
            continue
        setting = name.removeprefix(f"--{_EACH}.")
        having = [label for label, method in chosen.items() if _has(method, setting)]
        if not having:
            raise ValueError(f"{name}: none of {', '.join(chosen) or 'the methods'} has this setting")
        flags = [f"--{label}.{setting}".replace("_", "-") for label in having]
        expanded += [word for flag in flags if flag not in own for word in (f"{flag}{equals}{value}", *values)]
    return expanded


def _has(settings: object, name: str) -> bool:
    first, _, rest = name.replace("-", "_").partition(".")
    if not isinstance(settings, Settings) or first not in type(settings).model_fields:
        return False
    return not rest or _has(getattr(settings, first), rest)


def parse_show(program: str, words: Sequence[str]) -> tuple[Experiment, Path | None]:
    """Flags of ``fedstill data show NAME``."""
    words = ["--data", *words] if words and not words[0].startswith("-") else list(words)
    unused = tuple(set(Experiment.model_fields) - {"data", "partition", "clients", "seed", "limit"})
    parts = {"experiment": (_plain(Experiment(), without=unused), "")}
    parsed = _parse(program, "Plot the records of each class at each client.", words, parts, [("out", _OUT, None)])
    return _settings(Experiment(), parsed.experiment, "--"), parsed.out


def parse_settings(program: str, words: Sequence[str], settings: S) -> S:
    """Flags that change ``settings``."""
    usage = f"{type(settings).__doc__ or ''}\n\nExample: {program.replace('RUN', 'runs/first')}"
    given = _parse(program, usage, words, {"settings": (_plain(settings), "")}, [])
    return _settings(settings, given.settings, "--")


def parse_site(program: str, words: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The folder and the flags of ``fedstill deploy site FOLDER``, with absolute paths of data."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        raise ValueError(f"the site's folder comes first: {program} FOLDER --client 0 --data PATH --methods fedavg-p")
    base = SitePolicy(client=0, data=Path("data"), state=Path("state"), methods=("none",))
    flags = words if words[0].startswith("-") else words[1:]
    usage = "Write a site's policy.toml and make its ledger, in a folder without a policy."
    parsed = _settings(base, _parse(program, usage, flags, {"policy": (_plain(base), "")}, []).policy, "--")
    if parsed.methods == base.methods:
        raise ValueError("--methods is empty; name the allowed methods or steps, as --methods fedavg-p fedgm.distil")
    if not parsed.data.expanduser().exists():
        raise ValueError(f"--data is {str(parsed.data)!r}, which does not exist; give the file or folder of records")
    changed = {n: getattr(parsed, n) for n in type(parsed).model_fields if getattr(parsed, n) != getattr(base, n)}
    policy = {"client": parsed.client, "state": parsed.state, **changed, "data": parsed.data.expanduser().resolve()}
    public = {name: place.expanduser().resolve() for name, place in parsed.public.items()}
    return Path(words[0]), {**policy, **({"public": public} if public else {})}


def _word(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-") or "mine"


def _key(label: str) -> str:
    return "_" + label.replace("-", "_")  # the underscore avoids clashes with other fields


def _parse(
    program: str,
    description: str,
    words: Sequence[str],
    parts: dict[str, tuple[Any, str]],
    extra: list[tuple[str, Any, Any]],
) -> Any:
    fields: list[Any] = [
        (key, Annotated[type(plain), tyro.conf.arg(name=name)], dataclasses.field(default=plain))
        for key, (plain, name) in parts.items()
    ]
    fields += [(key, kind, dataclasses.field(default=value)) for key, kind, value in extra]
    kind = dataclasses.make_dataclass("Flags", fields, frozen=True)
    return tyro.cli(
        kind, args=list(words), prog=program, description=description, config=(tyro.conf.FlagConversionOff,)
    )


def _plain(settings: Settings, without: Sequence[str] = ()) -> Any:
    """An unchecked copy of ``settings`` for the parser, with the same names, types, defaults and help.

    `_settings` checks the limits, so that an invalid value gives one sentence in place of the parser's output.
    """
    fields: list[Any] = []
    for name, info in type(settings).model_fields.items():
        if name in without:
            continue
        value = getattr(settings, name)
        if isinstance(value, Settings):
            value = _plain(value)
            kind: Any = type(value)
        else:
            kind = _bare(info.annotation)
        help_text = (info.description or "").replace("\n", " ")
        annotated = Annotated[kind, tyro.conf.arg(help=help_text)]
        fields.append((name, annotated, dataclasses.field(default_factory=partial(copy, value))))
    twin = dataclasses.make_dataclass(type(settings).__name__, fields, frozen=True)
    twin.__doc__ = type(settings).__doc__
    return twin()


def _bare(annotation: Any) -> Any:
    """``annotation`` without pydantic's limits."""
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [_bare(member) for member in typing.get_args(annotation)]
        return typing.Union[tuple(members)]  # noqa: UP007
    return annotation


def _settings(base: S, plain: Any, prefix: str) -> S:
    """``base`` with the values of its unchecked copy, checked."""
    values = {name: getattr(base, name) for name in type(base).model_fields} | _values(plain)
    try:
        return type(base)(**values)
    except ValidationError as error:
        raise ValueError(config.sentence(error, flags=prefix)) from error


def _values(plain: Any) -> dict[str, Any]:
    values = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    return {name: _values(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}

"""Command-line flags derived from the settings classes: tyro reads the words, pydantic checks the values."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
_OUT = Annotated[Path | None, tyro.conf.arg(help="Folder of the results; a run that is there already is finished.")]


@dataclass(frozen=True)
class RunFlags:
    """The flags of ``fedstill run METHOD``."""

    experiment: Experiment
    method: Method
    out: Path | None


@dataclass(frozen=True)
class CompareFlags:
    """The flags of ``fedstill compare``; ``methods`` maps a label to a method's name and the method."""

    experiment: Experiment
    methods: dict[str, tuple[str, Method]]
    seeds: tuple[int, ...]
    out: Path | None


@dataclass(frozen=True)
class ShowFlags:
    """The flags of ``fedstill data show``."""

    experiment: Experiment
    out: Path | None


def defaults(kind: type[S]) -> S:
    """``kind`` with all its defaults, or one sentence when a setting has none."""
    try:
        return kind()
    except ValidationError as error:
        raise ValueError(config.sentence(error, flags="--")) from error


def parse_run(program: str, words: Sequence[str], experiment: Experiment, method: Method) -> RunFlags:
    """Flags of one run, on top of ``experiment`` and ``method``."""
    if clash := set(type(experiment).model_fields) & set(type(method).model_fields):
        raise ValueError(f"{type(method).__name__} and Experiment both have '{min(clash)}'; rename the method's field")
    parts = {
        "experiment": (_plain(experiment), ""),
        "method": (_plain(method), ""),
    }
    usage = f"{type(method).__doc__ or ''}\n\nExample: {program} --data digits --clients 5 --out runs/first"
    found = _parse(program, usage, words, parts, [("out", _OUT, None)])
    return RunFlags(_settings(experiment, found.experiment, "--"), _settings(method, found.method, "--"), found.out)


def parse_compare(program: str, words: Sequence[str], entries: Sequence[str]) -> CompareFlags:
    """Flags of a comparison; ``entries`` are ``METHOD`` or ``LABEL=METHOD``."""
    chosen: dict[str, tuple[str, Method]] = {}
    for entry in entries:
        label, _, name = entry.rpartition("=")
        label = label or name
        if not label.replace("-", "_").isidentifier():
            raise ValueError(f"'{label}' is no label; use letters, digits, - and _, as in {_word(label)}={name}")
        if label in chosen:
            raise ValueError(f"'{label}' stands twice; give one of them another label, as in {label}-2={name}")
        if twin := next((other for other in chosen if _key(other) == _key(label)), None):
            raise ValueError(f"the labels '{twin}' and '{label}' would share flags; rename one of them")
        if label == _EACH:
            raise ValueError(f"--{_EACH}. stands for all methods; give {name} another label than '{label}'")
        chosen[label] = (name, defaults(methods.find(name)))
    parts = {"experiment": (_plain(Experiment(), without=("seed",)), "")}
    parts |= {_key(label): (_plain(method), _key(label).removeprefix("_")) for label, (_, method) in chosen.items()}
    usage = (
        "Several methods on the same clients with the same seeds: fedstill compare METHOD|LABEL=METHOD ... [flags]. "
        f"A method's own flags carry its label; --{_EACH}.SETTING is for every method that has the setting. "
        "Example: fedstill compare fedavg once=fedavg fedgm --data digits --once.rounds 1 --fedgm.ipc 5 --seeds 0 1 2"
    )
    words = _expanded(words, {label: method for label, (_, method) in chosen.items()})
    seeds = Annotated[tuple[int, ...], tyro.conf.arg(help="One run of each method for each seed.")]
    found = _parse(program, usage, words, parts, [("seeds", seeds, (0,)), ("out", _OUT, None)])
    if not chosen:
        raise ValueError(f"there is nothing to compare; name methods before the flags ({', '.join(methods.TABLE)})")
    if len(set(found.seeds)) < len(found.seeds) or not found.seeds or min(found.seeds) < 0:
        raise ValueError(f"--seeds is {' '.join(map(str, found.seeds))}; it must be different numbers from 0")
    checked = {
        label: (name, _settings(method, getattr(found, _key(label)), f"--{label}."))
        for label, (name, method) in chosen.items()
    }
    return CompareFlags(_settings(Experiment(), found.experiment, "--"), checked, found.seeds, found.out)


def _expanded(words: Sequence[str], chosen: Mapping[str, Method]) -> list[str]:
    """``--each.local.epochs 5`` as this flag of every method that has it, but for those that have it of their own."""
    groups: list[list[str]] = [[]]
    for word in words:
        groups += [[]] if word.startswith("--") else []
        groups[-1].append(word)
    own = {group[0].partition("=")[0].replace("_", "-") for group in groups if group}
    found: list[str] = []
    for group in groups:
        flag, *values = group or [""]
        name, equals, value = flag.partition("=")
        if not name.startswith(f"--{_EACH}."):
            found += group
            continue
        setting = name.removeprefix(f"--{_EACH}.")
        having = [label for label, method in chosen.items() if _has(method, setting)]
        if not having:
            raise ValueError(f"{name}: none of {', '.join(chosen) or 'the methods'} has this setting")
        flags = [f"--{label}.{setting}".replace("_", "-") for label in having]
        found += [word for flag in flags if flag not in own for word in (f"{flag}{equals}{value}", *values)]
    return found


def _has(settings: object, name: str) -> bool:
    first, _, rest = name.replace("-", "_").partition(".")
    if not isinstance(settings, Settings) or first not in type(settings).model_fields:
        return False
    return not rest or _has(getattr(settings, first), rest)


def parse_show(program: str, words: Sequence[str]) -> ShowFlags:
    """Flags of ``fedstill data show NAME``."""
    words = ["--data", *words] if words and not words[0].startswith("-") else list(words)
    unused = tuple(set(Experiment.model_fields) - {"data", "partition", "clients", "seed", "limit"})
    parts = {"experiment": (_plain(Experiment(), without=unused), "")}
    found = _parse(program, "Draw who would hold what.", words, parts, [("out", _OUT, None)])
    return ShowFlags(_settings(Experiment(), found.experiment, "--"), found.out)


def parse_settings(program: str, words: Sequence[str], settings: S) -> S:
    """Flags of a command whose flags are ``settings``."""
    usage = f"{type(settings).__doc__ or ''}\n\nExample: {program.replace('RUN', 'runs/first')}"
    given = _parse(program, usage, words, {"settings": (_plain(settings), "")}, [])
    return _settings(settings, given.settings, "--")


def parse_site(program: str, words: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The folder and the flags of ``fedstill deploy site FOLDER``; paths of data are made absolute."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        raise ValueError(f"the site's folder comes first: {program} FOLDER --client 0 --data PATH --methods fedavg-p")
    base = SitePolicy(client=0, data=Path("data"), state=Path("state"), methods=("none",))
    flags = words if words[0].startswith("-") else words[1:]
    usage = "Write a site's policy.toml and make its ledger; a policy that is there already stays as it is."
    found = _settings(base, _parse(program, usage, flags, {"policy": (_plain(base), "")}, []).policy, "--")
    if found.methods == base.methods:
        raise ValueError("--methods names nothing; say what the site answers, as --methods fedavg-p fedgm.distil")
    if not found.data.expanduser().exists():
        raise ValueError(f"--data is {str(found.data)!r}, where nothing is; give the folder or file of the records")
    changed = {n: getattr(found, n) for n in type(found).model_fields if getattr(found, n) != getattr(base, n)}
    kept = {"client": found.client, "state": found.state, **changed, "data": found.data.expanduser().resolve()}
    public = {name: place.expanduser().resolve() for name, place in found.public.items()}
    return Path(words[0]), {**kept, **({"public": public} if public else {})}


def _word(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-") or "mine"


def _key(label: str) -> str:
    return "_" + label.replace("-", "_")  # the underscore keeps a label from clashing with our own fields


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
    """An unchecked twin of ``settings``: the same names, types, defaults and help, none of the limits.

    With the limits left to `_settings`, a bad value ends in one sentence instead of a parser's trace.
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
        fields.append((name, annotated, dataclasses.field(default_factory=partial(_same, value))))
    twin = dataclasses.make_dataclass(type(settings).__name__, fields, frozen=True)
    twin.__doc__ = type(settings).__doc__
    return twin()


def _same(value: Any) -> Any:
    return value


def _bare(annotation: Any) -> Any:
    """``annotation`` without the limits that pydantic reads off `Annotated`, unions included."""
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [_bare(member) for member in typing.get_args(annotation)]
        return typing.Union[tuple(members)]  # noqa: UP007
    return annotation


def _settings(base: S, plain: Any, prefix: str) -> S:
    """``base`` with the values of its twin, checked."""
    values = {name: getattr(base, name) for name in type(base).model_fields} | _values(plain)
    try:
        return type(base)(**values)
    except ValidationError as error:
        raise ValueError(config.sentence(error, flags=prefix)) from error


def _values(plain: Any) -> dict[str, Any]:
    found = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    return {name: _values(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()}

"""Flags of the commands: the fields of settings classes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar, cast

from annotated_types import Ge, Le, Lt
from pydantic import PositiveInt, ValidationError

from fedstill import methods
from fedstill.base.lookup import is_label, suggestion
from fedstill.base.settings import Settings, names, sentence
from fedstill.cli import parser
from fedstill.cli.declared import declared
from fedstill.cli.output import asks_help
from fedstill.cli.parser import Section
from fedstill.experiment.config import Experiment, TrackerName

if TYPE_CHECKING:  # a help text needs no torch
    from fedstill.protocol import Method

S = TypeVar("S", bound=Settings)
_EACH = "each"
_GROUPS = {
    "privacy": ("delta", "budget", "noise"),
    "engine": (
        "engine", "workers", "cpus_per_client", "gpus_per_client", "threads", "device", "min_clients", "timeout",
        "evaluate_every", "evaluate_uploads", "keep_replies", "max_message_mb",
    ),
}  # fmt: skip
"""Groups of the experiment's settings in help texts; all others are the task."""


class Output(Settings):
    """What a command prints and writes."""

    out: Path | None = None
    """Folder of the results; an interrupted run there is resumed."""
    quiet: bool = False
    """Print no progress."""
    json_: bool = False
    """Print the results as JSON, and nothing else, to standard output."""


class RunOutput(Output):
    """What a run prints and writes, and who follows it."""

    track: tuple[TrackerName, ...] = ()
    """Trackers of the rounds, settings, results and images: tensorboard, mlflow, wandb or trackio, each an extra."""
    dry_run: bool = False
    """Print the bytes, the epsilon and the time that the run will need, from one client's step; write nothing."""


class OneRunOutput(RunOutput):
    """What one run chooses, prints and writes."""

    tune: bool = False
    """Choose the learning rate, rounds or ridge first, by a few tries on validation records (--validation, 0.1 by
    default) and --measure; the report counts them. Not for a method with noise."""


class ComparisonOutput(RunOutput):
    """What a comparison repeats, prints and writes."""

    seeds: tuple[int, ...] = (0,)
    """Seeds; each method runs once for each."""


class SweepOutput(Output):
    """What a sweep runs, writes and prints."""

    final: bool = False
    """Run the best settings of each method on the test set."""
    parallel: PositiveInt | None = None
    """Number of runs at a time; one per core by default."""


class Invite(Settings):
    """The invitation of ``fedstill site join``."""

    invite: Path | None = None
    """Invitation file of the server (fedstill server invite)."""


class Founding(Invite):
    """The invitation of ``fedstill site init``, and numbers of its policy."""

    preset: Literal["open", "study", "strict"] = "study"
    """Numbers of the policy: study has the defaults, strict asks a person, open is for trials (docs/operate.md)."""


class ReportOutput(Settings):
    """What a report writes and prints."""

    out: Path = Path("runs/report")
    """Folder of the page and the tables."""
    latex: bool = False
    """Write table.tex too, for the package booktabs."""
    markdown: bool = False
    """Write table.md too."""
    figures: tuple[Literal["pdf", "svg"], ...] = ()
    """Write the figures in these formats too, with figures.tex."""
    column_cm: Annotated[float, Ge(4), Le(40)] = 8.4
    """Width of these figures in cm: that of a column."""
    pareto: bool = False
    """Show accuracy against bytes up, epsilon and seconds, and write it as pareto.csv, pareto.md and figures in SVG."""
    quiet: bool = False
    """Print no progress, as for run and compare; a report has none."""
    json_: bool = False
    """Print the table as JSON, and nothing else, to standard output."""


class Format(Settings):
    """The form of a command's output."""

    json_: bool = False
    """Print JSON, and nothing else, to standard output."""


class Judged(Settings):
    """What a model is judged by."""

    label_column: str | None = None
    """Column of the classes of a table; by default one with a usual name, or that of the run's schema."""
    group: str | None = None
    """Column of the person, whose records are resampled together for intervals."""
    positive: str | None = None
    """The class of two that sensitivity is of; by default the last."""
    threshold: Annotated[float, Ge(0), Le(1)] | None = None
    """Probability from which it is predicted; by default the likelier class is."""
    predictions: Path | None = None
    """New CSV file with the true class, the predicted one and the probabilities of each record, which nothing protects;
    its first column is the number of the record in the data, from 0, if all of these are judged."""


class Predicted(Settings):
    """What is predicted, and where to."""

    out: Path | None = None
    """New CSV file with the number of each record, from 0, its prediction and the probabilities of its classes, which
    its owner alone may read; by default they are printed."""
    keep: tuple[str, ...] = ()
    """Columns of the table that are copied beside, such as a patient's number."""
    positive: str | None = None
    """The class of two that --threshold is for; by default the last."""
    threshold: Annotated[float, Ge(0), Le(1)] | None = None
    """Probability from which it is predicted; by default the likelier class is."""


class SchemaDraft(Settings):
    """What a schema is drafted for."""

    target: str | None = None
    """Column of the classes; one called label, target, class or outcome by default, or the last with two values."""


class Published(Settings):
    """Where ``fedstill publish`` writes."""

    out: Path | None = None
    """New folder of the files; published/RUN by default."""
    gate: Path | None = None
    """TOML file of a policy: refuse a model whose guarantee or membership attack misses what it asks."""
    hub: str | None = None
    """Upload them to the Hugging Face hub too, as OWNER/NAME."""
    onnx: bool = False
    """Write model.onnx too, for ONNX Runtime."""
    positive: str | None = None
    """The class of two that --threshold is for; by default the last."""
    threshold: Annotated[float, Ge(0), Le(1)] | None = None
    """Probability from which it is predicted, on the card and in rows.py; by default the likelier class is."""
    shape: tuple[int, ...] = ()
    """Channels, height and width of the images that the program takes, for a run on --features; those of its data by
    default."""


class Watching(Settings):
    """The page of ``fedstill watch``."""

    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    browser: bool = False
    """Open the page in the browser."""


class Listing(Format):
    """The runs of ``fedstill runs``."""

    tag: str | None = None
    """List the runs with this tag only."""


class Removal(Settings):
    """The consent of ``fedstill runs remove``."""

    yes: bool = False
    """Remove without a question."""


class Invitation(Settings):
    """The limit and the part of the clients of ``fedstill server invite``."""

    records: Annotated[int, Ge(1), Lt(10**15)] | None = None
    """Largest number of records that a reply may claim; no limit by default."""
    helper: bool = False
    """They are helpers of masked sums too, or helpers alone (docs/sums.md)."""


class Acceptance(Settings):
    """The key of ``fedstill server accept``."""

    replace: bool = False
    """Take the key in place of an earlier one."""


class Renewal(Settings):
    """The certificate of ``fedstill server renew``."""

    authority: bool = False
    """Make a new authority first."""


class Probed(Format):
    """The form of a status, and its use as a probe."""

    check: bool = False
    """Exit with 1 if not all is well, for a monitor or a container's health check."""


class Status(Probed):
    """The form of ``fedstill site status``."""

    prometheus: bool = False
    """Print metrics of Prometheus."""


class Ledger(Format):
    """The lines of ``fedstill site ledger``."""

    all: bool = False
    """Show each charge too."""


class Log(Format):
    """The lines of ``fedstill site log``, or what becomes of them."""

    all: bool = False
    """Show all lines, not the last ones only."""
    verify: bool = False
    """Check the journal, with ledger and log; exit code 1 if something is wrong."""
    export: Path | None = None
    """Write all evidence into this file, FILE.html or FILE.json."""


class Sent(Format):
    """What ``fedstill site show`` writes."""

    out: Path | None = None
    """Folder for the values and images."""


class Approval(Settings):
    """The decision of ``fedstill site approve``."""

    yes: bool = False
    """Approve the run."""
    no: bool = False
    """Refuse the run."""


class RunFlags(NamedTuple):
    """The flags of ``fedstill run METHOD``."""

    experiment: Experiment
    method: "Method"
    output: OneRunOutput


class CompareFlags(NamedTuple):
    """The flags of ``fedstill compare``; ``methods`` maps a label to a method's name and the method."""

    experiment: Experiment
    methods: dict[str, tuple[str, "Method"]]
    seeds: tuple[int, ...]
    output: RunOutput


def defaults(kind: type[S]) -> S:
    """``kind`` with its defaults.

    Raises:
        ValueError: a setting has no default; one sentence.
    """
    try:
        return kind()
    except ValidationError as error:
        raise ValueError(sentence(error, flags="--")) from error


def shown(place: str, words: Sequence[str]) -> Settings | None:
    """The settings at ``module:class`` as `declared` shows them if ``words`` ask for help, which needs no torch."""
    if asks_help(words):
        with suppress(Exception):  # a declaration that needs more than its source has to be imported
            return declared(place)()
    return None


def method_of(name: str, words: Sequence[str]) -> "Method":
    """The method of this name with its defaults; as `shown` if ``words`` ask for help.

    Raises:
        ValueError: there is no such method.
    """
    found = shown(methods.TABLE[name], words) if name in methods.TABLE else None
    return cast("Method", found or defaults(methods.find(name)))


def parse_run(program: str, words: Sequence[str], experiment: Experiment, method: "Method") -> RunFlags:
    """Flags of one run, on top of ``experiment`` and ``method``."""
    if clash := (set(type(experiment).model_fields) | set(OneRunOutput.model_fields)) & set(type(method).model_fields):
        raise ValueError(f"{type(method).__name__} and Experiment both have '{min(clash)}'; rename the method's field")
    name = program.split()[-1]
    about = f"{type(method).__doc__ or ''}\n\nExample: {program} --data digits --model convnet:depth=2"
    sections = [
        Section(experiment, title="task", groups=_GROUPS),
        Section(OneRunOutput(), title="output"),
        Section(method, title=f"settings of {name}"),
    ]
    found, output, chosen = parser.parse(program, about, words, sections)
    return RunFlags(found, chosen, output)


def parse_compare(program: str, words: Sequence[str], entries: Sequence[str]) -> CompareFlags:
    """Flags of a comparison; ``entries`` are ``METHOD`` or ``LABEL=METHOD``; a class of your own labels itself."""
    chosen: dict[str, tuple[str, Method]] = {}
    for entry in entries:
        label, _, name = entry.rpartition("=")
        label = label or name.rpartition(":")[2]
        if not is_label(label):
            raise ValueError(f"'{label}' is not a label; use letters, digits, - and _: {_word(label)}={name}")
        if label in chosen:
            raise ValueError(f"'{label}' is given twice; use another label for one, as {label}-2={name}")
        if twin := next((other for other in chosen if other.replace("-", "_") == label.replace("-", "_")), None):
            raise ValueError(f"the labels '{twin}' and '{label}' would share flags; rename one of them")
        if label == _EACH:
            raise ValueError(f"the label '{label}' is reserved for all methods (--{_EACH}.); use another for {name}")
        chosen[label] = (name, method_of(name, words))
    about = (
        "Run several methods on the same clients and seeds: fedstill compare METHOD|LABEL=METHOD ... [flags]. "
        f"A method's flags start with its label; --{_EACH}.SETTING applies to every method with the setting.\n\n"
        "Example: fedstill compare fedavg once=fedavg fedgm --data digits --once.rounds 1 --fedgm.ipc 5 --seeds 0 1 2"
    )
    words = _expanded(words, {label: method for label, (_, method) in chosen.items()})
    sections = [
        Section(Experiment(), title="task", groups=_GROUPS, without=("seed",)),
        Section(ComparisonOutput(), title="output"),
        *(Section(method, f"{label}.", f"settings of {label}") for label, (_, method) in chosen.items()),
    ]
    experiment, output, *found = parser.parse(program, about, words, sections)
    if not chosen:
        raise ValueError(f"there is no method to compare; name methods before the flags ({', '.join(methods.TABLE)})")
    seeds = output.seeds
    if len(set(seeds)) < len(seeds) or not seeds or min(seeds) < 0:
        given = f"is {' '.join(map(str, seeds))}" if seeds else "has no value"
        raise ValueError(f"--seeds {given}; seeds must be different numbers of 0 or more, as --seeds 0 1 2")
    checked = {label: (name, method) for (label, (name, _)), method in zip(chosen.items(), found, strict=True)}
    return CompareFlags(experiment, checked, seeds, output)


def _expanded(words: Sequence[str], chosen: Mapping[str, "Method"]) -> list[str]:
    """Replace ``--each.SETTING`` by the flags of all methods with the setting, except flags already in ``words``."""
    groups: list[list[str]] = [[]]
    for word in words:
        groups += [[]] if word.startswith("--") else []
        groups[-1].append(word)
    own = {_positive(group[0].partition("=")[0].replace("_", "-")) for group in groups if group}
    expanded: list[str] = []
    for group in groups:
        flag, *values = group or [""]
        name, equals, value = flag.partition("=")
        if not name.startswith(f"--{_EACH}."):
            expanded += group
            continue
        setting = name.removeprefix(f"--{_EACH}.").replace("-", "_")
        having = [label for label, method in chosen.items() if parser.has(method, _positive(setting))]
        if not having:
            known = [one.replace("_", "-") for method in chosen.values() for one in names(type(method))]
            near = suggestion(setting.replace("_", "-"), known, f"--{_EACH}.")
            raise ValueError(f"{name}: none of {', '.join(chosen) or 'the methods'} has this setting{near}")
        flags = [f"--{label}.{setting}".replace("_", "-") for label in having]
        expanded += [word for f in flags if _positive(f) not in own for word in (f"{f}{equals}{value}", *values)]
    return expanded


def _positive(name: str) -> str:
    """A setting's or flag's name without the ``no-`` of a switch."""
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix("no-").removeprefix("no_")


def parse_check(program: str, words: Sequence[str], method: "Method", settings: S) -> "tuple[Method, S, Format]":
    """Flags of a check, on top of ``method`` and ``settings``; what both have is the check's.

    Raises:
        ValueError: a flag is unknown or out of its range; one sentence.
    """
    about = f"Compare the method on neighbouring data sets.\n\nExample: {program} --model linear --shape 8"
    own = Section(method, title="settings of the method", without=tuple(type(settings).model_fields))
    sections = [Section(settings), own, Section(Format(), title="output")]
    found, chosen, form = parser.parse(program, about, words, sections)
    return chosen, found, form


def parse_settings(program: str, words: Sequence[str], settings: S) -> tuple[S, Format]:
    """Settings with the changes that flags ask for, and the form of the output."""
    about = f"{type(settings).__doc__ or ''}\n\nExample: {program.replace('RUN', 'runs/first')}"
    changed, form = parser.parse(program, about, words, [Section(settings), Section(Format(), title="output")])
    return changed, form


def _word(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-") or "mine"

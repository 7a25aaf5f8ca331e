"""Groups: runs of one task, in rows of the same settings; and sweeps, rows that differ in one setting or in two."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from fedstill import methods
from fedstill.experiment.config import FREE, Experiment, defaults_of, flat, goodness
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import caveats, guarantees
from fedstill.report.record import RunRecord
from fedstill.runs.folder import SITES, SITES_WORDS
from fedstill.runs.journal import WITHDRAWN

TASK = (
    "data",
    "size",
    "partition",
    "clients",
    "model",
    "models",
    "limit",
    "validation",
    "local_test",
    "group",
    "group_bound",
    "schema_file",
    "label_column",
)
"""Settings that make a task: accuracies of runs that differ in one of these are not comparable."""

UNNAMED = FREE | {"seed", "threads", "device", "measure"}
"""Settings that may differ between the runs of one row."""

_RESULTS = {"label", "method", "state", "accuracy", "rounds", "guarantee", "epsilon", "delta", "unit", "seconds"}
_OPTIONS = re.compile(r"[\w.-]+:\w+=[^,=]+(?:,\w+=[^,=]+)*")
_NUMBER = re.compile(r"(.*?[:=])?(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


def task_settings(record: RunRecord) -> dict[str, Any]:
    """All settings of the experiment; `Experiment`'s default for one that the run's version did not have.

    The partition of a run with real sites is `SITES`, whatever its experiment says: nobody divided them.
    """
    own = {"partition": SITES} if record.summary["partition"] == SITES else {}
    return _defaults() | flat(record.config["experiment"]) | own


@cache
def _defaults() -> dict[str, Any]:
    return flat(Experiment().model_dump(mode="json"))


def method_settings(record: RunRecord) -> dict[str, Any]:
    """The method's settings; ``method.`` is put before a name that the experiment or a result has too."""
    own = flat({key: value for key, value in record.config["method"].items() if key != "name"})
    taken = task_settings(record).keys() | _RESULTS
    return {f"method.{key}" if key in taken else key: value for key, value in own.items()}


def method_name(record: RunRecord) -> str:
    """The name of the method, whatever the run's label is."""
    return str(record.config["method"].get("name", record.label))


def row_settings(record: RunRecord) -> dict[str, Any]:
    """The settings that all runs of a row share, with the options of a model apart."""
    return options_apart(_named(record) | method_settings(record))


def _named(record: RunRecord) -> dict[str, Any]:
    """The task's settings that all runs of a row share."""
    return {key: value for key, value in task_settings(record).items() if key not in UNNAMED}


def options_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``model = convnet:width=8`` as ``model = convnet`` and ``model.width = 8``; other settings as they are."""
    apart: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, str) and _OPTIONS.fullmatch(value):
            name, _, options = value.partition(":")
            apart[key] = name
            apart |= {f"{key}.{option.partition('=')[0]}": option.partition("=")[2] for option in options.split(",")}
        else:
            apart[key] = value
    return apart


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not equal in all of these."""
    every = list(settings)
    keys = dict.fromkeys(key for one in every for key in one)
    return [key for key in keys if len({value_words(one.get(key)) for one in every}) > 1]


def value_words(value: object) -> str:
    """A value of a setting as text, of a number six digits if it has no more, or else twelve; a dash for no value."""
    if value is None or value == []:
        return "–"
    if isinstance(value, list | tuple):
        return " ".join(map(value_words, value))
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.6g}"
    return short if math.isclose(float(short), value, rel_tol=1e-12) else f"{value:.12g}"


def numeric(values: Sequence[object]) -> tuple[str, list[float]] | None:
    """The common prefix and the numbers of values such as ``dirichlet:0.1``; None if they are not of this form."""
    matches = [_NUMBER.fullmatch(value_words(value)) for value in values]
    if any(isinstance(value, bool) for value in values) or not all(matches):
        return None
    prefixes = {match[1] or "" for match in matches if match}
    if len(prefixes) != 1:
        return None
    return prefixes.pop().rstrip(":="), [float(match[2]) for match in matches if match]


def changed(record: RunRecord) -> dict[str, Any] | None:
    """The method's settings that differ from their defaults; None for a method that is not fedstill's.

    The code of a stranger's method is not imported.
    """
    name = method_name(record)
    if name not in methods.TABLE:
        return None
    defaults = defaults_of(methods.find(name))
    own = flat({key: value for key, value in record.config["method"].items() if key != "name"})
    return {key: value for key, value in own.items() if value_words(value) != value_words(defaults.get(key))}


_CONTENT = "data set"
_PUBLIC = "public records"
_CODE = "code"
_WITHOUT = "without client"
_METHOD = "method name"
_TUNED = "tuned"
_VERSION = "version"


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in their seed only.

    Attributes:
        label: the runs' label.
        name: the label with the settings that distinguish it from other rows of the task, for legends.
        settings: what the runs share: settings as `fedstill.report.groups.row_settings` returns them, without those
            that tries chose, and the number of these; the method's name; fedstill's version; digests of the code and of
            the public records; the clients whose replies were withdrawn.
        runs: one per seed, in order of seeds; with noise that no seed gives, each of several with one seed too.
        task: words for the task.
    """

    label: str
    name: str
    settings: dict[str, Any]
    runs: list[RunRecord]
    task: str = ""

    @property
    def finished(self) -> bool:
        """Whether the runs have finished; a row has no runs of both kinds."""
        return self.runs[0].finished

    @property
    def guarantee(self) -> Guarantee:
        """The weakest guarantee of the runs."""
        return guarantees.weakest(run.guarantee for run in self.runs)

    @property
    def accuracy(self) -> float | None:
        """The mean over seeds, in [0, 1]; None if no run has one. Of unfinished runs: the last one logged."""
        return self.mean(lambda run: run.summary["accuracy"])

    @property
    def error(self) -> float | None:
        """The mean root mean squared error over seeds, in the target's unit; None for classes."""
        return self.mean(lambda run: run.error("rmse"))

    @property
    def rank(self) -> tuple[bool, float]:
        """A key by which better rows are larger: finished ones, by accuracy, or by a small error."""
        score = self.accuracy if self.error is None else -self.error
        return self.finished, -np.inf if score is None else score

    def measured(self, measure: str) -> float | None:
        """The mean over seeds of the measure that the runs were asked to report first; None if one lacks it."""
        return self.mean(lambda run: run.measured(measure))

    def goodness(self, measure: str) -> tuple[bool, float]:
        """As `rank`, by a measure that all finished rows have."""
        value = self.measured(measure)
        return self.finished, -np.inf if value is None else goodness(measure, value)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the accuracy over seeds; None with fewer than two."""
        return self.deviation(lambda run: run.accuracy)

    def deviation(self, number: Callable[[RunRecord], float | None]) -> float | None:
        """The sample standard deviation of a number over the runs that have it; None with fewer than two."""
        values = [value for value in map(number, self.runs) if value is not None]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def mean(self, number: Callable[[RunRecord], float | None]) -> float | None:
        """The mean of a number over all runs; None if one lacks it, as the others may be those that went well."""
        values = [value for value in map(number, self.runs) if value is not None]
        return float(np.mean(values)) if len(values) == len(self.runs) else None

    def mean_of(self, key: str) -> float:
        """The mean of a number that every ``summary.json`` has."""
        return float(np.mean([run.summary[key] for run in self.runs]))


@dataclass(frozen=True, eq=False)
class Group:
    """Comparable rows: same data, partition, clients and model.

    Attributes:
        words: the task, as ``digits (partition iid, 10 clients)``.
        rows: the most accurate first, then those of unfinished runs.
        columns: names of the settings that differ between the rows of one method, or that one row has and others lack.
        left_out: runs with the label, settings and seed of another, which counts: the first, or the one that finished.
    """

    words: str
    rows: list[Row]
    columns: list[str] = field(default_factory=list)
    left_out: list[RunRecord] = field(default_factory=list)

    @property
    def measure(self) -> str | None:
        """The measure that all finished runs were asked to report first (`Experiment.measure`); None without one."""
        return _measure_of(self.rows)

    @property
    def ranked(self) -> list[Row]:
        """The rows of finished runs with an accuracy."""
        return [row for row in self.rows if row.finished and row.accuracy is not None]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs of the task."""
        return [run for row in self.rows for run in row.runs]


def group(records: Iterable[RunRecord]) -> list[Group]:
    """The records by task, in order of first appearance; runs of other code or other public records are no row's seeds.

    Of two runs with the same label, settings and seed, the first counts, and the other is the group's `left_out`; a
    finished one before an unfinished one. Noise that no seed gives makes them two draws, unless one is the other's
    copy.
    """
    tasks: dict[tuple[str, ...], list[RunRecord]] = {}
    for record in records:
        tasks.setdefault(_key(record), []).append(record)
    firsts = [runs[0] for runs in tasks.values()]
    apart = [key for key in differing(map(_identity, firsts)) if key not in ("data", "partition", "clients")]
    if data_sets_are_named(firsts):
        apart = [key for key in apart if key != _CONTENT]
    return [_task(runs, apart) for runs in tasks.values()]


def data_set(record: RunRecord) -> str | None:
    """The first digits of the SHA-256 of a run's records and labels; None if the run does not know it."""
    found = record.config.get("fingerprint")
    return str(found)[:8] if found else None


def _identity(record: RunRecord) -> dict[str, Any]:
    """The settings that make the task; the data set by its content, if the run knows it."""
    everything = task_settings(record)
    return {key: everything[key] for key in TASK} | {_CONTENT: record.config.get("fingerprint")}


def data_sets_are_named(records: Iterable[RunRecord]) -> bool:
    """Whether the names of the runs' data sets say which records they have."""
    return _are_named({(record.summary["data"], record.config.get("fingerprint")) for record in records})


def _are_named(contents: set[tuple[Any, Any]]) -> bool:
    """Whether the names, which come first, say which contents they have."""
    return len(contents) == len({name for name, _ in contents})


def _key(record: RunRecord) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(_identity(record).items()))


def _task(records: Sequence[RunRecord], apart: Sequence[str]) -> Group:
    families: dict[tuple[str, ...], dict[tuple[int, str], RunRecord]] = {}
    known = [(record, _family(record), record.summary["seed"]) for record in records]
    complete = {(family, seed) for record, family, seed in known if record.finished}
    left_out: list[RunRecord] = []
    for record, family, seed in known:
        if not record.finished and (family, seed) in complete:
            left_out.append(record)
            continue
        row = families.setdefault((*family, str(record.finished)), {})
        if row.setdefault((seed, _draw(record)), record) is not record:
            left_out.append(record)
    groups = [[seeds[key] for key in sorted(seeds)] for seeds in families.values()]
    columns = _columns([group[0] for group in groups])
    identity = _identity(records[0])
    more = [f"{key} {_short(key, identity[key])}" for key in apart if identity[key] and key not in caveats.said()]
    words = words_of(records, more)
    rows = [_row(group, columns, words) for group in groups]
    if len({row.name for row in rows}) < len(rows):  # names are keys of figures; the number of rounds is no column
        rows = [_row(group, [*columns, "method.rounds"], words) for group in groups]
    measure = _measure_of(rows)
    rows.sort(key=lambda row: row.rank if measure is None else row.goodness(measure), reverse=True)
    return Group(words, rows, columns, left_out)


def _draw(record: RunRecord) -> str:
    """What tells a run from others of its seed: the noise, if no seed gives it, by its results; else nothing.

    The lines of its rounds have seconds, by which a copy would differ.
    """
    if record.config["experiment"].get("noise") != "entropy":
        return ""
    made = {name: digest for name, digest in record.summary.get("files", {}).items() if name != "metrics.jsonl"}
    return str(made or record.folder)


def _measure_of(rows: Sequence[Row]) -> str | None:
    found = {(run.get("measure") or {}).get("name") for row in rows if row.finished for run in row.runs}
    return next(iter(found)) if len(found) == 1 else None


def _family(record: RunRecord) -> tuple[str, ...]:
    return record.label, *(f"{key}={value}" for key, value in sorted(_shared(record).items()))


def facts(record: RunRecord) -> dict[str, Any]:
    """What is no setting and may explain a result; without what the run has not."""
    code, public = record.config.get("code"), record.config.get("public_fingerprint")
    found: dict[str, Any] = {
        _CODE: code and hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:8],
        _PUBLIC: public and str(public)[:8],
        _WITHOUT: sorted({refusal.client for refusal in record.refused if refusal.reason == WITHDRAWN}),
        _VERSION: record.summary.get("version"),
        _TUNED: record.tries and _tuned(record.tries),
    }
    return {key: value for key, value in found.items() if value}


def _tuned(tries: Mapping[str, Any]) -> str:
    """How a run's settings were chosen: among which tries, by what, on which records."""
    asked = tries["given"].get("method") or [one["settings"] for one in tries["tries"]]
    tag = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:4]
    return f"{len(tries['tries'])} tries ({tag}) by {tries['measure']} on {tries['records']}"


def _shared(record: RunRecord) -> dict[str, Any]:
    """What all runs of a row share."""
    settings = row_settings(record)
    for name in [] if record.tries is None else record.tries["chosen"]:
        settings.pop(f"method.{name}" if f"method.{name}" in settings else name, None)
    return settings | {_METHOD: method_name(record)} | facts(record)


def _row(runs: list[RunRecord], columns: Sequence[str], task: str) -> Row:
    own = _shared(runs[0])
    parts = [f"{key} {value_words(own[key])}" for key in columns if own.get(key) is not None]
    parts += [] if runs[0].finished else ["unfinished"]
    label = runs[0].label
    return Row(label, f"{label} ({', '.join(parts)})" if parts else label, own, runs, task)


def _columns(firsts: Sequence[RunRecord]) -> list[str]:
    """The settings that distinguish rows; the number of rounds is a result too, and no column if both are equal."""
    by_method: dict[str, list[RunRecord]] = {}
    for record in firsts:
        by_method.setdefault(method_name(record), []).append(record)
    found = {key for some in by_method.values() for key in differing(map(_shared, some))}
    found |= set(differing(map(_named, firsts)))
    if len({record.label for record in firsts}) < len({(record.label, method_name(record)) for record in firsts}):
        found.add(_METHOD)
    if all(row_settings(r).get("method.rounds", r.summary["rounds"]) == r.summary["rounds"] for r in firsts):
        found.discard("method.rounds")
    contents = {(record.config["experiment"].get("public"), _shared(record).get(_PUBLIC)) for record in firsts}
    if _are_named(contents):
        found.discard(_PUBLIC)
    order = dict.fromkeys(key for record in firsts for key in _shared(record))
    return [key for key in order if key in found]


def _short(key: str, value: object) -> str:
    return str(value)[:8] if key == _CONTENT else value_words(value)


def setting_words(record: RunRecord, more: Sequence[str] = ()) -> str:
    """The task of a run in words: data, partition, clients, every setting that defines it otherwise, and ``more``."""
    return words_of([record], more)


def words_of(records: Iterable[RunRecord], more: Sequence[str] = ()) -> str:
    """As `setting_words`, for runs on several tasks."""
    runs = list(records)
    summaries = [record.summary for record in runs]
    data, partitions, clients = (
        list(dict.fromkeys(str(summary[key]) for summary in summaries)) for key in ("data", "partition", "clients")
    )
    known = [one for one in partitions if one != SITES]
    words = [f"partition {' or '.join(known)}"] * bool(known) + [SITES_WORDS] * (SITES in partitions)
    parts = [" or ".join(words), f"{' or '.join(clients)} client{'s' * (clients != ['1'])}"]
    parts += [*caveats.facts([task_settings(run) for run in runs]), *more]
    return f"{' and '.join(data)} ({', '.join(parts)})"


_JUDGES = ("validation", "local_test")
"""Settings of a task that decide on which records its models are evaluated."""
FEWEST_LABELS = 3
"""Number of labels of one method, each with its own value of a setting, that make a sweep."""


@dataclass(frozen=True, eq=False)
class Series:
    """The rows of a sweep; all other settings of a method are the same at all values.

    Attributes:
        keys: the one or two settings that vary.
        values: the values of each, as text, in order.
        series: the row of each method at each value; a value may be missing.
        levels: other methods on the same task, which do not have the setting.
        task: the tasks of the rows, in words.
    """

    keys: tuple[str, ...]
    values: tuple[list[str], ...]
    series: dict[str, dict[tuple[str, ...], Row]]
    levels: dict[str, Row]
    task: str

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows that vary."""
        return [run for line in self.series.values() for row in line.values() for run in row.runs]

    @property
    def axis(self) -> tuple[str, list[float]] | None:
        """Name and numbers of the axis of a sweep over one number; None if the values are no numbers."""
        if len(self.keys) != 1 or (found := numeric(self.values[0])) is None:
            return None
        prefix, numbers = found
        return (f"{self.keys[0]}: {prefix}" if prefix else self.keys[0]), numbers

    @property
    def heading(self) -> str:
        """The settings, in words."""
        return " and ".join(self.keys)


def find(tasks: Sequence[Group]) -> list[Series]:
    """The sweeps over one or two settings among the finished runs, those with most rows first.

    Accuracies on different records are in different sweeps, as those on the validation records and on the test set.
    """
    series: dict[tuple[str, ...], list[Row]] = {}
    for task in tasks:
        for row in task.ranked:
            judge = (value_words(row.settings.get(key)) for key in _JUDGES)
            series.setdefault((_line(task, row), *judge), []).append(row)
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, list[Row]]] = {}
    for (name, *_), rows in series.items():
        for part in _connected(rows):
            keys = differing([row.settings for row in part])
            if len(part) > 1 and len(keys) in (1, 2):
                shared = tuple(value_words(part[0].settings.get(key)) for key in TASK if key not in keys)
                lines = found.setdefault((tuple(keys), shared), {})
                lines[name if name not in lines else f"{name} ({len(lines) + 1})"] = part
    sweeps = [_sweep(key[0], lines, tasks) for key, lines in found.items()]
    return sorted(sweeps, key=lambda sweep: -sum(map(len, sweep.series.values())))


def names(found: Sequence[Series], tasks: Sequence[Group]) -> list[str]:
    """The names of a page's lines: those of sweeps first, whose pictures so get the most different colours."""
    first = [name for sweep in found for name in (*sweep.series, *sweep.levels)]
    return list(dict.fromkeys([*first, *(row.name for task in tasks for row in task.rows)]))


def _line(task: Group, row: Row) -> str:
    """The name of the line that a row is a point of: its label, or its method where labels stand for values."""
    method = method_name(row.runs[0])
    labels = [other.label for other in task.ranked if method_name(other.runs[0]) == method]
    return method if len(set(labels)) == len(labels) >= FEWEST_LABELS else row.label


def _connected(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in parts that one can walk through by changing one setting at a time."""
    parts: list[list[Row]] = []
    for row in rows:
        near = [part for part in parts if any(len(differing([row.settings, r.settings])) == 1 for r in part)]
        parts = [part for part in parts if part not in near] + [[row, *(r for part in near for r in part)]]
    return parts


def _sweep(keys: tuple[str, ...], lines: dict[str, list[Row]], tasks: Sequence[Group]) -> Series:
    rows = [row for line in lines.values() for row in line]
    values = tuple(_ordered([value_words(row.settings.get(key)) for row in rows]) for key in keys)
    series = {
        name: {tuple(value_words(row.settings.get(key)) for key in keys): row for row in line}
        for name, line in lines.items()
    }
    inside = [task for task in tasks if any(row in task.rows for row in rows)]
    others = [row for row in inside[0].ranked if row not in rows] if len(inside) == 1 else []
    words = inside[0].words if len(inside) == 1 else words_of(run for task in inside for run in task.runs)
    return Series(keys, values, series, {row.name: row for row in others}, words)


def _ordered(values: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(values))
    found = numeric(distinct)
    return [value for _, value in sorted(zip(found[1], distinct, strict=True))] if found else distinct

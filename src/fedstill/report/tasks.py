"""Runs grouped by task, and within a task by everything but the seed."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstill.journal import WITHDRAWN
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import guarantees, settings
from fedstill.report.record import RunRecord

_CONTENT = "data set"
_PUBLIC = "public records"
_CODE = "code"
_WITHOUT = "without client"


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in their seed only.

    Attributes:
        label: the runs' label.
        name: the label with the settings that distinguish it from other rows of the task, for legends.
        settings: what the runs share: settings as `fedstill.report.settings.row_settings` returns them, and digests of
            the code and of the public records, and the clients whose replies were withdrawn.
        runs: one per seed, in order of seeds.
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
    def spread(self) -> float | None:
        """The sample standard deviation of the accuracy over seeds; None with fewer than two."""
        values = [run.summary["accuracy"] for run in self.runs if run.summary["accuracy"] is not None]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def mean(self, number: Callable[[RunRecord], float | None]) -> float | None:
        """The mean of a number over those runs that have it."""
        values = [value for value in map(number, self.runs) if value is not None]
        return float(np.mean(values)) if values else None

    def mean_of(self, key: str) -> float:
        """The mean of a number that every ``summary.json`` has."""
        return float(np.mean([run.summary[key] for run in self.runs]))


@dataclass(frozen=True, eq=False)
class Task:
    """Comparable rows: same data, partition, clients and model.

    Attributes:
        words: the task, as ``digits (partition iid, 10 clients)``.
        rows: the most accurate first, then those of unfinished runs.
        columns: names of the settings that differ between the rows of one method, or that one row has and others lack.
    """

    words: str
    rows: list[Row]
    columns: list[str] = field(default_factory=list)

    @property
    def ranked(self) -> list[Row]:
        """The rows of finished runs with an accuracy."""
        return [row for row in self.rows if row.finished and row.accuracy is not None]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs of the task."""
        return [run for row in self.rows for run in row.runs]


def group(records: Iterable[RunRecord]) -> list[Task]:
    """The records by task, in order of first appearance; runs of other code or other public records are no row's seeds.

    Of two runs with the same label, settings and seed, the first counts; a finished one before an unfinished one.
    """
    tasks: dict[tuple[str, ...], list[RunRecord]] = {}
    for record in records:
        tasks.setdefault(_key(record), []).append(record)
    firsts = [runs[0] for runs in tasks.values()]
    apart = [key for key in settings.differing(map(_identity, firsts)) if key not in ("data", "partition", "clients")]
    contents = {(record.summary["data"], record.config.get("fingerprint")) for record in firsts}
    if _are_named(contents):
        apart = [key for key in apart if key != _CONTENT]
    return [_task(runs, apart) for runs in tasks.values()]


def _identity(record: RunRecord) -> dict[str, Any]:
    """The settings that make the task; the data set by its content, if the run knows it."""
    everything = settings.task_settings(record)
    return {key: everything[key] for key in settings.TASK} | {_CONTENT: record.config.get("fingerprint")}


def _are_named(contents: set[tuple[Any, Any]]) -> bool:
    """Whether the names, which come first, say which contents they have."""
    return len(contents) == len({name for name, _ in contents})


def _key(record: RunRecord) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(_identity(record).items()))


def _task(records: Sequence[RunRecord], apart: Sequence[str]) -> Task:
    families: dict[tuple[str, ...], dict[int, RunRecord]] = {}
    complete = {(_family(record), record.summary["seed"]) for record in records if record.finished}
    for record in records:
        family, seed = _family(record), record.summary["seed"]
        if record.finished or (family, seed) not in complete:
            families.setdefault((*family, str(record.finished)), {}).setdefault(seed, record)
    groups = [[seeds[seed] for seed in sorted(seeds)] for seeds in families.values()]
    columns = _columns([group[0] for group in groups])
    identity = _identity(records[0])
    more = [f"{key} {_short(key, identity[key])}" for key in apart if identity[key]]
    words = setting_words(records[0], more)
    rows = [_row(group, columns, words) for group in groups]
    if len({row.name for row in rows}) < len(rows):  # names are keys of figures; the number of rounds is no column
        rows = [_row(group, [*columns, "method.rounds"], words) for group in groups]
    rows.sort(key=lambda row: (row.finished, -1.0 if row.accuracy is None else row.accuracy), reverse=True)
    return Task(words, rows, columns)


def _family(record: RunRecord) -> tuple[str, ...]:
    return record.label, *(f"{key}={value}" for key, value in sorted(_shared(record).items()))


def _shared(record: RunRecord) -> dict[str, Any]:
    """What all runs of a row share."""
    code, public = record.config.get("code"), record.config.get("public_fingerprint")
    facts: dict[str, Any] = {
        _CODE: code and hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:8],
        _PUBLIC: public and str(public)[:8],
        _WITHOUT: sorted({refusal.client for refusal in record.refused if refusal.reason == WITHDRAWN}),
    }
    return settings.row_settings(record) | {key: value for key, value in facts.items() if value}


def _row(runs: list[RunRecord], columns: Sequence[str], task: str) -> Row:
    own = _shared(runs[0])
    parts = [f"{key} {settings.words(own[key])}" for key in columns if own.get(key) is not None]
    parts += [] if runs[0].finished else ["unfinished"]
    label = runs[0].label
    return Row(label, f"{label} ({', '.join(parts)})" if parts else label, own, runs, task)


def _columns(firsts: Sequence[RunRecord]) -> list[str]:
    """The settings that distinguish rows; the number of rounds is a result too, and no column if both are equal."""
    by_method: dict[str, list[RunRecord]] = {}
    for record in firsts:
        by_method.setdefault(settings.method_name(record), []).append(record)
    found = {key for some in by_method.values() for key in settings.differing(map(_shared, some))}
    shared = [
        {key: settings.task_settings(record)[key] for key in settings.task_settings(record).keys() - settings.UNNAMED}
        for record in firsts
    ]
    found |= set(settings.differing(shared))
    if all(settings.row_settings(r).get("method.rounds", r.summary["rounds"]) == r.summary["rounds"] for r in firsts):
        found.discard("method.rounds")
    contents = {(record.config["experiment"].get("public"), _shared(record).get(_PUBLIC)) for record in firsts}
    if _are_named(contents):
        found.discard(_PUBLIC)
    order = dict.fromkeys(key for record in firsts for key in _shared(record))
    return [key for key in order if key in found]


def _short(key: str, value: object) -> str:
    return str(value)[:8] if key == _CONTENT else settings.words(value)


def setting_words(record: RunRecord, more: Sequence[str] = ()) -> str:
    """The task of a run in words: data, partition and clients, and ``more``."""
    return words_of([record], more)


def words_of(records: Iterable[RunRecord], more: Sequence[str] = ()) -> str:
    """As `setting_words`, for runs on several tasks."""
    summaries = [record.summary for record in records]
    data, partitions, clients = (
        list(dict.fromkeys(str(summary[key]) for summary in summaries)) for key in ("data", "partition", "clients")
    )
    parts = [f"partition {' or '.join(partitions)}", f"{' or '.join(clients)} client{'s' * (clients != ['1'])}", *more]
    return f"{' and '.join(data)} ({', '.join(parts)})"

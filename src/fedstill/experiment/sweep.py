"""Run a sweep: every point on validation records, then, if asked, the best point of each method on the test set.

Runs are spread over processes, each with one thread for the server's part and without workers, so that their number
changes no result. A sweep that was stopped is repeated: its searches come to the same points, and a finished run is
only read.
"""

import hashlib
import json
import math
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from fedstill import methods
from fedstill.base import errors, files, processes
from fedstill.base.lookup import add_working_folder, is_label
from fedstill.base.settings import Settings, sentence
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment import config, reuse
from fedstill.experiment.config import Experiment, read_mapping
from fedstill.experiment.job import Job
from fedstill.experiment.judging import check_measure, lacking, score_of
from fedstill.experiment.run import run
from fedstill.experiment.search import Point, Range, Search, corners, grid, grid_size, optuna
from fedstill.protocol import Method
from fedstill.runs import environment
from fedstill.runs.folder import RunFolder, Taken, locked

VALIDATION = 0.1
"""Share of the training records that a sweep evaluates on, if the file does not say."""
FINAL = "final"
"""The folder of the runs on the test set, which no method's label may have."""


class SweepPlan(Settings):
    """Search, seeds and budgets of a sweep."""

    search: Literal["grid", "optuna"] = "grid"
    """All points of each method's grid, or points that optuna proposes."""
    tries: PositiveInt | None = None
    """Number of points for each method with settings to try; the size of their grids by default."""
    batch: PositiveInt = 4
    """Number of points that optuna proposes at a time."""
    seeds: tuple[NonNegativeInt, ...] = (0,)
    """Seeds of each point; its score is the mean over them of the measure on validation records."""
    final_seeds: tuple[NonNegativeInt, ...] = ()
    """Seeds of the runs on the test set; those of the points by default."""


@dataclass(frozen=True)
class Tried:
    """A method of a sweep.

    Attributes:
        label: its name in the tables.
        name: the method, as `fedstill.methods.find` takes it.
        settings: its settings that are not searched.
        space: what to try.
        tries: the number of points.
    """

    label: str
    name: str
    settings: dict[str, Any]
    space: dict[str, Range | list[Any]]
    tries: int

    def method(self, point: Point) -> Method:
        """The method at a point.

        Raises:
            ValueError: a value is invalid, or there is no such setting.
        """
        kind = methods.find(self.name)
        try:
            return kind(**merged(self.settings, point))
        except ValidationError as error:
            raise ValueError(f"{self.label}: {sentence(error, kind=kind)}") from error


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: the task, the plan and the methods."""

    experiment: Experiment
    plan: SweepPlan
    entries: tuple[Tried, ...]

    def search(self, entry: Tried) -> "Search":
        """The search of one method."""
        if not entry.space or self.plan.search == "grid":
            return grid(entry.space, entry.tries)
        return optuna(entry.space, entry.tries, self.plan.batch)

    def has_equal_budgets(self) -> bool:
        """Whether all methods with settings to try have the same number of tries."""
        return len({entry.tries for entry in self.entries if entry.space}) < 2


def read_sweep(path: Path) -> Sweep:
    """Read the file of a sweep: fields of `Experiment` and `SweepPlan`, and ``methods``, by label.

    A method is a mapping of its settings, with ``try`` (values or ranges by dotted name), ``method`` (its name, if that
    is not the label) and ``tries`` (its own number of points, which makes the budgets unequal).

    Raises:
        ValueError: the file is missing or is not YAML, a setting is invalid, or methods would get unequal budgets
            unasked.
    """
    return checked(str(path), read_mapping(path, "a sweep's file"))


def checked(where: str, content: dict[str, Any]) -> Sweep:
    """The sweep of a file's content; ``where`` begins the sentence of an error.

    Raises:
        ValueError: as `read_sweep`.
    """
    given: Any = None
    try:
        if "method" in content:
            raise ValueError("it has 'method', as a run's file does; try fedstill run, or name it under 'methods'")
        given = content.pop("methods", None)
        if not isinstance(given, dict) or not given:
            raise ValueError("it needs 'methods', a mapping of methods with their settings")
        plan = SweepPlan(**{key: content.pop(key) for key in [*SweepPlan.model_fields] if key in content})
        experiment = Experiment(**{"validation": VALIDATION, **content})
        _check(experiment, plan)
        return Sweep(experiment, plan, _entries(given, plan))
    except ValidationError as error:
        more = [*SweepPlan.model_fields, "methods"]
        words = sentence(error, kind=Experiment, also=more, owners=_kinds(given))
        raise ValueError(f"{where}: {words}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _kinds(given: Mapping[Any, Any]) -> dict[str, type[Method]]:
    """The classes of the methods of a file, by label; without those that cannot be found."""
    found = {}
    for label, content in given.items():
        try:
            found[str(label)] = methods.find(str(content.get("method", label) if isinstance(content, dict) else label))
        except ValueError:
            continue
    return found


def _check(experiment: Experiment, plan: SweepPlan) -> None:
    if not experiment.validation:
        raise ValueError("validation is 0, but a sweep chooses by validation records; set it above 0, as 0.1")
    check_measure(experiment)
    if experiment.seed:
        raise ValueError(f"seed is {experiment.seed}; give seeds: [{experiment.seed}] in its place")
    for name, seeds in (("seeds", plan.seeds), ("final_seeds", plan.final_seeds)):
        if len(set(seeds)) < len(seeds) or (name == "seeds" and not seeds):
            raise ValueError(f"{name} is {list(seeds)}; give one or more different numbers")


def _entries(given: Mapping[str, Any], plan: SweepPlan) -> tuple[Tried, ...]:
    drafts = [_draft(str(label), {} if content is None else content) for label, content in given.items()]
    sizes = {}
    for label, _, _, space, own in drafts:
        if space and plan.search == "grid":
            sizes[label] = grid_size(space)
            if (asked := own or plan.tries) and asked > sizes[label]:
                raise ValueError(f"tries is {asked}, but the grid of {label} has {sizes[label]} points; add values")
        elif space and not (own or plan.tries):
            raise ValueError("optuna needs a number of points for each method, as tries: 16")
    if plan.tries is None:
        free = {label: sizes[label] for label, _, _, _, own in drafts if label in sizes and not own}
        if len(set(free.values())) > 1:
            words = ", ".join(f"{label} {size}" for label, size in free.items())
            raise ValueError(
                f"the grids have different sizes ({words}), so the methods would not be tuned equally; set tries: "
                f"{min(free.values())}, or tries in each method for budgets that differ on purpose"
            )
    entries = []
    for label, name, settings, space, own in drafts:
        entry = Tried(label, name, settings, space, (own or plan.tries or sizes[label]) if space else 1)
        for point in corners(space):
            entry.method(point)
        _check_distinct(entry)
        entries.append(entry)
    return tuple(entries)


def _check_distinct(entry: Tried) -> None:
    """Refuse values that are one for the method, as 0.001 and '1e-3': they would be fewer tries than are counted."""
    start = next(iter(corners(entry.space)), {})
    for key, values in entry.space.items():
        found: dict[str, Any] = {}
        for value in values if isinstance(values, list) else ():
            try:
                one = entry.method({**start, key: value}).model_dump_json()
            except ValueError:  # with the others' first values it does not go together
                continue
            if one in found:
                raise ValueError(f"try of {entry.label}: {key} has a value twice: {found[one]!r} and {value!r}")
            found[one] = value


def _draft(label: str, content: object) -> tuple[str, str, dict[str, Any], dict[str, Range | list[Any]], int]:
    """Label, name, settings, space and own number of tries (0 without) of a method."""
    if not is_label(label) or label == FINAL:
        raise ValueError(f"'{label}' cannot be the label of a method; use other letters, and method: for its name")
    if not isinstance(content, dict):
        raise ValueError(f"{label} must be a mapping of settings, not {content!r}")
    settings = dict(content)
    name, space, own = settings.pop("method", label), settings.pop("try", None), settings.pop("tries", 0)
    if not isinstance(name, str):
        raise ValueError(f"method of {label} is {name!r}; give a method's name")
    if not isinstance(own, int) or isinstance(own, bool) or own < 0:
        raise ValueError(f"tries of {label} is {own!r}; give a whole number above 0")
    if space is not None and not isinstance(space, dict):
        raise ValueError(f"try of {label} must be a mapping of settings to lists of values, not {space!r}")
    searched = {str(key): _values(label, key, v) for key, v in (space or {}).items()}
    for key in searched:
        if above := next((other for other in searched if key.startswith(f"{other}.")), None):
            raise ValueError(f"try of {label} has {above} and {key}, which is a part of it; name the parts alone")
    return label, name, settings, searched, own


def _values(label: str, key: str, values: object) -> Range | list[Any]:
    if isinstance(values, list) and values:
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"try of {label}: {key} has a value twice: {values}")
        return values
    if isinstance(values, dict):
        try:
            return Range(**values)
        except ValidationError as error:
            raise ValueError(f"try of {label}: {key}: {sentence(error)}") from error
    raise ValueError(f"try of {label}: {key} is {values!r}; give a list of values, or low and high for optuna")


def merged(settings: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """``settings`` with the values of a point at their dotted names."""
    found = dict(settings)
    for place, value in point.items():
        *path, last = place.split(".")
        inner = found
        for part in path:
            deeper = inner.get(part, {})
            if not isinstance(deeper, dict):
                raise ValueError(
                    f"the sweep tries {place}, but {part} is {deeper!r}; leave the fixed value of {part} out"
                )
            inner[part] = inner = dict(deeper)
        inner[last] = value
    return found


@dataclass(frozen=True)
class Try:
    """A point of a method and the results of its runs.

    Attributes:
        entry: the method.
        point: the values.
        folders: the run of each seed.
        values: their values of the measure, in the order of ``folders``; None if a run failed.
        failure: the reason, or an empty text.
        measure: name of the measure.
    """

    entry: Tried
    point: Point
    folders: tuple[Path, ...]
    values: tuple[float, ...] | None
    failure: str = ""
    may_pass: bool = False
    """Whether the failure may not come again: an error of the machine or of code, not of the settings."""
    measure: str = "accuracy"

    @property
    def value(self) -> float | None:
        """The mean of the measure over seeds; None if a run failed."""
        return None if self.values is None else fmean(self.values)

    @property
    def score(self) -> float | None:
        """A number that is larger for a better try; None if a run failed."""
        return None if self.value is None else config.goodness(self.measure, self.value)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation over seeds; None with fewer than two."""
        return stdev(self.values) if self.values is not None and len(self.values) > 1 else None


class Runs:
    """Processes that do runs; a context manager, which ends them."""

    def __init__(self, experiment: Experiment, parallel: int | None, watcher: Watcher, command: str) -> None:
        number = parallel or (1 if experiment.device.startswith("cuda") else processes.cores())
        self._others = multiprocessing.active_children()
        self._pool = processes.pool(number, _begin)
        self._watcher, self._command = watcher, command
        self._lock = threading.Lock()
        self._done: dict[str, list[int]] = {}
        self._noted: set[tuple[str, str]] = set()

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()).difference(self._others):
                process.terminate()  # its run resumes at the next start
        self._pool.shutdown(cancel_futures=True)

    def expect(self, label: str, number: int) -> None:
        """Show that there will be so many runs."""
        self._done[label] = [0, number]

    def all(
        self, label: str, experiment: Experiment, points: Iterable[tuple[Tried, Point, Path]], seeds: Sequence[int]
    ) -> list[Try]:
        """Run points with all seeds, in their folders, on the task."""
        jobs, begun = [], dict[Path, Future[float | _Failed]]()
        for entry, point, place in points:
            folders = tuple(place / f"seed-{seed}" for seed in seeds)
            for seed, folder in zip(seeds, folders, strict=True):
                task = experiment.model_copy(update={"seed": seed, "workers": 0})
                if folder not in begun:  # the same point twice is one run
                    begun[folder] = self._pool.submit(_run, task, entry, point, folder, self._command)
            jobs.append((entry, point, folders, [begun[folder] for folder in folders]))
        tries = []
        for entry, point, folders, futures in jobs:
            results = [self._result(label, future) for future in futures]
            failed = [result for result in results if isinstance(result, _Failed)]
            values = tuple(result for result in results if not isinstance(result, _Failed))
            failure, may_pass = failed[0].reason if failed else "", any(one.may_pass for one in failed)
            found = (None if failed else values, failure, may_pass, experiment.chosen_measure)
            tries.append(Try(entry, point, folders, *found))
            if failed:
                with self._lock:
                    if (entry.label, failure) not in self._noted:  # a task that is impossible fails with every point
                        self._noted.add((entry.label, failure))
                        self._watcher.noted(f"{entry.label} with {words(point)} failed: {failure}")
        return tries

    def _result(self, label: str, future: "Future[float | _Failed]") -> "float | _Failed":
        try:
            result = future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a process of the sweep was ended: out of memory perhaps, so repeat it with a smaller --parallel; or "
                "by a script without if __name__ == '__main__':, under which the call belongs"
            ) from None
        with self._lock:
            done = self._done[label]
            done[0] += 1
            self._watcher.progressed(label, *done)
        return result


def _begin() -> None:
    """Prepare a process: one thread gives the same bits with any number of processes."""
    import torch

    torch.set_num_threads(1)
    add_working_folder()


@dataclass(frozen=True)
class _Failed:
    """The reason why a run has no value of the measure, and whether it may not come again."""

    reason: str
    may_pass: bool = False


def _run(experiment: Experiment, entry: Tried, point: Point, folder: Path, command: str) -> float | _Failed:
    """The measure of a run, or the reason why there is none."""
    job = Job(experiment, entry.method(point), folder, name=entry.name, label=entry.label, command=command)
    others = [summary.parent for summary in folder.parent.parent.glob(f"*/{folder.name}/summary.json")]
    try:
        reuse.prepare(job, sorted(others))  # tries of the server's settings ask the clients once
        found = run(job)
    except (Taken, errors.Changed):  # says nothing about the settings
        raise
    except files.Damaged as error:  # nor does this
        return _Failed(str(error), may_pass=True)
    except (ValueError, TooFewReplies) as error:
        return _Failed(str(error))
    except Exception as error:  # of a method of the user's own, or of the machine
        first = (str(error).strip().splitlines() or [""])[0]
        return _Failed(f"{type(error).__name__}: {first}", may_pass=True)
    value = score_of(found, experiment.chosen_measure)
    return _Failed(lacking(found, experiment.chosen_measure)) if value is None else value


def words(point: Point) -> str:
    """A point in words."""
    return ", ".join(f"{name} {_value(value)}" for name, value in point.items()) or "its own settings"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_OPENED = "final.json"


@dataclass(frozen=True)
class Outcome:
    """The results of a sweep, by the methods' labels.

    Attributes:
        sweep: the sweep.
        tries: the tries of each method.
        tests: the runs on the test set; empty before these.
        former: numbers of runs in its folder of points, seeds or methods that its file has no more.
    """

    sweep: Sweep
    tries: Mapping[str, list[Try]]
    tests: Mapping[str, Try]
    former: Mapping[str, int]

    def best(self, label: str) -> Try | None:
        """The point with the highest score, the first of several; None if every point failed."""
        done = [one for one in self.tries[label] if one.score is not None]
        return max(done, key=lambda one: -math.inf if one.score is None else one.score, default=None)


def run_sweep(
    sweep: Sweep, out: Path, *, final: bool = False, parallel: int | None = None, watcher: Watcher, command: str = ""
) -> Outcome:
    """Run or resume a sweep in the folder ``out``.

    Args:
        sweep: the sweep.
        out: its folder.
        final: whether to run the best point of each method on the test set afterwards. Once it was, it is shown again.
        parallel: number of runs at a time; one per core by default, one at all on a GPU.
        watcher: observes the progress.
        command: the command line, for the record.

    Raises:
        ValueError: the test set was opened after other tries, or with a seed that is missing now; no run worked, with
            the reason of the first one; or ``final`` although a try failed for a reason that may pass.
        Taken: another process runs a sweep in the folder.
    """
    if parallel is not None and not (isinstance(parallel, int) and parallel > 0):
        raise ValueError(f"parallel is {parallel!r}; give a whole number above 0")
    if RunFolder(out).config.exists():
        raise Taken(f"{out} is the folder of a run; choose another --out")
    with locked(out, lambda: any(out.glob("*/*/seed-*"))):
        return _run_sweep(sweep, out, final, parallel, watcher, command)


def _run_sweep(sweep: Sweep, out: Path, final: bool, parallel: int | None, watcher: Watcher, command: str) -> Outcome:
    """As `run_sweep`, in the locked folder."""
    digest, opened = _digest(sweep), _opened(out)
    if opened is not None and opened["sweep"] != digest:
        raise ValueError(
            f"the test set was opened for {out} on {opened['date'][:10]}, after other tries; tuning further would mean "
            "choosing by the test set, so use another --out"
        )
    final_seeds = sweep.plan.final_seeds or sweep.plan.seeds
    if opened is not None and (dropped := set(opened.get("seeds", ())).difference(final_seeds)):
        raise ValueError(
            f"the test set was opened for {out} on {opened['date'][:10]} with the seeds {_listed(opened['seeds'])}, of "
            f"which {_listed(dropped)} would be left out; choosing seeds would mean choosing by the test set, so keep "
            "them in final_seeds and add others"
        )
    places = {entry.label: out / entry.label for entry in sweep.entries}
    searches = ThreadPoolExecutor(len(sweep.entries))  # one method's search must not wait for the others
    with searches, Runs(sweep.experiment, parallel, watcher, command) as runs:
        tuned = searches.map(lambda entry: _tuned(sweep, entry, places[entry.label], runs), sweep.entries)
        tries = {entry.label: found for entry, found in zip(sweep.entries, tuned, strict=True)}
        outcome = Outcome(sweep, tries, {}, _former(out, tries))
        reuse.check_same(_worked(one for found in tries.values() for one in found))
        best = {label: one for label in tries if (one := outcome.best(label)) is not None}
        if not best:
            first = next(one for found in tries.values() for one in found)
            raise ValueError(f"no run of the sweep worked; {first.entry.label}: {first.failure}")
        if not final and opened is None:
            return outcome
        if opened is None:
            if passing := next((one for found in tries.values() for one in found if one.may_pass), None):
                raise ValueError(
                    f"{passing.entry.label} with {words(passing.point)} failed ({passing.failure}); the test set stays "
                    "closed until that try has worked: repeat the command"
                )
            opened = {"sweep": digest, "date": environment.now()}
            opened["chosen"] = chosen = {label: one.point for label, one in best.items()}
        else:  # what the test set was opened for, whatever has worked since
            chosen = opened["chosen"]
            best = {
                one.entry.label: one
                for each in tries.values()
                for one in each
                if chosen.get(one.entry.label) == one.point
            }
        if opened.get("seeds") != list(final_seeds):
            files.write_json(out / _OPENED, {**opened, "seeds": list(final_seeds)})
        experiment = sweep.experiment.model_copy(update={"validation": 0.0})
        runs.expect("test set", len(best) * len(final_seeds))
        points = [(one.entry, one.point, out / FINAL / label) for label, one in best.items()]
        for entry, point, place in points:
            _keep(sweep, tries[entry.label], point, [place / f"seed-{seed}" for seed in final_seeds])
        tests = runs.all("test set", experiment, points, final_seeds)
        reuse.check_same(_worked([*best.values(), *tests]))
    return replace(outcome, tests={one.entry.label: one for one in tests})


def _keep(sweep: Sweep, tries: Sequence[Try], chosen: Point, folders: Iterable[Path]) -> None:
    """Write into the folders of the runs on the test set how their settings were chosen, if they were."""
    if not tries[0].entry.space:
        return
    task, seeds = sweep.experiment, len(sweep.plan.seeds)
    found = [{"settings": one.point, "value": one.value, "failure": one.failure or None} for one in tries]
    content = {
        "given": task.model_dump(mode="json"),
        "measure": task.chosen_measure,
        "records": chosen_on(task) + (f", the mean over {seeds} seeds" if seeds > 1 else ""),
        "tries": found,
        "chosen": chosen,
    }
    for folder in folders:
        place = RunFolder(folder).tries
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(place, content)


def chosen_on(experiment: Experiment) -> str:
    """The validation records of a task in words."""
    whose = "each client's training records" if experiment.local_test else "the training records"
    return f"{100 * experiment.validation:g} % of {whose}"


def _former(out: Path, tries: Mapping[str, list[Try]]) -> Counter[str]:
    """Numbers of runs by method that a file had before it was edited, which were tries too."""
    now = {folder for found in tries.values() for one in found for folder in one.folders}
    runs = (place for place in sorted(out.glob("*/*/seed-*")) if place not in now)
    return Counter(label for place in runs if (label := place.relative_to(out).parts[0]) != FINAL)


def _tuned(sweep: Sweep, entry: Tried, place: Path, runs: Runs) -> list[Try]:
    """All tries of one method."""
    search, seeds, found = sweep.search(entry), sweep.plan.seeds, list[Try]()
    runs.expect(entry.label, entry.tries * len(seeds))
    points = next(search)
    while True:
        batch = [(entry, point, place / _name(sweep, entry, point)) for point in points]
        found += (tries := runs.all(entry.label, sweep.experiment, batch, seeds))
        try:
            points = search.send([one.score for one in tries])
        except StopIteration:
            return found


def _worked(tries: Iterable[Try]) -> list[Path]:
    return [folder for one in tries if one.values is not None for folder in one.folders]


def _listed(seeds: Iterable[int]) -> str:
    return " ".join(map(str, sorted(seeds)))


def _name(sweep: Sweep, entry: Tried, point: Point) -> str:
    """The name of a point's folder, the same in a file with more values."""
    return config.digest(sweep.experiment, {entry.label: (entry.name, entry.method(point))})


def _digest(sweep: Sweep) -> str:
    """SHA-256 of all that decides which settings are chosen."""
    task = sweep.experiment.model_dump(mode="json", exclude=set(config.FREE))
    entries = [
        [e.label, e.name, e.settings, {k: _plain(v) for k, v in e.space.items()}, e.tries] for e in sweep.entries
    ]
    plan = sweep.plan.model_dump(mode="json", exclude={"final_seeds"})
    return hashlib.sha256(json.dumps([task, plan, entries], sort_keys=True, default=str).encode()).hexdigest()


def _plain(values: Any) -> Any:
    return values if isinstance(values, list) else values.model_dump(mode="json")


def _opened(out: Path) -> dict[str, Any] | None:
    """When, after which sweep, for which points and with which seeds the test set was opened; None if it was not."""
    place = out / _OPENED
    if not place.exists() and not any((out / FINAL).glob("*/seed-*")):
        return None
    try:
        content = json.loads(place.read_text("utf-8"))
        facts = {"chosen": dict(content["chosen"]), "seeds": [int(seed) for seed in content["seeds"]]}
        return facts | {key: str(content[key]) for key in ("sweep", "date")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise files.Damaged(f"{place} is missing or damaged; delete {out} and run again") from error

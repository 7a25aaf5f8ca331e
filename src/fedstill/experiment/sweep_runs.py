"""Runs of a sweep's points, spread over processes."""

import multiprocessing
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from fedstill import files, processes
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment import config, reuse
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.experiment.search import Point
from fedstill.experiment.sweep_file import Entry
from fedstill.lookup import add_working_folder
from fedstill.runs.lock import Taken


@dataclass(frozen=True)
class Try:
    """A point of a method and the results of its runs.

    Attributes:
        entry: the method.
        point: the values.
        folders: the run of each seed.
        accuracies: their accuracies in [0, 1], in the order of ``folders``; None if a run failed.
        failure: the reason, or an empty text.
    """

    entry: Entry
    point: Point
    folders: tuple[Path, ...]
    accuracies: tuple[float, ...] | None
    failure: str = ""
    may_pass: bool = False
    """Whether the failure may not come again: an error of the machine or of code, not of the settings."""

    @property
    def score(self) -> float | None:
        """The mean accuracy over seeds; None if a run failed."""
        return None if self.accuracies is None else fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation over seeds; None with fewer than two."""
        return stdev(self.accuracies) if self.accuracies is not None and len(self.accuracies) > 1 else None


class Runs:
    """Processes that do runs; a context manager, which ends them."""

    def __init__(self, experiment: Experiment, parallel: int | None, watcher: Watcher, command: str) -> None:
        number = parallel or (1 if experiment.device.startswith("cuda") else config.cores())
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
        self, label: str, experiment: Experiment, points: Iterable[tuple[Entry, Point, Path]], seeds: Sequence[int]
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
            accuracies = tuple(result for result in results if not isinstance(result, _Failed))
            failure, may_pass = failed[0].reason if failed else "", any(one.may_pass for one in failed)
            tries.append(Try(entry, point, folders, None if failed else accuracies, failure, may_pass))
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
                "a process of the sweep was ended, out of memory perhaps; repeat the command with a smaller --parallel"
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
    """The reason why a run has no accuracy, and whether it may not come again."""

    reason: str
    may_pass: bool = False


def _run(experiment: Experiment, entry: Entry, point: Point, folder: Path, command: str) -> float | _Failed:
    """The accuracy of a run, or the reason why there is none."""
    job = Job(experiment, entry.method(point), folder, name=entry.name, label=entry.label, command=command)
    others = [summary.parent for summary in folder.parent.parent.glob(f"*/{folder.name}/summary.json")]
    try:
        reuse.prepare(job, sorted(others))  # tries of the server's settings ask the clients once
        accuracy = run(job)["accuracy"]
    except Taken:  # says nothing about the settings
        raise
    except files.Damaged as error:  # nor does this
        return _Failed(str(error), may_pass=True)
    except (ValueError, TooFewReplies) as error:
        return _Failed(str(error))
    except Exception as error:  # of a method of the user's own, or of the machine
        first = (str(error).strip().splitlines() or [""])[0]
        return _Failed(f"{type(error).__name__}: {first}", may_pass=True)
    if accuracy is None:
        return _Failed("the method has no model for all clients, so nothing to evaluate")
    return float(accuracy)


def words(point: Point) -> str:
    """A point in words."""
    return ", ".join(f"{name} {_value(value)}" for name, value in point.items()) or "its own settings"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Run a sweep: every point on validation records, then, if asked, the best point of each method on the test set.

Runs are spread over processes, each with one thread for the server's part and without workers, so that their number
changes no result. A sweep that was stopped is repeated: its searches come to the same points, and a finished run is
only read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill import files
from fedstill.engines.transport import Watcher
from fedstill.experiment import config
from fedstill.experiment.search import Point
from fedstill.experiment.sweep_file import FINAL, Entry, Sweep
from fedstill.experiment.sweep_runs import Runs, Try, words
from fedstill.runs import environment
from fedstill.runs.lock import locked

_OPENED = "final.json"


@dataclass(frozen=True)
class Outcome:
    """The results of a sweep, by the methods' labels; ``tests`` is empty without runs on the test set."""

    sweep: Sweep
    tries: Mapping[str, list[Try]]
    tests: Mapping[str, Try]

    def best(self, label: str) -> Try | None:
        """The point with the highest score, the first of several; None if every point failed."""
        done = [one for one in self.tries[label] if one.score is not None]
        return max(done, key=lambda one: one.score or 0.0, default=None)


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
        outcome = Outcome(sweep, tries, {})
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
        elif "chosen" in opened:  # what the test set was opened for, whatever has worked since
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
        tests = runs.all("test set", experiment, points, final_seeds)
    return Outcome(sweep, tries, {one.entry.label: one for one in tests})


def _tuned(sweep: Sweep, entry: Entry, place: Path, runs: Runs) -> list[Try]:
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


def _listed(seeds: Iterable[int]) -> str:
    return " ".join(map(str, sorted(seeds)))


def _name(sweep: Sweep, entry: Entry, point: Point) -> str:
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
    if not place.exists():
        return None
    try:
        content = json.loads(place.read_text("utf-8"))
        found: dict[str, Any] = {key: str(content[key]) for key in ("sweep", "date")}
        if "chosen" in content:  # not in early versions
            found["chosen"] = dict(content["chosen"])
        if "seeds" in content:  # likewise
            found["seeds"] = [int(seed) for seed in content["seeds"]]
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise files.Damaged(f"{place} is damaged; delete {out} and run again") from error

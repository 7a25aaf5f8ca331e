"""Tries of one run (``--tune``): a few settings of its method on validation records, of which the best are taken.

The tries are those of `tried`: the method's learning rate times 1, 3 and 10 (at a server 1, 0.3 and 3), five times the
rounds of a method that has several, and smaller ridges. They stand in the run's folder, with what they came to. No try
sees a test record, and the run itself trains on all training records. A method with a guarantee is refused: each try
would release once more, and the choice itself would depend on private records.
"""

import itertools
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedstill.base import files
from fedstill.base.settings import names, sentence
from fedstill.data.sources import DataSet
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment import config, reuse
from fedstill.experiment.checks import check_job
from fedstill.experiment.job import Job
from fedstill.experiment.judging import score_of
from fedstill.experiment.run import run
from fedstill.experiment.sweep import VALIDATION, Point, merged
from fedstill.protocol import Method, client_steps
from fedstill.runs.folder import TRIES, RunFolder, Taken, locked

_CLIENTS = ("local.lr", "head.lr")
_SERVERS = ("training.lr", "student.lr", "distillation.lr")
_MORE_ROUNDS = 5


def tried(method: Method) -> list[Point]:
    """The points that ``--tune`` tries, first the settings as they are.

    Raises:
        ValueError: the method has no setting that it knows.
    """
    known, values = {*names(type(method))}, config.flat(method.model_dump(mode="json"))
    space: dict[str, list[Any]] = {}
    if rate := next((name for name in (*_CLIENTS, *_SERVERS) if name in known), None):
        space[rate] = _times(values[rate], (1, 3, 10) if rate in _CLIENTS else (1, 0.3, 3))
    if values.get("rounds", 1) > 1:
        space["rounds"] = [values["rounds"], _MORE_ROUNDS * values["rounds"]]
    if "ridge" in known:
        space["ridge"] = _times(values["ridge"], (1, 1e-3, 1e-6))
    if not space:
        raise ValueError(
            f"{type(method).__name__} has no rate, rounds or ridge for --tune to try; name settings and values in a "
            "file for fedstill sweep"
        )
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())]


def _times(value: float, factors: tuple[float, ...]) -> list[float]:
    return [value if factor == 1 else float(f"{value * factor:.3g}") for factor in factors]


def is_private(method: Method) -> bool:
    """Whether the method claims a guarantee, or may release anything with noise."""
    own = config.flat(method.model_dump(mode="json"))
    noises = [value for name, value in own.items() if name.endswith(("epsilon", "noise_multiplier"))]
    released = any(field.is_released for one in client_steps(type(method)).values() for field in one.reply.schema)
    return bool(method.claims) or (released and not (noises and all(value in (None, 0) for value in noises)))


def check_tries(job: Job) -> None:
    """Refuse tries of a private method, and of one without settings to try.

    Raises:
        ValueError: it is one.
    """
    if is_private(job.method):
        raise ValueError(
            f"{job.name} releases with noise, and --tune would do so once for each of its tries, and choose by private "
            "records, which no epsilon counts; choose settings on public records with --epsilon None, and leave --tune "
            "out here"
        )
    tried(job.method)
    check_job(job)


def tuned(job: Job, *, data: DataSet | None = None, watcher: Watcher) -> Job:
    """The job with the best of its tries' settings, which are run or resumed in its folder first.

    Args:
        job: the run as it was asked for; its ``validation`` is the share of records for the tries, and the returned
            job has none.
        data: as for `fedstill.experiment.run.run`.
        watcher: is told each try.

    Raises:
        ValueError: the method is private, the folder has another run, or no try worked.
        TooFewReplies: no try had enough replies.
    """
    check_tries(job)
    with locked(job.out, lambda: any(job.out.glob(f"{TRIES}/*/journal/**/*"))):
        found = _read(job)
        if found is None:
            found = _run(job, data, watcher)
            files.write_json(RunFolder(job.out).tries, found)
    best = job.experiment.model_copy(update={"validation": 0.0})
    return job.replace(experiment=best, method=_at(job.method, found["chosen"]))


def _read(job: Job) -> dict[str, Any] | None:
    """What earlier tries came to; None if there are none.

    Raises:
        Taken: the folder has another run, or tries of one.
    """
    folder = RunFolder(job.out)
    if not folder.tries.exists():
        if other := folder.stranger():
            raise Taken(f"{job.out} has {other} and no tries; choose an empty folder with --out")
        return None
    found = folder.read_tries()
    if different := config.difference(found["given"], job.description()):
        raise Taken(f"{job.out} has tries of a run with {different}; choose another --out")
    return found


def _run(job: Job, data: DataSet | None, watcher: Watcher) -> dict[str, Any]:
    """Run the tries; the content of their file."""
    share, measure = job.experiment.validation or VALIDATION, job.experiment.chosen_measure
    experiment = job.experiment.model_copy(update={"validation": share})
    points = tried(job.method)
    results, done, failures = list[dict[str, Any]](), list[Path](), list[Exception]()
    for number, point in enumerate(points):
        watcher.progressed("tries", number, len(points))
        one = job.replace(experiment=experiment, method=_at(job.method, point), out=job.out / TRIES / str(number))
        value, failure = None, ""
        try:
            reuse.prepare(one, done)  # tries of the server's settings ask the clients once
            value = score_of(run(one, data=data), measure)
            done.append(one.out)
            failure = "" if value is not None else f"the validation records define no {measure}"
        except (Taken, files.Damaged):  # says nothing about the settings
            raise
        except (ValueError, TooFewReplies) as error:
            failures.append(error)
            failure = str(error)
            watcher.noted(f"a try failed: {error}")
        results.append({"settings": point, "value": value, "failure": failure or None})
    watcher.progressed("tries", len(points), len(points))
    if not done:
        raise failures[0]
    best = _best(results, measure)
    whose = "each client's training records" if experiment.local_test else "the training records"
    return {
        "given": job.description(),
        "measure": measure,
        "records": f"{100 * share:g} % of {whose}",
        "tries": results,
        "chosen": best,
    }


def _best(results: list[dict[str, Any]], measure: str) -> Point:
    """The settings of the best try, the first of equal ones.

    Raises:
        ValueError: no try has a value.
    """
    scored = [one for one in results if one["value"] is not None]
    if not scored:
        raise ValueError(f"no try has a value: {results[0]['failure']}; choose another --measure or more --validation")
    chosen: Point = max(scored, key=lambda one: config.goodness(measure, one["value"]))["settings"]
    return chosen


def _at(method: Method, point: Point) -> Method:
    """The method at a point.

    Raises:
        ValueError: its settings do not go together.
    """
    try:
        return type(method)(**merged(method.model_dump(), point))
    except ValidationError as error:
        raise ValueError(sentence(error, kind=type(method))) from error

"""Tries of one run (``--tune``): a few settings of its method on validation records, of which the best are taken.

The tries are those of `tried`: the method's learning rate times 1, 3 and 10 (at a server 1, 0.3 and 3), more steps, and
smaller ridges. More steps are as many passes over the records as make ten steps where a client takes fewer in a round,
and five times the rounds otherwise. The tries stand in the run's folder, with what they came to. None
sees a test record, and the run itself trains on all training records. A method with a guarantee is refused: each try
would release once more, and the choice itself would depend on private records.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedstill.base import files
from fedstill.base.errors import Changed
from fedstill.base.settings import names, sentence
from fedstill.data.sources import DataSet
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment import config, reuse
from fedstill.experiment import run as engine
from fedstill.experiment.checks import check_job
from fedstill.experiment.job import Job
from fedstill.experiment.judging import lacking, score_of
from fedstill.experiment.search import Point
from fedstill.experiment.sweep import VALIDATION, chosen_on, merged
from fedstill.protocol import Method, client_steps
from fedstill.runs.folder import TRIES, RunFolder, Taken, locked
from fedstill.train.sgd import FEWEST_STEPS

_CLIENTS = ("local.lr", "head.lr")
_SERVERS = ("training.lr", "student.lr", "distillation.lr")
_MORE_ROUNDS = 5


def tried(method: Method, batches: int | None = None) -> list[Point]:
    """The points that ``--tune`` tries, first the settings as they are.

    Args:
        method: the method as it was asked for.
        batches: number of batches of the median client's records, if it is known.

    Raises:
        ValueError: the method has no setting that it knows.
    """
    known, values = {*names(type(method))}, config.flat(method.model_dump(mode="json"))
    space: dict[str, list[Any]] = {}
    if rate := next((name for name in (*_CLIENTS, *_SERVERS) if name in known), None):
        space[rate] = _times(values[rate], (1, 3, 10) if rate in _CLIENTS else (1, 0.3, 3))
    if batches is not None and (values.get("local.epochs") or FEWEST_STEPS) * batches < FEWEST_STEPS:
        space["local.epochs"] = [values["local.epochs"], None]
    elif values.get("rounds", 1) > 1:
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
    if is_private(job.method) or job.experiment.scale is not None:
        what = job.name if is_private(job.method) else f"--scale {job.experiment.scale}"
        raise ValueError(
            f"{what} releases with noise, and --tune would do so once for each of its tries, and choose by private "
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
            found = {"given": job.description(), **_run(job, data, watcher)}
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
    measure, share = job.experiment.chosen_measure, job.experiment.validation or VALIDATION
    job = job.replace(experiment=job.experiment.model_copy(update={"validation": share}))
    points, results, done, failures = tried(job.method), list[dict[str, Any]](), list[Path](), list[Exception]()
    while len(results) < len(points):
        number = len(results)
        watcher.progressed("tries", number, len(points))
        place, value, failure = job.out / TRIES / str(number), None, None
        try:
            one = job.replace(method=_at(job.method, points[number]), out=place)
            reuse.prepare(one, done)  # tries of the server's settings ask the clients once
            found = engine.run(one, data=data)
            value = score_of(found, measure)
            failure = lacking(found, measure) if value is None else None
            done.append(place)
            reuse.check_same(done)
        except (Taken, Changed, files.Damaged):  # says nothing about the settings
            raise
        except (ValueError, TooFewReplies) as error:
            failures.append(error)
            failure = str(error)
            watcher.noted(f"a try failed: {error}")
        if not number:  # which has shown how many records clients have
            points = tried(job.method, _batches(job, place))
        results.append({"settings": points[number], "value": value, "failure": failure})
    watcher.progressed("tries", len(points), len(points))
    if not done:
        raise failures[0]
    chosen = {"tries": results, "chosen": _best(results, measure)}
    return {"measure": measure, "records": chosen_on(job.experiment), "contents": reuse.contents(done[0]), **chosen}


def _batches(job: Job, place: Path) -> int | None:
    """Number of batches of the median client's records in a try, if it got so far and its clients have batches."""
    size, folder = config.flat(job.method.model_dump(mode="json")).get("local.batch_size"), RunFolder(place)
    if not isinstance(size, int) or not folder.partition.exists():
        return None
    _, counts = folder.read_partition(job.experiment.clients)
    return None if counts is None else -(-int(np.median(counts.sum(1))) // size) or None


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

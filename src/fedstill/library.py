"""The front door of the library: `run` and `compare`, from methods and their settings to the results."""

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from fedstill import methods
from fedstill.base.errors import FedstillError, front_door
from fedstill.base.files import in_words, path_of
from fedstill.base.lookup import is_label, suggestion
from fedstill.base.settings import sentence
from fedstill.data import own
from fedstill.data.sources import DataSet, place_of
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher, Watchers
from fedstill.experiment import reuse
from fedstill.experiment import run as engine
from fedstill.experiment.checks import check_job
from fedstill.experiment.config import FREE, Experiment, TrackerName
from fedstill.experiment.job import Job, kind_of
from fedstill.experiment.progress import watch
from fedstill.experiment.reuse import Nobody, read_job
from fedstill.experiment.tries import tuned
from fedstill.protocol import Method
from fedstill.report.record import RunRecord, read_run
from fedstill.runs.folder import RunFolder
from fedstill.tracking import followed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fedstill.typed import RunSettings, SharedSettings


class _NotGiven:
    """An argument that is left out, which None is not."""

    def __repr__(self) -> str:
        return "..."


NOT_GIVEN = _NotGiven()


@front_door
def run(
    method: Job | str | Method | type[Method],
    *,
    data: Any = NOT_GIVEN,
    out: str | Path | None = None,
    replies: RunRecord | str | Path | None = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
    track: TrackerName | Sequence[TrackerName] = (),
    tune: bool = False,
    **settings: "Unpack[RunSettings]",
) -> RunRecord:
    """Run a method, or resume the run in ``out``, and return its results.

    ``run("fedgm", data="digits", clients=10, partition="classes:1", ipc=1)`` takes the settings of ``fedstill run``:
    those of the task (`Experiment`) and those of the method. Settings in a group are a dictionary:
    ``local={"epochs": 5}``.

    Args:
        method: the method's name, class or object; or a `Job`, which has its own settings and folder. A method of your
            own that has a field by the name of another argument or of a setting of the task gets it in an object:
            ``run(Mine(limit=3), limit=500)``.
        data: a data set by name or path, "mnist" unless it is given; or an object: a `DataSet`, a pair ``(X, y)``, a
            pandas, polars or Arrow table, ``(table, "column of classes")``, a data set of torch or of Hugging Face, or
            a list of these, one for each client (`fedstill.data.own.given`).
        out: the run's folder. Without it, the files of the run are deleted together with the returned object.
        replies: a finished run, whose replies to its first request serve this method too; no client is asked for them
            again. The task and the clients' settings are those of that run; the server's may be given, and those that
            change no result (``workers``, ``timeout``, ...).
        watcher: observes the progress. An exception that one of its methods raises ends the run; with ``out``, the
            same call resumes it.
        progress: whether to print the progress to stderr: by default, on a terminal and in a notebook.
        track: names of trackers that get the rounds, settings, results and images: "tensorboard", "mlflow", "wandb",
            "trackio". "tensorboard" writes into the run's folder, so that it needs ``out``.
        tune: whether to choose the method's learning rate, rounds or ridge first, by a few tries on validation records
            (``validation``, a tenth of the training records by default); not for a method with noise.
        settings: settings of the task and of the method.

    Raises:
        InputError: a setting is unknown or out of its range, the folder has another run, the data cannot be used, the
            clients of ``replies`` did other work, or the package of a tracker is missing; one sentence.
        TooFewReplies: too few clients gave a usable reply. With ``workers=0`` the error of a client's step is its
            ``__cause__``; one that is no ``ValueError``, as of a bug in the step, is raised itself.
    """
    data, chosen = _given(data, dict(settings))
    names = (track,) if isinstance(track, str) else tuple(track)
    source = data if isinstance(data, DataSet) else None
    if isinstance(method, Job):
        _check_schema(method.experiment.schema_file, source)
        if replies is not None:
            raise ValueError("a Job has its own task and clients' settings; give the method's name in its place")
        named = {"data": data} if isinstance(data, str) else {}
        if given := {**chosen, **({} if out is None else {"out": out}), **named}:
            raise ValueError(f"a Job has its own task, method and folder; leave {', '.join(given)} out")
        return _shown(method, watcher, progress, data=source, track=names, tune=tune)
    if not (isinstance(method, str | Method) or (isinstance(method, type) and issubclass(method, Method))):
        raise ValueError(f"a method is a name, a class, an object or a Job, not {method!r}: run('fedavg')")
    arguments = {"data": data, "out": out, "replies": replies, "watcher": watcher, "progress": progress}
    arguments |= {"track": track, "tune": tune or None}
    _check_meant(method, chosen, [key for key, value in arguments.items() if value not in (None, (), NOT_GIVEN)])
    nobody = False
    if replies is None:
        task = {} if data is NOT_GIVEN else {"data": source.name if source is not None else data}
        make = partial(_job, method, {**task, **chosen})
    else:
        earlier, nobody = _earlier(replies, tune)
        make = partial(_job_on, earlier, method, {**({"data": data} if isinstance(data, str) else {}), **chosen})
    done = partial(_shown, watcher=watcher, progress=progress, data=source, track=names, nobody=nobody, tune=tune)
    if out is not None:
        return done(make(path_of(out, "out")))
    if "tensorboard" in names:
        raise ValueError(
            "the tracker 'tensorboard' writes into the run's folder, which would be deleted; give out='runs/first'"
        )
    folder = TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True)
    try:
        record = done(make(Path(folder.name) / "run"))
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(record, folder.cleanup)
    return record


def _earlier(replies: RunRecord | str | Path, tune: bool) -> tuple[Path, bool]:
    """The folder of a finished run, and whether real sites replied to it, of whom none is asked again."""
    if tune:
        raise ValueError("tune tries settings of a new run; with replies= give the server's settings, or leave it out")
    earlier = path_of(replies, "replies")
    return earlier, RunFolder(earlier).asked_sites


def _check_schema(schema: str | None, data: DataSet | None) -> None:
    if schema is not None and data is not None:
        raise ValueError(
            "schema_file is for a table, but the data set was read without it; give the table or its place"
        )


def _given(data: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The name or path of the data, or the data set of an object; the settings with a list's partition by client."""
    if data is NOT_GIVEN:
        return data, settings
    if data is None:
        raise ValueError("data is None; give a name, a path or records, or leave the argument out for MNIST")
    if isinstance(data, DataSet):
        _check_schema(settings.get("schema_file"), data)
        return data, settings
    if isinstance(data, str | Path):
        return place_of(data), settings
    found, clients = own.given(
        data, own.reading_of({"clients": Experiment.model_fields["clients"].default, **settings})
    )
    if clients is None:
        return found, settings
    stated = {"partition": f"by:{own.CLIENT}", "clients": clients}
    if other := next((key for key in stated if key in settings and settings[key] != stated[key]), None):
        raise ValueError(
            f"{other} is {settings[other]!r}, but the data are a list of {clients} clients' records; leave it out"
        )
    return found, {**settings, **stated}


def _check_meant(method: str | Method | type[Method], settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Refuse a keyword that is a field of the method's class too, so that one which the run gains later takes nothing.

    The class alone is no error, or each new setting of a run would break methods that never use it by keyword.
    """
    if isinstance(method, Method):
        return  # its own settings are in the object
    kind = methods.find(method) if isinstance(method, str) else method
    keywords = [*arguments, *(key for key in settings if key in Experiment.model_fields)]
    if twice := next((key for key in keywords if key in kind.model_fields), None):
        raise ValueError(
            f"{twice} is a setting of the run and of {kind.__name__}; give the method as an object, which has its own: "
            f"run({kind.__name__}({twice}=...), ...)"
        )


def finish(
    job: Job,
    watcher: Watcher,
    *,
    data: DataSet | None = None,
    track: Sequence[str] = (),
    nobody: bool = False,
    tune: bool = False,
) -> RunRecord:
    """Run ``job``, or resume it, and return its results: what `run` and the command line do once there is a job.

    Args:
        job: the run.
        watcher: shows the progress.
        data: its data set as an object; by default the one that its experiment names.
        track: names of trackers.
        nobody: whether its clients are real sites, none of which is asked.
        tune: whether to choose settings by a few tries first (`fedstill.experiment.tries`).

    Raises:
        ValueError: as for `run`.
        TooFewReplies: too few clients gave a usable reply.
    """
    if tune:
        job = tuned(job, data=data, watcher=watcher)
    with followed(track, job.out, watcher) as followers:
        engine.run(job, data=data, watcher=followers, sites=(lambda _: Nobody()) if nobody else None)
    return read_run(job.out)


def _shown(job: Job, watcher: Watcher | None, progress: bool | None, **settings: Any) -> RunRecord:
    """As `finish`, with the progress on stderr if ``progress`` says so, and told to ``watcher`` too."""
    console = Console(file=sys.stderr)
    shown = console.is_interactive or console.is_jupyter if progress is None else progress
    with watch(console, job.title, quiet=not shown) as bars:
        try:
            return finish(job, bars if watcher is None else Watchers(bars, watcher), **settings)
        except TooFewReplies as error:
            bug = error.__cause__
            if bug is None or isinstance(bug, ValueError | FedstillError):
                raise
            bug.add_note(str(error))
            raise bug from None


def _job_on(run: Path, method: str | Method | type[Method], settings: Mapping[str, Any], out: Path) -> Job:
    """The job of a method with ``settings`` of the server on the replies of a finished run."""
    before = read_job(run, out, "")
    if unknown := [key for key in settings if key in Experiment.model_fields and key not in FREE]:
        raise ValueError(f"the task is that of {run}, as its replies are; leave {', '.join(unknown)} out")
    free = {key: settings[key] for key in settings if key in FREE}
    settings = {key: value for key, value in settings.items() if key not in FREE}
    if not isinstance(method, Method):
        kind = methods.find(method) if isinstance(method, str) else method
        start = before.method if kind is type(before.method) else kind()
        clients = dict(reuse.with_client_settings(start, before.method))
        made = _job(method, {**clients, **settings}, out)
    else:
        made = _job(method, settings, out)
    try:
        same = {name: getattr(before.experiment, name) for name in Experiment.model_fields}
        experiment = Experiment(**{**same, **free})
    except ValidationError as error:
        raise ValueError(sentence(error)) from error
    return reuse.repeat(run, made.replace(experiment=experiment))


def _job(method: str | Method | type[Method], settings: Mapping[str, Any], out: Path) -> Job:
    """The job of a method with ``settings``, of which some are the task's and some the method's."""
    kind = kind_of(method)
    mine = {key: value for key, value in settings.items() if key not in Experiment.model_fields}
    if unknown := [key for key in mine if key not in kind.model_fields]:
        near = suggestion(unknown[0], [*Experiment.model_fields, *kind.model_fields])
        raise ValueError(f"{unknown[0]} is neither a setting of the task nor of {kind.__name__}{near}")
    if mine and isinstance(method, Method):
        raise ValueError(f"{kind.__name__} is an object with its own settings; leave {', '.join(mine)} out")
    try:
        experiment = Experiment(**{key: value for key, value in settings.items() if key not in mine})
        made = method if isinstance(method, Method) else kind(**mine)
    except ValidationError as error:
        raise ValueError(sentence(error, kind=kind)) from error
    return Job(experiment, made, out, name=method if isinstance(method, str) else "")


# Several runs --------------------------------------------------------------------------------------------------------


@front_door
def compare(
    methods: Iterable[str | Method | type[Method]] | Mapping[str, str | Method | type[Method]],
    *,
    out: str | Path,
    seeds: Iterable[int] = (0,),
    data: Any = NOT_GIVEN,
    watcher: Watcher | None = None,
    progress: bool | None = None,
    **settings: "Unpack[SharedSettings]",
) -> list[RunRecord]:
    """Run several methods on the same clients and seeds, as ``fedstill compare``; the same call resumes them.

    Methods whose first request is the same share the replies to it, so that clients work once.

    Args:
        methods: names, classes or objects, perhaps by label; a method's own settings are those of its object:
            ``{"once": FedAvg(rounds=1), "fedgm": "fedgm"}``.
        out: folder of the runs, ``LABEL/seed-SEED`` below it.
        seeds: a run of each method for each.
        data: as for `run`.
        watcher: observes the progress of every run.
        progress: whether to print the progress to stderr: by default, on a terminal and in a notebook.
        settings: settings of the task (`Experiment`).

    Returns:
        The runs, seed by seed, each with the methods in order; `to_pandas` makes a table of them.

    Raises:
        InputError: as for `run`; all runs are checked before the first begins.
        TooFewReplies: as for `run`.
    """
    named = _labelled(methods)
    seeds = _checked_seeds(seeds)
    if unknown := [key for key in settings if key not in Experiment.model_fields or key == "seed"]:
        raise ValueError(
            f"{unknown[0]} is no setting of the task that all runs share; a method's own are those of its object, as "
            "FedAvg(rounds=1), and seeds=(0, 1) gives seeds"
        )
    data, chosen = _given(data, dict(settings))
    source = data if isinstance(data, DataSet) else None
    task = {} if data is NOT_GIVEN else {"data": source.name if source is not None else data}
    folder = path_of(out, "out")
    jobs = [
        _job(method, {**task, **chosen, "seed": seed}, folder / label / f"seed-{seed}").replace(label=label)
        for seed in seeds
        for label, method in named.items()
    ]
    for job in jobs:  # the last one must not fail after hours of the others
        check_job(job)
    records: list[RunRecord] = []
    for job in jobs:
        reuse.prepare(job, [record.folder for record in records])
        records.append(_shown(job, watcher, progress, data=source))
    return records


def _labelled(methods: object) -> dict[str, str | Method | type[Method]]:
    """The methods of a comparison by their labels, each the name of a folder."""
    if not isinstance(methods, Iterable) or isinstance(methods, str | bytes | Method):
        raise ValueError(f"methods are {in_words(methods)}; give several in a list: compare(['fedavg', 'fedgm'], ...)")
    listed = [*methods.items()] if isinstance(methods, Mapping) else [(_label(one), one) for one in methods]
    named = dict(listed)
    for _, one in listed:
        kind_of(one)
    if not named or len(named) < len(listed):
        raise ValueError("methods are none, or two have one label; give them by label: {'once': FedAvg(rounds=1), ...}")
    if wrong := [label for label in named if not is_label(label)]:
        raise ValueError(f"{wrong[0]!r} is not a label; use letters, digits, - and _, as {{'once': FedAvg(rounds=1)}}")
    return named


def _checked_seeds(seeds: object) -> list[int]:
    """The seeds of any iterable, which is read once."""
    listed = [] if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable) else _parts(seeds)
    whole = all(isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0 for seed in listed)
    if not listed or not whole or len(set(listed)) < len(listed):
        raise ValueError(
            f"seeds are {in_words(seeds)}; they must be different whole numbers of 0 or more, as seeds=(0, 1, 2)"
        )
    return listed


def _parts(values: Iterable[Any]) -> list[Any]:
    """The values of a list, an array or a tensor of any shape but that of one number, which has none."""
    whole = values.tolist() if hasattr(values, "tolist") else [*values]
    return whole if isinstance(whole, list) else []


def _label(method: object) -> str:
    if isinstance(method, str):
        return method.rpartition(":")[2]
    return (method if isinstance(method, type) else type(method)).__name__

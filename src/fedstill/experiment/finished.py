"""The job of a finished run, from its folder, and what may have changed since."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from fedstill import methods
from fedstill.data import public
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.task import Task
from fedstill.runs import formats
from fedstill.runs.contents import Config
from fedstill.runs.folder import RunFolder
from fedstill.settings import sentence


def read_job(run: Path, out: Path, command: str) -> Job:
    """The job of a finished run, with ``out`` in place of its folder.

    Raises:
        ValueError: ``run`` is not a finished run, or its method cannot be imported; one sentence.
    """
    folder = RunFolder(run)
    folder.check_finished()
    content = folder.read_config()
    settings = dict(content.method)
    try:
        name = str(settings.pop("name"))
        return Job(
            Experiment(**content.experiment),
            methods.find(name)(**settings),
            out,
            name=name,
            label=content.label,
            command=command,
        )
    except KeyError as error:
        raise folder.damaged(folder.config, f"it lacks {error}") from error
    except ValueError as error:  # a method or a setting that this version does not know
        words = f"{folder.config}: {sentence(error)}" if isinstance(error, ValidationError) else str(error)
        raise formats.of_newer(run, folder.config, words) or ValueError(words) from error


def read_simulated(run: Path, command: str) -> Job:
    """The job of a finished run with simulated clients, with the run's own folder.

    Raises:
        ValueError: as `read_job`, or the run asked real sites.
    """
    job = read_job(run, run, command)
    if RunFolder(run).asked_sites:
        raise ValueError(f"{run} asked real sites, whose records are not here; attack a simulated run")
    return job


_CHANGING = {"fingerprint": "the data", "public_fingerprint": "the public data", "version": "fedstill"}
"""What a fact of ``config.json`` describes that may change after a run was begun."""


def check_facts(run: Path, begun: Config | None, now: Mapping[str, str]) -> None:
    """Refuse to go on with ``run`` on other data, or with another version of fedstill, than it was begun with.

    Args:
        run: the run's folder.
        begun: its ``config.json``; None before its first start.
        now: the same facts today.
    """
    for name, value in now.items():
        if begun is not None and (before := getattr(begun, name)) not in (None, value):
            raise ValueError(
                f"{run} was begun with {name} {before}, now it is {value}: {_CHANGING[name]} changed since; bring "
                "the former back, or start anew with another --out"
            )


def public_facts(experiment: Experiment) -> dict[str, str]:
    """The digest of the public data set, if they are one, as a fact of ``config.json``."""
    found = None if experiment.public is None else public.fingerprint(experiment.public, experiment.size)
    return {} if found is None else {"public_fingerprint": found}


def changed_code(run: Path, job: Job) -> str | None:
    """The first place of code of the user's own that has changed since ``run``, whose job is ``job``."""
    return config.changed_code(RunFolder(run).read_config().code, job.own_code())


def check_code(run: Path, job: Job) -> None:
    """Refuse code of the user's own that has changed since ``run``, whose job is ``job``."""
    if changed := changed_code(run, job):
        raise ValueError(
            f"the code of {changed} has changed since {run} was made with it; bring the former back, or repeat the run "
            "in another folder"
        )


def check_unchanged(run: Path, job: Job, task: Task) -> None:
    """Refuse data, public data or code of the user's own that have changed since ``run``.

    Args:
        run: the run's folder.
        job: its job, from `read_simulated`.
        task: the records as they are today.

    Raises:
        ValueError: something has changed; one sentence.
    """
    check_code(run, job)
    facts = {"fingerprint": task.fingerprint, **public_facts(job.experiment)}
    check_facts(run, RunFolder(run).read_config(), facts)

"""A late client joins a finished one-shot run: the others' replies are kept, and only who is missing is asked."""

import os
import shutil
from pathlib import Path

from pydantic import ValidationError

from fedstill import files, methods
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import Job, read_json
from fedstill.journal import JUDGING, Journal

_TAKEN = ("meter.jsonl", "spent.jsonl", "000000-*/*.reply", "000000-*/request")
"""What the new journal gets from the old one: no refusal, no checkpoint, and nothing that was made from the replies."""


def read_job(run: Path, out: Path, command: str) -> Job:
    """The job that made a finished run, to be done again in ``out``.

    Raises:
        ValueError: ``run`` holds no finished run, or one of a method that is not there; one sentence.
    """
    for name in ("config.json", "summary.json"):
        if not (run / name).is_file():
            raise ValueError(f"{run} is no finished run (it has no {name}); finish it with the command that began it")
    kept = read_json(run / "config.json", {"experiment", "method", "label", "run"})
    try:
        settings = dict(kept["method"])
        name = str(settings.pop("name"))
        return Job(
            Experiment(**kept["experiment"]), name, methods.get(name)(**settings), out, str(kept["label"]), command
        )
    except ValidationError as error:
        raise ValueError(f"{run / 'config.json'}: {config.sentence(error)}") from error
    except (TypeError, KeyError) as error:
        raise files.Damaged(f"{run / 'config.json'} is damaged ({error}); it does not say what was run") from error


def asked_sites(run: Path) -> bool:
    """Whether the run asked real sites, whose records nobody here shared out."""
    return not (run / "partition.json").exists()


def begin(run: Path, job: Job) -> None:
    """Lay out ``job.out`` as if the run had been killed with just the missing replies outstanding.

    What is there already is left alone, so that an extension that died goes on. Replies are linked, not copied, where
    the file system can do that; nothing in ``run`` changes.

    Args:
        run: a finished run.
        job: from `read_job`; may count more clients, where they are real sites.

    Raises:
        ValueError: the run has more than one exchange, nobody is missing, or ``job`` is another task; one sentence.
    """
    kept = read_json(run / "config.json", {"experiment", "method"})
    described = config.describe(job.experiment, job.name, job.method, job.label, job.command)
    before = {**kept, "experiment": {**kept["experiment"], "clients": job.experiment.clients}}
    if other := config.difference(before, described):
        raise ValueError(f"{run} has {other}; an extension changes nothing but who answers")
    old = int(kept["experiment"]["clients"])
    if job.experiment.clients < old or (job.experiment.clients > old and not asked_sites(run)):
        raise ValueError(
            f"--clients is {job.experiment.clients}; {run} shares its records among {old}, and an extension asks those "
            "who are missing (only a run with real sites can get more)"
        )
    if (job.out / "config.json").exists():
        return
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    _one_shot(run, job.experiment.clients)
    beside = job.out.with_name(f".{job.out.name}{files.PART}")
    shutil.rmtree(beside, ignore_errors=True)
    for pattern in (*(f"journal/{name}" for name in _TAKEN), "clients/**/*"):
        for place in run.glob(pattern):
            if place.is_file():
                _link(place, beside / place.relative_to(run), linked=place.suffix == ".reply")
    facts = {key: kept[key] for key in ("version", "fingerprint", "run")}
    files.write_json(beside / "config.json", {**described, **facts, "extends": str(run)})
    job.out.parent.mkdir(parents=True, exist_ok=True)
    if job.out.exists():
        job.out.rmdir()
    beside.rename(job.out)


def _one_shot(run: Path, clients: int) -> None:
    asked = {exchange for exchange, _ in Journal(run / "journal").times() if exchange < JUDGING}
    if asked != {0}:
        raise ValueError(
            f"{run} asked its clients {len(asked)} times; only a one-shot run can be extended, since what is asked "
            "later depends on all replies to what was asked before"
        )
    answered = len(list((run / "journal").glob("000000-*/*.reply")))
    if answered >= clients:
        raise ValueError(f"all {clients} clients of {run} have answered; there is nothing to add")


def _link(place: Path, to: Path, *, linked: bool) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if linked:  # never written in place
        try:
            os.link(place, to)
            return
        except OSError:
            pass
    shutil.copy2(place, to)

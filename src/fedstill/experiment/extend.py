"""Replies of a finished run for another one: of a run that a late client joins, or of one with another server.

The new run is laid out as if it had been killed once the replies had come, so that it goes on from there.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import fedstill
from fedstill import files, methods
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import Job, read_json
from fedstill.journal import JUDGING, Journal

_TAKEN = ("000000-*/*.reply", "000000-*/request")
"""What the new journal gets, beside the first question's bytes and releases: no refusal, no checkpoint, and nothing
that was made from the replies."""


def read_job(run: Path, out: Path, command: str) -> Job:
    """The job that made a finished run, to be done again in ``out``.

    Raises:
        ValueError: ``run`` holds no finished run, or one of a method that is not there; one sentence.
    """
    for name in ("config.json", "summary.json"):
        if not (files.folder_of_run(run) / name).is_file():
            raise ValueError(f"{run} is no finished run (it has no {name}); finish it with the command that began it")
    kept = read_json(run / "config.json", {"experiment", "method", "label", "run"})
    try:
        settings = dict(kept["method"])
        name = str(settings.pop("name"))
        return Job(
            Experiment(**kept["experiment"]), name, methods.find(name)(**settings), out, str(kept["label"]), command
        )
    except ValidationError as error:
        raise ValueError(f"{run / 'config.json'}: {config.sentence(error)}") from error
    except (TypeError, KeyError) as error:
        raise files.Damaged(f"{run / 'config.json'} is damaged ({error}); it does not say what was run") from error


def asked_sites(run: Path) -> bool:
    """Whether the run asked real sites, whose records nobody here shared out."""
    return not (run / "partition.json").exists()


def read_simulated(run: Path, command: str) -> Job:
    """As `read_job`, of a run whose clients' records are here.

    Raises:
        ValueError: see `read_job`; or the run asked real sites.
    """
    job = read_job(run, run, command)
    if asked_sites(run):
        raise ValueError(f"{run} asked real sites, whose records nobody here has; attack a simulated run")
    return job


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
    facts = {key: kept[key] for key in ("version", "fingerprint", "run")}
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, "clients/**/*")


def reuse(job: Job, earlier: Iterable[Path]) -> None:
    """Begin ``job.out`` with the replies to its first question, if a finished run got those that it would get.

    Methods say which settings those replies depend on (`fedstill.protocol.Method.first_answer`). Bytes and time of
    the question are taken along: the new run costs what it would have cost alone.

    Args:
        job: may have been begun already; then nothing is done.
        earlier: folders of finished runs, the likeliest last.
    """
    wanted = job.method.first_answer
    if wanted is None or (job.out.exists() and any(job.out.iterdir())):
        return
    described = config.describe(job.experiment, job.name, job.method, job.label or job.name, job.command)
    for run in reversed(list(earlier)):
        other = read_job(run, job.out, job.command)
        if other.method.first_answer != wanted or config.difference(
            {**described, "experiment": other.experiment.model_dump(mode="json")}, described
        ):
            continue
        kept = read_json(run / "config.json", {"version", "fingerprint"})
        if kept["version"] == fedstill.__version__ and not asked_sites(run):
            facts = {"version": kept["version"], "fingerprint": kept["fingerprint"], "run": secrets.token_hex(16)}
            lay_out(run, job.out, {**described, **facts, "answers": str(run)})
            return


def lay_out(run: Path, out: Path, description: dict[str, Any], *more: str, without: int | None = None) -> None:
    """Make ``out`` a run that has just the replies to its first question.

    Args:
        run: whose replies these are.
        out: a folder that is not there yet, or empty.
        description: its ``config.json``.
        *more: patterns of other files of ``run`` that it gets.
        without: the client whose reply is left out.
    """
    beside, left_out = out.with_name(f".{out.name}{files.PART}"), f"{-1 if without is None else without:05d}.reply"
    shutil.rmtree(beside, ignore_errors=True)
    for pattern in (*(f"journal/{name}" for name in _TAKEN), *more):
        for place in run.glob(pattern):
            if place.is_file() and place.name != left_out:
                _link(place, beside / place.relative_to(run), linked=place.suffix == ".reply")
    for name in ("meter.jsonl", "spent.jsonl"):
        lines = files.read_json_lines(run / "journal" / name)
        kept = [line for line in lines if line.get("exchange") == 0 and line.get("client") != without]
        if kept:
            files.write_bytes(beside / "journal" / name, *(json.dumps(line).encode() + b"\n" for line in kept))
    files.write_json(beside / "config.json", description)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    beside.rename(out)


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

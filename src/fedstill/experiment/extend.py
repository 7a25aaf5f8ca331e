"""Reuse of a finished run's replies: to ask its missing clients, or to repeat the server's part with other settings.

The new run's folder looks like that of a run interrupted after the replies arrived, so that running it resumes there.
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
from fedstill.experiment.run import Job
from fedstill.runs.folder import RunFolder

_TAKEN = ("000000-*/*.reply", "000000-*/request")
"""Files of the journal that the new run receives, besides the bytes and releases of the first request; refusals and
checkpoints are left out."""


def read_job(run: Path, out: Path, command: str) -> Job:
    """The job of a finished run, with the folder ``out`` in place of its own.

    Raises:
        ValueError: ``run`` holds no finished run, or its method cannot be found; one sentence.
    """
    folder = RunFolder(run)
    folder.check_finished()
    kept = folder.read_config()
    settings = dict(kept.method)
    try:
        name = str(settings.pop("name"))
        return Job(Experiment(**kept.experiment), name, methods.find(name)(**settings), out, kept.label, command)
    except ValidationError as error:
        raise ValueError(f"{folder.config}: {config.sentence(error)}") from error
    except KeyError as error:
        raise folder.damaged(folder.config, f"it lacks {error}") from error


def read_simulated(run: Path, command: str) -> Job:
    """The job of a finished run whose clients were simulated, with the run's own folder.

    Raises:
        ValueError: see `read_job`; or the run asked real sites.
    """
    job = read_job(run, run, command)
    if RunFolder(run).asked_sites:
        raise ValueError(f"{run} asked real sites, whose records nobody here has; attack a simulated run")
    return job


def begin(run: Path, job: Job) -> None:
    """Prepare ``job.out`` so that running ``job`` asks only the clients whose reply ``run`` lacks.

    An extension that was begun before is left as it is. Nothing in ``run`` changes.

    Args:
        run: a finished run.
        job: from `read_job`; may count more clients, where they are real sites.

    Raises:
        ValueError: the run has more than one exchange, nobody is missing, or ``job`` is another task; one sentence.
    """
    folder, out = RunFolder(run), RunFolder(job.out)
    kept = folder.read_config()
    described = config.describe(job.experiment, job.name, job.method, job.label, job.command)
    before = {**kept.content, "experiment": {**kept.experiment, "clients": job.experiment.clients}}
    if other := config.difference(before, described):
        raise ValueError(f"{run} has {other}; an extension changes nothing but who answers")
    old = int(kept.experiment["clients"])
    if job.experiment.clients < old or (job.experiment.clients > old and not folder.asked_sites):
        raise ValueError(
            f"--clients is {job.experiment.clients}; {run} shares its records among {old}, and an extension asks those "
            "who are missing (only a run with real sites can get more)"
        )
    if out.config.exists():
        return
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    _check_one_shot(folder, job.experiment.clients)
    if kept.run is None:
        raise folder.damaged(folder.config, "it lacks 'run', as early versions wrote it")
    facts = kept.model_dump(include={"version", "fingerprint", "run"})
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, "clients/**/*")


def reuse(job: Job, earlier: Iterable[Path]) -> None:
    """Prepare ``job.out`` with the replies to its first request, if a finished run has received the same replies.

    `fedstill.protocol.Method.first_answer` gives the settings that those replies depend on. The request's bytes and
    seconds are counted in the new run too, so that it costs as much as it would alone.

    Args:
        job: the new run; if it was begun before, nothing is done.
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
        kept = RunFolder(run).read_config()
        if kept.version == fedstill.__version__ and not RunFolder(run).asked_sites:
            facts = {"version": kept.version, "fingerprint": kept.fingerprint, "run": secrets.token_hex(16)}
            lay_out(run, job.out, {**described, **facts, "answers": str(run)})
            return


def lay_out(run: Path, out: Path, description: dict[str, Any], *more: str, without: int | None = None) -> None:
    """Make ``out`` the folder of a run that has received the replies to its first request and nothing else.

    Replies are linked, not copied, where the file system supports links.

    Args:
        run: the finished run with the replies.
        out: a folder that does not exist, or an empty one.
        description: the ``config.json`` of the new run.
        *more: patterns of other files of ``run`` to copy.
        without: the client whose reply is left out.
    """
    beside, left_out = out.with_name(f".{out.name}{files.PART}"), f"{-1 if without is None else without:05d}.reply"
    journal, copy = RunFolder(run).journal, RunFolder(beside)
    shutil.rmtree(beside, ignore_errors=True)
    for pattern in (*(f"{journal.name}/{name}" for name in _TAKEN), *more):
        for place in run.glob(pattern):
            if place.is_file() and place.name != left_out:
                _link(place, beside / place.relative_to(run), linked=place.suffix == ".reply")
    for name in ("meter.jsonl", "spent.jsonl"):
        lines = files.read_json_lines(journal / name)
        kept = [line for line in lines if line.get("exchange") == 0 and line.get("client") != without]
        if kept:
            files.write_bytes(copy.journal / name, *(json.dumps(line).encode() + b"\n" for line in kept))
    copy.write_config(description)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    beside.rename(out)


def _check_one_shot(folder: RunFolder, clients: int) -> None:
    if (asked := folder.exchanges) != {0}:
        raise ValueError(
            f"{folder} asked its clients {len(asked)} times; only a one-shot run can be extended, since what is asked "
            "later depends on all replies to what was asked before"
        )
    if len(list(folder.journal.glob("000000-*/*.reply"))) >= clients:
        raise ValueError(f"all {clients} clients of {folder} have answered; there is nothing to add")


def _link(place: Path, to: Path, *, linked: bool) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if linked:  # never written in place
        try:
            os.link(place, to)
            return
        except OSError:
            pass
    shutil.copy2(place, to)

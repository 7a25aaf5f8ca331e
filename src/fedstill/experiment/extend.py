"""A run on a finished run's replies: to ask the missing clients, or to leave one out.

The new run's folder is prepared like that of a run interrupted after the replies arrived; running it resumes there.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import override

import fedstill
from fedstill import files, methods
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.journal import Journal, Refusal
from fedstill.runs import formats
from fedstill.runs.folder import RunFolder
from fedstill.settings import sentence

_FILES = ("000000-*/*.reply", "000000-*/request")
"""Files to copy to the new run's journal; the bytes and releases of the first request are copied too, refusals and
checkpoints are not."""
_WITHDRAWN = "its reply was withdrawn (--without)"


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


def begin(run: Path, job: Job) -> None:
    """Prepare ``job.out`` so that running ``job`` asks only the clients whose reply ``run`` lacks.

    An extension that has been prepared before stays unchanged, and so does ``run``.

    Args:
        run: a finished run.
        job: the job from `read_job`, possibly with more clients if they are real sites.

    Raises:
        ValueError: the run has more than one request, no reply is missing, another version of fedstill made it, or
            ``job`` is another task; one sentence.
    """
    folder, out = RunFolder(run), RunFolder(job.out)
    content = folder.read_config()
    described = job.description()
    before = {**content.content, "experiment": {**content.experiment, "clients": job.experiment.clients}}
    if other := config.difference(before, described):
        raise ValueError(f"{run} has {other}; an extension may change the clients only")
    old = int(content.experiment["clients"])
    if job.experiment.clients < old or (job.experiment.clients > old and not folder.asked_sites):
        raise ValueError(
            f"--clients is {job.experiment.clients}; {run} has {old} clients, and an extension asks those whose reply "
            "is missing (only a run with real sites can get more clients)"
        )
    if out.config.exists():
        return
    if withdrawn := [r.client for r in Journal(folder.journal).refusals() if r.reason == _WITHDRAWN]:
        raise ValueError(
            f"the reply of client {withdrawn[0]} was withdrawn from {run} (--without), and an extension would ask it "
            "again; extend the run that it was made from first, and leave the client out of that"
        )
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    _check_one_shot(folder, job.experiment.clients)
    if content.version not in (None, fedstill.__version__):
        raise ValueError(
            f"{run} is of fedstill {content.version}, and this is {fedstill.__version__}; all its clients must compute "
            f"with one version, so install fedstill {content.version}, or run anew"
        )
    if content.run is None:
        raise folder.damaged(folder.config, "it lacks 'run', as in early versions")
    facts = {"version": content.version, **content.origin}
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, "clients/**/*")


def leave_out(run: Path, client: int, job: Job) -> Job:
    """Prepare ``job.out`` for the model that the other clients of ``run`` would have made, without a request to anyone.

    A folder that has been prepared before stays unchanged, and so does ``run``, which still has the client's reply.
    Another version of fedstill may have made ``run`` in the same format (`fedstill.runs.formats`): an upgrade takes no
    client's consent as given for good.

    Args:
        run: a finished run.
        client: the client whose reply is left out, with its bytes and releases.
        job: the job from `read_job`.

    Returns:
        The job to run, in which the replies of the others are enough.

    Raises:
        ValueError: the run has more than one request, the client's reply is not there, it is the only one, or the
            clients evaluate the model; one sentence.
    """
    folder = RunFolder(run)
    content = folder.read_config()
    job = job.replace(experiment=job.experiment.model_copy(update={"min_clients": 1}))
    if is_prepared(run, job):
        return job
    _check_asked_once(folder, "repeated without a client")
    if job.experiment.local_test:
        raise ValueError(f"the clients of {folder} evaluate its model (--local-test), so it needs them all")
    replies = sorted(folder.journal.glob("000000-*/*.reply"))
    if client not in (there := [int(place.stem) for place in replies]):
        raise ValueError(f"{folder} has no reply of client {client}; it has those of {', '.join(map(str, there))}")
    if len(there) == 1:
        raise ValueError(f"client {client} is the only one whose reply {folder} has; nothing would be left")
    step = replies[0].parent.name.partition("-")[2]
    facts = {"version": fedstill.__version__, **content.origin}
    more = f"{folder.journal.name}/000000-*/*.refused"
    refusal = Refusal(client, step, None, _WITHDRAWN)
    description = {**job.description(), **facts, "answers": str(run)}
    lay_out(run, job.out, description, more, without=client, refusal=refusal)
    return job


def is_prepared(run: Path, job: Job) -> bool:
    """Whether ``job.out`` has the replies of ``run`` already.

    Raises:
        ValueError: it has another run, or other files.
    """
    out = RunFolder(job.out)
    if out.config.exists():
        answers = out.read_config().answers
        if answers is None or Path(answers).resolve() != run.resolve():
            raise ValueError(f"{job.out} has another run; choose another folder with --out")
        return True
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    return False


def clients_of(folder: RunFolder, kind: str) -> set[int]:
    """The clients with a file of this kind for the first request."""
    return {int(place.stem) for place in folder.journal.glob(f"000000-*/*.{kind}")}


class Nobody(Transport):
    """A connection to no client, for runs that have all replies they will ever have."""

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        return (Arrival(client, b"", "it is not asked again") for client in clients)


def lay_out(
    run: Path,
    out: Path,
    description: dict[str, Any],
    *more: str,
    without: int | None = None,
    refusal: Refusal | None = None,
    having: Collection[int] | None = None,
) -> None:
    """Make ``out`` the folder of a run interrupted after the replies to its first request.

    Replies are hard links if the file system supports them, else copies.

    Args:
        run: the finished run with the replies.
        out: a folder that does not exist, or an empty one.
        description: the ``config.json`` of the new run.
        *more: patterns of other files of ``run`` to copy.
        without: a client whose reply is not copied.
        refusal: the reason to note for it, so that it is not asked.
        having: the clients whose bytes and releases count; None for all.
    """
    part, left_out = out.with_name(f".{out.name}{files.PART}"), f"{-1 if without is None else without:05d}.reply"
    journal, copy = RunFolder(run).journal, RunFolder(part)
    shutil.rmtree(part, ignore_errors=True)
    for pattern in (*(f"{journal.name}/{name}" for name in _FILES), copy.environment.name, *more):
        for place in run.glob(pattern):
            if place.is_file() and place.name != left_out:
                _link(place, part / place.relative_to(run), linked=place.suffix == ".reply")
    for name in ("meter.jsonl", "spent.jsonl"):
        lines = files.read_json_lines(journal / name)
        first = [line for line in lines if line.get("exchange") == 0 and line.get("client") != without]
        first = [line for line in first if having is None or line.get("client") in having]
        if first:
            files.write_bytes(copy.journal / name, files.chained(first))
    copy.write_config(description)
    if refusal is not None:
        Journal(copy.journal).store_refusal(0, refusal, 0)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    part.rename(out)


def _check_one_shot(folder: RunFolder, clients: int) -> None:
    _check_asked_once(folder, "extended")
    if len(list(folder.journal.glob("000000-*/*.reply"))) >= clients:
        raise ValueError(f"all {clients} clients of {folder} have replied; there is nothing to add")


def _check_asked_once(folder: RunFolder, what: str) -> None:
    if (asked := folder.exchanges) != {0}:
        raise ValueError(
            f"{folder} made {len(asked)} requests; only a one-shot run can be {what}, since later requests depend on "
            "all earlier replies"
        )


def _link(place: Path, to: Path, *, linked: bool) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if linked:  # replies are never changed in place
        try:
            os.link(place, to)
            return
        except OSError:
            pass
    shutil.copy2(place, to)

"""Reuse of a finished run's replies: to ask missing clients, leave one out, or repeat the server's part differently.

The new run's folder is prepared like that of a run interrupted after the replies arrived; running it resumes there.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import override

import fedstill
from fedstill import files, lookup, methods
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.journal import Journal, Refusal
from fedstill.protocol import Method
from fedstill.runs.contents import Config
from fedstill.runs.folder import RunFolder

_FILES = ("000000-*/*.reply", "000000-*/request")
"""Files to copy to the new run's journal; the bytes and releases of the first request are copied too, refusals and
checkpoints are not."""


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
        return Job(Experiment(**content.experiment), name, methods.find(name)(**settings), out, content.label, command)
    except ValidationError as error:
        raise ValueError(f"{folder.config}: {config.sentence(error)}") from error
    except KeyError as error:
        raise folder.damaged(folder.config, f"it lacks {error}") from error


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
        ValueError: the run has more than one request, no reply is missing, or ``job`` is another task; one sentence.
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
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    _check_one_shot(folder, job.experiment.clients)
    if content.run is None:
        raise folder.damaged(folder.config, "it lacks 'run', as in early versions")
    facts = content.model_dump(include={"version", "fingerprint", "run"})
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, "clients/**/*")


def leave_out(run: Path, client: int, job: Job) -> Job:
    """Prepare ``job.out`` for the model that the other clients of ``run`` would have made, without a request to anyone.

    A folder that has been prepared before stays unchanged, and so does ``run``, which still has the client's reply.

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
    if _is_prepared(run, job):
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
    facts = content.model_dump(include={"version", "fingerprint", "run"})
    more = f"{folder.journal.name}/000000-*/*.refused"
    refusal = Refusal(client, step, None, "its reply was withdrawn (--without)")
    description = {**job.description(), **facts, "answers": str(run)}
    lay_out(run, job.out, description, more, without=client, refusal=refusal)
    return job


def repeat(run: Path, job: Job) -> Job:
    """Prepare ``job.out`` for other work of the server on the replies to the first request of ``run``.

    A folder that has been prepared before stays unchanged, and so does ``run``. The replies' bytes and releases count
    in the new run as in ``run``.

    Args:
        run: a finished run.
        job: the new run: the task of ``run``, with a method whose clients do the same work (`with_client_settings`).

    Returns:
        The job to run.

    Raises:
        ValueError: its clients would do other work, or ``run`` has no reply left; one sentence.
    """
    folder = RunFolder(run)
    before, content = read_job(run, job.out, job.command), folder.read_config()
    if other := _other_task(job, before, content):
        raise ValueError(f"{run} has {other}; its replies are of that task")
    if content.version != fedstill.__version__:
        raise ValueError(f"{run} is of fedstill {content.version}, and this is {fedstill.__version__}; repeat it first")
    if (wanted := _work(job)) is None or wanted != _work(before):
        same = _same_work(before.method)
        raise ValueError(
            f"the clients of {job.name} with these settings do other work than those of {run} did ({before.name}); "
            + (
                f"its replies suit {', '.join(same)} with the clients' settings of {before.name}"
                if same
                else f"the replies of {before.name} suit no other run"
            )
        )
    if folder.asked_sites:
        if job.experiment.local_test:
            raise ValueError(f"the sites of {run} evaluate the model (--local-test), and none of them is asked here")
        if (rounds := getattr(job.method, "rounds", 1)) != 1 and before.method != job.method:
            raise ValueError(f"{job.name} asks in {rounds} rounds, and no site of {run} is asked here; take --rounds 1")
    if _is_prepared(run, job):
        return job
    if not (having := _clients_of(folder, "reply")):
        raise ValueError(f"{folder} has no reply to its first request any more; each round replaces those before it")
    facts = content.model_dump(include={"version", "fingerprint", "run"})
    more = f"{folder.journal.name}/000000-*/*.refused"
    having |= _clients_of(folder, "refused")
    lay_out(run, job.out, {**job.description(), **facts, "answers": str(run)}, more, having=having)
    return job


def _is_prepared(run: Path, job: Job) -> bool:
    """Whether ``job.out`` has the replies of ``run`` already.

    Raises:
        ValueError: it has another run, or other files.
    """
    out = RunFolder(job.out)
    if out.config.exists():
        if out.read_config().answers != str(run):
            raise ValueError(f"{job.out} has another run; choose another folder with --out")
        return True
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    return False


def with_client_settings(method: Method, other: Method) -> Method:
    """``method`` with those settings of ``other`` on which its clients' first replies depend."""
    kind, fields = type(method), type(other).model_fields
    shared = [name for name, field in kind.model_fields.items() if name in fields and _alike(field, fields[name])]
    try:
        found = kind(**{**dict(method), **{name: getattr(other, name) for name in shared}})
    except ValidationError:
        return method
    for name in shared:  # the server's settings remain those of ``method``
        try:
            back = kind(**{**dict(found), name: getattr(method, name)})
        except ValidationError:
            continue
        if back.first_reply == found.first_reply:
            found = back
    return found


def _alike(one: FieldInfo, other: FieldInfo) -> bool:
    return one.annotation == other.annotation


def _work(job: Job) -> tuple[Any, ...] | None:
    """What the replies to the first request of ``job`` depend on, beside its task; None if they can't be reused.

    Steps of a method of the user's own may be other than those of the class that it is derived from, and release again
    under a budget, of which the clients of a new run know nothing yet.
    """
    own, first = lookup.is_own(type(job.method)), job.method.first_reply
    if first is None or (own and job.experiment.budget is not None):
        return None
    return first, type(job.method) if own else None


def _other_task(job: Job, before: Job, content: Config) -> str | None:
    """What makes the task or the code of ``before`` another than that of ``job``, in words."""
    described = job.description()
    earlier = {**described, "experiment": before.experiment.model_dump(mode="json"), "code": content.code}
    return config.difference(earlier, described)


def _clients_of(folder: RunFolder, kind: str) -> set[int]:
    """The clients with a file of this kind for the first request."""
    return {int(place.stem) for place in folder.journal.glob(f"000000-*/*.{kind}")}


def _same_work(method: Method) -> list[str]:
    """Names of the methods whose clients can do the work of those of ``method``."""
    found = ((name, methods.find(name)()) for name in methods.TABLE)
    wanted = method.first_reply
    return [name for name, other in found if wanted and with_client_settings(other, method).first_reply == wanted]


class Nobody(Transport):
    """A connection to no client, for runs that have all replies they will ever have."""

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        return (Arrival(client, b"", "it is not asked again") for client in clients)


def reuse(job: Job, earlier: Iterable[Path]) -> None:
    """Prepare ``job.out`` with the replies to its first request, if a finished run has the same replies.

    `fedstill.protocol.Method.first_reply` gives the settings on which those replies depend. The first request's bytes
    and seconds count in the new run too.

    Args:
        job: the new run; nothing happens if it has been started before.
        earlier: folders of finished runs, the likeliest last.
    """
    wanted = _work(job)
    if wanted is None or (job.out.exists() and any(job.out.iterdir())):
        return
    for run in reversed(list(earlier)):
        try:
            other, content = read_job(run, job.out, job.command), RunFolder(run).read_config()
        except ValueError:  # damaged, or not finished
            continue
        having = _clients_of(RunFolder(run), "reply")
        if _work(other) != wanted or _other_task(job, other, content) or not having:
            continue
        if content.version == fedstill.__version__ and not RunFolder(run).asked_sites:
            facts = {"version": content.version, "fingerprint": content.fingerprint, "run": secrets.token_hex(16)}
            lay_out(run, job.out, {**job.description(), **facts, "answers": str(run)}, having=having)
            return


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

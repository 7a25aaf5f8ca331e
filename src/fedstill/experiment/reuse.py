"""Reuse of a finished run's replies by other methods and settings whose clients do the same work."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

import fedstill
from fedstill import lookup, methods
from fedstill.experiment import config
from fedstill.experiment.finished import read_job
from fedstill.experiment.job import Job
from fedstill.experiment.layout import is_prepared, lay_out, withdrawn
from fedstill.journal_files import JournalFiles
from fedstill.protocol import Method
from fedstill.runs.contents import Config
from fedstill.runs.folder import RunFolder


def repeat(run: Path, job: Job) -> Job:
    """Prepare ``job.out`` for other work of the server on the replies to the first request of ``run``.

    A folder that has been prepared before stays unchanged, and so does ``run``. The replies' bytes and releases count
    in the new run as in ``run``, which another version of fedstill may have made in the same format
    (`fedstill.runs.formats`); the first request and every reply are checked as those of an interrupted run.

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
    if (wanted := _work(job)) is None or wanted != _work(before):
        same = _same_work(before.method)
        raise ValueError(
            f"the clients of {job.name} with these settings do other work than those of {run} did ({before.name}); "
            + (
                f"its replies suit {', '.join(same)} with the clients' settings of {before.name}"
                if {*same} - {before.name}
                else f"the replies of {before.name} suit no other method; run {job.name} without --replies"
            )
        )
    if folder.asked_sites:
        if job.experiment.local_test:
            raise ValueError(f"the sites of {run} evaluate the model (--local-test), and none of them is asked here")
        if (rounds := getattr(job.method, "rounds", 1)) != 1 and before.method != job.method:
            raise ValueError(f"{job.name} asks in {rounds} rounds, and no site of {run} is asked here; take --rounds 1")
    if is_prepared(run, job, without=withdrawn(run)):
        return job
    journal = JournalFiles(folder.journal)
    if not (having := {*journal.replies(0)}):
        raise ValueError(f"{folder} has no reply to its first request any more; each round replaces those before it")
    facts = {"version": fedstill.__version__, **content.origin}
    having |= {*journal.refused(0)}
    lay_out(run, job.out, {**job.description(), **facts, "answers": str(run)}, having=having, refusals=True)
    return job


def prepare(job: Job, earlier: Iterable[Path]) -> None:
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
        having = JournalFiles(RunFolder(run).journal).replies(0)
        if _work(other) != wanted or _other_task(job, other, content) or not having:
            continue
        if content.version == fedstill.__version__ and not RunFolder(run).asked_sites:
            facts = {"version": content.version, **content.origin, "run": secrets.token_hex(16)}
            lay_out(run, job.out, {**job.description(), **facts, "answers": str(run)}, having=having)
            return


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


def _same_work(method: Method) -> list[str]:
    """Names of the methods whose clients can do the work of those of ``method``."""
    found = ((name, methods.find(name)()) for name in methods.TABLE)
    wanted = method.first_reply
    return [name for name, other in found if wanted and with_client_settings(other, method).first_reply == wanted]

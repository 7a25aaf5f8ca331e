"""Finished runs, and runs on their replies: with other settings, late clients, or without a client.

It is prepared like that of a run interrupted after the replies arrived; running the new run resumes there.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import override

import fedstill
from fedstill import methods
from fedstill.base import files, lookup
from fedstill.base.errors import Changed
from fedstill.base.settings import sentence
from fedstill.data import public
from fedstill.data.table_schema import TableSchema
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment import config
from fedstill.experiment.checks import check_classes
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.task import Task
from fedstill.protocol import Method
from fedstill.runs import formats
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import WITHDRAWN, Journal, JournalFiles, Refusal, new_name
from fedstill.runs.pieces import Config


def read_job(run: Path, out: Path, command: str) -> Job:
    """The job of a finished run, with ``out`` in place of its folder.

    Raises:
        ValueError: ``run`` is not a finished run, or its method cannot be imported.
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
    check_classes(job.experiment, "an attack")
    if job.experiment.scale is not None:
        raise ValueError(f"{run} measured its scale (--scale), which attacks do not take; attack a run without it")
    return job


_CHANGING = {"fingerprint": "the data", "public_fingerprint": "the public data", "version": "fedstill"}
"""Descriptions of the facts of ``config.json`` that may change after a run was begun."""


def check_facts(run: Path, begun: Config | None, now: Mapping[str, str]) -> None:
    """Refuse to go on with ``run`` on other data, or with another version of fedstill, than it was begun with.

    Args:
        run: the run's folder.
        begun: its ``config.json``; None before its first start.
        now: the same facts today.
    """
    for name, value in now.items():
        if begun is not None and (before := getattr(begun, name)) not in (None, value):
            raise Changed(
                f"{run} was begun with {name} {before}, now it is {value}: {_CHANGING[name]} changed since; bring "
                "the former back, or start anew with another --out"
            )


def check_begun(folder: RunFolder, begun: Config | None, now: Mapping[str, str], experiment: Experiment) -> None:
    """Refuse to go on as of `check_facts` and `check_schema`, and after tries (``--tune``) on other records."""
    check_facts(folder.path, begun, now)
    check_schema(folder.path, begun, experiment)
    before, found = folder.read_tries().get("contents") if folder.tries.exists() else None, _content(now)
    if before not in (None, found):
        raise Changed(
            f"the tries in {folder.path} were on records with fingerprint {before}, now it is {found}: the data "
            "changed since; bring the former back, or start anew with another --out"
        )


def check_same(tries: Sequence[Path]) -> None:
    """Refuse tries (runs of one choice) on different records, among which nothing can be chosen.

    Raises:
        Changed: the records, or the public ones, changed between two of them.
    """
    if other := next((run for run in tries if contents(run) != contents(tries[0])), None):
        raise Changed(f"the records changed between the tries {tries[0]} and {other}; choose another --out")


def contents(run: Path) -> str:
    """The fingerprints of a run's records and of its public ones, if these are a data set."""
    found = RunFolder(run).read_config()
    return _content({"fingerprint": found.fingerprint or "", "public_fingerprint": found.public_fingerprint or ""})


def _content(facts: Mapping[str, str]) -> str:
    return " and ".join(filter(None, (facts["fingerprint"], facts.get("public_fingerprint"))))


def check_schema(run: Path, begun: Config | None, experiment: Experiment) -> None:
    """Refuse to go on with ``run`` under another schema of the table than it was begun with."""
    if begun is not None and begun.table_schema is not None and _other_schema(begun, experiment):
        raise Changed(
            f"{run} was begun with another schema than {experiment.schema_file} is now; bring the former back, or "
            "start anew with another --out"
        )


def _other_schema(content: Config, experiment: Experiment) -> bool:
    """Whether the schema of the table, which is the content of a file, is no more that of a run."""
    kept, now = content.table_schema, experiment.table_schema
    return kept is not None and (now is None or TableSchema.kept(kept, "the run").digest != now.digest)


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
        ValueError: something has changed.
    """
    check_code(run, job)
    facts, content = {"fingerprint": task.fingerprint, **public_facts(job.experiment)}, RunFolder(run).read_config()
    check_facts(run, content, facts)
    check_schema(run, content, job.experiment)


def withdrawn(run: Path) -> set[int]:
    """The clients whose reply was withdrawn from a run."""
    return {refusal.client for refusal in Journal(RunFolder(run).journal).refusals() if refusal.reason == WITHDRAWN}


def is_prepared(run: Path, job: Job, *, without: Collection[int], extends: bool = False) -> bool:
    """Whether ``job.out`` has the replies of ``run`` already.

    Args:
        run: the finished run with the replies.
        job: the new run.
        without: the clients whose reply was withdrawn from the new run.
        extends: whether the new run asks for the replies that ``run`` lacks.

    Raises:
        ValueError: it has another run, or other files.
    """
    out = RunFolder(job.out)
    if out.config.exists():
        begun = out.read_config()
        source = begun.extends if extends else begun.answers
        if source is None or Path(source).resolve() != run.resolve() or withdrawn(job.out) != {*without}:
            raise ValueError(f"{job.out} has another run; choose another folder with --out")
        if _was_made_anew(run, job.out):
            raise ValueError(
                f"{job.out} has replies of an earlier run in {run}, which was made anew since; choose another folder "
                "with --out"
            )
        return True
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    return False


def _was_made_anew(run: Path, out: Path) -> bool:
    """Whether ``run`` is not the one that ``out`` has replies of: another number, or other replies of a client."""
    numbers = [RunFolder(place).read_config().run for place in (run, out)]
    theirs, own = (JournalFiles(RunFolder(place).journal).checksums(0) for place in (run, out))
    return (None not in numbers and len({*numbers}) > 1) or any(theirs[one] != own[one] for one in theirs.keys() & own)


def check_asked_once(folder: RunFolder, what: str) -> None:
    """Refuse a run with more requests than one, whose later ones depend on all replies to the earlier."""
    if not (asked := folder.exchanges):
        raise files.Damaged(f"{JournalFiles(folder.journal).meter} is missing; bring it back, or run again")
    if asked != {0}:
        raise ValueError(
            f"{folder} made {len(asked)} requests; only a one-shot run can be {what}, since later requests depend on "
            "all earlier replies"
        )


class Nobody(Transport):
    """A connection to no client, for runs that have all replies they will ever have."""

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        return (Arrival(client, b"", "it is not asked again") for client in clients)


def lay_out(
    run: Path,
    out: Path,
    description: dict[str, Any],
    *,
    without: int | None = None,
    refusal: Refusal | None = None,
    having: Collection[int] | None = None,
    refusals: bool = False,
    states: bool = False,
) -> None:
    """Make ``out`` the folder of a run interrupted after the replies to its first request.

    Replies are hard links if the file system supports them, else copies.

    Args:
        run: the finished run with the replies.
        out: a folder that does not exist, or an empty one.
        description: the ``config.json`` of the new run.
        without: a client whose reply is not copied.
        refusal: the reason to note for it, so that it is not asked.
        having: the clients whose bytes and releases count; None for all.
        refusals: whether refusals of the first request are copied; those of others and checkpoints are not.
        states: whether the states of simulated clients are copied.

    Raises:
        Damaged: the list of releases is not the one that the run's summary is of.
    """
    folder, journal = RunFolder(run), JournalFiles(RunFolder(run).journal)
    folder.check_results(journal.spent)
    replies = [place for client, place in journal.replies(0).items() if client != without]
    others = [*journal.digests(0)]
    others += journal.refused(0).values() if refusals else ()
    others += [*folder.clients.glob("**/*"), *journal.newest.glob("*")] if states else ()
    with _made_at_once(out.resolve(), private=folder.is_private) as part:
        copy = RunFolder(part)
        for place in (*replies, *filter(Path.is_file, others)):
            _link(place, part / place.relative_to(run), linked=place in replies)
        if journal.name.exists():
            files.write_bytes(JournalFiles(copy.journal).name, new_name(journal.name.read_bytes()))
        for file in (journal.meter, journal.spent):
            lines = files.read_json_lines(file)
            first = [line for line in lines if line.get("exchange") == 0 and line.get("client") != without]
            first = [line for line in first if having is None or line.get("client") in having]
            if first:
                files.write_bytes(copy.journal / file.name, files.chained(first))
        for start in folder.read_environments():
            copy.append_environment({"of": str(run), **start})
        copy.write_config(description)
        if refusal is not None:
            Journal(copy.journal).store_refusal(0, refusal, 0)


@contextmanager
def _made_at_once(out: Path, *, private: bool) -> Iterator[Path]:
    """A folder beside ``out`` that becomes it, or goes with an error; ``out`` does not exist, or is empty.

    A ``private`` one is closed to others of the machine, as that of the replies is.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}{files.PART}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700 if private else 0o777, parents=True)
    try:
        yield part
        if out.exists():
            out.rmdir()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_open(run: Path, job: Job) -> None:
    """Refuse to use the replies of a run with masked sums again, which nobody can open another time, or a scale's.

    Raises:
        ValueError: its sums are masked, or its scale was measured.
    """
    if job.experiment.masked is not None:
        raise ValueError(
            f"{run} has masked sums, whose uploads are sealed to that run's helpers and opened once; start a run of "
            "its own with --out"
        )
    if job.experiment.scale is not None:
        raise ValueError(
            f"{run} measured a scale first (--scale), on which its later replies depend; start a run of its own with "
            "--out"
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
        ValueError: its clients would do other work, or ``run`` has no reply left.
    """
    folder = RunFolder(run)
    before, content = read_job(run, job.out, job.command), folder.read_config()
    check_open(run, before)
    if other := _other_task(job, before, content):
        raise ValueError(f"{run} has {other}; its replies are of that task")
    if (wanted := first_work(job)) is None or wanted != first_work(before):
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
    having |= {*journal.refused(0), *Journal(folder.journal).releases(before=1)}
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
    wanted = first_work(job)
    if wanted is None or (job.out.exists() and any(job.out.iterdir())):
        return
    for run in reversed(list(earlier)):
        try:
            other, content = read_job(run, job.out, job.command), RunFolder(run).read_config()
            journal = Journal(RunFolder(run).journal)
            having, refused = journal.files.replies(0), journal.files.refused(0)
            lost = journal.releases(before=1).keys() - having.keys() - refused.keys()
            RunFolder(run).check_results(journal.files.spent)
        except ValueError:  # damaged, or not finished
            continue
        if first_work(other) != wanted or _other_task(job, other, content) or lost or not having:
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


def first_work(job: Job) -> tuple[Any, ...] | None:
    """Settings that the replies to the first request of ``job`` depend on; None if they can't be reused.

    A subclass of the user's own may override the steps. Under a budget its clients would release again, and a new run's
    clients do not know what was spent: such replies are not reused.
    """
    own, first = lookup.is_own(type(job.method)), job.method.first_reply
    if first is None or job.experiment.masked or job.experiment.scale or (own and job.experiment.budget is not None):
        return None
    return first, type(job.method) if own else None


def _other_task(job: Job, before: Job, content: Config) -> str | None:
    """Words on the difference of the task or the code of ``before`` to that of ``job``."""
    described = job.description()
    earlier = {**described, "experiment": before.experiment.model_dump(mode="json"), "code": content.code}
    found = config.difference(earlier, described)
    if found is None and _other_schema(content, job.experiment):
        return f"another content of {job.experiment.schema_file}"
    return found


def _same_work(method: Method) -> list[str]:
    """Names of the methods whose clients can do the work of those of ``method``."""
    found = ((name, methods.find(name)()) for name in methods.TABLE)
    wanted = method.first_reply
    return [name for name, other in found if wanted and with_client_settings(other, method).first_reply == wanted]


def begin(run: Path, job: Job) -> None:
    """Prepare ``job.out`` so that running ``job`` asks only the clients whose reply ``run`` lacks.

    An extension that has been prepared before stays unchanged, and so does ``run``.

    Args:
        run: a finished run.
        job: the job from `read_job`, possibly with more clients if they are real sites.

    Raises:
        ValueError: the run has more than one request, no reply is missing, another version of fedstill made it,
            ``job`` is another task, or ``job.out`` has another run.
    """
    folder = RunFolder(run)
    content = folder.read_config()
    check_open(run, job)
    described = job.description()
    before = {**content.content, "experiment": {**content.experiment, "clients": job.experiment.clients}}
    if other := config.difference(before, described):
        raise ValueError(f"{run} has {other}; an extension may change the clients only")
    old = int(content.experiment["clients"])
    if job.experiment.clients < old or (job.experiment.clients > old and not folder.asked_sites):
        raise ValueError(
            f"--clients is {job.experiment.clients}; {run} has {old} clients, and an extension asks those whose reply "
            "is missing; leave --clients out (only a run with real sites can get more clients, and none fewer)"
        )
    if is_prepared(run, job, without=(), extends=True):
        return
    if gone := withdrawn(run):
        raise ValueError(
            f"the reply of client {min(gone)} was withdrawn from {run} (--without), and an extension would ask it "
            "again; extend the run that it was made from first, and leave the client out of that"
        )
    _check_one_shot(folder, job.experiment.clients)
    if content.version not in (None, fedstill.__version__):
        raise ValueError(
            f"{run} is of fedstill {content.version}, and this is {fedstill.__version__}; all its clients must compute "
            f"with one version, so install fedstill {content.version}, or run anew"
        )
    if not (folder.asked_sites or job.experiment.noise == "simulated"):
        journal = Journal(folder.journal)
        missing = {*range(old)} - {*journal.files.replies(0)}
        journal.check_kept(0, sorted(missing), folder.clients)
    facts = {"version": content.version, **content.origin}
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, states=True)


def _check_one_shot(folder: RunFolder, clients: int) -> None:
    check_asked_once(folder, "extended")
    if len(JournalFiles(folder.journal).replies(0)) >= clients:
        raise ValueError(f"all {clients} clients of {folder} have replied; there is nothing to add")


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
        ValueError: the run has more than one request, the client's reply is not there, it is the only one, the
            clients evaluate the model, code of the user's own has changed, or ``job.out`` has another run.
    """
    folder = RunFolder(run)
    content = folder.read_config()
    check_open(run, job)
    job = job.replace(experiment=job.experiment.model_copy(update={"min_clients": 1}))
    check_code(run, job)
    if is_prepared(run, job, without=withdrawn(run) | {client}):
        return job
    check_asked_once(folder, "repeated without a client")
    if job.experiment.local_test:
        raise ValueError(f"the clients of {folder} evaluate its model (--local-test), so it needs them all")
    journal = JournalFiles(folder.journal)
    there = journal.replies(0)
    if client not in there:
        raise ValueError(f"{folder} has no reply of client {client}; it has those of {', '.join(map(str, there))}")
    if len(there) == 1:
        raise ValueError(f"client {client} is the only one whose reply {folder} has; nothing would be left")
    step = journal.step(0)
    assert step is not None, "there is a reply"
    facts = {"version": fedstill.__version__, **content.origin}
    refusal = Refusal(client, step, None, WITHDRAWN)
    description = {**job.description(), **facts, "answers": str(run)}
    lay_out(run, job.out, description, without=client, refusal=refusal, refusals=True)
    return job

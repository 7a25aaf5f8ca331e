"""The folder of a new run on a finished run's replies.

It is prepared like that of a run interrupted after the replies arrived; running the new run resumes there.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedstill import files
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment.job import Job
from fedstill.journal import WITHDRAWN, Journal, Refusal
from fedstill.journal_files import JournalFiles
from fedstill.runs.folder import RunFolder


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
        return True
    if job.out.exists() and any(job.out.iterdir()):
        raise ValueError(f"{job.out} is not empty; choose another folder with --out")
    return False


def check_asked_once(folder: RunFolder, what: str) -> None:
    """Refuse a run with more requests than one, whose later ones depend on all replies to the earlier."""
    if (asked := folder.exchanges) != {0}:
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
    """
    part, folder = out.with_name(f".{out.name}.{os.getpid()}{files.PART}"), RunFolder(run)
    journal, copy = JournalFiles(folder.journal), RunFolder(part)
    shutil.rmtree(part, ignore_errors=True)
    replies = [place for client, place in journal.replies(0).items() if client != without]
    others = [*journal.digests(0), folder.environment]
    others += journal.refused(0).values() if refusals else ()
    others += folder.clients.glob("**/*") if states else ()
    for place in (*replies, *filter(Path.is_file, others)):
        _link(place, part / place.relative_to(run), linked=place in replies)
    for file in (journal.meter, journal.spent):
        lines = files.read_json_lines(file)
        first = [line for line in lines if line.get("exchange") == 0 and line.get("client") != without]
        first = [line for line in first if having is None or line.get("client") in having]
        if first:
            files.write_bytes(copy.journal / file.name, files.chained(first))
    copy.write_config(description)
    if refusal is not None:
        Journal(copy.journal).store_refusal(0, refusal, 0)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    part.rename(out)


def _link(place: Path, to: Path, *, linked: bool) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if linked:  # replies are never changed in place
        try:
            os.link(place, to)
            return
        except OSError:
            pass
    shutil.copy2(place, to)

"""A run without one client of a finished run, whose reply was withdrawn."""

from pathlib import Path

import fedstill
from fedstill.experiment.finished import check_code
from fedstill.experiment.job import Job
from fedstill.experiment.layout import check_asked_once, is_prepared, lay_out, withdrawn
from fedstill.journal import WITHDRAWN, Refusal
from fedstill.journal_files import JournalFiles
from fedstill.runs.folder import RunFolder


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
            clients evaluate the model, code of the user's own has changed, or ``job.out`` has another run; one
            sentence.
    """
    folder = RunFolder(run)
    content = folder.read_config()
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

"""A run that asks the clients whose reply a finished run lacks."""

from pathlib import Path

import fedstill
from fedstill.experiment import config
from fedstill.experiment.job import Job
from fedstill.experiment.layout import check_asked_once, is_prepared, lay_out, withdrawn
from fedstill.journal_files import JournalFiles
from fedstill.runs.folder import RunFolder


def begin(run: Path, job: Job) -> None:
    """Prepare ``job.out`` so that running ``job`` asks only the clients whose reply ``run`` lacks.

    An extension that has been prepared before stays unchanged, and so does ``run``.

    Args:
        run: a finished run.
        job: the job from `read_job`, possibly with more clients if they are real sites.

    Raises:
        ValueError: the run has more than one request, no reply is missing, another version of fedstill made it,
            ``job`` is another task, or ``job.out`` has another run; one sentence.
    """
    folder = RunFolder(run)
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
    if content.run is None:
        raise folder.damaged(folder.config, "it lacks 'run', as in early versions")
    facts = {"version": content.version, **content.origin}
    lay_out(run, job.out, {**described, **facts, "extends": str(run)}, states=True)


def _check_one_shot(folder: RunFolder, clients: int) -> None:
    check_asked_once(folder, "extended")
    if len(JournalFiles(folder.journal).replies(0)) >= clients:
        raise ValueError(f"all {clients} clients of {folder} have replied; there is nothing to add")

"""Default folders of runs and comparisons: the plain name if it is free, else the name with a digest of the settings.

A new process looks for its folder in the same way, so the same command resumes its own run and another setting gets
another folder.
"""

from collections.abc import Mapping
from pathlib import Path

from fedstill import files
from fedstill.experiment import config
from fedstill.experiment.job import Job
from fedstill.runs.folder import RunFolder

_RUNS = ("config.json", "*/seed-*/config.json")
"""Places of runs in the folder of a run or a comparison."""


def default_folder(plain: Path, jobs: Mapping[Path, Job]) -> Path:
    """The folder for ``jobs``: ``plain``, or ``plain-DIGEST`` if that exists or ``plain`` has other runs or files.

    Args:
        plain: the usual folder.
        jobs: runs of one task, by their path in the folder; ``Path()`` if the folder is the run itself.
    """
    experiment = next(iter(jobs.values())).experiment
    if Path() not in jobs:  # a comparison can be continued with other seeds
        experiment = experiment.model_copy(update={"seed": 0})
    own_code = {place: digest for job in jobs.values() for place, digest in job.own_code().items()}
    digest = config.digest(experiment, {job.label: (job.name, job.method) for job in jobs.values()}, own_code)
    own = plain.with_name(f"{plain.name}-{digest}")
    return own if own.exists() or not _fits(plain, jobs) else plain


def _fits(folder: Path, jobs: Mapping[Path, Job]) -> bool:
    """Whether the folder is free, or all its runs have the task of ``jobs`` and those at their paths their methods."""
    begun = [place.parent for pattern in _RUNS for place in folder.glob(pattern)]
    if not begun:
        return not folder.exists() or not any(folder.iterdir())
    some = next(iter(jobs.values())).description()
    for run in begun:
        job = jobs.get(run.relative_to(folder))
        if (run == folder) != (Path() in jobs):  # a run is no comparison
            return False
        try:
            content = RunFolder(run).read_config().content
        except files.Damaged:
            return False
        if job is not None:
            other = config.difference(content, job.description())
        else:
            other = config.difference(content, {**some, "method": content["method"]}, without=("seed",))
        if other is not None:
            return False
    return True

"""The job of a finished run, from its folder."""

from pathlib import Path

from pydantic import ValidationError

from fedstill import methods
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.runs import formats
from fedstill.runs.folder import RunFolder
from fedstill.settings import sentence


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

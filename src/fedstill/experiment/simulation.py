"""The transports of simulated clients."""

import importlib
from collections.abc import Callable
from types import ModuleType

from fedstill import extras
from fedstill.engines import inprocess
from fedstill.engines.losses import Losing
from fedstill.engines.site import Site
from fedstill.engines.transport import Transport
from fedstill.experiment.job import Job, is_importable


def connect(job: Job, make_site: Callable[[], Site], *, late: bool = False) -> Transport:
    """The transport to the simulated clients, by the engine of the job's experiment.

    Args:
        job: the run.
        make_site: makes the clients' side.
        late: whether the run asks late clients, whose replies arrive then.

    Raises:
        ValueError: the engine's package is not installed, or the clients would run in this process and have a time
            limit; one sentence.
    """
    transport, experiment = _engine(job, make_site), job.experiment
    if late or not (experiment.drop or experiment.slow):
        return transport
    return Losing(transport, experiment.clients, seed=experiment.seed, drop=experiment.drop, slow=experiment.slow)


def _engine(job: Job, make_site: Callable[[], Site]) -> Transport:
    experiment = job.experiment
    if experiment.engine == "flower":
        simulation: Transport = _flower().Simulation(
            make_site,
            experiment.clients,
            cpus=experiment.cpus_per_client,
            gpus=experiment.gpus_per_client,
            workers=experiment.workers,
            timeout=experiment.timeout,
        )
        return simulation
    if experiment.num_workers and is_importable(job):
        return inprocess.Workers(make_site, experiment.num_workers, timeout=experiment.timeout)
    if experiment.timeout is not None:
        why = "their code is in no file" if experiment.num_workers else "there are no --workers"
        raise ValueError(
            f"--timeout is {experiment.timeout:g}, but the clients run in the server's process, as {why}, and no step "
            "of theirs can be ended there; drop --timeout or use --workers 1 (with a GPU: --engine flower)"
        )
    return inprocess.Inline(make_site())


def _flower() -> ModuleType:
    try:
        return importlib.import_module("fedstill.engines.flower.simulation")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the engine 'flower' needs the package {error.name}, which is not installed; "
            f"{extras.install('flower')}, or use --engine inprocess"
        ) from error

"""The bytes, the privacy and the time that a run will need, from one client's steps (`fedstill run --dry-run`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fedstill.engines import budget
from fedstill.engines.rehearsal import Clock, Rehearsal, RehearsalFederation, Request
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import Site
from fedstill.engines.transport import Watcher
from fedstill.experiment import overlap
from fedstill.experiment.checks import check_job, check_records, warn_of_depth
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import client_data, share_out
from fedstill.privacy.guarantee import Guarantee


@dataclass(frozen=True)
class Estimate:
    """What a run will need.

    Attributes:
        requests: the requests, in order.
        bytes_up: bytes of all replies, without evaluations by clients.
        bytes_down: bytes of all requests, without evaluations by clients.
        bytes_judging: bytes of evaluations by clients, both ways.
        guarantee: the guarantee of the run, if all clients with fewest records spend most; within the budget.
        within_budget: whether the budget covers all releases; if not, the run asks less than stated here.
        at_most: whether a round asks some of the clients only, so that none of them releases as often as stated here.
        seconds_clients: time of all clients' steps, side by side where they run so.
        seconds_server: time of the server.
        at_once: number of clients that compute side by side.
    """

    requests: Sequence[Request]
    bytes_up: int
    bytes_down: int
    bytes_judging: int
    guarantee: Guarantee
    within_budget: bool
    at_most: bool
    seconds_clients: float
    seconds_server: float
    at_once: int

    @property
    def seconds(self) -> float:
        """Time of the run."""
        return self.seconds_clients + self.seconds_server


def estimate(job: Job, watcher: Watcher | None = None) -> Estimate:
    """Estimate a run by a rehearsal in a temporary folder; nothing is written to ``job.out``.

    One client of average size computes each step once (twice, if that takes less than five seconds), the server one
    round and one epoch. Sizes that depend on a client's own records, such as the classes that it has, are those of this
    client.

    Raises:
        ValueError: the run is not possible; one sentence.
        TooFewReplies: the client's step failed.
    """
    watcher = watcher or Watcher()
    experiment = job.experiment
    check_job(job)
    task = share_out(experiment, None, progress=watcher.progressed)
    check_records(job, task)
    spec = spec_of(job, task)
    assert spec.facts  # raises where the model cannot be built
    warn_of_depth(spec)
    clients = client_data(experiment, task)
    with TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True) as place:
        folder, clock = Path(place), Clock()
        site = Site(spec, clients, folder / "clients", device=experiment.device, threads=experiment.threads)
        rehearsal = Rehearsal(site, [len(own) for own, _ in task.parts], clock)
        federation = RehearsalFederation(
            spec,
            rehearsal,
            num_clients=experiment.clients,
            folder=folder,
            test=task.test,
            public=clients.public(),
            min_clients=experiment.min_clients,
            evaluate_every=experiment.evaluate_every,
            evaluate_uploads=experiment.evaluate_uploads,
            device=experiment.device,
            local_test=experiment.local_test > 0,
            clock=clock,
        )
        with clock.times(1):
            model = job.method.server(federation)
            federation.last(model)
        promised, within = _guarantee(federation, rehearsal, spec)
    sent = [request for request in rehearsal.requests if not request.evaluates]
    judged = [request for request in rehearsal.requests if request.evaluates]
    at_once = _at_once(experiment)
    return Estimate(
        requests=tuple(rehearsal.requests),
        bytes_up=sum(request.times * request.clients * request.up for request in sent),
        bytes_down=sum(request.times * request.clients * request.down for request in sent),
        bytes_judging=sum(request.times * request.clients * (request.up + request.down) for request in judged),
        guarantee=overlap.guarantee_of(promised, experiment, task, federation.public),
        within_budget=within,
        at_most=any(r.times > 1 and r.clients < experiment.clients for r in sent) and bool(rehearsal.releases),
        seconds_clients=sum(r.times * r.seconds * r.clients / min(at_once, r.clients) for r in rehearsal.requests),
        seconds_server=clock.seconds,
        at_once=at_once,
    )


def _guarantee(federation: RehearsalFederation, rehearsal: Rehearsal, spec: RunSpec) -> tuple[Guarantee, bool]:
    """The guarantee of the whole run, and whether the budget covers all releases."""
    steps = federation.asked_steps.values()
    found = budget.guarantee_of(steps, rehearsal.releases, spec)
    limit = spec.budget
    if limit is None or (found.holds and (found.epsilon or 0.0) <= limit):
        return found, True
    once = {client: entries[:1] for client, entries in rehearsal.releases.items()}
    first = budget.guarantee_of(steps, once, spec)  # the ledgers refuse what would exceed the budget
    if not first.holds:
        return found, True
    return replace(first, epsilon=limit, delta=spec.delta), False


def _at_once(experiment: Experiment) -> int:
    """Number of clients that compute side by side."""
    if experiment.engine == "flower":
        workers = experiment.workers or experiment.model_copy(update={"workers": None}).num_workers
        return max(int(workers / max(experiment.cpus_per_client, 1.0)), 1)
    return max(experiment.num_workers, 1)

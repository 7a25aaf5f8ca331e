"""The estimate of a run before it: one client's steps, one round, one epoch.

The server's loop itself is run, so every method can be rehearsed. One client really computes each step, and all others
give copies of its reply. Of `Federation.rounds` and `Federation.epochs` only the first one is run, and everything in it
counts as often as the whole run would repeat it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from fedstill.engines import server
from fedstill.engines.client import Site
from fedstill.engines.masked_sums import MaskedReply
from fedstill.engines.reply_checks import Replies, listed
from fedstill.engines.run_spec import DEFAULTS, RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival, Transport, Watcher
from fedstill.experiment import overlap
from fedstill.experiment.checks import check_job, check_records, warn_of_depth
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import parties_of, spec_of
from fedstill.experiment.task import client_data, share_out
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.ledger import Charge
from fedstill.protocol import Round, Step, wire
from fedstill.runs.journal import EVALUATIONS
from fedstill.sums.masks import Terms

_SHORT = 5.0
"""Seconds below which a step is repeated, since the first one waits for memory, caches and libraries."""


class Request(NamedTuple):
    """A request of the rehearsal, and how often the run sends it.

    Attributes:
        step: the step's name.
        times: number of such requests in the run.
        clients: number of clients that are asked each time.
        down: size of the request in bytes.
        up: size of a reply in bytes.
        seconds: time of one client's step.
        evaluates: whether clients evaluate a model, which no other count of bytes includes.
    """

    step: str
    times: int
    clients: int
    down: int
    up: int
    seconds: float
    evaluates: bool


class Clock:
    """The server's time, weighted by the number of repetitions in the whole run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.weight = 1
        self._last = time.perf_counter()

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds += (now - self._last) * self.weight
        self._last = now

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Count the time of the block ``number`` times."""
        before = self.weight
        self._lap()
        self.weight = before * number
        try:
            yield
        finally:
            self._lap()
            self.weight = before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave out the time of the block."""
        with self.times(0):
            yield


class Rehearsal(Transport):
    """The way to simulated clients of which one computes.

    Args:
        site: replies for every client.
        sizes: number of training records of each client.
        clock: stands still while a client computes.

    Attributes:
        requests: the requests so far.
        releases: the releases that the run will make, of the client that computes and, as its noise may protect less,
            of the one with the fewest records.
    """

    def __init__(self, site: Site, sizes: Sequence[int], clock: Clock) -> None:
        self.requests: list[Request] = []
        self.releases: dict[int, list[Charge]] = {}
        self._site = site
        self._sizes = sizes
        self._clock = clock

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        times = self._clock.weight
        with self._clock.elsewhere():
            header = wire.envelope(request)
            having = [client for client in clients if self._sizes[client]] or list(clients)
            mean = sum(self._sizes[client] for client in having) / len(having)
            speaker = min(having, key=lambda client: abs(self._sizes[client] - mean))
            reply, seconds = self._timed(speaker, request)
            if seconds < _SHORT and self._site.spec.simulated_noise:  # with new noise, the site repeats its reply
                reply, again = self._timed(speaker, request)
                seconds = min(seconds, again)
            step, number = header["step"], header["exchange"]
            facts = Request(step, times, len(clients), len(request), len(reply), seconds, number >= EVALUATIONS)
            self.requests.append(facts)
            answer = wire.envelope(reply)
            if answer.get("spent"):
                smallest = min(having, key=lambda client: self._sizes[client])
                other = reply if smallest == speaker else self._timed(smallest, request)[0]
                for client, said in {speaker: reply, smallest: other}.items():
                    entries = listed(wire.envelope(said), step, number)
                    self.releases.setdefault(client, []).extend(entries * times)
        for client in clients:
            sent(client)
            yield Arrival(client, _as_of(client, reply) if "client" in answer.get("fields", {}) else reply)

    def _timed(self, client: int, request: bytes) -> tuple[bytes, float]:
        began = time.perf_counter()
        reply = self._site.answer(client, request)
        return reply, time.perf_counter() - began


def _as_of(client: int, reply: bytes) -> bytes:
    """A copy of a reply that names its client, with another name."""
    tensors, header = wire.unpack(reply)
    return wire.pack(tensors, {**header, "fields": {**header["fields"], "client": client}})


class RehearsalFederation(ServerFederation):
    """A `ServerFederation` with one round of each loop; ``clock`` counts it as often as there would be rounds."""

    def __init__(self, *arguments: Any, clock: Clock, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock = clock

    @override
    def _opened(
        self, terms: Terms, replies: Replies[MaskedReply], step: Step[Any]
    ) -> tuple[list[int], NDArray[np.int64]]:
        """No total: one client's reply stands for all, and helpers would refuse copies of it."""
        return list(replies.clients), np.zeros(terms.length, dtype=np.int64)

    @override
    def rounds(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        self.num_rounds = number
        with self._clock.times(number):
            self._round = 1
            yield Round(number=1, log=partial(self._log, 1))
        self._round = None

    @override
    def epochs(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        with self._clock.times(number):
            yield from range(1, min(number, 1) + 1)


@dataclass(frozen=True)
class Estimate:
    """The needs of a run.

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
        ValueError: the run is not possible.
        TooFewReplies: the client's step failed.
    """
    watcher = watcher or Watcher()
    experiment = job.experiment
    check_job(job)
    task = share_out(experiment, None, progress=watcher.progressed)
    check_records(job, task)
    clients = client_data(experiment, task, watcher.progressed)
    with TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True) as place:
        folder, clock = Path(place), Clock()
        spec = spec_of(job, task, parties=parties_of(job, DEFAULTS["run"], folder / "helpers"))
        assert spec.facts  # raises where the model cannot be built
        warn_of_depth(spec)
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
            federation.measure_scale()
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
        guarantee=overlap.of_groups(
            overlap.guarantee_of(promised, experiment, task, federation.public), experiment, task, rehearsal.releases
        ),
        within_budget=within,
        at_most=any(r.times > 1 and r.clients < experiment.clients for r in sent) and bool(rehearsal.releases),
        seconds_clients=sum(r.times * r.seconds * r.clients / min(at_once, r.clients) for r in rehearsal.requests),
        seconds_server=clock.seconds,
        at_once=at_once,
    )


def _guarantee(federation: RehearsalFederation, rehearsal: Rehearsal, spec: RunSpec) -> tuple[Guarantee, bool]:
    """The guarantee of the whole run, and whether the budget covers all releases."""
    steps = federation.asked_steps.values()
    found = server.guarantee_of(steps, rehearsal.releases, spec)
    limit = spec.budget
    if limit is None or (found.holds and (found.epsilon or 0.0) <= limit):
        return found, True
    once = {client: entries[:1] for client, entries in rehearsal.releases.items()}
    first = server.guarantee_of(steps, once, spec)  # the ledgers refuse what would exceed the budget
    if not first.holds:
        return found, True
    return replace(first, epsilon=limit, delta=spec.delta), False


def _at_once(experiment: Experiment) -> int:
    """Number of clients that compute side by side."""
    if experiment.engine == "flower":
        workers = experiment.workers or experiment.model_copy(update={"workers": None}).num_workers
        return max(int(workers / max(experiment.cpus_per_client, 1.0)), 1)
    return max(experiment.num_workers, 1)

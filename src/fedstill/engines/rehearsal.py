"""A rehearsal of a run, which measures messages and times: one client's steps, one round, one epoch at the server.

The server's loop itself is run, so every method can be rehearsed. One client really computes each step, and all others
give copies of its reply. Of `Federation.rounds` and `Federation.epochs` only the first one is run, and everything in it
counts as often as the whole run would repeat it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from fedstill import wire
from fedstill.engines.reply_checks import listed
from fedstill.engines.server import ServerFederation
from fedstill.engines.site import Site
from fedstill.engines.transport import Arrival, Transport
from fedstill.journal import EVALUATIONS
from fedstill.privacy.ledger import Entry
from fedstill.protocol import Round

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
        self.releases: dict[int, list[Entry]] = {}
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

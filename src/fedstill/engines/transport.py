"""The interface of an engine, the engine of this process and its workers, and simulated losses.

A worker starts once, maps the clients' records as shared pages of a file, and replies
for any client.
"""

import json
import math
import multiprocessing
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

from typing_extensions import override

from fedstill.base import processes, seeds
from fedstill.base.errors import InputError
from fedstill.base.files import in_words
from fedstill.base.processes import keep_memory
from fedstill.engines.client import Site
from fedstill.protocol import wire
from fedstill.runs.journal import EVALUATIONS, Refusal

SIGNATURE, RECEIPT = "signature", "receipt"
"""Names of the values beside a real site's message; fields of `Arrival` too."""


class Arrival(NamedTuple):
    """A client's reply, or the reason why there is none.

    A real site's has a ``signature``, in hexadecimal, and a ``receipt`` of its log.
    """

    client: int
    reply: bytes
    failure: str | None = None
    signature: str = ""
    receipt: str = ""


class Transport(ABC):
    """Connection to the clients: the only difference between engines. A context manager, which closes it.

    Attributes:
        tell: observes the work inside a client's step, for clients on this machine: called with the client, the name of
            the work, and how many of how many parts are done.
    """

    tell: Callable[[int, str, int, int], None] | None = None

    @property
    def failure(self) -> Exception | None:
        """The first error of a client's step in the latest exchange, for clients in this process; None for others."""
        return None

    @abstractmethod
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """Send ``request`` to ``clients`` and yield one `Arrival` each, in the order of arrival.

        Call ``sent(client)`` each time the request leaves for a client, so that its bytes are counted.
        """

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Release processes and connections; nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watcher:
    """Observer of a run's progress; it does nothing by default. Its methods are called in the thread of the run."""

    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        """A request goes to ``clients`` clients; before the run was resumed ``answered`` replied and ``lost`` did not.

        Neither is asked again.
        """

    def read(self, origin: Sequence[str]) -> None:
        """The records of a new run were read; ``origin`` tells the files of each split."""

    def reused(self, run: str) -> None:
        """The run begins with replies that clients gave to the run in the folder ``run``."""

    def resumed(self, done: int, total: int) -> None:
        """An earlier start finished ``done`` of ``total`` rounds."""

    def working(self, client: int, label: str, done: int, total: int) -> None:
        """A client on this machine has finished ``done`` of ``total`` parts of the work ``label`` inside its step."""

    def arrived(self, refusal: Refusal | None) -> None:
        """A client is through: its reply has arrived, or ``refusal`` says why there is none, or why it is not used."""

    def withdrawn(self, refusal: Refusal) -> None:
        """A reply that had arrived is not used after all."""

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """Round ``round`` of ``rounds`` has logged its numbers."""

    def progressed(self, label: str, done: int, total: int) -> None:
        """The server has finished ``done`` of ``total`` parts of the work ``label``."""

    def noted(self, sentence: str) -> None:
        """The user should know ``sentence``."""

    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        """The run has the results ``summary``; ``before`` is the time if an earlier start finished it."""


class Watchers(Watcher):
    """Several watchers as one.

    Raises:
        InputError: one is an object of another class.
    """

    def __init__(self, *watchers: Watcher) -> None:
        if other := [one for one in watchers if not isinstance(one, Watcher)]:
            raise InputError(f"the watcher is {in_words(other[0])}; give an object of a class from fedstill.Watcher")
        for name in (name for name in vars(Watcher) if not name.startswith("_")):
            setattr(self, name, partial(_tell_all, [getattr(watcher, name) for watcher in watchers]))


def _tell_all(calls: Sequence[Callable[..., None]], *facts: Any) -> None:
    for call in calls:
        call(*facts)


class Inline(Transport):
    """All clients one after the other in this process, for a debugger or a single GPU; without a time limit.

    Args:
        site: replies for every client.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._failure: Exception | None = None

    @property
    @override
    def failure(self) -> Exception | None:
        return self._failure

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        self._failure = None
        for client in clients:
            sent(client)
            told = _Told(self.tell, client)
            reply = self.site.answer(client, request, told)
            self._failure = self._failure or self.site.failure
            if told.error is not None:
                raise told.error
            yield Arrival(client, reply)


class _Told:
    """Tells the server of a client's work; an error of its observer is the server's, not a failure of the client."""

    def __init__(self, tell: Callable[[int, str, int, int], None] | None, client: int) -> None:
        self._tell, self._client = tell, client
        self.error: Exception | None = None

    def __call__(self, label: str, done: int, total: int) -> None:
        if self._tell is not None and self.error is None:
            try:
                self._tell(self._client, label, done, total)
            except Exception as error:
                self.error = error


class Workers(Transport):
    """Worker processes that reply for the clients, each for one client at a time.

    Args:
        make_site: makes the site, once in every worker; must be picklable.
        number: number of processes.
        timeout: seconds that a client may take for one step, not counting the start of its worker; a worker that takes
            longer is replaced. None: no limit.
    """

    def __init__(self, make_site: Callable[[], Site], number: int, *, timeout: float | None = None) -> None:
        self._make_site = make_site
        self._timeout = timeout
        self._workers: list[_Worker | None] = [None] * number

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        waiting = list(reversed(clients))
        for place in range(min(len(waiting), len(self._workers))):  # all at once: each makes its site
            self._workers[place] = self._workers[place] or _Worker(self._make_site)
        busy: dict[Connection, tuple[int, int, float]] = {}  # pipe -> worker's place, client, deadline
        while waiting or busy:
            for place in range(len(self._workers)):
                if waiting and place not in {b[0] for b in busy.values()}:
                    worker = self._workers[place] or _Worker(self._make_site)
                    self._workers[place] = worker
                    client = waiting.pop()
                    busy[worker.pipe] = (place, client, self._deadline(worker))
                    sent(client)
                    try:
                        worker.ask(client, request)
                    except OSError:  # the worker died while idle, which reading from its pipe detects below
                        continue
            patience = min(deadline for _, _, deadline in busy.values()) - time.monotonic()
            readable = wait(list(busy), None if patience == math.inf else max(patience, 0))
            for pipe in readable or [p for p, (_, _, deadline) in busy.items() if deadline <= time.monotonic()]:
                assert isinstance(pipe, Connection)
                place, client, deadline = busy.pop(pipe)
                answering = self._workers[place]
                assert answering is not None
                words = b""
                try:
                    if readable and not answering.ready:
                        answering.greet()
                        busy[pipe] = (place, client, self._deadline(answering))
                        continue
                    if readable:
                        words = pipe.recv_bytes()
                    if not words:
                        arrival = Arrival(client, pipe.recv_bytes()) if readable else self._late(client)
                except (EOFError, OSError):
                    arrival = Arrival(client, b"", f"its process ended ({answering.end()})")
                if words:  # about the work, and the reply is still to come
                    busy[pipe] = (place, client, deadline)
                    if self.tell is not None:
                        self.tell(client, *json.loads(words))
                    continue
                if arrival.failure:
                    answering.kill()
                    self._workers[place] = None
                yield arrival

    def _deadline(self, worker: "_Worker") -> float:
        """Deadline of a step that begins now; infinity while the worker is starting."""
        return time.monotonic() + self._timeout if self._timeout and worker.ready else math.inf

    def _late(self, client: int) -> Arrival:
        return Arrival(client, b"", f"no reply within {self._timeout:g} s (--timeout)")

    @override
    def close(self) -> None:
        for worker in self._workers:
            if worker:
                worker.kill()
        self._workers = [None] * len(self._workers)


class _Worker:
    """One process and the pipe to it; ``ready`` after its first message."""

    def __init__(self, make_site: Callable[[], Site]) -> None:
        self.ready = False
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = processes.start(_serve, make_site, theirs)
        theirs.close()

    def greet(self) -> None:
        """Receive the worker's first message, sent when its site is set up."""
        self.pipe.recv_bytes()
        self.ready = True

    def ask(self, client: int, request: bytes) -> None:
        self.pipe.send_bytes(client.to_bytes(8, "little"))
        self.pipe.send_bytes(request)

    def end(self) -> str:
        """The reason why the process ended."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is None:
            return "it does not end"
        return f"{signal.Signals(-code).name}; out of memory?" if code < 0 else f"exit code {code}; see above"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(make_site: Callable[[], Site], pipe: Connection) -> None:
    """Reply to requests until the server closes the pipe."""
    keep_memory()
    site = make_site()
    with suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            client = int.from_bytes(pipe.recv_bytes(), "little")
            reply = site.answer(client, pipe.recv_bytes(), lambda *work: pipe.send_bytes(json.dumps(work).encode()))
            pipe.send_bytes(b"")  # what came before were words about the work
            pipe.send_bytes(reply)


class Losing(Transport):
    """A transport on which some replies get lost, the same ones in every start of a run.

    A lost client gets the request, and its bytes are counted; it computes nothing and keeps its state. Evaluations by
    clients measure a run and lose nobody.

    Args:
        transport: the way to the clients.
        num_clients: number of clients of the run.
        seed: the run's seed.
        drop: probability that a client does not reply to a request, independent of other requests and clients.
        slow: share of the clients that reply too late to every request, rounded to whole clients.
    """

    def __init__(self, transport: Transport, num_clients: int, *, seed: int, drop: float, slow: float) -> None:
        self._transport, self._seed, self._drop, self._slow_share = transport, seed, drop, slow
        order = seeds.numpy_stream(seed, "server", "slow").permutation(num_clients)
        self._slow = frozenset(order[: num_slow(num_clients, slow)].tolist())

    @property
    @override
    def failure(self) -> Exception | None:
        return self._transport.failure

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        self._transport.tell = self.tell
        number = wire.envelope(request)["exchange"]
        reasons = {} if number >= EVALUATIONS else {c: why for c in clients if (why := self._reason(number, c))}
        for client, why in reasons.items():
            sent(client)
            yield Arrival(client, b"", why)
        yield from self._transport.exchange(request, [client for client in clients if client not in reasons], sent)

    def _reason(self, number: int, client: int) -> str | None:
        """Why the reply of a client to a request does not arrive; None if it does."""
        if client in self._slow:
            return f"it is slow (--slow {self._slow_share:g})"
        draw = seeds.numpy_stream(self._seed, "client", client, number, "drop").random()
        return f"its reply is lost in every start with this seed (--drop {self._drop:g})" if draw < self._drop else None

    @override
    def close(self) -> None:
        self._transport.close()


def num_slow(num_clients: int, slow: float) -> int:
    """Number of clients that a share ``slow`` makes, at least one if it is above 0."""
    return max(round(slow * num_clients), 1) if slow else 0

"""Clients on this machine, in the server's process or in worker processes; requests and replies are bytes in both.

A worker starts once, maps the clients' records as shared pages of a file, and replies
for any client.
"""

import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from typing_extensions import override

from fedstill import processes
from fedstill.engines.site import Site
from fedstill.engines.transport import Arrival, Transport
from fedstill.train.allocator import keep_memory


class Inline(Transport):
    """All clients one after the other in this process, for a debugger or a single GPU; without a time limit.

    Args:
        site: replies for every client.
    """

    def __init__(self, site: Site) -> None:
        self.site = site

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for client in clients:
            sent(client)
            told = _Told(self.tell, client)
            reply = self.site.answer(client, request, told)
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

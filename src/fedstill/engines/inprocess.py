"""Clients on this machine: inside the server's process, or in worker processes of their own.

Either way a client gets bytes and gives bytes. A worker is started once (importing torch takes seconds), holds the
clients' records as shared pages of a file, and answers for whichever client it is handed next.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from fedstill.engines.site import Site
from fedstill.engines.transport import Arrival
from fedstill.train.allocator import keep_memory


class Inline:
    """All clients one after the other in this process; what a debugger or a single GPU wants. Knows no time-out."""

    def __init__(self, site: Site) -> None:
        """``site`` answers for every client."""
        self._site = site

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """See `Transport.exchange`."""
        for client in clients:
            sent(client)
            yield Arrival(client, self._site.answer(client, request))

    def close(self) -> None:
        """Nothing to release."""


class Workers:
    """``number`` processes that answer for the clients, each for one at a time.

    Args:
        make_site: called once in every worker; must be picklable.
        number: how many processes.
        timeout: seconds that a client may take for one step; a worker that takes longer is replaced. None: no limit.
    """

    def __init__(self, make_site: Callable[[], Site], number: int, *, timeout: float | None = None) -> None:
        self._make_site = make_site
        self._timeout = timeout
        self._workers: list[_Worker | None] = [None] * number

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """See `Transport.exchange`."""
        waiting = list(reversed(clients))
        for place in range(min(len(waiting), len(self._workers))):  # all at once: starting takes seconds
            self._workers[place] = self._workers[place] or _Worker(self._make_site)
        busy: dict[Connection, tuple[int, int, float]] = {}  # pipe -> worker's place, client, deadline
        while waiting or busy:
            for place in range(len(self._workers)):
                if waiting and place not in {b[0] for b in busy.values()}:
                    worker = self._workers[place] or _Worker(self._make_site)
                    self._workers[place] = worker
                    client = waiting.pop()
                    busy[worker.pipe] = (place, client, time.monotonic() + (self._timeout or float("inf")))
                    sent(client)
                    try:
                        worker.ask(client, request)
                    except OSError:  # it died while idle; reading from its pipe says so below
                        continue
            patience = min(deadline for _, _, deadline in busy.values()) - time.monotonic()
            ready = wait(list(busy), None if patience == float("inf") else max(patience, 0))
            for pipe in ready or [p for p, (_, _, deadline) in busy.items() if deadline <= time.monotonic()]:
                assert isinstance(pipe, Connection)
                place, client, _ = busy.pop(pipe)
                answering = self._workers[place]
                assert answering is not None
                try:
                    arrival = Arrival(client, pipe.recv_bytes()) if ready else self._late(client)
                except (EOFError, OSError):
                    arrival = Arrival(client, b"", f"its process ended ({answering.end()})")
                if arrival.failure:
                    answering.kill()
                    self._workers[place] = None
                yield arrival

    def _late(self, client: int) -> Arrival:
        return Arrival(client, b"", f"no reply within {self._timeout:g} s (--timeout)")

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            if worker:
                worker.kill()
        self._workers = [None] * len(self._workers)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, make_site: Callable[[], Site]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(make_site, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, client: int, request: bytes) -> None:
        self.pipe.send_bytes(client.to_bytes(8, "little"))
        self.pipe.send_bytes(request)

    def end(self) -> str:
        """How the process ended, in words."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is None:
            return "it hangs"
        return f"{signal.Signals(-code).name}; out of memory?" if code < 0 else f"exit code {code}; it says why above"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(make_site: Callable[[], Site], pipe: Connection) -> None:
    """A worker's life: one request after the other until the server's end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_memory()
    site = make_site()
    with suppress(EOFError, OSError):
        while True:
            client = int.from_bytes(pipe.recv_bytes(), "little")
            pipe.send_bytes(site.answer(client, pipe.recv_bytes()))


def _end_with_parent() -> None:
    """End this worker when its server is gone: `kill -9` of a server must not leave its clients computing."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

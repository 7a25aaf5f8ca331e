"""Clients on Flower: its simulation runtime, where Ray plays them on all the cores, GPUs and machines it knows.

The one file that knows Flower (flwr 1.41). It carries our bytes as they are in a raw ``Array``; what they mean is the
business of `fedstill.engines.server` and `fedstill.engines.site`, which are the same in every engine.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before flwr is imported: it reads this once
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves clients next to nothing on a machine that is busy

import ray
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedstill.engines.server import Arrival
from fedstill.engines.site import Site
from fedstill.train.allocator import keep_memory

ASK = "ask"
"""The name of the one query that clients answer."""
_POLL = 0.02
"""Seconds between two looks at what came."""


class OnGrid:
    """The way to clients that are nodes of a Flower grid.

    Args:
        grid: Flower's way to its nodes.
        nodes: the node of every client.
        window: how many clients have a question at a time; the others' messages are not made before.
        timeout: seconds that a client may take for one step, None for no limit.
        failed: says why there is nothing to wait for any more, or None.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, int],
        *,
        window: int,
        timeout: float | None = None,
        failed: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._window = window
        self._timeout = timeout
        self._failed = failed

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """See `Transport.exchange`."""
        waiting = deque(clients)
        flying: dict[str, tuple[int, float]] = {}  # message -> client, deadline
        while waiting or flying:
            if reason := self._failed():
                raise RuntimeError(f"Flower's simulation ended early: {reason}")
            some = [waiting.popleft() for _ in range(min(self._window - len(flying), len(waiting)))]
            for client, message in zip(some, self._push(request, some), strict=True):
                sent(client)
                flying[message] = (client, time.monotonic() + (self._timeout or float("inf")))
            came = list(self._grid.pull_messages(list(flying)))
            for reply in came:
                client, _ = flying.pop(reply.metadata.reply_to_message_id)
                yield _arrival(client, reply)
            for message, (client, deadline) in list(flying.items()):
                if deadline <= time.monotonic():
                    del flying[message]
                    yield Arrival(client, b"", f"no reply within {self._timeout:g} s (--timeout)")
            if not came:
                time.sleep(_POLL)

    def _push(self, request: bytes, clients: Sequence[int]) -> list[str]:
        messages = [
            Message(_content(request, client=client), dst_node_id=self._nodes[client], message_type=f"query.{ASK}")
            for client in clients
        ]
        return list(self._grid.push_messages(messages)) if messages else []


def _content(data: bytes, **facts: int) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype="fedstill", data=data)
    return RecordDict({"message": ArrayRecord({"bytes": array}), "facts": ConfigRecord(dict(facts))})


def _bytes(message: Message) -> bytes:
    return message.content.array_records["message"]["bytes"].data


def _arrival(client: int, reply: Message) -> Arrival:
    if reply.has_error():
        reason = reply.error.reason or f"error {reply.error.code}"
        if "ActorUnavailableError" in reason or "ActorDiedError" in reason:
            return Arrival(client, b"", "its process ended; out of memory?")
        return Arrival(client, b"", f"Flower says: {reason}")
    try:
        return Arrival(client, _bytes(reply))
    except (KeyError, AttributeError, TypeError):
        return Arrival(client, b"", "the reply holds no bytes of ours")


# ----------------------------------------------------------------------------------------------------------- simulation


@contextmanager
def simulation(
    make_site: Callable[[], Site],
    clients: int,
    *,
    cpus: float = 1.0,
    gpus: float = 0.0,
    workers: int | None = None,
    timeout: float | None = None,
) -> Iterator[OnGrid]:
    """A running simulation; the caller is the server.

    Args:
        make_site: called once in every process that plays clients; must be picklable.
        clients: how many there are.
        cpus: cores that Ray sets aside for a client.
        gpus: GPUs, or a share of one, likewise.
        workers: play so many clients at a time at most; as many as resources allow by default.
        timeout: see `OnGrid`.

    Raises:
        ValueError: there are not the resources for one client.
    """
    for name in ("flwr", "ray"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures come back as replies
    if not ray.is_initialized():
        number = None if workers is None else max(1, round(workers * cpus))
        ray.init(
            num_cpus=number,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # of methods and models of one's own
        )
    try:
        slots = _slots(cpus, gpus)
        flower = _Simulation(
            make_site, clients, {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 1}
        )
        try:
            grid = flower.grid()
            # one waits while another is worked on, so that no actor idles; but waiting must not count as taking long
            window = slots if timeout else 2 * slots
            yield OnGrid(grid, _nodes(grid, clients), window=window, timeout=timeout, failed=flower.failure)
        finally:
            flower.end()
    finally:
        ray.shutdown()


class _Simulation(threading.Thread):
    """Flower's simulation beside this thread, which is the server; Flower's own server only hands over its grid."""

    def __init__(self, make_site: Callable[[], Site], clients: int, resources: dict[str, float]) -> None:
        super().__init__(name="fedstill simulation", daemon=True)
        self._player = _player(ray.put(make_site))
        self._clients = clients
        self._backend: Any = {"client_resources": resources}
        self._grid = queue.Queue[Grid | None]()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """The thread."""
        app = ServerApp()

        @app.main()
        def serve(grid: Grid, context: Context) -> None:
            self._grid.put(grid)
            self._done.wait()

        try:
            run_simulation(app, self._player, self._clients, backend_config=self._backend)
        except BaseException as error:
            self._error = error
        finally:
            self._grid.put(None)

    def grid(self) -> Grid:
        """Flower's way to its nodes, once there is one."""
        grid = self._grid.get()
        if grid is None:
            raise RuntimeError(f"Flower's simulation did not start: {self._error}")
        return grid

    def failure(self) -> str | None:
        """Why the simulation is over, or None while it isn't."""
        return None if self.is_alive() else str(self._error)

    def end(self) -> None:
        """Let it finish."""
        self._done.set()
        self.join(timeout=30)


def _slots(cpus: float, gpus: float) -> int:
    """How many clients Ray can play at a time."""
    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    found = min(have.get("CPU", 0) // cpus if cpus else 10**6, have.get("GPU", 0) // gpus if gpus else 10**6)
    if found < 1:
        raise ValueError(
            f"a client is to have {cpus:g} CPUs and {gpus:g} GPUs; there are {have.get('CPU', 0):g} and "
            f"{have.get('GPU', 0):g} (--cpus-per-client, --gpus-per-client)"
        )
    return int(found)


def _nodes(grid: Grid, clients: int) -> dict[int, int]:
    """Any node can play any client, so the order does not matter."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(_POLL)
    return dict(enumerate(sorted(nodes)))


def _player(reference: "ray.ObjectRef[Callable[[], Site]]") -> ClientApp:
    """Answers for whichever client a message names."""
    app = ClientApp()

    @app.query(ASK)
    def answer(message: Message, context: Context) -> Message:
        site = _SITES.get(reference.hex())
        if site is None:
            keep_memory()
            site = _SITES[reference.hex()] = ray.get(reference)()
        client = int(message.content.config_records["facts"]["client"])  # type: ignore[arg-type]
        return Message(_content(site.answer(client, _bytes(message))), reply_to=message)

    return app


_SITES: dict[str, Site] = {}
"""Of this process, by the reference of what made it."""

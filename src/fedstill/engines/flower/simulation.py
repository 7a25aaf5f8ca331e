"""Flower's simulation runtime, where Ray plays the clients on all the cores, GPUs and machines it knows."""

import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

# Ray's 15 leaves clients next to nothing on a machine that is busy
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from typing_extensions import override

from fedstill.engines.flower.grid import ASK, GridTransport, content, take_bytes
from fedstill.engines.site import Site
from fedstill.engines.transport import Arrival, Transport
from fedstill.train.allocator import keep_memory

_TURN = 0.0002
"""Seconds that a thread may keep the interpreter while another waits. Flower's threads look through all messages again
and again; with Python's 5 ms the server, which lets go of it many times for each reply, mostly waits to get it back."""
_AHEAD = 1000
"""Messages that may wait for an actor; they share the request's bytes."""


class Simulation(Transport):
    """A running simulation of Flower; this process is its server.

    Args:
        make_site: called once in every process that plays clients; must be picklable.
        clients: number of clients.
        cpus: cores that Ray sets aside for a client.
        gpus: GPUs, or a share of one, likewise.
        workers: maximum number of clients played at a time; as many as resources allow by default.
        timeout: see `GridTransport`.

    Raises:
        ValueError: the resources do not suffice for one client.
    """

    def __init__(
        self,
        make_site: Callable[[], Site],
        clients: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        for name in ("flwr", "ray"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures come back as replies
        with ExitStack() as stack:
            stack.callback(ray.shutdown)
            _start_ray(None if workers is None else math.ceil(max(1, workers) * cpus))
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_TURN)
            slots = _slots(cpus, gpus)
            flower = _FlowerThread(
                make_site, clients, {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 1}
            )
            stack.callback(flower.end)
            grid = flower.grid()
            # Flower hands messages over ten times a second, so that many must wait for actors not to idle; but waiting
            # must not count as taking long
            ahead = slots if timeout else max(2 * slots, _AHEAD)
            nodes = _nodes(grid, clients)
            self.grid = GridTransport(
                grid, nodes, window=slots, ahead=ahead, timeout=timeout, failed=flower.failure, shared=True
            )
            self._stack = stack.pop_all()

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        return self.grid.exchange(request, clients, sent)

    @override
    def close(self) -> None:
        self._stack.close()


def _start_ray(cpus: int | None) -> None:
    if not ray.is_initialized():
        with _no_usage_module():
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # of one's own methods and models
            )
    with suppress(ImportError, AttributeError):  # it says that actors ended, also at the end of every simulation
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


@contextmanager
def _no_usage_module() -> Iterator[None]:
    """Start Ray without the process that remains of its dashboard when the dashboard is off.

    That process only runs the module of usage statistics, which asks 169.254.169.254 and metadata.google.internal
    about the cloud even where statistics are off.
    """
    from ray._private import node

    kind: Any = node.Node
    start = kind.start_api_server
    kind.start_api_server = lambda self, **options: None
    try:
        yield
    finally:
        kind.start_api_server = start


class _FlowerThread(threading.Thread):
    """Flower's simulation in a thread of its own; Flower's server app only hands its grid over to the main thread."""

    def __init__(self, make_site: Callable[[], Site], clients: int, resources: dict[str, float]) -> None:
        super().__init__(name="fedstill simulation", daemon=True)
        self._app = _client_app(ray.put(make_site))
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
            run_simulation(app, self._app, self._clients, backend_config=self._backend)
        except BaseException as error:
            self._error = error
        finally:
            self._grid.put(None)

    def grid(self) -> Grid:
        """Flower's grid, once there is one."""
        grid = self._grid.get()
        if grid is None:
            raise RuntimeError(f"Flower's simulation did not start: {self._error}")
        return grid

    def failure(self) -> str | None:
        """Why the simulation has ended, or None while it runs."""
        return None if self.is_alive() else str(self._error)

    def end(self) -> None:
        """End the simulation."""
        self._done.set()
        self.join(timeout=30)


def _slots(cpus: float, gpus: float) -> int:
    """Number of clients that Ray can play at a time."""
    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    found = min(have.get("CPU", 0) // cpus if cpus else 10**6, have.get("GPU", 0) // gpus if gpus else 10**6)
    if found < 1:
        raise ValueError(
            f"a client is to have {cpus:g} CPUs and {gpus:g} GPUs; there are {have.get('CPU', 0):g} and "
            f"{have.get('GPU', 0):g} (--cpus-per-client, --gpus-per-client)"
        )
    return int(found)


def _nodes(grid: Grid, clients: int) -> dict[int, int]:
    """A node for each client; any node can play any client, so the order does not matter."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.02)
    return dict(enumerate(sorted(nodes)))


def _client_app(reference: "ray.ObjectRef[Callable[[], Site]]") -> ClientApp:
    """An app that answers for the clients that a message names."""
    app = ClientApp()

    @app.query(ASK)
    def answer(message: Message, context: Context) -> Message:
        return _answered(reference, message)  # Ray pickles this function anew for each message, with all it names

    return app


def _answered(reference: "ray.ObjectRef[Callable[[], Site]]", message: Message) -> Message:
    site = _SITES.get(reference.hex())
    if site is None:
        keep_memory()
        site = _SITES[reference.hex()] = ray.get(reference)()
    clients: list[int] = message.content.config_records["facts"]["clients"]  # type: ignore[assignment]
    request = take_bytes(message)
    began = time.perf_counter()
    replies = [site.answer(client, request) for client in clients]
    seconds = time.perf_counter() - began
    return Message(content(b"".join(replies), sizes=[len(r) for r in replies], seconds=seconds), reply_to=message)


_SITES: dict[str, Site] = {}
"""Sites of this process, by the reference of the function that made them."""

"""Flower's simulation runtime: Ray runs the clients on all the cores, GPUs and machines of its cluster.

Flower recommends `flwr run`, which takes a bundle and a SuperLink; the program that the SuperLink starts for it calls
`_run_simulation`. `Simulation` calls the same function in this process, so that a run has its own method objects,
folder and progress. Flower does not document it; tests/checks/test_simulation_seam.py pins it.
"""

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

# Ray's default of 15 leaves the clients almost no CPU time on a busy machine
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType
from typing_extensions import override

from fedstill.base.processes import keep_memory
from fedstill.engines.client import Site
from fedstill.engines.flower.messages import ASK, GridTransport
from fedstill.engines.flower.payload import content, take_bytes
from fedstill.engines.transport import Arrival, Transport

_TURN = 0.0002
"""Python's switch interval in seconds. Flower's threads scan all messages in a loop. With Python's 5 ms the server
would mostly wait for the interpreter, which it releases many times per reply."""
_AHEAD = 1000
"""Maximum number of messages that wait for an actor; they share the request's bytes."""


class Simulation(Transport):
    """A running Flower simulation, with this process as its server.

    Args:
        make_site: makes the site, once in every process that runs clients; must be picklable.
        clients: number of clients.
        cpus: cores that Ray reserves for a client.
        gpus: GPUs, or the share of one, that Ray reserves for a client.
        workers: maximum number of clients that run at a time; by default limited by the resources only.
        timeout: as for `GridTransport`.

    Raises:
        ValueError: the resources are too small for one client.
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
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures arrive as replies
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
            # Flower delivers messages ten times a second, so many must wait lest actors idle; with a time limit none
            # may wait, since waiting counts as the client's time
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
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # of the user's methods
            )
    with suppress(ImportError, AttributeError):  # it reports ended actors, even at the end of every simulation
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


@contextmanager
def _no_usage_module() -> Iterator[None]:
    """Start Ray without its API server, of which only the module of usage statistics runs when the dashboard is off.

    That module queries 169.254.169.254 and metadata.google.internal even if statistics are off.
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
    """Flower's simulation in its own thread; its server app only passes the grid to the main thread."""

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
            _run_simulation(
                num_supernodes=self._clients,
                exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
                client_app=self._app,
                server_app=app,
                backend_config=self._backend,
            )
        except BaseException as error:
            self._error = error
        finally:
            self._grid.put(None)

    def grid(self) -> Grid:
        """Flower's grid; waits for it."""
        grid = self._grid.get()
        if grid is None:
            raise RuntimeError(f"Flower's simulation did not start: {self._error}")
        return grid

    def failure(self) -> str | None:
        """The reason why the simulation has ended, or None while it runs."""
        return None if self.is_alive() else str(self._error)

    def end(self) -> None:
        """End the simulation."""
        self._done.set()
        self.join(timeout=30)


def _slots(cpus: float, gpus: float) -> int:
    """Number of clients that Ray can run at a time."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    all_cpus, all_gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    slots = min(all_cpus // cpus if cpus else 10**6, all_gpus // gpus if gpus else 10**6)
    if slots < 1:
        raise ValueError(
            f"a client needs {cpus:g} CPUs and {gpus:g} GPUs; there are only {all_cpus:g} and {all_gpus:g} (lower "
            "--cpus-per-client or --gpus-per-client)"
        )
    return int(slots)


def _nodes(grid: Grid, clients: int) -> dict[int, int]:
    """A node for each client; any node can run any client."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.02)
    return dict(enumerate(sorted(nodes)))


def _client_app(reference: "ray.ObjectRef[Callable[[], Site]]") -> ClientApp:
    """An app that replies for the clients of a message."""
    app = ClientApp()

    @app.query(ASK)
    def answer(message: Message, context: Context) -> Message:
        return _answered(reference, message)  # Ray pickles this function with its globals for each message

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
"""Sites of this process, by the reference of the function that makes them."""

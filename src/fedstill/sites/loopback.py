"""A deployment on this machine: a server, and sites with keys, over TLS."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedstill.base import errors
from fedstill.base.records import Records
from fedstill.sites.certificates import HOST
from fedstill.sites.server import roster, service, submit
from fedstill.sites.server.submit import SubmitFlags
from fedstill.sites.site import setup, site_sums
from fedstill.sites.site.policy import SitePolicy

_FEDSTILL = (sys.executable, "-m", "fedstill")


def free_port() -> int:
    """A port that is free at present."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])


class Loopback:
    """A server and its sites, each in processes of its own; `close` ends them all.

    Args:
        folder: absolute path of a folder for the server, logs, sites and runs.
        days: days for which the server's certificate is valid; below 0 it has expired.

    Attributes:
        server: the server's folder.
        port: the port that sites reach.
    """

    def __init__(self, folder: Path, days: float = 7.0) -> None:
        self.folder = folder
        self.port = free_port()
        self.server = service.init(
            folder / "server", {"host": HOST, "bind": HOST, "port": self.port, "inner_port": free_port()}
        )
        self.server.certificates.sign([HOST], days)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **self.server.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        }

    def start(self, name: str, words: Sequence[object], environment: Mapping[str, str] | None = None) -> None:
        """Start a program; its output goes to ``logs/NAME.log``."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        """Output of a program."""
        return (self.folder / "logs" / f"{name}.log").read_text("utf-8", errors="replace")

    def start_server(self) -> None:
        """Start the server, and wait until it listens."""
        self.start("server", [*_FEDSTILL, "server", "start", self.server.folder])
        process = self.processes["server"]
        self.wait_for(lambda: service.listens(self.port) or process.poll() is not None, "the server to listen")
        if process.poll() is not None:
            raise RuntimeError(f"the server does not start: {self.log('server')[-2000:]}")

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        """Wait until ``ready()`` is true.

        Raises:
            RuntimeError: ``what`` takes longer.
        """
        until = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {seconds:g} s waiting for {what}; see {self.folder / 'logs'}")
            time.sleep(0.1)

    def add_site(self, client: int, records: Records | None = None, **policy: Any) -> Path:
        """Make a site's folder with key, data, policy and ledger, register the key, and return the folder.

        A site whose policy says so (``helper``) becomes one of the server's helpers of masked sums.
        """
        place = self.folder / f"site-{client}"
        place.mkdir()
        if records is not None:
            images = records.images if records.are_vectors else records.images.permute(0, 2, 3, 1)
            np.savez(place / "data.npz", x_train=images.numpy(), y_train=records.labels.numpy())
        data = {"data": "data.npz"} if records is not None else {}
        setup.site(place, {"client": client, "state": "state", **data, **policy})
        key = setup.join(place, self.server.invite(client, None, helper=policy.get("helper")))
        roster.accept(self.server.roster, client, key, self.server.supernode)
        return place

    def trust_helpers(self, *clients: int) -> None:
        """Name these sites' fingerprints as helpers in the policies of all sites, as their operators would."""
        policies = {client: SitePolicy.read(self.folder / f"site-{client}" / setup.POLICY) for client in clients}
        line = f"helpers = {json.dumps([site_sums.prints(policy)['helper'] for policy in policies.values()])}\n"
        for place in self.folder.glob(f"site-*/{setup.POLICY}"):
            place.write_text(line + place.read_text("utf-8"), "utf-8")

    def start_site(self, client: int, *options: object, **environment: str) -> None:
        """Start a site's node."""
        place, name = self.folder / f"site-{client}", f"site-{client}"
        self.start(name, [*_FEDSTILL, "site", "serve", place, *options], environment)

    def run(self, name: str, content: Mapping[str, Any], wait: float = 120.0, at_a_time: int | None = None) -> str:
        """Submit a run and return Flower's id of it; the run's folder is ``runs/NAME``."""
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dict(content)), "utf-8")
        return self._submit(file, SubmitFlags(out=self.folder / "runs" / name, wait=wait, at_a_time=at_a_time))

    def extend(self, finished: str, name: str, wait: float = 120.0) -> str:
        """Submit the extension of a finished run by the sites that sent no reply, and return Flower's id of it."""
        runs = self.folder / "runs"
        return self._submit(None, SubmitFlags(extend=runs / finished, out=runs / name, wait=wait))

    def _submit(self, file: Path | None, flags: SubmitFlags) -> str:
        return submit.submit(self.server, submit.settings_of(self.server, file, flags))

    def finish(self, run: str, seconds: float = 300.0) -> str:
        """Wait for the end of a run, and return its status.

        Raises:
            RuntimeError: the run takes longer.
        """
        until = time.monotonic() + seconds
        while not (status := submit.status(self.server, run)).startswith("finished"):
            if time.monotonic() > until:
                raise RuntimeError(f"the run has not finished in {seconds:g} s: {self.output(run)[-3000:]}")
            with suppress(subprocess.TimeoutExpired):  # the stream ends with the run, or breaks
                self.server.flwr("log", run, service.CONNECTION, "--stream", timeout=until - time.monotonic())
            time.sleep(0.5)
        return status

    def output(self, run: str) -> str:
        """Output of a run's server."""
        return self.server.flwr("log", run, service.CONNECTION, "--show").stdout

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a program and its child processes."""
        process = self.processes.pop(name)
        _signal(process, how)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """End all programs."""
        for name in reversed(list(self.processes)):
            self.stop(name)


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    assert sys.platform != "win32"
    try:
        os.killpg(process.pid, how)
    except ProcessLookupError:
        pass


@contextmanager
def loopback(folder: Path, days: float = 7.0) -> Iterator[Loopback]:
    """A running server on this machine, as a `Loopback`."""
    if find_spec("flwr") is None:
        raise ValueError(f"Flower is not installed; {errors.install('flower')}")
    here = Loopback(folder, days)
    try:
        here.start_server()
        yield here
    finally:
        here.close()

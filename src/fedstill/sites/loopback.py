"""A deployment on this machine: a SuperLink with TLS, and sites with keys."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import yaml

from fedstill import extras
from fedstill.records import Records
from fedstill.sites import roster, setup
from fedstill.sites.certificates import HOST, Certificates, certificates, site_key

_CONNECTION = "here"


def free_port() -> int:
    """A port that is free at present."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])


class Loopback:
    """A SuperLink with TLS and its sites; `close` ends all processes.

    Args:
        folder: absolute path of a folder for keys, certificates, logs, sites and runs.
        certs: certificates of the SuperLink; made if not given.

    Attributes:
        roster: file of the sites' keys and nodes (`fedstill.sites.roster`).
    """

    def __init__(self, folder: Path, certs: Certificates | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.certs = certs or certificates(folder / "certificates")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.roster = folder / "roster.toml"
        self.app = setup.app(folder / "app")
        home = folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        connection = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.certs.authority)}
        (home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": _CONNECTION, _CONNECTION: connection}})
        )
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "NO_PROXY": f"{HOST},localhost",
            "no_proxy": f"{HOST},localhost",
            "NO_COLOR": "1",
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
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def superlink(self, *options: object) -> None:
        """Start the SuperLink, and wait until it listens."""
        self.start(
            "superlink",
            [
                *("flower-superlink", "--ssl-ca-certfile", self.certs.authority),
                *("--ssl-certfile", self.certs.certificate, "--ssl-keyfile", self.certs.key),
                *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
                *("--host", HOST, "--port", self.port, "--database", self.folder / "superlink.db", *options),
            ],
        )
        self.wait_for(self._listens, "the SuperLink to listen")

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex((HOST, self.port)) == 0

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

    def flwr(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the command ``flwr``."""
        return subprocess.run(
            ["flwr", *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def add_site(self, client: int, records: Records | None = None, **policy: Any) -> Path:
        """Make a site's folder with key, data, policy and ledger, register the key, and return the folder."""
        place = self.folder / f"site-{client}"
        place.mkdir()
        if records is not None:
            images = records.images if records.are_vectors else records.images.permute(0, 2, 3, 1)
            np.savez(place / "data.npz", x_train=images.numpy(), y_train=records.labels.numpy())
        setup.site(place, {"client": client, "data": "data.npz", "state": "state", **policy})
        key = site_key(place / "site.key")
        roster.add(self.roster, client, key, _CONNECTION, lambda *words: self.flwr(*words).stdout, None)
        return place

    def start_site(self, client: int, *options: object, **environment: str) -> None:
        """Start a site's node."""
        place, name = self.folder / f"site-{client}", f"site-{client}"
        self.start(
            name,
            [
                *(sys.executable, "-m", "fedstill", "deploy", "node", place, "--superlink", f"{HOST}:{self.port}"),
                *("--root-certificates", self.certs.authority),
                *("--auth-supernode-private-key", place / "site.key", *options),
            ],
            environment,
        )

    def run(self, name: str, content: Mapping[str, Any], wait: float = 120.0, at_a_time: int = 0) -> str:
        """Submit a run and return Flower's id of it; the run's folder is ``runs/NAME``."""
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dict(content)))
        out = str(self.folder / "runs" / name)
        return self._submit({"file": str(file), "out": out, "wait": wait, "at-a-time": at_a_time})

    def extend(self, finished: str, name: str, wait: float = 120.0) -> str:
        """Submit the extension of a finished run by the sites that sent no reply, and return Flower's id of it."""
        runs = self.folder / "runs"
        return self._submit({"extend": str(runs / finished), "out": str(runs / name), "wait": wait})

    def _submit(self, settings: Mapping[str, Any]) -> str:
        every = {**settings, "roster": str(self.roster)}
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in every.items())
        return self.submit(self.app, "--run-config", words)

    def submit(self, app: Path, *options: object) -> str:
        """Submit the app in a folder, and return Flower's id of the run."""
        submitted = self.flwr("run", app, _CONNECTION, *options, "--format", "json")
        try:
            return str(json.loads(submitted.stdout)["run-id"])
        except (ValueError, KeyError) as error:
            raise RuntimeError(f"the run can't be submitted: {submitted.stdout} {submitted.stderr}") from error

    def status(self, run: str) -> str:
        """Status of a run: ``running``, ``finished:completed``, ``finished:failed`` and so on."""
        listed = self.flwr("list", _CONNECTION, "--format", "json", "--run-id", run)
        try:
            return str(json.loads(listed.stdout)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            return "unknown"

    def finish(self, run: str, seconds: float = 300.0) -> str:
        """Wait for the end of a run, and return its status.

        Raises:
            RuntimeError: the run takes longer.
        """
        until = time.monotonic() + seconds
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() > until:
                raise RuntimeError(f"the run has not finished in {seconds:g} s: {self.output(run)[-3000:]}")
            time.sleep(3)  # each query of the status starts a process that takes a core for seconds
        return status

    def output(self, run: str) -> str:
        """Output of a run's server."""
        return self.flwr("log", run, _CONNECTION, "--show").stdout

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
    try:
        os.killpg(process.pid, how)
    except ProcessLookupError:
        pass


@contextmanager
def loopback(folder: Path, certs: Certificates | None = None) -> Iterator[Loopback]:
    """A running SuperLink on this machine, as a `Loopback`."""
    if shutil.which("flower-superlink", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None:
        raise ValueError(f"Flower's programs are not installed; {extras.install('flower')}")
    here = Loopback(folder, certs)
    try:
        here.superlink()
        yield here
    finally:
        here.close()

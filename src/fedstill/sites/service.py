"""Start and stop a server: its SuperLink on 127.0.0.1, and the gate in front of it."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from filelock import FileLock, Timeout

from fedstill import extras
from fedstill.sites.certificates import HOST
from fedstill.sites.server import Server

_PATIENCE = 120.0
"""Seconds that the SuperLink may take to listen, and a server to stop."""


def start(server: Server, say: Callable[[str], None]) -> int:
    """Run the server until it is stopped or its SuperLink ends, and return the exit code.

    Args:
        server: the server.
        say: is called with a line when the server listens.

    Raises:
        ValueError: the server runs already, a port is taken, or Flower is not installed; one sentence.
    """
    lock = FileLock(server.lock)
    try:
        lock.acquire(timeout=0.5)
    except Timeout as error:
        raise ValueError(f"the server in {server.folder} runs already (fedstill server status)") from error
    try:
        os.umask(0o077)
        _check_port(HOST, server.settings.inner_port, "inner_port")
        if server.settings.proxy == "fedstill":
            _check_port(str(server.settings.bind), server.settings.port, "port")
        server.lock.with_suffix(".pid").write_text(f"{os.getpid()}\n")
        return _run(server, say)
    finally:
        lock.release()


def _run(server: Server, say: Callable[[str], None]) -> int:
    try:  # a late import, as its packages are optional
        from fedstill.engines.flower import superlink
        from fedstill.sites import gate
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; {extras.install('flower')}") from error
    settings, certificates = server.settings, server.certificates
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    link = superlink.start(
        [
            *("--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate)),
            *("--ssl-keyfile", str(certificates.key), "--enable-supernode-auth"),
            *("--disable-runtime-dependency-installation", "--host", HOST, "--port", str(settings.inner_port)),
            *("--database", str(server.folder / "superlink.db")),
        ],
        server.environment,
    )
    try:
        if not _listens_soon(link, settings.inner_port, stopped):
            return 0 if stopped.is_set() else 1
        if settings.proxy == "nginx":
            say(f"the SuperLink listens at {HOST}:{settings.inner_port}; nginx has {server.address} before it")
            while link.poll() is None and not stopped.wait(0.2):
                pass
        else:
            door = gate.server(
                gate.app(f"https://{HOST}:{settings.inner_port}", certificates.authority),
                bind=str(settings.bind),
                port=settings.port,
                certificate=certificates.certificate,
                key=certificates.key,
            )
            threading.Thread(target=_close_after, args=(link, door), daemon=True).start()
            say(f"sites reach {server.address}; the SuperLink is at {HOST}:{settings.inner_port}")
            door.run()  # passes signals on to the handlers above when it ends
        return 0 if stopped.is_set() else 1
    finally:
        _end(link)


def _close_after(link: subprocess.Popen[bytes], door: object) -> None:
    link.wait()
    door.should_exit = True  # type: ignore[attr-defined]


def _end(link: subprocess.Popen[bytes]) -> None:
    if link.poll() is None:
        link.terminate()
        try:
            link.wait(timeout=20)
        except subprocess.TimeoutExpired:
            link.kill()
            link.wait()


def _check_port(host: str, port: int, name: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {host} can't be used ({error.strerror}); choose another as {name} in server.toml"
            ) from error


def _listens_soon(link: subprocess.Popen[bytes], port: int, stopped: threading.Event) -> bool:
    until = time.monotonic() + _PATIENCE
    while not stopped.is_set() and link.poll() is None and time.monotonic() < until:
        if listens(port):
            return True
        time.sleep(0.1)
    return False


def listens(port: int) -> bool:
    """Whether a program of this machine listens on a port of 127.0.0.1."""
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def is_running(server: Server) -> bool:
    """Whether a process runs the server."""
    if not server.lock.exists():
        return False
    try:
        with FileLock(server.lock, timeout=0):
            return False
    except Timeout:
        return True


def stop(server: Server) -> bool:
    """Stop the server; returns whether it ran.

    Raises:
        ValueError: it does not end in two minutes, or is another user's; one sentence.
    """
    if not is_running(server):
        return False
    process = int(server.lock.with_suffix(".pid").read_text())
    try:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    except PermissionError as error:
        raise ValueError(
            f"process {process}, which runs the server, is another user's; stop it as that user"
        ) from error
    until = time.monotonic() + _PATIENCE
    while is_running(server):
        if time.monotonic() > until:
            raise ValueError(f"the server (process {process}) has not ended in {_PATIENCE:g} s; kill -9 {process}")
        time.sleep(0.1)
    return True

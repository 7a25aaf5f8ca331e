"""Start and stop a server: its SuperLink on 127.0.0.1, and the gate in front of it."""

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le
from filelock import FileLock, Timeout
from pydantic import IPvAnyAddress, PositiveFloat, PositiveInt, ValidationError, field_validator

from fedstill import __version__
from fedstill.base import errors, files
from fedstill.base.settings import Settings, read_toml, sentence
from fedstill.sites import seals, units
from fedstill.sites.certificates import HOST, Certificates, expiry
from fedstill.sites.server import roster
from fedstill.sites.server.roster import Invitation

Port = Annotated[int, Ge(1), Le(65535)]
CONNECTION = "server"
"""Name of the connection in Flower's configuration."""
_STYLES = frozenset({"FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE"})
"""Variables that ask for colours without a terminal, as notebooks and CI set them: Flower's JSON would have them."""
FAILED = "fedstill: the run failed: "
"""Beginning of the line in a run's output that says why it failed."""


class ServerSettings(Settings):
    """Settings of a server, in ``server.toml``."""

    host: str
    """Name or IP address under which the sites reach the server."""
    port: Port = 9443
    """Port that the sites reach; only Flower's interface for sites answers there."""
    inner_port: Port = 9444
    """Port of the SuperLink on 127.0.0.1."""
    bind: IPvAnyAddress = IPv4Address("0.0.0.0")
    """Address that listens on the port."""
    proxy: Literal["fedstill", "nginx"] = "fedstill"
    """The program that listens on the port: 'server start' itself, or an nginx with FOLDER/nginx.conf."""
    day_gb: PositiveFloat = 50.0
    """Gigabytes that one site may send in 24 hours; 'server start' itself counts them, nginx does not."""
    days: PositiveInt = 365
    """Days for which a certificate of the server is valid."""

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        try:
            return str(ip_address(value))
        except ValueError:
            if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", value):
                raise ValueError("it must be a host name or an IP address, without a port") from None
        return value


class Server:
    """The folder of a server.

    Args:
        folder: a folder that `init` made.

    Raises:
        ValueError: there is no ``server.toml``, a newer fedstill wrote it, or it is invalid.

    Attributes:
        settings: content of ``server.toml``.
        certificates: files of the authority and the certificate.
        roster: file of the sites' keys (`fedstill.sites.server.roster`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        place = self.folder / "server.toml"
        none = f"{folder} is no folder of a server; make one with 'fedstill server init'"
        self.settings = read_toml(ServerSettings, place, str(place), none)
        self.certificates = Certificates(self.folder / "certificates")
        self.roster = self.folder / "roster.toml"
        self.app = self.folder / "app"
        self.lock = self.folder / "server.lock"

    @property
    def address(self) -> str:
        """Address that the sites reach, as HOST:PORT."""
        host = self.settings.host
        return f"[{host}]:{self.settings.port}" if ":" in host else f"{host}:{self.settings.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of Flower's programs: their configuration is in the folder, and they call nobody else."""
        inherited = {name: value for name, value in os.environ.items() if name not in _STYLES}
        quiet = {**inherited, "NO_PROXY": f"{HOST},localhost", "no_proxy": f"{HOST},localhost"}
        return {
            **quiet,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "NO_COLOR": "1",
        }

    def flwr(self, *words: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command ``flwr``; its connection is this server's.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
        """
        return subprocess.run(
            ["flwr", *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def supernode(self, *words: str) -> str:
        """The output of ``flwr supernode register`` or ``unregister`` at this server; of one that fails, errors too."""
        command, what, *rest = words
        done = self.flwr("supernode", command, what, CONNECTION, *rest)
        return done.stdout if done.returncode == 0 else f"{done.stdout} {done.stderr}"

    def invite(self, client: int, max_records: int | None, *, helper: bool | None = None) -> Path:
        """Write the invitation of a client, note it in the roster, and return the invitation's file."""
        key = seals.server_key(self.folder).public_key().public_bytes_raw().hex()
        authority = self.certificates.authority_text()
        invitation = Invitation(client=client, address=self.address, authority=authority, server=key)
        roster.invite(self.roster, client, max_records, helper=helper)
        place = self.folder / "invitations" / f"site-{client}.toml"
        invitation.write(place)
        return place


def init(folder: Path, settings: Mapping[str, Any]) -> Server:
    """Make a server's folder: authority, certificate, empty roster, Flower's configuration, nginx.conf, systemd unit.

    Raises:
        ValueError: a setting is invalid, or the folder has a server already.
    """
    from fedstill.sites.site.launcher import APP  # imports torch, for which the other commands need not wait

    place = folder.resolve() / "server.toml"
    if place.exists():
        raise ValueError(f"{place} exists already; choose another folder, or edit it and start the server again")
    try:
        checked = ServerSettings(**settings)
    except ValidationError as error:
        raise ValueError(sentence(error, flags="--")) from error
    if checked.port == checked.inner_port:
        raise ValueError(f"--port and --inner-port are both {checked.port}; give two ports")
    units.check_folder(place.parent)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.parent.chmod(0o700)
    certificates = Certificates(place.parent / "certificates")
    certificates.add_authority()
    certificates.sign([checked.host], checked.days)
    connection = {"address": f"{HOST}:{checked.inner_port}", "root-certificates": str(certificates.authority)}
    flower = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    files.write_bytes(place.parent / "flower" / "config.toml", tomli_w.dumps(flower).encode())
    files.write_bytes(place.parent / "app" / "pyproject.toml", APP.read_bytes())
    roster.write(place.parent / "roster.toml", roster.Roster())
    files.write_bytes(
        place, tomli_w.dumps(checked.model_dump(mode="json")).encode()
    )  # last: with it, the folder is whole
    server = Server(place.parent)
    nginx = units.nginx(
        host=checked.host,
        bind=str(checked.bind),
        port=checked.port,
        inner_port=checked.inner_port,
        certificates=certificates.authority.parent,
    )
    files.write_bytes(server.folder / "nginx.conf", nginx.encode())
    files.write_bytes(server.folder / units.SERVER, units.server(server.folder).encode())
    return server


def renew(server: Server, *, authority: bool) -> str:
    """Make a new certificate for the server, or the authority that signs the next one; returns what to do then."""
    certificates = server.certificates
    if authority:
        certificates.add_authority()
        for entry in (*(loaded := roster.load(server.roster)).site, *loaded.invited):
            server.invite(entry.client, entry.max_records)
        return (
            f"a new authority; send the new invitations in {server.folder / 'invitations'} to all sites, each calls "
            f"'fedstill site join' and starts again, then 'fedstill server renew {server.folder}'"
        )
    certificates.sign([server.settings.host], server.settings.days)
    return f"a certificate for {server.settings.days} days; start the server again"


_PATIENCE = 120.0
"""Seconds that the SuperLink may take to listen, and a server to stop."""


def start(server: Server, say: Callable[[str], None]) -> int:
    """Run the server until it is stopped or its SuperLink ends, and return the exit code.

    Args:
        server: the server.
        say: is called with a line when the server listens.

    Raises:
        ValueError: the server runs already, a port is taken, or Flower is not installed.
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
        server.lock.with_suffix(".pid").write_text(f"{os.getpid()}\n", "utf-8")
        return _run(server, say)
    finally:
        lock.release()


_OPEN = (
    "this system does not tell whose a connection is: whoever has an account on this machine can start runs at port "
    "{}, as this user; let nobody else log in here, or serve from Linux"
)


def _run(server: Server, say: Callable[[str], None]) -> int:
    try:  # a late import, as its packages are optional
        from fedstill.engines.flower import superlink
        from fedstill.sites.server import gate
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; {errors.install('flower')}") from error
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
        units.PATHS,
    )
    try:
        if not _listens_soon(link, settings.inner_port, stopped):
            return 0 if stopped.is_set() else 1
        if not superlink.KNOWS_USERS:
            say(_OPEN.format(settings.inner_port))
        if settings.proxy == "nginx":
            say(f"the SuperLink listens at {HOST}:{settings.inner_port}; nginx has {server.address} before it")
            while link.poll() is None and not stopped.wait(0.2):
                pass
        else:
            door = gate.server(
                gate.app(
                    f"https://{HOST}:{settings.inner_port}",
                    certificates.authority,
                    gate.Members(server.roster).admits,
                    gate.Quotas(int(settings.day_gb * 10**9)),
                ),
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


def ready(server: Server, seconds: float = 60.0) -> bool:
    """Whether the server runs and its SuperLink listens; one that has just started has ``seconds`` for that."""
    last = time.monotonic() + seconds
    while running := is_running(server):
        if listens(server.settings.inner_port):
            break
        if time.monotonic() > last:
            return False
        time.sleep(0.2)
    return running


def stop(server: Server) -> bool:
    """Stop the server; returns whether it ran.

    Raises:
        ValueError: it does not end in two minutes, or is another user's.
    """
    if not is_running(server):
        return False
    process = int(server.lock.with_suffix(".pid").read_text("utf-8"))
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


_RUNS = 10
"""Largest number of runs shown."""


def status(server: Server) -> dict[str, Any]:
    """The state of a server, as JSON values; nodes and runs are empty if it does not run."""
    running = is_running(server) and listens(server.settings.inner_port)
    members = roster.load(server.roster)
    nodes = (
        {str(node.get("node-id")): node for node in _listed(server, "nodes", "supernode", "list")} if running else {}
    )
    ends = expiry(server.certificates.certificate)
    sites = [
        {
            "client": member.client,
            "node": member.node,
            "max_records": member.max_records,
            "state": nodes.get(str(member.node), {}).get("status") if running else None,
        }
        for member in members.site
    ]
    runs = _listed(server, "runs", "list") if running else []
    return {
        "version": __version__,
        "folder": str(server.folder),
        "running": running,
        "address": server.address,
        "certificate_ends": ends.isoformat(),
        "certificate_days": (ends - datetime.datetime.now(datetime.UTC)).days,
        "sites": sites,
        "invited": [entry.client for entry in members.invited],
        "left": [entry.client for entry in members.left],
        "runs": [{"id": str(run.get("run-id")), "status": str(run.get("status"))} for run in runs[:_RUNS]],
    }


def _listed(server: Server, name: str, *words: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(server.flwr(*words, CONNECTION, "--format", "json").stdout)[name]
    except (ValueError, KeyError, TypeError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def sentences(state: dict[str, Any]) -> list[str]:
    """The state in lines of text."""
    days = state["certificate_days"]
    lines = [
        f"server {state['address']}: {'running' if state['running'] else 'not running'}, fedstill {state['version']}",
        f"certificate: {f'{days} days left' if days >= 0 else 'EXPIRED'} (fedstill server renew)",
    ]
    for site in state["sites"]:
        limit = "" if site["max_records"] is None else f", at most {site['max_records']:,} records"
        lines.append(f"client {site['client']}: {site['state'] or 'state unknown'}{limit}, node {site['node']}")
    lines += [f"client {client}: invited, its key has not been accepted yet" for client in state["invited"]]
    lines += [f"run {run['id']}: {run['status']}" for run in state["runs"]]
    return lines

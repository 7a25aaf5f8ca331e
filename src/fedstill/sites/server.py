"""A deployment's server: its folder with settings, certificates, roster and Flower's files."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le
from pydantic import IPvAnyAddress, PositiveInt, ValidationError, field_validator

from fedstill import files
from fedstill.settings import Settings, sentence
from fedstill.sites import roster, units
from fedstill.sites.certificates import HOST, Certificates
from fedstill.sites.invitation import Invitation

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
    """What listens on the port: 'server start' itself, or an nginx with FOLDER/nginx.conf."""
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
        ValueError: there is no ``server.toml``, a newer fedstill wrote it, or it is invalid; one sentence.

    Attributes:
        settings: content of ``server.toml``.
        certificates: files of the authority and the certificate.
        roster: file of the sites' keys (`fedstill.sites.roster`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        place = self.folder / "server.toml"
        try:
            self.settings = ServerSettings(**files.without_format(tomllib.loads(place.read_text()), place))
        except FileNotFoundError as error:
            raise ValueError(f"{folder} is no folder of a server; make one with 'fedstill server init'") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{place} can't be read as TOML: {error}") from error
        except ValidationError as error:
            raise ValueError(f"{place} is invalid: {sentence(error, kind=ServerSettings)}") from error
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

    def invite(self, client: int, max_records: int | None) -> Path:
        """Write the invitation of a client, note it in the roster, and return the invitation's file."""
        invitation = Invitation(client=client, address=self.address, authority=self.certificates.authority_text())
        roster.invite(self.roster, client, max_records)
        place = self.folder / "invitations" / f"site-{client}.toml"
        invitation.write(place)
        return place


def init(folder: Path, settings: Mapping[str, Any]) -> Server:
    """Make a server's folder: authority, certificate, empty roster, Flower's configuration, nginx.conf, systemd unit.

    Raises:
        ValueError: a setting is invalid, or the folder has a server already; one sentence.
    """
    from fedstill.sites.bundle import APP  # imports torch, for which the other commands need not wait

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

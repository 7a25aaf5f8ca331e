"""Files for the programs that run a server or a site for years: units of systemd, a site of nginx."""

import getpass
import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedstill.sites.certificates import HOST

SERVER = "fedstill-server.service"
"""Name of a server's unit."""
SITE = "fedstill-site.service"
"""Name of a site's unit."""
INSTALLED = Path("/etc/systemd/system")
"""The folder of units that an administrator installs."""
LARGEST_MB = 64
"""Size in MiB of the largest request that reaches the SuperLink; Flower cuts messages into smaller pieces."""
CONNECTIONS = 64
"""Number of requests at a time that nginx takes from one address."""
PATHS = "^/v1/fleet/[a-z-]+$"
"""Paths of Flower's interface for sites."""

_UNIT = """\
# cp {folder}/{name} /etc/systemd/system/ && systemctl enable --now {short}
[Unit]
Description=fedstill: {what}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart="{python}" -m fedstill {command} "{folder}"
Restart=always
RestartSec=15
TimeoutStopSec=60
MemoryMax=75%
UMask=0077
Environment=FEDSTILL_CACHE={folder}/cache
WorkingDirectory={folder}
# it can write here only; a run's --out has to be in the folder
ReadWritePaths={writable}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices={private_devices}
ProtectKernelTunables=yes
ProtectControlGroups=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
"""

_NGINX = """\
# A server block for nginx: include it in the block http {{ }}. Sites reach {host}:{port}; all paths but those of
# Flower's interface for sites are refused. The SuperLink listens on {inner} only.
limit_conn_zone $binary_remote_addr zone=fedstill_{port}:1m;
server {{
    listen {listen}:{port} ssl;
    server_name {host};
    ssl_certificate {certificates}/server.crt;
    ssl_certificate_key {certificates}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size {largest}m;
    proxy_read_timeout 300s;
    # one address can't take all connections: idle ones are closed, and those with a request are counted
    client_header_timeout 15s;
    limit_conn fedstill_{port} {connections};

    location / {{
        # the request as it was sent, before nginx decodes it: what the SuperLink would see
        if ($request_uri !~ "{paths}") {{
            return 403;
        }}
        if ($request_method != POST) {{
            return 403;
        }}
        proxy_pass https://{inner};
        proxy_http_version 1.1;
        proxy_ssl_trusted_certificate {certificates}/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
    }}
}}
"""


def check_folder(folder: Path) -> None:
    """Check that these files can name a folder.

    Raises:
        ValueError: it has a space or another character with a meaning there.
    """
    if unfit := [c for c in str(folder) if not c.isprintable() or c in " \"\\%$;{}'#"]:
        raise ValueError(
            f"the folder {str(folder)!r} has {unfit[0]!r}, which systemd or nginx would not take as it stands; "
            "choose another folder"
        )


def check_owner(folder: Path, command: str) -> None:
    """Refuse a command that would write files of another user, who could no longer read them.

    Args:
        folder: what the command writes into.
        command: the command line after ``fedstill``, for the remedy.

    Raises:
        ValueError: the folder is another user's.
    """
    if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
        name = _name(owner)
        raise ValueError(
            f"{folder} belongs to {name}, and this is {_name(os.geteuid())}, whose files {name} may not be able to "
            f"read; run it as its owner: sudo -u {name} fedstill {command}"
        )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"


def of_root(what: str) -> str:
    """A sentence if this process is root's; empty otherwise.

    Args:
        what: who runs, at the beginning of the sentence.
    """
    if os.geteuid() != 0:
        return ""
    return (
        f"warning: {what} runs as root, so that whoever gets into it has the whole machine; make a user for it "
        "(sudo useradd --system fedstill; sudo install -d -o fedstill FOLDER) and run this as that user "
        "(sudo -u fedstill)"
    )


def server(folder: Path) -> str:
    """The systemd unit of the server in a folder."""
    return _unit(folder, SERVER, "server of a federation", "server start", [folder], private_devices=True)


def site(folder: Path, state: Path, *, on_cpu: bool) -> str:
    """The systemd unit of the site in a folder, which may write there and in its folder ``state``.

    Raises:
        ValueError: as of `check_folder`.
    """
    check_folder(state)
    writable = [folder] if state.is_relative_to(folder) else [folder, state]
    return _unit(folder, SITE, "site of a federation", "site serve", writable, private_devices=on_cpu)


def disagreements(folder: Path, state: Path, *, on_cpu: bool, installed: Path = INSTALLED) -> Iterator[str]:
    """Sentences on a site's unit that hides what its policy, which can be edited at any time, needs now.

    Args:
        folder: the site's.
        state: the folder of its state.
        on_cpu: whether its steps need no GPU.
        installed: the folder of the units that systemd reads; one there of another site is passed over.
    """
    for place in (folder / SITE, installed / SITE):
        try:
            lines = place.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        if f"WorkingDirectory={folder}" not in lines:
            continue
        if not on_cpu and "PrivateDevices=yes" in lines:
            yield f"{place} has PrivateDevices=yes, which hides the GPU from the site; write no there (device)"
        writable = next((line for line in lines if line.startswith("ReadWritePaths=")), "")
        if not (state.is_relative_to(folder) or f'"{state}"' in writable):
            yield f'{place} does not let the site write its state; add "{state}" to ReadWritePaths there (state)'


def _unit(folder: Path, name: str, what: str, command: str, writable: Sequence[Path], *, private_devices: bool) -> str:
    return _UNIT.format(
        folder=folder,
        name=name,
        short=name.removesuffix(".service"),
        what=what,
        user=user(),
        python=sys.executable.replace("%", "%%"),
        command=command,
        writable=" ".join(f'"{place}"' for place in writable),
        private_devices="yes" if private_devices else "no",
    )


def user() -> str:
    """Name of this process's user, or the number of one without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def nginx(*, host: str, bind: str, port: int, inner_port: int, certificates: Path) -> str:
    """The server block of nginx for a server."""
    return _NGINX.format(
        host=host,
        listen=f"[{bind}]" if ":" in bind else bind,
        port=port,
        inner=f"{HOST}:{inner_port}",
        certificates=certificates,
        largest=LARGEST_MB,
        connections=CONNECTIONS,
        paths=PATHS,
    )

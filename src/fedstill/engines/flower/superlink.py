"""The program that runs a SuperLink, keeps other users of its machine out, and ends with the process that started it.

A SuperLink has one port for sites, runs, keys and programs, and whoever starts a run has Python of his own executed as
the SuperLink's user. Sites prove themselves by their keys; the rest is left to processes of that user and of root. That
Flower serves by `uvicorn.run` is not documented; tests/checks/test_inner_port.py pins it.
"""

import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvicorn
from flwr.superlink.cli import flower_superlink
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedstill.engines.flower.supernode import end_with_parent

_PROGRAM = "from fedstill.engines.flower import superlink; superlink.main()"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Linux' tables of this machine's connections: each end's address, state, user and inode."""
_ESTABLISHED, _READINGS = "01", 3
"""State of an open connection; times that the tables are read, as Linux may miss a line while others come and go."""
KNOWS_USERS = _TABLES[0].exists()
"""Whether this system tells whose a connection is."""


def start(options: Sequence[str], environment: Mapping[str, str], paths: str) -> subprocess.Popen[bytes]:
    """Start a SuperLink.

    Args:
        options: options of ``flower-superlink``.
        environment: the program's environment.
        paths: regular expression of the paths for sites, whose requests are signed; others are for this user alone.
    """
    words = [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), paths, *options]
    return subprocess.Popen(words, env=dict(environment))


def main() -> None:
    """Run the SuperLink; the words are the parent's process id, the paths for sites, and Flower's options."""
    parent, paths, *sys.argv[1:] = sys.argv[1:]
    end_with_parent(int(parent))
    uvicorn.run = partial(_serve, uvicorn.run, paths)
    flower_superlink()


def _serve(run: Callable[..., None], paths: str, *, app: ASGIApp, **options: object) -> None:
    # with ``proxy_headers`` a header of the request would say where it comes from
    run(app=OwnProcesses(app, paths) if KNOWS_USERS else app, **{**options, "proxy_headers": False})


class OwnProcesses:
    """An ASGI app that answers 403 to other users of this machine wherever no key protects what they ask for.

    Args:
        app: the SuperLink's app, at an address of IPv4.
        paths: regular expression of the paths that a key protects.
    """

    def __init__(self, app: ASGIApp, paths: str) -> None:
        self._app, self._paths = app, re.compile(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse a request."""
        if scope["type"] == "lifespan" or self._paths.fullmatch(scope["path"]) or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            words = f"for processes of the server's user ({os.geteuid()}) on its own machine only"
            await PlainTextResponse(words, 403)(scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        return user_of(tuple(scope["client"]), tuple(scope["server"])) in (os.geteuid(), 0)


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user whose process has the client's end of a connection on this machine.

    None if there is no such process: it is elsewhere, or has closed its end, which then counts as root's.

    Args:
        client: IPv4 address and port of the client's end.
        server: those of the server's.
    """
    ours, theirs = _hexadecimal(client), _hexadecimal(server)
    for table in _TABLES * _READINGS:
        for line in table.read_text("utf-8").splitlines()[1:] if table.exists() else ():
            _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
            if local.endswith(ours) and remote.endswith(theirs) and state == _ESTABLISHED and inode != "0":
                return int(user)
    return None


def _hexadecimal(place: tuple[str, int]) -> str:
    """An address as in the tables; one of IPv4 is also the end of its form in IPv6."""
    (number,) = struct.unpack("=I", socket.inet_aton(place[0]))
    return f"{number:08X}:{place[1]:04X}"

"""What is changed or watched in the programs under test; Python imports it where this folder is on PYTHONPATH.

``FEDSTILL_TEST_HOOK``: a file with ``module:function``, called with `fedstill.sites.site.launcher` in the program for a
message; no file, no change. ``FEDSTILL_TEST_SOCKETS``: a file that gets a line for each use of a socket.
"""

import importlib
import os
import sys

WATCHED = (
    "socket.connect",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "urllib.Request",
)


def _patch_when_forked(hook: str) -> None:
    """Change the launcher in each program for a message, of which one process forks all."""

    def patch() -> None:
        launcher = sys.modules.get("fedstill.sites.site.launcher")
        if launcher is None or hasattr(launcher, "hooked") or not os.path.exists(hook):
            return
        launcher.hooked = True  # type: ignore[attr-defined]
        with open(hook) as file:
            where, _, what = file.read().strip().partition(":")
        getattr(importlib.import_module(where), what)(launcher)

    os.register_at_fork(after_in_child=patch)


def _watch(place: str) -> None:
    log = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def see(event: str, args: tuple[object, ...]) -> None:
        if event in WATCHED:
            found = args[1] if event in ("socket.connect", "socket.sendto", "socket.sendmsg") else args[0]
            kind = getattr(args[0], "type", 0)
            os.write(log, f"{event} {int(kind)} {found!r}\n".encode())

    sys.addaudithook(see)


if hook := os.environ.get("FEDSTILL_TEST_HOOK"):
    _patch_when_forked(hook)
if sockets := os.environ.get("FEDSTILL_TEST_SOCKETS"):
    _watch(sockets)

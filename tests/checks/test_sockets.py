"""No telemetry: a run talks to what it was told to talk to and to nobody else, in every engine.

Each experiment runs in processes of its own. An audit hook in every Python process (tests/support/hooks) writes down
what goes through Python's sockets; beside it the system's tables are read again and again for what C libraries do.
"""

import ast
import ipaddress
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import pytest

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
    pytest.mark.slow,
]
thorough = pytest.mark.skipif(
    not os.environ.get("FEDSTILL_SLOW"), reason="a deployment takes a minute or two; set FEDSTILL_SLOW=1"
)
flower = pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed: pip install 'fedstill[flower]'")

HOOKS = Path(__file__).parents[1] / "support" / "hooks"
PROGRAM = Path(sys.executable).parent / "fedstill"
EXPERIMENT = "run real --data digits --clients 2 --model convnet:width=8,depth=2 --ipc 1 --training.epochs 1".split()
FOREIGN = "198.51.100.1"
"""An address for documentation (RFC 5737), where nobody is."""
SWITCHES = ("TELEMETRY", "USAGE_STATS", "UPDATE_CHECK", "DO_NOT_TRACK", "OFFLINE")
"""Parts of the names of variables that would keep a library quiet; fedstill has to see to that itself."""


class Use(NamedTuple):
    """Of a socket: by whom it was seen, and the address."""

    seen: str
    host: str


class Table(threading.Thread):
    """Reads the system's tables of internet sockets for those of a process and its descendants.

    Args:
        root: the process.
        mark: part of the environment of its descendants.
        looks: a file that gets a byte after each look.
    """

    def __init__(self, root: int, mark: bytes, looks: Path) -> None:
        super().__init__(daemon=True)
        self.found: set[Use] = set()
        self._mark = mark
        self._looks = looks
        self._known = {root}
        self._strangers: set[tuple[int, float]] = set()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            self._look()
            with self._looks.open("ab") as log:
                log.write(b".")

    def _look(self) -> None:
        for process in psutil.process_iter():
            if (process.pid, process.create_time()) not in self._strangers and not self._is_ours(process):
                self._strangers.add((process.pid, process.create_time()))
        for entry in psutil.net_connections("inet"):
            if entry.pid in self._known:
                ends = [end.ip for end in (entry.laddr, entry.raddr) if end]
                kind = "listening" if entry.status == psutil.CONN_LISTEN else "table"
                self.found.update(Use(kind, plain(end)) for end in ends[-1:])

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether it descends from the root, as its parent or, where that has ended, its environment says."""
        if process.pid in self._known:
            return True
        try:
            ours = process.ppid() in self._known or self._mark in Path(f"/proc/{process.pid}/environ").read_bytes()
        except (psutil.Error, OSError):
            return True  # gone, or on its way up: look again
        if ours:
            self._known.add(process.pid)
        return ours

    def stop(self) -> set[Use]:
        self._over.set()
        self.join()
        return self.found


def watch(words: Sequence[object], folder: Path) -> set[Use]:
    """Run a program and give all uses of internet sockets by it and by what it starts."""
    log = folder / "sockets.log"
    quiet = {name: value for name, value in os.environ.items() if not any(part in name for part in SWITCHES)}
    paths = [str(HOOKS), *filter(None, sys.path)]
    environment = {**quiet, "PYTHONPATH": os.pathsep.join(paths), "FEDSTILL_TEST_SOCKETS": str(log)}
    looks = folder / "looks.log"
    looks.touch()
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(list(map(str, words)), env=environment, cwd=folder, stdout=output, stderr=output)
        table = Table(process.pid, f"FEDSTILL_TEST_SOCKETS={log}".encode(), looks)
        table.start()
        try:
            code = process.wait()
        finally:
            process.kill()
            found = table.stop()
    assert code == 0, (folder / "output.log").read_text()[-3000:]
    return found | set(audited(log))


def audited(log: Path) -> Iterator[Use]:
    """What the hook wrote, without what stays in the file system."""
    for line in log.read_text().splitlines() if log.exists() else []:
        event, _, text = line.split(" ", 2)
        where: Any = ast.literal_eval(text)
        if event.startswith("socket.get"):
            yield Use(event, str(where))
        elif isinstance(where, tuple):
            yield Use(event, str(where[0]))
        elif event == "urllib.Request":
            yield Use(event, str(where))


def plain(host: str) -> str:
    """An address; where it is an IPv4 one in IPv6's clothes, that one."""
    found = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def is_loopback(host: str) -> bool:
    """Whether it is this machine's loopback or no particular address, and no name that somebody would be asked for."""
    if host in ("None", "", "localhost"):
        return True
    try:
        found = ipaddress.ip_address(plain(host))
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def is_here(host: str) -> bool:
    """Whether it is this machine by one of its addresses or its name."""
    own = {entry.address.partition("%")[0] for some in psutil.net_if_addrs().values() for entry in some}
    return is_loopback(host) or host in own | {socket.gethostname()}


ABROAD = f"""
import socket
for act in (
    lambda: socket.create_connection(("{FOREIGN}", 9), timeout=0.05),
    lambda: socket.getaddrinfo("telemetry.example", 443),
):
    try:
        act()
    except OSError:
        pass
"""
IN_C = """
import ctypes, pathlib, socket, struct, time
with socket.create_server(("127.0.0.1", 0)) as server:
    libc = ctypes.CDLL(None)
    handle = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", server.getsockname()[1], b"\\x7f\\0\\0\\1")
    assert libc.connect(handle, address, len(address)) == 0
    seen = pathlib.Path("looks.log")
    now = seen.stat().st_size
    while seen.stat().st_size < now + 2:  # one look that may have begun before, and one from beginning to end
        time.sleep(0.05)
"""


def test_the_watch_sees_what_goes_abroad_even_from_a_child(tmp_path: Path) -> None:
    (tmp_path / "abroad.py").write_text(ABROAD)
    child = "import subprocess, sys; subprocess.run([sys.executable, 'abroad.py'], check=True)"
    found = watch([sys.executable, "-c", child], tmp_path)
    assert {use for use in found if not is_here(use.host)} >= {
        Use("socket.connect", FOREIGN),
        Use("socket.getaddrinfo", "telemetry.example"),
    }


def test_the_watch_sees_what_python_does_not(tmp_path: Path) -> None:
    found = watch([sys.executable, "-c", IN_C], tmp_path)
    assert found == {Use("table", "127.0.0.1"), Use("listening", "127.0.0.1")}


def test_a_run_in_process_has_no_internet_socket(tmp_path: Path) -> None:
    assert watch([PROGRAM, *EXPERIMENT, "--workers", 2, "--out", tmp_path / "run"], tmp_path) == set()


@flower
def test_a_simulation_on_flower_stays_on_this_machine(tmp_path: Path) -> None:
    found = watch([PROGRAM, *EXPERIMENT, "--engine", "flower", "--workers", 1, "--out", tmp_path / "run"], tmp_path)
    assert any(use.seen == "table" for use in found)
    assert {use for use in found if not is_here(use.host)} == set()


@thorough
@flower
@pytest.mark.timeout(900)
def test_a_deployment_talks_to_the_address_it_was_given(tmp_path: Path) -> None:
    found = watch([PROGRAM, "deploy", "check", tmp_path / "deployment"], tmp_path)
    assert any(use.seen == "table" for use in found)
    assert {use for use in found if not is_loopback(use.host)} == set()

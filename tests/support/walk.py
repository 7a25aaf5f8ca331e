"""A walk through docs/deploy.md: its own commands, from nothing to the first result, on this machine's loopback.

Run as a program, it prints the minutes and the number of commands: ``python tests/support/walk.py docs/deploy.md``.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HOST = "fl.example.org"
SITES = 2
LAST = "fedstill report"
"""Beginning of the command that shows the first result."""
SERVICES = {
    "flower-superlink": "the SuperLink",
    "fedstill deploy node": "a site's node",
    "fedstill server start": "the server",
    "fedstill site serve": "a site's node",
}
"""Beginnings of the commands that go on until they are stopped."""
CONNECTED = "SuperNode ID"


class Block(NamedTuple):
    """A block of the page: its language ("" for commands), its text, and whether each site has to do it."""

    language: str
    text: str
    of_site: bool


def all_blocks(page: str) -> Iterator[Block]:
    """All blocks of a page."""
    of_site = False
    for heading, language, text in re.findall(r"^(#+ [^\n]*)$|^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if heading:
            of_site = "each site" in heading
        else:
            yield Block(language, text, of_site)


def blocks(page: str) -> Iterator[Block]:
    """The blocks after that of the installation, up to the first result."""
    for block in [*all_blocks(page)][1:]:
        yield block
        if LAST in block.text:
            return


def commands(text: str) -> list[str]:
    """The commands of a block, without comments."""
    lines = text.replace("\\\n", " ").split("\n")
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


class Walk:
    """The machines of a deployment as folders of one, and what was typed there.

    Args:
        root: an empty folder.
        source: the folder ``src`` of the fedstill that is tried.
        changes: further replacements in the page's text, which come first.
    """

    def __init__(self, root: Path, source: Path, changes: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.srv = root / "srv"
        self.changes = {**(changes or {}), HOST: "localhost", "/srv/": f"{self.srv}/"}
        self.changes |= {"/absolute/path": str(root / "server")}
        self.typed: list[str] = []
        self.written = 0
        self.services: list[subprocess.Popen[bytes]] = []
        self.output = ""
        self.begun = time.monotonic()
        self.environment = {
            **os.environ,
            "HOME": str(root),
            "PATH": f"{root / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(source),
            "NO_PROXY": "localhost,127.0.0.1",
            "NO_COLOR": "1",
        }
        for name in ("bin", "server", "srv", *(f"site-{client}" for client in range(SITES))):
            (root / name).mkdir()
        program = root / "bin" / "fedstill"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedstill "$@"\n')
        program.chmod(0o755)
        self._images()

    def _images(self) -> None:
        data = load_digits()
        for client, part in enumerate(np.array_split(np.arange(1000), SITES)):
            for number in part:
                name = f"images{client}/train/{data.target[number]}"
                place = self.srv / name / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((data.images[number] * 15).astype(np.uint8)).save(place)

    def follow(self, page: str) -> None:
        """Do what the page says."""
        group: list[Block] = []
        for block in [*blocks(page), None]:
            if block is not None and block.of_site:
                group.append(block)
                continue
            for client in range(SITES) if group else ():
                for own in group:
                    self._block(own, client)
            group = []
            if block is not None:
                self._block(block, None)

    def _block(self, block: Block, client: int | None) -> None:
        text, folder = block.text, self.root / ("server" if client is None else f"site-{client}")
        if client is not None:  # the page has the commands of client 0
            text = re.sub(r"(site-|(?:--client|main|federation) )0\b", rf"\g<1>{client}", text)
            text = re.sub(r"/srv/(fedstill|images)\b", rf"/srv/\g<1>{client}", text)
        for old, new in self.changes.items():
            text = text.replace(old, new)
        if block.language == "toml":
            self._write(self.root / ".flwr" / "config.toml", text)
        elif block.language == "yaml":
            self._write(self.srv / "run.yaml", text)
        elif not block.language:
            if client is not None:
                self._send(folder)
            for command in commands(text):
                self._type(command, folder)

    def _write(self, place: Path, text: str) -> None:
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
        self.written += 1

    def _send(self, folder: Path) -> None:
        """What the server's operator sends to a site before it does something."""
        for pattern in ("server/ca.crt", "srv/federation/invitations/*"):
            for file in self.root.glob(pattern):
                shutil.copy(file, folder)

    def _type(self, command: str, folder: Path) -> None:
        self.typed.append(command)
        if command.startswith("export "):
            self.environment |= dict(pair.split("=", 1) for pair in command.split()[1:])
            return
        service = next((what for start, what in SERVICES.items() if command.startswith(start)), None)
        if service:
            self._start(command, folder, service)
            return
        done = subprocess.run(command, shell=True, cwd=folder, env=self.environment, capture_output=True, text=True)
        self.output += f"$ {command}\n{done.stdout}{done.stderr}"
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{self.output[-4000:]}{self._logs()}")

    def _start(self, command: str, folder: Path, what: str) -> None:
        log = self.root / f"service-{len(self.services)}.log"
        with log.open("wb") as out:
            service = subprocess.Popen(
                f"exec {command}", shell=True, cwd=folder, env=self.environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.services.append(service)
        until = time.monotonic() + 900  # a busy machine is no mistake of the page
        while not (CONNECTED in log.read_text() if "node" in what else self._listens()):
            if service.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{what} does not start: {log.read_text()[-4000:]}")
            time.sleep(0.2)

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(self.changes.get("9443", "9443")))) == 0

    def _logs(self) -> str:
        return "".join(log.read_text()[-2000:] for log in self.root.glob("service-*.log"))

    def cost(self) -> str:
        """What the walk took so far, in words; call it after `close` for all CPU seconds."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (
            f"{len(self.typed)} commands, {self.written} files written, "
            f"{(time.monotonic() - self.begun) / 60:.1f} minutes at a load of {os.getloadavg()[0]:.1f}, "
            f"{used.ru_utime + used.ru_stime:.0f} CPU seconds of all programs"
        )

    def close(self) -> None:
        """End all services."""
        for service in reversed(self.services):
            if service.poll() is None:
                os.killpg(service.pid, 15)
                service.wait()


def main() -> None:
    """Walk through a page, with the fedstill in a folder, and print what it took."""
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        walk = Walk(Path(folder), page.parents[1] / "src")
        try:
            walk.follow(page.read_text())
        finally:
            walk.close()
    print(walk.output)
    print(walk.cost())


if __name__ == "__main__":
    main()

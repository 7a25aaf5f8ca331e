"""``fedstill server run``: submit a run to a server, show its output, and say how it ended."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from fedstill.base.errors import FedstillError
from fedstill.base.settings import Settings
from fedstill.sites.server import service
from fedstill.sites.server.service import CONNECTION, FAILED, Server

_TRACE = "raised an exception"
"""Part of the line after which Flower prints where an exception was raised."""
_FLOWER = re.compile(r"(\x1b\[\d*m)*INFO |Using SuperLink: |Successfully installed fedstill-app |\s*$")
"""Beginnings of Flower's own lines, which tell nothing of a run."""
_POLL = 3.0
"""Seconds between two looks at the state of a run: each starts a process that needs seconds of a core."""


class SubmitFlags(Settings):
    """Flags of a run of the server with its sites."""

    out: Path | None = None
    """Folder of the results; an interrupted run there is resumed."""
    wait: NonNegativeFloat = 600.0
    """Time in seconds to wait for missing sites before each request."""
    at_a_time: PositiveInt | None = None
    """Number of sites that have a request at a time; all by default."""
    max_records: PositiveInt | None = None
    """Largest number of records that a reply may claim, whatever the roster says; the roster's numbers by default."""
    extend: Path | None = None
    """Finished one-shot run to which sites that sent no reply are added; no experiment file then."""
    clients: PositiveInt | None = None
    """With --extend, the number of sites, if there are more now; those of the finished run by default."""


class Ended(FedstillError, RuntimeError):
    """A run ended without a result."""


def run(server: Server, file: Path | None, flags: SubmitFlags, say: Callable[[str], None]) -> Path:
    """Run an experiment with the server's sites, and return the folder of the results.

    Raises:
        ValueError: the flags are invalid, or the server does not run.
        Ended: the run failed; the reason in one sentence.
        KeyboardInterrupt: it was interrupted, and the run stopped.
    """
    settings = settings_of(server, file, flags)
    identity = submit(server, settings)
    try:
        failure = _follow(server, identity, say)
    except KeyboardInterrupt:
        server.flwr("stop", identity, CONNECTION)
        raise
    state = status(server, identity)
    if state == "finished:completed":
        return Path(settings["out"])
    if failure:
        raise Ended(failure)
    if not service.is_running(server):
        raise Ended("the server has stopped; start it ('fedstill server start') and repeat the command to resume")
    raise Ended(f"the run ended as {state or 'unknown'}; repeat the command to resume")


def settings_of(server: Server, file: Path | None, flags: SubmitFlags) -> dict[str, Any]:
    """The settings of `fedstill.sites.server.serve.serve`.

    Raises:
        ValueError: the flags are invalid.
    """
    if (file is None) == (flags.extend is None):
        raise ValueError("give an experiment file, or --extend with a finished run, and not both")
    if flags.out is None:
        raise ValueError("--out is missing; give the folder of the results")
    if flags.clients and flags.extend is None:
        raise ValueError("--clients goes with --extend; the number of sites of a new run is in its experiment file")
    what = {"file": file} if file is not None else {"extend": flags.extend, "clients": flags.clients or 0}
    places = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in what.items()}
    if missing := [text for text in places.values() if isinstance(text, str) and not Path(text).exists()]:
        raise ValueError(f"there is no {missing[0]}")
    return {
        **places,
        "out": str(flags.out.resolve()),
        "wait": flags.wait,
        "at-a-time": flags.at_a_time or 0,
        "max-records": flags.max_records or 0,
        "roster": str(server.roster),
    }


def submit(server: Server, settings: Mapping[str, Any], app: Path | None = None) -> str:
    """Submit a run of fedstill's app, or of another, and return Flower's id of it.

    Raises:
        ValueError: the server does not take it.
    """
    if not service.ready(server):
        raise ValueError(f"the server does not run; start it with 'fedstill server start {server.folder}'")
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config = ["--run-config", values] if values else []
    done = server.flwr("run", app or server.app, CONNECTION, *config, "--format", "json")
    try:
        return str(json.loads(done.stdout)["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Flower does not take the run: {(done.stdout + done.stderr).strip()[-500:]!r}") from error


def status(server: Server, identity: str) -> str:
    """Status of a run: ``running``, ``finished:completed``, ``finished:failed`` and so on; empty if unknown."""
    listed = server.flwr("list", CONNECTION, "--format", "json", "--run-id", identity)
    try:
        return str(json.loads(listed.stdout)["runs"][0]["status"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


def _follow(server: Server, identity: str, say: Callable[[str], None]) -> str:
    """Pass on the lines of a run's output until it ends; returns the reason of its failure, if it says one."""
    shown, failure = 0, ""
    while True:
        quiet = False
        words = ["flwr", "log", identity, CONNECTION, "--stream"]
        with subprocess.Popen(
            words, env=server.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        ) as stream:  # fmt: skip
            assert stream.stdout is not None
            try:
                for number, line in enumerate(stream.stdout):
                    failure = line.partition(FAILED)[2].strip() or failure
                    quiet = quiet or _TRACE in line and bool(failure)
                    if number >= shown and not quiet and FAILED not in line and not _FLOWER.match(line):
                        say(line.rstrip("\n"))
                    shown = max(shown, number + 1)
            finally:
                stream.terminate()
        if status(server, identity) in ("pending", "starting", "running"):  # the stream broke
            time.sleep(_POLL)
            continue
        return failure

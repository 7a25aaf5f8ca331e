"""What goes wrong at a client stays at that client."""

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from doubles import Killed
from small import Probe, run, site, slow_to_start

from fedstill.engines import transport
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Workers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_clients_that_fail_are_left_out_and_the_run_goes_on(digits: Any, tmp_path: Path) -> None:
    method = Probe(misbehave={1: "raise", 2: "die"}, rounds=1)
    _, federation = run(method, digits, tmp_path, workers=2, min_clients=2)
    raised, died = sorted(federation.journal.refusals(), key=lambda refusal: refusal.client)
    assert (raised.client, raised.step, raised.round) == (1, "update", 1)
    assert "ArithmeticError: the abacus broke" in raised.reason
    assert (died.client, died.step, died.round) == (2, "update", 1)
    assert "its process ended (exit code 3; see above)" in died.reason


@pytest.mark.slow
def test_a_client_that_takes_too_long_is_left_out_and_the_run_goes_on(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts only once nobody else is working, so that no honest client is late where the machine is busy."""

    def patient(pipes: list[Connection], seconds: float | None) -> list[Any]:
        return connection.wait(pipes, None if len(pipes) > 1 else seconds)

    monkeypatch.setattr(transport, "wait", patient)
    method = Probe(misbehave={2: "sleep"}, rounds=1)
    _, federation = run(method, digits, tmp_path, workers=2, timeout=0.5, min_clients=3)
    (refusal,) = federation.journal.refusals()
    assert (refusal.client, refusal.step, refusal.round) == (2, "update", 1)
    assert refusal.reason == "no reply within 0.5 s (--timeout)"


@pytest.mark.slow
def test_the_time_limit_of_a_step_does_not_count_the_start_of_its_worker(digits: Any, tmp_path: Path) -> None:
    make_site = partial(slow_to_start, 4.0, site(Probe(), digits.train, tmp_path))
    with Workers(make_site, 1, timeout=3.0) as workers:
        for _ in range(2):
            arrivals = list(workers.exchange(b"", [0, 1], lambda _: None))
            assert [(arrival.client, arrival.failure) for arrival in arrivals] == [(0, None), (1, None)]


def test_too_few_replies_stop_the_run_and_say_why(digits: Any, tmp_path: Path) -> None:
    method = Probe(misbehave={0: "raise", 3: "raise"})
    with pytest.raises(TooFewReplies, match="2 of 4 .* 3 are needed .* client 0: ArithmeticError: the abacus broke"):
        run(method, digits, tmp_path, min_clients=3)


def forked(program: psutil.Process) -> list[psutil.Process]:
    """Processes that the program's server of forks has started."""
    return [child for child in program.children(recursive=True) if child.ppid() != program.pid]


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, Killed])
def test_leaving_a_transport_ends_its_workers(error: type[BaseException] | None, digits: Any, tmp_path: Path) -> None:
    with suppress(Killed), Workers(site(Probe(), digits.train, tmp_path), 2) as workers:
        list(workers.exchange(b"", range(4), lambda _: None))
        started = forked(psutil.Process())
        if error is not None:
            raise error
    assert len(started) == 2
    assert psutil.wait_procs(started, timeout=60)[1] == []


ORPHANS = """
import sys, time
from pathlib import Path
from small import Probe, site
from fedstill.data import sources
from fedstill.engines.transport import Workers
if __name__ == "__main__":
    workers = Workers(site(Probe(misbehave={0: "sleep"}), sources.load("digits").train, Path(sys.argv[1])), 1)
    list(workers.exchange(b"", [1], lambda _: None))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_workers_end_when_their_server_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    paths = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        (worker,) = forked(psutil.Process(server.pid))
        server.kill()
    assert psutil.wait_procs([worker], timeout=60)[1] == [], "the worker outlived its server by 60 s"

"""What is told of the work inside a client's step, and to whom."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from method_settings import SMALL
from small import federation, noise_images, run, site, world
from torch import nn
from typing_extensions import override

from fedstill import ticks
from fedstill.engines.transport import Losing, Watcher, Watchers, Workers
from fedstill.experiment.progress import Lines
from fedstill.methods.fedd3 import FedD3
from fedstill.methods.feddf import FedDF
from fedstill.methods.feddm import FedDM
from fedstill.methods.fedgm import FedGM
from fedstill.protocol import Client, Federation, Method, Reply, step
from fedstill.ticks import tick, told

Words = tuple[str, int, int]


class Done(Reply):
    number: float


class Patient(Method):
    """Its steps tell of 8 parts of a fifth of a second each, or of parts for ever."""

    endless: int = -1
    """Client whose step never ends."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        fed.ask(self.work)
        return fed.new_model()

    @step
    def work(self, client: Client) -> Done:
        """Work."""
        for part in range(8):
            time.sleep(0.2)
            tick("waiting", part + 1, 8)
        while client.id == self.endless:
            time.sleep(0.01)
            tick("waiting for ever", 1, 2)
        return Done(number=1.0)


class Heard(Watcher):
    def __init__(self, error: Exception | None = None) -> None:
        self.words: list[tuple[int, str, int, int]] = []
        self.error = error

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        self.words.append((client, label, done, total))
        if self.error is not None:
            raise self.error


def test_a_long_step_is_told_of_after_a_second_a_few_times_a_second_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(ticks.time, "monotonic", lambda: now[0])
    heard: list[Words] = []
    tick("nobody", 1, 2)
    with told(lambda *words: heard.append(words)):
        for part in range(1, 201):
            now[0] += 0.01
            tick("matching", part, 200)
        tick("training", 1, 50)
    tick("nobody", 1, 2)
    assert [done for label, done, _ in heard if label == "matching"] == [100, 120, 140, 160, 180, 200]
    assert heard[-1] == ("training", 1, 50)
    heard.clear()
    with told(lambda *words: heard.append(words)):
        now[0] += 0.99
        tick("short", 1, 1)
    assert heard == []


def test_other_threads_are_not_told_of() -> None:
    heard: list[Words] = []
    with told(lambda *words: heard.append(words)):
        other = threading.Thread(target=lambda: (time.sleep(1.1), tick("other", 1, 1)))
        other.start()
        other.join()
        assert heard == []
        tick("own", 1, 1)
    assert heard == [("own", 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_watcher_hears_of_each_client_whichever_process_it_is_in(workers: int, digits: Any, tmp_path: Path) -> None:
    heard = Heard()
    run(Patient(), digits, tmp_path, workers=workers, watcher=Watchers(Watcher(), heard))
    assert {words[0] for words in heard.words} == {0, 1, 2, 3}
    for client in range(4):
        parts = [done for who, _, done, _ in heard.words if who == client]
        assert parts == sorted(parts) and parts[0] > 2 and parts[-1] == 8
    assert {words[1:4:2] for words in heard.words} == {("waiting", 8)}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_watcher_ends_the_run_and_is_no_failure_of_the_client(
    workers: int, digits: Any, tmp_path: Path
) -> None:
    heard = Heard(OSError("the user has cancelled"))
    with pytest.raises(OSError, match="the user has cancelled"):
        run(Patient(), digits, tmp_path, workers=workers, watcher=heard, min_clients=1)
    assert len(heard.words) == 1


@pytest.mark.slow
def test_a_client_that_only_tells_of_its_work_is_too_late_all_the_same(digits: Any, tmp_path: Path) -> None:
    _, fed = run(Patient(endless=1), digits, tmp_path, workers=2, timeout=6.0, min_clients=3, watcher=Heard())
    (refusal,) = fed.journal.refusals()
    assert (refusal.client, refusal.reason) == (1, "no reply within 6 s (--timeout)")


@pytest.mark.slow
def test_clients_that_may_drop_out_are_told_of(digits: Any, tmp_path: Path) -> None:
    heard = Heard()
    with Workers(site(Patient(), digits.train, tmp_path), 1) as workers:
        losing = Losing(workers, 4, seed=0, drop=0.0, slow=0.5)
        fed = federation(Patient(), losing, digits, tmp_path, min_clients=1, watcher=heard)
        fed.ask(Patient.work)
    assert len({words[0] for words in heard.words}) == 2


def test_lines_say_where_a_client_is() -> None:
    said: list[str] = []
    with Lines(said.append, "fedgm, seed 0", every=0.05) as lines:
        lines.asked("distil", 3, 0, 0)
        lines.working(2, "matching", 7, 300)
        time.sleep(0.2)
        lines.arrived(None)
        time.sleep(0.2)
    assert any("step distil, 0 of 3 clients replied; client 2: matching, 7 of 300; 0:00 elapsed" in s for s in said)
    assert "1 of 3 clients replied; 0:00 elapsed" in said[-1]


@pytest.mark.slow
def test_images_of_every_kind_tell_of_their_synthesis(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "AFTER", 0.0)
    cases: list[tuple[Method, str, int]] = [
        (FedGM(**SMALL["fedgm"]), "matching", 3),
        (FedDM(**SMALL["feddm"]), "matching", 3),
        (FedD3(**SMALL["fedd3"]), "fitting images", 3),
        (FedDF(**SMALL["feddf"]), "training", 1),
    ]
    for number, (method, label, total) in enumerate(cases):
        heard = Heard()
        public = noise_images(digits) if isinstance(method, FedDF) else None
        method.server(world(method, digits, tmp_path / str(number), public=public, watcher=heard).federation)
        assert {words[1:4:2] for words in heard.words} == {(label, total)}

"""Flower's simulation: what goes wrong at clients, and what a run says when Flower can't serve it."""

import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.app import Error, Message, RecordDict  # noqa: E402
from small import Addressed, Probe, Sites, agreement, run, site, weights  # noqa: E402

from fedstill.cli import main  # noqa: E402
from fedstill.engines.flower.grid import OnGrid  # noqa: E402
from fedstill.engines.flower.simulation import simulation  # noqa: E402
from fedstill.engines.server import ServerFederation, TooFewReplies  # noqa: E402

# ---------------------------------------------------------------------------------------- with a grid of our own making


class Grid:
    """Answers at once, after a while, with an error, or never, as ``behaviour`` says for each node."""

    def __init__(self, behaviour: dict[int, str]) -> None:
        self.behaviour = behaviour
        self.pushed: list[Message] = []
        self.most = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        some = list(messages)
        for number, message in enumerate(some):
            message.metadata.__dict__["_message_id"] = f"{len(self.pushed) + number}"
        self.pushed += some
        return [message.metadata.message_id for message in some]

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
        asked = list(ids)
        self.most = max(self.most, len(asked))
        for message in [m for m in self.pushed if m.metadata.message_id in asked]:
            what = self.behaviour.get(message.metadata.dst_node_id, "echo")
            if what == "echo":
                reply = Message(message.content, reply_to=message)
            elif what == "error":
                reply = Message(Error(code=2, reason="out of paper"), reply_to=message)
            elif what == "empty":
                reply = Message(RecordDict(), reply_to=message)
            else:
                continue
            reply.metadata.__dict__["_message_id"] = "r"
            yield reply


@pytest.fixture(autouse=True)
def _a_run() -> None:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def exchange(grid: Grid, clients: int, **options: Any) -> list[Any]:
    sent: list[int] = []
    nodes = {client: 100 + client for client in range(clients)}
    transport = OnGrid(grid, nodes, **{"window": 4, **options})
    arrivals = list(transport.exchange(b"what?", range(clients), sent.append))
    assert sorted(sent) == list(range(clients))
    assert sorted(a.client for a in arrivals) == list(range(clients))
    return sorted(arrivals)


def test_every_client_gets_the_bytes_and_no_more_than_a_window_are_on_their_way() -> None:
    grid = Grid({})
    assert all(a.reply == b"what?" and a.failure is None for a in exchange(grid, 11))
    assert grid.most == 4
    assert [m.content["facts"]["client"] for m in grid.pushed] == list(range(11))


def test_errors_silence_and_replies_without_our_bytes_are_failures_with_a_reason() -> None:
    found = exchange(Grid({101: "error", 102: "silence", 103: "empty"}), 5, timeout=0.3)
    assert [a.failure for a in found] == [
        None,
        "Flower says: out of paper",
        "no reply within 0.3 s (--timeout)",
        "the reply holds no bytes of ours",
        None,
    ]


def test_a_simulation_that_ends_ends_the_run() -> None:
    transport = OnGrid(Grid({0: "silence"}), {0: 0}, window=1, failed=lambda: "the power is out")
    with pytest.raises(RuntimeError, match="ended early: the power is out"):
        list(transport.exchange(b"", [0], lambda _: None))


# -------------------------------------------------------------------------------------------------- with the real one


@pytest.mark.slow
def test_clients_that_raise_sleep_or_die_are_left_out(digits: Any, tmp_path: Path) -> None:
    wrong = {"well": {}, "raise": {1: "raise"}, "die": {2: "die"}}
    sites = {name: site(Probe(misbehave=how), digits.train, tmp_path / name / "clients") for name, how in wrong.items()}
    expected, _ = run(Probe(), digits, tmp_path / "inline")
    with simulation(partial(Sites, sites), 4, workers=2) as transport:

        def federation(name: str, folder: str = "", **options: Any) -> ServerFederation:
            return ServerFederation(
                agreement(Probe(misbehave=wrong[name]), digits.train),
                Addressed(transport, name),
                num_clients=4,
                folder=tmp_path / (folder or name),
                test=digits.test,
                **options,
            )

        fed = federation("raise", min_clients=3)
        Probe(misbehave=wrong["raise"]).server(fed)
        assert {(r.client, "abacus" in r.reason) for r in fed.journal.refusals()} == {(1, True)}
        with pytest.raises(TooFewReplies, match="client 2: its process ended"):
            Probe(misbehave=wrong["die"]).server(federation("die"))
        assert weights(Probe().server(federation("well"))) == weights(expected)  # the actors are still there
    assert not any(thread.name.startswith("fedstill") for thread in threading.enumerate())


@pytest.mark.slow
def test_the_command_runs_it_and_says_what_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run real --data digits --clients 2 --model convnet:width=8,depth=2 --ipc 1 --training.epochs 1".split()
    began = time.monotonic()
    main([*words, "--engine", "flower", "--workers", "1", "--out", str(tmp_path / "a")])
    assert time.monotonic() - began < 120
    main([*words, "--workers", "0", "--out", str(tmp_path / "b")])
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--engine", "flower", "--gpus-per-client", "7", "--out", str(tmp_path / "c")])
    assert stopped.value.code == 2
    assert "a client is to have 1 CPUs and 7 GPUs; there are" in capsys.readouterr().err


def test_without_flower_there_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'flwr'", name="flwr")

    monkeypatch.setattr("fedstill.experiment.run.importlib.import_module", missing)
    words = "run real --data digits --clients 2 --model convnet:width=8,depth=2 --engine flower --out".split()
    with pytest.raises(SystemExit) as stopped:
        main([*words, str(tmp_path / "a")])
    assert stopped.value.code == 2
    assert "pip install 'fedstill[flower]'" in capsys.readouterr().err

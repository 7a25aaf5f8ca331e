"""Simulated drop-out and slow clients."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import fedstill
from fedstill.cli import main
from fedstill.engines.transport import Arrival, Losing, Transport
from fedstill.experiment import reuse
from fedstill.experiment.reuse import read_job
from fedstill.experiment.run import run as run_job
from fedstill.protocol import wire
from fedstill.runs.journal import EVALUATIONS

CLIENTS = 200


class Echo(Transport):
    closed = False

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for client in clients:
            sent(client)
            yield Arrival(client, b"reply")

    @override
    def close(self) -> None:
        self.closed = True


def lost(number: int, clients: Sequence[int] = range(CLIENTS), **settings: Any) -> dict[int, str]:
    """The clients whose reply to request ``number`` is lost, with the reasons."""
    asked: list[int] = []
    losing = Losing(Echo(), CLIENTS, **{"seed": 0, "drop": 0.0, "slow": 0.0, **settings})
    arrivals = list(losing.exchange(wire.pack({}, {"exchange": number}), clients, asked.append))
    assert sorted(asked) == sorted(clients) == sorted(arrival.client for arrival in arrivals)
    assert all((arrival.reply == b"reply") == (arrival.failure is None) for arrival in arrivals)
    return {arrival.client: arrival.failure for arrival in arrivals if arrival.failure}


def test_replies_are_lost_at_the_rate_asked_for_whoever_is_asked_first() -> None:
    first = lost(3, drop=0.3)
    assert first == lost(3, range(CLIENTS - 1, -1, -1), drop=0.3)
    assert set(lost(3, range(50), drop=0.3)) == {client for client in first if client < 50}
    assert set(first.values()) == {"its reply is lost in every start with this seed (--drop 0.3)"}
    counts = [len(lost(number, drop=0.3)) for number in range(20)]
    # 4000 draws: a standard deviation of 29 about 1200; a rate of 0.25 or 0.35 would be 200 away
    assert abs(sum(counts) - 1200) < 120 and len(set(counts)) > 1
    both = set(first) & set(lost(4, drop=0.3))
    assert len(both) < 45 and first.keys() != lost(3, drop=0.3, seed=1).keys()  # 18 of 200 by chance, 60 if the same


def test_the_same_clients_are_slow_each_time() -> None:
    slow = lost(0, slow=0.1)
    assert len(slow) == 20 and slow == lost(7, slow=0.1) and set(slow.values()) == {"it is slow (--slow 0.1)"}
    assert len(lost(0, slow=0.001)) == 1 and slow.keys() != lost(0, slow=0.1, seed=1).keys()


def test_an_evaluation_loses_nobody_and_the_clients_are_let_go() -> None:
    assert not lost(EVALUATIONS + 3, drop=0.9, slow=0.5)
    with Losing(inner := Echo(), 4, seed=0, drop=0.5, slow=0.0):
        assert not inner.closed
    assert inner.closed


def job(out: Path, **changes: Any) -> fedstill.Job:
    task: dict[str, Any] = {"data": "digits", "limit": 200, "clients": 5, "model": "convnet:width=4,depth=2"}
    task |= {"workers": 0, "min_clients": 1}
    rounds = changes.pop("rounds", 1)
    return fedstill.Job(fedstill.Experiment(**{**task, **changes}), fedstill.FedAvg(rounds=rounds), out=out)


@pytest.mark.slow
def test_a_run_goes_on_without_lost_replies_and_tells_each(tmp_path: Path) -> None:
    whole = run_job(job(tmp_path / "whole", rounds=4))
    found = run_job(job(tmp_path / "lossy", rounds=4, drop=0.5))
    again = run_job(job(tmp_path / "again", rounds=4, drop=0.5))
    assert 0 < len(found["refused"]) < 20 and found["refused"] == again["refused"]
    assert (tmp_path / "lossy" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    assert found["bytes_down"] == whole["bytes_down"]  # who is lost was asked
    assert found["bytes_up"] * 20 == pytest.approx(whole["bytes_up"] * (20 - len(found["refused"])), rel=0.01)


@pytest.mark.slow
def test_slow_clients_of_a_finished_run_are_asked_once_more(tmp_path: Path) -> None:
    whole = run_job(job(tmp_path / "whole"))
    without = run_job(job(tmp_path / "run", slow=0.4))
    assert len(without["refused"]) == 2
    later = read_job(tmp_path / "run", tmp_path / "later", "")
    reuse.begin(tmp_path / "run", later)
    summary = run_job(later)
    assert summary["refused"] == [] and summary["accuracy"] == whole["accuracy"]
    models = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("whole", "later", "run")]
    assert models[0] == models[1] != models[2]


def test_losses_that_no_run_survives_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", "--data", "digits", "--clients", "10", "--out", str(tmp_path / "run")]
    for flags, sentence in (
        (["--drop", "0.3"], "--drop is 0.3, but a request needs every reply; say with --min-clients"),
        (["--slow", "0.3", "--min-clients", "8"], "which leaves 7 of 10 clients, but --min-clients is 8"),
        (["--drop", "1", "--min-clients", "1"], "drop is 1; it must be less than 1"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*words, *flags])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and sentence in error and error.count("\n") == 1, error
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="--drop and --slow are for simulated clients"):
        run_job(job(tmp_path / "real", slow=0.2), sites=lambda _: Echo())
    with pytest.raises(fedstill.TooFewReplies, match=r"its reply is lost in every start with this seed \(--drop 0.9\)"):
        run_job(job(tmp_path / "few", drop=0.9, min_clients=5))


@pytest.mark.slow
def test_a_folder_of_its_own_for_each_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "fedavg", "--data", "digits", "--limit", "200", "--clients", "4", "--rounds", "1", "--workers", "0"]
    words += ["--model", "convnet:width=4,depth=2", "--min-clients", "1", "--quiet", "--json"]
    for flags in ([], ["--drop", "0.5"]):
        main([*words, *flags])
    assert len(list(Path("runs").iterdir())) == 2
    rates = [json.loads((run / "config.json").read_text())["experiment"]["drop"] for run in Path("runs").iterdir()]
    assert sorted(rates) == [0.0, 0.5]

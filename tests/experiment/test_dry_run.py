"""The estimate of ``--dry-run`` beside the run itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from method_settings import SMALL

import fedstill
from fedstill.cli import main
from fedstill.experiment.estimate import Estimate, estimate
from fedstill.methods import find

TASK: dict[str, Any] = {"data": "digits", "clients": 4, "limit": 600, "model": "convnet:width=8,depth=2", "workers": 0}
WORDS = ["--data", "digits", "--clients", "4", "--limit", "240", "--model", "convnet:width=8,depth=2", "--workers", "0"]


def both(name: str, folder: Path, **more: Any) -> tuple[Estimate, fedstill.RunRecord]:
    task = fedstill.Experiment(**{**TASK, **more})
    job = fedstill.Job(task, find(name)(**SMALL[name]), folder / "run", name=name)
    before = estimate(job)
    assert not folder.exists() or not list(folder.iterdir())
    return before, fedstill.run(job)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedaux", "dense", "fedgm", "fedd-p"])
def test_an_estimate_has_the_bytes_and_the_epsilon_of_the_run(name: str, tmp_path: Path) -> None:
    public = {"public": "held=40"} if find(name).needs_public else {}
    before, run = both(name, tmp_path, **public)
    counted = (run["bytes_up"], run["bytes_down"])
    # digits of numbers in a header, as a client's number of records, differ by some bytes
    assert (before.bytes_up, before.bytes_down) == pytest.approx(counted, rel=0.02)
    assert before.guarantee.holds == run.guarantee.holds and before.within_budget
    if run.guarantee.holds:
        assert before.guarantee.epsilon == pytest.approx(run.guarantee.epsilon, rel=1e-6)
    else:
        assert before.guarantee.reason == run.guarantee.reason
    assert before.seconds_clients > 0 and before.seconds_server > 0


@pytest.mark.slow
def test_epsilon_is_that_of_the_run_for_an_uneven_partition_too(tmp_path: Path) -> None:
    before, run = both("dp-fl", tmp_path, partition="dirichlet:1", seed=1)
    assert run.guarantee.holds
    assert before.guarantee.epsilon == pytest.approx(run.guarantee.epsilon, rel=1e-6)


@pytest.mark.slow
def test_clients_that_evaluate_are_counted_apart(tmp_path: Path) -> None:
    before, run = both("fedrep", tmp_path, local_test=0.2)
    assert before.bytes_judging == pytest.approx(run["bytes_judging"], rel=0.02) and run["bytes_judging"] > 0


def test_rounds_and_clients_multiply_what_one_of_each_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["run", "fedavg", *WORDS, "--rounds", "1000000", "--dry-run", "--json", "--quiet"])
    (found,) = json.loads(capsys.readouterr().out)["estimates"]
    (request,) = found["requests"]
    assert (request["times"], request["clients"]) == (1_000_000, 4)
    assert found["bytes_up"] == 4_000_000 * request["bytes_up_per_client"]
    assert found["bytes_down"] == 4_000_000 * request["bytes_down_per_client"]
    assert found["seconds_clients"] == pytest.approx(4_000_000 * request["seconds"])
    assert found["seconds"] == pytest.approx(found["seconds_clients"] + found["seconds_server"])
    main(["compare", "fedavg", "once=fedavg", *WORDS, "--each.rounds", "2", "--once.rounds", "1", "--seeds", "0", "1",
          "--dry-run", "--quiet"])  # fmt: skip
    text = capsys.readouterr().out
    assert "fedavg on digits, iid, 4 clients, 2 seeds" in text and "all 4 runs: about" in text
    assert "privacy: none (field 'weights'" in text
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_possible_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, sentence in (
        (["run", "fedrep", *WORDS, "--dry-run"], "give clients test records with --local-test"),
        (["run", "fedavg", *WORDS, "--dry-run", "--model", "convnet:width=7x"], "can't use 'width=7x'"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2 and sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_default_data_set_is_named_if_a_command_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Exception):
        pass

    def begin(*_: object, **__: object) -> None:
        raise Begun

    monkeypatch.setattr("fedstill.experiment.run.run", begin)
    monkeypatch.chdir(tmp_path)
    for words, expected in (([], True), (["--data=digits"], False), (["--data", "mnist"], False), (["--quiet"], False)):
        with pytest.raises(Begun):
            main(["run", "fedavg", *words])
        assert ("data: mnist, the default" in capsys.readouterr().out) == expected


@pytest.mark.slow
def test_with_a_part_of_the_clients_in_a_round_epsilon_is_at_most_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "digits", "--limit", "120", "--clients", "6", "--workers", "0", "--rounds", "6"]
    words += ["--model", "convnet:width=4,depth=2", "--participation", "0.3", "--local.steps", "1"]
    main(["run", "dp-fl", *words, "--dry-run", "--quiet"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "privacy: at most " in shown and "none releases in all of them" in shown
    main(["run", "dp-fl", *words, "--dry-run", "--json", "--quiet"])
    before = json.loads(capsys.readouterr().out)["estimates"][0]
    main(["run", "dp-fl", *words, "--quiet", "--json", "--out", str(tmp_path / "run")])
    spent = json.loads(capsys.readouterr().out)["guarantee"]["epsilon"]
    assert before["at_most"] and spent < before["guarantee"]["epsilon"]
    limit = str((spent + before["guarantee"]["epsilon"]) / 2)
    main(["run", "dp-fl", *words, "--dry-run", "--quiet", "--budget", limit])
    assert "the budget may end the releases early" in " ".join(capsys.readouterr().out.split())
    main(["run", "dp-fl", *words, "--participation", "1", "--dry-run", "--quiet"])
    assert "at most" not in capsys.readouterr().out

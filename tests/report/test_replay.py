"""A gate against rot: the board's cheap numbers, run again from their commands; one that does not hold fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "fedstill run {method} --data digits --clients 2 --limit 60 --workers 0 {more} --out somewhere/else"
FAST = {
    "fedavg": "--model convnet:width=4,depth=2 --rounds 1",
    "real": "--model convnet:width=4,depth=2 --training.epochs 1",
}


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    import replay

    return replay


def row(replay: Any, method: str, folder: Path) -> dict[str, Any]:
    command = COMMAND.format(method=method, more=FAST[method])
    found = replay.replay({"command": command}, folder)
    facts = {"label": method, "data": "digits", "split": "iid", "clients": 2, "seed": 0, "command": command}
    return {**facts, "accuracy": found["accuracy"], "up": found["up"], "client_seconds": 0.1, "server_seconds": 0.1}


@pytest.mark.slow
def test_a_number_that_holds_passes_and_another_one_fails(
    replay: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, found = replay.replay, dict[str, dict[str, Any]]()

    def once(row: dict[str, Any], folder: Path) -> dict[str, Any]:
        """What a command gives, run the first time; a failure is run each time."""
        if row["command"] not in found:
            found[row["command"]] = run(row, folder)
        return found[row["command"]]

    monkeypatch.setattr(replay, "replay", once)
    rows = [row(replay, method, tmp_path / method) for method in FAST]
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(replay, "RESULTS", results)
    monkeypatch.setattr(replay.cheap, "__defaults__", (results,))
    monkeypatch.setattr(sys, "argv", ["replay.py"])

    def write(*changed: dict[str, Any]) -> None:
        (results / "digits.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))

    write(*rows)
    replay.main()
    assert capsys.readouterr().out.count("holds ") == 2
    write(
        rows[0], {**rows[1], "accuracy": rows[1]["accuracy"] + 0.02}, {**rows[1], "label": "slow", "server_seconds": 99}
    )
    with pytest.raises(SystemExit, match="1 numbers do not hold"):
        replay.main()
    told = capsys.readouterr().out
    assert "DIFFERS  real, digits, iid, 2 clients, seed 0: accuracy" in told and "slow" not in told
    write({**rows[0], "up": rows[0]["up"] + 1}, {**rows[1], "command": rows[1]["command"] + " --no-such-flag 1"})
    with pytest.raises(SystemExit, match="2 numbers do not hold"):
        replay.main()
    told = capsys.readouterr().out
    assert "bytes up, now" in told and "its command fails: " in told and "--no-such-flag" in told


def test_the_day_draws_other_rows_of_different_methods(replay: Any) -> None:
    rows = replay.cheap(20.0)
    assert len(rows) > 300 and max(map(replay.seconds_of, rows)) <= 20.0
    first, again, other = (replay.drawn(rows, day, 10) for day in ("2026-11-27", "2026-11-27", "2026-11-28"))
    assert first == again != other and len({each["label"] for each in first}) == 10
    assert all("--out" in each["command"].split() for each in rows)

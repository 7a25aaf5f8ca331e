"""A site's counts of questions and runs: they hold over restarts, wrong clocks and crashes."""

import os
import time
from pathlib import Path

import pytest
from real_sites import make_site, spec_of

from fedstill import files, schema, wire
from fedstill.data.sources import DataSet
from fedstill.sites import log
from fedstill.sites.answer import answer
from fedstill.sites.policy import SitePolicy
from fedstill.sites.questions import DAY, Questions


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    return SitePolicy(client=0, data=tmp_path, state=tmp_path / "state", methods=(), runs_per_day=2)


def ask(policy: SitePolicy, run: str) -> None:
    questions = Questions(policy, run, "spec")
    questions.ask()
    questions.end()


def test_a_clock_that_was_once_ahead_blocks_no_run(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3650 * DAY)
    ask(policy, "a")
    ask(policy, "b")
    with pytest.raises(schema.Refused, match="begun 2 runs in the last day"):
        ask(policy, "c")
    monkeypatch.setattr(time, "time", lambda: now)
    ask(policy, "c")
    ask(policy, "d")
    with pytest.raises(schema.Refused, match="begun 2 runs in the last day"):
        ask(policy, "e")
    monkeypatch.setattr(time, "time", lambda: now + 1.001 * DAY)
    ask(policy, "e")


@pytest.mark.parametrize("line", [b"no object\n", b"{}\n", b"[]\n", b'{"time": "x", "what": 1}\n'])
def test_a_damaged_count_never_asks_to_delete_the_state(line: bytes, policy: SitePolicy) -> None:
    ask(policy, "a")
    runs, questions = policy.state / "runs.jsonl", policy.state / "runs" / "a" / "questions.jsonl"
    for place, run in ((runs, "b"), (questions, "a")):
        whole = place.read_bytes()
        place.write_bytes(line + whole)
        with pytest.raises(files.Damaged, match=f"{place.name} is damaged .*; put its newest copy back") as error:
            ask(policy, run)
        assert f"delete {policy.state}" not in str(error.value)
        place.write_bytes(whole)
    runs.unlink()  # as the remedy says
    ask(policy, "b")


@pytest.mark.parametrize("torn", [b"{", b'{"time": 1', b"\0" * 90])
def test_half_a_line_of_a_crash_gives_way_to_the_next(torn: bytes, policy: SitePolicy) -> None:
    ask(policy, "a")
    for place in (policy.state / "runs.jsonl", policy.state / "runs" / "a" / "questions.jsonl"):
        with place.open("ab") as file:
            file.write(torn)
    ask(policy, "a")
    ask(policy, "b")
    with pytest.raises(schema.Refused, match="begun 2 runs in the last day"):
        ask(policy, "c")


def test_a_count_is_on_the_disk_before_the_step(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(os.fstat(handle).st_ino), fsync(handle)))
    Questions(policy, "a", "spec").ask()
    counts = (policy.state / "runs.jsonl", policy.state / "runs" / "a" / "questions.jsonl")
    assert {place.stat().st_ino for place in counts} <= set(flushed)


@pytest.mark.parametrize("name", ["log.jsonl", log.OLD])
def test_a_damaged_log_of_an_early_version_says_how_to_begin_another(name: str, policy: SitePolicy) -> None:
    policy.state.mkdir()
    (policy.state / "log.jsonl").write_bytes(b"[]\n")
    if name == log.OLD:
        log.append(policy.state, {"what": "asked", "detail": ""})
    with pytest.raises(files.Damaged, match=f"{name} is damaged .*fedstill site log FOLDER --restart"):
        log.read(policy.state)
    log.restart(policy.state)
    assert [line["what"] for line in log.read(policy.state)] == ["begun"]


def test_a_damaged_state_of_a_run_never_asks_to_delete_other_runs(digits: DataSet, tmp_path: Path) -> None:
    site = make_site(tmp_path, digits, methods=["real"])
    text = spec_of("real", digits).text()
    for exchange in (0, 1):
        answer(site, text, wire.pack({}, {"step": "select", "exchange": exchange, "fields": {}}))
        place = site.state / "runs" / log.read(site.state)[0]["run"] / "00000" / "000000.state"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(40))
    what, detail = (log.read(site.state)[-1][name] for name in ("what", "detail"))
    assert what == "failed" and "put its newest copy back, or let the server start another run" in detail
    assert "delete" not in detail

"""A site's counts of questions and runs: they hold over restarts, wrong clocks and crashes."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from real_sites import make_site, spec_of

from fedstill import schema
from fedstill.base import files
from fedstill.data.sources import DataSet
from fedstill.protocol import wire
from fedstill.sites.site import log
from fedstill.sites.site.answer import DAY, Questions, answer
from fedstill.sites.site.policy import SitePolicy


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


def test_a_run_whose_state_is_gone_does_not_begin_anew(policy: SitePolicy) -> None:
    ask(policy, "a")
    shutil.rmtree(policy.state / "runs" / "a")
    with pytest.raises(schema.Refused, match="lost the state of this run; start another run"):
        ask(policy, "a")
    ask(policy, "b")
    (policy.state / "runs" / "b" / "spec.json").unlink()
    with pytest.raises(schema.Refused, match="lost the state of this run; start another run"):
        ask(policy, "b")


def test_two_specs_of_one_name_are_two_runs(policy: SitePolicy) -> None:
    """A run's name has 64 bits of a hash of its spec, which a patient server may find twice."""
    ask(policy, "a")
    with pytest.raises(schema.Refused, match="another run with other settings has this run's name"):
        Questions(policy, "a", "another spec").ask()


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


@pytest.mark.parametrize("lost", [["log.key"], ["log.key", "log.head"], ["log.key", "log.head", log.FORMAT]])
def test_a_log_whose_other_files_were_deleted_loses_no_line_in_silence(lost: list[str], policy: SitePolicy) -> None:
    """Who deletes the chain's key, its end and the note that it was begun, must not get an empty log."""
    log.append(policy.state, {"what": "asked", "detail": ""})
    lines = (policy.state / "log.jsonl").read_bytes()
    for name in lost:
        (policy.state / name).unlink()
    with pytest.raises(files.Damaged, match="fedstill site log FOLDER --restart"):
        log.read(policy.state)
    with pytest.raises(files.Damaged, match="fedstill site log FOLDER --restart"):
        log.append(policy.state, {"what": "asked", "detail": ""})
    assert (policy.state / "log.jsonl").read_bytes() == lines
    aside = log.restart(policy.state)
    assert (aside / "log.jsonl").read_bytes() == lines
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


def test_a_server_fills_no_disk_with_refusals(digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(tmp_path, digits, methods=["real", "fedavg-p"], refusals_per_day=3)
    spec = json.loads(spec_of("fedavg-p", digits).text())
    spec["settings"] |= {f"{i:x}": 0 for i in range(20_000)}
    request = wire.pack({}, {"step": "train_head", "exchange": 0, "fields": {}})

    def ask_often(number: int) -> list[bytes]:
        return [answer(site, json.dumps(spec), request) for _ in range(number)]

    first = ask_often(3)
    assert b"can't be set up: '0': Extra inputs are not permitted" in first[0]
    assert max(map(len, first)) < 1000
    lines = log.read(site.state)
    assert [line["what"] for line in lines] == ["asked", "refused"] * 3
    assert max(len(json.dumps(line)) for line in lines) < 4000
    assert lines[-1]["detail"].endswith("so no other is logged or answered (refusals_per_day)")
    size = sum(place.stat().st_size for place in site.state.glob("*") if place.is_file())
    good = wire.pack({}, {"step": "select", "exchange": 0, "fields": {}})
    text = spec_of("real", digits).text()
    assert {
        b"too many messages were refused today" in reply for reply in [*ask_often(4), answer(site, text, good)]
    } == {True}
    log.write(site, {}, "failed", "a foreign bundle, say")
    assert log.read(site.state) == lines
    assert abs(sum(place.stat().st_size for place in site.state.glob("*") if place.is_file()) - size) < 10
    monkeypatch.setattr(log, "_day", lambda: "2999-01-01")
    assert wire.unpack(answer(site, text, good))[0]


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"day": 1}', '{"day": "DAY", "count": 1e999}'])
def test_a_damaged_count_of_refusals_begins_anew(text: str, policy: SitePolicy) -> None:
    policy.state.mkdir()
    (policy.state / log.COUNT).write_text(text.replace("DAY", log._day()))
    assert not log.is_full(policy)
    assert log.count(policy) == 1


def test_the_detail_of_a_line_is_short(policy: SitePolicy) -> None:
    for detail in ("x" * 100_000, ValueError("x" * 100_000)):
        log.write(policy, {}, "failed", detail)
    assert max(len(line["detail"]) for line in log.read(policy.state)) == 1000

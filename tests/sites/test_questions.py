"""A site's counts of questions and runs: they hold over restarts, wrong clocks and crashes."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from real_sites import make_site, spec_of

from fedstill import schema
from fedstill.data.sources import DataSet
from fedstill.protocol import wire
from fedstill.sites.site import log, site_journal
from fedstill.sites.site.answer import accept, answer
from fedstill.sites.site.checkpoint import DAY, FORGET
from fedstill.sites.site.policy import SitePolicy


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    site_journal.create(tmp_path / "state")
    return SitePolicy(client=0, data=tmp_path, state=tmp_path / "state", methods=(), runs_per_day=2)


def ask(policy: SitePolicy, run: str, spec: str = "spec") -> None:
    """A question that ends well."""
    number = log.write(policy, {"run": run}, "asked", "")
    assert number is not None
    accept(policy, run, spec, number)
    log.write(policy, {"run": run, "question": number, "simulated_noise": True}, "answered", "")


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
        ask(policy, "a", "another spec")


def test_a_run_that_was_silent_for_a_month_is_over_and_its_counts_are_forgotten(
    policy: SitePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has a bound; it knows no run for ever."""
    monkeypatch.setattr(site_journal, "LARGEST", 1)
    ask(policy, "a")
    (policy.state / "runs" / "a" / "answer.lock").touch()  # of its step
    now = time.time()
    ask(policy, "a")
    monkeypatch.setattr(time, "time", lambda: now + FORGET + 60)
    ask(policy, "b")
    with pytest.raises(schema.Refused, match="has asked nothing for 30 days and is over here"):
        ask(policy, "a")
    assert {*site_journal.SiteJournal(policy.state).standing().at.runs} == {"b"}
    assert log.verify(policy.state).is_whole


def test_a_checkpoint_larger_than_a_file_does_not_begin_one_with_each_line(
    policy: SitePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many runs a day make it; each line would write all of them."""
    monkeypatch.setattr(site_journal, "LARGEST", 3000)
    policy = policy.model_copy(update={"runs_per_day": 100})
    for run in range(40):
        ask(policy, f"{run:032x}")
    before = len(list(policy.state.glob("journal-*.jsonl")))
    assert (policy.state / "journal.jsonl").read_bytes().index(b"\n") > 3000
    for _ in range(10):
        log.write(policy, {}, "paused", "")
    assert len(list(policy.state.glob("journal-*.jsonl"))) <= before + 1
    assert log.verify(policy.state).is_whole


def test_a_run_whose_first_question_was_killed_early_begins(policy: SitePolicy) -> None:
    """Between its spec and its line."""
    (policy.state / "runs" / "a").mkdir(parents=True)
    (policy.state / "runs" / "a" / "spec.json").write_text("sp")
    ask(policy, "a")
    assert (policy.state / "runs" / "a" / "spec.json").read_text() == "spec"


def test_a_count_is_on_the_disk_before_the_step(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = list[bytes](), os.fsync
    place = policy.state / "journal.jsonl"
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(place.read_bytes()), fsync(handle)))
    accept(policy, "a", "spec", 1)
    assert b'"what":"accepted"' in place.read_bytes() and place.read_bytes() in flushed


def test_a_refusal_after_the_day_s_limit_is_an_outcome_all_the_same(policy: SitePolicy) -> None:
    """Else a question that the ledger refuses would count as failed for good."""
    policy = policy.model_copy(update={"refusals_per_day": 1})
    number = log.write(policy, {}, "asked", "")
    assert number is not None
    accept(policy, "a", "spec", number)
    log.write(policy, {}, "refused", "another")
    assert log.write(policy, {}, "refused", "another") is None
    assert log.write(policy, {"question": number}, "refused", "its budget") is not None
    at = site_journal.SiteJournal(policy.state).standing().at
    assert (at.accepted, at.failed, at.asked) == (1, 0, {})


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


def test_the_detail_of_a_line_is_short(policy: SitePolicy) -> None:
    for detail in ("x" * 100_000, ValueError("x" * 100_000)):
        log.write(policy, {}, "failed", detail)
    assert max(len(line["detail"]) for line in log.read(policy.state)) == 1000

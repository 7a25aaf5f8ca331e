"""A site of format 2, with a ledger, a log and files of counts, becomes one with a journal; no charge is lost."""

import base64
import hmac
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from releases import entry

from fedstill.base import files
from fedstill.privacy.ledger import BudgetExceeded, Charge
from fedstill.privacy.releases import Gaussian, Pure
from fedstill.sites.site import log, site_journal, state_format
from fedstill.sites.site.chain import Chain, Line
from fedstill.sites.site.charges import Limits, open_site_ledger, read_charges
from fedstill.sites.site.site_journal import SiteJournal

RUNS = ("a" * 32 + "-0123456789abcdef", "b" * 32 + "-0123456789abcdef")
TIME = "2026-01-01T00:00:00+00:00"
RECORDS = bytes(16) + (8).to_bytes(8, "big") + b"\xf0"


def write_chain(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    chain = Chain(folder, name, "")
    chain.create()
    chain.synchronise()
    for line in lines:
        chain.append(line)


def old_charges() -> list[Charge]:
    label = entry(Pure(epsilon=0.5), unit="label", part="p").model_copy(update={"records": RECORDS})
    return [entry(Gaussian(noise_multiplier=9.0)), label, entry(Gaussian(noise_multiplier=7.0), index=1)]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """What fedstill wrote in format 2."""
    state = tmp_path / "state"
    lines = []
    for number, charge in enumerate(old_charges()):
        facts = {"run": RUNS[number % 2], "time": TIME, "entry": charge.model_dump(mode="json")}
        more = {} if charge.records is None else {"records": base64.b64encode(charge.records).decode()}
        lines.append({**facts, **more})
    write_chain(state / "ledger", "ledger", lines)
    write_chain(state, "log", [{"n": 1, "time": TIME, "what": "started", "detail": ""}])
    (state / "format.json").write_text('{"version": 2, "chained": true}')
    (state / "life.json").write_text('{"begun": 9, "ended": 7}')
    (state / "refusals.json").write_text('{"day": "2026-01-01", "count": 3}')
    (state / "runs.jsonl").write_text("".join(json.dumps({"time": 100.0, "run": run}) + "\n" for run in RUNS))
    for run, whats in zip(RUNS, (["asked", "ended", "asked"], ["asked", "ended"]), strict=True):
        (state / "runs" / run).mkdir(parents=True)
        (state / "runs" / run / "spec.json").write_text("spec")
        asked = "".join(json.dumps({"time": 101.0, "what": what}) + "\n" for what in whats)
        (state / "runs" / run / "questions.jsonl").write_text(asked)
    return state


def test_every_charge_and_count_is_taken_over(state: Path) -> None:
    charges = read_charges(state)
    assert [charge.entry for charge in charges] == old_charges()
    assert [(charge.number, charge.run) for charge in charges] == [(1, RUNS[0]), (2, RUNS[1]), (3, RUNS[0])]
    assert charges[1].entry.records == RECORDS and charges[1].time == TIME
    at = SiteJournal(state).standing().at
    assert (at.accepted, at.ended, at.failed, at.charges) == (9, 7, 2, 3)
    assert [(at.runs[run].accepted, at.runs[run].failed) for run in RUNS] == [(2, 1), (1, 0)]
    assert len(open_site_ledger(state, RUNS[0], Limits(1e-5, 5.0, public_images=True)).entries) == 2
    assert log.verify(state).is_whole
    aside = state / state_format.ASIDE
    kept = {str(place.relative_to(aside)) for place in aside.rglob("*") if place.is_file()}
    assert {*log.read(state)[0]["files"]} == kept and "ledger/ledger.jsonl" in kept
    assert not (state / "life.json").exists() and (state / "runs" / RUNS[0] / "spec.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_site_is_taken_over_by_its_owner_alone(state: Path) -> None:
    """Else an administrator's `status` would leave files that the service can't read."""
    os.chown(state, 1234, 1234)
    before = sorted(state.rglob("*"))
    with pytest.raises(ValueError, match="belongs to .*; run it as its owner: sudo -u"):
        read_charges(state)
    assert sorted(state.rglob("*")) == before


def test_its_budget_goes_on(state: Path) -> None:
    big = entry(Gaussian(noise_multiplier=3.0), index=5)
    limits = Limits(1e-5, 1.5, public_images=True)
    with pytest.raises(BudgetExceeded):
        open_site_ledger(state, "new", limits).charge(big)
    assert len(read_charges(state)) == 3
    site_journal.create(state.parent / "new")
    open_site_ledger(state.parent / "new", "new", limits).charge(big)  # fits a budget of which nothing was spent


@pytest.mark.parametrize("what", ["ledger/ledger.jsonl", "ledger/ledger.head", "log.jsonl", "life.json"])
def test_a_damaged_site_is_taken_over_by_nobody(what: str, state: Path) -> None:
    place = state / what
    place.write_bytes(place.read_bytes()[:-9])
    for _ in range(2):
        with pytest.raises(files.Damaged):
            SiteJournal(state).standing()
        assert json.loads((state / "format.json").read_text())["version"] == 2


def log_charges(state: Path) -> bytes:
    """Give the log the lines of the charges, as it had them; returns the server's receipt of the newest line."""
    old, ledger = Chain(state, "log", ""), Chain(state / "ledger", "ledger", "").read()
    old.synchronise()
    for line in ledger:
        facts = {"ledger": line.number, "ledger_mac": line.mac.hex(), "run": RUNS[0]}
        mac = old.append({"n": line.number + 1, "time": TIME, "what": "charged", **facts, "detail": ""}).hex()
    text = f"receipt {old.count} {mac}".encode()
    return f"{old.count}.{mac}.{hmac.digest((state / 'log.key').read_bytes(), text, 'sha256').hex()}".encode()


def test_a_ledger_that_lacks_a_charge_of_the_log_is_taken_over_by_nobody(state: Path, tmp_path: Path) -> None:
    log_charges(state)
    (state / "ledger").rename(tmp_path / "newest")
    with pytest.raises(files.Damaged, match="ledger lacks charge 1, which the log has"):
        read_charges(state)
    write_chain(state / "ledger", "ledger", [json.loads(line.text) for line in _lines(tmp_path / "newest")[:2]])
    with pytest.raises(files.Damaged, match="has another charge 1 than the log"):
        read_charges(state)
    shutil.rmtree(state / "ledger")
    for place in state.glob("log.*"):
        place.unlink()
    with pytest.raises(files.Damaged, match=r"log\.key can't be read"):
        read_charges(state)


def _lines(folder: Path) -> list[Line]:
    return Chain(folder, "ledger", "").read()


def test_an_older_copy_is_found_out_after_it_was_taken_over(state: Path, tmp_path: Path) -> None:
    """A backup that is put back with a newer fedstill: the server's receipt is of the log."""
    older = shutil.copytree(state, tmp_path / "older")
    given = log_charges(state)
    site_journal.check_receipt(state, given.decode())
    assert log.verify(state).is_whole
    with pytest.raises(files.Damaged, match="is an older copy: its journal lacks line 4"):
        site_journal.check_receipt(older, given.decode())
    assert not log.verify(older).is_whole


@pytest.mark.parametrize("lost", ["", "log.key", "log.jsonl"])
def test_without_the_files_from_before_no_receipt_of_theirs_is_passed_over(
    lost: str, state: Path, tmp_path: Path
) -> None:
    """They were tidied up, or changed: an older copy replied to a server with a receipt of before."""
    given = log_charges(shutil.copytree(state, tmp_path / "newer")).decode()
    read_charges(state)
    site_journal.check_receipt(state, "")
    aside = state / state_format.ASIDE
    if not lost:
        shutil.rmtree(aside)
    elif lost == "log.key":
        (aside / lost).unlink()
    else:
        (aside / lost).write_bytes(b"")
    site_journal.check_receipt(state, site_journal.receipt(state))
    with pytest.raises(files.Damaged, match="before-journal|is an older copy"):
        site_journal.check_receipt(state, given)
    assert not log.verify(state).is_whole


def test_an_older_copy_that_was_found_out_is_taken_over_by_nobody(state: Path, tmp_path: Path) -> None:
    older = shutil.copytree(state, tmp_path / "older")
    given = log_charges(state)
    for place in (older, state):
        (place / site_journal.NEWEST).write_bytes(given)
    with pytest.raises(files.Damaged, match="is an older copy"):
        read_charges(older)
    assert (older / "ledger" / "ledger.jsonl").exists()
    assert len(read_charges(state)) == len(_lines(state / "before-journal" / "ledger"))  # it has the line


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_crash_at_any_moment_loses_nothing(moment: int, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def kill(place: Path, aside: Path) -> None:
        replace(place, aside)
        calls.append(1)
        if len(calls) == moment:
            raise KeyboardInterrupt

    replace = state_format.os.replace
    with monkeypatch.context() as patch:
        patch.setattr(state_format.os, "replace", kill)  # of heads, the format, files put aside
        with pytest.raises(KeyboardInterrupt):
            read_charges(state)
    assert [charge.entry for charge in read_charges(state)] == old_charges()
    assert SiteJournal(state).standing().at.failed == 2


def test_a_state_without_a_ledger_of_a_helper_is_taken_over(tmp_path: Path) -> None:
    state = tmp_path / "state"
    write_chain(state, "log", [{"n": 1, "time": TIME, "what": "started", "detail": ""}])
    (state / "format.json").write_text('{"version": 2, "chained": true}')
    assert read_charges(state) == []
    assert site_journal.append(state, {"time": TIME, "what": "started", "detail": ""}) == 2

"""A site's journal and log: nothing of it can be changed, cut or moved unseen, and its check tells what is wrong."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from releases import entry

from fedstill.base import files
from fedstill.base.files import NewerFormat
from fedstill.sites.site import chain, log, site_journal, state_format
from fedstill.sites.site.chain import Chain
from fedstill.sites.site.charges import Limits, open_site_ledger, read_charges
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import append

PARTS = ("journal.key", "journal.jsonl", "journal.head")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    site_journal.create(tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def sample(state: Path) -> Path:
    for number in range(3):
        append(state, {"time": "t", "what": "asked", "request": f"{number}", "detail": "é"})
    return state


def numbers(state: Path) -> list[int]:
    return [line["n"] for line in log.read(state)]


def test_lines_have_numbers(state: Path) -> None:
    assert log.read(state) == []
    append(state, {"what": "asked", "detail": ""})
    append(state, {"what": "paused", "detail": "a reason"})
    assert [(line["n"], line["what"]) for line in log.read(state)] == [(1, "asked"), (2, "paused")]
    assert {place.stat().st_mode & 0o777 for place in map(state.joinpath, PARTS)} <= {0o600, 0o644}
    assert (state / "journal.key").stat().st_mode & 0o777 == 0o600


def test_a_head_alone_is_no_empty_log(sample: Path) -> None:
    """Somebody who deletes the lines, the key and the format leaves what says that there were some."""
    for name in ("journal.key", "journal.jsonl", "format.json"):
        (sample / name).unlink()
    with pytest.raises(files.Damaged, match="the site replies to nothing until"):
        log.read(sample)


def test_every_changed_byte_is_noticed(sample: Path) -> None:
    whole = {name: (sample / name).read_bytes() for name in PARTS}
    for name, data in whole.items():
        for i in range(0, len(data), 3):
            changed = (data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :], data[:i] + data[i + 1 :])[i % 2]
            (sample / name).write_bytes(changed)
            with pytest.raises(files.Damaged, match="is damaged: .*; the site replies to nothing until"):
                log.read(sample)
        (sample / name).write_bytes(data)
    assert numbers(sample) == [1, 2, 3]


@pytest.mark.parametrize("text", [b"[" * 100_000, b"null", b"[]", b"{}", b""])
@pytest.mark.parametrize("name", ["journal.head", "format.json"])
def test_a_file_of_another_shape_is_a_sentence(name: str, text: bytes, sample: Path) -> None:
    (sample / name).write_bytes(text)
    for use in (
        lambda: append(sample, {"what": "asked", "detail": ""}),
        lambda: read_charges(sample),
        lambda: open_site_ledger(sample, "run", Limits(1e-5, 1.0)).charge(entry()),
    ):
        with pytest.raises(files.Damaged):
            use()
    assert not log.verify(sample).is_whole


def test_lines_that_lack_or_move_or_come_twice_are_noticed(sample: Path) -> None:
    a, b, c = (sample / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for lines in ([a, b], [a], [], [b, c], [a, c], [b, a, c], [a, b, c, c], [a, b, c, b"{}\n"]):
        (sample / "journal.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(files.Damaged):
            log.read(sample)
    (sample / "journal.jsonl").write_bytes(a + b + c[:20])
    with pytest.raises(files.Damaged):
        log.read(sample)


@pytest.mark.parametrize("missing", [some for n in (1, 2, 3) for some in combinations(PARTS, n)], ids="+".join)
def test_a_file_that_lacks_is_noticed_and_stops_the_log(missing: tuple[str, ...], sample: Path) -> None:
    for name in missing:
        (sample / name).unlink()
    with pytest.raises(files.Damaged, match="make the site anew .fedstill site init. with the budget that is left"):
        log.read(sample)
    with pytest.raises(files.Damaged, match="make the site anew .fedstill site init. with the budget that is left"):
        append(sample, {"what": "asked", "detail": ""})
    with pytest.raises(ValueError, match="would forget what was released"):
        site_journal.create(sample)


def test_a_line_is_appended_only_to_an_end_that_fits(sample: Path) -> None:
    data = (sample / "journal.jsonl").read_bytes()
    cut = data[: data.rstrip().rfind(b"\n") + 1]
    for changed in (cut, data[:-3] + b"0}\n", data + b'{"what":"asked"}\n', data + data):
        (sample / "journal.jsonl").write_bytes(changed)
        with pytest.raises(files.Damaged):
            append(sample, {"what": "asked", "detail": ""})


@pytest.mark.parametrize("torn", [b"{", b'{"n":4,"what":"as', b"\0" * 500])
def test_half_a_line_gives_way_to_the_next(torn: bytes, sample: Path) -> None:
    with (sample / "journal.jsonl").open("ab") as file:
        file.write(torn)
    assert numbers(sample) == [1, 2, 3]
    append(sample, {"what": "asked", "detail": ""})
    assert numbers(sample) == [1, 2, 3, 4]


def test_a_crash_between_line_and_head_counts(sample: Path) -> None:
    head = (sample / "journal.head").read_bytes()
    append(sample, {"what": "asked", "detail": "four"})
    for go_on in (lambda: append(sample, {"what": "asked", "detail": "five"}), lambda: log.read(sample)):
        (sample / "journal.head").write_bytes(head)
        go_on()
        assert numbers(sample)[:4] == [1, 2, 3, 4]
        with (sample / "journal.jsonl").open("r+b") as file:
            file.truncate(sum(map(len, file.read().splitlines(keepends=True)[:4])) or file.seek(0))
        data = (sample / "journal.jsonl").read_bytes().splitlines(keepends=True)[:4]
        (sample / "journal.jsonl").write_bytes(b"".join(data))


def crashes(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Stop the beginning of a file after each of its writes."""
    for name in ("replace", "_begin_file", "_write_head", "append"):
        append(state, {"what": "asked", "detail": "x" * 400})  # the next one begins a file
        with monkeypatch.context() as patch:

            def stop(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(*((chain.os, name, stop) if name == "replace" else (Chain, name, stop)))
            with pytest.raises(KeyboardInterrupt):
                append(state, {"what": "asked", "detail": "lost"})
        yield name


def test_a_large_journal_goes_on_in_another_file_whatever_stops_it(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_journal, "LARGEST", 400)
    for _ in range(5):
        append(state, {"what": "asked", "detail": "x" * 100})
    assert len(list(state.glob("journal-*.jsonl"))) >= 2
    asked = 5
    for _ in crashes(state, monkeypatch):
        asked += 1
        with monkeypatch.context() as auditor:  # whose copy was made meanwhile, and can't be repaired
            auditor.setattr(Chain, "_may_write", lambda _: False)
            there = {place.name: place.read_bytes() for place in state.iterdir()}
            assert len(log.read(state)) == asked and log.verify(state).is_whole
            assert {place.name: place.read_bytes() for place in state.iterdir()} == there
        assert len(log.read(state)) == asked == len(site_journal.SiteJournal(state).standing().at.asked)
        assert log.verify(state).is_whole
    append(state, {"what": "asked", "detail": ""})
    assert len(log.read(state)) == asked + 1 and log.verify(state).is_whole
    kept = sorted(state.glob("journal-*.jsonl"))
    for place in kept:
        data = place.read_bytes()
        for changed in (data.replace(b"x", b"y", 1), data[: data.find(b"\n") + 1], b""):
            if changed != data:
                place.write_bytes(changed)
                assert not log.verify(state).is_whole
        place.unlink()
        with pytest.raises(files.Damaged):
            log.read(state)
        place.write_bytes(data)
    kept[0].rename(state / "journal-000000099.jsonl")
    with pytest.raises(files.Damaged):
        log.read(state)


def test_files_of_a_newer_version_are_refused_in_one_sentence(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = sample / state_format.FORMAT
    whole = place.read_bytes()
    place.write_text(json.dumps({"version": state_format.VERSION + 1}))
    with pytest.raises(NewerFormat, match="install the newer fedstill that wrote it"):
        append(sample, {"what": "asked", "detail": ""})
    place.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(chain, "VERSION", 3)
        (sample / "journal.head").write_bytes(chain.ChainEnd().encode((sample / "journal.key").read_bytes()))
    for read in (lambda: log.read(sample), lambda: read_charges(sample)):
        with pytest.raises(NewerFormat, match="has the format 3; this fedstill reads formats up to 2, so install"):
            read()


WRITE = """
import sys
from pathlib import Path
from fedstill.sites.site import site_journal
for number in range(20):
    site_journal.append(Path(sys.argv[1]), {"what": "asked", "detail": sys.argv[2]})
"""


@pytest.mark.slow
def test_processes_that_write_at_once_make_one_chain(state: Path) -> None:
    words = [sys.executable, "-c", WRITE, str(state)]
    crowd = [subprocess.Popen([*words, name]) for name in "ab"]
    assert [process.wait() for process in crowd] == [0, 0]
    assert numbers(state) == [*range(1, 41)]


# ------------------------------------------------------------------------------------------------ what its check tells

REAL: dict[str, Any] = {"run": "run", "method": "m", "step": "s", "exchange": 0, "simulated_noise": False}
TIME = "2026-01-01T00:00:00+00:00"


class Play:
    """A site's journal, written as its processes do, which may stop after any line."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def ask(self, request: str, upto: str = "answered", reply: str | None = None, **facts: Any) -> None:
        facts = {"time": TIME, **REAL, "request": request, "detail": "", **facts}
        facts["question"] = append(self.state, {"what": "asked", **facts})
        if upto == "asked":
            return
        append(self.state, {"what": "accepted", **facts, "at": 0.0})
        charges: list[int] = []
        if upto != "again":
            charges = [len(read_charges(self.state)) + 1]
            open_site_ledger(self.state, "run", Limits(1e-5, 9.0), lambda *_: facts).charge(entry())
        if upto in ("answered", "again"):
            answer = {"what": "answered", "reply": reply or request, "fields": {"f": "released"}, "charges": charges}
            append(self.state, {**facts, **answer})

    def problems(self) -> list[str]:
        return log.verify(self.state).problems


@pytest.fixture
def play(state: Path) -> Play:
    return Play(state)


def test_what_killed_processes_leave_is_no_problem(play: Play) -> None:
    play.ask("a")
    play.ask("a", "again")  # the same reply once more
    for upto in ("asked", "charged"):
        play.ask("b", upto)
    play.ask("c", "charged")
    question = log.read(play.state)[-1]["question"]
    append(play.state, {"time": TIME, "what": "failed", "question": question, "detail": ""})  # of who survived
    found = log.verify(play.state)
    assert found.problems == []
    assert found.counts == {"releases": 2, "lines": 15, "questions": 5, "answers": 2, "charges": 3}
    assert len([note for note in found.notes if "has no outcome" in note]) == 2
    assert [line["request"] for line in log.unfinished(log.read(play.state))] == ["b", "b"]
    at = site_journal.SiteJournal(play.state).standing().at
    assert (at.accepted, at.ended, at.charges) == (4, 2, 3)


def test_a_release_that_left_twice_is_found(play: Play, tmp_path: Path) -> None:
    play.ask("a", reply="x")
    play.ask("a", reply="y")
    assert play.problems() == ["the question of entries 4 and 8 got two releases"]
    site_journal.create(tmp_path / "simulated")
    simulated = Play(tmp_path / "simulated")
    for reply in "xy":
        simulated.ask("a", reply=reply, simulated_noise=True)
    assert simulated.problems() == []


def test_a_release_without_a_charge_is_found(play: Play) -> None:
    play.ask("a", "again")
    assert play.problems() == ["the release of entry 3 was not charged"]


def test_a_charge_that_pays_twice_or_for_another_run_is_found(play: Play) -> None:
    play.ask("a")
    line = {name: value for name, value in log.read(play.state)[-1].items() if name != "n"}
    append(play.state, {**line, "request": "b", "reply": "b"})
    assert {problem.split(" (")[0] for problem in play.problems()} == {
        "the release of entry 5 was not charged", "charge 1 paid for two releases",
    }  # fmt: skip
    append(play.state, {**line, "run": "other", "request": "c", "reply": "c", "charges": [1, 7]})
    assert "entry 6 names charge 7, which is not one of its run" in play.problems()


def test_the_writer_of_the_log_needs_a_policy_s_state_only(state: Path) -> None:
    policy = SitePolicy(client=0, data=state, state=state, methods=("fedavg",))
    log.write(policy, {"request": "a"}, "failed", ValueError("no"))
    (line,) = log.read(state)
    assert line["detail"] == "ValueError: no"


def test_runs_of_one_seed_that_send_the_same_requests_are_told_apart(play: Play) -> None:
    """Run A is killed after its charge; then B, whose request is the same, takes too long."""
    play.ask("r", "charged", spec="a", process=1)
    play.ask("r", "asked", spec="b", process=2)
    question = log.read(play.state)[-1]["n"]
    append(play.state, {"time": TIME, "what": "failed", "request": "r", "question": question, "detail": "too long"})
    verdict = log.verify(play.state)
    assert verdict.is_whole, verdict.problems
    assert [line["spec"] for line in log.unfinished(log.read(play.state))] == ["a"]


# ------------------------------------------------------------------------------ lines that a writer with the key forges


def forged(state: Path, **facts: Any) -> list[str]:
    """The problems after one more line."""
    writer = Chain(state, "journal", "")
    writer.synchronise()
    writer.append({"n": writer.count + 1, "time": TIME, "detail": "", **facts})
    return log.verify(state).problems


def test_a_checkpoint_that_says_something_else_than_the_lines_before_it_is_found(play: Play) -> None:
    play.ask("a")
    at = site_journal.SiteJournal(play.state).standing().checkpoint(0.0).model_dump(mode="json")
    for name, value in {"charges": 0, "ended": 0, "past": {**at["past"], "records": []}}.items():
        copy = shutil.copytree(play.state, play.state.parent / name)
        (problem,) = forged(copy, what="checkpoint", at={**at, name: value})
        assert problem == "entry 5 of the journal is wrong: the checkpoint says something else than the lines before it"
    assert forged(play.state, what="checkpoint", at=at) == []


def test_a_charge_with_another_number_stops_the_site(play: Play) -> None:
    play.ask("a")
    line = {name: value for name, value in log.read(play.state)[-2].items() if name not in ("n", "time", "detail")}
    (problem,) = forged(play.state, **line)
    assert problem == "entry 5 of the journal is wrong: charge 1 is where charge 2 belongs"
    with pytest.raises(files.Damaged, match="charge 1 is where charge 2 belongs"):
        open_site_ledger(play.state, "run", Limits(1e-5, 9.0))

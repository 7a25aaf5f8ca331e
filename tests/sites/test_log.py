"""A site's log: nothing of it can be changed, cut or moved unseen; files of fedstill 0.1 are read on."""

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
from fedstill.sites.site import chain, log
from fedstill.sites.site.chain import Chain
from fedstill.sites.site.charges import Limits, create_ledger, open_site_ledger, read_charges
from fedstill.sites.site.policy import SitePolicy

PARTS = ("log.key", "log.jsonl", "log.head")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def sample(state: Path) -> Path:
    for number in range(3):
        log.append(state, {"time": "t", "what": "asked", "request": f"{number}", "detail": "é"})
    return state


def numbers(state: Path) -> list[int]:
    return [line["n"] for line in log.read(state)]


def test_it_begins_by_itself_and_goes_on(state: Path) -> None:
    assert log.read(state) == []
    log.append(state, {"what": "asked", "detail": ""})
    log.append(state, {"what": "failed", "detail": "a reason"})
    assert [(line["n"], line["what"]) for line in log.read(state)] == [(1, "asked"), (2, "failed")]
    assert {place.stat().st_mode & 0o777 for place in map(state.joinpath, PARTS)} <= {0o600, 0o644}
    assert (state / "log.key").stat().st_mode & 0o777 == 0o600


def test_a_head_alone_is_no_empty_log(sample: Path) -> None:
    """Somebody who deletes the lines, the key and the format leaves what says that there were some."""
    for name in ("log.key", "log.jsonl", "format.json"):
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
@pytest.mark.parametrize("name", ["log.head", "format.json", "ledger/ledger.head"])
def test_a_file_of_another_shape_is_a_sentence(name: str, text: bytes, sample: Path) -> None:
    create_ledger(sample / "ledger")
    (sample / name).write_bytes(text)
    if name == "ledger/ledger.head":
        with pytest.raises(files.Damaged):
            read_charges(sample / "ledger")
        with pytest.raises(files.Damaged):
            open_site_ledger(sample / "ledger", "run", Limits(1e-5, 1.0)).charge(entry())
    else:
        with pytest.raises(files.Damaged):
            log.append(sample, {"what": "asked", "detail": ""})
    assert not log.verify(sample).is_whole


def test_lines_that_lack_or_move_or_come_twice_are_noticed(sample: Path) -> None:
    a, b, c = (sample / "log.jsonl").read_bytes().splitlines(keepends=True)
    for lines in ([a, b], [a], [], [b, c], [a, c], [b, a, c], [a, b, c, c], [a, b, c, b"{}\n"]):
        (sample / "log.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(files.Damaged):
            log.read(sample)
    (sample / "log.jsonl").write_bytes(a + b + c[:20])
    with pytest.raises(files.Damaged):
        log.read(sample)


@pytest.mark.parametrize("missing", [some for n in (1, 2, 3) for some in combinations(PARTS, n)], ids="+".join)
def test_a_file_that_lacks_is_noticed_and_stops_the_log(missing: tuple[str, ...], sample: Path) -> None:
    for name in missing:
        (sample / name).unlink()
    with pytest.raises(files.Damaged, match="site log FOLDER --restart"):
        log.read(sample)
    with pytest.raises(files.Damaged, match="site log FOLDER --restart"):
        log.append(sample, {"what": "asked", "detail": ""})
    log.restart(sample)
    log.append(sample, {"what": "asked", "detail": ""})
    assert [line["what"] for line in log.read(sample)] == ["begun", "asked"]


def test_a_line_is_appended_only_to_an_end_that_fits(sample: Path) -> None:
    data = (sample / "log.jsonl").read_bytes()
    cut = data[: data.rstrip().rfind(b"\n") + 1]
    for changed in (cut, data[:-3] + b"0}\n", data + b'{"what":"asked"}\n', data + data):
        (sample / "log.jsonl").write_bytes(changed)
        with pytest.raises(files.Damaged):
            log.append(sample, {"what": "asked", "detail": ""})


@pytest.mark.parametrize("torn", [b"{", b'{"n":4,"what":"as', b"\0" * 500])
def test_half_a_line_gives_way_to_the_next(torn: bytes, sample: Path) -> None:
    with (sample / "log.jsonl").open("ab") as file:
        file.write(torn)
    assert numbers(sample) == [1, 2, 3]
    log.append(sample, {"what": "asked", "detail": ""})
    assert numbers(sample) == [1, 2, 3, 4]


def test_a_crash_between_line_and_head_counts(sample: Path) -> None:
    head = (sample / "log.head").read_bytes()
    log.append(sample, {"what": "asked", "detail": "four"})
    for go_on in (lambda: log.append(sample, {"what": "asked", "detail": "five"}), lambda: log.read(sample)):
        (sample / "log.head").write_bytes(head)
        go_on()
        assert numbers(sample)[:4] == [1, 2, 3, 4]
        with (sample / "log.jsonl").open("r+b") as file:
            file.truncate(sum(map(len, file.read().splitlines(keepends=True)[:4])) or file.seek(0))
        data = (sample / "log.jsonl").read_bytes().splitlines(keepends=True)[:4]
        (sample / "log.jsonl").write_bytes(b"".join(data))


def crashes(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Stop a rotation after each of its writes."""
    for name in ("replace", "_begin_file", "_write_head"):
        log.append(state, {"what": "asked", "detail": "x" * 400})  # the next one begins a file
        with monkeypatch.context() as patch:

            def stop(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(*((chain.os, name, stop) if name == "replace" else (Chain, name, stop)))
            with pytest.raises(KeyboardInterrupt):
                log.append(state, {"what": "asked", "detail": "lost"})
        yield name


def test_a_large_log_goes_on_in_another_file_whatever_stops_it(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_LARGEST", 400)
    for _ in range(5):
        log.append(state, {"what": "asked", "detail": "x" * 100})
    assert len(list(state.glob("log-*.jsonl"))) == 2
    for count, _ in enumerate(crashes(state, monkeypatch), start=6):
        assert numbers(state) == [*range(1, count + 1)]
    before = numbers(state)
    log.append(state, {"what": "asked", "detail": ""})
    assert numbers(state) == [*before, before[-1] + 1]
    kept = sorted(state.glob("log-*.jsonl"))
    for place in kept:
        data = place.read_bytes()
        for changed in (data.replace(b"x", b"y", 1), data[: data.find(b"\n") + 1], b""):
            if changed != data:
                place.write_bytes(changed)
                with pytest.raises(files.Damaged):
                    log.read(state)
        place.unlink()
        with pytest.raises(files.Damaged):
            log.read(state)
        place.write_bytes(data)
    kept[0].rename(state / "log-000000009.jsonl")
    with pytest.raises(files.Damaged):
        log.read(state)


def test_a_damaged_log_is_put_aside_and_the_new_one_says_so(sample: Path) -> None:
    (sample / "log.jsonl").write_bytes(b"")
    aside = log.restart(sample)
    assert {place.name for place in aside.iterdir()} == {*PARTS}
    (line,) = log.read(sample)
    assert line["what"] == "begun" and set(line["damaged"]) == {*PARTS}
    log.append(sample, {"what": "asked", "detail": ""})
    assert numbers(sample) == [1, 2]


def test_files_of_a_newer_version_are_refused_in_one_sentence(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = sample / log.FORMAT
    place.write_text(json.dumps({"version": log.VERSION + 1}))
    with pytest.raises(NewerFormat, match="install the newer fedstill that wrote it"):
        log.append(sample, {"what": "asked", "detail": ""})
    place.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(chain, "VERSION", 3)
        create_ledger(sample / "ledger")
        log.append(sample, {"what": "asked", "detail": ""})
        open_site_ledger(sample / "ledger", "run", Limits(1e-5, None, allow_unbounded=True)).charge(entry())
    for read in (lambda: log.read(sample), lambda: read_charges(sample / "ledger")):
        with pytest.raises(NewerFormat, match="has the format 3; this fedstill reads formats up to 2, so install"):
            read()


WRITE = """
import sys
from pathlib import Path
from fedstill.sites.site import log
for number in range(20):
    log.append(Path(sys.argv[1]), {"what": "asked", "detail": sys.argv[2]})
"""


@pytest.mark.slow
def test_processes_that_write_at_once_make_one_chain(state: Path) -> None:
    words = [sys.executable, "-c", WRITE, str(state)]
    crowd = [subprocess.Popen([*words, name]) for name in "ab"]
    assert [process.wait() for process in crowd] == [0, 0]
    assert numbers(state) == [*range(1, 41)]


# --------------------------------------------------------------------------------------------- the log and the ledger

REAL: dict[str, Any] = {"run": "run", "method": "m", "step": "s", "exchange": 0, "simulated_noise": False}


class Play:
    """A site's log and ledger, written as its processes do, which may stop after any line."""

    def __init__(self, state: Path) -> None:
        self.state = state
        create_ledger(state / "ledger")

    def ask(self, request: str, upto: str = "answered", reply: str | None = None, **facts: Any) -> None:
        facts = {**REAL, "request": request, **facts}
        charges: list[int] = []

        def charged(charge: Any, _: object) -> None:
            charges.append(charge.number)
            if upto != "ledger":
                log.append(self.state, {**facts, "what": "charged", "ledger": charge.number, "ledger_mac": charge.mac})

        log.append(self.state, {**facts, "what": "asked"})
        if upto == "asked":
            return
        if upto != "again":
            open_site_ledger(self.state / "ledger", "run", Limits(1e-5, 9.0), charged=charged).charge(entry())
        if upto in ("answered", "again"):
            answer = {"what": "answered", "reply": reply or request, "fields": {"f": "released"}, "charges": charges}
            log.append(self.state, {**facts, **answer})

    def problems(self) -> list[str]:
        return log.verify(self.state).problems


@pytest.fixture
def play(state: Path) -> Play:
    return Play(state)


def test_what_killed_processes_leave_is_no_problem(play: Play) -> None:
    play.ask("a")
    play.ask("a", "again")  # the same reply once more
    for upto in ("asked", "ledger", "charged"):
        play.ask("b", upto)
    play.ask("c", "ledger")
    log.append(play.state, {"what": "failed", "request": "c"})  # the line of the process that survived
    found = log.verify(play.state)
    assert found.problems == []
    assert found.counts == {"releases": 2, "lines": 11, "questions": 6, "answers": 2, "charges": 4}
    assert len([note for note in found.notes if "in the ledger and not in the log" in note]) == 2
    assert len([note for note in found.notes if "has no outcome" in note]) == 3


def test_a_release_that_left_twice_is_found(play: Play) -> None:
    play.ask("a", reply="x")
    play.ask("a", reply="y")
    assert play.problems() == ["the question of entries 3 and 6 got two releases"]
    simulated = Play(play.state.parent / "simulated")
    for reply in "xy":
        simulated.ask("a", reply=reply, simulated_noise=True)
    assert simulated.problems() == []


def test_a_release_without_a_charge_is_found(play: Play) -> None:
    play.ask("a", "again")
    assert play.problems() == ["the release of entry 2 was not charged"]


def test_a_charge_that_pays_twice_is_found(play: Play) -> None:
    play.ask("a")
    line = log.read(play.state)[-1]
    del line["n"]
    log.append(play.state, {**line, "what": "charged", "request": "b", "ledger": 1, "ledger_mac": "00"})
    log.append(play.state, {**line, "request": "b", "reply": "b"})
    assert {problem.split(" (")[0] for problem in play.problems()} == {
        "charge 1", "charge 1 paid for two releases",
    }  # fmt: skip


def test_an_older_copy_of_the_ledger_is_found(play: Play) -> None:
    """Nothing in the ledger itself can tell."""
    play.ask("a")
    copy = play.state.parent / "copy"
    shutil.copytree(play.state / "ledger", copy)
    play.ask("b")
    shutil.rmtree(play.state / "ledger")
    shutil.copytree(copy, play.state / "ledger")
    assert play.problems() == ["charge 2 (entry 5 of the log) is lost: the ledger lacks it"]
    open_site_ledger(play.state / "ledger", "run", Limits(1e-5, 9.0)).charge(entry(index=1))
    problems = play.problems()
    assert "charge 2 (entry 5 of the log) is another one in the ledger" in problems


def test_a_charge_without_a_question_is_found(play: Play) -> None:
    play.ask("a")
    open_site_ledger(play.state / "ledger", "run", Limits(1e-5, 9.0)).charge(entry())
    (problem,) = play.problems()
    assert problem.endswith("is in the ledger and not in the log, and no question of the run was interrupted")


def test_the_writer_of_the_log_needs_a_policy_s_state_only(state: Path) -> None:
    policy = SitePolicy(client=0, data=state, state=state, methods=("fedavg",))
    log.write(policy, {"request": "a"}, "failed", ValueError("no"))
    (line,) = log.read(state)
    assert line["detail"] == "ValueError: no"


def test_runs_of_one_seed_that_send_the_same_requests_are_told_apart(tmp_path: Path) -> None:
    """Run A is killed between the ledger's and the log's line; then B, whose request is the same, takes too long."""
    state = tmp_path / "state"
    create_ledger(log.ledger_of(state))
    asked = {"time": "t", "what": "asked", "request": "r", "process": 1, "detail": ""}
    log.append(state, {**asked, "run": "aaaaaaaa", "spec": "a"})
    open_site_ledger(log.ledger_of(state), "aaaaaaaa", Limits(1e-5, 2.0)).charge(entry())
    log.append(state, {**asked, "run": "bbbbbbbb", "spec": "b"})
    log.append(state, {"time": "t", "what": "failed", "request": "r", "spec": "b", "detail": "no reply within 1 s"})
    verdict = log.verify(state)
    assert verdict.is_whole, verdict.problems
    assert [line["spec"] for line in log.unfinished(log.read(state))] == ["a"]
    log.append(state, {**asked, "run": "cccccccc", "spec": "c"})
    open_site_ledger(log.ledger_of(state), "dddddddd", Limits(1e-5, 2.0)).charge(entry())
    assert not log.verify(state).is_whole  # no question of that run was interrupted

"""What a run says when nobody watches a terminal, and through logging."""

import io
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedstill.cli import main
from fedstill.engines.transport import Watcher
from fedstill.experiment import progress
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.progress import Bars, Lines, watch
from fedstill.experiment.run import run
from fedstill.methods import find
from fedstill.runs.journal import Refusal

QUICK = "--data digits --clients 2 --limit 100 --model convnet:width=8,depth=2 --workers 0".split()
TIME = r"\d+:\d\d"


def job(out: Path, **settings: Any) -> Job:
    task = Experiment(data="digits", clients=2, limit=100, model="convnet:width=8,depth=2", workers=0)
    return Job(task, find("fedavg")(**settings), out)


def test_a_log_has_a_line_for_each_round_and_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *QUICK, "--rounds", "3", "--out", str(tmp_path / "run")]
    main(words)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fedavg, seed 0: ")]
    for line, pattern in zip(
        said,
        [
            "train: 1,438 records, as given",
            "test: 359 records, a fifth of each class, held out of the train records",
            r"100 of the train records are used, drawn at random \(--limit\)",
            "step update: asking 2 clients",
            f"step update, 2 of 2 clients replied; {TIME} elapsed",
            rf"round 1 of 3; accuracy \d+\.\d %; {TIME} elapsed; about {TIME} left",
            rf"round 2 of 3; accuracy \d+\.\d %; {TIME} elapsed; about {TIME} left",
            rf"round 3 of 3; accuracy \d+\.\d %; {TIME} elapsed",
            r"accuracy \d+\.\d %, \d+ s",
        ],
        strict=True,
    ):
        assert re.fullmatch("fedavg, seed 0: " + pattern, line), line
    main(words)
    again = capsys.readouterr().out
    assert re.search(r"fedavg, seed 0: finished on \d{4}-\d\d-\d\d at \d\d:\d\d; nothing to do", again)
    assert " s\n" not in again.split("report:")[0].replace("seconds", "")
    main([*words, "--quiet"])
    assert "nothing to do" not in capsys.readouterr().out


def test_a_long_step_of_one_client_says_every_while_that_it_is_at_work() -> None:
    said: list[str] = []

    def wait_for(text: str, number: int) -> None:
        until = time.monotonic() + 20
        while sum(text in line for line in said) < number:
            assert time.monotonic() < until, said
            time.sleep(0.01)

    with Lines(said.append, "x", every=0.02) as watcher:
        wait_for("x: working; 0:0", 1)  # before the first event
        watcher.asked("distil", 1, 0, 0)
        wait_for("x: step distil, 0 of 1 clients replied; 0:", 2)
        watcher.arrived(None)
    number = len(said)
    assert any("x: step distil, 1 of 1 clients replied; 0:" in line for line in said)
    time.sleep(0.1)
    assert len(said) == number  # nothing after the end
    assert progress.EVERY <= 30


def test_time_left_follows_the_pace_of_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = 1000.0
    monkeypatch.setattr("fedstill.experiment.progress.time.monotonic", lambda: now)
    watcher = Lines(said.append, "x")
    watcher.resumed(done=7, total=10)
    watcher.asked("update", 10, 2, 0)
    now += 60
    watcher.logged(8, 10, {"accuracy": 0.5, "loss": 2.0})
    now += 3600
    watcher.progressed("training", 1, 100)
    watcher.logged(9, 10, {})
    watcher.noted("look out")
    watcher.arrived(Refusal(3, "update", 1, "too late"))
    assert said == [
        "x: resuming: 2 of 10 replies and 7 rounds kept",
        "x: step update: asking 10 clients",
        "x: round 8 of 10; accuracy 50.0 %, loss 2; 1:00 elapsed; about 2:00 left",
        "x: training: 1 of 100",
        "x: round 9 of 10; 1:01:00 elapsed; about 30:30 left",
        "x: look out",
        "x: client 3 is left out: too late",
    ]


def test_time_left_leaves_out_the_first_part_and_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = 1000.0
    monkeypatch.setattr("fedstill.experiment.progress.time.monotonic", lambda: now)
    watcher = Lines(said.append, "x")
    watcher.asked("distil", 10, 0, 0)
    for seconds in (30, 2, 2):  # the first waits for its process
        now += seconds
        watcher.arrived(None)
    now += 1
    watcher.write_state()
    assert said[-1] == "x: step distil, 3 of 10 clients replied; 0:35 elapsed; about 0:13 left of step distil"
    now += 100  # the fourth takes long; six others follow
    watcher.write_state()
    assert said[-1].endswith("about 0:12 left of step distil")


def test_replies_of_another_run_are_no_resumption() -> None:
    said: list[str] = []
    watcher = Lines(said.append, "x")
    watcher.reused("runs/first")
    watcher.asked("update", 10, 9, 0)
    assert said[0] == "x: 9 of 10 replies are those of runs/first"


def test_a_lost_reply_does_not_count_as_one() -> None:
    """Of clients that are through, those who are left out are named, before and after a resumption."""
    said: list[str] = []
    watcher = Lines(said.append, "x")
    watcher.asked("update", 6, 2, 1)
    watcher.arrived(Refusal(4, "update", None, "too late"))
    watcher.arrived(None)
    watcher.arrived(None)
    watcher.withdrawn(Refusal(5, "update", None, "its numbers are a hundred times those of the others"))
    watcher.progressed("training", 1, 3)
    assert said[0] == "x: resuming: 2 of 6 replies kept, 1 left out"
    assert said[2] == "x: client 4 is left out: too late"
    assert said[3].startswith("x: step update, 4 of 6 clients replied, 2 left out; 0:")
    assert said[4].startswith("x: client 5 is left out: its numbers")


@pytest.mark.parametrize("interactive", [False, True])
def test_a_run_says_how_many_replied(interactive: bool, tmp_path: Path) -> None:
    screen = io.StringIO()
    task = Experiment(data="digits", limit=200, clients=6, min_clients=1, workers=0, model="linear", drop=0.4)
    console = Console(file=screen, force_terminal=interactive, force_interactive=interactive, width=120)
    with watch(console, "x") as watcher:
        run(Job(task, find("fedavg")(rounds=1), tmp_path / "run"), watcher=watcher)
    said = " ".join(screen.getvalue().split())
    lost = said.count("is left out: ")
    assert 0 < lost < 6
    if interactive:
        assert f"clients, step update, {lost} left out" in said and f"{6 - lost}/6" in said and "6/6" not in said
    else:
        assert f"step update, {6 - lost} of 6 clients replied, {lost} left out" in said


class Stops(Watcher):
    """Ends the run at the reply with this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def arrived(self, refusal: Refusal | None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_logging_has_the_lines_and_a_resumed_run_says_what_it_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(job(tmp_path / "run", rounds=3), watcher=Stops(3))
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "")  # silent by default
    with caplog.at_level(logging.INFO, "fedstill"):
        run(job(tmp_path / "run", rounds=3))
        run(job(tmp_path / "run", rounds=3), watcher=Stops(0))
    said = [record.getMessage().removeprefix("fedavg, seed 0: ") for record in caplog.records]
    assert said[0] == "resuming: 1 of 2 replies and 1 round kept"
    assert any(line.startswith("round 3 of 3; accuracy") for line in said)
    assert said[-1].startswith("finished on ")


def test_a_run_killed_before_its_results_says_that_all_is_kept(tmp_path: Path) -> None:
    run(job(tmp_path / "run", rounds=2))
    (tmp_path / "run" / "summary.json").unlink()
    said: list[str] = []
    with Lines(said.append, "x") as watcher:
        run(job(tmp_path / "run", rounds=2), watcher=watcher)
    assert said[0] == "x: resuming: all 2 rounds kept"


def test_a_terminal_keeps_finished_bars_and_has_none_without_a_name(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=100, color_system=None)
    with watch(console, "fedavg, seed 0") as watcher:
        assert isinstance(watcher, Bars)
        run(job(tmp_path / "run", rounds=2), watcher=watcher)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    drawn = [line for line in re.split(r"[\r\n]+", text) if "━" in line]
    assert all(line.startswith("fedavg, seed 0: ") for line in drawn)
    assert re.search(r"rounds \(accuracy \d+\.\d %\) ━+ 2/2", text)
    screen.truncate(0)
    with watch(console, "x") as watcher:
        run(job(tmp_path / "run", rounds=2), watcher=watcher)
    assert "━" not in screen.getvalue() and "nothing to do" in screen.getvalue()


def test_a_terminal_shows_the_work_inside_a_step_until_its_reply_arrives() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=80, color_system=None)
    with watch(console, "fedgm, seed 0") as watcher:
        assert isinstance(watcher, Bars)
        watcher.asked("distil", 2, 0, 0)
        watcher.working(1, "matching", 120, 300)
        watcher.progress.refresh()
        watcher.arrived(None)
        assert [task.visible for task in watcher.progress.tasks] == [True, False]
        watcher.working(0, "training", 1, 2)
        assert [task.visible for task in watcher.progress.tasks] == [True, True]
    assert re.search(r"fedgm, seed 0: client 1, matching +[━╸╺ ]+ 120/300", screen.getvalue())


def test_quiet_says_nothing_but_what_one_must_know(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO())
    with watch(console, "x", quiet=True) as watcher:
        watcher.asked("update", 3, 1, 0)
        watcher.arrived(None)
        watcher.logged(1, 2, {"accuracy": 0.5})
        assert not caplog.records
        watcher.noted("resuming in another environment")
    assert caplog.messages == ["resuming in another environment"] and not console.file.getvalue()  # type: ignore[attr-defined]

"""The page of ``fedstill watch``: what it says of a run that goes on, and that it only reads."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from method_settings import SMALL

import fedstill
from fedstill.cli import main
from fedstill.methods import find
from fedstill.report.live_page import LivePage
from fedstill.runs.folder import RunFolder
from fedstill.runs.live import Counted, live, time_left

TASK: dict[str, Any] = {"data": "digits", "clients": 3, "limit": 120, "model": "convnet:width=8,depth=2", "workers": 0}


class Peek(fedstill.Watcher):
    """Reads the live state at each event of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[Any] = []

    def logged(self, round: int, rounds: int, values: object) -> None:
        self.seen.append(live(self.folder))

    def arrived(self, refusal: object) -> None:
        self.seen.append(live(self.folder))


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A private run of two rounds, and its states on the way."""
    folder = tmp_path_factory.mktemp("watch") / "run"
    peek = Peek(folder)
    method = find("dp-fl")(**SMALL["dp-fl"])
    fedstill.run(method, **TASK, out=folder, watcher=peek)
    return folder, peek.seen


def test_the_state_follows_a_run(followed: tuple[Path, list[Any]]) -> None:
    folder, seen = followed
    assert [(s.state, s.round, s.answered) for s in seen] == [
        ("running", 0, 1), ("running", 0, 2), ("running", 0, 3), ("running", 1, 3),
        ("running", 1, 1), ("running", 1, 2), ("running", 1, 3), ("running", 2, 3),
    ]  # fmt: skip
    assert {(s.rounds, s.clients, s.label) for s in seen} == {(2, 3, "dp-fl")}
    assert [s.bytes_up for s in seen] == sorted(s.bytes_up for s in seen)
    first, last = seen[3].spent[0].epsilon, seen[7].spent[0].epsilon
    assert 0 < first < last
    done = live(folder)
    record = fedstill.read_run(folder)
    assert (done.state, done.round, done.left) == ("finished", 2, None)
    assert (done.bytes_up, done.bytes_down) == (record["bytes_up"], record["bytes_down"])
    assert done.spent[0].epsilon == last == record.guarantee.epsilon and done.promised == record.guarantee
    assert seen[0].left is None and seen[3].left is not None


def test_lost_replies_are_neither_answers_nor_awaited(tmp_path: Path) -> None:
    peek = Peek(tmp_path / "run")
    task = {**TASK, "clients": 6, "min_clients": 1, "drop": 0.4}
    record = fedstill.run("fedavg-p", **task, public="noise=60", epsilon=4.0, out=peek.folder, watcher=peek)
    lost = len(record["refused"])
    assert 0 < lost < 6
    assert (live(peek.folder).answered, live(peek.folder).refused) == (6 - lost, lost)
    assert all(state.answered + state.refused <= 6 for state in peek.seen)
    waiting = [state.left for state in peek.seen if state.answered + state.refused == 6 and not state.round]
    assert set(waiting) <= {None}


def test_time_left_is_the_pace_of_the_parts_after_the_first() -> None:
    assert time_left([0.0], 10, 0.0) is None
    assert time_left([0.0, 8.0], 10, 0.0) == 72.0
    assert time_left([0.0, 8.0, 10.0, 12.0], 10, 0.0) == 14.0  # the first part started processes
    assert time_left([0.0, 8.0, 10.0, 12.0], 10, 1.0) == 13.0
    assert time_left([0.0, 8.0, 10.0, 12.0], 10, 99.0) == 12.0  # the next one is late; six others follow
    assert time_left([0.0, 2.0, 4.0], 2, 0.0) == 0.0


def test_epsilon_is_computed_again_only_for_more_releases_and_not_all_the_time(
    followed: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = followed
    now, calls = 0.0, []
    known: dict[Path, Counted] = {}

    def slow(*_: object) -> list[Any]:
        nonlocal now
        now += 3.0  # seconds
        calls.append(now)
        return []

    monkeypatch.setattr("fedstill.runs.live.spent_by_unit", slow)
    monkeypatch.setattr("fedstill.runs.live.time.monotonic", lambda: now)
    live(folder, known)
    live(folder, known)
    assert len(calls) == 1
    (place,) = known
    known[place] = known[place]._replace(size=1)  # the file has grown since
    now += 59.0
    live(folder, known)
    assert len(calls) == 1
    now += 2.0
    live(folder, known)
    assert len(calls) == 2


def ask(page: LivePage, path: str, method: str = "GET", host: str | None = None) -> tuple[int, Any, str]:
    port = int(page.url.rpartition(":")[2].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    reply = connection.getresponse()
    found = reply.status, reply.headers, reply.read().decode()
    connection.close()
    return found


@pytest.fixture
def page(followed: tuple[Path, list[Any]]) -> Iterator[LivePage]:
    with LivePage(followed[0]) as opened:
        yield opened


def test_the_page_only_reads_and_only_for_this_machine(page: LivePage, followed: tuple[Path, list[Any]]) -> None:
    folder, _ = followed
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    status, headers, text = ask(page, "/")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    for name in re.findall(r'(?:href|src)="([^"d:]+)"', text):
        assert ask(page, f"/{name}")[0] == 200
    status, _, text = ask(page, "/state.json")
    (state,) = json.loads(text)["runs"]
    assert (state["state"], state["round"], state["rounds"]) == ("finished", 2, 2)
    assert state["words"]["privacy"].startswith("eps ")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(page, "/state.json", method)[0] == 501
    for path in ("/../config.json", "/config.json", "/%2e%2e/config.json", "//etc/passwd", "/page.css/../../x"):
        assert ask(page, path)[0] == 404
    for host in ("evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:80", ""):
        assert ask(page, "/state.json", host=host or "x")[0] == 403
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_the_page_listens_on_this_machine_only(page: LivePage) -> None:
    port = urlsplit(page.url).port
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_damaged_or_newer_run_beside_others_is_named(tmp_path: Path, followed: tuple[Path, list[Any]]) -> None:
    whole = (followed[0] / "config.json").read_text()
    newer = json.dumps({**json.loads(whole), "format": 2, "version": "99.0.0"})
    for name, content in (("a", whole), ("b", "{"), ("c", '{"experiment": {}}'), ("d", newer)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    with LivePage(tmp_path) as page:
        runs = json.loads(ask(page, "/state.json")[2])["runs"]
    states = ["interrupted", "damaged", "damaged", "newer"]
    assert [(run["name"], run["state"]) for run in runs] == list(zip("abcd", states, strict=True))
    assert "install fedstill 99.0.0" in runs[3]["problem"]
    assert "config.json is damaged" in runs[1]["problem"]


def test_without_a_run_or_with_a_taken_port_there_is_one_sentence(
    page: LivePage, followed: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = page.url.rpartition(":")[2].strip("/")
    for words, sentence in (
        ([str(tmp_path)], "has no run; give the folder"),
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(followed[0]), "--port", port], f"--port is {port}, which cannot be opened"),
        ([str(followed[0]), "--port", "70000"], "--port is 70000"),
        (["--json"], "the run comes first"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["watch", *words])
        assert stop.value.code == 2 and sentence in capsys.readouterr().err
    main(["watch", str(followed[0]), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "finished"


def test_a_page_of_a_running_run_says_so(tmp_path: Path, followed: tuple[Path, list[Any]]) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.config.write_text((followed[0] / "config.json").read_text())
        assert live(folder.path).state == "running"
        assert (live(folder.path).answered, live(folder.path).left, live(folder.path).spent) == (0, None, [])
    assert live(folder.path).state == "interrupted"


@pytest.mark.slow
def test_ctrl_c_ends_the_page_quietly(followed: tuple[Path, list[Any]]) -> None:
    words = [sys.executable, "-m", "fedstill", "watch", str(followed[0])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(300, process.kill)
        timer.start()
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        timer.cancel()
    assert (process.returncode, errors) == (0, "")


def test_colours_have_the_contrast_of_wcag_aa() -> None:
    """4.5 to 1 for text on its background, light and dark."""
    css = resources.files("fedstill.report").joinpath("assets", "page.css").read_text()
    light = dict(re.findall(r"--([\w-]+): (#\w+)", css.split("@media", 1)[0]))
    dark = css.split("@media (prefers-color-scheme: dark)", 1)[1].split("}", 1)[0]
    for colours in (light, light | dict(re.findall(r"--([\w-]+): (#\w+)", dark))):
        for text, back in (
            ("text", "back"), ("soft", "back"), ("link", "back"), ("bad", "back"), ("good", "back"), ("link", "box"),
            ("text", "box"),
        ):  # fmt: skip
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back, colours[text], colours[back])
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#ffffff")  # the known limit


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2.1 between two colours."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("clients", ["0", "Infinity", '"x"'])
def test_one_run_with_wrong_numbers_does_not_hide_the_others(
    clients: str, followed: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "wrong"):
        shutil.copytree(followed[0], tmp_path / name)
    config = tmp_path / "wrong" / "config.json"
    config.write_text(re.sub(r'"clients": 3', f'"clients": {clients}', config.read_text()))
    main(["watch", str(tmp_path), "--json"])
    good, wrong = json.loads(capsys.readouterr().out)["runs"]
    assert good["state"] == "finished" and wrong["state"] == "damaged" and wrong["problem"]


def test_a_run_that_is_moved_while_it_is_watched_is_no_crash(
    followed: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(followed[0], tmp_path / "all" / "run")
    with LivePage(tmp_path / "all") as page:
        (tmp_path / "all" / "run").rename(tmp_path / "elsewhere")
        assert ask(page, "/state.json")[0] == 503
    assert "Traceback" not in capsys.readouterr().err

"""Each tracker through its real client, offline, in a process of its own: they keep global state."""

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

import fedstill
from fedstill import tracking
from fedstill.cli import main
from fedstill.tracking import Start, TrackerClient, picture

TASK = {"data": "digits", "clients": 2, "limit": 100, "model": "convnet:width=8,depth=2", "workers": 0}
SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
import fedstill, tracked
folder = Path.cwd()
tracked.stay_here(folder)
class Stop(Exception): pass
class Impatient(fedstill.Watcher):
    def logged(self, round, rounds, values):
        if round == 2: raise Stop
words = dict(**{TASK!r}, rounds=3, out="run", track=sys.argv[1])
try:
    fedstill.run("fedavg", **words, watcher=Impatient())
except Stop:
    pass
fedstill.run("fedavg", **words)
fedstill.run("fedavg", **words)  # finished already
found = tracked.READERS[sys.argv[1]](Path("run"))
Path("found.json").write_text(json.dumps({{**found._asdict(), "images": sorted(found.images)}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_the_real_client_has_each_round_once_after_an_interruption(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs pip install '.[{name}]'")
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # which may be somebody's JSON
    found = json.loads((tmp_path / "found.json").read_text())
    record = fedstill.read_run(tmp_path / "run")
    accuracies = [pytest.approx(line["accuracy"], rel=1e-6) for line in record.metrics]  # TensorBoard has float32
    transferred = [line["bytes_up"] + line["bytes_down"] for line in record.metrics]
    assert found["rounds"] == [[n, accuracy] for n, accuracy in enumerate(accuracies, 1)]
    assert found["by_bytes"] == [list(pair) for pair in zip(transferred, accuracies, strict=True)]
    assert found["settings"]["data"] == "digits" and found["settings"]["method.local.batch_size"] == "64"
    assert float(found["results"]["accuracy"]) == record.accuracy
    assert found["results"]["guarantee.reason"] == record.guarantee.reason
    assert found["images"] == ["images/real"]


class Recorder(TrackerClient):
    """Keeps what it gets; fails when it is told to."""

    def __init__(self, fail: str = "", has: int = 0) -> None:
        self.fail, self.has = fail, has
        self.calls: list[tuple[Any, ...]] = []

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fail:
            raise ConnectionError("the server is\naway")

    @override
    def open(self, start: Start) -> int:
        self._note("open", start.settings["method.rounds"])
        return self.has

    @override
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        self._note("log", round, transferred)

    @override
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._note("conclude", results["guarantee.holds"], {name: image.shape for name, image in images.items()})

    @override
    def close(self, *, failed: bool) -> None:
        self._note("close", failed)


class Listener(fedstill.Watcher):
    def __init__(self) -> None:
        self.heard: list[str] = []

    @override
    def noted(self, sentence: str) -> None:
        self.heard.append(sentence)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        pass


def tracked(recorder: Recorder, out: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 2) -> Listener:
    listener = Listener()
    monkeypatch.setattr(tracking, "client", lambda name: recorder)
    fedstill.run("fedavg", **TASK, rounds=rounds, out=out, track="wandb", watcher=listener)
    return listener


def test_rounds_that_a_tracker_has_are_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(has=1)
    tracked(recorder, tmp_path / "run", monkeypatch)
    kinds = [call[0] for call in recorder.calls]
    assert kinds == ["open", "log", "conclude", "close"]
    assert recorder.calls[0] == ("open", 2) and recorder.calls[1][1] == 2 and recorder.calls[-1] == ("close", False)
    assert recorder.calls[2][1] is False and set(recorder.calls[2][2]) == {"real"}


def test_a_tracker_that_fails_later_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(fail="log")
    listener = tracked(recorder, tmp_path / "run", monkeypatch)
    assert [call[0] for call in recorder.calls] == ["open", "log"]
    assert listener.heard == [
        "Recorder failed and gets nothing more (ConnectionError: the server is away); the run continues"
    ]
    assert fedstill.read_run(tmp_path / "run").finished


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="Recorder cannot be opened: ConnectionError: the server is away"):
        tracked(Recorder(fail="open"), tmp_path / "run", monkeypatch)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    tracked(Recorder(), tmp_path / "run", monkeypatch)  # the same command again


def test_an_interrupted_run_is_closed_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    class Stop(Listener):
        @override
        def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(tracking, "client", lambda name: recorder)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", **TASK, rounds=2, out=tmp_path / "run", track=["wandb"], watcher=Stop())
    assert recorder.calls[-1] == ("close", True)


def test_a_missing_package_or_tracker_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="the tracker 'wandb' needs the package wandb, which is not installed; pip"):
        fedstill.run("fedavg", **TASK, track="wandb", out="run")
    with pytest.raises(ValueError, match="there is no tracker 'visdom'; choose tensorboard, mlflow, wandb, trackio"):
        fedstill.run("fedavg", **TASK, track="visdom", out="run")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'tensorboard' writes into the run's folder, which would be deleted"):
        fedstill.run("fedavg", **TASK, track="tensorboard")
    with pytest.raises(SystemExit) as stop:
        main(["run", "fedavg", "--data", "digits", "--track", "visdom"])
    assert stop.value.code == 2
    assert "visdom" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pictures_have_a_row_for_each_class_and_three_channels() -> None:
    grey = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 4, 3), np.uint8) + 1
    sheet = picture((grey, np.array([0, 0, 2, 2, 2])))
    assert sheet.shape == (2 * 5, 3 * 4, 3)
    assert (sheet[:4, :3] == 1).all() and (sheet[5:9, 8:11] == 5).all() and (sheet[:4, 8:] == 0).all()

"""Sweeps: equal budgets, a closed test set, resumption, and the same bits with any number of processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from fedstill.base import files, processes
from fedstill.cli import main
from fedstill.engines.transport import Watcher
from fedstill.experiment import search, sweep
from fedstill.experiment.sweep import Sweep, read_sweep
from fedstill.report import tuning
from fedstill.runs.folder import Taken

FEDAVG = {"rounds": 1, "try": {"local.lr": [0.01, 0.1]}}
ONE = {"data": "digits", "methods": {"fedavg": FEDAVG}}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    file = folder / "tuned.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"methods": {}}, "it needs 'methods', a mapping of methods"),
        ({"validation": 0}, "validation is 0, but a sweep chooses by validation records; set it above 0"),
        ({"seed": 3}, "seed is 3; give seeds: [3] in its place"),
        ({"seeds": [1, 1]}, "seeds is [1, 1]; give one or more different numbers"),
        ({"search": "luck"}, "search is 'luck'; it must be 'grid' or 'optuna'"),
        ({"search": "optuna"}, "optuna needs a number of points for each method, as tries: 16"),
        ({"tries": 3}, "tries is 3, but the grid of fedavg has 2 points; add values"),
        ({"budgets": 3}, "budgets is not a setting here; did you mean budget?"),
        ({"clientz": 3}, "clientz is not a setting here; did you mean clients?"),
        ({"final_seed": [1]}, "final_seed is not a setting here; did you mean final_seeds?"),
        ({"rounds": 2}, "rounds is not a setting here; put it under fedavg:"),
        ({"wholly_other": 2}, "wholly_other is not a setting here; leave it out"),
        ({"methods": {"fedavg": {"roundz": 2}}}, "fedavg: roundz is not a setting here; did you mean rounds?"),
        ({"methods": {"final": FEDAVG}}, "'final' cannot be the label of a method"),
        ({"methods": {"fedagv": FEDAVG}}, "there is no method 'fedagv'; did you mean fedavg?"),
        (
            {"methods": {"fedavg": {"try": {"local.lrr": [1]}}}},
            "fedavg: local.lrr is not a setting here; did you mean local.lr?",
        ),
        ({"methods": {"fedavg": {"try": {"local.lr": [0.1, -1]}}}}, "fedavg: local.lr is -1; it must be greater"),
        ({"methods": {"fedavg": {"try": {"local.lr": 0.1}}}}, "local.lr is 0.1; give a list of values, or low"),
        ({"methods": {"fedavg": {"try": {"local.lr": [1, 1]}}}}, "local.lr has a value twice"),
        ({"methods": {"fedavg": {"try": {"local.lr": [0.1, "1e-1"]}}}}, "local.lr has a value twice: 0.1 and '1e-1'"),
        (
            {"methods": {"fedavg": {"try": {"local": [{"lr": 0.1}, {"lr": 0.2}], "local.lr": [0.3, 0.4]}}}},
            "try of fedavg has local and local.lr, which is a part of it; name the parts alone",
        ),
        (
            {"methods": {"fedavg": {"try": {"local.lr": {"low": 0.1, "high": 1}}}}},
            "local.lr has a range, but a grid needs a list of values",
        ),
        (
            {"search": "optuna", "tries": 2, "methods": {"fedavg": {"try": {"local.lr": {"low": 1, "high": 0.1}}}}},
            "low is 1 and high 0.1; low must be below high",
        ),
        (
            {"methods": {"fedavg": FEDAVG, "fedprox": {"try": {"mu": [0, 1, 2]}}}},
            "the grids have different sizes (fedavg 2, fedprox 3), so the methods would not be tuned equally; "
            "set tries: 2",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", str(saved(tmp_path, ONE | changes)), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert sentence in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_every_method_gets_the_same_number_of_tries(tmp_path: Path) -> None:
    methods = {"fedavg": FEDAVG, "fedprox": {"rounds": 1, "try": {"mu": [0, 1], "local.lr": [0.1, 0.2]}}, "real": None}
    found = read_sweep(saved(tmp_path, ONE | {"methods": methods, "tries": 2}))
    assert found.has_equal_budgets() and found.experiment.validation == 0.1
    points = {entry.label: [next(found.search(entry)) for _ in range(2)] for entry in found.entries}
    assert all(first == again for first, again in points.values())
    assert {label: len(first) for label, (first, _) in points.items()} == {"fedavg": 2, "fedprox": 2, "real": 1}
    assert points["real"][0] == [{}]
    methods["fedprox"] |= {"tries": 4}
    unequal = read_sweep(saved(tmp_path, ONE | {"methods": methods, "tries": 2}))
    assert not unequal.has_equal_budgets()
    (prox,) = (entry for entry in unequal.entries if entry.label == "fedprox")
    assert next(unequal.search(prox)) == [{"mu": m, "local.lr": lr} for m in (0, 1) for lr in (0.1, 0.2)]
    made = prox.method({"mu": 1, "local.lr": 0.2}).model_dump()
    assert (made["mu"], made["local"]["lr"], made["rounds"]) == (1, 0.2, 1)


def searched(score: Callable[[search.Point], float | None], tries: int) -> list[search.Point]:
    space = {"lr": search.Range(low=1e-4, high=1, log=True), "steps": search.Range(low=1, high=9, whole=True)}
    asked = search.optuna({**space, "kind": [None, [1, 2]]}, tries, 4)
    points, found = next(asked), list[search.Point]()
    while True:
        found += points
        try:
            points = asked.send([score(point) for point in points])
        except StopIteration:
            return found


def test_optuna_searches_and_comes_to_the_same_points() -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'fedstill[sweeps]'")

    def near(point: search.Point) -> float:
        return -(np.log10(point["lr"] / 0.03) ** 2)

    points = searched(near, 30)
    assert points == searched(near, 30) and len(points) == 30
    assert points[:4] == searched(lambda _: None, 30)[:4]
    assert points != searched(lambda _: None, 30)  # of which every try has failed
    assert all(1e-4 <= p["lr"] <= 1 and p["steps"] in range(1, 10) and p["kind"] in (None, [1, 2]) for p in points)
    assert max(map(near, points[15:])) > max(map(near, points[:4]))


class Local(ThreadPoolExecutor):
    """The processes of a sweep in this one, one at a time."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(1)


@pytest.fixture
def task(tmp_path: Path) -> Callable[[bool], Sweep]:
    """A sweep over vectors; with ``swapped`` test labels of other classes."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16

    def make(swapped: bool, **changes: Any) -> Sweep:
        test = (labels[900:] + swapped) % 10
        np.savez(tmp_path / "d.npz", x_train=images[:900], y_train=labels[:900], x_test=images[900:], y_test=test)
        mine = {"data": str(tmp_path / "d.npz"), "mean": [0.3], "std": [0.4], "model": "linear", "clients": 3}
        methods = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.3]}}, "fedprox": {"rounds": 2, "mu": 0.1}}
        return read_sweep(saved(tmp_path, mine | {"validation": 0.2, "seeds": [0, 1], "methods": methods} | changes))

    return make


def scores(outcome: sweep.Outcome) -> dict[str, list[tuple[float, ...] | None]]:
    return {label: [one.values for one in tries] for label, tries in outcome.tries.items()}


@pytest.mark.slow
def test_the_test_set_stays_closed_until_the_end(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    right = sweep.run_sweep(task(False), tmp_path / "right", watcher=Watcher())
    wrong = sweep.run_sweep(task(True), tmp_path / "wrong", watcher=Watcher())
    assert scores(right) == scores(wrong)  # whatever the test labels are
    assert not right.tests and not (tmp_path / "right" / "final").exists()
    best = right.best("fedavg")
    assert best is not None and best.point == {"local.lr": 0.3} and best.score is not None and best.score > 0.6
    opened = sweep.run_sweep(task(True), tmp_path / "wrong", final=True, watcher=Watcher())
    assert opened.tests["fedavg"].point == {"local.lr": 0.3}
    assert (opened.tests["fedavg"].score or 1) < 0.2  # nearly all predictions are of the right class
    again = sweep.run_sweep(task(True), tmp_path / "wrong", watcher=Watcher())
    assert again.tests["fedavg"].values == opened.tests["fedavg"].values
    other = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.5]}}}
    with pytest.raises(ValueError, match="the test set was opened for .* after other tries; tuning further would mean"):
        sweep.run_sweep(task(True, methods=other), tmp_path / "wrong", watcher=Watcher())
    with pytest.raises(ValueError, match="with the seeds 0 1, of which 0 would be left out; choosing seeds would mean"):
        sweep.run_sweep(task(True, final_seeds=[1, 2]), tmp_path / "wrong", watcher=Watcher())
    more = sweep.run_sweep(task(True, final_seeds=[0, 1, 2]), tmp_path / "wrong", watcher=Watcher())
    assert (more.tests["fedavg"].values or ())[:2] == opened.tests["fedavg"].values
    with pytest.raises(ValueError, match="with the seeds 0 1 2, of which 2 would be left out"):
        sweep.run_sweep(task(True), tmp_path / "wrong", watcher=Watcher())


def test_tries_that_were_edited_out_of_the_file_are_said(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen before the file was edited has chosen its settings too."""
    monkeypatch.setattr(processes, "pool", Local)
    rates = [{"fedavg": {"rounds": 1, "try": {"local.lr": some}}} for some in ([1e-4, 0.3], [0.3, 0.5])]
    first = sweep.run_sweep(task(False, methods=rates[0]), tmp_path / "out", watcher=Watcher())
    assert not first.former and "More was tried" not in tuning.budget(first)
    edited = sweep.run_sweep(task(False, methods=rates[1], seeds=[1]), tmp_path / "out", final=True, watcher=Watcher())
    assert edited.former == {"fedavg": 3}  # both of 1e-4, and seed 0 of 0.3
    assert "More was tried: 3 runs of fedavg in the folder are of what the file had before" in tuning.budget(edited)


@pytest.mark.slow
def test_a_model_of_each_client_is_tuned_on_validation_records_of_the_clients(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    methods = {"fedavg-ft": {"rounds": 1, "try": {"local.lr": [1e-4, 0.3]}}}
    mine = task(False, methods=methods, local_test=0.25, seeds=[0])
    found = sweep.run_sweep(mine, tmp_path / "own", final=True, watcher=Watcher())
    (best, other), test = sorted(found.tries["fedavg-ft"], key=lambda one: -(one.score or 0)), found.tests["fedavg-ft"]
    assert test.point == best.point and best.score != other.score
    judged = [json.loads((one.folders[0] / "summary.json").read_text())["judged_on"] for one in (best, test)]
    assert judged == ["the clients' own validation records", "the clients' own test records"]
    assert "20 % of each client's training records" in tuning.budget(found)
    assert "Each client's test set was opened once" in tuning.budget(found)


class Interrupted(Watcher):
    """Ctrl-C after some runs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def progressed(self, label: str, done: int, total: int) -> None:
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def test_a_failed_point_is_named_and_the_others_count(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    run = sweep.run

    def diverging(job: Any) -> Any:
        if job.method.local.lr == 1e-4:
            raise ValueError("the weights are not finite")
        return run(job)

    monkeypatch.setattr(sweep, "run", diverging)
    methods = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.3]}}}
    outcome = sweep.run_sweep(task(False, methods=methods), tmp_path / "out", watcher=Watcher())
    failed, worked = outcome.tries["fedavg"]
    assert failed.score is None and failed.failure == "the weights are not finite" and worked.score is not None
    assert outcome.best("fedavg") is worked
    notes: list[str] = []

    def impossible(job: Any) -> Any:
        raise ValueError("there are fewer records than clients")

    monkeypatch.setattr(sweep, "run", impossible)
    methods = {"fedavg": {"rounds": 2, "try": {"local.lr": [0.1, 0.2, 0.3]}}}
    watcher = Watcher()
    monkeypatch.setattr(watcher, "noted", notes.append)
    with pytest.raises(ValueError, match="no run of the sweep worked"):
        sweep.run_sweep(task(False, methods=methods), tmp_path / "impossible", watcher=watcher)
    assert len(notes) == 1  # not one for each try
    monkeypatch.setattr(sweep, "run", diverging)
    with pytest.raises(ValueError, match="no run of the sweep worked; fedavg: "):
        methods = {"fedavg": {"rounds": 2, "local": {"lr": 1e-4}}}
        sweep.run_sweep(task(False, methods=methods), tmp_path / "bad", watcher=Watcher())


def test_any_error_of_a_try_is_its_own_and_the_test_set_waits_for_it(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    run, broken = sweep.run, [True]

    def breaking(job: Any) -> Any:
        if job.method.local.lr == 0.3 and broken:
            raise RuntimeError("out of memory\nand more")
        return run(job)

    monkeypatch.setattr(sweep, "run", breaking)
    methods, out = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.3]}}}, tmp_path / "out"
    outcome = sweep.run_sweep(task(False, methods=methods), out, watcher=Watcher())
    assert [one.failure for one in outcome.tries["fedavg"]] == ["", "RuntimeError: out of memory"]
    with pytest.raises(ValueError, match="local.lr 0.3 failed .* the test set stays closed until that try has worked"):
        sweep.run_sweep(task(False, methods=methods), out, final=True, watcher=Watcher())
    assert not (out / "final.json").exists()
    broken.clear()
    opened = sweep.run_sweep(task(False, methods=methods), out, final=True, watcher=Watcher())
    assert opened.tests["fedavg"].point == {"local.lr": 0.3}
    (out / "final.json").rename(tmp_path / "kept")
    with pytest.raises(files.Damaged, match=r"final.json is missing or damaged"):
        sweep.run_sweep(task(False, methods=methods), out, watcher=Watcher())
    (tmp_path / "kept").rename(out / "final.json")
    broken.append(True)  # the point that the test set was opened for stays, whatever fails now
    shutil.rmtree(opened.tries["fedavg"][1].folders[0])
    again = sweep.run_sweep(task(False, methods=methods), out, watcher=Watcher())
    assert again.tests["fedavg"].point == {"local.lr": 0.3}


def test_a_damaged_run_keeps_the_test_set_closed(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    methods, out = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.3]}}}, tmp_path / "out"
    first = sweep.run_sweep(task(False, methods=methods), out, watcher=Watcher())
    (first.tries["fedavg"][1].folders[0] / "summary.json").write_text("{")
    with pytest.raises(ValueError, match="the test set stays closed until that try has worked"):
        sweep.run_sweep(task(False, methods=methods), out, final=True, watcher=Watcher())
    assert not (out / "final.json").exists()


def test_a_sweep_whose_folder_or_run_is_taken_ends_and_chooses_nothing(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    methods, out = {"fedavg": {"rounds": 2, "try": {"local.lr": [1e-4, 0.3]}}}, tmp_path / "out"
    holder = "import sys; from fedstill.runs.folder import RunFolder; from pathlib import Path\n" + (
        "with RunFolder(Path(sys.argv[1])).locked(): print(flush=True); sys.stdin.read()"
    )
    first = sweep.run_sweep(task(False, methods=methods), out, watcher=Watcher())
    folder = first.tries["fedavg"][1].folders[0]
    (folder / "summary.json").unlink()
    for place in (out, folder):
        words = [sys.executable, "-c", holder, str(place)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline()
            with pytest.raises(Taken, match="another process is writing"):
                sweep.run_sweep(task(False, methods=methods), out, final=True, watcher=Watcher())
            assert other.stdin is not None
            other.stdin.close()
        assert not (out / "final.json").exists()


def test_the_same_point_twice_is_one_run(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a search may propose it; a list may not have it."""
    monkeypatch.setattr(processes, "pool", Local)
    experiment, entry = task(False).experiment, sweep.Tried("fedavg", "fedavg", {"rounds": 1}, {}, 2)
    with sweep.Runs(experiment, 1, Watcher(), "") as runs:
        runs.expect("fedavg", 2)
        one, other = runs.all("fedavg", experiment, [(entry, {"local.lr": 0.3}, tmp_path / "out")] * 2, (0,))
    assert one.folders == other.folders and one.values == other.values and one.values is not None


@pytest.mark.slow
def test_the_command_resumes_and_gives_the_same_with_any_number_of_processes(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = task(False)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # two of six runs, then an interruption
        patch.setattr(processes, "pool", Local)
        with pytest.raises(KeyboardInterrupt):
            sweep.run_sweep(found, out, watcher=Interrupted(2))
    finished = {place: place.stat().st_mtime_ns for place in out.rglob("summary.json")}
    assert finished
    words = ["sweep", str(tmp_path / "tuned.yaml"), "--parallel", "2", "--final", "--json", "--out"]
    main([*words, str(out)])
    said = json.loads(capsys.readouterr().out)
    assert all(place.stat().st_mtime_ns == time for place, time in finished.items())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "pool", Local)
        alone = sweep.run_sweep(found, tmp_path / "alone", final=True, watcher=Watcher())
    rows = {row["method"]: row for row in said["rows"]}
    assert {label: rows[label]["test"] for label in rows} == {label: one.score for label, one in alone.tests.items()}
    assert rows["fedavg"]["best"] == {"local.lr": 0.3} and rows["fedprox"]["best"] == {}
    page = (out / "report.html").read_text()
    assert said["budget"] in page and "2 tries for each method. Without a search: fedprox." in page
    table = (out / "sweep.csv").read_text().splitlines()
    assert len(table) == 4 and table[0].startswith("label,method,local.lr,validation")


def test_a_private_method_s_epsilon_does_not_count_the_choice_and_the_table_says_so(
    task: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "pool", Local)
    methods = {"ldp-fedavg": {"try": {"clip": [0.1, 1.0]}}, "fedavg": {"rounds": 1, "try": {"local.lr": [0.1, 0.3]}}}
    found = sweep.run_sweep(task(False, methods=methods, num_classes=10), tmp_path / "out", watcher=Watcher())
    assert "The epsilon of ldp-fedavg does not count this choice." in tuning.budget(found)

"""`fedstill.run`: keyword arguments in, results out."""

import gc
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import Probe

from fedstill import Experiment, FedAvg, InputError, Job, Real, RunRecord, Watcher, load_data, run
from fedstill.engines.client import Site
from fedstill.experiment import reuse
from fedstill.protocol import Method

TASK: dict[str, Any] = {
    "data": "digits", "clients": 2, "limit": 100, "model": "convnet:width=8,depth=2", "workers": 0
}  # fmt: skip


def test_a_run_needs_a_name_and_settings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run("fedavg", **TASK, rounds=2, local={"epochs": 1}, out=tmp_path / "run")
    assert isinstance(record, RunRecord)
    assert record.config["experiment"]["limit"] == 100 and record.config["method"]["local"]["epochs"] == 1
    assert record.accuracy == record["accuracy"] == record.summary["accuracy"]
    assert "accuracy" in record and "nothing" not in record and 0 not in record
    assert list(record) == list(record.summary) and dict(record) == record.summary
    assert (record.get("accuracy"), record.get("nothing"), record.get("nothing", 1)) == (record.accuracy, None, 1)
    with pytest.raises(KeyError, match="nothing"):
        record["nothing"]
    again = run(FedAvg, **TASK, rounds=2, local={"epochs": 1}, out=str(tmp_path / "run"))
    assert again.summary == record.summary  # read, not run again
    by_object = run(FedAvg(rounds=2, local={"epochs": 1}), **TASK)
    assert by_object["accuracy"] == record.accuracy and by_object["bytes_up"] == record["bytes_up"]
    assert by_object.load_model()(load_data("digits").test.images[:3]).shape == (3, 10)
    assert capsys.readouterr() == ("", "")  # no terminal and no notebook


@pytest.mark.slow
def test_without_a_folder_the_files_live_as_long_as_the_results() -> None:
    record = run("fedavg", **TASK, rounds=1)
    folder = record.folder
    assert (folder / "summary.json").is_file()
    del record
    gc.collect()
    assert not folder.parent.exists()


def test_a_run_that_is_over_holds_no_records() -> None:
    """Nor would they be freed late: sweeps run one after another in a process, and Python counts objects, not bytes."""

    def sites() -> int:
        return sum(type(each) is Site for each in gc.get_objects())

    gc.collect()
    before = sites()
    gc.disable()
    try:
        run("fedavg", **TASK, rounds=1)
        assert sites() == before
    finally:
        gc.enable()


def test_what_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="there is no model 'convent'; did you mean convnet?"):
        run("fedavg", **{**TASK, "model": "convent"})
    assert not list(tmp_path.iterdir())


def test_data_may_be_an_object() -> None:
    record = run("fedavg", **{**TASK, "data": load_data("digits")}, rounds=1)
    assert record["accuracy"] == run("fedavg", **TASK, rounds=1)["accuracy"]
    job = Job(Experiment(**TASK), FedAvg(rounds=1), record.folder.parent / "job")
    assert run(job, data=load_data("digits"))["accuracy"] == record.accuracy


def test_data_and_folders_may_be_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_data("digits", cache_dir=str(tmp_path / "cache"))
    assert (tmp_path / "cache").is_dir() and load_data.__name__ == "load_data"
    assert load_data(data="digits", cache_dir=tmp_path / "cache").fingerprint == digits.fingerprint
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="'./digits' is neither a known data set .* nor an existing file"):
        load_data(Path("digits"))
    images, labels = digits.train.images[:, 0].numpy(), digits.train.labels.numpy()
    np.savez(tmp_path / "digits.npz", x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    assert len(load_data(Path("digits.npz"), cache_dir=tmp_path / "cache").train) == len(images)
    for place in (Path("digits.npz"), tmp_path / "digits.npz"):
        record = run("fedavg", **{**TASK, "data": place}, rounds=1)
        assert record.config["experiment"]["data"] == ("./digits.npz" if place == Path("digits.npz") else str(place))
    for wrong in (3, {"digits"}):
        with pytest.raises(InputError, match="give a name or a path"):
            load_data(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="give a name or a path"):
            run("fedavg", data=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("fedavg", {"round": 3}, "^round is neither a setting of the task nor of FedAvg; did you mean rounds?"),
        ("fedagv", {}, "there is no method 'fedagv'; did you mean fedavg?"),
        ("fedavg", {"clients": 0}, "^clients is 0; it must be greater than 0"),
        ("fedavg", {"local": {"epochs": -1}}, "^local.epochs is -1; it must be"),
        (FedAvg(rounds=1), {"rounds": 2}, "FedAvg is an object with its own settings; leave rounds out"),
        (Job(Experiment(), "fedavg", "x"), {"clients": 2}, "a Job has its own task, method and folder; leave clients"),
        (Job(Experiment(), "fedavg", "x"), {"out": "y"}, "leave out out"),
        (Job(Experiment(), "fedavg", "x"), {"data": "digits"}, "leave data out"),
        (Experiment(), {}, "a method is a name, a class, an object or a Job, not Experiment"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(method: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run(method, **settings)


def test_no_method_has_a_setting_of_the_task() -> None:
    from fedstill import methods

    kinds: list[type[Method]] = [methods.find(name) for name in methods.TABLE] + [Probe]
    assert not {(kind.__name__, name) for kind in kinds for name in kind.model_fields.keys() & Experiment.model_fields}


class Limited(FedAvg):
    """A method of one's own with names that the run has too, some of them in a later version only."""

    limit: int = 3
    out: str = "mine"


@pytest.mark.parametrize("key", ["limit", "out"])
def test_a_keyword_that_is_the_run_s_and_the_method_s_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limited_here.py").write_text("import fedstill\n\nclass Limited(fedstill.FedAvg):\n"
                                              "    limit: int = 3\n    out: str = 'mine'\n")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {**TASK, "limit": 100, "out": str(tmp_path / "run"), "rounds": 1}
    alone = {name: value for name, value in given.items() if name not in ("limit", "out") or name == key}
    for method in (Limited, "limited_here:Limited"):
        with pytest.raises(InputError, match=rf"^{key} is a setting of the run and of Limited; .*run\(Limited\({key}="):
            run(method, **alone)
    assert not (tmp_path / "run").exists()
    record = run(Limited(rounds=1, limit=5), **{name: given[name] for name in given if name != "rounds"})
    assert record.config["experiment"]["limit"] == 100 and record.folder == tmp_path / "run"
    assert record.config["method"]["limit"] == 5 and record.config["method"]["out"] == "mine"


def test_a_class_with_such_a_name_runs_where_the_keyword_is_not_given() -> None:
    """So a setting that the run gains breaks no call without it."""
    task = {name: value for name, value in TASK.items() if name != "limit"}
    record = run(Limited, **task, rounds=1, local={"epochs": 1}, validation=0.9)
    assert record.config["method"]["limit"] == 3 and record.config["experiment"]["limit"] is None


class Cancelled(Exception):
    """What an application raises to end a run."""


class Impatient(Watcher):
    """Ends the run after its first round, once."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def logged(self, round: int, rounds: int, values: object) -> None:
        self.rounds.append(round)
        if self.rounds == [1]:
            raise Cancelled


def test_a_watcher_can_cancel_a_run_which_then_resumes(tmp_path: Path) -> None:
    whole = run("fedavg", **TASK, rounds=3)
    watcher = Impatient()
    with pytest.raises(Cancelled):
        run("fedavg", **TASK, rounds=3, out=tmp_path / "run", watcher=watcher)
    record = run("fedavg", **TASK, rounds=3, out=tmp_path / "run", watcher=watcher)
    assert sorted(set(watcher.rounds)) == [1, 2, 3]
    assert record["accuracy"] == whole["accuracy"]
    table = record.to_pandas()
    assert list(table["round"]) == [1, 2, 3]
    assert np.array_equal(table["accuracy"], whole.to_pandas()["accuracy"])


def test_a_notebook_shows_results_and_no_markup_of_others() -> None:
    record = run("fedavg", **TASK, rounds=1)
    assert re.fullmatch(
        rf"<RunRecord \S+ on digits: finished, accuracy [\d.]+ %, guarantee none.*, '{record.folder}'>", str(record)
    )
    page = record._repr_html_()
    cell = '<td style="text-align:left">'
    assert f"{cell}{100 * record['accuracy']:.2f} %</td>" in page and f"{cell}none</td>" in page
    hostile = RunRecord(record.folder, "<script>", record.config, {**record.summary, "data": "<img>"})
    assert "<script>" not in hostile._repr_html_() and "<img>" not in hostile._repr_html_()


def test_progress_goes_to_stderr_if_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    run("fedavg", **TASK, rounds=1, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "round 1 of 1" in err


@pytest.mark.parametrize("track", ["mlflow", ("mlflow",), iter(["mlflow"])])
def test_a_tracker_may_be_one_name(track: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from fedstill import library

    asked = []
    monkeypatch.setattr(
        library, "followed", lambda names, out, watcher: (asked.append(tuple(names)), nullcontext(watcher))[1]
    )
    task = {"data": "digits", "clients": 2, "limit": 60, "workers": 0, "model": "convnet:width=4,depth=1"}
    run("real", **task, ipc=1, training={"epochs": 1}, track=track)
    assert asked == [("mlflow",)]


def test_another_method_takes_the_replies_of_a_run(tmp_path: Path) -> None:
    task = {**TASK, "public": "noise=40"}
    first = run("feddf", **task, local={"epochs": 1}, distillation={"epochs": 1}, out=tmp_path / "first")
    small = {"epochs": 1, "generation": {"steps": 1, "batch_size": 16, "ngf": 8}}
    for replies, out in ((first, None), (tmp_path / "first", tmp_path / "second")):
        second = run("dense", replies=replies, **small, out=out)
        assert second.config["method"]["local"]["epochs"] == 1 and second.config["answers"] == str(tmp_path / "first")
        assert second["bytes_up"] == first["bytes_up"]
    free = run("dense", replies=first, **small, workers=0, evaluate_every=2, out=tmp_path / "free")
    assert free["accuracy"] == second["accuracy"] and free.config["experiment"]["evaluate_every"] == 2
    with pytest.raises(ValueError, match="^workers is -1; it must be greater than or equal to 0$"):
        run("dense", replies=first, workers=-1)
    with pytest.raises(ValueError, match="the task is that of .*; leave clients out"):
        run("dense", replies=first, clients=3, workers=0)
    with pytest.raises(ValueError, match="do other work than those of"):
        run("dense", replies=first, local={"epochs": 2})
    with pytest.raises(ValueError, match="its replies suit feddf, dense"):
        run("fedgm", replies=first)
    with pytest.raises(ValueError, match="give the method's name in its place"):
        run(Job(Experiment(), "dense", tmp_path / "x"), replies=first)


def test_a_run_whose_replies_came_from_a_run_that_is_gone_still_asks_its_clients(tmp_path: Path) -> None:
    task = Experiment(**TASK, local_test=0.2)
    first, second = (Job(task, Real(ipc=1, training={"epochs": n}), tmp_path / str(n)) for n in (1, 2))
    run(first)
    reuse.prepare(second, [first.out])
    shutil.rmtree(first.out)
    assert run(second)["accuracy"] is not None  # the clients evaluate the model

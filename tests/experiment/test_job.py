"""What a person writes as a job, and code of their own."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Probe
from torch import nn

from fedstill import Experiment, FedAvg, Federation, FedGM, InputError, Job, run
from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.experiment.run import spec_of
from fedstill.experiment.task import share_out

TASK = Experiment(data="digits", limit=300, clients=2, model="convnet:width=8,depth=2", workers=0)
QUICK = ["--data", "digits", "--limit", "300", "--clients", "2", "--model", "convnet:width=8,depth=2"]
METHOD = '''
from torch import nn
from fedstill import Client, Federation, Method, Reply, step
from fedstill.protocol import State, state, load


class Update(Reply):
    """Weights."""

    weights: State


class Mine(Method):
    """The weights of the last client."""

    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        for reply in fed.ask(self.update, weights=state(model)):
            load(model, reply.weights)
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        return Update(weights=state(client.new_model(weights)))
'''
NET = """
from torch import nn


def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_job_takes_a_name_an_object_or_a_class_and_a_path_as_text() -> None:
    for method, out, name, made in [
        ("fedgm", "runs/x", "fedgm", FedGM()),
        (FedGM(ipc=2), Path("runs/x"), "fedgm", FedGM(ipc=2)),
        (FedGM, "runs/x", "fedgm", FedGM()),
        (Probe(rounds=3), "runs/x", "small:Probe", Probe(rounds=3)),
        ("small:Probe", "runs/x", "small:Probe", Probe()),
    ]:
        for job in (Job(TASK, method, out), Job(experiment=TASK, method=method, out=out), Job(TASK, method, out=out)):
            assert (job.name, job.method, job.out) == (name, made, Path("runs/x"))
    job = Job(TASK, Probe(), "x", name="tests/support/small.py:Probe", label="mine")
    assert (job.name, job.label) == ("tests/support/small.py:Probe", "mine")


def test_a_changed_copy_of_a_job_has_the_name_of_its_method() -> None:
    job = Job(TASK, Probe(), "x", name="small.py:Probe", label="mine")
    assert job.replace(out="z").out == Path("z") and job.replace(out="z").name == "small.py:Probe"
    for method in (FedAvg(rounds=2), FedAvg, "fedavg"):
        changed = job.replace(method=method)
        assert (changed.name, type(changed.method), changed.label) == ("fedavg", FedAvg, "mine")
    assert job.replace(method=Probe(rounds=9)).name == "small.py:Probe"
    assert job.replace(method=Probe(rounds=9), name="other.py:Probe").name == "other.py:Probe"


@pytest.mark.parametrize(
    ("arguments", "name", "sentence"),
    [
        ((TASK, Probe(), "x"), "nosuch", "there is no method 'nosuch'.*the object is small:Probe; label='nosuch'"),
        ((TASK, FedGM(), "x"), "fedagm", "there is no method 'fedagm'; did you mean fedgm?"),
        ((TASK, FedGM(), "x"), "fedavg", "the job is named 'fedavg', but its method is fedgm; leave the name out"),
        ((TASK, "fedgm", "x"), "fedavg", "the job is named 'fedavg', but its method is fedgm; leave the name out"),
        ((TASK, FedGM(), "x"), 3, "the method's name is 3; leave it out, or give a text"),
        ((TASK, "fedagv", "x"), "", "there is no method 'fedagv'; did you mean fedavg"),
        ((TASK, FedGM(), None), "", "the run's folder is None; give a path"),
        ((TASK, "fedgm", FedGM()), "", "the run's folder is FedGM.*; give a path"),
        ((TASK, 3, "x"), "", "the method is 3; give a method's name, class or object"),
        (("digits", "fedgm", "x"), "", "the experiment is 'digits'; give an Experiment"),
    ],
)
def test_a_wrong_job_is_refused_in_a_sentence(arguments: tuple[Any, ...], name: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Job(*arguments, name=name)


def test_only_jobs_are_run() -> None:
    with pytest.raises(ValueError, match="a method is a name, a class, an object or a Job, not Experiment"):
        run(TASK)  # type: ignore[arg-type]


def test_a_run_takes_a_folder_as_text(tmp_path: Path) -> None:
    summary = run(Job(TASK, FedAvg(rounds=1), str(tmp_path / "run")))
    assert summary["method"] == "fedavg"
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_working_folder_and_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command `fedstill`, which unlike ``python -m`` does not put the working folder on Python's path itself."""
    (tmp_path / "code").mkdir()
    (tmp_path / "mine_here.py").write_text(METHOD)
    (tmp_path / "code" / "mine_there.py").write_text(METHOD)
    (tmp_path / "code" / "net_there.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    main(["run", "mine_here:Mine", *QUICK, "--workers", "0", "--out", "a"])
    words = ["run", "code/mine_there.py:Mine", *QUICK, "--model", "./code/net_there.py:net", "--workers", "0"]
    main(words)
    folder = tmp_path / "runs"
    (made,) = folder.iterdir()
    assert made.name.startswith("mine_there.Mine-digits")
    assert json.loads((made / "summary.json").read_text())["method"] == "code/mine_there.py:Mine"


@pytest.mark.slow
def test_workers_find_a_file_s_code_too(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine_there.py").write_text(METHOD)
    (tmp_path / "code" / "net_there.py").write_text(NET)
    words = ["run", "code/mine_there.py:Mine", *QUICK, "--model", "code/net_there.py:net", "--workers", "2"]
    code = f"import sys; sys.path.remove(''); from fedstill.cli import main; main({words + ['--out', 'a']})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_a_method_of_a_notebook_runs_or_is_refused_in_a_sentence(workers: int | None, tmp_path: Path) -> None:
    """Code without a file, as a notebook's cell is for worker processes."""
    task = f"Experiment(data='digits', limit=300, clients=2, model='convnet:width=8,depth=2', workers={workers})"
    code = f"{METHOD}\nfrom fedstill import Experiment, Job, run\nprint(run(Job({task}, Mine(), 'x'))['method'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    if workers is None:
        assert (done.returncode, done.stdout) == (0, "__main__:Mine\n"), done.stderr
    else:
        assert "__main__:Mine or its model is defined where other processes cannot import it" in done.stderr
        assert "workers=0" in done.stderr.strip().splitlines()[-1]
        assert not (tmp_path / "x" / "config.json").exists()


@pytest.mark.slow
def test_a_method_of_a_script_runs_in_workers_and_its_model_is_loaded_later(tmp_path: Path) -> None:
    task = "Experiment(data='digits', limit=300, clients=2, model='convnet:width=8,depth=2', workers=2)"
    script = f"{METHOD}\nif __name__ == '__main__':\n    from fedstill import Experiment, Job, run\n"
    (tmp_path / "my_script.py").write_text(script + f"    print(run(Job({task}, Mine(), 'x'))['method'])\n")
    load = "from fedstill import load_model; print(load_model('x').shape)"
    for words, expected in ((["my_script.py"], "my_script.py:Mine\n"), (["-c", load], "(1, 8, 8)\n")):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_files_with_the_name_of_another_module_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    for place, sentence in (
        ("json.py:Mine", "Python has another module 'json'"),
        ("nowhere.py:Mine", "there is no file nowhere.py"),
    ):
        with pytest.raises(SystemExit):
            main(["run", place, *QUICK])
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no file nets.py.*name a function in a file"):
        _ = spec_of(Job(TASK.model_copy(update={"model": "nets.py:net"}), "fedavg", "x"), share_out(TASK, None)).facts


class NotFinite(FedAvg):
    """FedAvg that ends with NaN."""

    def server(self, fed: Federation) -> nn.Module:
        model = super().server(fed)
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        return model


class Half(FedAvg):
    """FedAvg that ends with half precision."""

    def server(self, fed: Federation) -> nn.Module:
        return super().server(fed).half()


class Nothing(FedAvg):
    """FedAvg that returns nothing."""

    def server(self, fed: Federation) -> Any:
        super().server(fed)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (NotFinite, "has values that are not finite in 'layers.0.weight', so the run has no result"),
        (Half, "has parameters of torch.float16; they must be torch.float32"),
        (Nothing, "returned NoneType; it must return the final model"),
    ],
)
def test_a_method_of_ones_own_that_ends_with_no_usable_model_gets_a_sentence(
    kind: type[FedAvg], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        run(Job(TASK, kind(rounds=1), tmp_path))
    assert not (tmp_path / "summary.json").exists()


def _spoilt(data: DataSet, **changes: Any) -> DataSet:
    return replace(data, train=replace(data.train, **changes))


def test_records_of_ones_own_that_do_not_fit_get_a_sentence(digits: DataSet, tmp_path: Path) -> None:
    train, test = digits.train, digits.test
    wrong = {
        "training images are torch.float32 (": _spoilt(digits, images=train.images.float()),
        "training labels are torch.float32 (": _spoilt(digits, labels=train.labels.float()),
        "training images and ": _spoilt(digits, labels=train.labels[:-1]),
        "training labels go from 1 to 10; with 10 classes": _spoilt(digits, labels=train.labels + 1),
        "training labels go from -1 to 8": _spoilt(digits, labels=train.labels - 1),
        "there are 0 test images and 0 labels": replace(digits, test=test[:0]),
        "training images have shape (1, 8, 8), test images (1, 9, 9)": replace(
            digits, test=replace(test, images=torch.zeros(len(test), 1, 9, 9, dtype=torch.uint8))
        ),
        "test labels are ndarray": replace(digits, test=replace(test, labels=test.labels.numpy())),
    }
    for told, data in wrong.items():
        with pytest.raises(ValueError, match=re.escape(told)):
            run(Job(TASK, "fedavg", tmp_path / "run"), data=data)
        assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_given_out_for_other_data(digits: DataSet, tmp_path: Path) -> None:
    summary = run(Job(TASK, FedAvg(rounds=1), tmp_path), data=digits).summary
    assert run(Job(TASK, FedAvg(rounds=1), tmp_path), data=digits).summary == summary
    with pytest.raises(ValueError, match="was begun with fingerprint"):
        run(Job(TASK, FedAvg(rounds=1), tmp_path), data=replace(digits, fingerprint="0" * 64))

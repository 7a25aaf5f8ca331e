"""A run that was interrupted goes on with the data and the version that it was begun with, or not at all."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from rich.console import Console

from fedstill.base.records import Records
from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment.config import Experiment
from fedstill.experiment.progress import watch
from fedstill.experiment.run import Job, run
from fedstill.methods import find


class Stopped(Exception):
    pass


class Stopper(Watcher):
    """Ends the run in a round, before it is saved."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def logged(self, round: int, *args: Any) -> None:
        if round == self.number:
            raise Stopped


def job(out: Path) -> Job:
    task = Experiment(data="digits", clients=2, model=small.MODEL, workers=0)
    return Job(task, find("fedavg")(rounds=2, local={"lr": 0.05, "epochs": 1}), out)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of an interrupted run."""
    with pytest.raises(Stopped):
        run(job(tmp_path / "run"), watcher=Stopper())
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "what"), [("fingerprint", "the data"), ("version", "fedstill")])
def test_a_run_does_not_go_on_after_a_change(name: str, what: str, begun: Path) -> None:
    place = begun / "config.json"
    content = json.loads(place.read_text())
    place.write_text(json.dumps({**content, name: "another"}))
    with pytest.raises(ValueError, match=f"was begun with {name} another, now it is .*: {what} changed since"):
        run(job(begun))
    assert json.loads(place.read_text())[name] == "another"
    place.write_text(json.dumps(content))
    assert run(job(begun))["rounds"] == 2


def test_other_images_are_noticed(begun: Path, digits: DataSet) -> None:
    inverted = digits.train.images.bitwise_not()
    train = Records(inverted, digits.train.labels, digits.train.num_classes, digits.train.normalisation)
    other = replace(digits, train=train, fingerprint="0" * 64)
    with pytest.raises(ValueError, match="the data changed since"):
        run(job(begun), data=other)


def test_another_public_file_is_noticed(tmp_path: Path, digits: DataSet) -> None:
    def write(name: str, level: int) -> Path:
        images = np.full((40, 8, 8), level, dtype=np.uint8)
        images[:, 0, 0] = range(40)
        place: Path = tmp_path / name
        np.savez(place, x_train=images, y_train=np.arange(40) % 2, x_test=images[:4], y_test=np.arange(4) % 2)
        return place

    place = write("public.npz", 7)
    task = Experiment(
        data="digits", limit=200, clients=2, model=small.MODEL, workers=0, public=f"{place}:unlabeled", delta=1e-6
    )
    whole = Job(task, find("feddf")(distillation={"epochs": 1}, local={"lr": 0.05, "epochs": 1}), tmp_path / "run")
    summary = run(whole)
    assert run(whole) == summary
    write("public.npz", 8)
    with pytest.raises(ValueError, match="was begun with public_fingerprint .*: the public data changed since"):
        run(whole)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="the public data changed since"):
        run(whole)
    write("public.npz", 7)
    assert run(whole)["accuracy"] == summary["accuracy"]


def test_a_run_with_fewer_replies_than_are_needed_now_is_refused(tmp_path: Path) -> None:
    """Neither a finished run nor the finished rounds of an interrupted one answer for a stricter --min-clients."""

    def job(least: int, out: str = "run") -> Job:
        task = Experiment(
            data="digits", limit=200, clients=5, model=small.MODEL, workers=0, drop=0.4, min_clients=least
        )
        return Job(task, find("fedavg")(rounds=3, local={"lr": 0.05, "epochs": 1}), tmp_path / out)

    summary = run(job(1))
    lost = [sum(refusal["round"] == number for refusal in summary["refused"]) for number in (1, 2, 3)]
    assert lost[0] > 0, "the seed loses nobody in the first round"
    assert run(job(5 - max(lost))) == summary
    with pytest.raises(ValueError, match=rf"of {5 - lost[0]} of 5 clients to a request, but 5 are needed now"):
        run(job(5))
    with pytest.raises(Stopped):
        run(job(1, "begun"), watcher=Stopper(2))
    with pytest.raises(ValueError, match=rf"of {5 - lost[0]} of 5 clients to a request, but 5 are needed now"):
        run(job(5, "begun"))
    assert run(job(1, "begun"))["accuracy"] == summary["accuracy"]


def test_a_quiet_run_still_says_that_its_environment_changed(begun: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = begun / "environment.jsonl"
    line = json.loads(place.read_text().splitlines()[0])
    place.write_text(json.dumps({**line, "torch": "0.1"}) + "\n")
    with watch(Console(), "fedavg", quiet=True) as watcher:
        run(job(begun), watcher=watcher)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("resuming in another environment")


def test_fields_that_nothing_protects_are_named_in_the_order_in_which_they_were_asked_for(tmp_path: Path) -> None:
    def judged(out: Path) -> Job:
        task = Experiment(data="digits", clients=2, model=small.MODEL, workers=0, local_test=0.2)
        return Job(task, find("fedavg")(rounds=2, local={"lr": 0.05, "epochs": 1}), out)

    whole = run(judged(tmp_path / "whole"))
    assert "of step 'update' and field 'confusion' of step 'judge'" in whole["guarantee"]["reason"]
    with pytest.raises(Stopped):
        run(judged(tmp_path / "run"), watcher=Stopper(2))
    assert run(judged(tmp_path / "run"))["guarantee"] == whole["guarantee"]


def test_what_clients_keep_is_deleted_when_a_finished_run_is_repeated(tmp_path: Path) -> None:
    """A process that was killed between the summary and this deletion left it for good."""
    task = Experiment(data="digits", limit=60, clients=2, model="convnet:width=4,depth=1", workers=0)
    job = Job(task, find("scaffold")(rounds=1), tmp_path / "run")
    before = run(job)
    kept = tmp_path / "run" / "clients" / "0" / "update.state"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x")
    assert run(job) == before and not (tmp_path / "run" / "clients").exists()


def test_the_command_line_says_a_note_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", "--data", "digits", "--limit", "200", "--clients", "2", "--rounds", "1", "--workers", "0"]
    words += ["--model", "linear", "--out", str(tmp_path / "run")]
    main(words)
    (tmp_path / "run" / "summary.json").unlink()
    place = tmp_path / "run" / "environment.jsonl"
    (line,) = map(json.loads, place.read_text().splitlines())
    place.write_text(json.dumps({**line, "torch": "0.1"}) + "\n")
    capsys.readouterr()
    main(words)
    told = capsys.readouterr()
    assert " ".join((told.out + told.err).split()).count("resuming in another environment") == 1


def personal(out: Path) -> Job:
    task = Experiment(data="digits", clients=2, model=small.MODEL, workers=0, local_test=0.2)
    return Job(task, find("fedrep")(rounds=3), out)


@pytest.mark.parametrize("gone", ["clients", "clients/00001", "newest state"])
def test_a_run_does_not_go_on_without_what_its_clients_kept(gone: str, tmp_path: Path) -> None:
    """Their own heads began anew without a word, and the run had another model."""
    with pytest.raises(Stopped):
        run(personal(tmp_path / "run"), watcher=Stopper(2))
    whole = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    if gone == "newest state":
        sorted((tmp_path / "run" / "clients" / "00001").glob("*.state"))[-1].unlink()
    else:
        shutil.rmtree(tmp_path / "run" / gone)
    with pytest.raises((ValueError, TooFewReplies), match="has no state from before request . any more; delete .*run"):
        run(personal(tmp_path / "run"))
    assert run(personal(whole))["rounds"] == 3
    assert not (whole / "clients").exists() and not (whole / "journal" / "newest").exists()

"""A run that was interrupted goes on with the data and the version that it was begun with, or not at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small

from fedstill.data.sources import DataSet
from fedstill.engines.transport import Watcher
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import Job, run
from fedstill.methods import find
from fedstill.records import Records


class Stopped(Exception):
    pass


class Stopper(Watcher):
    """Ends the run after its first round."""

    def logged(self, *args: Any) -> None:
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

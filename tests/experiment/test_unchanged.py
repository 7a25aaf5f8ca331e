"""Whoever computes with a finished run again notices that its data, public data or code have changed since."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill import load_model
from fedstill.attacks.membership import Membership, membership
from fedstill.attacks.uploads import Uploads, uploads
from fedstill.base.lookup import source_digests
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import leave_out, read_job
from fedstill.experiment.run import run
from fedstill.methods import find
from fedstill.report.publish import publish

NET = """from torch import nn

def net(shape, num_classes):
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


def write(file: Path, text: str) -> None:
    """Change a file before a new process imports it."""
    file.write_text(text)
    source_digests.cache_clear()


def finished(folder: Path, model: str = "linear") -> Path:
    task = Experiment(data="digits", limit=120, clients=2, model=model, workers=0, public="digits")
    run(Job(task, find("fedavg")(rounds=1), folder))
    return folder


ATTACKS: dict[str, Callable[[Path], object]] = {
    "uploads": lambda folder: uploads(folder, Uploads()),
    "membership": lambda folder: membership(folder, Membership(shadows=4)),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("fact", "words"), [("fingerprint", "the data"), ("public_fingerprint", "the public data")])
def test_an_attack_on_other_records_is_refused(attack: str, fact: str, words: str, tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    assert config[fact]
    (folder / "config.json").write_text(json.dumps({**config, fact: "another"}))
    with pytest.raises(ValueError, match=f"was begun with {fact} another, now it is .*: {words} changed since"):
        ATTACKS[attack](folder)
    assert not (folder / "attack").exists()


WORK: dict[str, Callable[[Path], object]] = {
    **ATTACKS,
    "publish": lambda folder: publish(folder, folder / "published"),
    "without": lambda folder: leave_out(folder, 0, read_job(folder, folder.with_name("without"), "")),
}


@pytest.mark.parametrize("work", WORK)
def test_a_changed_network_of_the_users_own_is_refused(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(f"net_for_{work}.py")  # a name that no other test has imported
    write(file, NET)
    folder = finished(tmp_path / "run", f"{file}:net")
    write(file, NET.replace("ReLU", "Tanh"))
    with pytest.raises(ValueError, match=f"the code of {file}:net has changed since .* bring the former back"):
        WORK[work](folder)
    assert not (folder / "published").exists() and not folder.with_name("without").exists()
    write(file, NET)
    publish(folder, folder / "published")


def test_a_model_of_changed_code_is_loaded_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The change may be one of its comments."""
    monkeypatch.chdir(tmp_path)
    file = Path("net_with_remark.py")
    write(file, NET)
    folder = finished(tmp_path / "run", f"{file}:net")
    with caplog.at_level(logging.WARNING, "fedstill"):
        load_model(folder)
        assert not caplog.messages
        write(file, NET + "# a remark\n")
        load_model(folder)
    assert caplog.messages == [f"the code of {file}:net has changed since {folder}; the model may compute otherwise"]

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from method_settings import SMALL

from fedstill import load_model
from fedstill.data.sources import DataSet
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.methods import find

TASK = {"data": "digits", "clients": 2, "model": "convnet:width=4,depth=2", "workers": 0, "public": "noise=50"}
HEADS = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 1, "local": {"lr": 0.05}},
    "fedavg-p": HEADS,
    "fedauxfdp": {**HEADS, "distillation": {"epochs": 1}, "privacy": "published"},
    "fedaux": {**HEADS, "rounds": 1, "distillation": {"epochs": 1}},
}


def made(out: Path, name: str = "fedavg", **changes: Any) -> dict[str, Any]:
    return run(Job(Experiment(**{**TASK, **changes}), find(name)(**SETTINGS.get(name, SMALL[name])), out, name=name))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_that_was_judged_comes_back(name: str, digits: DataSet, tmp_path: Path) -> None:
    summary = made(tmp_path, name)
    model, test = load_model(tmp_path), digits.test
    with torch.no_grad():
        said = model(test.images)
        assert torch.allclose(model(test.images.float() / 255), said, atol=1e-5)
        assert torch.allclose(model(test.images.double() / 255), said, atol=1e-5)  # as NumPy has them
    assert float((said.argmax(1) == test.labels).float().mean()) == pytest.approx(summary["accuracy"], abs=1e-6)
    assert model.class_names == tuple("0123456789")
    assert model.shape == test.shape
    assert not model.training


def test_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made(tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ValueError, match=r"images have shape \(2, 3, 8, 8\); this model takes \(n, 1, 8, 8\)"):
        model(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match="images are torch.int64; they must be uint8, or floats in"):
        model(torch.zeros(2, 1, 8, 8, dtype=torch.int64))
    for wrong in (255.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"images have values from .* floats must be in \[0, 1\]"):
            model(torch.full((2, 1, 8, 8), wrong))
    assert len(model(torch.zeros(0, 1, 8, 8))) == 0
    array: Any = [[0]]
    with pytest.raises(ValueError, match="images are list; they must be a tensor"):
        model(array)


@pytest.mark.slow
def test_a_model_of_each_client_s_own_is_not_there_for_all(tmp_path: Path) -> None:
    made(tmp_path, "fedrep", local_test=0.2)
    with pytest.raises(ValueError, match="fedrep gives every client its own model .*; there is no model for all"):
        load_model(tmp_path)


def test_an_unfinished_or_damaged_run_says_so_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the folder of a run"):
        load_model(tmp_path)
    made(tmp_path)
    place = tmp_path / "model.safetensors"
    whole = place.read_bytes()
    other = tmp_path / "other"
    made(other, model="convnet:width=5,depth=2")
    header, tensors = (b'\\"shape\\":[1,8,8]', b'\\"shape\\":[3,8,8]'), (other / "model.safetensors").read_bytes()
    assert header[0] in whole
    wrong = (whole[:-1], whole[:100], b"", tensors.replace(b"width=5", b"width=4"), whole.replace(*header), None)
    for content in wrong:
        place.unlink()
        if content is not None:
            place.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            load_model(tmp_path)
        assert str(place) in str(caught.value)
        assert "\n" not in str(caught.value)
        place.write_bytes(b"")
    place.write_bytes(whole)
    assert load_model(tmp_path).shape == (1, 8, 8)


@pytest.mark.parametrize("change", [{"name": "fedtomorrow"}, {"tomorrow": 1}])
def test_a_method_of_a_newer_version_names_that_version(change: dict[str, Any], tmp_path: Path) -> None:
    made(tmp_path)
    place = tmp_path / "config.json"
    config = json.loads(place.read_text())
    config["method"] |= change
    place.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no method 'fedtomorrow'|tomorrow is not a setting") as told:
        load_model(tmp_path)
    assert "written by" not in str(told.value)
    place.write_text(json.dumps({**config, "version": "1.1.0"}))
    with pytest.raises(ValueError, match=r"was written by fedstill 1.1.0, .*tomorrow.*; install fedstill 1.1.0 or"):
        load_model(tmp_path)

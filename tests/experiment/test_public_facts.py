"""Facts of the task that come from private records end the guarantee, unless they are stated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill import Experiment, Job, methods, run
from fedstill.data import sources
from fedstill.experiment.task import share_out
from fedstill.privacy import guarantee


def write(place: Path, white: bool = False) -> Path:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 200, (120, 8, 8), dtype=np.uint8)
    if white:
        images[0] = 255
    labels = np.arange(120) % 3
    np.savez(place, x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    return place


def result(place: Path, out: Path, **facts: Any) -> dict[str, Any]:
    method = methods.find("fedavg-p")(extractor={"pretrain": "none"}, space={"dims": 4})
    task = {"model": "convnet:width=4,depth=1", "clients": 2, "workers": 0, "public": "noise=40", **facts}
    return run(Job(Experiment(data=str(place), **task), "fedavg-p", method, out))


def test_a_normalisation_from_private_pixels_ends_the_guarantee(tmp_path: Path) -> None:
    plain, white = write(tmp_path / "plain.npz"), write(tmp_path / "white.npz", white=True)
    assert sources.load(str(plain)).measured == ("normalisation", "number of classes")
    found = result(plain, tmp_path / "1")["guarantee"]
    assert not found["holds"] and found["epsilon"] is None
    assert "the normalisation and the number of classes of the task came from the records" in found["reason"]
    stated = {"mean": (0.5,), "std": (0.25,), "num_classes": 4}
    assert result(plain, tmp_path / "2", **stated)["guarantee"]["holds"]
    # the public set-up of neighbouring data sets: equal where it is stated, else not
    specs = [
        [share_out(Experiment(data=str(place), clients=2, **facts), None).train for place in (plain, white)]
        for facts in (stated, {})
    ]
    assert specs[0][0].normalisation == specs[0][1].normalisation and specs[0][0].num_classes == 4
    assert specs[1][0].normalisation != specs[1][1].normalisation


@pytest.mark.slow
def test_stated_facts_reach_every_worker(tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    stated = {"mean": (0.1,), "std": (0.7,)}
    one = result(place, tmp_path / "1", **stated)
    two = result(place, tmp_path / "2", **stated, workers=1)
    assert one["accuracy"] == two["accuracy"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "12"]
    assert weights[0] == weights[1] and b'mean\\":[0.1]' in weights[0]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"mean": (0.5,)}, "--mean has 1 numbers and --std 0, but images have 1 channels; give both"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, "--mean has 2 numbers and --std 2"),
        ({"num_classes": 2}, "--num-classes is 2, but the labels go up to 2; take 3"),
    ],
)
def test_facts_that_do_not_fit_are_refused(facts: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        result(write(tmp_path / "data.npz"), tmp_path / "run", **facts)


def test_known_data_have_known_facts_and_labels_public_images() -> None:
    digits = sources.load("digits")
    assert digits.measured == ()
    pixels = digits.train.pixels().double()
    assert digits.train.normalisation.mean[0] == pytest.approx(float(pixels.mean()), abs=1e-6)
    assert digits.train.normalisation.std[0] == pytest.approx(float(pixels.std(correction=0)), abs=1e-6)
    assert torch.equal(digits.train.labels.unique(), torch.arange(10))
    held = guarantee.Guarantee(True, "label", "a", 1.0, 0.0, "b", "c", "d", False)
    assert guarantee.beside(held, ["normalisation"]) == held
    assert not guarantee.beside(held, ["number of classes"]).holds
    assert "protects the 60 records that --public held=60 took" in guarantee.beside(held, [], 60).reason

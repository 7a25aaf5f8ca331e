"""Runs on vectors: tables, and features of a public backbone."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_backbones
import torch
from method_settings import SMALL

from fedstill import DataSet, Experiment, Job, load_model, methods, run
from fedstill.base.records import Records
from fedstill.cli import parser
from fedstill.data import features, from_torch
from fedstill.data.places import Reading
from fedstill.experiment.task import client_data, share_out
from fedstill.protocol import returns_run_model

MODEL = "mlp:hidden=16,layers=1"
ONLY_IMAGES = (
    "co-boosting dense fafi fed-adi fed-dafl fedcvae fedgm-labels fedgm-records fedrd fedrd-records fedsd2c".split()
)
FAST = ("fedavg", "afl", "fedgm")


@pytest.fixture(scope="module")
def table() -> DataSet:
    """Two Gaussian classes in 6 columns of very different scales."""
    rng = np.random.default_rng(0)
    labels = np.arange(360) % 2
    values = (rng.normal(size=(360, 6)) + labels[:, None]) * 10.0 ** np.arange(-2, 4) + 5
    return from_torch((torch.from_numpy(values), torch.from_numpy(labels)), class_names=("a", "b"))


def finished(
    name: str, data: DataSet, out: Path, settings: dict[str, Any] | None = None, **facts: Any
) -> dict[str, Any]:
    kind = methods.find(name)
    if kind.personal:
        facts["local_test"] = 0.2
    if name in ("adap-dp-fl", "fedkadp"):
        facts["budget"] = 5.0
    task = {"data": "own", "model": MODEL, "clients": 3, "workers": 0, "public": "held=60", **facts}
    return run(Job(Experiment(**task), kind(**(SMALL[name] if settings is None else settings)), out), data=data)


@pytest.mark.parametrize("name", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in SMALL])
def test_every_method_runs_on_vectors_or_says_that_it_makes_images(name, table, tmp_path):
    if name in ONLY_IMAGES:
        with pytest.raises(ValueError, match=f"{name} makes images, but the records are vectors of 6 numbers; choose"):
            finished(name, table, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return
    summary = finished(name, table, tmp_path / "run")
    kind = methods.find(name)
    assert kind.personal or summary["guarantee"]["holds"] == (kind.protects in ("record", "client"))
    if not kind.personal and (returns_run_model(kind) or name == "afl"):
        assert load_model(tmp_path / "run")(table.test.images[:5]).shape == (5, 2)


@pytest.mark.slow
def test_distilled_vectors_train_a_good_model_and_cost_four_or_two_bytes_a_number(table, tmp_path):
    settings = {"ipc": 5, "matching": {"nets": 40}, "training": {"epochs": 60}}
    facts = {"clients": 2, "partition": "classes:1"}
    whole = finished("fedgm", table, tmp_path / "whole", settings, **facts)
    half = finished("fedgm", table, tmp_path / "half", {**settings, "vectors": "float16"}, **facts)
    assert whole["bytes_up"] - half["bytes_up"] == 2 * 10 * 6
    assert min(whole["accuracy"], half["accuracy"]) > 0.75  # the best possible is 0.89, chance is 0.5
    assert not (tmp_path / "whole/images").exists()


def test_a_private_scale_is_refused_where_privacy_is_claimed(table, tmp_path):
    with pytest.raises(ValueError, match="afl protects records, but the columns would be scaled .* --mean and --std"):
        finished("afl", table, tmp_path / "noise", public="noise=200")
    one = {**SMALL["fedpft"], "epsilon": 1.0, "mixture": {"components": 1, "covariance": "full"}}
    with pytest.raises(ValueError, match="fedpft protects records, but the columns would be scaled"):
        finished("fedpft", table, tmp_path / "one", one, public="noise=200")
    finished("afl", table, tmp_path / "none", {**SMALL["afl"], "epsilon": None}, public="noise=200")
    given = {"mean": (5.5,) * 6, "std": tuple(10.0**k for k in range(-2, 4))}
    summary = finished("afl", table, tmp_path / "given", public="noise=200", **given)
    assert summary["guarantee"]["holds"]
    assert not finished("fedavg", table, tmp_path / "fedavg", public=None)["guarantee"]["holds"]


def test_a_network_of_images_is_refused_for_vectors(table, tmp_path):
    with pytest.raises(
        ValueError, match="'convnet' takes images, but the records are vectors of 6 numbers; choose linear"
    ):
        finished("fedavg", table, tmp_path / "run", model="convnet")


@pytest.mark.parametrize(
    ("method", "model", "sentence"),
    [
        ("fedavg", "convnet:width=8", "'convnet:width=8' takes images, but --features scattering makes vectors"),
        ("dense", "linear", "dense makes images, but --features scattering makes vectors; choose a method"),
    ],
)
def test_features_that_do_not_fit_are_refused_before_they_are_computed(method, model, sentence, tmp_path, monkeypatch):

    monkeypatch.setattr(features, "load", lambda *args, **more: pytest.fail("the features were computed"))
    task = Experiment(data="digits", features="scattering", model=model, clients=2)
    with pytest.raises(ValueError, match=sentence):
        run(Job(task, methods.find(method)(), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_model_on_features_is_linear_unless_another_is_named():
    assert Experiment(features="scattering").model == "linear"
    assert Experiment(features="scattering", model="mlp").model == "mlp"
    assert Experiment(features=None).model == Experiment().model == "convnet"
    typed = parser.changed(Experiment(data="digits"), {"features": "scattering"})
    assert (typed.model, typed.data) == ("linear", "digits")
    assert parser.changed(typed, {"model": "mlp"}).model == "mlp"


def test_image_augmentations_are_refused_for_vectors(table, tmp_path):
    with pytest.raises(Exception, match="the augmentation 'crop' is for images"):
        finished("feddf", table, tmp_path / "run", {**SMALL["feddf"], "local_view": "crop"})


# Features ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_features_gives_a_model_from_image_to_logits(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    task = {"data": "digits", "features": "scattering", "model": "linear", "clients": 2, "limit": 300}
    settings = {"rounds": 3, "local": {"lr": 0.02}}
    summary = run(Job(Experiment(**task, workers=0), methods.find("fedavg")(**settings), tmp_path / "run"))
    assert summary["accuracy"] > 0.5
    model = load_model(tmp_path / "run")
    right = model(digits.test.images).argmax(1) == digits.test.labels
    assert float(right.double().mean()) == pytest.approx(summary["accuracy"])
    with pytest.raises(ValueError, match=r"images are torch.float32 of shape \(2, 1, 8, 8\); a backbone takes uint8"):
        model(torch.zeros(2, 1, 8, 8))
    with pytest.raises(ValueError, match=r"images have shape \(n, 1, 16, 16\); this model takes \(n, 1, 8, 8\)"):
        load_model(tmp_path / "run")(torch.zeros(2, 1, 16, 16, dtype=torch.uint8))


def test_progress_tells_of_the_public_records_features(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    some = digits.train[:60]
    images = {"x_train": some.images[:50, 0], "x_test": some.images[50:, 0]}
    np.savez(tmp_path / "some.npz", y_train=some.labels[:50], y_test=some.labels[50:], **images)
    public = f"{tmp_path}/some.npz:unlabeled"
    told = [("features of public train records", 50, 50), ("features of public test records", 10, 10)]
    for scale in ({}, {"mean": (0.0,), "std": (1.0,)}):  # of the public records, and a stated one
        monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / f"cache{len(scale)}"))
        experiment, seen = Experiment(data="digits", features="scattering", public=public, **scale), []
        task = share_out(experiment, digits, progress=lambda *one, seen=seen: seen.append(one))
        client_data(experiment, task, lambda *one, seen=seen: seen.append(one))
        assert seen[-2:] == told


@pytest.mark.slow
def test_features_are_computed_once_and_again_for_another_backbone(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    calls, seen, original = [], [], features.rows_of
    monkeypatch.setattr(features, "rows_of", lambda *args, **more: (calls.append(1), original(*args, **more))[1])
    for _ in range(2):
        share_out(
            Experiment(data="digits", features="scattering"),
            digits,
            progress=lambda label, done, total: seen.append((label, done, total)),
        )
    assert len(calls) == 2 and seen[-1] == ("features of test records", 359, 359)
    one, backbone = features.load(digits, "scattering")
    narrow = Records(one.train.images[:9, :7], one.train.labels[:9], 10, one.train.normalisation)
    with pytest.raises(
        ValueError, match="records 'digits' have 324 numbers, but those of the task have 7; take images"
    ):
        features.load_public("digits", ("scattering", backbone.digest), narrow)
    with pytest.raises(ValueError, match="those of the public records 'noise=4' are 3 x 64 x 64; take images of the"):
        features.load_public("noise=4", ("scattering", backbone.digest), narrow)
    other, _ = features.load(digits, "scattering:angles=4,groups=0")
    assert len(calls) == 4 and one.fingerprint != other.fingerprint
    assert torch.equal(one.train.labels, digits.train.labels) and one.measured == digits.measured


def test_public_images_of_a_known_set_get_the_size_of_the_tasks_images(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    monkeypatch.setattr(features, "rows_of", lambda backbone, images, **_: images[:, 0].flatten(1).numpy() / 255.0)
    digits, backbone = features.load("digits", "scattering", reading=Reading(16))
    public = features.load_public("digits:unlabeled", ("scattering", backbone.digest), digits.train, size=16)
    assert public.images.shape == (1797, 16 * 16) and public.num_classes == 1
    assert torch.equal(public.images[: len(digits.train)], digits.train.images)


@pytest.mark.slow
def test_private_heads_take_features_and_the_backbone_does_not_travel(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    task = {"data": "digits", "features": "patches:centroids=64,public=noise=60", "model": "linear", "clients": 2}
    few = Experiment(**task, limit=300, public="held=60", workers=0)
    heads = methods.find("fedavg-p")(epsilon=8.0, extractor={"pretrain": "none"}, space={"dims": 16})
    summary = run(Job(few, heads, tmp_path / "heads"))
    assert summary["guarantee"]["holds"] and summary["accuracy"] > 0.3
    assert "nothing protects the 60 records" in summary["guarantee"]["reason"]
    sent = run(Job(few, methods.find("fedavg")(rounds=1), tmp_path / "fedavg"))["bytes_down_per_client"]
    weights = 4 * 10 * (4 * 64 + 1)
    assert weights < sent < weights + 1000  # the backbone would be 14 kB more


@pytest.mark.slow
def test_texts_become_vectors_at_simulated_clients(tmp_path):
    pytest.importorskip("transformers")
    encoder = tiny_backbones.save_texts(tmp_path / "encoder")
    texts, labels = tiny_backbones.reviews(400)
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "reviews.parquet")
    task = {"data": str(tmp_path / "reviews.parquet"), "features": f"hf:{encoder}", "model": "linear", "clients": 2}
    summary = run(
        Job(
            Experiment(**task, partition="classes:1", public="held=100", num_classes=2, workers=0),
            methods.find("fedcgs")(epsilon=4.0),
            tmp_path / "run",
        )
    )
    assert summary["accuracy"] > 0.75 and summary["guarantee"]["holds"]
    logits = load_model(tmp_path / "run")(texts)
    assert float((logits.argmax(1) == torch.tensor(labels)).double().mean()) > 0.75
    with pytest.raises(ValueError, match="turn them into vectors with --features"):
        share_out(Experiment(data=task["data"]), None)
    with pytest.raises(ValueError, match="takes texts, but the records are images"):
        share_out(Experiment(data="digits", features=task["features"]), None)

"""``fedstill attack RUN uploads`` on small runs of every shape of upload."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from fedstill.attacks import uploads as attack
from fedstill.attacks.uploads import Uploads, uploads
from fedstill.base.weights import parameters
from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run, spec_of
from fedstill.experiment.task import share_out
from fedstill.methods import find
from fedstill.protocol import Labels, Reply, client_steps

QUICK = Uploads(inversion={"steps": 20}, judge={"lr": 0.05, "epochs": 25})  # type: ignore[arg-type]


def finished(folder: Path, name: str, partition: str = "classes:3", **settings: Any) -> Path:
    task = Experiment(data="digits", clients=4, partition=partition, workers=0, model="convnet:width=16,depth=2")
    run(Job(task, find(name)(**settings), folder, name=name))
    return folder


def test_labels_in_clear_give_all_classes_away(tmp_path: Path) -> None:
    found = uploads(finished(tmp_path, "real", ipc=30, training={"epochs": 2}), QUICK)
    assert [line["held_accuracy"] for line in found["labels"]] == [1.0] * 4
    assert {line["from"] for line in found["labels"]} == {"labels"}
    nearer = [line["nearer"] for line in found["images"]]  # real records, sent as they are
    assert sum(share["value"] for share in nearer) / 4 > 0.55, nearer
    assert any(share["low"] > 0.5 for share in nearer)
    assert sum(line["recognised"]["value"] for line in found["images"]) / 4 > 0.5
    assert json.loads((tmp_path / "attack" / "uploads.json").read_text()) == found


def test_a_model_gives_away_the_classes_of_a_client_that_has_few(tmp_path: Path) -> None:
    found = uploads(finished(tmp_path, "fedavg", rounds=1, local={"lr": 0.05, "epochs": 3}), QUICK)
    assert {line["from"] for line in found["labels"]} == {"the last layer"}
    assert sum(line["held_accuracy"] for line in found["labels"]) / 4 > 0.9
    assert all(line["distance"] < line["uniform_distance"] / 2 for line in found["labels"])
    assert found["images"] == []
    assert 5 < found["inversion"]["training"] < 30


def test_an_update_under_a_field_of_its_own_is_read_the_right_way_round(tmp_path: Path) -> None:
    found = uploads(finished(tmp_path, "fednova", rounds=1, local={"lr": 0.05, "epochs": 3}), QUICK)
    assert sum(line["held_accuracy"] for line in found["labels"]) / 4 > 0.9


def test_a_change_of_the_model_is_read_as_one(tmp_path: Path) -> None:
    """Against the model that it was added to, a small change would say nothing."""
    task = Experiment(data="digits", clients=4, model="convnet:width=8,depth=2")
    method = find("ldp-fedavg")()
    spec = spec_of(Job(task, method, tmp_path), share_out(task, None))
    change = {name: torch.zeros_like(value) for name, value in parameters(spec.new_model()).items()}
    change["classifier.bias"][3] = 1e-9
    (step,) = client_steps(type(method)).values()
    shares, source = attack.shares_of(attack.SeenReply(0, step.reply.schema, {"update": change}), spec)
    assert shares is not None and shares.argmax() == 3 and shares[3] == 1 and source == "the last layer"


class Pictures(Reply):
    """Images under names that no method uses."""

    tags: Labels
    pictures: UInt8[Tensor, "n channels height width"]


class Maps(Reply):
    """No images, although the name and the shape are those of some."""

    labels: Labels
    values: Float32[Tensor, "n 1 height width"]


@pytest.mark.parametrize(("kind", "images"), [(Pictures, True), (Maps, False)])
def test_declared_types_and_not_names_say_what_a_field_holds(kind: type[Reply], images: bool, digits: DataSet) -> None:
    part = digits.train[:3]
    pixels = part.images if images else part.inputs()
    values = dict(zip((f.name for f in kind.schema), (part.labels.to(torch.uint8), pixels), strict=True))
    reply = attack.SeenReply(0, kind.schema, values)
    assert reply.labels is not None and torch.equal(reply.labels, part.labels)
    assert (reply.images is not None) is images


def test_sums_give_the_classes_away_unless_they_are_private(tmp_path: Path) -> None:
    features: dict[str, Any] = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}}
    task = Experiment(data="digits", clients=4, partition="classes:3", workers=0, model="convnet:width=8,depth=2",
                      public="noise=64", limit=400)  # fmt: skip
    seen = {}
    for epsilon in (None, 0.1):
        folder = tmp_path / str(epsilon)
        run(Job(task, find("afl")(epsilon=epsilon, **features), folder))
        seen[epsilon] = uploads(folder, QUICK)["labels"]
        assert {line["from"] for line in seen[epsilon]} == {"the sums"}
    assert all(line["held_accuracy"] == 1.0 and line["distance"] < 1e-5 for line in seen[None])
    assert sum(line["distance"] for line in seen[0.1]) / 4 > 0.5


def test_counts_are_read_where_they_are_sent(tmp_path: Path) -> None:
    quick: dict[str, dict[str, Any]] = {
        "fedcvae": {"images": 20, "local": {"epochs": 1}, "training": {"epochs": 1}},
        "fedpft": {"extractor": {"pretrain": "none"}},
    }
    for name, source in (("fedcvae", "the counts"), ("fedpft", "labels")):
        task = Experiment(data="digits", clients=4, partition="dirichlet:0.5", workers=0, limit=400, public="noise=64",
                          model="convnet:width=8,depth=2")  # fmt: skip
        folder = tmp_path / name
        run(Job(task, find(name)(**quick[name]), folder, name=name))
        found = uploads(folder, QUICK)["labels"]
        assert {line["from"] for line in found} == {source}
        assert all(line["distance"] < 1e-5 and line["uniform_distance"] > 0.1 for line in found)


def test_a_client_s_own_start_is_what_its_model_is_compared_with(tmp_path: Path) -> None:
    """FENS's clients start apart; the difference from another start says nothing of the classes."""
    found = uploads(finished(tmp_path, "fens", rounds=1, local={"lr": 0.05, "epochs": 3}), QUICK)["labels"]
    assert sum(line["distance"] for line in found) < 0.2 * sum(line["uniform_distance"] for line in found)


def test_images_that_hold_four_are_compared_as_four(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"nets": 1, "steps": 2, "batch_size": 16, "pool": 32, "formation": 2}
    found = uploads(finished(tmp_path, "fedgm", ipc=2, matching=quick, training={"epochs": 1}), QUICK)
    assert [line["images"] for line in found["images"]] == [3 * 2 * 4] * 4
    assert sum(line["recognised"]["value"] for line in found["images"]) / 4 > 0.4  # of ten classes


def test_sums_of_random_features_count_records_unless_they_are_private(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"nets": 2, "fitting": {"steps": 2}, "training": {"epochs": 1}}
    clear = uploads(finished(tmp_path / "clear", "fedgm-records", epsilon=None, **quick), QUICK)["labels"]
    assert all(line["distance"] < 1e-5 and line["from"] == "the sums" for line in clear)
    private = uploads(finished(tmp_path / "private", "fedgm-records", epsilon=0.1, **quick), QUICK)["labels"]
    assert sum(line["distance"] for line in private) / 4 > 0.5


@pytest.mark.parametrize(
    ("name", "source", "settings"),
    [
        ("fedmd", "the logits", {"rounds": 1, "pretrain": "none", "local": {"lr": 0.01, "epochs": 20}}),
        ("fedaux-f", "the head", {"extractor": {"pretrain": "none"}, "head": {"penalty": 0.3}}),
    ],
)
def test_logits_and_heads_show_the_classes_of_a_client_that_has_few(
    name: str, source: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    task = Experiment(data="digits", clients=10, partition="classes:1", workers=0, limit=400, public="noise=64",
                      model="convnet:width=8,depth=2", local_test=0.2 if name == "fedmd" else 0)  # fmt: skip
    run(Job(task, find(name)(**settings), tmp_path, name=name))
    found = uploads(tmp_path, QUICK)["labels"]
    assert {line["from"] for line in found} == {source}
    assert sum(line["distance"] for line in found) < 0.5 * sum(line["uniform_distance"] for line in found)


def test_a_client_without_a_class_of_the_test_set_is_left_out(tmp_path: Path, digits: DataSet) -> None:
    task = Experiment(data="digits", clients=4, partition="classes:3", workers=0, model="convnet:width=8,depth=2")
    few = replace(digits, test=digits.test[digits.test.labels < 3])
    run(Job(task, find("real")(ipc=2, training={"epochs": 1}), tmp_path, name="real"), data=few)
    found = uploads(tmp_path, QUICK, data=few)
    parts = share_out(task, few).parts
    without = [i for i, (part, _) in enumerate(parts) if digits.train.labels[torch.from_numpy(part)].min() > 2]
    assert without and [line["client"] for line in found["left_out"]] == without
    assert len(found["labels"]) == len(found["images"]) == 4 - len(without)


def test_the_command_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run", "feddm", rounds=1, ipc=1, training={"epochs": 1}, matching={"steps": 2})
    main(["attack", str(folder), "uploads", "--inversion.steps", "5"])
    said = capsys.readouterr().out
    assert "nearer to its own" in said and "uploads.json" in said
    for words, reason in (
        ([], "the run comes first"),
        ([str(folder), "uploads", "--least-share", "often"], "least-share"),
        ([str(tmp_path / "nowhere"), "uploads"], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["attack", *words, *(["--x"] if not words else [])])
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err
    for reply in folder.glob("journal/*/*.reply"):
        reply.unlink()
    with pytest.raises(ValueError, match="repeat its command with --keep-replies and another --out"):
        uploads(folder, QUICK)

"""Federations at the edge: a record that is alone, lost replies, sizes that no message holds, wrong values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstill import methods
from fedstill.base.records import Examples
from fedstill.base.seeds import stream
from fedstill.cli import main
from fedstill.data import load
from fedstill.data.sources import DataSet
from fedstill.engines.server import TooFewReplies
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.methods.fedmd import FedMD, Scores, mean_logits
from fedstill.train.sgd import SGD, Adam

TASK = {"data": "digits", "clients": 3, "limit": 300, "workers": 0, "model": "convnet:width=8,depth=1"}
PUBLIC = {"public": "noise=64", "mean": (0.5,), "std": (0.25,), "num_classes": 10}
FAST = {"local": {"epochs": 1, "lr": 0.05}}


def go(name: str, out: Path, settings: Mapping[str, Any], **task: Any) -> dict[str, Any]:
    return run(Job(Experiment(**{**TASK, **task}), methods.find(name)(**settings), out, name=name))


def replies(out: Path) -> list[Path]:
    return list((out / "journal").rglob("*.reply"))


# A record that is alone ----------------------------------------------------------------------


class Norm(nn.Module):
    """A batch norm over vectors, which has no statistics of one record."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        self.sizes: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append((len(x), self.net[1].training))
        logits: Tensor = self.net(x)
        return logits


@pytest.mark.parametrize("training", [SGD(batch_size=4, epochs=2), Adam(batch_size=4, epochs=2)])
@pytest.mark.parametrize(("count", "sizes"), [(9, [4, 5]), (5, [5]), (8, [4, 4]), (7, [4, 3]), (1, [1])])
def test_no_batch_of_a_batch_norm_has_one_record(training: SGD | Adam, count: int, sizes: list[int]) -> None:
    model, rng = Norm(), stream(0)
    training.fit(model, Examples(torch.randn(count, 3, generator=rng), torch.arange(count) % 2), rng)
    assert model.sizes == [(size, count > 1) for size in sizes * 2]
    assert all(w.isfinite().all() for w in model.state_dict().values())


def test_other_models_keep_their_last_batch() -> None:
    sizes, model = [], nn.Linear(3, 2)
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    SGD(batch_size=4, epochs=1).fit(model, Examples(torch.randn(9, 3), torch.arange(9) % 2), stream(0))
    assert sizes == [4, 4, 1]


def test_clients_with_a_record_too_many_for_a_batch_take_part(tmp_path: Path) -> None:
    settings = {**FAST, "rounds": 1, "local": {"epochs": 1, "batch_size": 33}}
    summary = go("fedavg", tmp_path / "run", settings, model="resnet8:width=8", clients=3, limit=102)  # 34 each
    assert not summary["refused"]


@pytest.mark.parametrize("name", ["ldp-fedavg", "dp-fedavg"])
def test_whether_a_client_replies_says_nothing_about_its_records(name: str, tmp_path: Path) -> None:
    """A batch norm without running statistics fails on a batch of one: only clients with 1 mod B records would."""
    with pytest.raises(ValueError, match="take a model without BatchNorm"):
        go(name, tmp_path / "run", {}, model="convnet:width=8,depth=1,norm=batch")
    assert not replies(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{name}'s network fails on a batch of 1 .*tell how many records it has"):
        go(name, tmp_path / "own", {}, model=f"{__name__}:alone")
    assert not replies(tmp_path / "own")


def alone(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network of one's own whose norms need two values of a channel, so that a batch of one fails."""
    inner = nn.Linear(int(np.prod(shape)), 8)
    return nn.Sequential(nn.Flatten(), inner, nn.GroupNorm(8, 8), nn.ReLU(), nn.Linear(8, num_classes))


@pytest.mark.parametrize("name", ["dp-fl", "adap-dp-fl", "fedkd", "fedkadp"])
def test_batch_norms_are_refused_before_a_client_is_asked(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="normalises|statistics mix a batch"):
        go(name, tmp_path / "run", {}, model="convnet:width=8,depth=1,norm=batch", public="held=20")


# Sizes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gh-ofl", {"classifier": "qda"}),
        ("fedpft", {"epsilon": 1.0, "mixture": {"components": 1, "covariance": "full"}}),
        ("afl", {}),
    ],
)
def test_sums_too_large_for_a_message_are_refused_before_a_release(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    space = {"extractor": {"pretrain": "none"}, "space": {"dims": 240 if name != "afl" else 800}}
    width = 64 if name != "afl" else 256
    task = {**PUBLIC, "public": "noise=900", "model": f"convnet:width={width},depth=2", "max_message_mb": 1}
    with pytest.raises(ValueError, match="the limit is 1 MB"):
        go(name, tmp_path / "run", {**settings, **space}, **task)
    assert not list(tmp_path.rglob("ledger.jsonl")) and not list(tmp_path.rglob("spent.jsonl"))


@pytest.mark.parametrize(("precision", "refused"), [("half", False), ("single", True), ("double", True)])
def test_the_size_of_sums_is_that_of_their_precision(precision: str, refused: bool, tmp_path: Path) -> None:
    settings = {"extractor": {"pretrain": "none"}, "space": {"dims": 240}, "classifier": "qda", "precision": precision}
    task = {**PUBLIC, "public": "noise=400", "model": "convnet:width=64,depth=2", "max_message_mb": 1, "clients": 2}
    if refused:
        with pytest.raises(ValueError, match="the limit is 1 MB"):
            go("gh-ofl", tmp_path / "run", {**settings, "epsilon": None}, **task)
    else:
        assert not go("gh-ofl", tmp_path / "run", {**settings, "epsilon": None}, **task)["refused"]


def test_fens_compares_all_models_with_a_message_before_they_are_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"receive 1 MB, the models of 30 clients, but the limit is 1 MB"):
        go("fens", tmp_path / "run", FAST, clients=30, model="convnet:width=32,depth=2", max_message_mb=1)
    assert not replies(tmp_path / "run")


@pytest.mark.parametrize("name", ["dense", "co-boosting", "fed-dafl"])
def test_images_that_no_generator_makes_are_refused_before_training(name: str, tmp_path: Path) -> None:
    images, labels = np.zeros((40, 9, 7), np.uint8), np.arange(40) % 4
    images[:, 0] = np.arange(40)[:, None]
    np.savez(tmp_path / "odd.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(ValueError, match="can't make images of 9x7 pixels"):
        go(name, tmp_path / "run", FAST, data=str(tmp_path / "odd.npz"))
    assert not replies(tmp_path / "run")


# Lost replies ----------------------------------------------------------------------


def test_a_client_that_missed_the_beginning_of_fedmd_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of its random model would be a part of the mean."""
    begun, first = set[int](), FedMD._first
    monkeypatch.setattr(FedMD, "_first", lambda self, client: (begun.add(client.id), first(self, client))[1])
    once = {"epochs": 1}
    settings = {"rounds": 2, "transfer": once, "local": once, "images": 20, "revisit": once}
    task = {"clients": 6, "drop": 0.4, "min_clients": 1, "public": "held=40", "local_test": 0.2, "keep_replies": True}
    summary = go("fedmd", tmp_path / "run", settings, **task)
    assert "begin" in {r["step"] for r in summary["refused"]}
    asked = {int(place.stem) for place in (tmp_path / "run" / "journal").glob("*-communicate/*.reply")}
    assert asked and asked <= begun


def test_a_client_that_missed_a_phase_of_fens_stays_out(tmp_path: Path) -> None:
    summary = go("fens", tmp_path / "run", {**FAST, "rounds": 3}, clients=10, drop=0.3, min_clients=1)
    reasons = {(r["step"], r["reason"]) for r in summary["refused"]}
    assert {step for step, _ in reasons} >= {"train", "prepare"}
    assert not [reason for _, reason in reasons if "KeyError" in reason]


def test_the_mean_of_fedmd_needs_no_memory_for_each_client() -> None:
    scores = [torch.randn(5, 3, generator=stream(k)) for k in range(4)]
    expected = torch.stack(scores).double().mean(0).float()
    assert torch.equal(mean_logits(Scores(logits=s) for s in scores), expected)  # summed in double


# Values ----------------------------------------------------------------------


def table(folder: Path, value: float) -> DataSet:
    rows, labels = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32), np.arange(80) % 2
    rows[3, 1] = value
    np.savez(folder / "table.npz", x_train=rows, y_train=labels, x_test=rows[40:], y_test=labels[40:])
    return load(str(folder / "table.npz"))


@pytest.mark.parametrize(
    ("name", "settings", "value"),
    [
        ("fedgm", {"ipc": 2, "matching": {"nets": 2}, "training": {"epochs": 1}}, 1e30),
        ("fedd3", {"images": 4, "training": {"epochs": 1}, "kip": {"steps": 50}}, 3e38),
    ],
)
def test_values_that_overflow_end_in_a_sentence(
    name: str, settings: dict[str, Any], value: float, tmp_path: Path
) -> None:
    table(tmp_path, value)
    task = {"data": str(tmp_path / "table.npz"), "model": "mlp:hidden=8", "mean": (0.0,), "std": (0.1,), "limit": None}
    with pytest.raises(TooFewReplies) as told:
        go(name, tmp_path / "run", settings, **task)
    assert "very large" in str(told.value) or "so large" in str(told.value)
    assert "IndexError" not in str(told.value) and "LinAlgError" not in str(told.value)


def test_one_synthetic_image_of_a_client_leaves_none_for_the_second_half(tmp_path: Path) -> None:
    settings = {"privacy": "published", "ipc": 1, "matching": {"nets": 2}, "training": {"epochs": 1}}
    summary = go("fedgm-labels", tmp_path / "run", settings, partition="classes:1", clients=10)
    assert not summary["refused"]


@pytest.mark.parametrize("name", ["fedgm-records", "fedavg-p", "fedcgs"])
def test_public_images_that_are_all_alike_are_refused_before_a_release(name: str, tmp_path: Path) -> None:
    images = np.full((30, 8, 8), 7, np.uint8)
    np.savez(tmp_path / "flat.npz", x_train=images, y_train=np.arange(30) % 3, x_test=images, y_test=np.arange(30) % 3)
    settings = {} if name == "fedgm-records" else {"extractor": {"pretrain": "none"}}
    with pytest.raises(ValueError, match="all public images have the same features"):
        go(name, tmp_path / "run", settings, **{**PUBLIC, "public": f"{tmp_path / 'flat.npz'}:unlabeled"})
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_clients_without_a_test_record_are_noticed_before_they_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "digits", "--clients", "10", "--limit", "20", "--partition", "iid", "--local-test", "0.01"]
    with pytest.raises(SystemExit):
        main(["run", "fedavg-ft", *words, "--model", "convnet:width=8,depth=1", "--out", str(tmp_path / "run")])
    assert "no client has a test record; raise --local-test" in capsys.readouterr().err
    assert not replies(tmp_path / "run")

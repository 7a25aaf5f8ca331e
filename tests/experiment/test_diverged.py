"""A model whose outputs are no finite numbers has no accuracy, and is the best of no tries."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedstill
from fedstill.base.records import AS_THEY_ARE, Records
from fedstill.cli import main
from fedstill.engines.client_evaluation import EvaluationResult
from fedstill.evaluation import (
    NONE,
    LastConfusion,
    accuracies,
    confusion,
    confusion_by_value,
    evaluate,
    numbers,
    predictions,
)
from fedstill.experiment.trained import Trained
from fedstill.runs.folder import RunFolder

FAR = {"epochs": 1, "batch_size": 1000, "momentum": 0.0}


class Given(nn.Module):
    """A model that returns its records, the logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture
def records() -> Records:
    logits = torch.tensor([[2.0, 1.0], [float("nan"), 1.0], [1.0, float("inf")], [float("-inf"), 0.0], [1.0, 3.0]])
    return Records(logits, torch.tensor([0, 0, 1, 1, 0]), 2, AS_THEY_ARE)


def test_a_record_without_finite_outputs_is_predicted_wrongly(records: Records) -> None:
    """Minus infinity is the logit of a class that is never predicted, and none of a model that diverged."""
    assert predictions(Given(), records).tolist() == [0, NONE, NONE, 1, 1]
    assert evaluate(Given(), records) == 2 / 5
    assert confusion(Given(), records).tolist() == [[1, 2], [1, 1]]

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack((x, torch.zeros_like(x)), 1)

    assert accuracies(Two(), records) == [2 / 5, 3 / 5]


def test_the_server_counts_such_records_as_wrong_too(records: Records) -> None:
    last = LastConfusion(records)
    assert torch.equal(last(Given()), confusion(Given(), records)) and last.unpredicted == 2
    by_value = confusion_by_value(Given(), records, "ward", np.array(["a", "a", "b", "b", "b"]))
    assert by_value == {
        "column": "ward",
        "cells": {"a": [[0, 0, 1], [0, 1, 1]], "b": [[0, 1, 1], [1, 0, 1], [1, 1, 1]]},
    }
    some = Records(records.images[:3], records.labels[:3], 1, AS_THEY_ARE, targets=torch.tensor([0.0, 0.5, -0.5]))
    found = numbers(First(), some, (0.0, 100.0))
    assert found.predicted.tolist() == [100.0, 0.0, 100.0] and found.unpredicted == 1
    assert found.true.tolist() == [50.0, 75.0, 25.0]


class First(nn.Module):
    """The first column of the records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1]


def test_a_model_that_somebody_loads_says_so_too(tmp_path: Path) -> None:
    model = Trained(Given(), (2,), ("a", "b"), AS_THEY_ARE)
    with pytest.raises(fedstill.InputError, match="outputs for record 1 are no finite numbers"):
        Trained(Doubling(), (2,), ("a", "b"), AS_THEY_ARE).predict(np.array([[0.0, 1.0], [0.0, 3e38]]))
    assert model.predict(np.array([[0.0, 1.0]])).tolist() == ["b"]


class Doubling(nn.Module):
    """A model that doubles its records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def rare(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=150), "z": rng.normal(size=150)})
    frame["died"] = np.where(rng.random(150) < 0.12, "yes", "no")
    frame.to_csv(tmp_path / "rare.csv", index=False)
    return tmp_path / "rare.csv"


def test_no_choice_among_tries_takes_one_that_diverged(rare: Path, tmp_path: Path) -> None:
    """All outputs were "no", the class of most, and so the best of the tries."""
    task: dict[str, Any] = {"data": str(rare), "label_column": "died", "clients": 2, "model": "mlp"}
    plan = {**task, "seeds": [0], "methods": {"fedavg": {"rounds": 1, "local": FAR, "try": {"local.lr": [1e25, 0.1]}}}}
    (best,) = fedstill.sweep(plan, out=tmp_path / "sweep", final=True, parallel=1, progress=False)
    assert best["best"] == {"local.lr": 0.1}
    tries = json.loads((tmp_path / "sweep" / "final" / "fedavg" / "seed-0" / "tries" / "tries.json").read_text())
    assert [one["value"] is None for one in tries["tries"]] == [True, False]
    assert "no finite numbers" in tries["tries"][0]["failure"]


def test_a_run_that_diverged_has_no_accuracy_of_the_class_of_most(
    rare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"run fedavg --data {rare} --label-column died --clients 2 --model mlp --rounds 1 --local.epochs 1".split()
    words += "--local.batch-size 1000 --local.momentum 0 --local.lr 1e25 --workers 0 --quiet --out".split()
    main([*words, str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().out.split())
    assert "the outputs for 30 test records are no finite numbers, as the model diverged, and count as wrong" in said
    summary = RunFolder(tmp_path / "run").read_summary().model_dump()
    assert summary["accuracy"] == 0 and summary["unpredicted"] == 30
    with pytest.raises(fedstill.InputError, match="outputs for record 0 are no finite numbers"):
        fedstill.evaluate(tmp_path / "run", rare)


def test_at_clients_records_without_a_prediction_are_wrong(records: Records) -> None:
    found = EvaluationResult.of_clients([(0, confusion(Given(), records))], 2)
    assert found.accuracy == 2 / 5

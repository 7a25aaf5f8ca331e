"""The measure of a run (``--measure``): what it needs, its value, and which of two values is better.

Where the server has the records that models are judged on, all measures of `fedstill.measures` come from the model's
probabilities. Clients that judge by themselves (``--local-test``) send counts of true and predicted classes, of which
only some measures are made.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedstill.engines.client_evaluation import EvaluationResult
from fedstill.evaluation import outputs
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import Task
from fedstill.measures import Scores, of_totals

NUMERIC = ("rmse", "mae", "r2")
"""Measures of predicted numbers."""
_OF_TWO = ("sensitivity", "specificity", "precision")
"""Measures of two classes."""
_COUNTED = ("accuracy", "balanced-accuracy", "f1", *_OF_TWO)
"""Measures that counts of classes define."""


def score_of(summary: Mapping[str, Any], measure: str) -> float | None:
    """The measure of a run from its ``summary.json``; None where its records define none."""
    if (found := summary.get("measure")) and found["name"] == measure:
        value: float | None = found["value"]
        return value
    if measure == "accuracy":
        return None if summary["accuracy"] is None else float(summary["accuracy"])
    return (summary.get("errors") or {}).get(measure)


def check_measure(experiment: Experiment) -> None:
    """Refuse a measure that the kind of the target, or of the judges, does not have.

    Raises:
        ValueError: it is one of numbers for classes, one of classes for a number, or one of probabilities where clients
            send counts.
    """
    name = experiment.measure
    if name is None:
        return
    if experiment.target_range is not None and name not in NUMERIC:
        raise ValueError(f"measure is '{name}', but the target is a number; choose {', '.join(NUMERIC)}")
    if experiment.target_range is None and name in NUMERIC:
        raise ValueError(f"measure is '{name}', which is for a target that is a number; choose accuracy, auc, ...")
    if experiment.local_test and name not in _COUNTED:
        raise ValueError(
            f"measure is '{name}', which needs probabilities, but clients that judge by themselves (--local-test) send "
            f"counts of classes; choose {', '.join(_COUNTED)}"
        )


def check_measured_classes(experiment: Experiment, number: int) -> None:
    """Refuse a measure of two classes for another number of them.

    Raises:
        ValueError: it is one.
    """
    name = experiment.measure
    if name in _OF_TWO and number != 2:
        raise ValueError(
            f"measure is '{name}', which is of one class of two, but there are {number}; choose balanced-accuracy, "
            "f1 or auc, which are means over classes"
        )


def measured(experiment: Experiment, model: nn.Module, found: EvaluationResult, task: Task) -> dict[str, Any] | None:
    """The run's measure as ``summary.json`` has it, its name and value; None if no measure was named.

    Args:
        experiment: the settings.
        model: the final model.
        found: its evaluation.
        task: the records that the server judges by.
    """
    name = experiment.measure
    if name is None:
        return None
    value: float | None
    if found.numbers is not None:
        value = found.numbers.measures()[name]
    elif name == "accuracy":
        value = found.accuracy
    elif experiment.local_test:
        value = _of_counts(found.confusion.numpy(), name)
    else:
        probabilities = torch.cat(outputs(model, task.test)).double().softmax(1).cpu().numpy()
        true = task.test.labels.cpu().numpy().astype(np.int64)
        known = bool(np.isfinite(probabilities).all())  # of a model that diverged nothing is
        value = Scores(task.class_names, true, probabilities).measures()[name.replace("-", "_")] if known else None
    return {"name": name, "value": value}


def _of_counts(confusion: NDArray[np.int64], name: str) -> float | None:
    """A measure of all clients' test records together, from their counts by true (rows) and predicted class."""
    tested, found, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    if name == "f1" and len(confusion) != 2:
        return float((2 * right / (tested + found).clip(1))[tested > 0].mean())
    values = of_totals(tested[None], found[None], right[None], positive=1)
    value = float(values[{"f1": "F1"}.get(name, name.replace("-", " "))][0])
    return value if np.isfinite(value) else None

"""The measure of a run (``--measure``): what it needs, its value, and which of two values is better.

Where the server has the records that models are judged on, all measures of `fedstill.measures` come from the model's
probabilities. Clients that judge by themselves (``--local-test``) send counts of true and predicted classes, of which
only some measures are made.
"""

from collections.abc import Mapping
from dataclasses import replace
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
MOST_MEASURED = 20_000
"""Test records, at most, of which the intervals take less than three seconds."""


def score_of(summary: Mapping[str, Any], measure: str) -> float | None:
    """The measure of a run from its ``summary.json``; None where its records define none, or its model diverged."""
    if summary.get("unpredicted"):
        return None
    if (found := summary.get("measure")) and found["name"] == measure:
        value: float | None = found["value"]
        return value
    if measure == "accuracy":
        return None if summary["accuracy"] is None else float(summary["accuracy"])
    return (summary.get("errors") or {}).get(measure)


def lacking(summary: Mapping[str, Any], measure: str) -> str:
    """Why `score_of` is None."""
    if number := summary.get("unpredicted"):
        return f"the model diverged: its outputs for {number:,} records are no finite numbers; use a smaller rate"
    return f"the records define no {measure}, or no model is for all clients"


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
        scores = scores_of(model, task)
        value = None if scores is None else scores.measures()[name.replace("-", "_")]
    return {"name": name, "value": value}


def scores_of(model: nn.Module, task: Task) -> Scores | None:
    """The model's probabilities of the records that the server judges by; None of a model that diverged."""
    probabilities = torch.cat(outputs(model, task.test)).double().softmax(1).cpu().numpy()
    if not np.isfinite(probabilities).all():
        return None
    true = task.test.labels.cpu().numpy().astype(np.int64)
    return Scores(task.class_names, true, probabilities, persons=task.test_groups)


def measures_of_two(model: nn.Module, found: EvaluationResult, task: Task) -> dict[str, Any] | None:
    """The measures of each of two classes with their intervals, by class; None where a count says it all.

    That is with other than two classes, with no or more than `MOST_MEASURED` test records, and where ``found`` is not
    of this model on these records, as where each client has its own.
    """
    if len(task.class_names) != 2 or not 0 < len(task.test) <= MOST_MEASURED:
        return None
    scores = scores_of(model, task)
    if scores is None or float((scores.predicted == scores.true).mean()) != found.accuracy:
        return None
    return {name: replace(scores, positive=c).described() for c, name in enumerate(task.class_names)}


def _of_counts(confusion: NDArray[np.int64], name: str) -> float | None:
    """A measure of all clients' test records together, from their counts by true (rows) and predicted class."""
    tested, found, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    if name == "f1" and len(confusion) != 2:
        return float((2 * right / (tested + found).clip(1))[tested > 0].mean())
    values = of_totals(tested[None], found[None], right[None], positive=1)
    value = float(values[{"f1": "F1"}.get(name, name.replace("-", " "))][0])
    return value if np.isfinite(value) else None

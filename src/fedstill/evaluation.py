"""Evaluation of models on labelled records: outputs, predictions, accuracies, confusion tables, errors of numbers."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstill.base.records import Records, Trainable
from fedstill.base.weights import content_digest

NONE = -1
"""Predicted class of a record whose largest logit is no finite number, as of a model that diverged."""


def predictions(model: nn.Module, records: Trainable, batch_size: int = 256) -> Int64[Tensor, " n"]:
    """The class with the largest logit (the first of equals) for each record, or `NONE`; on the model's device."""
    batches = outputs(model, records, batch_size, of=lambda x: _classes(model(x)))
    return torch.cat(batches) if batches else records.labels.new_empty(0, dtype=torch.int64)


def _classes(logits: Tensor) -> Int64[Tensor, "..."]:
    """The place of the largest logit along the last axis, or `NONE`."""
    largest, places = logits.max(-1)
    return torch.where(largest.isfinite(), places, NONE)


def outputs(
    model: nn.Module, records: Trainable, batch_size: int = 256, *, of: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Results of ``of`` (by default the model) for each batch of inputs, in order, in eval mode without gradients."""
    device = device_of(model, records)
    call = model if of is None else of
    with mode_of(model, training=False), torch.no_grad():
        return [
            call(records.inputs(slice(start, start + batch_size)).to(device))
            for start in range(0, len(records.labels), batch_size)
        ]


def device_of(model: nn.Module, records: Trainable) -> torch.device:
    """The model's device; that of ``records`` if the model has no tensors."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), records.labels.device)


def evaluate(model: nn.Module, records: Trainable, batch_size: int = 256) -> float:
    """Accuracy in [0, 1]: the share of records whose largest logit is their label's. ValueError for 0 records."""
    return _shares_right(predictions(model, records, batch_size)[:, None], records)[0]


def accuracies(stacked: nn.Module, records: Trainable, batch_size: int = 256) -> list[float]:
    """Accuracies of k networks in one pass; ``stacked`` returns the logits of all, ``(n, k, classes)``."""
    batches = outputs(stacked, records, batch_size, of=lambda x: _classes(stacked(x)))
    return _shares_right(torch.cat(batches) if batches else records.labels[:, None], records)


def _shares_right(predicted: Int64[Tensor, "n k"], records: Trainable) -> list[float]:
    if len(records.labels) == 0:
        raise ValueError("there are 0 records to evaluate on; accuracy needs at least 1")
    right = predicted == records.labels.to(predicted.device)[:, None]
    shares: list[float] = right.double().mean(0).tolist()
    return shares


def confusion(model: nn.Module, records: Records, batch_size: int = 256) -> Int64[Tensor, "classes classes"]:
    """Number of records of each class (row) predicted as each class (column), ``(num_classes, num_classes)``.

    A record without a prediction counts for the class after its own, which is wrong.
    """
    labels, predicted = _counted(predictions(model, records, batch_size), records)
    cells = labels * records.num_classes + predicted
    return torch.bincount(cells, minlength=records.num_classes**2).view(records.num_classes, records.num_classes)


def _counted(predicted: Int64[Tensor, " n"], records: Records) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """The true classes, on the device of the predicted ones, and these with the class after its own for `NONE`."""
    labels = records.labels.to(predicted.device)
    return labels, torch.where(predicted == NONE, (labels + 1) % records.num_classes, predicted)


Cells = list[list[int]]
"""The cells above 0 of a confusion matrix, each as true class, predicted class and count, in order."""


def cells_of(table: Int64[Tensor, "classes classes"]) -> Cells:
    """The cells above 0 of a confusion matrix: no more than it has records, however many classes there are."""
    places = table.nonzero()
    cells: Cells = torch.cat((places, table[places[:, 0], places[:, 1], None]), 1).tolist()
    return cells


MOST_VALUES = 200
"""Number of values of a column whose records are told apart: more of them are patients rather than hospitals."""


def confusion_by_value(
    model: nn.Module, records: Records, column: str, values: NDArray[np.str_]
) -> dict[str, Any] | None:
    """Cells of the confusion matrix (`Cells`) of the records of each value of a column, ``(n,)``, and its name.

    None for a column with more than `MOST_VALUES` values.
    """
    names, which = np.unique(values, return_inverse=True)
    if len(names) > MOST_VALUES:
        return None
    labels, said = _counted(predictions(model, records).cpu(), records)
    pairs = np.stack((which, labels.numpy(), said.numpy()), 1)
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    cells: dict[str, Cells] = {str(name): [] for name in names}
    for (value, true, predicted), count in zip(found.tolist(), counts.tolist(), strict=True):
        cells[str(names[value])].append([true, predicted, count])
    return {"column": column, "cells": cells}


class LastConfusion:
    """`confusion` of models on the same records, computed anew only if the model or its weights are not the last's.

    Attributes:
        unpredicted: records of the last table whose outputs are no finite numbers, and which count as wrong.
        losses: for the accuracy of each model since the last `forget`, the mean cross-entropy of its outputs in nats.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._last: tuple[weakref.ref[nn.Module], str, Tensor, float] | None = None
        self.unpredicted = 0
        self.losses: dict[float, float] = {}

    def __call__(self, model: nn.Module) -> Int64[Tensor, "classes classes"]:
        """Counts by true (row) and predicted class (column), ``(num_classes, num_classes)``; on the model's device."""
        digest = content_digest(model)
        if self._last is None or self._last[0]() is not model or self._last[1] != digest:
            self._last = weakref.ref(model), digest, *self._measured(model)
        _, _, table, loss = self._last
        self.losses[float(table.trace()) / max(1, int(table.sum()))] = loss
        return table.clone()

    def forget(self) -> None:
        """Forget the losses."""
        self.losses = {}

    def _measured(self, model: nn.Module) -> tuple[Int64[Tensor, "classes classes"], float]:
        """The confusion matrix and the loss, of one pass."""
        records, number = self._records, self._records.num_classes
        logits = torch.cat([*outputs(model, records), torch.empty(0, number, device=device_of(model, records))])
        found = _classes(logits)
        self.unpredicted = int((found == NONE).sum())
        labels, predicted = _counted(found, records)
        table = torch.bincount(labels * number + predicted, minlength=number**2).view(number, number)
        return table, float(nn.functional.cross_entropy(logits.double(), labels)) if len(labels) else math.nan


# Numbers --------------------------------------------------------------------------------------------------------------

RESAMPLES = 1000
"""Resamples of records, or of persons, for an interval."""
Measures = dict[str, float | None]
"""Measures by name; None where the records do not define one."""
Bounds = dict[str, tuple[float, float] | None]


def bootstrap(
    measure: Callable[[NDArray[np.int64]], Measures],
    number: int,
    persons: NDArray[Any] | None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Bounds:
    """95 % intervals by the percentile bootstrap (Efron 1979), of records, or of whole persons.

    The records are taken as drawn from the population that is meant; the model is not trained anew.

    Args:
        measure: the measures of the records at given places, of which some may come several times.
        number: number of records.
        persons: the person of each record, ``(number,)``, whose records are resampled together; None if each is its
            own.
        seed: of the resamples.
        resamples: their number.
    """
    draw = drawing(number, persons, np.random.default_rng(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [measure(draw()) for _ in range(resamples)]
    return {
        name: bounds(value, np.array([one[name] for one in found], dtype=float))
        for name, value in measure(np.arange(number)).items()
    }


def bounds(value: float | None, drawn: NDArray[np.float64]) -> tuple[float, float] | None:
    """The 95 % interval of a measure that is NaN in some resamples; None if it is in a tenth, or has no ``value``."""
    values = drawn[np.isfinite(drawn)]
    if value is None or len(values) < 0.9 * len(drawn):
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def drawing(number: int, persons: NDArray[Any] | None, rng: np.random.Generator) -> Callable[[], NDArray[np.int64]]:
    """A function that draws the places of a resample of ``number`` records, or of all records of drawn persons."""
    if persons is None:
        return lambda: rng.integers(0, number, number)
    _, codes = np.unique(persons, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    whole = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    return lambda: np.concatenate([whole[i] for i in rng.integers(0, len(whole), len(whole))])


@dataclass(frozen=True, eq=False)
class Numbers:
    """True numbers and a model's predictions, in the target's unit.

    Attributes:
        true: the number of each record, ``(n,)``.
        predicted: the model's, ``(n,)``.
        persons: the person of each record, ``(n,)``, or None (`bootstrap`).
        unpredicted: records whose outputs are no finite numbers; they have the end of the range that is farther off.
    """

    true: NDArray[np.float64]
    predicted: NDArray[np.float64]
    persons: NDArray[Any] | None = None
    unpredicted: int = 0

    def measures(self) -> Measures:
        """Root mean squared error, mean absolute error, and the share of the variance that is explained (R squared).

        R squared is relative to the mean of these records: 0 for a model that always says it, None where all are equal.
        """
        return self._of(np.arange(len(self.true)))

    def intervals(self, seed: int = 0, resamples: int = RESAMPLES) -> Bounds:
        """95 % intervals of the measures (`bootstrap`)."""
        return bootstrap(self._of, len(self.true), self.persons, seed=seed, resamples=resamples)

    def take(self, rows: NDArray[Any]) -> "Numbers":
        """Those of some records."""
        return Numbers(self.true[rows], self.predicted[rows], None if self.persons is None else self.persons[rows])

    def described(self) -> dict[str, Any]:
        """Number of records, and each measure with its interval, as JSON: ``{"rmse": [value, low, high]}``."""
        values, bounds = self.measures(), self.intervals()
        each = {name: [value, *(bounds[name] or (None, None))] for name, value in values.items()}
        return {"records": len(self.true), **each}

    def _of(self, rows: NDArray[np.int64]) -> Measures:
        true, wrong = self.true[rows], self.predicted[rows] - self.true[rows]
        squares, spread = float((wrong**2).sum()), float(((true - true.mean()) ** 2).sum())
        return {
            "rmse": float(np.sqrt(squares / len(true))),
            "mae": float(np.abs(wrong).mean()),
            "r2": 1 - squares / spread if spread > 0 else None,
        }


def in_unit(scaled: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    """Numbers in the target's unit from numbers that its range has scaled to [-1, 1].

    A prediction beyond is the nearer end of the range, which is public and in which every true number is.
    """
    low, high = bounds
    return low + (scaled.clip(-1, 1) + 1) * ((high - low) / 2)


def numbers(
    model: nn.Module, records: Records, bounds: tuple[float, float], persons: NDArray[Any] | None = None
) -> Numbers:
    """The numbers of ``records`` and what the model says, in the unit of the range ``bounds``.

    Raises:
        ValueError: there are no records.
    """
    if len(records) == 0:
        raise ValueError("there are 0 records to evaluate on; an error needs at least 1")
    assert records.targets is not None, "records of classes have no numbers"
    said = torch.cat(outputs(model, records, of=lambda x: model(x)[:, 0])).double().cpu().numpy()
    true, unknown = records.targets.cpu().numpy(), ~np.isfinite(said)
    said = np.where(unknown, np.where(true > 0, -1.0, 1.0), said)  # as wrong as can be
    return Numbers(in_unit(true, bounds), in_unit(said, bounds), persons, int(unknown.sum()))


@contextmanager
def mode_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode inside the block; afterwards every module has its former mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode

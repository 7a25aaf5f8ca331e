"""Measures of a classifier's probabilities on labelled records, with 95 % intervals by resampling.

Measures of two classes are of the ``positive`` one, the last by default: sensitivity, specificity and precision at a
threshold of its probability, the areas under the receiver's and the precision-recall curve. For more classes they are
means over the classes that have records (one against the rest).
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.evaluation import RESAMPLES, bounds, drawing

_BINS = 10
"""Bins of the calibration table, equally wide."""
_ENTRIES = 2_000_000
"""Entries of the weights of the resamples that are measured at a time."""


def decide(probabilities: NDArray[Any], positive: int, threshold: float | None) -> NDArray[np.int64]:
    """The predicted class of each record: the likeliest, or of two the ``positive`` one from a probability on.

    Args:
        probabilities: of each class, ``(n, C)``.
        positive: number of a class of two.
        threshold: its probability from which it is predicted; None for the likeliest class.
    """
    if threshold is None or probabilities.shape[1] != 2:
        found: NDArray[np.int64] = probabilities.argmax(1)
        return found
    return np.where(probabilities[:, positive] >= threshold, positive, 1 - positive)


@dataclass(frozen=True, eq=False)
class Scores:
    """True classes and a model's probabilities.

    Attributes:
        class_names: the model's classes, C.
        true: true class of each record, ``(n,)``.
        probabilities: of each class, ``(n, C)``.
        persons: the person of each record, ``(n,)``, whose records are resampled together; None if each is its own.
        positive: number of the positive class of two.
        threshold: probability from which the positive class of two is predicted; None for the likeliest class.
    """

    class_names: tuple[str, ...]
    true: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    persons: NDArray[Any] | None = None
    positive: int = 1
    threshold: float | None = None

    @cached_property
    def predicted(self) -> NDArray[np.int64]:
        """The predicted class of each record."""
        return decide(self.probabilities, self.positive, self.threshold)

    def measures(self) -> dict[str, float | None]:
        """All measures by name; None where the records do not define one, as the area under the curve of one class.

        Raises:
            ValueError: a probability is not a number.
        """
        if not np.isfinite(self.probabilities).all():
            raise ValueError("the model's probabilities have values that are no numbers; train it at a lower rate")
        values = _of_weights(self, np.ones((1, len(self.true))))
        return {name: float(value[0]) if np.isfinite(value[0]) else None for name, value in values.items()}

    def intervals(self, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, tuple[float, float] | None]:
        """95 % intervals of the measures (`fedstill.evaluation.bootstrap`); None as above."""
        number, draw = len(self.true), drawing(len(self.true), self.persons, np.random.default_rng(seed))
        parts: dict[str, list[NDArray[np.float64]]] = {}
        block = max(1, _ENTRIES // number)
        for start in range(0, resamples, block):
            drawn = [np.bincount(draw(), minlength=number) for _ in range(start, min(start + block, resamples))]
            for name, found in _of_weights(self, np.stack(drawn).astype(float)).items():
                parts.setdefault(name, []).append(found)
        return {name: bounds(value, np.concatenate(parts[name])) for name, value in self.measures().items()}

    def described(self) -> dict[str, Any]:
        """Each measure with its interval, as JSON: ``{"auc": [value, low, high]}``."""
        values, ends = self.measures(), self.intervals()
        return {name: [value, *(ends[name] or (None, None))] for name, value in values.items()}

    def calibration(self) -> list[dict[str, float]]:
        """Of each tenth of the predicted class's probability: its mean, the share that is right, and the records."""
        sure = self.probabilities[np.arange(len(self.true)), self.predicted]
        right, place = self.predicted == self.true, np.minimum((sure * _BINS).astype(int), _BINS - 1)
        return [
            {"probability": float(sure[own].mean()), "right": float(right[own].mean()), "records": int(own.sum())}
            for own in (place == i for i in range(_BINS))
            if own.any()
        ]


def _of_weights(scores: Scores, weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Each measure, ``(m,)``, of records that count as often as each of m rows of weights ``(m, n)`` says; or NaN."""
    true, predicted, probabilities = scores.true, scores.predicted, scores.probabilities
    number, two = probabilities.shape[1], len(scores.class_names) == 2
    is_true, is_found = (classes[:, None] == np.arange(number) for classes in (true, predicted))
    tested, found, right = (weights @ own.astype(float) for own in (is_true, is_found, is_true & is_found))
    counted = of_totals(tested, found, right, scores.positive)
    losses = -np.log(np.clip(probabilities[np.arange(len(true)), true], 1e-15, 1))
    squares = ((probabilities - is_true) ** 2).sum(1)
    whole = weights.sum(1)
    values = {"accuracy": counted["accuracy"], "balanced_accuracy": counted["balanced accuracy"]}
    values |= {"log_loss": weights @ losses / whole, "brier": weights @ squares / whole}
    wanted = [scores.positive] if two else list(range(number))
    areas = np.array([_areas(is_true[:, c], probabilities[:, c], weights) for c in wanted])
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of no class is NaN
        values["auc"], values["average_precision"] = np.nanmean(areas, 0)
        f1 = 2 * right / np.maximum(tested + found, 1)
        values["f1"] = f1[:, scores.positive] if two else np.nanmean(np.where(tested > 0, f1, np.nan), 1)
    return values | {name: counted[name] for name in ("sensitivity", "specificity", "precision") if two}


def _areas(
    is_true: NDArray[np.bool_], probability: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Area under the receiver's curve, and average precision, as scikit-learn has them, for each row of weights.

    NaN where one of both kinds of records counts nothing.
    """
    order = np.argsort(-probability, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(probability[order])), len(order) - 1)  # equal ones share a threshold
    ordered, is_right = weights[:, order], is_true[order]
    right, wrong = (np.cumsum(ordered * own, 1)[:, ends] for own in (is_right, ~is_right))
    with np.errstate(invalid="ignore", divide="ignore"):
        begin = np.zeros((len(weights), 1))
        sensitivity, false = (np.hstack([begin, some / some[:, -1:]]) for some in (right, wrong))
        auc = np.trapezoid(sensitivity, false, axis=1)
        precision = (np.diff(sensitivity) * right / np.maximum(right + wrong, 1)).sum(1)
    known = (right[:, -1] > 0) & (wrong[:, -1] > 0)
    return np.where(known, auc, np.nan), np.where(known, precision, np.nan)


def best_threshold(scores: Scores) -> float:
    """The threshold with the largest sum of sensitivity and specificity (Youden 1950), on records set aside for it.

    Raises:
        ValueError: there are other than two classes, or records of one class only.
    """
    if len(scores.class_names) != 2 or len(np.unique(scores.true)) != 2:
        raise ValueError("a threshold is for two classes, which both have records")
    from sklearn import metrics

    false, found, thresholds = metrics.roc_curve(
        scores.true == scores.positive, scores.probabilities[:, scores.positive], drop_intermediate=False
    )
    return float(min(1.0, thresholds[int((found - false).argmax())]))


def of_counts(
    confusion: NDArray[np.int64], positive: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float, float]]:
    """The measures that a confusion matrix defines, each with its 95 % interval by resampling records (`bootstrap`).

    Args:
        confusion: records by true (rows) and predicted class (columns), ``(C, C)``.
        positive: the class of two that sensitivity, specificity, precision and F1 are of.
        seed: of the resamples.
        resamples: their number.
    """
    true, said = np.nonzero(confusion)
    cells = confusion[true, said]
    total = int(cells.sum())
    draws = np.vstack([cells, np.random.default_rng(seed).multinomial(total, cells / total, resamples)])
    is_true, is_said = (places[:, None] == np.arange(len(confusion)) for places in (true, said))
    all_of = of_totals(draws @ is_true, draws @ is_said, draws @ (is_true & is_said), positive)
    return {
        name: (float(values[0]), *map(float, np.nanquantile(values[1:], [0.025, 0.975])))  # type: ignore[misc]
        for name, values in all_of.items()
        if np.isfinite(values).mean() >= 0.9 and np.isfinite(values[0])
    }


def of_totals(
    tested: NDArray[Any], found: NDArray[Any], right: NDArray[Any], positive: int
) -> dict[str, NDArray[np.float64]]:
    """The measures that counts of records define, ``(m,)`` each, for m draws of counts; NaN where they define none.

    Args:
        tested: records of each class, ``(m, C)``.
        found: records that were predicted as each class.
        right: those of them that are of it.
        positive: as for `of_counts`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(tested > 0, right / tested, np.nan)
        all_of = {"accuracy": right.sum(1) / tested.sum(1), "balanced accuracy": np.nanmean(recall, 1)}
        if tested.shape[1] == 2:
            all_of |= {"sensitivity": recall[:, positive], "specificity": recall[:, 1 - positive]}
            all_of["precision"] = right[:, positive] / found[:, positive]
            all_of["F1"] = 2 * right[:, positive] / (tested + found)[:, positive]
    return all_of

"""Measures of a classifier's probabilities on labelled records, with 95 % intervals by resampling.

Measures of two classes are of the ``positive`` one, the last by default: sensitivity, specificity and precision at a
threshold of its probability, the areas under the receiver's and the precision-recall curve. For more classes they are
means over the classes that have records (one against the rest).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.evaluation import RESAMPLES, bootstrap

_BINS = 10
"""Bins of the calibration table, equally wide."""


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
        if self.threshold is None or len(self.class_names) != 2:
            found: NDArray[np.int64] = self.probabilities.argmax(1)
            return found
        chosen = self.probabilities[:, self.positive] >= self.threshold
        return np.where(chosen, self.positive, 1 - self.positive)

    def measures(self) -> dict[str, float | None]:
        """All measures by name; None where the records do not define one, as the area under the curve of one class.

        Raises:
            ValueError: a probability is not a number.
        """
        if not np.isfinite(self.probabilities).all():
            raise ValueError("the model's probabilities have values that are no numbers; train it at a lower rate")
        return _measures(self, np.arange(len(self.true)))

    def intervals(self, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, tuple[float, float] | None]:
        """95 % intervals of the measures (`fedstill.evaluation.bootstrap`); None as above."""
        return bootstrap(
            lambda rows: _measures(self, rows), len(self.true), self.persons, seed=seed, resamples=resamples
        )

    def calibration(self) -> list[dict[str, float]]:
        """Of each tenth of the predicted class's probability: its mean, the share that is right, and the records."""
        sure = self.probabilities[np.arange(len(self.true)), self.predicted]
        right, place = self.predicted == self.true, np.minimum((sure * _BINS).astype(int), _BINS - 1)
        return [
            {"probability": float(sure[own].mean()), "right": float(right[own].mean()), "records": int(own.sum())}
            for own in (place == i for i in range(_BINS))
            if own.any()
        ]


def _measures(scores: Scores, rows: NDArray[np.int64]) -> dict[str, float | None]:
    true, predicted, probabilities = scores.true[rows], scores.predicted[rows], scores.probabilities[rows]
    present = np.unique(true)
    found: dict[str, float | None] = {
        "accuracy": float((true == predicted).mean()),
        "balanced_accuracy": float(np.mean([(predicted[true == c] == c).mean() for c in present])),
        "log_loss": float(-np.log(np.clip(probabilities[np.arange(len(true)), true], 1e-15, 1)).mean()),
        "brier": float(((probabilities - np.eye(probabilities.shape[1])[true]) ** 2).sum(1).mean()),
    }
    two = len(scores.class_names) == 2
    wanted: Sequence[int] = [scores.positive] if two else [int(c) for c in present]
    curves = [(true == c, probabilities[:, c]) for c in wanted if 0 < (true == c).sum() < len(true)]
    areas = [_areas(y, p) for y, p in curves]
    found["auc"] = float(np.mean([auc for auc, _ in areas])) if areas else None
    found["average_precision"] = float(np.mean([precision for _, precision in areas])) if areas else None
    f1 = [_f1(true == c, predicted == c) for c in wanted]
    found["f1"] = float(np.mean(f1))
    if two:
        is_true, is_found = true == scores.positive, predicted == scores.positive
        found["sensitivity"] = float(is_found[is_true].mean()) if is_true.any() else None
        found["specificity"] = float((~is_found)[~is_true].mean()) if (~is_true).any() else None
        found["precision"] = float(is_true[is_found].mean()) if is_found.any() else None
    return found


def _areas(is_true: NDArray[np.bool_], probability: NDArray[np.float64]) -> tuple[float, float]:
    """Area under the receiver's curve, and average precision, as scikit-learn has them, at a fortieth of its time."""
    order = np.argsort(-probability, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(probability[order])), len(order) - 1)  # equal ones share a threshold
    right = np.cumsum(is_true[order])[ends]
    wrong = ends + 1 - right
    sensitivity = np.append(0.0, right / right[-1])
    auc = np.trapezoid(sensitivity, np.append(0.0, wrong / wrong[-1]))
    return float(auc), float((np.diff(sensitivity) * right / (ends + 1)).sum())


def _f1(is_true: NDArray[np.bool_], is_found: NDArray[np.bool_]) -> float:
    both = is_true.sum() + is_found.sum()
    return float(2 * (is_true & is_found).sum() / both) if both else 0.0


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
    tested: NDArray[np.int64], found: NDArray[np.int64], right: NDArray[np.int64], positive: int
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

"""Measures of a classifier's probabilities on labelled records, with 95 % intervals by resampling; scikit-learn's.

Measures of two classes are of the ``positive`` one, the last by default: sensitivity, specificity and precision at a
threshold of its probability, the areas under the receiver's and the precision-recall curve. For more classes they are
means over the classes that have records (one against the rest).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""Resamples of records, or of persons, for an interval."""
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
        """All measures by name; None where the records do not define one, as the area under the curve of one class."""
        return _measures(self, np.arange(len(self.true)))

    def intervals(self, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, tuple[float, float] | None]:
        """95 % intervals by the percentile bootstrap (Efron 1979), of records, or of whole persons; None as above.

        The records are taken as drawn from the population that is meant; the model is not trained anew.
        """
        rng = np.random.default_rng(seed)
        draw = self._drawing(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [_measures(self, draw()) for _ in range(resamples)]
        bounds: dict[str, tuple[float, float] | None] = {}
        for name, value in self.measures().items():
            values = np.array([one[name] for one in found if one[name] is not None], dtype=float)
            enough = value is not None and len(values) >= 0.9 * resamples
            low, high = np.quantile(values, [0.025, 0.975]) if enough else (0.0, 0.0)
            bounds[name] = (float(low), float(high)) if enough else None
        return bounds

    def _drawing(self, rng: np.random.Generator) -> Callable[[], NDArray[np.int64]]:
        number = len(self.true)
        if self.persons is None:
            return lambda: rng.integers(0, number, number)
        _, codes = np.unique(self.persons, return_inverse=True)
        order = np.argsort(codes, kind="stable")
        whole = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
        return lambda: np.concatenate([whole[i] for i in rng.integers(0, len(whole), len(whole))])

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
    from sklearn import metrics

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
    found["auc"] = float(np.mean([metrics.roc_auc_score(y, p) for y, p in curves])) if curves else None
    found["average_precision"] = (
        float(np.mean([metrics.average_precision_score(y, p) for y, p in curves])) if curves else None
    )
    f1 = [metrics.f1_score(true == c, predicted == c, zero_division=0.0) for c in wanted]
    found["f1"] = float(np.mean(f1))
    if two:
        is_true, is_found = true == scores.positive, predicted == scores.positive
        found["sensitivity"] = float(is_found[is_true].mean()) if is_true.any() else None
        found["specificity"] = float((~is_found)[~is_true].mean()) if (~is_true).any() else None
        found["precision"] = float(is_true[is_found].mean()) if is_found.any() else None
    return found


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

"""How well scores find the positives, where positives are rare.

Average precision comes first: ROC-AUC stays near 0.99 while differential privacy costs most of the recall that a fraud team
would notice. A metric of private records is a release that no ledger here is charged for, so an `Evaluation` says on which
kind of data it was measured.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import average_precision_score


class EvaluationScope(Enum):
    """On which records an evaluation was measured, and hence where it may be shown."""

    PUBLIC_DATA = "public data"
    """Nobody's private records: the numbers may be published."""
    SIMULATION_ONLY = "simulation only"
    """Records that a real consortium would keep private: the numbers are for a simulation that holds them all anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Metrics of one model on one set of records.

    Args:
        pr_auc: Average precision, from 0 to 1, NaN without positives.
        recall_at_1_percent_fpr: Recall at a false positive rate of 0.01, from 0 to 1, NaN where undefined.
        recall_at_01_percent_fpr: Recall at a false positive rate of 0.001, from 0 to 1, NaN where undefined.
        positives: Number of positive records, from 0 to records.
        records: Number of records, at least 1.
        scope: On which kind of records all of this was measured.

    Raises:
        ValueError: If a number is out of its range, or PR-AUC is NaN in spite of positives.
        TypeError: If the scope is not an `EvaluationScope`.
    """

    pr_auc: float
    recall_at_1_percent_fpr: float
    recall_at_01_percent_fpr: float
    positives: int
    records: int
    scope: EvaluationScope

    def __post_init__(self) -> None:
        if not isinstance(self.scope, EvaluationScope):
            raise TypeError("expected scope to be EvaluationScope.PUBLIC_DATA or EvaluationScope.SIMULATION_ONLY")
        if not (self.records >= 1 and 0 <= self.positives <= self.records):
            raise ValueError("expected at least one record, and between 0 and all of them positive")
        if any(value < 0 or value > 1 for value in (self.pr_auc, self.recall_at_1_percent_fpr, self.recall_at_01_percent_fpr)):
            raise ValueError("expected metrics from 0 to 1, or NaN where undefined")
        if math.isnan(self.pr_auc) != (self.positives == 0):
            raise ValueError("expected PR-AUC to be NaN if and only if there is no positive")

    @property
    def note(self) -> str:
        """Why a metric is NaN; empty if none is. A mean over clients leaves those out that have a note, and says so."""
        if self.positives == 0:
            return "no positive record: PR-AUC and recall are undefined"
        if self.positives == self.records:
            return "no negative record: the false positive rate, and recall at it, are undefined"
        return ""


def evaluate(labels: ArrayLike, scores: ArrayLike, *, scope: EvaluationScope) -> Evaluation:
    """All metrics of `Evaluation` at once. Arguments and errors as in `average_precision`.

    Example:
        >>> evaluation = evaluate([0, 0, 1, 1], [0.1, 0.4, 0.3, 0.8], scope=EvaluationScope.SIMULATION_ONLY)
        >>> round(evaluation.pr_auc, 3), evaluation.recall_at_1_percent_fpr
        (0.833, 0.5)
    """
    truth, _ = _checked(labels, scores)
    return Evaluation(
        pr_auc=average_precision(labels, scores),
        recall_at_1_percent_fpr=recall_at_fpr(labels, scores, fpr=0.01),
        recall_at_01_percent_fpr=recall_at_fpr(labels, scores, fpr=0.001),
        positives=int(truth.sum()),
        records=truth.size,
        scope=scope,
    )


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the precision-recall curve as the step-wise sum of scikit-learn, from 0 to 1; NaN with no positives.

    Args:
        labels: 1 for a positive record, 0 for another, of shape (records,).
        scores: Any increasing measure of suspicion, finite, of shape (records,).

    Raises:
        ValueError: If there is no record, shapes differ or are not flat, a label is not 0 or 1, or a score is NaN or infinite.

    Example:
        >>> average_precision([0, 1, 1], [0.2, 0.9, 0.4])
        1.0
    """
    truth, values = _checked(labels, scores)
    return float(average_precision_score(truth, values)) if truth.any() else math.nan


def recall_at_fpr(labels: ArrayLike, scores: ArrayLike, *, fpr: float) -> float:
    """The largest recall among the thresholds whose false positive rate is at most `fpr`, from 0 to 1.

    A record is flagged if its score is at least the threshold. The thresholds are the distinct scores and one above them all,
    so records with equal scores are flagged together and nothing is interpolated. NaN with no positives or no negatives.

    Args:
        labels: 1 for a positive record, 0 for another, of shape (records,).
        scores: Any increasing measure of suspicion, finite, of shape (records,).
        fpr: Largest accepted share of the negatives that are flagged, from 0 to 1.

    Raises:
        ValueError: As `average_precision`, or if fpr is not from 0 to 1.

    Example:
        >>> recall_at_fpr([0, 0, 1, 1], [0.1, 0.4, 0.3, 0.8], fpr=0.0)
        0.5
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"expected fpr from 0 to 1, got {fpr}")
    truth, values = _checked(labels, scores)
    if not truth.any() or truth.all():
        return math.nan
    _, found, false = _flagged(truth, values)
    return float(found[false / (truth.size - truth.sum()) <= fpr].max(initial=0) / truth.sum())


def best_f1_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest F1, the highest such one if several tie; NaN with no positives.

    Choose it on validation records and use it on others: on the records that it was chosen on, F1 is too good.

    Args and errors as in `average_precision`.
    """
    truth, values = _checked(labels, scores)
    if not truth.any():
        return math.nan
    thresholds, found, false = _flagged(truth, values)
    return float(thresholds[np.argmax(2 * found / (truth.sum() + found + false))])


def f1_at_threshold(labels: ArrayLike, scores: ArrayLike, *, threshold: float) -> float:
    """F1, the harmonic mean of precision and recall, when scores of at least the threshold are flagged; NaN with no positives.

    Raises:
        ValueError: As `average_precision`, or if the threshold is NaN (there were no positives to choose it on).

    Example:
        >>> threshold = best_f1_threshold([0, 1, 1], [0.2, 0.9, 0.4])
        >>> f1_at_threshold([0, 0, 1], [0.1, 0.5, 0.7], threshold=threshold)
        0.6666666666666666
    """
    if math.isnan(threshold):
        raise ValueError("expected a threshold, got NaN; choose it on validation records that include positives")
    truth, values = _checked(labels, scores)
    if not truth.any():
        return math.nan
    flagged = values >= threshold
    return float(2 * (flagged & truth).sum() / (truth.sum() + flagged.sum()))


def _flagged(truth: NDArray[np.bool_], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct scores, descending, with the true and the false positives when each is the threshold."""
    order = np.argsort(-values, kind="stable")
    ordered = values[order]
    last = np.append(np.flatnonzero(np.diff(ordered)), ordered.size - 1)
    found = np.cumsum(truth[order], dtype=np.int64)[last]
    return ordered[last], found, last + 1 - found


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    truth, values = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if truth.ndim != 1 or truth.shape != values.shape or truth.size == 0:
        raise ValueError(f"expected labels and scores as two flat arrays of one length, got shapes {truth.shape} and {values.shape}")
    if not ((truth == 0) | (truth == 1)).all():
        raise ValueError("expected labels of 0 or 1")
    if not np.isfinite(values).all():
        raise ValueError("expected finite scores, got NaN or infinity; nothing was measured")
    return truth.astype(bool), values

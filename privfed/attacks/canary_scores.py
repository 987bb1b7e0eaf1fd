"""Scores of canaries, some of which took part in a training and some did not, and what every threshold makes of them."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Included and excluded canaries above several thresholds, of shape (thresholds,).

    Args:
        true_positives: Included canaries at or above the threshold.
        false_positives: Excluded ones.
    """

    true_positives: NDArray[np.int64]
    false_positives: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryScores:
    """How much each canary looks as if it had taken part; a coin decided before training whether it did. Public: they are nobody's.

    Args:
        included: Scores of those that took part, at least one, finite; higher for more likely.
        excluded: Scores of the others, at least one, finite.

    Raises:
        ValueError: If there is none of one kind, or a score is not finite.
    """

    included: NDArray[np.float64]
    excluded: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, scores in (("included", self.included), ("excluded", self.excluded)):
            if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
                raise ValueError(f"expected at least one finite score of {name} canaries, got shape {scores.shape}")

    @property
    def looks(self) -> int:
        """By how much a test at each of these thresholds must be stricter than a single one, at least 1.

        The corners are chosen after looking at all thresholds, so their number alone is too small: 1,000 canaries of which nothing can
        be told have eight corners, and at a level of 5 % divided by eight a test of one guess after another is wrong in 7 % of cases.
        Divided by twice the binary logarithm of the number of canaries, it is wrong in less than 5 %, up to thousands of them.
        """
        return max(len(self.counts.true_positives), math.ceil(2 * math.log2(len(self.included) + len(self.excluded))))

    @cached_property
    def counts(self) -> Counts:
        """Counts at the thresholds that no mixture of two others beats: the corners of the upper hull of the ROC curve.

        From all canaries down to none; the two are always among them.
        """
        thresholds = np.append(np.union1d(self.included, self.excluded), np.inf)
        missed = np.searchsorted(np.sort(self.included), thresholds).tolist()
        refused = np.searchsorted(np.sort(self.excluded), thresholds).tolist()
        corners: list[int] = []
        for new in range(len(thresholds)):
            while len(corners) > 1 and not _above(missed, refused, corners[-2], corners[-1], new):
                corners.pop()
            corners.append(new)
        return Counts(
            true_positives=len(self.included) - np.array(missed, dtype=np.int64)[corners],
            false_positives=len(self.excluded) - np.array(refused, dtype=np.int64)[corners],
        )


def _above(missed: list[int], refused: list[int], first: int, middle: int, last: int) -> bool:
    """Whether the middle point is above the line through the others."""
    rise, run = refused[middle] - refused[first], missed[middle] - missed[first]
    return rise * (missed[last] - missed[middle]) > (refused[last] - refused[middle]) * run

"""Questions to private data that are paid for: histograms, quantiles and means, each charged to the ledger before it is computed.

They replace what is otherwise computed in the clear and never counted: class shares, divergence between clients, scaling,
evaluation. Every answer is on a grid that was declared beforehand, so that no low bits of a number tell anything. Errors, warnings
and shapes do not depend on the data. Whatever is computed from an answer is free.
"""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privfed.dp.entries import Reservation
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import GaussianRelease, Unit
from privfed.dp.noise import standard_normal

_MOST_PURPOSE: Final = 50
_MOST_POINTS: Final = 2**40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyCounts:
    """Released counts: whole numbers with noise, of any shape, some of them perhaps negative.

    Args:
        counts: The counts. Public once the query was paid for.
        noise: Standard deviation of the noise on each.
    """

    counts: NDArray[np.int64]
    noise: float

    @property
    def shares(self) -> NDArray[np.float64]:
        """The counts as a distribution: negative ones are 0, the sum is 1. Uniform if nothing is left.

        For example for `privfed.data.divergence`: Kullback-Leibler and total variation of two of these cost nothing more.
        """
        positive = np.maximum(self.counts, 0).astype(np.float64)
        total = positive.sum()
        return positive / total if total else np.full(positive.shape, 1 / positive.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreHistogram:
    """Released histograms of a model's scores, of the positive and of the other records, and the metrics that follow from them.

    Args:
        edges: Scores between the bins, increasing: bin i holds the scores from edge i - 1 up to below edge i. Of shape (bins - 1,).
        positives: Counts of the positive records, of shape (bins,).
        negatives: Counts of the others, of shape (bins,).
    """

    edges: tuple[float, ...]
    positives: NoisyCounts
    negatives: NoisyCounts

    def average_precision(self) -> float:
        """Area under the precision-recall curve, step-wise over the bins, from 0 to 1; NaN if no positives are left."""
        found, false = _from_the_top(self.positives), _from_the_top(self.negatives)
        if found[-1] <= 0:
            return math.nan
        flagged = found + false
        precision = np.divide(found, flagged, out=np.zeros_like(found), where=flagged > 0)
        return float(np.sum(np.diff(found, prepend=0.0) * precision) / found[-1])

    def recall_at_fpr(self, *, fpr: float) -> float:
        """The largest recall among the edges whose false positive rate is at most `fpr`; NaN if one of the classes is empty.

        Raises:
            ValueError: If fpr is not from 0 to 1.
        """
        if not 0 <= fpr <= 1:
            raise ValueError(f"expected fpr from 0 to 1, got {fpr}")
        found, false = _from_the_top(self.positives), _from_the_top(self.negatives)
        if found[-1] <= 0 or false[-1] <= 0:
            return math.nan
        return float(np.max(found / found[-1], where=false / false[-1] <= fpr, initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Asks one data set, and charges its ledger.

    A query that fails after it was charged stays charged. A noise multiplier is relative to what one unit of the ledger can change;
    a query with noise multiplier z costs `GaussianRelease(noise_multiplier=z)`.

    Args:
        ledger: Of the data set.
        fingerprint: `Ledger.fingerprint` of the data.
        records_per_customer: Most records of one customer in the data, for a ledger whose unit is the customer; whoever calls made
            sure of it. None for records.

    Raises:
        ValueError: If the ledger's unit is the customer and `records_per_customer` is missing, or the other way around.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from privfed.dp.mechanism import Budget
        >>> with Ledger.open(Path(mkdtemp()) / "a.ledger", population="a", budget=Budget(epsilon=1.0, delta=1e-6)) as ledger:
        ...     queries = Queries(ledger=ledger)
        ...     labels = queries.histogram([0] * 9000 + [1] * 1000, bins=2, noise_multiplier=20.0, purpose="labels")
        ...     print(abs(labels.shares[1] - 0.1) < 0.02, round(ledger.spent(), 2))
        True 0.19
    """

    ledger: Ledger
    fingerprint: bytes | None = field(default=None, repr=False)
    records_per_customer: int | None = None

    def __post_init__(self) -> None:
        if (self.ledger.unit is Unit.CUSTOMER) != (self.records_per_customer is not None):
            raise ValueError("expected records_per_customer for a ledger of customers, and only there")
        if self.records_per_customer is not None and self.records_per_customer < 1:
            raise ValueError(f"expected records_per_customer of at least 1, got {self.records_per_customer}")

    def histogram(self, values: ArrayLike, *, bins: int, noise_multiplier: float, purpose: str) -> NoisyCounts:
        """How many records have each of the values 0 to bins - 1, for example of labels. Others are not counted.

        Args:
            values: Whole numbers, of shape (records,). Private.
            bins: Number of values, declared.
            noise_multiplier: Standard deviation of the noise on each count, for records.
            purpose: What the ledger shows, 1 to 50 printable ASCII characters. Public.

        Raises:
            BudgetExceededError: If the budget does not cover it; the data were not touched.
            ValueError: If an argument is out of its range.
        """
        _check_bins(bins)
        reservation = self._charge(noise_multiplier, 1, purpose)
        cells = _numbers(values, dimensions=1)
        inside = cells[(cells >= 0) & (cells < bins)].astype(np.int64)
        counts = self._noised(np.bincount(inside, minlength=bins).astype(np.float64), noise_multiplier)
        self.ledger.commit(reservation)
        return counts

    def score_histogram(
        self, labels: ArrayLike, scores: ArrayLike, *, edges: ArrayLike, noise_multiplier: float, purpose: str
    ) -> ScoreHistogram:
        """How the scores of positive records and of the others are distributed: one record is in one bin of one of the two.

        Args:
            labels: 1 for a positive record, anything else for another, of shape (records,). Private.
            scores: Of shape (records,). NaN is counted as the lowest. Private.
            edges: Scores between the bins, finite and increasing, declared. Choose them finer where scores are high.
            noise_multiplier: As in `histogram`.
            purpose: As in `histogram`.

        Raises:
            BudgetExceededError: If the budget does not cover it; the data were not touched.
            ValueError: If an argument is out of its range, or, after it was charged, if the shapes differ.
        """
        between = np.asarray(edges, np.float64)
        if between.ndim != 1 or between.size == 0 or not np.isfinite(between).all() or not (np.diff(between) > 0).all():
            raise ValueError("expected at least one finite edge, all increasing")
        reservation = self._charge(noise_multiplier, 1, purpose)
        truth, values = _numbers(labels, dimensions=1) == 1, _numbers(scores, dimensions=1)
        if truth.shape != values.shape:
            raise ValueError("expected labels and scores as two flat arrays of one length; nothing was released")
        bins = between.size + 1
        cells = np.searchsorted(between, np.where(np.isnan(values), -np.inf, values), side="right") + bins * truth
        counts = self._noised(np.bincount(cells, minlength=2 * bins).astype(np.float64), noise_multiplier)
        self.ledger.commit(reservation)
        return ScoreHistogram(
            edges=tuple(between.tolist()),
            negatives=NoisyCounts(counts=counts.counts[:bins], noise=counts.noise),
            positives=NoisyCounts(counts=counts.counts[bins:], noise=counts.noise),
        )

    def quantile(
        self, values: ArrayLike, *, probability: float, lower: float, step: float, points: int, noise_multiplier: float, purpose: str
    ) -> float:
        """A point of a declared grid below which about a given share of the values lies.

        It halves the grid, with one noisy count each time: as many releases as the number of points has bits.

        Args:
            values: Of shape (records,). NaN is counted as the lowest. Private.
            probability: The share, above 0 and below 1.
            lower: First point of the grid.
            step: Distance of two points. Positive.
            points: Number of points, from 2 to 2^40.
            noise_multiplier: Of each release.
            purpose: As in `histogram`.

        Returns:
            lower + i * step, with i from 0 to points - 1.

        Raises:
            BudgetExceededError: If the budget does not cover it; the data were not touched.
            ValueError: If an argument is out of its range.
        """
        if not 0 < probability < 1 or not 2 <= points <= _MOST_POINTS:
            raise ValueError(f"expected a probability above 0 and below 1 and 2 to 2^40 points, got {probability} and {points}")
        _check_grid(lower, step)
        releases = (points - 1).bit_length()
        reservation = self._charge(noise_multiplier, releases, purpose)
        numbers = _numbers(values, dimensions=1)
        noise = standard_normal(releases) * (noise_multiplier * self._contribution * max(probability, 1 - probability))
        low, high = 0, points - 1
        for release in range(releases):
            middle = (low + high) // 2
            # Summed per record, so that nobody's number of records has to be known.
            above = np.count_nonzero(numbers > lower + middle * step)
            surplus = (1 - probability) * (numbers.size - above) - probability * above
            low, high = (low, middle) if surplus + noise[release] >= 0 else (min(middle + 1, high), high)
        self.ledger.commit(reservation)
        return lower + low * step

    def means(
        self, columns: ArrayLike, *, lower: ArrayLike, upper: ArrayLike, step: float, noise_multiplier: float, purpose: str
    ) -> NDArray[np.float64]:
        """Mean of each column, after clipping to declared ranges, on a declared grid.

        Args:
            columns: Of shape (records, columns). NaN counts as the middle of its range. Private.
            lower: Lower end of each range, of shape (columns,), declared.
            upper: Upper end of each range, above the lower.
            step: Distance of two points of the grid of answers, which begins at the lower end. Positive.
            noise_multiplier: Relative to all sums and the count together: they are one release.
            purpose: As in `histogram`.

        Returns:
            Of shape (columns,), within the ranges and on the grid.

        Raises:
            BudgetExceededError: If the budget does not cover it; the data were not touched.
            ValueError: If an argument is out of its range, or, after it was charged, if the shapes differ.
        """
        low, high = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
        if low.ndim != 1 or low.shape != high.shape or not np.isfinite([low, high]).all() or not (low < high).all():
            raise ValueError("expected a finite lower and upper end for each column, the lower one below")
        _check_grid(0.0, step)
        reservation = self._charge(noise_multiplier, 1, purpose)
        table = _numbers(columns, dimensions=2)
        if table.shape[1] != low.size:
            raise ValueError(f"expected records of {low.size} columns; nothing was released")
        middle, half = (low + high) / 2, (high - low) / 2
        scaled = np.clip(np.where(np.isnan(table), 0.0, (np.clip(table, low, high) - middle) / half), -1, 1)
        # Each record adds at most 1 to every sum and to the count.
        exact = np.append(scaled.sum(axis=0), table.shape[0])
        noised = exact + standard_normal(exact.size) * (noise_multiplier * self._contribution * math.sqrt(exact.size))
        means = middle + half * np.clip(noised[:-1] / max(float(noised[-1]), 1.0), -1, 1)
        self.ledger.commit(reservation)
        steps = np.minimum(np.rint((means - low) / step), np.floor((high - low) / step))
        return low + steps * step

    @property
    def _contribution(self) -> int:
        """How many records one unit has at most."""
        return self.records_per_customer or 1

    def _charge(self, noise_multiplier: float, releases: int, purpose: str) -> Reservation:
        if not (1 <= len(purpose) <= _MOST_PURPOSE and purpose.isascii() and purpose.isprintable()):
            raise ValueError(f"expected a purpose of 1 to {_MOST_PURPOSE} printable ASCII characters")
        event = GaussianRelease(noise_multiplier=noise_multiplier, count=releases)
        return self.ledger.reserve_next(event, session=f"query: {purpose}".encode(), fingerprint=self.fingerprint)

    def _noised(self, counts: NDArray[np.float64], noise_multiplier: float) -> NoisyCounts:
        noise = noise_multiplier * self._contribution
        return NoisyCounts(counts=np.rint(counts + noise * standard_normal(counts.size)).astype(np.int64), noise=noise)


def _from_the_top(counts: NoisyCounts) -> NDArray[np.float64]:
    """How many are in the highest bin, the two highest, and so on: not falling, because no number of records does."""
    return np.maximum.accumulate(np.maximum(np.cumsum(counts.counts[::-1]), 0)).astype(np.float64)


def _check_bins(bins: object) -> None:
    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 1:
        raise ValueError(f"expected bins to be a whole number of at least 1, got {bins!r}")


def _check_grid(lower: float, step: float) -> None:
    if not (math.isfinite(lower) and math.isfinite(step) and step > 0):
        raise ValueError(f"expected a finite lower end and a positive step, got {lower} and {step}")


def _numbers(values: ArrayLike, *, dimensions: int) -> NDArray[np.float64]:
    """Private values as numbers: one, or one row, per record. More per record would cost more than was charged.

    Raises:
        ValueError: If they are something else. What they are is not said.
    """
    try:
        numbers = np.asarray(values, np.float64)
    except (ValueError, TypeError):
        raise ValueError("expected numbers, got something else; nothing was released") from None
    if numbers.ndim != dimensions:
        what = "one number" if dimensions == 1 else "one row"
        raise ValueError(f"expected {what} per record, got an array of {numbers.ndim} dimensions; nothing was released")
    return numbers

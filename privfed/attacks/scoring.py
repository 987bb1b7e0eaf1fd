"""Compares what an attack found with the truth, beside what guessing without the update reaches. Only an auditor can run this.

Cells are numeric columns and one-hot blocks. A numeric cell is right within a tolerance, a block if the largest of its entries is
the right one. A score alone means nothing: under noise a reconstruction often matches fewer cells than the mean row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit

from privfed.attacks.facts import TableSchema
from privfed.attacks.observation import Reconstruction


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScore:
    """Shares, each from 0 to 1, of what is right. NaN where the table has no such cells.

    Args:
        rows: Rows in which every cell is right.
        cells: Cells, all kinds together.
        continuous: Numeric cells.
        categorical: One-hot blocks.
    """

    rows: float
    cells: float
    continuous: float
    categorical: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RowMatch:
    """For each true row, in its order, the guess that it was compared with. Private.

    Args:
        guesses: Of shape (n, width), in the units of the model's input.
        right: Of shape (n, cells): numeric columns first, then blocks.
        found: Position of each guess in what the attack found, of shape (n,); from its end on, the guess is of the baseline.
    """

    guesses: NDArray[np.float64]
    right: NDArray[np.bool_]
    found: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateCheck:
    """How many rows an attack certified, and how many of those are no true row."""

    certified: int
    false: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean over repeats with a confidence interval by Student's t distribution; it is not cut to [0, 1].

    Args:
        mean: Mean of the repeats.
        low: Lower end.
        high: Upper end.
        level: Confidence level, above 0 and below 1.
        repeats: Number of repeats. Where all agree the interval has no width, so show this number with it.
    """

    mean: float
    low: float
    high: float
    level: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.level:.0%} t interval, {self.repeats} repeats)"


def score_rows(
    rows: NDArray[np.float64],
    truth: NDArray[np.float64],
    *,
    schema: TableSchema,
    tolerance: float,
    baseline: NDArray[np.float64],
) -> RowScore:
    """Share of true rows and cells that were recovered, under the assignment of rows to true rows with the most right cells.

    Only as many rows as there are true ones count, in the attack's own order, so spraying guesses gains nothing. Where an attack
    gives fewer, rows of the baseline fill up: an attack that finds nothing scores as the baseline.

    Args:
        rows: What the attack found, of shape (any, width), best first.
        truth: The true rows, of shape (n, width), n at least 1. Private.
        schema: The columns.
        tolerance: Largest error of a right numeric cell, as a share of the column's public range; at least 0.
        baseline: Guesses without the update, of shape (n, width). Pass it as `rows` to get the baseline's own score.

    Raises:
        ValueError: If shapes do not fit or the tolerance is negative.
    """
    matched = match_rows(rows, truth, schema=schema, tolerance=tolerance, baseline=baseline).right
    numeric = len(schema.continuous)
    return RowScore(
        rows=float(matched.all(axis=1).mean()),
        cells=float(matched.mean()),
        continuous=float(matched[:, :numeric].mean()) if numeric else math.nan,
        categorical=float(matched[:, numeric:].mean()) if schema.blocks else math.nan,
    )


def match_rows(
    rows: NDArray[np.float64],
    truth: NDArray[np.float64],
    *,
    schema: TableSchema,
    tolerance: float,
    baseline: NDArray[np.float64],
) -> RowMatch:
    """Which guess `score_rows` compares with each true row, and which of its cells are right. Arguments and errors as there."""
    if truth.ndim != 2 or truth.shape[1] != schema.width or not len(truth):
        raise ValueError(f"expected at least one true row of {schema.width} columns, got shape {truth.shape}")
    if baseline.shape != truth.shape or rows.ndim != 2 or rows.shape[1] != schema.width:
        raise ValueError(f"expected rows of {schema.width} columns and baseline of shape {truth.shape}, got {rows.shape}, {baseline.shape}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"expected tolerance to be at least 0, got {tolerance}")
    guesses = np.concatenate([rows, baseline])[: len(truth)]
    right = np.stack([_right_cells(guess, truth, schema=schema, tolerance=tolerance) for guess in guesses])
    true, found = linear_sum_assignment(right.sum(axis=2).T, maximize=True)
    return RowMatch(guesses=guesses[found], right=right[found, true], found=found)


def check_certificates(
    reconstruction: Reconstruction, truth: NDArray[np.float64], *, schema: TableSchema, tolerance: float
) -> CertificateCheck:
    """Counts the certified rows that are no true row: every true row differs by more than the tolerance somewhere.

    Args:
        reconstruction: What the attack found.
        truth: The true rows, of shape (n, width). Private.
        schema: The columns.
        tolerance: As a share of each column's public range, one-hot entries included.
    """
    certified = reconstruction.rows[reconstruction.certified]
    reach = tolerance * (schema.high - schema.low)
    false = sum(not (np.abs(truth - row) <= reach).all(axis=1).any() for row in certified)
    return CertificateCheck(certified=len(certified), false=false)


def mean_rows(public_rows: NDArray[np.float64], *, schema: TableSchema, count: int) -> NDArray[np.float64]:
    """Baseline: the same row `count` times, with the mean of each numeric column and the most frequent category of each block."""
    row = public_rows.mean(axis=0)
    for block in schema.blocks:
        row[block] = np.eye(block.stop - block.start)[row[block].argmax()]
    return np.tile(row, (count, 1))


def marginal_rows(public_rows: NDArray[np.float64], *, schema: TableSchema, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Baseline: `count` rows with every numeric column and every block drawn on its own from the public rows."""
    rows = np.empty((count, schema.width))
    for columns in (*(slice(i, i + 1) for i in schema.continuous), *schema.blocks):
        rows[:, columns] = public_rows[rng.integers(len(public_rows), size=count), columns]
    return rows


def nearest_rows(
    public_rows: NDArray[np.float64], truth: NDArray[np.float64], *, schema: TableSchema, tolerance: float
) -> NDArray[np.float64]:
    """Baseline: for each true row the public row with the most right cells. It knows the truth, so it is hard to beat.

    What it matches was public before the round, and is no leak.
    """
    right = [_right_cells(row, public_rows, schema=schema, tolerance=tolerance).sum(axis=1) for row in truth]
    return public_rows[np.argmax(right, axis=1)]


def advantage(score: float, *, baseline: float) -> float:
    """Share of what guessing leaves open that the attack gets: 1 for everything, 0 as good as guessing, negative if worse.

    NaN where the baseline gets everything, so that nothing is left to learn.

    Example:
        >>> advantage(0.75, baseline=0.5)
        0.5
    """
    return (score - baseline) / (1 - baseline) if baseline < 1 else math.nan


def interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean and t interval over independent repeats (different batches and models).

    Raises:
        ValueError: If there are fewer than two values, one is not finite, or the level is not between 0 and 1.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < 2 or not np.isfinite(array).all() or not 0 < level < 1:
        raise ValueError(f"expected at least two finite values and a level between 0 and 1, got {array.size} values and level {level}")
    mean, half = float(array.mean()), float(stdtrit(len(array) - 1, (1 + level) / 2) * array.std(ddof=1) / math.sqrt(len(array)))
    return Interval(mean=mean, low=mean - half, high=mean + half, level=level, repeats=len(array))


def _right_cells(guess: NDArray[np.float64], rows: NDArray[np.float64], *, schema: TableSchema, tolerance: float) -> NDArray[np.bool_]:
    """Which cells of a guess are right, for each row: numeric columns first, then blocks; of shape (rows, cells)."""
    numeric = schema.continuous
    reach = tolerance * (schema.high - schema.low)[numeric]
    right = [np.abs(rows[:, numeric] - guess[numeric]) <= reach]
    for block in schema.blocks:
        entries = guess[block]
        # A block without a single largest entry names no category; argmax would name the first.
        named = np.count_nonzero(entries == entries.max()) == 1
        right.append((rows[:, block].argmax(axis=1) == entries.argmax())[:, None] & named)
    return np.concatenate(right, axis=1)

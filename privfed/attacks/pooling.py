"""What several starts of an attack by optimisation say together: where they agree, and how sure that makes them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from privfed.attacks.facts import TableSchema


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pooled:
    """Rows over several starts. Private.

    Args:
        rows: Means over the starts, of shape (records, width).
        spreads: Standard deviations over the starts, of the same shape.
    """

    rows: NDArray[np.float64]
    spreads: NDArray[np.float64]


def pool_rows(rows: NDArray[np.float64], *, best: int) -> Pooled:
    """Pools batches whose rows are in any order: those of every start are matched to those of the best one.

    Args:
        rows: Of shape (starts, records, width).
        best: Which start the others are matched to.
    """
    matched = [one[linear_sum_assignment(((rows[best][:, None] - one) ** 2).sum(axis=2))[1]] for one in rows]
    return Pooled(rows=np.mean(matched, axis=0), spreads=np.std(matched, axis=0))


def certainty(pooled: Pooled, *, schema: TableSchema, usual_spread: NDArray[np.float64]) -> NDArray[np.float64]:
    """How sure the starts are together, from 0 to 1, of shape (records,): the mean over numbers and one-hot blocks.

    A number is as sure as its spread is small beside the usual one; a block as its pooled shares lack entropy.

    Args:
        pooled: Rows with blocks of shares.
        schema: The columns.
        usual_spread: Standard deviation of each column among public records, of shape (width,).
    """
    numbers = schema.continuous
    cells = [np.clip(1 - pooled.spreads[:, numbers] / (usual_spread[numbers] + 1e-9), 0, 1)]
    for block in schema.blocks:
        shares = np.clip(pooled.rows[:, block], 1e-12, 1)
        cells.append(np.clip(1 + (shares * np.log(shares)).sum(axis=1, keepdims=True) / np.log(shares.shape[1]), 0, 1))
    return np.concatenate(cells, axis=1).mean(axis=1)


def whole_categories(rows: NDArray[np.float64], *, schema: TableSchema) -> NDArray[np.float64]:
    """The rows with 1 for the largest share of each one-hot block and 0 for the others."""
    hard = rows.copy()
    for block in schema.blocks:
        hard[:, block] = np.eye(block.stop - block.start)[rows[:, block].argmax(axis=1)]
    return hard

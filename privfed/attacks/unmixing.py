"""Rows as the points of the update's row space whose one-hot blocks are whole categories.

[row, 1] is one of the few points of a space of as many dimensions as there are rows, and its categories are zeros and ones. With as
many independent category columns as rows, each choice of categories in some of the columns fixes one point, and the other columns
tell whether it is a possible record. Blocks allow few choices: sixteen rows take some hundred points and a millisecond. Neither the
activation nor the later layers nor the number of steps matter, so this also reads networks without ReLU.
"""

import itertools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from privfed.attacks.analytic import EXACT
from privfed.attacks.facts import TableSchema
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.row_space import RowSpace, row_space

_CERTIFICATE = "certified rows are the only points of the update's row space that are whole records, and as many as its rank"
# An entry is believed to be a zero or a one within this many standard deviations of its error, but never further than this.
_DEVIATIONS, _FURTHEST = 6.0, 0.25
# A column fixes a dimension if it stands this far out of the noise there.
_FIXED = 8.0
_MOST_POINTS = 1_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Points of a row space that are possible records.

    Args:
        combinations: Of shape (any, rank): the points as combinations of the basis.
        fixed: Whether the categories fix them; else they are the points of that category nearest to the middle of the ranges.
    """

    combinations: NDArray[np.float64]
    fixed: bool


# Matrices this small only wait for each other's threads.
@threadpool_limits.wrap(limits=1)
def unmix(observation: Observation) -> Reconstruction | NotApplicable:
    """Finds the rows of a batch by their categories, in milliseconds, whatever follows the first layer.

    Where exactly as many whole records are found as rows are behind the update, they are the rows, and those known to within
    `EXACT` of each column's range are certified. Records that are sums and differences of others can be whole by chance; where
    more are found than there are rows, none is certified.

    Not applicable to tables without one-hot block, to rows whose categories span fewer dimensions than there are rows, and where
    `row_space` is not.

    Args:
        observation: What the attacker holds.

    Returns:
        At most as many rows as the rank of the update, those nearest to the middle of the public ranges first.
    """
    started = time.perf_counter()
    space = row_space(observation)
    if isinstance(space, NotApplicable):
        return space
    schema = observation.schema
    if not schema.blocks:
        return NotApplicable(reason="the table has no one-hot block, by which rows could be told from mixtures")
    for cut in space.cuts():
        points = whole_records(cut, schema)
        if points.fixed and len(points.combinations):
            break
    else:
        return NotApplicable(reason=f"the categories do not tell the {space.rank} rows apart that are mixed in the update")
    rows, errors = cut.rows(points.combinations)
    count = len(rows)
    reach = schema.high - schema.low
    far = np.abs((rows - schema.low) / reach - 0.5)[:, schema.continuous].max(axis=1, initial=0.0)
    order = np.argsort(far)[: cut.rank]
    only = count == cut.rank == space.rank
    known = _DEVIATIONS * errors <= EXACT * reach
    certified = (np.count_nonzero(~known, axis=1) == 0) & np.full(count, only)
    confidence = known.mean(axis=1) * min(1.0, cut.rank / count) * cut.rank / space.rank
    return Reconstruction(
        rows=rows[order],
        certified=certified[order],
        confidence=np.where(certified, 1.0, 0.9 * confidence)[order],
        certificate=_CERTIFICATE if only else "no row is certified: more whole records were found than there are rows, or not all rows",
        seconds=time.perf_counter() - started,
    )


def whole_records(space: RowSpace, schema: TableSchema) -> Points:
    """All points of a row space that are possible records, as far as the categories fix them. None for a table without one-hot block."""
    nothing = Points(combinations=np.zeros((0, space.rank)), fixed=False)
    if not schema.blocks:
        return nothing
    scaled = space.basis * space.scales[:, None]  # now every entry of a column has that column's noise
    pivots, choices = _pivots(scaled / space.column_noise, schema)
    if np.prod([len(choice) for choice in choices]) > _MOST_POINTS:
        return nothing
    solved = np.linalg.pinv(scaled[:, pivots])
    values = np.array([np.concatenate(choice) for choice in itertools.product(*choices)])
    points = values @ solved
    categories = np.concatenate([np.arange(block.start, block.stop) for block in schema.blocks])
    entries = points @ scaled[:, categories]
    leverage = solved @ scaled[:, categories]
    spread = np.sqrt(space.column_noise[categories] ** 2 + (space.column_noise[pivots] ** 2) @ leverage**2)
    allowed = np.minimum(_DEVIATIONS * np.linalg.norm(points, axis=1)[:, None] * spread, _FURTHEST)
    whole = np.rint(entries)
    wrong = np.count_nonzero((np.abs(entries - whole) > allowed) | ~np.isin(whole, (0, 1)), axis=1)
    start = 0
    for block in schema.blocks:
        wrong += whole[:, start : (start := start + block.stop - block.start)].sum(axis=1) != 1
    possible = wrong == 0
    # All category columns and the bias together fix the point better than the pivots alone.
    known = np.append(categories, schema.width)
    weights = 1 / space.column_noise[known]
    targets = np.column_stack([whole[possible], np.ones(possible.sum())]) * weights
    points = np.linalg.lstsq((scaled[:, known] * weights).T, targets.T, rcond=None)[0].T
    free = _complement(scaled[:, pivots])
    if free.shape[1] and len(schema.continuous):
        reach = schema.high[schema.continuous] - schema.low[schema.continuous]
        middle = (schema.high + schema.low)[schema.continuous] / 2
        off = (middle - points @ scaled[:, schema.continuous]) / reach
        points += np.linalg.lstsq((free.T @ scaled[:, schema.continuous] / reach).T, off.T, rcond=None)[0].T @ free.T
    return Points(combinations=points * space.scales, fixed=not free.shape[1])


def _complement(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """An orthonormal basis of what no column reaches, of shape (rank, rank - number of columns)."""
    return np.linalg.qr(columns, mode="complete")[0][:, columns.shape[1] :]


def _pivots(columns: NDArray[np.float64], schema: TableSchema) -> tuple[list[int], list[NDArray[np.float64]]]:
    """Columns that fix a point of the space, bias first, and for each block the values that its columns among them can take.

    Blocks with many categories come first: n columns of one block take n + 1 values together, those of n blocks 2^n.
    """
    rank = len(columns)
    pivots, choices = [schema.width], [np.ones((1, 1))]

    def independent(block: slice) -> NDArray[np.float64]:
        fixed, _ = np.linalg.qr(columns[:, pivots])
        return columns[:, block] - fixed @ (fixed.T @ columns[:, block])

    def dimensions(block: slice) -> int:
        return int((np.linalg.svd(independent(block), compute_uv=False) > _FIXED * np.sqrt(rank)).sum())

    for block in sorted(schema.blocks, key=dimensions, reverse=True):
        count = 0
        while len(pivots) < rank:
            lengths = np.linalg.norm(independent(block), axis=0)
            if lengths.max() < _FIXED * np.sqrt(rank):
                break
            pivots.append(block.start + int(lengths.argmax()))
            count += 1
        if count:
            choices.append(np.vstack([np.zeros(count), np.eye(count)]))
    return pivots, choices

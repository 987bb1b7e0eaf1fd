"""Rows as the points of the update's row space whose one-hot blocks are whole categories.

[row, 1] is one of the few points of a space of as many dimensions as there are rows, and its categories are zeros and ones. With as
many independent category columns as rows, each choice of categories in some of the columns fixes one point, and the other columns
tell whether it is a possible record. Blocks allow few choices: sixteen rows take some hundred points and a millisecond. Neither the
activation nor the later layers nor the number of steps matter, so this also reads networks without ReLU.
"""

import itertools
import time

import numpy as np
from numpy.typing import NDArray

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
        if len(points):
            break
    else:
        return NotApplicable(reason=f"the categories do not tell the {space.rank} rows apart that are mixed in the update")
    rows, errors = cut.rows(points)
    reach = schema.high - schema.low
    far = np.abs((rows - schema.low) / reach - 0.5)[:, schema.continuous].max(axis=1, initial=0.0)
    order = np.argsort(far)[: cut.rank]
    only = len(points) == cut.rank == space.rank
    certified = (_DEVIATIONS * errors <= EXACT * reach).all(axis=1) & only
    confidence = np.full(len(points), min(1.0, cut.rank / len(points)))
    return Reconstruction(
        rows=rows[order],
        certified=certified[order],
        confidence=np.where(certified, 1.0, 0.9 * confidence)[order],
        certificate=_CERTIFICATE if only else "no row is certified: more whole records were found than there are rows, or not all rows",
        seconds=time.perf_counter() - started,
    )


def whole_records(space: RowSpace, schema: TableSchema) -> NDArray[np.float64]:
    """Combinations of the basis, of shape (any, rank), that are possible records; all of them, if there are any.

    None where the categories span fewer dimensions than the rank, or are too noisy to tell a one from a zero.
    """
    scaled = space.basis * space.scales[:, None]  # now every entry of a column has that column's noise
    pivots, choices = _pivots(scaled / space.column_noise, schema)
    if len(pivots) < space.rank or np.prod([len(choice) for choice in choices]) > _MOST_POINTS:
        return np.zeros((0, space.rank))
    solved = np.linalg.inv(scaled[:, pivots])
    values = np.array([np.concatenate(choice) for choice in itertools.product(*choices)])
    points = values @ solved
    categories = np.concatenate([np.arange(block.start, block.stop) for block in schema.blocks])
    entries = points @ scaled[:, categories]
    leverage = solved @ scaled[:, categories]
    spread = np.sqrt(space.column_noise[categories] ** 2 + (space.column_noise[pivots] ** 2) @ leverage**2)
    allowed = np.minimum(_DEVIATIONS * np.linalg.norm(points, axis=1)[:, None] * spread, _FURTHEST)
    whole = np.rint(entries)
    possible = (np.abs(entries - whole) <= allowed).all(axis=1) & np.isin(whole, (0, 1)).all(axis=1)
    start = 0
    for block in schema.blocks:
        possible &= whole[:, start : (start := start + block.stop - block.start)].sum(axis=1) == 1
    # All category columns and the bias together fix the point better than the pivots alone.
    fixed = np.append(categories, schema.width)
    weights = 1 / space.column_noise[fixed]
    targets = np.column_stack([whole[possible], np.ones(possible.sum())]) * weights
    return np.linalg.lstsq((scaled[:, fixed] * weights).T, targets.T, rcond=None)[0].T * space.scales


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

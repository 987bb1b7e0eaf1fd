"""All rows of a batch at once and exactly, from the change of a first layer with ReLU (Dimitrov et al., 2024, arXiv:2403.03945).

It reads any update that is a sum of gradients: of one step or many, with momentum or known weight decay, of records that were clipped
one by one, or of several clients. Noise is what stops it.
"""

import time

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from privfed.attacks.analytic import EXACT
from privfed.attacks.facts import Activation, TableSchema
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction, linear_layers
from privfed.attacks.pooling import whole_categories
from privfed.attacks.row_space import RowSpace, row_space
from privfed.attacks.separation import Separation, choose, separate
from privfed.attacks.silent_neurons import SILENT, STARTS, SilentNeurons
from privfed.attacks.unmixing import whole_records

_CERTIFICATE = "certified rows are records by the schema, and all rows together explain which neurons stayed silent for each of them"

_DEVIATIONS = 6.0
# A category is known if its entries are known to within this.
_WHOLE = 0.25


# Matrices this small only wait for each other's threads.
@threadpool_limits.wrap(limits=1)
def spear(observation: Observation, *, starts: int = 20_000, seed: int = 0) -> Reconstruction | NotApplicable:
    """Separates the rows that are mixed in the first layer's change.

    The number of rows need not be known: it is the rank of the change. Records with categories are looked for first among the
    whole records of the row space (see `unmix`), which is faster; which of them are the rows is decided by the neurons.

    A row is certified if the rows found are as many as the rank and explain together, for 98 of 100 neurons each, which of them
    the row fires and which it leaves silent, which no other records of the row space do; if its numbers are known to within `EXACT` of
    each column's range; and if it is a record by the schema: in range, one category in each block, and known which. So a certificate
    is wrong only if rows fire the same neurons in the same proportion, which shows them as one.

    Not applicable without ReLU, to updates of adaptive optimisers, and to at least as many rows as the layer can keep apart.

    Args:
        observation: What the attacker holds.
        starts: How many searches to start at most, for each rank that the singular values suggest.
        seed: Decides where they start.

    Returns:
        As many rows as were separated, the best explained first. Fewer than there were where some are lost in noise; none where
        the rows could not be separated.
    """
    started = time.perf_counter()
    space = row_space(observation)
    if isinstance(space, NotApplicable):
        return space
    if observation.activation is not Activation.RELU or len(linear_layers(observation.layout)) < 2:
        return NotApplicable(reason="no ReLU follows the first layer: every neuron mixes all rows, and none is silent for any")
    schema, rng = observation.schema, np.random.default_rng(seed)
    best: Separation | None = None
    for cut in space.cuts():
        found = _separate(cut, schema, rng=rng, starts=starts)
        if found is not None and (best is None or found.explained.sum() > best.explained.sum()):
            best = found
        if best is not None and best.complete:
            break
    # Where an update was compressed, what looks like a row may have no bias at all.
    if best is None or not np.isfinite(best.rows).all():
        nothing = np.zeros(0)
        return Reconstruction(
            rows=np.zeros((0, schema.width)),
            certified=nothing.astype(np.bool_),
            confidence=nothing,
            certificate="no row is certified, because the rows could not be separated",
            seconds=time.perf_counter() - started,
        )
    valid = _records(best, schema)
    explained = len(best.rows) == space.rank and best.complete and not best.rival
    certified = valid & explained & _known(best, schema).all(axis=1)
    confidence = _confidence(best, valid, schema)
    order = np.lexsort((-confidence, ~certified))
    rows = best.rows.copy()
    rows[valid] = whole_categories(rows[valid], schema=schema)
    return Reconstruction(
        rows=rows[order],
        certified=certified[order],
        confidence=np.where(certified, 1.0, confidence)[order],
        certificate=_CERTIFICATE if explained else "no row is certified, because not all rows together explain the silent neurons",
        seconds=time.perf_counter() - started,
    )


def _separate(space: RowSpace, schema: TableSchema, *, rng: np.random.Generator, starts: int) -> Separation | None:
    if space.rank == 1:
        return separate(space, np.ones((1, 1)))
    points = whole_records(space, schema)
    neurons = SilentNeurons(space, rng, guesses=points.combinations)
    if not neurons.enough:
        return None
    if points.fixed:
        neurons.add(_across(neurons.space, points.combinations))
    best: Separation | None = None
    for turn in range(1 + starts // STARTS):
        directions = neurons.independent()
        if len(directions) == space.rank:
            found = separate(neurons.space, directions)
            if best is None or found.explained.sum() > best.explained.sum():
                best = found
        if turn == 0 and points.fixed and not (best is not None and best.complete):
            chosen = choose(neurons.space, points.combinations, rng)
            if chosen is not None and (best is None or chosen.explained.sum() > best.explained.sum()):
                best = chosen
        if best is not None and best.complete:
            break
        neurons.search()
    return best


def _across(space: RowSpace, points: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """For each point that may be a row, the direction across the plane of the neurons that it leaves silent, if they are on one."""
    directions: list[NDArray[np.float64]] = []
    for point in points:
        extended = (point @ space.basis) / (point @ space.basis[:, -1])
        silent = np.maximum(space.before @ extended, space.after @ extended) < 0
        if silent.sum() > space.rank:
            direction = np.linalg.svd(space.coordinates[silent], full_matrices=False)[2][-1]
            if np.median(np.abs(space.coordinates[silent] @ direction)) < SILENT:
                directions.append(direction)
    return directions


def _records(found: Separation, schema: TableSchema) -> NDArray[np.bool_]:
    """Which rows can be records of the schema, within their deviations."""
    error = _DEVIATIONS * found.deviations + 1e-6 * (schema.high - schema.low)
    wrong = np.count_nonzero((found.rows < schema.low - error) | (found.rows > schema.high + error), axis=1)
    for block in schema.blocks:
        whole = np.rint(found.rows[:, block])
        wrong += np.count_nonzero(np.abs(found.rows[:, block] - whole) > error[:, block], axis=1) + (whole.sum(axis=1) != 1)
    return wrong == 0


def _known(found: Separation, schema: TableSchema) -> NDArray[np.bool_]:
    """Which entries are known, of shape (rows, width)."""
    largest = EXACT * (schema.high - schema.low)
    for block in schema.blocks:
        largest[block] = _WHOLE
    return _DEVIATIONS * found.deviations <= largest


def _confidence(found: Separation, valid: NDArray[np.bool_], schema: TableSchema) -> NDArray[np.float64]:
    """From 0 to 1: how well the row explains the neurons, times the share of its entries that are known.

    Rows are found together, so one that explains little makes the others doubtful.
    """
    known = _known(found, schema).mean(axis=1)
    together = found.explained.mean()
    return 0.99 * together * found.explained**4 * known * np.where(valid, 1.0, 0.5)

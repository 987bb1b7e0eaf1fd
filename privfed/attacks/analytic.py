"""Rows read off the first layer's gradient, and a certificate that says which of them are exact without knowing the truth.

Where one row x alone makes neuron k fire, dW_k = delta x and db_k = delta, so that dW_k / db_k = x (Phong et al., 2018, section
3; Boenisch et al., arXiv:2112.02918). Where several do, the quotient is a mixture of their rows. Learning rate, clipping of each
record's gradient and aggregation scale both alike and change nothing.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import Activation, TableSchema
from privfed.attacks.observation import (
    GradientPart,
    LinearLayer,
    NotApplicable,
    Observation,
    Reconstruction,
    gradient_part,
    linear_layers,
)
from privfed.update import PlainVector

EXACT = 1e-2
"""Largest error with which an entry still counts as known, as a share of its column's public range."""

_CERTIFICATE = "certified rows are of whole categories, no other row has the same, and they agree with the neurons that stayed silent"
# A direction counts as a row's when it stands this far above what errors can make, so that a certificate never hangs on noise.
_SIGNAL_OVER_ERROR = 3.0
_AGREEING = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """[weight | bias] of shape (neurons, inputs + 1): before, after, the change by gradients alone, and its largest error."""

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    change: NDArray[np.float64]
    error: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidates:
    """Rows of shape (n, width), their largest errors, and the number of neurons that agree on each. The most precise is first."""

    rows: NDArray[np.float64]
    errors: NDArray[np.float64]
    neurons: NDArray[np.intp]

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> "_Candidates":
        return _Candidates(rows=self.rows[which], errors=self.errors[which], neurons=self.neurons[which])


def analytic(observation: Observation) -> Reconstruction | NotApplicable:
    """Reads rows off the first layer, in milliseconds.

    A row is certified if all of this holds:

    * every entry is known to within `EXACT` of its column's range, despite rounding, the encryption grid and known noise;
    * each one-hot block has one 1 and otherwise 0, which a mixture of rows of different categories does not;
    * numeric entries lie in their public ranges;
    * no other such row with the same categories was found: mixtures of rows with equal categories come in many versions;
    * the neurons that the row leaves silent carry fewer rows than all neurons do, as they must when it takes part in none;
    * where further layers follow the second one, two neurons agree on it: behind them, rows mix in other proportions in each neuron.

    So a certificate is wrong only if rows of the batch agree in all categories and in nearly all neurons that they fire. Tables
    without one-hot block are never certified, nor is a layer without ReLU.

    Args:
        observation: What the attacker holds.

    Returns:
        At most as many rows as there were record visits: certified ones first, then rows that may be mixtures: those that fit the
        silent neurons, those in range, those on which more neurons agree. A range that was declared too narrow costs certificates,
        no rows. In tables without one-hot block, only rows that two neurons agree on, unless the gradient carries a single row.
    """
    started = time.perf_counter()
    part = gradient_part(observation)
    if isinstance(part, NotApplicable):
        return part
    schema, layers = observation.schema, linear_layers(observation.layout)
    first = next((layer for layer in layers if layer.inputs == schema.width), None)
    if first is None:
        return NotApplicable(reason=f"the model has no fully connected layer with bias on the schema's {schema.width} columns")
    layer = _first_layer(part, first)
    rank = _rank(layer)
    candidates = _distinct(_possible_records(layer, schema))
    if not schema.blocks and rank > 1:
        candidates = candidates.take(candidates.neurons > 1)
    reason = _why_uncertified(observation, layers=len(layers))
    inside = _in_range(candidates, schema)
    fitting, certified = np.zeros_like(inside), np.zeros_like(inside)
    if reason is None:
        pairs = zip(candidates.rows[inside], candidates.errors[inside], strict=True)
        fitting[inside] = [_silent_neurons_carry_less(layer, row, error, rank=rank) for row, error in pairs]
        certified[inside] = fitting[inside] & _alone_in_categories(candidates.rows[inside], schema)
        certified &= candidates.neurons >= (_AGREEING if len(layers) > 2 else 1)
    order = np.lexsort((-candidates.neurons, ~inside, ~fitting, ~certified))[: max(1, round(observation.records))]
    return Reconstruction(
        rows=candidates.rows[order],
        certified=certified[order],
        confidence=np.where(certified, 1.0, candidates.neurons / len(layer.change))[order],
        certificate=_CERTIFICATE if reason is None else reason,
        seconds=time.perf_counter() - started,
    )


def _first_layer(part: GradientPart, first: LinearLayer) -> _Layer:
    def matrix(vector: PlainVector) -> NDArray[np.float64]:
        tensors = vector.layout.unflatten(vector)
        return np.column_stack([tensors[first.weight], tensors[first.bias]])

    return _Layer(before=matrix(part.before), after=matrix(part.after), change=matrix(part.change), error=matrix(part.error))


def _rank(layer: _Layer) -> int:
    """Number of rows that the layer's change carries, as far as they stand out of the errors."""
    return int(np.sum(np.linalg.svd(layer.change, compute_uv=False) > _SIGNAL_OVER_ERROR * np.linalg.norm(layer.error)))


def _possible_records(layer: _Layer, schema: TableSchema) -> _Candidates:
    """Quotients of the neurons that are precise enough and of one category in each block, the most precise first."""
    usable = np.abs(layer.change[:, -1]) > 2 * layer.error[:, -1]
    change, error = layer.change[usable], layer.error[usable]
    bias = change[:, -1:]
    rows = change[:, :-1] / bias
    # |w/b - (w+e)/(b+f)| for the largest errors e and f.
    errors = (error[:, :-1] + np.abs(rows) * error[:, -1:]) / (np.abs(bias) - error[:, -1:])
    possible = (errors <= EXACT * (schema.high - schema.low)).all(axis=1)
    for block in schema.blocks:
        ones = np.abs(rows[:, block] - 1) <= errors[:, block]
        zeros = np.abs(rows[:, block]) <= errors[:, block]
        possible &= (ones | zeros).all(axis=1) & (ones.sum(axis=1) == 1)
    rows, errors = rows[possible], errors[possible]
    precise = np.argsort((errors / (schema.high - schema.low)).max(axis=1, initial=0.0))
    return _Candidates(rows=rows[precise], errors=errors[precise], neurons=np.ones(len(rows), dtype=np.intp))


def _distinct(candidates: _Candidates) -> _Candidates:
    """Candidates that differ by more than their errors, each in its most precise version."""
    kept: list[int] = []
    neurons: list[int] = []
    left = np.arange(len(candidates.rows))
    while len(left):
        best = left[0]
        reach = candidates.errors[left] + candidates.errors[best]
        same = (np.abs(candidates.rows[left] - candidates.rows[best]) <= reach).all(axis=1)
        kept.append(int(best))
        neurons.append(int(same.sum()))
        left = left[~same]
    chosen = candidates.take(np.array(kept, dtype=np.intp))
    return _Candidates(rows=chosen.rows, errors=chosen.errors, neurons=np.array(neurons, dtype=np.intp))


def _in_range(candidates: _Candidates, schema: TableSchema) -> NDArray[np.bool_]:
    over = (candidates.rows < schema.low - candidates.errors) | (candidates.rows > schema.high + candidates.errors)
    return np.count_nonzero(over, axis=1) == 0


def _why_uncertified(observation: Observation, *, layers: int) -> str | None:
    if not observation.schema.blocks:
        return "no row can be certified, because the table has no one-hot block: a mixture of rows looks like a row"
    if observation.activation is not Activation.RELU or layers < 2:
        return "no row can be certified, because no ReLU follows the first layer: every neuron mixes all rows"
    return None


def _alone_in_categories(rows: NDArray[np.float64], schema: TableSchema) -> NDArray[np.bool_]:
    categories = np.column_stack([rows[:, block].argmax(axis=1) for block in schema.blocks])
    return (categories[:, None, :] == categories[None, :, :]).all(axis=2).sum(axis=1) == 1


def _silent_neurons_carry_less(layer: _Layer, row: NDArray[np.float64], error: NDArray[np.float64], *, rank: int) -> bool:
    """Whether the change of the neurons that a row does not fire has a smaller rank than the whole change.

    The neurons that a mixture does not fire carry every row in it; those that a row of the batch does not fire lack that row.
    """
    before, moved = layer.before @ [*row, 1.0], (layer.after - layer.before) @ [*row, 1.0]
    # A neuron near its threshold may have fired in a step between, or be on either side within the row's error.
    silent = before + 2 * np.abs(moved) + np.abs(layer.before[:, :-1]) @ error < 0
    change, floor = layer.change[silent], np.linalg.norm(layer.error[silent])
    loud = np.linalg.norm(change, axis=1) > floor
    if rank < 1 or silent.sum() < rank or (rank > 1 and loud.sum() < rank):
        return False  # too few neurons to carry all rows: that they carry fewer says nothing
    return bool(np.linalg.svd(change, compute_uv=False)[rank - 1] <= floor)

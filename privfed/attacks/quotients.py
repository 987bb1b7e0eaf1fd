"""Guesses read off the first layer's gradient whatever the noise: for where `analytic` is too careful to say anything.

As in `privfed.attacks.analytic`, dW_k / db_k of neuron k is a mixture of the rows that fire it. Here every quotient is turned into
the nearest possible record, and those that were nearest come first: a neuron that a single row fires needs no turning.
"""

import time

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import TableSchema
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction, gradient_part, linear_layers

_SAME = 1e-2  # as a share of each column's range


def quotients(observation: Observation) -> Reconstruction | NotApplicable:
    """Guesses as many rows as there were record visits, if enough neurons moved. It certifies nothing.

    Args:
        observation: What the attacker holds.
    """
    started = time.perf_counter()
    part = gradient_part(observation)
    if isinstance(part, NotApplicable):
        return part
    schema = observation.schema
    first = next((layer for layer in linear_layers(observation.layout) if layer.inputs == schema.width), None)
    if first is None:
        return NotApplicable(reason=f"the model has no fully connected layer with bias on the schema's {schema.width} columns")
    tensors = observation.layout.unflatten(part.change)
    moved = tensors[first.bias] != 0
    raw = tensors[first.weight][moved] / tensors[first.bias][moved, None]
    # A quotient of two tiny numbers may overflow; it names no record.
    raw = raw[np.isfinite(raw).all(axis=1)]
    records = _nearest_records(raw, schema)
    scale = schema.high - schema.low
    distance = (np.abs(raw - records) / scale).max(axis=1, initial=0.0)
    chosen: list[int] = []
    for index in np.argsort(distance, kind="stable"):
        if len(chosen) >= max(1, round(observation.records)):
            break
        if not (np.abs(records[chosen] - records[index]) <= _SAME * scale).all(axis=1).any():
            chosen.append(int(index))
    return Reconstruction(
        rows=records[chosen],
        certified=np.zeros(len(chosen), dtype=np.bool_),
        confidence=1 / (1 + distance[chosen]),
        certificate="this attack guesses: no row is certified",
        seconds=time.perf_counter() - started,
    )


def _nearest_records(raw: NDArray[np.float64], schema: TableSchema) -> NDArray[np.float64]:
    """Numbers cut to their ranges, and of each block the category with the largest entry."""
    records = np.clip(raw, schema.low, schema.high)
    for block in schema.blocks:
        records[:, block] = np.eye(block.stop - block.start)[raw[:, block].argmax(axis=1)]
    return records

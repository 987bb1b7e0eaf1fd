"""What an attack said about canaries, beside the canaries, in units that people read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import Continuous, OneHot, Scale, TableSchema
from privfed.attacks.observation import Reconstruction
from privfed.attacks.scoring import match_rows
from privfed.audit.canaries import Canaries
from privfed.data.paysim import money_of

_SMALL_CHANGE = 100.0  # a sum of money below this is told to the cent


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What an attack said about canaries, beside the canaries. The sine and the cosine of an hour are one column.

    Args:
        columns: Names of the columns.
        truth: Per canary and column, as text.
        said: Likewise.
        right: Likewise, whether it is right.
        certified: Per canary, whether the attack certified what it said.
        guessed: Per canary, whether the attack said nothing, so that the baseline was put in its place.
    """

    columns: tuple[str, ...]
    truth: tuple[tuple[str, ...], ...]
    said: tuple[tuple[str, ...], ...]
    right: tuple[tuple[bool, ...], ...]
    certified: tuple[bool, ...]
    guessed: tuple[bool, ...]

    @classmethod
    def of(cls, found: Reconstruction, truth: Canaries, baseline: NDArray[np.float64], *, tolerance: float) -> "Example":
        """Compares what an attack found with the canaries; arguments as those of `match_rows`."""
        schema = truth.schema
        match = match_rows(found.rows, truth.rows, schema=schema, tolerance=tolerance, baseline=baseline)
        # From "numeric columns first, then blocks" to the order of the schema.
        order = np.argsort([*schema.continuous, *(block.start for block in schema.blocks)])
        certified = np.append(found.certified, np.zeros(len(truth), dtype=np.bool_))
        shown = _shown(schema)
        return cls(
            columns=tuple(_name(schema.columns[column]) for column in shown),
            truth=tuple(_texts(row, schema, shown) for row in truth.rows),
            said=tuple(_texts(row, schema, shown) for row in match.guesses),
            right=tuple(_right([bool(cell) for cell in row[order]], schema, shown) for row in match.right),
            certified=tuple(bool(flag) for flag in certified[match.found]),
            guessed=tuple(bool(index >= len(found.rows)) for index in match.found),
        )


def _shown(schema: TableSchema) -> tuple[int, ...]:
    """Positions of the columns that are shown: a cosine is shown with its sine."""
    return tuple(number for number, column in enumerate(schema.columns) if _scale(column) is not Scale.HOUR_COSINE)


def _scale(column: Continuous | OneHot) -> Scale:
    return column.scale if isinstance(column, Continuous) else Scale.AS_IT_IS


def _name(column: Continuous | OneHot) -> str:
    return column.name.removesuffix("_sin") if _scale(column) is Scale.HOUR_SINE else column.name


def _right(cells: Sequence[bool], schema: TableSchema, shown: Sequence[int]) -> tuple[bool, ...]:
    """Whether each shown column is right: an hour if its sine and its cosine are."""
    return tuple(cells[number] and (_scale(schema.columns[number]) is not Scale.HOUR_SINE or cells[number + 1]) for number in shown)


def _texts(row: NDArray[np.float64], schema: TableSchema, shown: Sequence[int]) -> tuple[str, ...]:
    widths = [len(column.categories) if isinstance(column, OneHot) else 1 for column in schema.columns]
    starts = np.cumsum([0, *widths])
    return tuple(_text(schema.columns[number], row[starts[number] :]) for number in shown)


def _text(column: Continuous | OneHot, entries: NDArray[np.float64]) -> str:
    """One cell; the entries begin with those of the column."""
    if isinstance(column, OneHot):
        return column.categories[int(entries[: len(column.categories)].argmax())]
    if column.scale is Scale.MONEY:
        money = money_of(float(np.clip(entries[0], column.low, column.high)))
        return f"{money:,.2f}" if money < _SMALL_CHANGE else f"{money:,.0f}"
    if column.scale is Scale.HOUR_SINE:
        minutes = round(math.atan2(entries[0], entries[1]) / math.tau * 24 * 60) % (24 * 60)
        return f"{minutes // 60:02}:{minutes % 60:02}"
    return f"{entries[0]:.3f}"

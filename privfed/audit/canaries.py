"""Canaries: made-up records that are attacked in place of anybody's data. They are drawn from the public schema before training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import Continuous, OneHot, Scale, TableSchema
from privfed.data.paysim import MONEY_SPAN, TYPES, FeatureSet
from privfed.data.samples import Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Canaries:
    """Made-up records. Public: they are nobody's.

    Args:
        rows: Of shape (n, width), in the units of the model's input, exact in float32.
        labels: 0 or 1, of shape (n,).
        schema: The columns.
    """

    rows: NDArray[np.float64]
    labels: NDArray[np.int64]
    schema: TableSchema

    @classmethod
    def draw(cls, schema: TableSchema, *, count: int, rng: np.random.Generator) -> "Canaries":
        """Draws records: numbers evenly from their ranges, hours of the day, labels from a coin, and categories evenly.

        As far as there are enough categories, no two successive records share one: an attack that tells rows apart by their categories
        (as certificates do) is not to fail for want of luck.

        Args:
            schema: The columns.
            count: Number of records, at least 1.
            rng: Source of everything.
        """
        rows = rng.uniform(schema.low, schema.high, size=(count, schema.width))
        for block in schema.blocks:
            size = block.stop - block.start
            shuffled = np.concatenate([rng.permutation(size) for _ in range(-(-count // size))])
            rows[:, block] = np.eye(size)[shuffled[:count]]
        numbers = [column for column in schema.columns if isinstance(column, Continuous)]
        for sine in (start for column, start in zip(numbers, schema.continuous, strict=True) if column.scale is Scale.HOUR_SINE):
            angle = rng.integers(24, size=count) * (2 * np.pi / 24)
            rows[:, sine], rows[:, sine + 1] = np.sin(angle), np.cos(angle)
        labels = rng.integers(2, size=count)
        return cls(rows=rows.astype(np.float32).astype(np.float64), labels=labels, schema=schema)

    @classmethod
    def together(cls, parts: Sequence["Canaries"]) -> "Canaries":
        """The records of several batches with one schema."""
        rows, labels = np.concatenate([part.rows for part in parts]), np.concatenate([part.labels for part in parts])
        return cls(rows=rows, labels=labels, schema=parts[0].schema)

    def samples(self, columns: tuple[str, ...]) -> Samples:
        """The records as a client's data."""
        return Samples(features=self.rows.astype(np.float32), labels=self.labels, groups=None, columns=columns)

    def __len__(self) -> int:
        return len(self.labels)


def transaction_schema(feature_set: FeatureSet) -> TableSchema:
    """The columns that `privfed.data.paysim.features` makes, with their declared ranges. Public.

    Example:
        >>> from privfed.data.paysim import PRE
        >>> transaction_schema(PRE).width == len(PRE.columns)
        True
    """
    scales = {"hour_sin": Scale.HOUR_SINE, "hour_cos": Scale.HOUR_COSINE}
    hours = [Continuous(name=name, low=-1.0, high=1.0, scale=scale) for name, scale in scales.items()]
    money = [Continuous(name=name, low=-MONEY_SPAN, high=MONEY_SPAN, scale=Scale.MONEY) for name in feature_set.money]
    return TableSchema(columns=(OneHot(name="type", categories=TYPES), *hours, *money))

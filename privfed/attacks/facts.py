"""Public facts about a round that every attack may use: the columns of the model's input, and how the clients trained."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class Scale(Enum):
    """Units of a numeric column of the model's input."""

    AS_IT_IS = "as it is"
    MONEY = "a sum of money, as privfed.data.paysim.features scales it"
    HOUR_SINE = "the sine of the hour of the day; the next column is its cosine"
    HOUR_COSINE = "the cosine of the hour of the day; the column before is its sine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuous:
    """A numeric column of the model's input. Public.

    Args:
        name: Name of the column.
        low: Declared lower end of its range, in the units that the model gets.
        high: Declared upper end, above `low`.
        scale: Which units the model gets it in, so that reports can say it in those of people.
    """

    name: str
    low: float
    high: float
    scale: Scale = Scale.AS_IT_IS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"expected finite ends low < high for column {self.name!r}, got {self.low} and {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneHot:
    """A category as a block of adjacent input columns, one of them 1 and the others 0. Public.

    Args:
        name: Name of the category.
        categories: Names of its values, in column order, at least two.
    """

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.categories) < 2:
            raise ValueError(f"expected at least two categories in {self.name!r}, got {len(self.categories)}")


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """What everybody knows about the columns of the model's input, in their order. Public.

    Args:
        columns: Numeric columns and one-hot blocks, at least one.

    Example:
        >>> schema = TableSchema(
        ...     columns=(Continuous(name="amount", low=0.0, high=1.0), OneHot(name="type", categories=("cash", "transfer")))
        ... )
        >>> schema.width, schema.continuous.tolist(), schema.blocks
        (3, [0], (slice(1, 3, None),))
    """

    columns: tuple[Continuous | OneHot, ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("expected at least one column, got none")

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts = [0]
        for column in self.columns:
            starts.append(starts[-1] + (1 if isinstance(column, Continuous) else len(column.categories)))
        return tuple(starts)

    @property
    def width(self) -> int:
        """Number of inputs of the model."""
        return self._starts[-1]

    @cached_property
    def continuous(self) -> NDArray[np.intp]:
        """Positions of the numeric columns."""
        columns = zip(self.columns, self._starts[:-1], strict=True)
        return np.array([start for column, start in columns if isinstance(column, Continuous)], dtype=np.intp)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """Positions of the one-hot blocks."""
        spans = zip(self.columns, self._starts[:-1], self._starts[1:], strict=True)
        return tuple(slice(start, stop) for column, start, stop in spans if isinstance(column, OneHot))

    @cached_property
    def low(self) -> NDArray[np.float64]:
        """Lower end of every input, of shape (width,); 0 in one-hot blocks."""
        low = np.zeros(self.width)
        low[self.continuous] = [column.low for column in self.columns if isinstance(column, Continuous)]
        return low

    @cached_property
    def high(self) -> NDArray[np.float64]:
        """Upper end of every input, of shape (width,); 1 in one-hot blocks."""
        high = np.ones(self.width)
        high[self.continuous] = [column.high for column in self.columns if isinstance(column, Continuous)]
        return high


class Activation(Enum):
    """What follows the first layer. Public."""

    RELU = "relu"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Plain or momentum SGD, with weight decay added to the gradient (as in `torch.optim.SGD`). Public.

    Args:
        learning_rate: Above 0.
        momentum: From 0 up to, not including, 1.
        weight_decay: At least 0.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.learning_rate < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise ValueError(
                "expected learning_rate > 0, 0 <= momentum < 1 and weight_decay >= 0, "
                f"got {self.learning_rate}, {self.momentum} and {self.weight_decay}"
            )

    def decayed(self, steps: int) -> float:
        """What weight decay alone leaves of every weight after some steps, as a factor: 1 without decay.

        The optimiser is linear in weights and gradients, so a trained model minus this factor times the model before is a
        combination of gradients only.
        """
        return self._run(steps, weight=1.0, gradient=0.0)

    def response(self, steps: int) -> float:
        """How far a gradient of 1 in every step moves a weight down: the sum of the steps' gradients' coefficients, above 0."""
        return -self._run(steps, weight=0.0, gradient=1.0)

    def _run(self, steps: int, *, weight: float, gradient: float) -> float:
        velocity = 0.0
        for _ in range(steps):
            velocity = self.momentum * velocity + self.weight_decay * weight + gradient
            weight -= self.learning_rate * velocity
        return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptimizer:
    """An optimiser that rescales each coordinate (Adam and its like). Public.

    Args:
        name: Its name, for the report.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryLoss:
    """Binary cross-entropy on one logit, the positive records multiplied by `positive_weight`. Public."""

    positive_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.positive_weight < math.inf:
            raise ValueError(f"expected positive_weight > 0, got {self.positive_weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxLoss:
    """Cross-entropy on one logit for each class. Public."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianNoise:
    """Per-record clipping and the noise added to each step's sum of gradients. Public.

    Args:
        noise_multiplier: Standard deviation over `max_grad_norm`, at least 0.
        max_grad_norm: L2 bound on one record's gradient, above 0.
    """

    noise_multiplier: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        if not (0 <= self.noise_multiplier < math.inf and 0 < self.max_grad_norm < math.inf):
            raise ValueError(f"expected noise_multiplier >= 0 and max_grad_norm > 0, got {self.noise_multiplier} and {self.max_grad_norm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """How each client trained in the round. Public.

    Args:
        optimizer: The optimiser.
        loss: The loss that the clients minimise.
        steps: Number of optimiser steps, at least 1.
        batch_size: What the sum of a step's gradients is divided by: the (expected) number of records, above 0.
        noise: What DP-SGD did to the gradients; None if nothing was clipped and no noise was added.
    """

    optimizer: Sgd | AdaptiveOptimizer
    loss: BinaryLoss | SoftmaxLoss
    steps: int
    batch_size: float
    noise: GaussianNoise | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.batch_size < math.inf:
            raise ValueError(f"expected steps >= 1 and batch_size > 0, got {self.steps} and {self.batch_size}")

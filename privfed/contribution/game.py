"""The game whose Shapley values are contributions: what a coalition of clients is worth, from inner products alone.

A coalition S moves the model by the plain mean of its updates. Its worth depends on q = |sum of its updates|^2, on
l = <sum of its updates, reference> and on its size, so one matrix serves all 2^n coalitions and no update is averaged again.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


class Utility(Protocol):
    """What a coalition is worth. Every argument is an array, or a number, and all have one shape after broadcasting."""

    def value(self, square: Floats, product: Floats, size: Floats | float) -> Floats:
        """Worth of coalitions.

        Args:
            square: Squared norm of the sum of the updates.
            product: Inner product of that sum with the reference.
            size: Number of clients, at least 1.
        """
        ...

    def slopes(self, square: Floats, product: Floats, size: Floats | float) -> tuple[Floats, Floats]:
        """Derivatives of `value` by `square` and by `product`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EuclideanUtility:
    """1 / (1 + |mean - reference|^2 / unit), from 0 (far away) to 1 (the reference itself).

    Source: arXiv:2605.30336, the utility of the trajectory Shapley value.

    Args:
        reference_square: Squared norm of the reference.
        unit: Squared distance at which the worth is 1/2. Positive.
    """

    reference_square: float
    unit: float

    def value(self, square: Floats, product: Floats, size: Floats | float) -> Floats:
        """See `Utility.value`."""
        squared_distance = square / size**2 - 2 * product / size + self.reference_square
        return 1 / (1 + np.maximum(squared_distance, 0.0) / self.unit)

    def slopes(self, square: Floats, product: Floats, size: Floats | float) -> tuple[Floats, Floats]:
        """See `Utility.slopes`."""
        common = self.value(square, product, size) ** 2 / self.unit
        return -common / size**2, 2 * common / size


@dataclass(frozen=True, slots=True, kw_only=True)
class AngularUtility:
    """1 / (1 + 2 (1 - cosine of mean and reference)), from 1/5 (opposite) over 1/3 (at a right angle, or no update) to 1.

    Args:
        reference_square: Squared norm of the reference. Positive.
    """

    reference_square: float

    def value(self, square: Floats, product: Floats, size: Floats | float) -> Floats:  # noqa: ARG002
        """See `Utility.value`."""
        return 1 / (3 - 2 * self._cosine(square, product))

    def slopes(self, square: Floats, product: Floats, size: Floats | float) -> tuple[Floats, Floats]:
        """See `Utility.slopes`."""
        lengths = np.sqrt(square * self.reference_square)
        common = 2 * self.value(square, product, size) ** 2
        by_product = np.divide(common, lengths, out=np.zeros_like(common), where=lengths > 0)
        by_square = np.divide(-by_product * product, 2 * square, out=np.zeros_like(common), where=lengths > 0)
        return by_square, by_product

    def _cosine(self, square: Floats, product: Floats) -> Floats:
        lengths = np.sqrt(np.maximum(square, 0.0) * self.reference_square)
        cosine = np.divide(product, lengths, out=np.zeros(np.broadcast_shapes(product.shape, lengths.shape)), where=lengths > 0)
        return np.clip(cosine, -1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Game:
    """A cooperative game of n clients.

    Args:
        products: Inner products of the updates, of shape (n, n), symmetric.
        linear: Inner product of each update with the reference, of shape (n,).
        utility: Worth of a coalition.
        empty: Worth of nobody.
        seed: What estimators draw from; see `Gram.seed`.

    Raises:
        ValueError: If the shapes disagree.
    """

    products: Floats
    linear: Floats
    utility: Utility
    empty: float
    seed: int = 0

    def __post_init__(self) -> None:
        count = len(self.linear)
        if count < 1 or self.linear.shape != (count,) or self.products.shape != (count, count):
            raise ValueError("expected products of shape (n, n) and inner products with the reference of shape (n,)")

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.linear)

    @property
    def whole(self) -> float:
        """Worth of all clients together."""
        return float(self.utility.value(self.products.sum(), self.linear.sum(), self.clients))

"""Aggregation rules: pure functions from public weights, and for some the Gram matrix, to integer coefficients.

A rule that needs the Gram matrix has another type than one that does not, because under encryption the matrix takes products
of ciphertexts and an opening of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.linear import integer_weights


class WeightRule(Protocol):
    """A rule whose coefficients follow from the public weights alone."""

    needs_gram: ClassVar[Literal[False]]

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def coefficients(self, weights: Mapping[str, float], *, total: int) -> dict[str, int]:
        """Positive integer coefficient of each client, with a sum of at most `total`."""
        ...


class GramRule(Protocol):
    """A rule that looks at the inner products of the updates."""

    needs_gram: ClassVar[Literal[True]]

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def coefficients(self, weights: Mapping[str, float], gram: NDArray[np.float64]) -> dict[str, int]:
        """Non-negative integer coefficient of each client; row i of `gram` belongs to the i-th client of `weights`."""
        ...


Rule: TypeAlias = WeightRule | GramRule


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """Weighted mean by the public weights (McMahan et al., 2017, algorithm 1, with agreed weights in place of record counts).

    Example:
        >>> FedAvg().coefficients({"a": 1, "b": 2, "c": 1}, total=4096)
        {'a': 1, 'b': 2, 'c': 1}
    """

    needs_gram: ClassVar[Literal[False]] = False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return "FedAvg"

    def coefficients(self, weights: Mapping[str, float], *, total: int) -> dict[str, int]:
        """Positive integer coefficient of each client: `integer_weights`.

        Raises:
            ValueError: As `integer_weights`.
        """
        return integer_weights(weights, total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum:
    """Plain mean of the `keep` updates that are closest to their neighbours (Blanchard et al., 2017, section 4 and Multi-Krum).

    The score of an update is the sum of its squared distances to its n - byzantine - 2 nearest others, the lowest scores are
    kept, and equal scores go to the name that sorts first. With `keep=1` this is Krum. Weights do not count, so that nobody
    buys influence with a weight.

    Args:
        byzantine: Number of clients that may send anything. From 0.
        keep: Number of updates in the mean. From 1 to n - byzantine.

    Raises:
        ValueError: If `byzantine` is negative or `keep` is not positive.

    Example:
        >>> import numpy as np
        >>> far = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
        >>> MultiKrum(byzantine=1, keep=3).coefficients(dict.fromkeys("abcde", 1.0), np.outer(far, far))
        {'a': 1, 'b': 1, 'c': 1, 'd': 0, 'e': 0}
    """

    needs_gram: ClassVar[Literal[True]] = True

    byzantine: int
    keep: int

    def __post_init__(self) -> None:
        if self.byzantine < 0 or self.keep < 1:
            raise ValueError(f"expected byzantine from 0 and keep from 1, got byzantine={self.byzantine} and keep={self.keep}")

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"MultiKrum(byzantine={self.byzantine}, keep={self.keep})"

    def coefficients(self, weights: Mapping[str, float], gram: NDArray[np.float64]) -> dict[str, int]:
        """1 for the updates that are kept and 0 for the others.

        Args:
            weights: Names the clients, in the order of the rows of `gram`.
            gram: Inner products of the updates, of shape (n, n), symmetric and finite.

        Raises:
            ValueError: If there are fewer than 2 * byzantine + 3 clients or fewer than byzantine + keep, or the matrix has
                another shape, is not symmetric, or holds NaN or infinity. No client is ever scored on such a matrix.
        """
        names, count = tuple(weights), len(weights)
        least = max(2 * self.byzantine + 3, self.byzantine + self.keep)
        if count < least:
            raise ValueError(f"{self.name} needs at least {least} clients, got {count}")
        if gram.shape != (count, count):
            raise ValueError(f"expected a Gram matrix of shape ({count}, {count}), got {gram.shape}")
        norms = np.diag(gram)
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            distances = norms[:, np.newaxis] + norms[np.newaxis, :] - 2 * gram
        if not np.isfinite(distances).all() or not np.array_equal(gram, gram.T):
            raise ValueError("expected a symmetric Gram matrix with finite entries and distances, got another")
        np.maximum(distances, 0, out=distances)  # a copy may be off by a rounding
        np.fill_diagonal(distances, np.inf)  # an update is not its own neighbour
        # Summed in ascending order, so that a permutation of the clients cannot change the last digit of a score.
        scores = np.sort(distances, axis=1)[:, : count - self.byzantine - 2].sum(axis=1)
        kept = sorted(range(count), key=lambda row: (scores[row], names[row]))[: self.keep]
        return {name: int(row in kept) for row, name in enumerate(names)}

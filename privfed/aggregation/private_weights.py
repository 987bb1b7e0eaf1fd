"""Weights that stay with the clients: each multiplies its update by its own, and sends the weight as one more encrypted coordinate.

Whoever opens divides one sum by the other. The server sees coefficients of 1, and nobody sees a single weight; the sum of all of them is
opened with the mean. What cannot be had at the same time: nobody can check that a client keeps to its weight, nor to the largest one, so
a policy on shares does not hold here. An opening policy counts heads. And the weight of one client follows from the sums of two rounds
of which it missed one: a weight that is a count of records is not hidden from the other clients, only from the server.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privfed.errors import DecryptionError, InsufficientCapacityError
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
from privfed.update import Layout

WEIGHT_NAME = "privfed.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateWeights:
    """What a consortium agrees on instead of weights. Public.

    Args:
        largest: Largest weight that a client may have, at least 1; an honest client does not exceed it. The smaller the mean weight is
            beside it, the coarser is the grid of the mean.

    Raises:
        ValueError: If it is not a whole number of at least 1.

    Example:
        >>> params = CkksParams.standard()
        >>> private = PrivateWeights(largest=10)
        >>> sums = private.grid([0.5], 8, params)[0] + private.grid([-0.25], 2, params)[0]
        >>> private.mean(sums, clients=2, params=params).round(5)
        array([0.35])
    """

    largest: int

    def __post_init__(self) -> None:
        if type(self.largest) is not int or self.largest < 1:
            raise ValueError(f"expected largest to be a whole number of at least 1, got {self.largest!r}")

    def check(self, weight: float, *, name: str) -> int:
        """A client's own weight, if it is one.

        Raises:
            ValueError: If it is not a whole number from 1 to the largest one. The message does not show it: the weight is private.
        """
        if not 1 <= weight <= self.largest or int(weight) != weight:
            raise ValueError(f"expected the weight of {name!r} to be a whole number from 1 to {self.largest}; nothing was sent")
        return int(weight)

    def check_capacity(self, params: CkksParams, *, clients: int) -> None:
        """Refuses encryption parameters that do not hold the sums.

        Raises:
            InsufficientCapacityError: If there are more clients than can be added, or a weight does not fit into a coordinate.
        """
        if clients > params.weight_sum or self.largest > params.amplitude:
            raise InsufficientCapacityError(
                f"the parameters hold {params.weight_sum} clients and weights up to {params.amplitude}, not {clients} and {self.largest}; "
                "nothing was agreed; take a smaller largest weight, or other parameters"
            )

    def layout(self, layout: Layout) -> Layout:
        """Layout of what is encrypted: that of the model, and the weight."""
        return Layout(names=(*layout.names, WEIGHT_NAME), shapes=((*layout.shapes, ())))

    def grid(self, values: ArrayLike, weight: int, params: CkksParams) -> tuple[NDArray[np.int64], int]:
        """Grid points of a client's weighted update, and the weight behind them, of shape (coordinates + 1,).

        Args:
            values: Its update, finite, of shape (coordinates,). Private.
            weight: Its weight, from 1 to the largest. Private.
            params: Bound and amplitude.

        Returns:
            The grid points, and how many coordinates were beyond the bound. Both private.
        """
        exact = np.asarray(values, dtype=np.float64)
        saturated = int(np.count_nonzero(np.abs(exact) > params.bound))
        points, _ = quantise(np.clip(exact, -params.bound, params.bound) * (weight / self.largest), params)
        return np.append(points, weight), saturated

    def mean(self, grid_sum: NDArray[np.int64], *, clients: int, params: CkksParams) -> NDArray[np.float64]:
        """The weighted mean that an opened sum of so many clients says, of shape (coordinates,).

        Raises:
            DecryptionError: If no weights of so many clients add up to what was opened.
        """
        total = int(grid_sum[-1])
        if not clients <= total <= clients * self.largest:
            raise DecryptionError(
                f"the opened sum of the weights is not one of {clients} clients; nothing was put into the model; a client sent another "
                "weight than the agreement allows"
            )
        return np.asarray(grid_sum[:-1] * (params.step * self.largest / total), np.float64)

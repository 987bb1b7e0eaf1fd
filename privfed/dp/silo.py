"""Differential privacy for whole silos: every client adds an integer share of the noise before it encrypts.

The server only adds: all its coefficients are 1, because a coefficient that is chosen after the noise, or multiplied onto it,
voids the promise. What each client weighs was agreed before, and it applies its weight itself, before clipping and noise. The
mean is taken over the agreed clients, not over those that arrived.

The promise is for the sum. Whoever can decrypt single uploads (in the mode with a key shared by the clients: the server together
with any client) sees each of them under its own share alone: `SiloNoise.one_share_event`.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privfed.dp.mechanism import DiscreteGaussianSum, check_noise
from privfed.dp.noise import discrete_gaussian
from privfed.errors import InsufficientCapacityError, OpeningRefusedError

_OVERFLOW_BITS: Final = 128  # noise that does not fit has probability at most 2^-128 in a sum; see _renyi.OVERFLOW_DELTA
_HALVINGS: Final = 60


@dataclass(frozen=True, kw_only=True)
class SiloNoise:
    """What a consortium agrees on so that whole silos are protected. All of it is public, and fixed before the first round.

    Args:
        weights: Whole weight of every client of the consortium, by name; applied by the client itself. At least 1 each.
        clip_steps: Largest Euclidean norm of an update before its weight is applied, in steps of the grid.
        noise_multiplier: Standard deviation of the noise that is left in the worst case, divided by the largest norm that a
            client's weighted update can have.
        coordinates: Length of an update.
        colluders: Clients that may tell each other, or the adversary, their shares.
        dropouts: Clients that may be missing from a sum that is still opened.

    Raises:
        ValueError: If a value is out of its range, or nobody's noise would be left.

    Example:
        >>> silo = SiloNoise(weights=dict.fromkeys("abcde", 1), clip_steps=32, noise_multiplier=4.0, coordinates=100, colluders=1)
        >>> silo.shares, silo.share_variance, silo.event().l1_sensitivity
        (4, 4096, 320)
    """

    weights: Mapping[str, int]
    clip_steps: int
    noise_multiplier: float
    coordinates: int
    colluders: int = 0
    dropouts: int = 0

    def __post_init__(self) -> None:
        for name, smallest in {"clip_steps": 1, "coordinates": 1, "colluders": 0, "dropouts": 0}.items():
            _check_whole(name, getattr(self, name), smallest)
        for name, weight in self.weights.items():
            _check_whole(f"the weight of {name!r}", weight, 1)
        check_noise("noise_multiplier", self.noise_multiplier)
        if self.shares < 1:
            raise ValueError(
                f"expected more clients than colluders and dropouts together, got {len(self.weights)}, {self.colluders} and {self.dropouts}"
            )
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))

    @property
    def shares(self) -> int:
        """Shares of noise that are in the sum in the worst case and that no adversary knows."""
        return len(self.weights) - self.colluders - self.dropouts

    @property
    def min_arrivals(self) -> int:
        """Fewest clients in a sum that may be opened."""
        return len(self.weights) - self.dropouts

    @property
    def l2_sensitivity(self) -> int:
        """Largest Euclidean norm of a client's weighted update, in grid steps."""
        return max(self.weights.values()) * self.clip_steps

    @property
    def share_variance(self) -> int:
        """Parameter sigma^2 of every share, in squared grid steps."""
        return math.ceil((self.noise_multiplier * self.l2_sensitivity) ** 2 / self.shares)

    @property
    def denominator(self) -> int:
        """What a sum is divided by for the mean, whoever arrived."""
        return sum(self.weights.values())

    @property
    def digest(self) -> bytes:
        """SHA-256 over all of it, 32 bytes, for an agreement to be bound to."""
        fields = [dict(self.weights), self.clip_steps, float(self.noise_multiplier), self.coordinates, self.colluders, self.dropouts]
        return hashlib.sha256(b"privfed silo noise v1" + json.dumps(fields, sort_keys=True).encode()).digest()

    def event(self, *, count: int = 1) -> DiscreteGaussianSum:
        """What opening so many sums costs every silo: the worst case that is tolerated, whatever arrives in the end.

        A whole vector of norm D has at most sqrt(d) D as the sum of its absolute values, and at most D^2, being whole.
        """
        l1_sensitivity = min(math.isqrt(self.coordinates * self.l2_sensitivity**2 - 1) + 1, self.l2_sensitivity**2)
        return DiscreteGaussianSum(
            share_variance=self.share_variance,
            shares=self.shares,
            l2_sensitivity=self.l2_sensitivity,
            l1_sensitivity=l1_sensitivity,
            coordinates=self.coordinates,
            count=count,
        )

    def one_share_event(self, *, count: int = 1) -> DiscreteGaussianSum:
        """What it costs towards an adversary that reads single uploads, or that knows the shares of all others."""
        return replace(self.event(count=count), shares=1)

    def check_capacity(self, *, amplitude: int, weight_sum: int) -> None:
        """Refuses encryption parameters that do not hold every update with its noise.

        Args:
            amplitude: Largest absolute value of a coordinate that can be encrypted, in grid steps.
            weight_sum: Largest number of ciphertexts that can be added with coefficient 1.

        Raises:
            InsufficientCapacityError: If they do not.
        """
        if len(self.weights) > weight_sum:
            raise InsufficientCapacityError(
                f"the parameters add up to {weight_sum} clients, not {len(self.weights)}; nothing was encrypted"
            )
        if self.largest_coordinate > amplitude:
            raise InsufficientCapacityError(
                f"a coordinate with its noise needs an amplitude of {self.largest_coordinate}, got {amplitude}; nothing was encrypted; "
                "raise the bound of the parameters, which coarsens the grid, or lower clip_steps"
            )

    @property
    def largest_coordinate(self) -> int:
        """What no noised coordinate exceeds, except with probability 2^-128 in all of a sum.

        A share is sub-Gaussian with its parameter sigma^2: E exp(t x) is exp(t^2 sigma^2 / 2) times a sum of exp(-(x - m)^2 / (2
        sigma^2)) over the whole numbers, divided by the same sum at m = 0, where it is largest. So it exceeds t in size with
        probability at most 2 exp(-t^2 / (2 sigma^2)).
        """
        tail = math.sqrt(2 * self.share_variance * (math.log(2 * self.coordinates * len(self.weights)) + _OVERFLOW_BITS * math.log(2)))
        return self.l2_sensitivity + math.ceil(tail)

    def noised(self, name: str, values: ArrayLike, *, step: float) -> NDArray[np.int64]:
        """A client's update on the grid, clipped, weighted, and with its share of the noise: what it encrypts.

        Every call draws a new share. Encrypt and send the result of one call; the average of several has less noise.

        Args:
            name: The client.
            values: Its update, of shape (coordinates,). Private. NaN and infinite coordinates count as 0.
            step: Distance of two grid points, in the unit of a coordinate.

        Raises:
            ValueError: If the client has no weight, or the shape is another.
            InsufficientCapacityError: Never in practice: if noise of a probability below 2^-128 came up.
        """
        if name not in self.weights:
            raise ValueError(f"expected a client of {sorted(self.weights)}, got {name!r}")
        exact = np.asarray(values, np.float64)
        if exact.shape != (self.coordinates,):
            raise ValueError(f"expected an update of shape ({self.coordinates},), got {exact.shape}")
        noised = clip_on_grid(exact * (self.weights[name] / step), self.weights[name] * self.clip_steps)
        noised += discrete_gaussian(self.share_variance, self.coordinates)
        if int(np.abs(noised).max()) > self.largest_coordinate:
            raise InsufficientCapacityError("the noise does not fit; nothing was encrypted; take part in the next round")
        return noised

    def check_arrivals(self, names: Collection[str]) -> None:
        """Refuses to open a sum in which more clients are missing than the noise allows for.

        Raises:
            OpeningRefusedError: If too few arrived, a stranger did, or one arrived twice.
        """
        arrived = set(names)
        if len(arrived) != len(names) or not arrived <= set(self.weights):
            raise OpeningRefusedError("expected clients with an agreed weight, each once; nothing was opened")
        if len(arrived) < self.min_arrivals:
            raise OpeningRefusedError(
                f"{len(arrived)} clients arrived, and with fewer than {self.min_arrivals} the noise is too little; nothing was opened"
            )

    def mean(self, grid_sum: NDArray[np.int64], *, step: float) -> NDArray[np.float64]:
        """The weighted mean over all agreed clients; who did not arrive counts as an update of zeros.

        Args:
            grid_sum: Opened sum of what `noised` returned, of any shape.
            step: Distance of two grid points, in the unit of a coordinate.
        """
        return grid_sum * step / self.denominator


def clip_on_grid(values: NDArray[np.float64], norm: int) -> NDArray[np.int64]:
    """Rounds to whole numbers and scales down, if need be, until the Euclidean norm of the *whole numbers* is within the bound.

    Rounding alone can lengthen a vector by sqrt(d) / 2. The factor is the largest, to 2^-60, with which the rounded vector fits.
    The bound is checked with whole numbers, so it holds exactly.

    Args:
        values: In grid steps. Private. NaN and infinite coordinates count as 0.
        norm: Largest Euclidean norm, at least 1.

    Example:
        >>> clip_on_grid(np.array([0.6, 0.6, 0.6, 0.6]), 1)
        array([0, 0, 0, 0])
        >>> clip_on_grid(np.array([3.2, -4.1]), 5)
        array([ 3, -4])
    """
    finite = np.where(np.isfinite(values), values, 0.0)
    # No coordinate needs to be larger than the norm; and a whole number of this size has an exact square in a double's range.
    largest = float(np.abs(finite).max(initial=0.0))
    if largest > norm:
        finite = finite * (norm / largest)

    def at(factor: float) -> NDArray[np.int64]:
        return np.rint(finite * factor).astype(np.int64)

    def fits(whole: NDArray[np.int64]) -> bool:
        return _squared_norm(whole) <= norm * norm

    if fits(at(1.0)):
        return at(1.0)
    low, high = 0.0, 1.0  # each coordinate grows with the factor, and so does the norm
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(at(middle)) else (low, middle)
    return at(low)


def _squared_norm(whole: NDArray[np.int64]) -> int:
    largest = int(np.abs(whole).max(initial=0))
    if largest * largest * whole.size < 2**62:
        return int(whole @ whole)
    return sum(int(value) ** 2 for value in whole)


def _check_whole(name: str, value: object, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise ValueError(f"expected {name} to be a whole number of at least {smallest}, got {value!r}")

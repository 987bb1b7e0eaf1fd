"""The one object that flows: a model update, in the clear or encrypted.

`Update[PlainVector]` and `Update[CkksVector]` are different types. Code that needs plaintext says so in its signature, and
the wire encoder takes encrypted updates only.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privfed.errors import LayoutMismatchError

_MOST_COORDINATES = 2**40


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names, order and shapes of the tensors in a flat update. Public.

    Args:
        names: Name of each tensor, unique, in the order in which they are concatenated.
        shapes: Shape of each tensor. An empty shape is a scalar; every dimension is at least 1.

    Raises:
        ValueError: If names repeat or cannot be printed, the lengths differ, there is no tensor, a dimension is no positive whole
            number, or there are 2^40 coordinates or more.

    Example:
        >>> layout = Layout(names=("weight", "bias"), shapes=((2, 3), (2,)))
        >>> layout.size
        8
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        if not self.names or len(self.names) != len(self.shapes):
            raise ValueError(f"expected one shape for each of at least one name, got {len(self.names)} names and {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            raise ValueError("expected unique tensor names, got a repeated one")
        if not all(type(name) is str and name.isprintable() for name in self.names):
            raise ValueError("expected names of tensors that can be printed")
        if any(type(dimension) is not int or dimension < 1 for shape in self.shapes for dimension in shape):
            raise ValueError("expected every dimension of every tensor to be a whole number of at least 1")
        if self.size >= _MOST_COORDINATES:
            raise ValueError(f"expected fewer than {_MOST_COORDINATES} coordinates in all tensors together")

    @cached_property
    def size(self) -> int:
        """Number of coordinates of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the length-prefixed names and the shapes, 32 bytes."""
        state = hashlib.sha256(b"privfed layout v1")
        for name, shape in zip(self.names, self.shapes, strict=True):
            encoded = name.encode()
            state.update(len(encoded).to_bytes(4, "big") + encoded + len(shape).to_bytes(4, "big"))
            state.update(b"".join(dimension.to_bytes(8, "big") for dimension in shape))
        return state.digest()

    def flatten(self, tensors: Mapping[str, ArrayLike]) -> "PlainVector":
        """Concatenates named tensors, in float64, into one vector.

        Raises:
            LayoutMismatchError: If a tensor is missing, not in the layout, or has another shape.
            ValueError: If a coordinate is NaN or infinite.
        """
        if set(tensors) != set(self.names):
            missing, extra = sorted(set(self.names) - set(tensors)), sorted(set(tensors) - set(self.names))
            raise LayoutMismatchError(
                f"expected the tensors of the layout; missing {missing}, not in the layout {extra}; nothing was packed"
            )
        values, start = np.empty(self.size), 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            array = np.asarray(tensors[name])
            if array.shape != shape:
                raise LayoutMismatchError(f"expected tensor {name!r} of shape {shape}, got {array.shape}; nothing was packed")
            values[start : start + array.size] = array.ravel()
            start += array.size
        return PlainVector(layout=self, values=values)

    def unflatten(self, vector: "PlainVector") -> dict[str, NDArray[np.float64]]:
        """Splits a flat vector into named tensors (copies).

        Raises:
            LayoutMismatchError: If the vector has another layout.
        """
        if vector.layout != self:
            raise LayoutMismatchError("expected a vector of this layout, got one of another layout")
        tensors: dict[str, NDArray[np.float64]] = {}
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + math.prod(shape)
            tensors[name] = vector.values[start:stop].reshape(shape).copy()
            start = stop
        return tensors


class Vector(Protocol):
    """What plaintext and encrypted vectors have in common: a layout."""

    @property
    def layout(self) -> Layout: ...


class PlainVector:
    """A flat vector in the clear: read-only, finite, float64, and silent about its values.

    Args:
        layout: Names and shapes of the tensors in it.
        values: Coordinates, of shape (layout.size,). Copied.

    Raises:
        LayoutMismatchError: If there are more or fewer values than the layout has coordinates.
        ValueError: If a value is NaN or infinite. The message does not say which, nor how many.
    """

    __slots__ = ("_layout", "_values")

    def __init__(self, *, layout: Layout, values: ArrayLike) -> None:
        array = np.array(values, dtype=np.float64)
        if array.shape != (layout.size,):
            raise LayoutMismatchError(f"expected values of shape ({layout.size},), got {array.shape}; nothing was kept")
        if not np.isfinite(array).all():
            raise ValueError("expected finite values, got NaN or infinity; nothing was kept")
        array.setflags(write=False)
        self._layout = layout
        self._values = array

    @property
    def layout(self) -> Layout:
        """Names and shapes of the tensors."""
        return self._layout

    @property
    def values(self) -> NDArray[np.float64]:
        """The coordinates, of shape (layout.size,), read-only. Private data unless an opening released them."""
        return self._values

    @property
    def digest(self) -> bytes:
        """SHA-256 over the layout and the bits of the values, 32 bytes. It hides nothing: only for values that are public."""
        return hashlib.sha256(b"privfed values v1" + self._layout.digest + self._values.astype("<f8").tobytes()).digest()

    def __repr__(self) -> str:
        return f"PlainVector(size={self._layout.size})"


V_co = TypeVar("V_co", bound=Vector, covariant=True)


@dataclass(frozen=True, kw_only=True, repr=False)
class Update(Generic[V_co]):
    """One client's contribution to one round.

    Args:
        sender: Name of the client in the roster. Public.
        round: Number of the round, from 0. Public.
        vector: Difference between the trained and the received model, in the clear or encrypted.
    """

    sender: str
    round: int
    vector: V_co

    def __repr__(self) -> str:
        return f"Update(sender={self.sender!r}, round={self.round}, vector={type(self.vector).__name__})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Aggregate(Generic[V_co]):
    """A linear combination of updates.

    Args:
        round: Number of the round. Public.
        vector: The combination, in the clear or encrypted. In the clear it is already divided by the coefficients' sum.
        coefficients: Non-negative integer coefficient of each participant, by name. Public.

    Raises:
        ValueError: If there is no participant, a coefficient is negative, or all are zero.
    """

    round: int
    vector: V_co
    coefficients: Mapping[str, int]

    def __post_init__(self) -> None:
        effective_clients(tuple(self.coefficients.values()))
        object.__setattr__(self, "coefficients", MappingProxyType(dict(self.coefficients)))

    @property
    def effective_clients(self) -> float:
        """Effective number of clients in the combination, from 1 to the number of participants."""
        return effective_clients(tuple(self.coefficients.values()))

    @property
    def max_share(self) -> float:
        """Largest share that one participant has in the combination, from 0 (exclusive) to 1."""
        return max(self.coefficients.values()) / sum(self.coefficients.values())

    def __repr__(self) -> str:
        return f"Aggregate(round={self.round}, vector={type(self.vector).__name__}, clients={len(self.coefficients)})"


def effective_clients(coefficients: Sequence[int]) -> float:
    """Effective number of clients behind coefficients: (sum c)^2 / sum c^2 (Kish, 1965, effective sample size).

    Args:
        coefficients: Non-negative integers, at least one positive.

    Returns:
        1 when one client holds everything, n when n clients are equal.

    Raises:
        ValueError: If there is none, one is negative, or all are zero.

    Example:
        >>> effective_clients((2, 2, 2))
        3.0
    """
    if any(coefficient < 0 for coefficient in coefficients) or not any(coefficients):
        raise ValueError("expected non-negative coefficients with at least one positive")
    return sum(coefficients) ** 2 / sum(coefficient**2 for coefficient in coefficients)

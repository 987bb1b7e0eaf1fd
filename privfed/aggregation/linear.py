"""The one operation that is done to updates: the linear combination, with integer coefficients."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from numbers import Integral, Real

import numpy as np

from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

# Real weights come out of sums in floating point, whose last digits depend on the processor. On this grid, which is far finer than
# any coefficient and far coarser than those digits, equal weights are equal and every party apportions the same numbers.
_GRID = 2**24


def check_weight(weight: object, *, name: str) -> int | float:
    """A client's weight as a plain number: an int stays one.

    Raises:
        ValueError: If it is no number above 0 that floating point holds exactly. The message does not show it: it may be private.
    """
    if not isinstance(weight, bool) and isinstance(weight, Real):
        with suppress(OverflowError):
            plain = int(weight) if isinstance(weight, Integral) else float(weight)
            if 0 < plain < math.inf and float(plain) == plain:
                return plain
    raise ValueError(f"expected the weight of {name!r} to be a positive, finite number that fits into 64 bits of floating point")


def integer_weights(weights: Mapping[str, float], *, total: int) -> dict[str, int]:
    """Integer coefficients in proportion to public weights.

    Weights that are integers with a sum of at most `total` stay as they are. Others are apportioned to the sum `total` by
    largest remainder, in exact rational arithmetic: each share is off by less than 1/total, and every party gets the same
    coefficients whatever its platform and the order of its mapping. Equal remainders go to the name that sorts first.

    Args:
        weights: Public weight of each client, by name. Positive and finite.
        total: Largest sum of the coefficients, at least the number of clients.

    Returns:
        Positive coefficient of each client, in the order of `weights`.

    Raises:
        ValueError: If there is no client, a weight is zero, negative, NaN or infinite, a share is below 1/total and would round
            to nothing, or there are more clients than `total`.

    Example:
        >>> integer_weights({"a": 0.5, "b": 0.3, "c": 0.2}, total=8)
        {'a': 4, 'b': 2, 'c': 2}
        >>> integer_weights({"a": 1, "b": 2}, total=8)
        {'a': 1, 'b': 2}
    """
    if not weights or len(weights) > total:
        raise ValueError(f"expected from 1 to {total} clients, got {len(weights)}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"expected a positive, finite weight for {name!r}, got {weight!r}")
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    whole = sum(exact.values())
    if whole <= total and all(weight.denominator == 1 for weight in exact.values()):
        return {name: int(weight) for name, weight in exact.items()}
    for name, weight in exact.items():
        if weight * total < whole:  # and not only what rounds to 0: so a weight that is accepted among all is accepted among any of them
            raise ValueError(f"expected weights of at least 1/{total} of the sum, got {weights[name]!r} for {name!r}")
    return _by_largest_remainder(exact, total)


def apportion(weights: Mapping[str, float], *, total: int) -> dict[str, int]:
    """Integer coefficients in proportion to what a rule computed; clients with nothing, or next to nothing, get 0.

    Integers with a sum of at most `total` stay as they are. Others are rounded to 24 bits below the largest and apportioned to the
    sum `total` by largest remainder: each share is off by less than 1/total + 2^-24 n.

    Args:
        weights: Weight of each client, by name: finite, at least 0, one of them positive.
        total: Largest sum of the coefficients, at least 1.

    Returns:
        Non-negative coefficient of each client, in the order of `weights`.

    Raises:
        ValueError: If a weight is negative, NaN or infinite, none is positive, or `total` is below 1.

    Example:
        >>> apportion({"a": 0.7071, "b": 0.7071, "c": 0.0}, total=4096)
        {'a': 2048, 'b': 2048, 'c': 0}
    """
    if total < 1:
        raise ValueError(f"expected a total of at least 1, got {total}")
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights.values()) or not any(weights.values()):
        raise ValueError("expected finite weights from 0 with at least one positive, got others")
    if all(float(weight).is_integer() for weight in weights.values()) and sum(map(int, weights.values())) <= total:
        return {name: int(weight) for name, weight in weights.items()}
    largest = max(weights.values())
    return _by_largest_remainder({name: Fraction(round(weight / largest * _GRID)) for name, weight in weights.items()}, total)


def _by_largest_remainder(weights: Mapping[str, Fraction], total: int) -> dict[str, int]:
    whole = sum(weights.values())
    quotas = {name: weight * total / whole for name, weight in weights.items()}
    coefficients = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: (coefficients[name] - quotas[name], name))
    for name in by_remainder[: total - sum(coefficients.values())]:
        coefficients[name] += 1
    return coefficients


def weighted_sum_plain(vectors: Sequence[PlainVector], coefficients: Sequence[int]) -> PlainVector:
    """The sum of coefficient times vector, in the clear, in float64. Not divided by the sum of the coefficients.

    Args:
        vectors: Vectors of one layout, at least one.
        coefficients: Non-negative integer for each vector, at least one positive.

    Raises:
        ValueError: If the lengths differ, there is no vector, a coefficient is negative or all are zero, or the sum overflows.
        LayoutMismatchError: If the vectors have different layouts.
    """
    if not vectors or len(vectors) != len(coefficients):
        raise ValueError(f"expected one coefficient for each of at least one vector, got {len(vectors)} and {len(coefficients)}")
    if min(coefficients) < 0 or max(coefficients) == 0:
        raise ValueError("expected non-negative coefficients with at least one positive")
    layout = vectors[0].layout
    total = np.zeros(layout.size)
    for vector, coefficient in zip(vectors, coefficients, strict=True):
        if vector.layout != layout:
            raise LayoutMismatchError("expected vectors of one layout, got different ones; nothing was summed")
        with np.errstate(over="ignore", invalid="ignore"):  # PlainVector refuses what overflowed
            total += coefficient * vector.values
    return PlainVector(layout=layout, values=total)

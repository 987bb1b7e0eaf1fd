"""Noise from the operating system's entropy: exact discrete Gaussians on the integers, and standard normal numbers.

The discrete Gaussian is sampled with whole numbers alone (Canonne, Kamath and Steinke, 2020, arXiv:2004.00010v4, algorithms 1 to
3), so there is no floating-point number from whose low bits anything could be read. Nothing here takes a seed. How long a call
takes depends on the noise that it draws.
"""

import math
import os
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Whole numbers of 64 bits, or, where those are too short, Python's: the arithmetic below is the same.
_Integers: TypeAlias = NDArray[np.int64] | NDArray[np.object_]

_FEW_DIGITS: Final = 2.0**21  # as many units have 21 binary digits
_LEAST_UNIT: Final = 2.0**-900  # a normal number made of it is 35
_WORD: Final = 2**64
_LARGEST_INT64: Final = 2**62  # with room for a sum of two


def discrete_gaussian(variance: int, count: int) -> NDArray[np.int64]:
    """Independent integers x with probability proportional to exp(-x^2 / (2 variance)), exactly.

    Args:
        variance: Parameter sigma^2, at least 1 and up to 2^80. It is the variance, to one millionth.
        count: How many.

    Returns:
        Of shape (count,).

    Raises:
        ValueError: If variance or count are out of their range.
    """
    if not 1 <= variance <= 2**80 or count < 0:
        raise ValueError(f"expected a variance from 1 to 2^80 and a count from 0, got {variance} and {count}")
    scale = math.isqrt(variance) + 1
    found = np.empty(0, np.int64)
    while found.size < count:
        proposed = _discrete_laplace(scale, 2 * (count - found.size) + 8)
        found = np.concatenate([found, proposed[_accept(proposed, scale, variance)]])
    return found[:count]


def standard_normal(count: int) -> NDArray[np.float64]:
    """Independent standard normal numbers of shape (count,) (Box and Muller, 1958)."""
    pairs = (count + 1) // 2
    radius = np.sqrt(-2.0 * np.log(with_tail(_uniform(pairs), _uniform)))
    angle = 2.0 * math.pi * _uniform(pairs)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def with_tail(uniform: NDArray[np.float64], draw: Callable[[int], NDArray[np.float64]]) -> NDArray[np.float64]:
    """Gives uniform numbers the binary digits that a double can hold and a multiple of 2^-53 lacks, where they are small.

    A normal number made of 2^-53 is 8.6, and without more digits none would be larger: too soon for a delta below 1e-12.

    Args:
        uniform: Multiples of 2^-53 from 2^-53 to 1, of shape (n,). Changed in place. Private.
        draw: So many more of them.

    Returns:
        The same array: each number is moved by less than 2^-53, and only if it is below 2^-32.
    """
    unit = 2.0**-53
    if not uniform.size or float(uniform.min()) >= _FEW_DIGITS * unit:
        return uniform
    small = np.flatnonzero(uniform < _FEW_DIGITS * unit)
    while small.size and unit > _LEAST_UNIT:
        uniform[small] -= (1.0 - draw(small.size)) * unit
        unit *= 2.0**-53
        small = small[uniform[small] < _FEW_DIGITS * unit]
    return uniform


def _uniform(count: int) -> NDArray[np.float64]:
    """Uniform multiples of 2^-53 from 2^-53 to 1."""
    return ((_words(count) >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


def _words(count: int) -> NDArray[np.uint64]:
    """Uniform 64-bit words."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


def _accept(proposed: NDArray[np.int64], scale: int, variance: int) -> NDArray[np.bool_]:
    """True with probability exp(-(|x| - variance / scale)^2 / (2 variance)) for each proposed x (algorithm 3)."""
    denominator = 2 * variance * scale * scale
    largest = int(np.abs(proposed).max()) * scale + variance
    fits = max(largest * largest, 64 * denominator) < _LARGEST_INT64
    sizes = np.abs(proposed) if fits else np.abs(proposed).astype(object)
    numerators: Any = (sizes * scale - variance) ** 2
    whole: Any = numerators // denominator
    # exp(-g) = exp(-1)^floor(g) * exp(-(g - floor(g))): as many successes in a row, and then one more.
    accepted = np.asarray(_successes(proposed.size) >= whole, np.bool_)
    left = np.flatnonzero(accepted)
    accepted[left] = _bernoulli_exp(numerators[left] % denominator, denominator)
    return accepted


def _discrete_laplace(scale: int, tries: int) -> NDArray[np.int64]:
    """Integers x with probability proportional to exp(-|x| / scale), fewer than there were tries (algorithm 2)."""
    remainder: Any = _below(scale, tries)
    remainder = remainder[_bernoulli_exp(remainder, scale)].astype(np.int64)
    size: NDArray[np.int64] = remainder + scale * _successes(remainder.size)
    negative = np.asarray(_below(2, size.size) == 1, np.bool_)
    kept = ~(negative & (size == 0))  # else zero would come up twice as often
    return np.where(negative, -size, size)[kept]


def _successes(count: int) -> NDArray[np.int64]:
    """How often in a row an event of probability exp(-1) happens, before it does not for the first time; of shape (count,)."""
    found = np.zeros(count, np.int64)
    active = np.arange(count)
    while active.size:
        active = active[_bernoulli_exp(np.ones(active.size, np.int64), 1)]
        found[active] += 1
    return found


def _bernoulli_exp(numerators: _Integers, denominator: int) -> NDArray[np.bool_]:
    """True with probability exp(-numerator / denominator), for numerators from 0 to the denominator (algorithm 1)."""
    result = np.zeros(numerators.size, np.bool_)
    active = np.arange(numerators.size)
    turn = 1
    while active.size:
        again = np.asarray(_below(denominator * turn, active.size) < numerators[active], np.bool_)
        result[active[~again]] = turn % 2 == 1
        active = active[again]
        turn += 1
    return result


def _below(bound: int, count: int) -> _Integers:
    """Uniform integers from 0 to bound - 1, of shape (count,). What does not divide evenly is drawn again."""
    if bound > _LARGEST_INT64:
        return np.array([_large_below(bound) for _ in range(count)], object)
    limit = _WORD - _WORD % bound
    words = _words(count)
    if limit < _WORD:
        while (rejected := words >= np.uint64(limit)).any():
            words = np.where(rejected, _words(count), words)
    return (words % np.uint64(bound)).astype(np.int64)


def _large_below(bound: int) -> int:
    bits = bound.bit_length()
    while (drawn := int.from_bytes(os.urandom((bits + 7) // 8), "big") >> (-bits % 8)) >= bound:
        pass
    return drawn

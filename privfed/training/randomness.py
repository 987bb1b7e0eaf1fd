"""Noise and sampling for DP-SGD, from the operating system's entropy.

Neither torch's nor numpy's generators will do: they are seeded by people, predictable from their output, and copied by `fork`.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeVar, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from privfed.dp.noise import with_tail

# Drawn ahead: a small share of the memory of a training, and by then the cost of a call no longer shows.
_MOST_BATCHES = 64
_MOST_INDICES = 2**16
_MOST_NUMBERS = 2**15

_Drawn = TypeVar("_Drawn")


def _encryptor(key: bytes) -> CipherContext:
    # The counter may start at zero because no key is used for a second stream.
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _afresh(draw: Callable[[], list[_Drawn]], *, count: int) -> Iterator[_Drawn]:
    """So many of what is drawn, each once, several at a time, and in a forked process nothing that was drawn before the fork."""
    drawn: list[_Drawn] = []
    process = os.getpid()
    for _ in range(count):
        if not drawn or os.getpid() != process:
            drawn, process = draw(), os.getpid()
        yield drawn.pop()


class Randomness(ABC):
    """Gaussian noise and Poisson samples from a stream of uniform bytes.

    Attributes:
        private: Whether nobody can reproduce the stream. Only then a privacy statement holds.
    """

    private: ClassVar[bool]

    @abstractmethod
    def _stream(self, count: int) -> bytes:
        """The next `count` uniform bytes."""

    def _uniform(self, count: int) -> NDArray[np.float64]:
        """Uniform multiples of 2^-53 from 2^-53 to 1, of shape (count,); never zero, so that a logarithm is finite."""
        words = np.frombuffer(self._stream(8 * count), dtype=np.uint64) >> np.uint64(11)
        words += np.uint64(1)
        uniform = words.astype(np.float64)
        uniform *= 2.0**-53
        return uniform

    def normal(self, count: int) -> NDArray[np.float64]:
        """Independent standard normal numbers of shape (count,), float64 (Box and Muller, 1958)."""
        pairs = (count + 1) // 2
        uniform = self._uniform(2 * pairs)
        radius, angle = with_tail(uniform[:pairs], self._uniform), uniform[pairs:]
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        # Sine and cosine from the tangent of half the angle: one slow function instead of two, exact to the last bits.
        angle *= math.pi
        tangent = np.tan(angle, out=angle)
        square = tangent * tangent
        radius /= 1.0 + square
        tangent *= radius
        tangent *= 2.0
        radius *= 1.0 - square
        return uniform[:count]

    def normal_vectors(self, size: int, *, count: int) -> Iterator[NDArray[np.float64]]:
        """So many vectors of independent standard normal numbers.

        Several are drawn at once. A process that is forked between two of them draws its own.

        Args:
            size: Numbers in a vector. Public.
            count: Number of vectors. Public.

        Yields:
            Numbers of shape (size,), float64, which are yielded once and may be changed in place. Private.
        """
        at_once = max(1, min(count, _MOST_NUMBERS // max(1, size)))
        return _afresh(lambda: list(self.normal(at_once * size).reshape(at_once, size)), count=count)

    def subset(self, indices: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """So many of the indices, every subset of that size as likely as every other.

        Args:
            indices: Sorted, of shape (n,). Private.
            size: From 0 to n. Public.

        Returns:
            Sorted indices of shape (size,). Private.
        """
        # Two of n words of 64 bits are equal with a probability below n^2 / 2^65.
        words = np.frombuffer(self._stream(8 * len(indices)), dtype=np.uint64)
        return indices[np.sort(np.argsort(words)[:size])]

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        """Batches that each record enters with probability `sample_rate`, independently of all records and of all other batches.

        The batches of several steps are drawn at once. A process that is forked between two of them draws its own.

        Args:
            records: Number of records to choose from. Private; it bounds the indices and nothing else.
            sample_rate: From 0 (exclusive) to 1. Public.
            steps: Number of batches. Public.

        Yields:
            Sorted indices of shape (batch,), possibly none. Private.
        """
        at_once = max(1, min(steps, _MOST_BATCHES, int(_MOST_INDICES / (records * sample_rate + 1))))
        return _afresh(lambda: self._batches(records, sample_rate=sample_rate, count=at_once), count=steps)

    def _batches(self, records: int, *, sample_rate: float, count: int) -> list[NDArray[np.int64]]:
        """So many batches: all records once per batch in one line, of which each place is taken independently.

        The distances between places taken in succession are geometric, so the work grows with the batches and not with the table.
        """
        if sample_rate == 1:
            return [np.arange(records, dtype=np.int64)] * count
        places = records * count
        expected = places * sample_rate
        draws = int(expected + 6 * math.sqrt(expected)) + 16
        taken: list[NDArray[np.int64]] = []
        last = -1.0
        while last < places:
            with np.errstate(over="ignore"):  # at the smallest rates a gap is infinite, which is past the end as well
                gaps = np.floor(np.log(self._uniform(draws)) / math.log1p(-sample_rate)) + 1.0
                positions = last + np.cumsum(gaps)
            taken.append(positions[positions < places].astype(np.int64))
            last = float(positions[-1])
        line = np.concatenate(taken)
        starts = records * np.arange(count)
        return [part - start for part, start in zip(np.split(line, np.searchsorted(line, starts[1:])), starts, strict=True)]


@final
class OperatingSystemRandomness(Randomness):
    """AES-256-CTR keystreams. Every draw has a new key from the operating system, so a forked process shares none of them."""

    private = True

    def _stream(self, count: int) -> bytes:
        return _encryptor(os.urandom(32)).update(bytes(count))


@final
class _SeededRandomness(Randomness):
    """Reproducible numbers for tests. They hide nothing from anyone who knows or guesses the seed."""

    private = False

    def __init__(self, seed: int) -> None:
        self._encryptor = _encryptor(seed.to_bytes(32, "big"))

    def _stream(self, count: int) -> bytes:
        return self._encryptor.update(bytes(count))

"""Noise and sampling for DP-SGD, from the operating system's entropy.

Neither torch's nor numpy's generators will do: they are seeded by people, predictable from their output, and copied by `fork`.
"""

import math
import os
from abc import ABC, abstractmethod
from typing import ClassVar, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray


def _encryptor(key: bytes) -> CipherContext:
    # The counter may start at zero because no key is used for a second stream.
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


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
        words = np.frombuffer(self._stream(8 * count), dtype=np.uint64)
        return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> NDArray[np.float64]:
        """Independent standard normal numbers of shape (count,), float64 (Box and Muller, 1958). None exceeds 8.6 in size."""
        pairs = (count + 1) // 2
        uniform = self._uniform(2 * pairs)
        radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
        angle = 2.0 * math.pi * uniform[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def poisson_sample(self, records: int, *, sample_rate: float) -> NDArray[np.int64]:
        """Sorted indices of a batch that each record enters with probability `sample_rate`, independently of all others.

        The distances between successive members are geometric, so the work grows with the batch and not with the table.

        Args:
            records: Number of records to choose from. Private; it bounds the indices and nothing else.
            sample_rate: From 0 (exclusive) to 1. Public.

        Returns:
            Indices of shape (batch,), possibly none. Private.
        """
        if sample_rate == 1:
            return np.arange(records, dtype=np.int64)
        expected = records * sample_rate
        draws = int(expected + 6 * math.sqrt(expected)) + 16
        members: list[NDArray[np.int64]] = []
        last = -1.0
        while last < records:
            with np.errstate(over="ignore"):  # at the smallest rates a gap is infinite, which is past the end as well
                gaps = np.floor(np.log(self._uniform(draws)) / math.log1p(-sample_rate)) + 1.0
                positions = last + np.cumsum(gaps)
            members.append(positions[positions < records].astype(np.int64))
            last = float(positions[-1])
        return np.concatenate(members)


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

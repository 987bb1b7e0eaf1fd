"""Sketches by which long updates are compared: 4096 numbers for each, from additions of ciphertexts alone.

Before a client encrypts, its coordinates are put into a random order and given random signs, both public and the same for all clients
of a round. After all uploads are fixed, each chunk of 4096 slots gets a random sign, and the signed chunks of an upload are added.
The inner product of two sketches has the inner product of the updates as its mean, over order and signs, whatever the updates are, and a
variance of at most (|u|^2 |v|^2 + <u, v>^2) / 4096: two coordinates share a slot with a probability of at most 1 / 4096, and only
such pairs are off, each by a term with an independent sign. (Alon, Matias and Szegedy, 1999, theorem 2.2, with slots for buckets.)

The order is known before the uploads. A client that wants to can choose coordinates that share a slot, and so have its own numbers off by
more; those of others it does not reach.
"""

import hashlib
import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

SKETCH_SIZE = 4096


def arranged(grid: NDArray[np.int64], *, seed: bytes) -> NDArray[np.int64]:
    """Grid points in the round's random order and with its random signs.

    Args:
        grid: Of shape (n,). Private.
        seed: Public, of the round alone.
    """
    order, signs = _arrangement(grid.size, seed)
    return (grid * signs)[order]


def restored(grid: NDArray[np.int64], *, seed: bytes) -> NDArray[np.int64]:
    """The inverse of `arranged`."""
    order, signs = _arrangement(grid.size, seed)
    found = np.empty_like(grid)
    found[order] = grid
    return found * signs


def chunk_signs(chunks: int, *, seed: bytes) -> NDArray[np.int64]:
    """A sign, 1 or -1, for each chunk.

    Args:
        chunks: How many.
        seed: Public, and unknown to everybody before the uploads were fixed.
    """
    bits = np.unpackbits(np.frombuffer(_stream(b"privfed chunk signs v1", seed, -(-chunks // 8)), np.uint8))[:chunks]
    return 1 - 2 * bits.astype(np.int64)


def standard_error(product: float, first_square: float, second_square: float) -> float:
    """Bound on the standard deviation of an inner product of sketches of two given updates.

    By Chebyshev's inequality it is off by more than k times that with a probability of at most 1 / k^2.

    Args:
        product: Their inner product.
        first_square: Squared norm of one of them.
        second_square: Of the other.

    Example:
        >>> standard_error(0.0, 1.0, 1.0), round(standard_error(1.0, 1.0, 1.0), 4)
        (0.015625, 0.0221)
    """
    return math.sqrt((first_square * second_square + product**2) / SKETCH_SIZE)


def _arrangement(size: int, seed: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # numpy's generators may draw other numbers in another version, and all clients must agree: so the numbers are a key stream.
    numbers = np.frombuffer(_stream(b"privfed sketch order v1", seed, 8 * size), "<u8")
    return np.argsort(numbers, kind="stable"), 1 - 2 * (numbers & np.uint64(1)).astype(np.int64)


def _stream(label: bytes, seed: bytes, size: int) -> bytes:
    key = hashlib.sha256(len(label).to_bytes(4, "big") + label + seed).digest()
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(size))

"""Key-additive encryption, its secret half: a client's secret for one attempt at one round, its shares, and the opening of a sum.

What is opened are grid points, as everywhere; here the quorum knows the key of the sum anyway, and it serves for nothing else.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from privfed.errors import DecryptionError, InvalidMessageError, RoundKeyUsedError
from privfed.he import _seal_public
from privfed.he._seal_secret import KEY_SEED_BYTES, RingKey, Secret, SumKey
from privfed.he.codec import check_grid, gather, pack_words, spread
from privfed.he.params import CkksParams
from privfed.he.secret import grid_points
from privfed.he.threshold import OnePolynomialVector, key_id, multiply, public_polynomial, sum_polynomials, uniform_words, unpack_polynomial
from privfed.update import Layout

_CHUNKS_AT_ONCE = 8
# Two limbs of 20 bits: a sum of 2^12 products of two limbs is below 2^53, so double precision, and BLAS, are exact.
_LIMB_BITS = 20


@final
class SummandKey(Secret):
    """A client's fresh secret for one attempt at one round: it encrypts one vector, and gives shares of itself to all clients.

    It comes from the operating system's entropy and is never written down: a process that ends takes it along. It cannot be printed,
    copied or pickled.

    Args:
        params: Encryption parameters, of `CkksParams.threshold`.
        binding: `RoundContext.digest`, 32 bytes: which public polynomials it goes with.
    """

    __slots__ = ("_binding", "_params", "_ring_key", "_used")

    def __init__(self, *, params: CkksParams, binding: bytes) -> None:
        self._params = params
        self._binding = binding
        self._ring_key = RingKey(_ring(params), os.urandom(KEY_SEED_BYTES))
        self._used = False

    @property
    def params(self) -> CkksParams:
        """Parameters that the secret is for. Public."""
        return self._params

    @property
    def binding(self) -> bytes:
        """The attempt at a round that the secret is for. Public."""
        return self._binding

    @property
    def used(self) -> bool:
        """Whether it has encrypted. Public."""
        return self._used

    def shares(self, *, clients: int, quorum: int) -> tuple[bytes, ...]:
        """A share for each client: any `quorum` of them determine the secret, fewer say nothing about it (Shamir, 1979).

        Args:
            clients: Number of clients.
            quorum: How many shares it takes.

        Returns:
            For the clients 1, 2, ... the values there of random polynomials with the secret's words at 0: packed words. Each is secret.
        """
        size, modulus = self._params.poly_modulus_degree, self._params.modulus
        drawn = uniform_words((quorum - 1) * size, self._params, os.urandom).reshape(quorum - 1, size)
        coefficients = np.concatenate((self._ring_key.words().reshape(1, size), drawn))
        powers = [[pow(point, exponent, modulus) for exponent in range(quorum)] for point in range(1, clients + 1)]
        return tuple(pack_words(words, self._params) for words in _product(powers, coefficients, modulus))

    def encrypt(self, grid: NDArray[np.int64], layout: Layout) -> OnePolynomialVector:
        """Encrypts the grid points of one vector, once: the same secret never meets the same public polynomial again.

        Args:
            grid: Grid points from `quantise`, of shape (layout.size,), at most `params.largest_point` in absolute value. Private.
            layout: Layout of the vector.

        Raises:
            ValueError: If the grid has another shape or type, or a point is too large. The secret stays unused.
            RoundKeyUsedError: If it has encrypted before.
        """
        params = self._params
        check_grid(grid, layout, params)
        if self._used:
            raise RoundKeyUsedError("this secret has encrypted before; resend the stored bytes, or start a new attempt")
        self._used = True
        chunks = tuple(pack_words(words, params) for words in self._encrypted(grid))
        return OnePolynomialVector(layout=layout, params=params, key_id=key_id(self._binding), chunks=chunks)

    def _encrypted(self, grid: NDArray[np.int64]) -> Iterator[NDArray[np.uint64]]:
        params, ring, size = self._params, _ring(self._params), self._params.chunk_coordinates * _CHUNKS_AT_ONCE
        modulus, secret = np.uint64(params.modulus), self._ring_key.words().astype(np.uint64)
        batches = (spread(grid[start : start + size], params) for start in range(0, grid.size, size))
        for index, (first, seed) in enumerate(self._ring_key.encrypt(batches, slots=False)):
            # SEAL gives c0 = m + e - c1 s under a c1 of its own; the message and its noise stay when c1 is exchanged for a.
            other = _seal_public.expand(ring, seed) + modulus - public_polynomial(params, self._binding, index)
            yield (first + multiply(other % modulus, secret, params)) % modulus


def sum_shares(shares: Sequence[bytes], params: CkksParams) -> bytes:
    """The sum of one client's shares of the secrets in a sum: its share of the sum of the secrets.

    Args:
        shares: Of each participant, what it gave this client. Secret.
        params: Parameters of the round.

    Returns:
        A packed polynomial. Whoever sees a quorum of these opens the sum, and nothing smaller.

    Raises:
        ValueError: If there is none, or more than the parameters have room for.
        InvalidMessageError: If one is not a polynomial.
    """
    return sum_polynomials(shares, params)


def open_sum(total: OnePolynomialVector, binding: bytes, answers: Mapping[int, bytes], *, summands: int, quorum: int) -> NDArray[np.int64]:
    """Opens a sum to the sum of the grid points, bit for bit, or refuses.

    Args:
        total: The sum of the vectors.
        binding: `RoundContext.digest`, 32 bytes.
        answers: `sum_shares` of at least `quorum` clients, by their numbers from 1.
        summands: Number of vectors in the sum.
        quorum: How many answers it takes. Those beyond are compared with the others.

    Returns:
        Sums of grid points, of shape (layout.size,).

    Raises:
        ValueError: If there are too few answers, or the numbers are out of their range.
        InvalidMessageError: If an answer or a chunk is not a polynomial.
        DecryptionError: If sum and answers do not fit each other. It cannot be told whose fault that is.
    """
    params, ring = total.params, _ring(total.params)
    if len(answers) < quorum or not 1 <= summands <= params.weight_sum:
        raise ValueError(f"expected at least {quorum} answers and up to {params.weight_sum} summands, got {len(answers)} and {summands}")
    numbers = sorted(answers)
    values = np.stack([unpack_polynomial(answers[number], params) for number in numbers])
    points, known, modulus = numbers[:quorum], values[:quorum], params.modulus
    beyond = [0, *numbers[quorum:]]
    found = _product([_lagrange(points, place, modulus) for place in beyond], known, modulus)
    if (found[1:] != values[quorum:]).any():
        raise DecryptionError(_INCONSISTENT)
    key = SumKey(ring, found[0])
    polynomials = (
        np.concatenate((unpack_polynomial(chunk, params), public_polynomial(params, binding, index)))
        for index, chunk in enumerate(total.chunks)
    )
    try:
        decrypted = (gather(key.decrypt_unrounded(words), params) for words in polynomials)
        return grid_points(decrypted, total.layout, params, coefficients=(1,) * summands)
    except (DecryptionError, InvalidMessageError):
        raise DecryptionError(_INCONSISTENT) from None


_INCONSISTENT = (
    "the updates and the shares of their keys do not fit each other: one of the clients or the server did not keep to the protocol, and "
    "nobody can tell which; nothing was opened; go on with a new round"
)


def _ring(params: CkksParams) -> _seal_public.Ring:
    return _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)


def _lagrange(points: Sequence[int], place: int, modulus: int) -> list[int]:
    """What the values at these points are multiplied by to give the value at another place."""
    factors: list[int] = []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * (place - other) % modulus
                denominator = denominator * (point - other) % modulus
        factors.append(numerator * pow(denominator, -1, modulus) % modulus)
    return factors


def _product(left: Sequence[Sequence[int]], right: NDArray[np.uint64], modulus: int) -> NDArray[np.uint64]:
    """The product of two matrices modulo a prime of at most 40 bits, exactly, of at most 2^12 rows of `right`."""
    shift, prime = np.uint64(_LIMB_BITS), np.uint64(modulus)

    def limbs(matrix: NDArray[np.uint64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return (matrix >> shift).astype(np.float64), (matrix & np.uint64((1 << _LIMB_BITS) - 1)).astype(np.float64)

    (high, low), (right_high, right_low) = limbs(np.array(left, np.uint64)), limbs(right)
    total = np.zeros((len(left), right.shape[1]), np.uint64)
    for part in (high @ right_high, high @ right_low + low @ right_high, low @ right_low):
        total = ((total << shift) + part.astype(np.uint64)) % prime
    return total

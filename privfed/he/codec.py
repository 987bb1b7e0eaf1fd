"""Numbers to grid points to polynomials to bytes, and back: pure numpy, no secrets, no SEAL.

A chunk of N grid points becomes the N coefficients of a polynomial: one ciphertext holds N numbers instead of the N/2 of the usual
slot packing, and the encryption noise of a coefficient has a worst case. SEAL decodes a polynomial to its values at N/2 of the 2N-th
roots of unity, in an order of its own, from which an FFT finds the coefficients here. Sums and multiplications by
integers act on coefficients; products of ciphertexts do not, and do not exist in this packing. Parameters with `slots` take the
usual packing, for servers that know no other.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privfed.errors import InvalidMessageError
from privfed.he.params import CkksParams, word_bytes
from privfed.he.product_params import ProductParams
from privfed.update import Layout

_LIMB_BITS = 30
_LIMB = np.uint64((1 << _LIMB_BITS) - 1)
_PIECE = 1 << 14


def quantise(values: ArrayLike, params: CkksParams, share: Fraction | None = None) -> tuple[NDArray[np.int64], int]:
    """Grid points of coordinates: share * value / bound * amplitude, rounded half to even, saturated at the bound.

    Under `ProductParams` the bound is one on the Euclidean norm: what is longer is shortened to it first, all of it at once.

    Args:
        values: Coordinates, finite, of any shape. Private.
        params: Bound and amplitude.
        share: The client's share of all weights, above 0 and at most 1/2, if the parameters say that clients pre-scale; else None.
            Public.

    Returns:
        Grid points of the same shape, and how many coordinates were beyond the bound. Both private: the count tells how
        large the data was, so keep it local. If the norm was beyond the bound, all were.

    Raises:
        ValueError: If a value is NaN or infinite, or the share is missing, out of its range, or not for these parameters. The
            message does not say which value, nor how many.

    Example:
        >>> grid, saturated = quantise([0.5, -7.0], CkksParams.standard(bound=1.0))
        >>> grid.tolist(), saturated
        ([4194304, -8388607], 1)
        >>> quantise([1.0], CkksParams.parity(clients=3), Fraction(1, 4))[0].tolist()
        [2097084]
    """
    if params.prescaled is (share is None):
        raise ValueError(f"expected {'a' if params.prescaled else 'no'} share of the weights for these parameters; nothing was quantised")
    if share is not None and not 0 < share <= Fraction(1, 2):
        raise ValueError(f"expected a share above 0 and at most 1/2, got {share}; nothing was quantised")
    array = np.asarray(values, dtype=np.float64)
    flat, factor, saturated = array.reshape(-1), float(params.amplitude * (share or 1)), 0
    if isinstance(params, ProductParams):
        flat, saturated = params.shortened(flat)
    grid = np.empty(flat.size, np.int64)
    # A piece at a time stays in the cache of the processor: many passes over all of a large update would not.
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        if not np.isfinite(piece).all():
            raise ValueError("expected finite values, got NaN or infinity; nothing was quantised")
        scaled = np.clip(piece, -params.bound, params.bound)
        saturated += int(np.count_nonzero(scaled != piece))
        scaled /= params.bound
        scaled *= factor
        grid[start : start + _PIECE] = np.rint(scaled)
    return grid.reshape(array.shape), saturated


def dequantise(grid_sum: NDArray[np.int64], divisor: int | Fraction, params: CkksParams) -> NDArray[np.float64]:
    """Weighted mean of coordinates: grid_sum * step / divisor.

    Args:
        grid_sum: Sums of grid points, of any shape.
        divisor: Sum of the coefficients, from 1 to `params.weight_sum`; where the clients pre-scaled, the share of all weights that
            the clients in the sum hold, above 0 and at most 1.
        params: Bound and amplitude.

    Raises:
        ValueError: If the divisor is out of its range.
    """
    least, most = (0, 1) if params.prescaled else (1, params.weight_sum)
    if not least <= divisor <= most or divisor == 0:
        raise ValueError(f"expected a divisor from {least} to {most}, got {divisor}")
    return (grid_sum * params.step / float(divisor)).astype(np.float64, copy=False)


@cache
def _slots(poly_modulus_degree: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.complex128]]:
    """Where SEAL's slots lie among the powers 4t + 1 of the root zeta = exp(i pi / N), for t below N / 2.

    SEAL's slot i is the value at zeta^(3^i mod 2N) (ckks.h, CKKSEncoder, matrix_reps_index_map). A power 4t + 3 is the conjugate of
    the power 2N - 4t - 3, and so is the value of a real polynomial.

    Returns:
        Of each slot its index t, and whether it is the conjugate; and zeta^0 .. zeta^(N/2 - 1).
    """
    power, powers = 1, np.empty(poly_modulus_degree // 2, np.int64)
    for slot in range(powers.size):
        powers[slot] = power
        power = power * 3 % (2 * poly_modulus_degree)
    conjugate = powers % 4 == 3
    return (
        np.where(conjugate, 2 * poly_modulus_degree - powers, powers) // 4,
        conjugate,
        np.exp(1j * np.pi * np.arange(powers.size) / poly_modulus_degree),
    )


def evaluate(coefficients: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Values of a real polynomial at SEAL's slots.

    Args:
        coefficients: Of shape (N,).

    Returns:
        Values of shape (N / 2,). Their relative error is part of `CkksParams.noise`.
    """
    half = coefficients.size // 2
    indices, conjugate, roots = _slots(coefficients.size)
    # zeta^(N/2) to any power 4t + 1 is i, so p(zeta^(4t+1)) = sum_j (p_j + i p_(j + N/2)) zeta^j exp(2 pi i j t / (N/2)) over j < N/2.
    values = np.fft.ifft((coefficients[:half] + 1j * coefficients[half:]) * roots, norm="forward")[indices]
    return np.where(conjugate, values.conj(), values)


def interpolate(values: NDArray[np.complex128]) -> NDArray[np.float64]:
    """Coefficients of the real polynomial with these values at SEAL's slots: the inverse of `evaluate`.

    Args:
        values: Of shape (N / 2,).

    Returns:
        Coefficients of shape (N,).
    """
    indices, conjugate, roots = _slots(2 * values.size)
    everywhere = np.empty(values.size, np.complex128)
    everywhere[indices] = np.where(conjugate, values.conj(), values)
    halves = np.fft.fft(everywhere, norm="forward") * roots.conj()
    return np.concatenate((halves.real, halves.imag))


def check_grid(grid: NDArray[np.int64], layout: Layout, params: CkksParams) -> None:
    """Refuses what is no vector of grid points that the parameters have room for, before a key is used on it.

    Args:
        grid: Grid points from `quantise`, of shape (layout.size,), at most `params.largest_point` in absolute value. Private.
        layout: Layout of the vector.
        params: Parameters of the session or round.

    Raises:
        ValueError: If the grid has another shape or type, or a point is too large.
    """
    if grid.dtype != np.int64 or grid.shape != (layout.size,):
        raise ValueError(f"expected int64 grid points of shape ({layout.size},), got {grid.dtype} of shape {grid.shape}")
    if grid.max() > params.largest_point or grid.min() < -params.largest_point:
        raise ValueError("expected grid points within the amplitude, got one beyond it; nothing was encrypted")


def spread(grid: NDArray[np.int64], params: CkksParams) -> NDArray[np.int64]:
    """Grid points above the guard bits, in chunks filled up with zeros: coefficients of polynomials or, with slots, values at slots.

    Args:
        grid: Grid points, one chunk or several. Private.
        params: Packing and guard bits.

    Returns:
        Of shape (chunks, params.chunk_coordinates), each below half of the modulus in absolute value.
    """
    numbers = np.zeros((-(-grid.size // params.chunk_coordinates), params.chunk_coordinates), np.int64)
    np.left_shift(grid, params.guard_bits, out=numbers.reshape(-1)[: grid.size])
    return numbers


def gather(values: NDArray[np.complex128], params: CkksParams) -> NDArray[np.float64]:
    """The numbers of one chunk, noise included, from the values at SEAL's slots: what `spread` made, but for the noise.

    Args:
        values: Of shape (N / 2,). Private, and as dangerous as `RingKey.decrypt_unrounded` says.
        params: Packing.

    Returns:
        Of shape (params.chunk_coordinates,).
    """
    return values.real if params.slots else interpolate(values)


def weighted_words(pairs: Iterable[tuple[int, NDArray[np.uint64]]], params: CkksParams) -> NDArray[np.uint64]:
    """Sum of coefficient times words, modulo the prime.

    Args:
        pairs: Positive coefficients, of at most `params.weight_sum` in sum, and words below the modulus, all of one shape. Read one
            at a time.
        params: The modulus.
    """
    # Two limbs of 30 bits, so that nothing has to be reduced before the end: 60 bits are all of a word, and 2^34 its weight.
    low = high = np.zeros(1, np.uint64)
    for coefficient, words in pairs:
        low = low + np.uint64(coefficient) * (words & _LIMB)
        high = high + np.uint64(coefficient) * (words >> np.uint64(_LIMB_BITS))
    modulus = _moduli_of_words(params, low.size)
    spare = 64 - max(prime.bit_length() for prime in params.moduli)
    total, left = high % modulus, _LIMB_BITS
    while left:
        shift = min(spare, left)
        total, left = (total << np.uint64(shift)) % modulus, left - shift
    return (total + low % modulus) % modulus


def _moduli_of_words(params: CkksParams, count: int) -> NDArray[np.uint64]:
    """The modulus of each of so many words of whole polynomials; a single one where all have the same."""
    each = np.array(params.moduli, np.uint64)
    if each.size == 1:
        return each
    return np.tile(np.repeat(each, params.poly_modulus_degree), count // (each.size * params.poly_modulus_degree))


def pack_words(words: NDArray[np.uint64], params: CkksParams, *, behind: bytes = b"") -> bytes:
    """Little-endian words, each of the bytes that its modulus needs, and what comes behind them. Every word must be below its modulus."""
    if len(params.moduli) == 1:
        return _pack(words, params.word_bytes, behind)
    return pack_polynomials(words, params.moduli, params.poly_modulus_degree) + behind


def pack_polynomials(words: NDArray[np.uint64], moduli: Sequence[int], degree: int) -> bytes:
    """Words of polynomials, each with `degree` words for the first prime, then for the next one. Every word must be below its prime."""
    rows = words.reshape(-1, len(moduli), degree)
    return b"".join(_pack(row, word_bytes(prime)) for polynomial in rows for prime, row in zip(moduli, polynomial, strict=True))


def _pack(words: NDArray[np.uint64], width: int, behind: bytes = b"") -> bytes:
    end = words.size * width
    packed = bytearray(end + max(8, len(behind)))
    # Each word overwrites the zeros that the one before it has left behind its bytes.
    _overlapping(packed, words.size, width)[:] = words
    packed[end:] = behind
    return bytes(packed)


def unpack_words(data: bytes, params: CkksParams) -> NDArray[np.uint64]:
    """The words that `pack_words` packed.

    Raises:
        InvalidMessageError: If the length is not a multiple of the word size, or of the size of a polynomial where there are several
            primes, or a word is not below its modulus.
    """
    if len(params.moduli) == 1:
        return _unpack(data, params.modulus)
    return unpack_polynomials(data, params.moduli, params.poly_modulus_degree)


def unpack_polynomials(data: bytes, moduli: Sequence[int], degree: int) -> NDArray[np.uint64]:
    """The words that `pack_polynomials` packed.

    Raises:
        InvalidMessageError: If the length is not a multiple of the size of a polynomial, or a word is not below its prime.
    """
    if len(data) % sum(degree * word_bytes(prime) for prime in moduli):
        raise InvalidMessageError
    parts, start = list[NDArray[np.uint64]](), 0
    while start < len(data):
        for prime in moduli:
            stop = start + degree * word_bytes(prime)
            parts.append(_unpack(data[start:stop], prime))
            start = stop
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def unpack_public_key(public_key: bytes, params: CkksParams) -> NDArray[np.uint64]:
    """Words of both polynomials of a public key, each with a word for every prime that it has.

    Raises:
        InvalidMessageError: If it is none for these parameters, or would hide nothing modulo one of the primes.
    """
    if len(public_key) != params.public_key_bytes:
        raise InvalidMessageError
    moduli = params.key_moduli if isinstance(params, ProductParams) else params.moduli
    words = unpack_polynomials(public_key, moduli, params.poly_modulus_degree)
    if not words.reshape(2, len(moduli), -1)[1].any(axis=1).all():
        raise InvalidMessageError
    return words


def _unpack(data: bytes, modulus: int) -> NDArray[np.uint64]:
    width = word_bytes(modulus)
    if len(data) % width:
        raise InvalidMessageError
    packed = bytearray(len(data) + 8)
    packed[: len(data)] = data
    words = _overlapping(packed, len(data) // width, width) & np.uint64((1 << 8 * width) - 1)
    if (words >= modulus).any():
        raise InvalidMessageError
    return words


def _overlapping(packed: bytearray, count: int, width: int) -> NDArray[np.uint64]:
    """Eight bytes at the place of each packed word: a view, of which several words share bytes, from front to back."""
    return np.ndarray((count,), "<u8", packed, strides=(width,))

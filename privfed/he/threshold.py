"""Key-additive encryption, its public half: who must come together to open a sum, and the sum itself.

For each chunk of a round there is one public polynomial a, which follows from the round. Client i has a fresh ternary secret s_i for
the round, and sends one polynomial, c_i = m_i + e_i - a s_i. The sum of these opens with S, the sum of the s_i, which a quorum gives:
each client shared its s_i among all (Shamir, 1979), and each of the quorum adds up the shares of exactly the clients in the sum. No
single s_i is ever put together. The construction is that of Li, Lin, Polychroniadou and Tessaro, "LERNA", 2023, and of Bell et al.,
"ACORN", 2023, section 4, without their proofs of correct behaviour.

Sums have the coefficient 1 only. From a weighted sum of ternary secrets each of them can be read off, one coefficient at a time, as
from a knapsack with nothing to hide; so no function here takes a weight, and clients pre-scale.

Security rests on RLWE with a hint: the adversary knows S, and the sum of the e_i. It is a heuristic, not a row of SEAL's table.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError
from privfed.he.additive import check_shape
from privfed.he.codec import pack_words, unpack_words, weighted_words
from privfed.he.params import BINDING_BYTES, KEY_ID_BYTES, CkksParams
from privfed.update import Layout

_LIMB_BITS = 20
MOST_MODULUS_BITS = 2 * _LIMB_BITS
_LIMB = np.uint64((1 << _LIMB_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OnePolynomialVector:
    """An encrypted flat vector of a client, or a sum of such: bytes only. Public.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: 16 bytes that name the round's public polynomials.
        chunks: One packed polynomial each.

    Raises:
        ValueError: If the key id, the number of chunks or the length of a chunk is wrong.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        sizes = (self.params.polynomial_bytes,) * self.params.chunks(self.layout)
        check_shape(self.layout, self.params, self.key_id, self.chunks, sizes)

    def __repr__(self) -> str:
        return f"OnePolynomialVector(size={self.layout.size}, chunks={len(self.chunks)})"


def key_id(binding: bytes) -> bytes:
    """16 bytes that name the public polynomials of an attempt at a round.

    Args:
        binding: `RoundContext.digest`, 32 bytes: it covers session, round, attempt, roster and parameters.
    """
    return hashlib.sha256(b"privfed threshold key id v1" + binding).digest()[:KEY_ID_BYTES]


def public_polynomial(params: CkksParams, binding: bytes, chunk: int) -> NDArray[np.uint64]:
    """The public polynomial a of one chunk of one attempt at one round, uniform modulo the prime. Everybody computes the same one.

    Args:
        params: The ring.
        binding: `RoundContext.digest`, 32 bytes.
        chunk: Index of the chunk.

    Returns:
        Words in NTT form, of shape (N,).
    """
    if len(binding) != BINDING_BYTES:
        raise ValueError(f"expected a binding of {BINDING_BYTES} bytes, got {len(binding)}")
    stream = hashlib.shake_256(b"privfed public polynomial v1" + params.digest + binding + chunk.to_bytes(8, "big"))
    return uniform_words(params.poly_modulus_degree, params, stream.digest)


def uniform_words(count: int, params: CkksParams, stream: Callable[[int], bytes]) -> NDArray[np.uint64]:
    """Words below the modulus out of a uniform stream of bytes. Those that are not below are dropped, so that none is more likely.

    Args:
        count: How many.
        params: The modulus.
        stream: Its first so many bytes, or so many fresh ones.
    """
    mask, drawn = np.uint64((1 << params.modulus.bit_length()) - 1), count
    while True:
        words = np.frombuffer(stream(8 * drawn), "<u8").astype(np.uint64, copy=False) & mask
        words = words[words < params.modulus]
        if words.size >= count:
            return words[:count]
        drawn += 2 * (count - words.size) + 8


def multiply(left: NDArray[np.uint64], right: NDArray[np.uint64], params: CkksParams) -> NDArray[np.uint64]:
    """Words times words, one by one, modulo a prime of at most 40 bits: the product of two polynomials in NTT form."""
    modulus, shift = np.uint64(params.modulus), np.uint64(_LIMB_BITS)
    high = left * (right >> shift) % modulus
    return ((high << shift) + left * (right & _LIMB)) % modulus


def sum_polynomials(chunks: Iterable[bytes], params: CkksParams) -> bytes:
    """The sum of one chunk of every vector, each with the coefficient 1, for servers that keep uploads in files.

    Args:
        chunks: One packed polynomial of each vector, all of the same index and round. Read one at a time.
        params: Parameters of all of them.

    Raises:
        ValueError: If there is none, or more than the parameters have room for.
        InvalidMessageError: If a chunk is not a polynomial.
    """
    added = 0

    def words() -> Iterator[tuple[int, NDArray[np.uint64]]]:
        nonlocal added
        for chunk in chunks:
            added += 1
            if added > params.weight_sum:
                raise ValueError(f"expected at most {params.weight_sum} chunks in a sum, got more")
            yield 1, unpack_polynomial(chunk, params)

    total = weighted_words(words(), params)
    if not added:
        raise ValueError("expected at least one chunk in the sum, got none")
    return pack_words(total, params)


def add_up(vectors: Sequence[OnePolynomialVector]) -> OnePolynomialVector:
    """The sum of vectors, each with the coefficient 1: there is no other.

    Raises:
        ValueError: If there is none, or more than the parameters have room for.
        LayoutMismatchError, ParametersMismatchError, RoundMismatchError: If they differ in layout, parameters or round.
        InvalidMessageError: If a chunk is not a polynomial.
    """
    if not vectors:
        raise ValueError("expected at least one vector, got none")
    first = vectors[0]
    for vector in vectors:
        if vector.layout != first.layout:
            raise LayoutMismatchError("expected vectors of one layout, got two; nothing was added")
        if vector.params != first.params:
            raise ParametersMismatchError("expected vectors under the same parameters, got others; nothing was added")
        if vector.key_id != first.key_id:
            raise RoundMismatchError("expected vectors of one attempt at a round, got two; nothing was added")
    columns = zip(*(vector.chunks for vector in vectors), strict=True)
    chunks = tuple(sum_polynomials(column, first.params) for column in columns)
    return OnePolynomialVector(layout=first.layout, params=first.params, key_id=first.key_id, chunks=chunks)


def unpack_polynomial(chunk: bytes, params: CkksParams) -> NDArray[np.uint64]:
    """The words of a packed polynomial, of shape (N,).

    Raises:
        InvalidMessageError: If the length is wrong, or a word is not below the modulus.
    """
    if len(chunk) != params.polynomial_bytes:
        raise InvalidMessageError
    return unpack_words(chunk, params)

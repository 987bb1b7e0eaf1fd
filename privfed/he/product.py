"""The public half of encrypted inner products: what a server can do, which is to multiply, to add and to mask.

For each pair of uploads the ciphertexts are multiplied chunk by chunk and the products added: three polynomials, and nothing is
relinearised, rescaled or rotated, so no evaluation keys exist. Who opens it would read the product of the two updates slot by slot. So
a mask is added, whose constant coefficient is a little noise and whose other coefficients are uniform modulo q: what is left is the
constant coefficient, 2 / N times the inner product. (A mask that only sums to zero over the slots hides them if it is much larger; a
uniform one hides all but the sum whatever they are, and its sum is zero exactly.)

The product of (c0, c1) and (d0, d1) is (c0 d0, c0 d1 + c1 d0, c1 d1). Whoever sent (d0, d1) divides the last two by it and has the other
upload whole, whatever is in the first: a mask on the plaintext is not one on the ciphertext. So two fresh encryptions of zero under the
round's public key (b, a) are added too, (b0, a0, 0) and (0, b1, a1). Each is (b u + e0, a u + e1) for a ternary u that nobody keeps. Who
knows the secret key s, and the noise of the public key, knows of them that b0 + a0 s and b1 + a1 s are small; a0 and a1 are pseudo-uniform
to it too, by the hardness of ring-LWE with u for a secret. So the second and the third polynomial are, and the first follows from them
and from what is opened: that is uniform but for its constant coefficient, where a mask's noise of 2^56 hides the 2^25 of the zeros.

A mask and its zeros serve one ciphertext. Two under one mask differ by the difference of the two products, slot by slot.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, MaskUsedError
from privfed.he import _seal_public
from privfed.he.codec import pack_words, unpack_public_key, unpack_words
from privfed.he.params import KEY_ID_BYTES, SEED_BYTES
from privfed.he.product_params import ProductParams
from privfed.he.sketch import chunk_signs
from privfed.update import Layout

Read = Callable[[int, int], bytes]
"""Gives a fresh chunk, by the index of the upload and that of the chunk."""

# Accumulators of so many pairs, of 400 kB each, are held at a time.
_PAIRS_AT_ONCE = 512


class Assurance(Enum):
    """Why an opener may believe that a product is the product of two signed uploads."""

    RECOMPUTED = "the opener multiplied the signed uploads itself"
    HONEST_BUT_CURIOUS = "the server multiplied, and is trusted to have multiplied what it says"


def pairs(count: int) -> tuple[tuple[int, int], ...]:
    """The n (n + 1) / 2 pairs of so many uploads, each upload with itself too, in the order in which their products travel."""
    return tuple((first, second) for first in range(count) for second in range(first, count))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MaskedProducts:
    """The masked inner product of every pair of uploads of a round: bytes only. Public.

    Args:
        params: Parameters of the uploads.
        key_id: 16 bytes that name the key of the round.
        count: Number of uploads, at least 2.
        chunks: Ciphertexts of three packed polynomials, in the order of `pairs`.

    Raises:
        ValueError: If a number or a length is wrong. The words are not looked at.
    """

    params: ProductParams
    key_id: bytes
    count: int
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.key_id) != KEY_ID_BYTES or self.count < 2:
            raise ValueError(f"expected a key id of {KEY_ID_BYTES} bytes and at least 2 uploads, got {len(self.key_id)} and {self.count}")
        if len(self.chunks) != len(pairs(self.count)):
            raise ValueError(f"expected one product for each of {len(pairs(self.count))} pairs, got {len(self.chunks)}")
        if any(len(chunk) != self.params.product_bytes for chunk in self.chunks):
            raise ValueError(f"expected every product to have {self.params.product_bytes} bytes, got one that has not")

    def __repr__(self) -> str:
        return f"MaskedProducts(uploads={self.count})"


class ZeroSumMask:
    """A mask whose slots sum to nothing but noise, and two encryptions of zero: fresh randomness that hides one ciphertext.

    Args:
        params: Parameters of the round.
        zero: Makes encryptions of zero under the public key of the round.
    """

    __slots__ = ("_params", "_used", "_zero")

    def __init__(self, params: ProductParams, zero: _seal_public.Zero) -> None:
        self._params = params
        self._used = False
        self._zero = zero

    def take(self) -> NDArray[np.uint64]:
        """Words of three polynomials, in NTT form, for the sum of the products of a pair.

        Opened they are uniform, but for a constant coefficient of up to one opened step and `ProductParams.zeros_noise`.

        Raises:
            MaskUsedError: If it was taken before; nothing was masked.
        """
        if self._used:
            raise MaskUsedError("this mask hides another ciphertext already, and a second one would show both; nothing was masked")
        self._used = True
        size = len(self._params.moduli) * self._params.poly_modulus_degree
        words = np.zeros(3 * size, np.uint64)
        for start, part in ((0, self._polynomial()), (0, self._zero()), (size, self._zero())):
            stop = start + part.size
            words[start:stop] = _sum(words[start:stop], part, self._params)
        return words

    def _polynomial(self) -> NDArray[np.uint64]:
        params, degree = self._params, self._params.poly_modulus_degree
        most = int(params.constant_per_scalar)
        noise = secrets.randbelow(2 * most + 1) - most
        parts: list[NDArray[np.uint64]] = []
        for prime in params.moduli:
            words = _uniform(prime, degree)
            # N times the constant coefficient is the sum of all words: the last word settles it, and the others stay uniform.
            words[-1] = (degree * noise - _seal_public.word_sum(words[:-1], prime)) % prime
            parts.append(words)
        return np.concatenate(parts)


def _uniform(modulus: int, count: int) -> NDArray[np.uint64]:
    """Words that are uniform below a modulus, by rejection."""
    mask = np.uint64((1 << modulus.bit_length()) - 1)
    kept = np.zeros(0, np.uint64)
    while kept.size < count:
        drawn = np.frombuffer(os.urandom(8 * (count - kept.size)), "<u8") & mask
        kept = np.concatenate((kept, drawn[drawn < modulus]))
    return kept


def masked_products(
    read: Read,
    *,
    count: int,
    layout: Layout,
    params: ProductParams,
    key_id: bytes,
    public_key: bytes,
    seed: bytes = b"",
    most_at_once: int = _PAIRS_AT_ONCE,
) -> MaskedProducts:
    """Multiplies every pair of uploads, and masks and rerandomises each product anew.

    Args:
        read: The uploads, of one key; read a chunk at a time.
        count: How many.
        layout: Layout of each.
        params: Parameters of each.
        key_id: Names their key.
        public_key: Its public key, as every client of the round made it (`RoundKey.public_key`): of one that somebody chose, zeros hide
            nothing from who chose it.
        seed: Where the parameters sketch, what the signs of the chunks follow from: fixed after the uploads. Public.
        most_at_once: Pairs for which there is memory at a time; uploads are read once for each so many.

    Raises:
        ValueError: If there are fewer than two.
        InvalidMessageError: If a chunk is not a valid ciphertext, or the public key none for these parameters; nothing was multiplied.
    """
    zero = _seal_public.zeros_under(_seal_public.product_ring(), unpack_public_key(public_key, params))
    chunks = [
        pack_words(_masked(words, ZeroSumMask(params, zero).take(), params), params)
        for words in unmasked_products(read, count=count, layout=layout, params=params, seed=seed, most_at_once=most_at_once)
    ]
    return MaskedProducts(params=params, key_id=key_id, count=count, chunks=tuple(chunks))


def _masked(words: NDArray[np.uint64], mask: NDArray[np.uint64], params: ProductParams) -> NDArray[np.uint64]:
    """The product with what hides it added to each of its three polynomials: none of them goes out as it is."""
    if mask.size != words.size:
        raise ValueError(f"expected a mask for all {words.size} words, got one for {mask.size}; nothing was masked")
    return _sum(words, mask, params)


def _sum(first: NDArray[np.uint64], second: NDArray[np.uint64], params: ProductParams) -> NDArray[np.uint64]:
    """Sum of whole polynomials, word by word."""
    moduli = np.repeat(np.array(params.moduli, np.uint64), params.poly_modulus_degree)
    return (first + second) % np.tile(moduli, first.size // moduli.size)


def unmasked_products(
    read: Read, *, count: int, layout: Layout, params: ProductParams, seed: bytes = b"", most_at_once: int = _PAIRS_AT_ONCE
) -> Iterator[NDArray[np.uint64]]:
    """The three polynomials of every pair's product, in the order of `pairs`, without a mask: for `masked_products` and for openers.

    They are ciphertexts. But who holds the key and opens one reads the two updates' product slot by slot, and who sent one of the two
    uploads divides by it and has the other. Args and errors as `masked_products`.
    """
    if count < 2:
        raise ValueError(f"expected at least 2 uploads, got {count}")
    ring = _seal_public.product_ring()
    indices = range(params.chunks(layout))
    every = pairs(count)
    with _seal_public.loader(ring) as load:

        def loaded(upload: int, chunk: int) -> _seal_public.Ciphertext:
            data = read(upload, chunk)
            if len(data) != (params.sum_chunk_bytes if params.asymmetric else params.fresh_chunk_bytes):
                raise InvalidMessageError
            if params.asymmetric:
                return load(unpack_words(data, params), b"")
            return load(unpack_words(data[:-SEED_BYTES], params), data[-SEED_BYTES:])

        def sketched(upload: int) -> _seal_public.Ciphertext:
            total = _seal_public.WeightedSum(ring)
            for chunk, sign in zip(indices, chunk_signs(len(indices), seed=seed).tolist(), strict=True):
                total.add_signed(sign, loaded(upload, chunk))
            return total.ciphertext()

        sketches = {upload: sketched(upload) for upload in range(count)} if params.sketch else {}
        for start in range(0, len(every), most_at_once):
            batch = every[start : start + most_at_once]
            sums = [_seal_public.ProductSum(ring) for _ in batch]
            needed = sorted({upload for pair in batch for upload in pair})
            for chunk in indices if not params.sketch else indices[:1]:
                column = sketches or {upload: loaded(upload, chunk) for upload in needed}
                for (first, second), total in zip(batch, sums, strict=True):
                    total.add(column[first], column[second])
            for total in sums:
                yield total.words()

"""The public half of encrypted updates: what a server can do, which is to check, to weight and to add."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError
from privfed.he import _seal_public
from privfed.he.codec import pack_words, unpack_words, weighted_words
from privfed.he.params import KEY_ID_BYTES, SEALED_TAGS_BYTES, SEED_BYTES, CkksParams, ring_of
from privfed.update import Layout


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CkksVector:
    """An encrypted flat vector: bytes only, no SEAL object. Public.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: 16 bytes that name the key of the round.
        chunks: Ciphertexts: packed c0 and the 64-byte seed of c1 if fresh, else packed c0 and packed c1. Of the last one c0 is cut to
            what is in use, see `CkksParams.first_polynomial_sizes`.
        fresh: Whether it is as one client encrypted it; else it is a sum.
        sealed_tags: What the clients, and nobody else, can check a sum against (`he.tags`): 92 bytes if fresh, none if a sum.

    Raises:
        ValueError: If the key id, the number of chunks, or the length of a chunk or of the tags is wrong. The words are not
            looked at; that is what `check_chunk` and `weighted_sum` do.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]
    fresh: bool
    sealed_tags: bytes = b""

    def __post_init__(self) -> None:
        sizes = self.params.fresh_chunk_sizes(self.layout) if self.fresh else self.params.sum_chunk_sizes(self.layout)
        check_shape(self.layout, self.params, self.key_id, self.chunks, sizes)
        if len(self.sealed_tags) != (SEALED_TAGS_BYTES if self.fresh else 0):
            raise ValueError(f"expected sealed tags of {SEALED_TAGS_BYTES} bytes on a fresh vector alone, got {len(self.sealed_tags)}")

    @property
    def seeds(self) -> bytes:
        """The seeds of all chunks of a fresh vector, one after the other."""
        return b"".join(chunk[-SEED_BYTES:] for chunk in self.chunks)

    def __repr__(self) -> str:
        return f"CkksVector(size={self.layout.size}, chunks={len(self.chunks)}, fresh={self.fresh})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SeededSum:
    """A sum as it travels where `params.seeded_sums`: without c1, which follows from the seeds of the uploads in it. Public.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters of the uploads.
        key_id: 16 bytes that name the key of the round.
        chunks: Packed c0 of the sum, the last one cut as those of the uploads.
        seeds: `CkksVector.seeds` of each upload, in the order of their coefficients.

    Raises:
        ValueError: If the key id, the number of chunks, or the length of a chunk or of the seeds is wrong.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]
    seeds: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_shape(self.layout, self.params, self.key_id, self.chunks, self.params.first_polynomial_sizes(self.layout))
        if any(len(seeds) != SEED_BYTES * len(self.chunks) for seeds in self.seeds):
            raise ValueError("expected one seed for every chunk of every upload, got others")

    def regenerate(self, coefficients: Sequence[int]) -> CkksVector:
        """The whole sum: c1 is the sum of coefficient times what SEAL expands from each seed.

        Args:
            coefficients: What each upload was multiplied by.

        Raises:
            ValueError: If there is not one coefficient for each upload, or one is out of its range.
            InvalidMessageError: If a word is not below the modulus.
        """
        if len(coefficients) != len(self.seeds):
            raise ValueError(f"expected one coefficient for each of {len(self.seeds)} uploads, got {len(coefficients)}")
        check_coefficients(coefficients, self.params)
        ring, chunks = ring_of(self.params), list[bytes]()
        alike: defaultdict[int, list[bytes]] = defaultdict(list)
        for coefficient, seeds in zip(coefficients, self.seeds, strict=True):
            alike[coefficient].append(seeds)
        with _seal_public.expander(ring) as expand:
            for index, chunk in enumerate(self.chunks):
                unpack_words(chunk, self.params)  # only for its checks
                total = _seal_public.WeightedSum(ring)
                for coefficient, uploads in alike.items():
                    part = _seal_public.WeightedSum(ring)
                    for seeds in uploads:
                        part.add(1, expand(seeds[index * SEED_BYTES : (index + 1) * SEED_BYTES]))
                    # One multiplication for all uploads that have the same coefficient.
                    total.add(coefficient, part.ciphertext())
                chunks.append(chunk + pack_words(total.words()[self.params.poly_modulus_degree :], self.params))
        return CkksVector(layout=self.layout, params=self.params, key_id=self.key_id, chunks=tuple(chunks), fresh=False)

    def __repr__(self) -> str:
        return f"SeededSum(size={self.layout.size}, chunks={len(self.chunks)}, uploads={len(self.seeds)})"


def check_coefficients(coefficients: Sequence[int], params: CkksParams) -> None:
    """Checks that a weighted sum with these coefficients is within the proven budget.

    Raises:
        ValueError: If there is none, one is not a positive int, or not 1 where the clients pre-scale, or their sum exceeds
            `params.weight_sum`.
    """
    if not coefficients:
        raise ValueError("expected at least one coefficient, got none")
    total = 0
    for coefficient in coefficients:
        total = _checked_total(total, coefficient, params)


def _checked_total(total: int, coefficient: int, params: CkksParams) -> int:
    if type(coefficient) is not int or coefficient < 1:
        raise ValueError(f"expected every coefficient to be a positive int, got {coefficient!r}; leave out who does not count")
    if params.prescaled and coefficient != 1:
        raise ValueError(f"expected every coefficient to be 1, because the clients have pre-scaled, got {coefficient}")
    if total + coefficient > params.weight_sum:
        raise ValueError(f"expected coefficients with a sum of at most {params.weight_sum}, got {total + coefficient} or more")
    return total + coefficient


def weighted_sum(vectors: Sequence[CkksVector], coefficients: Sequence[int]) -> CkksVector:
    """Sum of coefficient times vector, computed on ciphertexts, chunk by chunk with one accumulator.

    It opens to the weighted sum of the grid points, bit for bit. The arguments are not changed.

    Args:
        vectors: Fresh vectors of one layout, under the same parameters and key.
        coefficients: A positive int for each vector; their sum is at most `params.weight_sum`.

    Raises:
        ValueError: If the lengths differ, a coefficient is out of its range, or a vector is itself a sum.
        LayoutMismatchError: If layouts differ.
        ParametersMismatchError: If parameters differ.
        RoundMismatchError: If keys differ.
        InvalidMessageError: If a chunk is not a valid ciphertext.
    """
    first = _check_summands(vectors, coefficients)
    chunks = tuple(
        sum_chunks(zip(coefficients, column, strict=True), first.params, size)
        for size, *column in zip(first.params.first_polynomial_sizes(first.layout), *(vector.chunks for vector in vectors), strict=True)
    )
    return CkksVector(layout=first.layout, params=first.params, key_id=first.key_id, chunks=chunks, fresh=False)


def seeded_sum(vectors: Sequence[CkksVector], coefficients: Sequence[int]) -> SeededSum:
    """The same sum as `weighted_sum`, as c0 and seeds. Same arguments and errors; SEAL has no part in it."""
    first = _check_summands(vectors, coefficients)
    chunks = tuple(
        sum_first_polynomials(zip(coefficients, column, strict=True), first.params, size)
        for size, *column in zip(first.params.first_polynomial_sizes(first.layout), *(vector.chunks for vector in vectors), strict=True)
    )
    seeds = tuple(vector.seeds for vector in vectors)
    return SeededSum(layout=first.layout, params=first.params, key_id=first.key_id, chunks=chunks, seeds=seeds)


def _check_summands(vectors: Sequence[CkksVector], coefficients: Sequence[int]) -> CkksVector:
    if len(vectors) != len(coefficients):
        raise ValueError(f"expected one coefficient for each vector, got {len(coefficients)} for {len(vectors)}")
    if not vectors:
        raise ValueError("expected at least one vector, got none")
    for vector in vectors:
        if not isinstance(vector, CkksVector):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without a type checker
            raise TypeError(
                f"expected vectors of two polynomials, which take coefficients, got a {type(vector).__name__}; nothing was added; what was "
                "encrypted under ThresholdKey is only added up"
            )
    first = vectors[0]
    check_coefficients(coefficients, first.params)
    for vector in vectors:
        if vector.layout != first.layout:
            raise LayoutMismatchError("expected vectors of one layout, got two; nothing was added")
        if vector.params != first.params:
            raise ParametersMismatchError("expected vectors under the same parameters, got others; nothing was added")
        if vector.key_id != first.key_id:
            raise RoundMismatchError("expected vectors under the same key, got another key id; nothing was added")
        if not vector.fresh:
            raise ValueError("expected fresh vectors, got one that is a sum; its coefficients are not known here")
    return first


def sum_chunks(chunks: Iterable[tuple[int, bytes]], params: CkksParams, size: int) -> bytes:
    """Weighted sum of one chunk of every vector, for servers that keep uploads in files.

    Args:
        chunks: Pairs of coefficient and fresh chunk, all of the same index and under the same key. Read one at a time.
        params: Parameters of all of them.
        size: Bytes of the packed c0 of such a chunk: `params.first_polynomial_sizes` at its index.

    Returns:
        A chunk of a sum, of `size + params.polynomial_bytes` bytes.

    Raises:
        ValueError: If there is none, or the coefficients are out of their range.
        InvalidMessageError: If a chunk is not a valid ciphertext.
    """
    ring = ring_of(params)
    second = _seal_public.WeightedSum(ring)
    with _seal_public.expander(ring) as expand:

        def words() -> Iterable[tuple[int, NDArray[np.uint64]]]:
            # SEAL adds up c1, which it alone can expand; c0 may be cut, and its words add up without SEAL.
            for coefficient, chunk in _checked(chunks, params):
                yield coefficient, _first_polynomial(chunk, params, size)
                second.add(coefficient, expand(chunk[-SEED_BYTES:]))

        first = weighted_words(words(), params)
    return pack_words(first, params) + pack_words(second.words()[ring.polynomial_words :], params)


def sum_first_polynomials(chunks: Iterable[tuple[int, bytes]], params: CkksParams, size: int) -> bytes:
    """Weighted sum of c0 alone of one chunk of every vector, of `size` bytes, for a `SeededSum`.

    Args and errors as `sum_chunks`.
    """
    pairs = ((coefficient, _first_polynomial(chunk, params, size)) for coefficient, chunk in _checked(chunks, params))
    return pack_words(weighted_words(pairs, params), params)


def _checked(chunks: Iterable[tuple[int, bytes]], params: CkksParams) -> Iterator[tuple[int, bytes]]:
    """The same pairs, one at a time, as long as their coefficients are in range; none at all is an error."""
    total = 0
    for coefficient, chunk in chunks:
        total = _checked_total(total, coefficient, params)
        yield coefficient, chunk
    if not total:
        raise ValueError("expected at least one chunk in the sum, got none")


def check_chunk(chunk: bytes, params: CkksParams, size: int, *, fresh: bool) -> None:
    """Checks that bytes are a valid ciphertext: the length and every word, and of a sum also SEAL's own view of it.

    A fresh chunk leaves nothing more to choose: whatever the seed, SEAL expands it to words below the modulus, not all zero. Nor does a
    cut c0 of a sum, in which any coefficients are ones of a ciphertext.

    Args:
        chunk: From outside.
        params: Parameters that it should have.
        size: Bytes that its packed c0 should have: `params.first_polynomial_sizes` at its index.
        fresh: Whether it is one of a fresh vector; else of a sum.

    Raises:
        InvalidMessageError: If they are not.
    """
    if fresh:
        _first_polynomial(chunk, params, size)
        return
    if len(chunk) != size + params.polynomial_bytes:
        raise InvalidMessageError
    words = unpack_words(chunk, params)
    if size < params.polynomial_bytes:
        second = words[-params.poly_modulus_degree :]
        words = np.concatenate((np.zeros_like(second), second))
    _seal_public.load_sum(ring_of(params), words)


def check_shape(layout: Layout, params: CkksParams, key_id: bytes, chunks: Sequence[bytes], sizes: Sequence[int]) -> None:
    """Checks the lengths in an encrypted vector of any trust mode. The words are not looked at.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: Names its key.
        chunks: Of the vector.
        sizes: Bytes that each chunk is to have.

    Raises:
        ValueError: If the key id, the number of chunks or the length of a chunk is wrong.
    """
    if len(key_id) != KEY_ID_BYTES:
        raise ValueError(f"expected a key id of {KEY_ID_BYTES} bytes, got {len(key_id)}")
    if len(chunks) != params.chunks(layout):
        raise ValueError(f"expected {params.chunks(layout)} chunks for this layout, got {len(chunks)}")
    for place, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        if len(chunk) != size:
            raise ValueError(f"expected chunk {place} to have {size} bytes, got {len(chunk)}")


def _first_polynomial(chunk: bytes, params: CkksParams, size: int) -> NDArray[np.uint64]:
    # The exact length comes first: from here on nothing depends on a number that the sender chose.
    if len(chunk) != size + SEED_BYTES:
        raise InvalidMessageError
    return unpack_words(chunk[:-SEED_BYTES], params)

"""The public half of encrypted updates: what a server can do, which is to check, to weight and to add."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError
from privfed.he import _seal_public
from privfed.he.codec import pack_words, unpack_words
from privfed.he.params import KEY_ID_BYTES, SEED_BYTES, CkksParams
from privfed.update import Layout


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CkksVector:
    """An encrypted flat vector: bytes only, no SEAL object. Public.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: 16 bytes that name the key of the round.
        chunks: One ciphertext per N coordinates: packed c0 and the 64-byte seed of c1 if fresh, else packed c0 and packed c1.
        fresh: Whether it is as one client encrypted it; else it is a sum.

    Raises:
        ValueError: If the key id, the number of chunks or the length of a chunk is wrong. The words are not looked at; that
            is what `check_chunk` and `weighted_sum` do.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]
    fresh: bool

    def __post_init__(self) -> None:
        if len(self.key_id) != KEY_ID_BYTES:
            raise ValueError(f"expected a key id of {KEY_ID_BYTES} bytes, got {len(self.key_id)}")
        if len(self.chunks) != self.params.chunks(self.layout):
            raise ValueError(f"expected {self.params.chunks(self.layout)} chunks for this layout, got {len(self.chunks)}")
        size = self.params.fresh_chunk_bytes if self.fresh else self.params.sum_chunk_bytes
        if any(len(chunk) != size for chunk in self.chunks):
            raise ValueError(f"expected every chunk to have {size} bytes, got one that has not")

    def __repr__(self) -> str:
        return f"CkksVector(size={self.layout.size}, chunks={len(self.chunks)}, fresh={self.fresh})"


def check_coefficients(coefficients: Sequence[int], params: CkksParams) -> None:
    """Checks that a weighted sum with these coefficients is within the proven budget.

    Raises:
        ValueError: If there is none, one is not a positive int, or their sum exceeds `params.weight_sum`.
    """
    if not coefficients:
        raise ValueError("expected at least one coefficient, got none")
    total = 0
    for coefficient in coefficients:
        total = _checked_total(total, coefficient, params)


def _checked_total(total: int, coefficient: int, params: CkksParams) -> int:
    if type(coefficient) is not int or coefficient < 1:
        raise ValueError(f"expected every coefficient to be a positive int, got {coefficient!r}; leave out who does not count")
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
    if len(vectors) != len(coefficients):
        raise ValueError(f"expected one coefficient for each vector, got {len(coefficients)} for {len(vectors)}")
    if not vectors:
        raise ValueError("expected at least one vector, got none")
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
    chunks = tuple(
        sum_chunks(zip(coefficients, column, strict=True), first.params)
        for column in zip(*(vector.chunks for vector in vectors), strict=True)
    )
    return CkksVector(layout=first.layout, params=first.params, key_id=first.key_id, chunks=chunks, fresh=False)


def sum_chunks(chunks: Iterable[tuple[int, bytes]], params: CkksParams) -> bytes:
    """Weighted sum of one chunk of every vector, for servers that keep uploads in files.

    Args:
        chunks: Pairs of coefficient and fresh chunk, all of the same index and under the same key. Read one at a time.
        params: Parameters of all of them.

    Returns:
        A chunk of a sum, of `params.sum_chunk_bytes` bytes.

    Raises:
        ValueError: If there is none, or the coefficients are out of their range.
        InvalidMessageError: If a chunk is not a valid ciphertext.
    """
    accumulator = _seal_public.WeightedSum(_ring(params))
    total = 0
    for coefficient, chunk in chunks:
        total = _checked_total(total, coefficient, params)
        accumulator.add(coefficient, _load(chunk, params, fresh=True))
    return pack_words(accumulator.words(), params)


def check_chunk(chunk: bytes, params: CkksParams, *, fresh: bool) -> None:
    """Checks that bytes are a valid, non-transparent ciphertext: the length and every word first, then SEAL's own view.

    Raises:
        InvalidMessageError: If they are not.
    """
    _load(chunk, params, fresh=fresh)


def _ring(params: CkksParams) -> _seal_public.Ring:
    return _seal_public.ring(params.poly_modulus_degree, params.modulus)


def _load(chunk: bytes, params: CkksParams, *, fresh: bool) -> _seal_public.Ciphertext:
    # The exact length comes first: from here on nothing depends on a number that the sender chose.
    if len(chunk) != (params.fresh_chunk_bytes if fresh else params.sum_chunk_bytes):
        raise InvalidMessageError
    if fresh:
        return _seal_public.load_fresh(_ring(params), unpack_words(chunk[:-SEED_BYTES], params), chunk[-SEED_BYTES:])
    return _seal_public.load_sum(_ring(params), unpack_words(chunk, params))

"""Encryption to a key holder: the holder's key, and encryption itself, which needs its public half alone."""

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, RoundMismatchError
from privfed.he import _seal_public
from privfed.he._seal_secret import KEY_SEED_BYTES, RingKey, derive, encrypt_to
from privfed.he.additive import CkksVector
from privfed.he.codec import check_grid, pack_polynomials, pack_words, spread, unpack_words
from privfed.he.escrow import WholeVector, public_key_id, unpack_public_key
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import StoredSecret, grid_points
from privfed.update import Layout

_CHUNKS_AT_ONCE = 8


@final
class EscrowKey(StoredSecret):
    """The secret of the one key holder; neither a client nor the server has it. It cannot be printed, copied or pickled.

    Args:
        secret: 32 bytes from the operating system's generator.

    Example:
        >>> EscrowKey.generate()
        EscrowKey(<secret>)
    """

    __slots__ = ()
    _named = "escrow key"

    def public_key(self, *, session: bytes, params: CkksParams) -> bytes:
        """The public half for one session: two packed polynomials, an encryption of zero. Another one each time; any will do. Public.

        Args:
            session: 16 bytes that name the session; another session has another key.
            params: Encryption parameters, of `CkksParams.escrow` or `ProductParams.escrow`.
        """
        if isinstance(params, ProductParams):
            return pack_polynomials(self._ring_key(session, params).public_key(), params.key_moduli, params.poly_modulus_degree)
        zero = np.zeros((1, params.poly_modulus_degree), np.int64)
        ((first, seed),) = self._ring_key(session, params).encrypt([zero], slots=False)
        return pack_words(np.concatenate((first, _seal_public.expand(_ring(params), seed))), params)

    def open_sum(self, total: CkksVector, *, session: bytes, coefficients: tuple[int, ...]) -> NDArray[np.int64]:
        """Opens a weighted sum to the weighted sum of the grid points, bit for bit, or refuses.

        Whoever calls this computed the sum, and decided that it may be opened.

        Args:
            total: A sum.
            session: 16 bytes that name the session.
            coefficients: What each vector in it was multiplied by.

        Raises:
            ValueError: If it is not a sum.
            InvalidMessageError: If a chunk is not a valid ciphertext.
            DecryptionError: If a chunk does not hold what it should.
        """
        if total.fresh:
            raise ValueError("expected a sum, got the vector of a single client; nothing was decrypted")
        ring_key = self._ring_key(session, total.params)
        decrypted = (ring_key.decrypt_unrounded(unpack_words(chunk, total.params)) for chunk in total.chunks)
        return grid_points(decrypted, total.layout, total.params, coefficients=coefficients)

    def _ring_key(self, session: bytes, params: CkksParams) -> RingKey:
        return RingKey(_ring(params), derive(self._secret, KEY_SEED_BYTES, b"privfed escrow ring key v1", session, params.digest))


def encrypt_to_holder(grid: NDArray[np.int64], layout: Layout, params: CkksParams, public_key: bytes) -> WholeVector:
    """Encrypts the grid points of one vector to the key holder, with fresh randomness from the operating system.

    Args:
        grid: Grid points from `quantise`, of shape (layout.size,), at most `params.largest_point` in absolute value. Private.
        layout: Layout of the vector.
        params: Parameters of the session.
        public_key: As `EscrowKey.public_key` gave it.

    Raises:
        ValueError: If the grid has another shape or type, or a point is too large.
        RoundMismatchError: If the public key is none for these parameters.
    """
    check_grid(grid, layout, params)
    try:
        key = unpack_public_key(public_key, params)
    except InvalidMessageError:
        raise RoundMismatchError("the holder's public key is none for these parameters; nothing was encrypted") from None

    size = params.chunk_coordinates * _CHUNKS_AT_ONCE

    def batches() -> Iterator[NDArray[np.int64]]:
        for start in range(0, grid.size, size):
            yield spread(grid[start : start + size], params)

    words = encrypt_to(_ring(params), key, batches(), slots=params.slots)
    chunks = tuple(pack_words(chunk, params) for chunk in words)
    return WholeVector(layout=layout, params=params, key_id=public_key_id(public_key), chunks=chunks)


def _ring(params: CkksParams) -> _seal_public.Ring:
    return _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=params.slots)

"""Encryption to a key holder: the holder's keys, and encryption itself, which needs its public half alone."""

from collections.abc import Iterator
from typing import final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, ParametersMismatchError, RoundMismatchError
from privfed.he import _seal_public
from privfed.he._seal_secret import KEY_SEED_BYTES, RingKey, Secret, derive, encrypt_to
from privfed.he.additive import CkksVector
from privfed.he.codec import check_grid, gather, pack_polynomials, pack_words, spread, unpack_public_key, unpack_words
from privfed.he.escrow import (
    ENCRYPTION_KEY_BYTES,
    SealedVector,
    WholeVector,
    check_whole_chunk,
    public_key_id,
    sealed_info,
)
from privfed.he.params import BINDING_BYTES, CkksParams, ring_of
from privfed.he.product_params import ProductParams
from privfed.he.secret import StoredSecret, grid_points
from privfed.hpke import unseal_with
from privfed.update import Layout

_CHUNKS_AT_ONCE = 8


@final
class AttemptKey(Secret):
    """The holder's two key pairs of one attempt at one round. Made by `EscrowKey.attempt_key`; it cannot be printed, copied or pickled.

    A sum with a ciphertext of another attempt in it does not open: what was uploaded in one attempt cannot be added to another one. And
    the ciphertexts are sealed: neither key follows from the other, and an opened sum that gives the one away opens no upload.
    """

    __slots__ = ("_binding", "_params", "_ring_key", "_sealing_key")

    def __init__(self, *, params: CkksParams, binding: bytes, seed: bytes, sealing_seed: bytes) -> None:
        self._params = params
        self._binding = binding
        self._ring_key = RingKey(ring_of(params), seed)
        self._sealing_key = X25519PrivateKey.from_private_bytes(sealing_seed)

    @property
    def encryption_key(self) -> bytes:
        """To what the clients seal their encrypted updates: X25519, 32 raw bytes. Public."""
        return self._sealing_key.public_key().public_bytes_raw()

    def unseal(self, vector: SealedVector, *, sender: str) -> WholeVector:
        """The encrypted vector that a client sealed. Whoever calls this has verified who signed it.

        Args:
            vector: As it travelled.
            sender: Name of the client that signed it.

        Raises:
            ParametersMismatchError: If it has other parameters than the key.
            InvalidMessageError: If it was not sealed to this key, for this attempt, by this client, or holds something else than
                ciphertexts.
        """
        if vector.params != self._params:
            raise ParametersMismatchError("the vector has other parameters than the key of this attempt; nothing was decrypted")
        chunks = tuple(
            unseal_with(chunk, self._sealing_key, info=sealed_info(self._binding, sender=sender, place=place))
            for place, chunk in enumerate(vector.chunks)
        )
        for chunk in chunks:
            check_whole_chunk(chunk, vector.params)
        return WholeVector(layout=vector.layout, params=vector.params, key_id=vector.key_id, chunks=chunks)

    def public_key(self) -> bytes:
        """The public half: two packed polynomials, an encryption of zero. Another one each time; the clients must have the same. Public."""
        params = self._params
        if isinstance(params, ProductParams):
            return pack_polynomials(self._ring_key.public_key(), params.key_moduli, params.poly_modulus_degree)
        zero = np.zeros((1, params.poly_modulus_degree), np.int64)
        ((first, seed),) = self._ring_key.encrypt([zero], slots=False)
        return pack_words(np.concatenate((first, _seal_public.expand(ring_of(params), seed))), params)

    def open_sum(self, total: CkksVector, *, coefficients: tuple[int, ...]) -> NDArray[np.int64]:
        """Opens a weighted sum to the weighted sum of the grid points, bit for bit, or refuses.

        Whoever calls this computed the sum, and decided that it may be opened.

        Args:
            total: A sum.
            coefficients: What each vector in it was multiplied by.

        Raises:
            ValueError: If it is not a sum.
            ParametersMismatchError: If it has other parameters than the key.
            InvalidMessageError: If a chunk is not a valid ciphertext.
            DecryptionError: If a chunk does not hold what it should, or something that was not encrypted to this key is in the sum.
        """
        if total.fresh:
            raise ValueError("expected a sum, got the vector of a single client; nothing was decrypted")
        if total.params != self._params:
            raise ParametersMismatchError("the sum has other parameters than the key of this attempt; nothing was decrypted")
        params = total.params
        decrypted = (gather(self._ring_key.decrypt_unrounded(unpack_words(chunk, params)), params) for chunk in total.chunks)
        return grid_points(decrypted, total.layout, params, coefficients=coefficients)


@final
class EscrowKey(StoredSecret):
    """The secret of the one key holder; neither a client nor the server has it. It cannot be printed, copied or pickled.

    It never encrypts or decrypts itself: every attempt at a round has a key pair that is derived from it, and nothing else is stored.

    Args:
        secret: 32 bytes from the operating system's generator.

    Example:
        >>> EscrowKey.generate()
        EscrowKey(<secret>)
    """

    __slots__ = ()
    _named = "escrow key"

    def attempt_key(self, *, binding: bytes, params: CkksParams) -> AttemptKey:
        """The key pairs of one attempt at one round; another attempt, round, session, history or agreement has another.

        Args:
            binding: `RoundContext.digest`, 32 bytes.
            params: Encryption parameters, of `CkksParams.escrow` or `ProductParams.escrow`.

        Raises:
            ValueError: If the binding is not 32 bytes.
        """
        if len(binding) != BINDING_BYTES:
            raise ValueError(f"expected a binding of {BINDING_BYTES} bytes, got {len(binding)}")
        seed = derive(self._secret, KEY_SEED_BYTES, b"privfed escrow attempt key v1", binding, params.digest)
        sealing_seed = derive(self._secret, ENCRYPTION_KEY_BYTES, b"privfed escrow sealing key v1", binding)
        return AttemptKey(params=params, binding=binding, seed=seed, sealing_seed=sealing_seed)


def encrypt_to_holder(grid: NDArray[np.int64], layout: Layout, params: CkksParams, public_key: bytes) -> WholeVector:
    """Encrypts the grid points of one vector to the key holder, with fresh randomness from the operating system.

    Args:
        grid: Grid points from `quantise`, of shape (layout.size,), at most `params.largest_point` in absolute value. Private.
        layout: Layout of the vector.
        params: Parameters of the session.
        public_key: As `AttemptKey.public_key` gave it.

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

    words = encrypt_to(ring_of(params), key, batches(), slots=params.slots)
    chunks = tuple(pack_words(chunk, params) for chunk in words)
    return WholeVector(layout=layout, params=params, key_id=public_key_id(public_key), chunks=chunks)

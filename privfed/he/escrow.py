"""Encryption to a key holder, its public half: what clients send who cannot decrypt, and its weighted sum.

Clients hold the public key alone, so a ciphertext is two whole polynomials, and its noise is e u + e0 + e1 s: sums of N products, about
240 in standard deviation where a symmetric ciphertext has 3.24. `CkksParams.escrow` has the parameters for it, and
`ProductParams.escrow` those for rounds that are scored.

What travels is sealed to the holder once more, because CKKS does not stand an opened sum in which somebody chose a ciphertext freely: to
whoever has the public key, a ciphertext can be made that decrypts to the secret one. Who learns it so has nothing that it decrypts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError, UnsupportedInThisModeError
from privfed.he.additive import CkksVector, check_coefficients, check_shape
from privfed.he.codec import pack_words, unpack_words, weighted_words
from privfed.he.params import BINDING_BYTES, KEY_ID_BYTES, CkksParams
from privfed.hpke import SEALED_OVERHEAD_BYTES, seal_to
from privfed.update import Layout

ENCRYPTION_KEY_BYTES = 32
_SEALED = b"privfed sealed upload v1\n"


def public_key_id(public_key: bytes) -> bytes:
    """16 bytes that name a holder's key, from its public half."""
    return hashlib.sha256(b"privfed escrow key id v1" + public_key).digest()[:KEY_ID_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HolderKey:
    """The holder's public key of one attempt at one round: what is encrypted to it opens with no other attempt's key. Public.

    Args:
        binding: `RoundContext.digest`, 32 bytes: which attempt.
        public_key: As `AttemptKey.public_key` gives it.
        encryption_key: `AttemptKey.encryption_key`, 32 bytes: to this the encrypted updates are sealed.

    Raises:
        ValueError: If the binding or the encryption key is not 32 bytes.
    """

    binding: bytes
    public_key: bytes
    encryption_key: bytes

    def __post_init__(self) -> None:
        if len(self.binding) != BINDING_BYTES:
            raise ValueError(f"expected a binding of {BINDING_BYTES} bytes, got {len(self.binding)}")
        if len(self.encryption_key) != ENCRYPTION_KEY_BYTES:
            raise ValueError(f"expected an encryption key of {ENCRYPTION_KEY_BYTES} bytes, got {len(self.encryption_key)}")

    def __repr__(self) -> str:
        return f"HolderKey({self.key_id.hex()})"

    @property
    def key_id(self) -> bytes:
        """Name of the key, 16 bytes."""
        return public_key_id(self.public_key)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WholeVector:
    """A flat vector of one client, encrypted to the key holder: bytes only. Its client seals it, and the key holder alone sees it again.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: 16 bytes that name the holder's key.
        chunks: Two packed polynomials each.

    Raises:
        ValueError: If the key id, the number of chunks or the length of a chunk is wrong.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        sizes = (self.params.sum_chunk_bytes,) * self.params.chunks(self.layout)
        check_shape(self.layout, self.params, self.key_id, self.chunks, sizes)

    def __repr__(self) -> str:
        return f"WholeVector(size={self.layout.size}, chunks={len(self.chunks)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SealedVector:
    """A `WholeVector` as it travels: sealed to the key holder. Public.

    Args:
        layout: Names and shapes of the tensors in it.
        params: Parameters under which it was encrypted.
        key_id: 16 bytes that name the holder's key.
        chunks: Those of the vector, each sealed for its sender, its place and the attempt.

    Raises:
        ValueError: If the key id, the number of chunks or the length of a chunk is wrong.
    """

    layout: Layout
    params: CkksParams
    key_id: bytes
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        sizes = (self.params.sum_chunk_bytes + SEALED_OVERHEAD_BYTES,) * self.params.chunks(self.layout)
        check_shape(self.layout, self.params, self.key_id, self.chunks, sizes)

    def __repr__(self) -> str:
        return f"SealedVector(size={self.layout.size}, chunks={len(self.chunks)})"


def seal_vector(vector: WholeVector, key: HolderKey, *, sender: str) -> SealedVector:
    """Seals an encrypted vector to the key holder, for one attempt and one sender: nobody else can send it as its own.

    Args:
        vector: Encrypted to the same key.
        key: The holder's of the attempt.
        sender: Name of the client.

    Raises:
        RoundMismatchError: If the vector was encrypted to another key.
    """
    if vector.key_id != key.key_id:
        raise RoundMismatchError("the vector was encrypted to another key than it is to be sealed for; nothing was sealed")
    chunks = tuple(
        seal_to(chunk, key.encryption_key, info=sealed_info(key.binding, sender=sender, place=place))
        for place, chunk in enumerate(vector.chunks)
    )
    return SealedVector(layout=vector.layout, params=vector.params, key_id=vector.key_id, chunks=chunks)


def sealed_info(binding: bytes, *, sender: str, place: int) -> bytes:
    """What a sealed chunk is bound to."""
    name = sender.encode()
    return _SEALED + binding + len(name).to_bytes(2, "big") + name + place.to_bytes(4, "big")


class RunningSum:
    """The weighted sum of vectors that come one at a time.

    Args:
        layout: Of all of them.
        params: Of all of them.
        key_id: Of all of them.
    """

    def __init__(self, *, layout: Layout, params: CkksParams, key_id: bytes) -> None:
        self._layout = layout
        self._params = params
        self._key_id = key_id
        words = 2 * len(params.moduli) * params.poly_modulus_degree
        self._chunks = [np.zeros(words, np.uint64) for _ in range(params.chunks(layout))]
        self._coefficients = list[int]()

    @property
    def coefficients(self) -> Sequence[int]:
        """What each vector so far was multiplied by."""
        return tuple(self._coefficients)

    def add(self, coefficient: int, vector: WholeVector) -> None:
        """Adds coefficient times a vector.

        Raises:
            ValueError: If the coefficients are out of their range.
            LayoutMismatchError, ParametersMismatchError, RoundMismatchError: If layout, parameters or key differ.
            InvalidMessageError: If a chunk is not a ciphertext.
        """
        if vector.layout != self._layout:
            raise LayoutMismatchError("expected vectors of one layout, got two; nothing was added")
        if vector.params != self._params:
            raise ParametersMismatchError("expected vectors under the same parameters, got others; nothing was added")
        if vector.key_id != self._key_id:
            raise RoundMismatchError("expected vectors under the same key, got another key id; nothing was added")
        check_coefficients((*self._coefficients, coefficient), self._params)
        self._coefficients.append(coefficient)
        for index, chunk in enumerate(vector.chunks):
            words = unpack_words(chunk, self._params)
            self._chunks[index] = weighted_words(((1, self._chunks[index]), (coefficient, words)), self._params)

    def total(self) -> CkksVector:
        """The sum.

        Raises:
            ValueError: If nothing was added.
        """
        if not self._coefficients:
            raise ValueError("expected at least one vector in the sum, got none")
        chunks = tuple(pack_words(words, self._params) for words in self._chunks)
        return CkksVector(layout=self._layout, params=self._params, key_id=self._key_id, chunks=chunks, fresh=False)


def check_whole_chunk(chunk: bytes, params: CkksParams) -> None:
    """Checks that bytes are two polynomials, neither of them zero throughout: such a ciphertext would hide nothing.

    Raises:
        InvalidMessageError: If they are not.
    """
    if len(chunk) != params.sum_chunk_bytes:
        raise InvalidMessageError
    _check_not_transparent(unpack_words(chunk, params))


def _check_not_transparent(words: NDArray[np.uint64]) -> None:
    if not words[words.size // 2 :].any():
        raise InvalidMessageError


def check_escrow_params(params: CkksParams) -> None:
    """Refuses encryption parameters that do not hold the noise of encryption to a public key.

    Raises:
        UnsupportedInThisModeError: If they do not.
    """
    if not params.asymmetric:
        raise UnsupportedInThisModeError(
            "EscrowKey needs parameters with room for the noise of encryption to a public key; nothing was agreed; take CkksParams.escrow, "
            "or ProductParams.escrow for a rule that looks at inner products"
        )

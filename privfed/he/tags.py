"""Tags by which the clients see, before they decrypt, that a sum is the announced combination of the uploads.

All clients derive secret random numbers r for the round, of 32 bits, one for each word of a ciphertext: the key stream of AES-256 in
counter mode (NIST SP 800-38A, section 6.5), under a key of the round. The tag of an upload is the inner product <r, words> modulo the
prime; the tag of a sum is the same sum of the tags. Who does not know r, and changes even one word of a sum, meets the tag with a
probability of at most 2^-31. There are four tags with their own r, so 2^-124. Where a ciphertext has two primes, two tags are of the words
of each, so 2^-62. Uploads carry their tags sealed: the server sees neither
r nor a tag, and no verdict but "abort".

The words are those that travel: of a last ciphertext that is cut (`CkksParams.first_polynomial_sizes`), the coefficients of c0 in use.
Where sums travel as seeds, the tags cover c0, and the seeds, from which c1 follows, are sealed with them as a digest. Elsewhere the
tags cover c0 and the expanded c1.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from privfed.errors import TamperedAggregateError
from privfed.he._seal_secret import Secret, derive
from privfed.he.params import SEALED_TAGS_BYTES, CkksParams

TAGS = 4
TAG_SECRET_BYTES = 32
_TAG_BYTES, _DIGEST_BYTES, _NONCE_BYTES, _RANDOM_BYTES = 8, 32, 12, 4
# Random numbers and words are cut into limbs of 16 bits: sums of up to 2^21 products of two limbs, those of one chunk, are exact in double
# precision, and of up to 2^32, those of all chunks, in 64 bits. A model of so many parameters would not fit into one message.
_LIMB_BITS, _LIMBS = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tags:
    """Tags of one upload or of one sum. Secret from the server.

    Args:
        values: Four integers below the modulus.
        seeds: SHA-256 of the seeds of an upload, 32 bytes; none of a sum.
    """

    values: tuple[int, ...]
    seeds: bytes = b""


@final
class TagKey(Secret):
    """What tags of one round are made, sealed and opened with. It cannot be printed, copied or pickled.

    Args:
        secret: 32 bytes that the clients share, of this round and attempt alone.
        params: Parameters of the round.
    """

    __slots__ = ("_params", "_random", "_secret")

    def __init__(self, *, secret: bytes, params: CkksParams) -> None:
        if len(secret) != TAG_SECRET_BYTES:
            raise ValueError(f"expected a secret of {TAG_SECRET_BYTES} bytes, got {len(secret)}")
        self._params = params
        self._secret = secret
        self._random = derive(secret, TAG_SECRET_BYTES, b"privfed tag randomness v2")

    def tag(self, chunks: Iterable[NDArray[np.uint64]], *, seeds: bytes = b"") -> Tags:
        """Tags of words, read one chunk at a time.

        Args:
            chunks: Words below the modulus of each chunk in its order, of any number that is the same for uploads and sums.
            seeds: Digest of the seeds of an upload.
        """
        primes = len(self._params.moduli)
        rows, stream = 2 * TAGS // primes, _key_stream(self._random)
        sums = np.zeros((primes, rows, _LIMBS), np.uint64)
        for words in chunks:
            by_prime = [words] if primes == 1 else [*words.reshape(-1, primes, self._params.poly_modulus_degree).swapaxes(0, 1)]
            for index, part in enumerate(by_prime):
                halves = np.frombuffer(stream(rows * _RANDOM_BYTES // 2 * part.size), "<u2").reshape(rows, part.size).astype(np.float64)
                limbs = part.astype("<u8").reshape(-1).view("<u2").reshape(part.size, _LIMBS).astype(np.float64)
                sums[index] += (halves @ limbs).astype(np.uint64)
        total = [0] * TAGS
        for row, values in enumerate(sums.reshape(2 * TAGS, _LIMBS).tolist()):
            total[row // 2] += sum(value << _LIMB_BITS * (row % 2 + limb) for limb, value in enumerate(values))
        return Tags(values=self._reduced(total), seeds=seeds)

    def combine(self, tags: Sequence[Tags], coefficients: Sequence[int]) -> Tags:
        """Tags that a sum with these coefficients has."""
        columns = zip(*(upload.values for upload in tags), strict=True)
        sums = (sum(coefficient * value for coefficient, value in zip(coefficients, column, strict=True)) for column in columns)
        return Tags(values=self._reduced(sums))

    def _reduced(self, values: Iterable[int]) -> tuple[int, ...]:
        """Each tag modulo the prime of the words that it covers."""
        moduli = self._params.moduli
        return tuple(value % moduli[index * len(moduli) // TAGS] for index, value in enumerate(values))

    def seal(self, tags: Tags, *, sender: str) -> bytes:
        """Encrypts and authenticates the tags of an upload, 92 bytes, under a key of the sender's own for this round."""
        nonce = os.urandom(_NONCE_BYTES)
        body = b"".join(value.to_bytes(_TAG_BYTES, "big") for value in tags.values) + tags.seeds.ljust(_DIGEST_BYTES, b"\0")
        return nonce + AESGCM(self._sealing_key(sender)).encrypt(nonce, body, None)

    def unseal(self, sealed: bytes, *, sender: str) -> Tags:
        """Opens the sealed tags of a sender's upload.

        Raises:
            TamperedAggregateError: If the sender did not seal them in this round and attempt.
        """
        if len(sealed) != SEALED_TAGS_BYTES:
            raise TamperedAggregateError
        try:
            body = AESGCM(self._sealing_key(sender)).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except InvalidTag:
            raise TamperedAggregateError from None
        values = tuple(int.from_bytes(body[start : start + _TAG_BYTES], "big") for start in range(0, TAGS * _TAG_BYTES, _TAG_BYTES))
        return Tags(values=values, seeds=body[TAGS * _TAG_BYTES :])

    def _sealing_key(self, sender: str) -> bytes:
        return derive(self._secret, 32, b"privfed tag sealing v1", sender.encode())


def _key_stream(key: bytes) -> Callable[[int], bytes]:
    """So many bytes at a time of the key stream of AES in counter mode, from counter 0."""
    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    return lambda size: encryptor.update(bytes(size))

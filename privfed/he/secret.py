"""The secret half of encrypted updates: the group's key, the keys of the rounds, encryption, and opening a sum.

What leaves `open_sum` are grid points, never a decryption with its noise: the result is a function of the plaintexts alone,
so publishing it says nothing about the key.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray

from privfed.errors import (
    DecryptionError,
    ParametersMismatchError,
    RoundKeyUsedError,
    RoundMismatchError,
    TamperedAggregateError,
)
from privfed.files import create, read_private
from privfed.he import _seal_public
from privfed.he._seal_secret import KEY_SEED_BYTES, RingKey, Secret, derive
from privfed.he.additive import CkksVector, SeededSum, check_coefficients
from privfed.he.codec import check_grid, gather, pack_polynomials, pack_words, spread, unpack_words
from privfed.he.params import KEY_ID_BYTES, SEED_BYTES, CkksParams, ring_of, transform_roundoff
from privfed.he.product_params import ProductParams
from privfed.he.sketch import arranged, restored
from privfed.he.tags import TAG_SECRET_BYTES, TagKey, Tags
from privfed.update import Layout

SECRET_BYTES = 32
# The mean square of 4096 noise terms stays within this share of its expectation, but for a probability of 2^-60 per chunk; what fewer of
# them stay within, but for the same one, follows from its logarithm. See `_is_residual_of`.
_MEAN_SQUARE_TOLERANCE, _MEAN_SQUARE_TOLERANCE_OF_PRODUCTS = 0.25, 0.5
_UNLIKELY = 60 * math.log(2)
_CHUNKS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBinding:
    """What a round key belongs to. Public. Change one field and the key is another one.

    Args:
        session: 16 bytes that name the session.
        attempt: Number of the attempt at this round, from 0.
        round: Number of the round, from 0.
        roster_digest: 32 bytes, `Roster.digest`.
        params: Encryption parameters.

    Raises:
        ValueError: If a length or a number is out of its range.
    """

    session: bytes
    attempt: int
    round: int
    roster_digest: bytes
    params: CkksParams

    def __post_init__(self) -> None:
        if len(self.session) != 16 or len(self.roster_digest) != 32:
            raise ValueError(
                f"expected a session of 16 bytes and a roster digest of 32, got {len(self.session)} and {len(self.roster_digest)}"
            )
        if not (0 <= self.attempt < 2**32 and 0 <= self.round < 2**32):
            raise ValueError(f"expected attempt and round from 0 to 2^32 - 1, got {self.attempt} and {self.round}")


@final
class RoundKey(Secret):
    """The key of one round: it encrypts one vector, checks sums and opens them. Made by `SharedKey.round_key`.

    It cannot be printed, copied or pickled.
    """

    __slots__ = ("_key_id", "_params", "_public_seed", "_ring_key", "_tag_key", "_used")

    def __init__(self, *, params: CkksParams, seed: bytes, tag_secret: bytes) -> None:
        self._params = params
        self._ring_key = RingKey(ring_of(params), seed)
        self._public_seed = derive(seed, KEY_SEED_BYTES, b"privfed round public key v1")
        self._tag_key = TagKey(secret=tag_secret, params=params)
        self._key_id = self._ring_key.digest(b"privfed key id v1")[:KEY_ID_BYTES]
        self._used = False

    def _take(self) -> RingKey:
        if self._used:
            raise RoundKeyUsedError("this round key has encrypted before; resend the stored bytes, or start a new attempt")
        self._used = True
        return self._ring_key

    @property
    def key_id(self) -> bytes:
        """16 bytes that name the key. Public; parties compare them to see that they derived the same key."""
        return self._key_id

    @property
    def params(self) -> CkksParams:
        """Parameters that the key is for. Public."""
        return self._params

    def public_key(self) -> bytes:
        """The round's public key, with which a server rerandomises products: the same bytes from all who derived this key. Public.

        Raises:
            ParametersMismatchError: If ciphertexts cannot be multiplied under the parameters.
        """
        params = self._params
        if not isinstance(params, ProductParams):
            raise ParametersMismatchError("a round has a public key only where ciphertexts are multiplied; nothing was made")
        return pack_polynomials(self._ring_key.public_key_of(self._public_seed), params.key_moduli, params.poly_modulus_degree)


class StoredSecret(Secret):
    """32 secret bytes that a person keeps in a file and compares by fingerprint. It cannot be printed, copied or pickled.

    Args:
        secret: 32 bytes from the operating system's generator.
    """

    __slots__ = ("_secret",)
    _named: ClassVar[str]

    def __init__(self, *, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"expected a secret of {SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's generator."""
        return cls(secret=os.urandom(SECRET_BYTES))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            PermissionError: If others than the owner may read the file.
            ValueError: If the file holds something else.
        """
        header = cls._header()
        data = read_private(path, most=len(header) + SECRET_BYTES + 1)
        if not data.startswith(header) or len(data) != len(header) + SECRET_BYTES:
            raise ValueError(f"expected {'an' if cls._named[0] in 'aeiou' else 'a'} {cls._named} in {path.name}, got something else")
        return cls(secret=data[len(header) :])

    def save(self, path: Path) -> None:
        """Writes the key, mode 0600, never over an existing file.

        Raises:
            FileExistsError: If there is one.
        """
        create(path, self._header() + self._secret)

    @property
    def fingerprint(self) -> str:
        """What people compare to see that it is the same key: 8 groups of 8 hexadecimal digits. Public.

        Derived from the key by HKDF under a label of its own, so it says nothing about the key or about a round key.
        """
        digits = derive(self._secret, 32, f"privfed {self._named} fingerprint v1".encode()).hex()
        return " ".join(digits[i : i + 8] for i in range(0, 64, 8))

    @classmethod
    def _header(cls) -> bytes:
        return f"privfed {cls._named} v1\n".encode()


@final
class SharedKey(StoredSecret):
    """The secret that the clients share and the server never sees. It cannot be printed, copied or pickled.

    Python cannot promise to erase it from memory: copies may stay there until the process ends.

    Args:
        secret: 32 bytes from the operating system's generator.

    Example:
        >>> key = SharedKey.generate()
        >>> key
        SharedKey(<secret>)
        >>> SharedKey.from_bytes(bytes(32)).fingerprint == key.fingerprint
        False
    """

    __slots__ = ()
    _named = "shared key"

    @classmethod
    def from_bytes(cls, secret: bytes) -> Self:
        """The key of these 32 bytes, which came over a confidential channel between clients.

        Raises:
            ValueError: If they are not 32.
        """
        return cls(secret=secret)

    def round_key(self, binding: RoundBinding) -> RoundKey:
        """The key of one attempt at one round: HKDF-Expand-SHA512 (RFC 5869) over the length-prefixed fields of the binding.

        The same binding gives the same key to everyone who shares this secret; another field gives an unrelated key.
        """
        fields = (
            binding.session,
            binding.attempt.to_bytes(4, "big"),
            binding.round.to_bytes(4, "big"),
            binding.roster_digest,
            binding.params.digest,
        )
        return RoundKey(
            params=binding.params,
            seed=derive(self._secret, KEY_SEED_BYTES, b"privfed round key v1", *fields),
            tag_secret=derive(self._secret, TAG_SECRET_BYTES, b"privfed tag key v1", *fields),
        )


def encrypt(grid: NDArray[np.int64], layout: Layout, params: CkksParams, round_key: RoundKey, *, sender: str) -> CkksVector:
    """Encrypts the grid points of one vector and seals its tags. A round key does this once: a retry resends the stored bytes.

    Args:
        grid: Grid points from `quantise`, of shape (layout.size,), at most `params.largest_point` in absolute value. Private.
        layout: Layout of the vector.
        params: Parameters of the round.
        round_key: Key of the round, made for the same parameters.
        sender: Name of the client, whose sealed tags these are.

    Raises:
        ValueError: If the grid has another shape or type, or a point is too large. The key stays unused.
        ParametersMismatchError: If the key was made for other parameters.
        RoundKeyUsedError: If the key has encrypted before.
    """
    if params != round_key.params:
        raise ParametersMismatchError("the round key was made for other parameters; nothing was encrypted")
    check_grid(grid, layout, params)
    ring = ring_of(params)
    ring_key = round_key._take()  # pyright: ignore[reportPrivateUsage]
    tag_key = round_key._tag_key  # pyright: ignore[reportPrivateUsage]
    chunks, size = list[bytes](), params.chunk_coordinates * _CHUNKS_AT_ONCE
    if isinstance(params, ProductParams) and params.sketch:
        grid = arranged(grid, seed=round_key.key_id)

    def encrypted() -> Iterator[NDArray[np.uint64]]:
        """Encrypts a few chunks at a time, and hands on the words that the tags cover: those that travel, c1 expanded."""
        batches = (spread(grid[start : start + size], params) for start in range(0, layout.size, size))
        pairs = ring_key.encrypt(batches, slots=params.slots)
        for (words, seed), sent in zip(pairs, params.first_polynomial_sizes(layout), strict=True):
            first = words if sent == params.polynomial_bytes else ring.coefficients(words)[: sent // params.word_bytes]
            chunks.append(pack_words(first, params, behind=seed))
            yield first if params.seeded_sums else np.concatenate((first, _seal_public.expand(ring, seed)))

    values = tag_key.tag(encrypted()).values
    seeds = hashlib.sha256(b"".join(chunk[-SEED_BYTES:] for chunk in chunks)).digest()
    return CkksVector(
        layout=layout,
        params=params,
        key_id=round_key.key_id,
        chunks=tuple(chunks),
        fresh=True,
        sealed_tags=tag_key.seal(Tags(values=values, seeds=seeds), sender=sender),
    )


def check_sum(
    total: CkksVector | SeededSum, round_key: RoundKey, *, sealed_tags: Mapping[str, bytes], coefficients: Sequence[int]
) -> CkksVector:
    """The whole sum, if it is the sum of coefficient times upload, word for word. Nothing is decrypted here.

    Args:
        total: What the server says is the sum: seeds where `params.seeded_sums`, else whole.
        round_key: Key of the round.
        sealed_tags: Sealed tags of each upload in the sum, by the name of its sender, in the order of the coefficients. They must
            be those of the signed uploads.
        coefficients: What the server had to multiply each upload by.

    Raises:
        ValueError: If there is not one coefficient for each upload, or one is out of its range.
        TamperedAggregateError: If it is not that sum.
    """
    params, tag_key = total.params, round_key._tag_key  # pyright: ignore[reportPrivateUsage]
    check_coefficients(coefficients, params)
    if len(coefficients) != len(sealed_tags):
        raise ValueError(f"expected one coefficient for each of {len(sealed_tags)} uploads, got {len(coefficients)}")
    if isinstance(total, SeededSum) is not params.seeded_sums or params != round_key.params:
        raise TamperedAggregateError
    tags = [tag_key.unseal(sealed, sender=sender) for sender, sealed in sealed_tags.items()]
    if isinstance(total, SeededSum) and [hashlib.sha256(seeds).digest() for seeds in total.seeds] != [upload.seeds for upload in tags]:
        raise TamperedAggregateError
    measured = tag_key.tag(unpack_words(chunk, params) for chunk in total.chunks)
    if measured.values != tag_key.combine(tags, coefficients).values:
        raise TamperedAggregateError
    return total.regenerate(coefficients) if isinstance(total, SeededSum) else total


def open_sum(vector: CkksVector, round_key: RoundKey, *, coefficients: Sequence[int]) -> NDArray[np.int64]:
    """Opens a weighted sum to the weighted sum of the grid points, bit for bit, or refuses.

    Whoever calls this decides that the sum may be opened; here only is checked that it is one. Every chunk must decrypt to
    grid points whose distance to the grid is the encryption noise that these coefficients leave, within what the
    coefficients can reach, and a whole one to zero beyond the end of the layout. A wrong key or a damaged chunk fails; but the
    fewer coefficients a cut chunk has, the less there is to see, and damage to single ones of them may pass. A malicious server
    can compose ciphertexts that pass, and that open to the key: who opens has checked the sum (`check_sum`), or computed it.

    Args:
        vector: A sum.
        round_key: Key of the round.
        coefficients: What each upload in it was multiplied by.

    Returns:
        Weighted sums of grid points, of shape (layout.size,).

    Raises:
        ValueError: If the vector is not a sum, or the coefficients are out of their range.
        ParametersMismatchError: If the key was made for other parameters.
        RoundMismatchError: If the vector names another key.
        InvalidMessageError: If a chunk is not a valid ciphertext.
        DecryptionError: If a chunk does not hold what it should.
    """
    params = vector.params
    if vector.fresh:
        raise ValueError("expected a sum, got the vector of a single client; nothing was decrypted")
    check_coefficients(coefficients, params)
    if params != round_key.params:
        raise ParametersMismatchError("the round key was made for other parameters; nothing was decrypted")
    if vector.key_id != round_key.key_id:
        raise RoundMismatchError("the vector names another round key; nothing was decrypted")
    ring_key = round_key._ring_key  # pyright: ignore[reportPrivateUsage]
    degree = params.poly_modulus_degree

    def decrypted() -> Iterator[NDArray[np.float64]]:
        for chunk in vector.chunks:
            words = unpack_words(chunk, params)
            if len(chunk) < params.sum_chunk_bytes:
                yield ring_key.decrypt_cut(words[:-degree], words[-degree:])
            else:
                yield gather(ring_key.decrypt_unrounded(words), params)

    grid_sum = grid_points(decrypted(), vector.layout, params, coefficients=coefficients)
    return restored(grid_sum, seed=vector.key_id) if isinstance(params, ProductParams) and params.sketch else grid_sum


def grid_points(
    decrypted: Iterable[NDArray[np.float64]], layout: Layout, params: CkksParams, *, coefficients: Sequence[int]
) -> NDArray[np.int64]:
    """Rounds a decrypted sum to the grid, if every chunk is what a sum with these coefficients is; else refuses.

    Args:
        decrypted: Of each chunk its numbers, noise included, of shape (params.chunk_coordinates,) or, of a last one that is cut, of as
            many as it has.
        layout: Layout of the vector.
        params: Parameters of the round.
        coefficients: What each upload in the sum was multiplied by.

    Returns:
        Weighted sums of grid points, of shape (layout.size,).

    Raises:
        DecryptionError: If a chunk does not hold what it should.
    """
    largest = params.amplitude + len(coefficients) // 2 if params.prescaled else params.amplitude * sum(coefficients)
    size = params.chunk_coordinates
    opened = np.zeros(params.chunks(layout) * size, np.int64)
    for index, raw in enumerate(decrypted):
        points = np.rint(raw / 2**params.guard_bits)
        in_range = np.abs(points).max() <= largest
        if not in_range or not _is_residual_of(raw - points * 2**params.guard_bits, coefficients, params):
            raise DecryptionError(f"chunk {index} does not hold the sum: wrong key, other coefficients, or corrupted; nothing was opened")
        opened[index * size : index * size + points.size] = points.astype(np.int64)
    if opened[layout.size :].any():
        raise DecryptionError("the last chunk does not end where the layout does: corrupted, or another layout; nothing was opened")
    return opened[: layout.size]


def _is_residual_of(residual: NDArray[np.float64], coefficients: Sequence[int], params: CkksParams) -> bool:
    """Whether the distances to the grid, of shape (n,), are the noise that a sum with these coefficients has.

    One fresh ciphertext has noise of variance 21 / 2 per coefficient, so the sum has v = 21 / 2 * sum(c^2). The noise is a
    sum of independent centred bits, hence strictly sub-Gaussian: for t = 1/4 and n = 4096, P(mean square > (1 + t) v)
    <= exp(-n (t - log(1 + t)) / 2) < 2^-79, and by Bernstein's inequality for non-negative variables with E x^4 <= 3 v^2,
    P(mean square < (1 - t) v) <= exp(-n t^2 / 6) < 2^-61. A last chunk that is cut has fewer of them. At x = log(2^60) / n, the second
    bound is 2^-60 for t = sqrt(6 x), beyond 1 no bound at all; the first is, for t = 2 sqrt(x) + 2 x, at most as much: Laurent and
    Massart, 2000, lemma 1, whose proof takes nothing of normal variables but E exp(u y^2) <= (1 - 2 u v)^(-1/2).

    The real parts of the N / 2 = 4096 slots are N / 2 orthogonal combinations, each of the squared length N / 2, of the independent e_0 and
    (e_j - e_(N - j)) / 2: the same with v N / 2. Encoding and decoding add at most three times their relative error times the largest sum.
    Under a wrong key the residual is uniform and its mean square beyond all of that, unless there are only a few.

    The slots of what was encrypted to a public key have normal noise of different variances v |s(z)|^2 / E|s(z)|^2, which are about
    exponentially distributed and at most 8 v or so: with t = 1/2, by Chernoff at 0.055 / v, the probability is below exp(-70).
    """
    variance = params.fresh_noise_variance * (params.poly_modulus_degree / 2 if params.slots else 1)
    expected = math.sqrt(variance * sum(coefficient**2 for coefficient in coefficients))
    largest = params.largest_sum if params.prescaled else params.amplitude * sum(coefficients)
    slack = 3 * transform_roundoff(params.poly_modulus_degree) * 2**params.guard_bits * largest
    measured = math.sqrt(float(np.mean(residual**2)))
    tolerance = _MEAN_SQUARE_TOLERANCE_OF_PRODUCTS if params.asymmetric and params.slots else _MEAN_SQUARE_TOLERANCE
    few = _UNLIKELY / residual.size
    low = math.sqrt(1 - min(max(tolerance, math.sqrt(6 * few)), 1))
    high = math.sqrt(1 + max(tolerance, 2 * math.sqrt(few) + 2 * few))
    return expected * low - slack <= measured <= expected * high + slack

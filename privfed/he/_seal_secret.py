"""SEAL with secrets: key generation, encryption, and the one unrounded decryption, which stays inside this package."""

import hashlib
import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import NoReturn, final

import numpy as np
import tenseal.sealapi as seal
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from privfed.he import _seal_public
from privfed.he._seal_bytes import coefficients_header, members_of_each, read_ciphertext, write_ciphertext, write_plaintext

KEY_SEED_BYTES = 64

Transform = Callable[[NDArray[np.int64]], list[seal.Plaintext]]
"""Makes plaintexts, at scale 1, of the polynomials with these coefficients, of shape (k, N), each below half of the modulus."""


def derive(secret: bytes, length: int, *fields: bytes) -> bytes:
    """HKDF-Expand-SHA512 (RFC 5869) of a uniform secret over length-prefixed fields: no two lists of fields are the same bytes."""
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return HKDFExpand(algorithm=hashes.SHA512(), length=length, info=info).derive(secret)


class Secret:
    """Base of everything that holds key material: it cannot be printed, copied or pickled.

    Python cannot promise to erase memory: copies of a key may stay in freed memory until the process ends. Keep processes
    that hold keys short-lived, and their memory out of swap and core dumps.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds key material and cannot be copied or pickled")

    def __getstate__(self) -> NoReturn:
        self.__reduce__()


@contextmanager
def transform(ring: _seal_public.Ring) -> Generator[Transform]:
    """Gives what makes plaintexts of integer coefficients: exactly, and in a third of the time that SEAL's encoder takes.

    The encoder takes values at slots. A number-theoretic transform of coefficients SEAL has for ciphertexts alone, whose polynomials a
    decryptor turns into plaintexts: it returns c0 + s c1. So with c0 = a, c1 = b - a, the constants s = 0 and s = 1, which are no
    secrets, give a and b.

    Args:
        ring: A ring of one prime.
    """
    at_zero, at_one = _decryptors_at_constants(ring)
    modulus, header, shape = np.uint64(ring.modulus), coefficients_header(ring.form(1.0)), (2, ring.poly_modulus_degree)

    with _seal_public.memory_path() as path, Path(path).open("r+b", buffering=0) as file:
        file.truncate(len(header) + 8 * math.prod(shape))
        file.write(header)
        # What is written to these words SEAL loads from the path. The mapping goes with them.
        pair = np.ndarray(shape, "<u8", mmap(file.fileno(), 0), len(header))

        def plaintexts(coefficients: NDArray[np.int64]) -> list[seal.Plaintext]:
            found: list[seal.Plaintext] = []
            for index in range(0, len(coefficients), 2):
                first, second = coefficients[index], coefficients[min(index + 1, len(coefficients) - 1)]
                difference = second - first
                alike = not difference.any()
                if alike:
                    difference[0] = 1  # SEAL refuses to transform a ciphertext whose c1 is zero
                for words, numbers in zip(pair, (first.view(np.uint64), difference.view(np.uint64)), strict=True):
                    # A negative number is a huge word, and one modulus more a small one.
                    np.minimum(numbers, np.add(numbers, modulus, out=words), out=words)
                ciphertext = seal.Ciphertext()
                ciphertext.load(ring.context, path)
                ring.evaluator.transform_to_ntt_inplace(ciphertext)
                for decryptor in (at_zero, at_zero if alike else at_one):
                    found.append(seal.Plaintext())
                    decryptor.decrypt(ciphertext, found[-1])
            return found[: len(coefficients)]

        yield plaintexts


@cache
def _decryptors_at_constants(ring: _seal_public.Ring) -> tuple[seal.Decryptor, seal.Decryptor]:
    """What decrypts under the polynomials 0 and 1."""
    size = ring.poly_modulus_degree
    return _decryptor(ring, np.zeros(size, np.uint64)), _decryptor(ring, np.ones(size, np.uint64))


def _seeded_context(ring: _seal_public.Ring, seed: bytes) -> seal.SEALContext:
    """A context whose every draw begins anew at the seed: for one draw, and never for encryption."""
    parameters = _seal_public.encryption_parameters(ring.poly_modulus_degree, ring.chain_bits)
    parameters.set_random_generator(seal.Blake2xbPRNGFactory(list(struct.unpack("<8Q", seed))))
    return _seal_public.checked_context(parameters, ring.security_bits)


def _decryptor(ring: _seal_public.Ring, words: NDArray[np.uint64]) -> seal.Decryptor:
    """What decrypts under the polynomial with these words, of shape (N,) in NTT form."""
    key = seal.SecretKey()
    with _seal_public.memory_path() as path:
        Path(path).write_bytes(write_plaintext(ring.form(1.0), words))
        key.load(ring.context, path)
    return seal.Decryptor(ring.context, key)


def _decrypted(ring: _seal_public.Ring, decryptor: seal.Decryptor, words: NDArray[np.uint64]) -> NDArray[np.complex128]:
    plain = seal.Plaintext()
    decryptor.decrypt(_seal_public.load_sum(ring, words), plain)
    return np.array(ring.encoder.decode_complex(plain), np.complex128)


@final
class RingKey(Secret):
    """A ternary secret key of a ring.

    Args:
        ring: The ring.
        seed: 64 bytes, uniform and secret. The same seed gives the same key on machines whose SEAL was built alike.
    """

    __slots__ = ("_decryptor", "_encryptor", "_key", "_ring")

    def __init__(self, ring: _seal_public.Ring, seed: bytes) -> None:
        if len(seed) != KEY_SEED_BYTES:
            raise ValueError(f"expected a seed of {KEY_SEED_BYTES} bytes, got {len(seed)}")
        generator = seal.KeyGenerator(_seeded_context(ring, seed))
        self._ring = ring
        self._key = seal.SecretKey()
        # The key moves into the ring's own context and the seeded one is dropped: encryption under the seeded context would
        # draw the same polynomials and the same noise each time.
        with _seal_public.memory_path() as path:
            generator.secret_key().save(path)
            self._key.load(ring.context, path)
        self._encryptor = seal.Encryptor(ring.context, self._key)
        self._decryptor = seal.Decryptor(ring.context, self._key)

    def digest(self, label: bytes) -> bytes:
        """SHA-256 over a label and the key, 32 bytes. Public: the key has more entropy than anyone can search."""
        return hashlib.sha256(len(label).to_bytes(4, "big") + label + _seal_public.members(_seal_public.saved(self._key))).digest()

    def public_key_of(self, seed: bytes) -> NDArray[np.uint64]:
        """Words of a public key: both polynomials, each with a word for every prime of the chain. The same one for the same seed. Public.

        Args:
            seed: 64 bytes, uniform, secret, and unlike that of the key: SEAL draws the noise from it, and who knows that has the key.
        """
        key, ring = seal.PublicKey(), self._ring
        seal.KeyGenerator(_seeded_context(ring, seed), self._key).create_public_key(key)
        body = _seal_public.members(_seal_public.saved(key))
        return read_ciphertext(body, ring.chain_form(), 2 * ring.poly_modulus_degree * len(ring.chain_moduli), seeded=False)[0]

    def words(self) -> NDArray[np.uint64]:
        """The key modulo the last prime of the chain, as SEAL keeps it in memory, of shape (N,). Secret: for the memory scan alone."""
        body = _seal_public.members(_seal_public.saved(self._key))
        return np.frombuffer(body[-8 * self._ring.poly_modulus_degree :], "<u8")

    def public_key(self) -> NDArray[np.uint64]:
        """Words of a public key: both polynomials, each with a word for every prime of the chain. Another one each time. Public."""
        key = seal.PublicKey()
        seal.KeyGenerator(self._ring.context, self._key).create_public_key(key)
        ring, body = self._ring, _seal_public.members(_seal_public.saved(key))
        return read_ciphertext(body, ring.chain_form(), 2 * ring.poly_modulus_degree * len(ring.chain_moduli), seeded=False)[0]

    def encrypt(self, batches: Iterable[NDArray[np.int64]], *, slots: bool) -> Iterator[tuple[NDArray[np.uint64], bytes]]:
        """Encrypts polynomials, with fresh randomness from the operating system.

        Args:
            batches: Coefficients of a few polynomials at a time, of shape (k, N), below half of the modulus in absolute value; or, with
                slots, their values at SEAL's slots, of shape (k, N / 2), which SEAL's encoder rounds. Private.
            slots: Which.

        Yields:
            Of each the words of c0 and the seed of c1.
        """
        for body in members_of_each(_seal_public.saved_each(self._encrypted(batches, slots=slots), most=16 * self._ring.polynomial_words)):
            yield _seal_public.ciphertext_members(body, self._ring, seeded=True)

    def _encrypted(self, batches: Iterable[NDArray[np.int64]], *, slots: bool) -> Iterator[_seal_public.Savable]:
        if slots:
            for numbers in batches:
                yield from [self._encryptor.encrypt_symmetric(self._ring.plaintext(row.astype(np.complex128))) for row in numbers]
            return
        with transform(self._ring) as plaintexts:
            for numbers in batches:
                # Step by step for all, and not all steps for each: code and tables stay in the processor's caches.
                yield from [self._encryptor.encrypt_symmetric(plaintext) for plaintext in plaintexts(numbers)]

    def decrypt_unrounded(self, words: NDArray[np.uint64]) -> NDArray[np.complex128]:
        """Values, at SEAL's slots, of the polynomial inside a ciphertext, noise included.

        Never hand these, nor anything computed from them but grid points, to anyone: they give the key away (Li and
        Micciancio, 2021, "On the security of homomorphic encryption on approximate numbers", section 3).

        Raises:
            InvalidMessageError: If it is not a valid ciphertext.
        """
        return _decrypted(self._ring, self._decryptor, words)

    def decrypt_cut(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """The first coefficients of the polynomial inside a ciphertext of which c0 is cut to them, noise included.

        They are c0 + c1 s modulo the prime, without an error: floating point has no part in it, and what is not in c0 none either. Only
        a coefficient beyond 2^53, under a larger prime, is rounded once, to double precision, of which `params.sum_roundoff` has more
        than enough. As dangerous as what `decrypt_unrounded` gives.

        Args:
            first: Coefficients of c0, of shape (k,), below the modulus.
            second: c1 in NTT form, of shape (N,).

        Returns:
            Of shape (k,), each at most half of the modulus in absolute value.

        Raises:
            InvalidMessageError: If it is not a valid ciphertext.
        """
        ring, plain = self._ring, seal.Plaintext()
        self._decryptor.decrypt(_seal_public.load_sum(ring, np.concatenate((np.zeros_like(second), second))), plain)
        modulus = np.uint64(ring.modulus)
        total = (first + ring.plaintext_coefficients(plain)[: first.size]) % modulus
        return np.where(total > modulus // np.uint64(2), total - modulus, total).view(np.int64).astype(np.float64)

    def decrypt_product(self, words: NDArray[np.uint64]) -> tuple[int, NDArray[np.complex128]]:
        """The constant coefficient of the polynomial inside a sum of products, exactly, and its values at SEAL's slots, roughly.

        Both are as dangerous as what `decrypt_unrounded` gives.

        Args:
            words: Three polynomials in NTT form.

        Returns:
            The coefficient, in absolute value at most half of the modulus, noise included; and the values, of shape (N / 2,).

        Raises:
            InvalidMessageError: If it is not a valid ciphertext.
        """
        ring, plain = self._ring, seal.Plaintext()
        self._decryptor.decrypt(_seal_public.load_whole(ring, words, polynomials=3), plain)
        body = _seal_public.members(_seal_public.saved(plain))
        residues = np.frombuffer(body[len(body) - 8 * ring.polynomial_words :], "<u8").reshape(len(ring.moduli), -1)
        constant = 0
        for modulus, values in zip(ring.moduli, residues, strict=True):
            others = ring.modulus // modulus
            share = _seal_public.word_sum(values, modulus) * pow(ring.poly_modulus_degree * others, -1, modulus)
            constant += share % modulus * others
        constant %= ring.modulus
        if 2 * constant > ring.modulus:
            constant -= ring.modulus
        return constant, np.array(ring.encoder.decode_complex(plain), np.complex128)


@final
class SumKey(Secret):
    """A sum of ternary secret keys of a ring: it decrypts sums of ciphertexts, and nothing else.

    Args:
        ring: A ring of one prime.
        words: The sum in NTT form, of shape (N,), every word below the modulus.
    """

    __slots__ = ("_decryptor", "_ring")

    def __init__(self, ring: _seal_public.Ring, words: NDArray[np.uint64]) -> None:
        self._ring = ring
        self._decryptor = _decryptor(ring, words)

    def decrypt_unrounded(self, words: NDArray[np.uint64]) -> NDArray[np.complex128]:
        """See `RingKey.decrypt_unrounded`."""
        return _decrypted(self._ring, self._decryptor, words)


def encrypt_to(
    ring: _seal_public.Ring, public_key: NDArray[np.uint64], batches: Iterable[NDArray[np.int64]], *, slots: bool
) -> Iterator[NDArray[np.uint64]]:
    """Encrypts polynomials to a public key, with fresh randomness from the operating system.

    Args:
        ring: The ring; of one prime, unless there are slots.
        public_key: An encryption of zero under the secret key: words of both polynomials, for every prime of the chain.
        batches: As `RingKey.encrypt` takes them. Private.
        slots: As `RingKey.encrypt` takes it.

    Yields:
        Of each the words of both polynomials.
    """
    key = seal.PublicKey()
    with _seal_public.memory_path() as path:
        Path(path).write_bytes(write_ciphertext(ring.chain_form(), public_key))
        key.load(ring.context, path)
    encryptor = seal.Encryptor(ring.context, key)
    with ExitStack() as stack:
        plaintexts = None if slots else stack.enter_context(transform(ring))
        for numbers in batches:
            encoded = [ring.plaintext(row.astype(np.complex128)) for row in numbers] if plaintexts is None else plaintexts(numbers)
            for plaintext in encoded:
                ciphertext = seal.Ciphertext()
                encryptor.encrypt(plaintext, ciphertext)
                words, _ = _seal_public.ciphertext_members(_seal_public.members(_seal_public.saved(ciphertext)), ring, seeded=False)
                yield words

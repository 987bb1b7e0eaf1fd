"""SEAL without secrets: rings, weighted sums of ciphertexts, and encryptions of zero under a public key.

No secret key can be reached from here: the contexts are made from public numbers, and nothing takes or holds a key but a public one,
under which nothing but zero is encrypted. SEAL objects do not leave this module, except to `_seal_secret`.

`tenseal.sealapi` saves and loads by path, compressed with zstd. Ciphertexts come from outside as bare words below the
modulus; the container around them is written here, so no length, type or version that a sender chose reaches SEAL.
"""

import fcntl
import math
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import tenseal
import tenseal.sealapi as seal
from numpy.typing import NDArray
from tenseal.sealapi import Ciphertext

from privfed.errors import InvalidMessageError
from privfed.he._seal_bytes import SEED_BYTES, Form, members, read_ciphertext, version_of, write_ciphertext, write_plaintext

_SCALE = 1.0
# What follows the prime in the chain of a TenSEAL context of 60, 40 and 40 bits, and the security level at which SEAL accepts it.
_TENSEAL_CHAIN_BITS = (40, 40)
# SEAL keeps the last prime of a chain for switching keys, which nothing here does: it is as small as SEAL has one.
_PRODUCT_CHAIN_BITS = (60, 40, 17)
_LARGEST_PRIME_BITS = 60
_LIMB_BITS = 30


def tenseal_version() -> str:
    """Version of TenSEAL."""
    return tenseal.__version__


@cache
def seal_version() -> str:
    """Major and minor version of the SEAL inside TenSEAL, as it writes them into its files."""
    return version_of(saved(seal.Plaintext()))


@cache
def prime(poly_modulus_degree: int, bits: int) -> int:
    """The prime of so many bits that SEAL creates for the ring.

    Raises:
        ValueError: If SEAL has no such prime.
    """
    try:
        (modulus,) = seal.CoeffModulus.Create(poly_modulus_degree, [bits])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"expected a ring that SEAL knows, got degree {poly_modulus_degree} with {bits} bits: {error}") from None
    return modulus.value()


def encryption_parameters(poly_modulus_degree: int, chain_bits: Sequence[int]) -> seal.EncryptionParameters:
    """SEAL's CKKS parameters of a degree and a chain of primes of so many bits."""
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
    parameters.set_poly_modulus_degree(poly_modulus_degree)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(poly_modulus_degree, list(chain_bits)))
    return parameters


def checked_context(parameters: seal.EncryptionParameters, security_bits: int) -> seal.SEALContext:
    """SEAL's context of the parameters, at a security level of 128, 192 or 256 bits.

    Raises:
        ValueError: If SEAL refuses the parameters, among other reasons because the security level is not reached.
    """
    level = {128: seal.SEC_LEVEL_TYPE.TC128, 192: seal.SEC_LEVEL_TYPE.TC192, 256: seal.SEC_LEVEL_TYPE.TC256}[security_bits]
    context = seal.SEALContext(parameters, True, level)  # noqa: FBT003
    if not context.parameters_set():
        raise ValueError(f"expected parameters that SEAL accepts at {security_bits} bits of security: {context.parameters_error_message()}")
    return context


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ring:
    """SEAL's public objects for one degree and modulus; nothing in it is random or secret.

    Ciphertexts and plaintexts have one word per coefficient and prime: a polynomial is all words of the first prime, then all of the
    second.
    """

    poly_modulus_degree: int
    moduli: tuple[int, ...]
    chain_moduli: tuple[int, ...]
    chain_bits: tuple[int, ...]
    security_bits: int
    parms_id: tuple[int, ...]
    context: seal.SEALContext
    encoder: seal.CKKSEncoder
    evaluator: seal.Evaluator

    @property
    def modulus(self) -> int:
        """Product of the primes."""
        return math.prod(self.moduli)

    @property
    def polynomial_words(self) -> int:
        """Words of one polynomial."""
        return self.poly_modulus_degree * len(self.moduli)

    def plaintext(self, values: NDArray[np.complex128], scale: float = _SCALE) -> seal.Plaintext:
        """The polynomial with these values at SEAL's slots, times the scale, rounded to integers. For `_seal_secret`."""
        plain = seal.Plaintext()
        self.encoder.encode(values.tolist(), list(self.parms_id), scale, plain)
        return plain

    def encode(self, values: NDArray[np.complex128], scale: float = _SCALE) -> NDArray[np.uint64]:
        """Words, in NTT form, of the polynomial with these values at SEAL's slots, times the scale."""
        body = members(saved(self.plaintext(values, scale)))
        return np.frombuffer(body[len(body) - 8 * self.polynomial_words :], "<u8").astype(np.uint64, copy=False)

    def form(self, scale: float, *, polynomials: int = 2) -> Form:
        """What SEAL writes in front of a ciphertext or a plaintext of this ring."""
        form = Form(parms_id=self.parms_id, poly_modulus_degree=self.poly_modulus_degree, scale=scale, version=seal_version())
        return replace(form, primes=len(self.moduli), polynomials=polynomials)

    def chain_form(self) -> Form:
        """What SEAL writes in front of two polynomials with a word for every prime of the chain."""
        return replace(self.form(_SCALE), parms_id=tuple(self.context.key_parms_id()), primes=len(self.chain_moduli))

    def decode(self, words: NDArray[np.uint64], scale: float = _SCALE) -> NDArray[np.complex128]:
        """Values, of shape (N / 2,), at SEAL's slots of the polynomial with these words, divided by the scale: the inverse of `encode`."""
        return np.array(self.encoder.decode_complex(self._loaded(words, scale)), np.complex128)

    def coefficients(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Coefficients, of shape (N,) and below the modulus, of the polynomial with these words: exact, where `decode` is not.

        For rings of one prime.
        """
        return self.plaintext_coefficients(self._loaded(words, _SCALE))

    def plaintext_coefficients(self, plain: seal.Plaintext) -> NDArray[np.uint64]:
        """The same of a plaintext at scale 1. For `_seal_secret`."""
        ciphertext = Ciphertext()
        # SEAL takes no polynomial back from NTT form but those of a ciphertext, whose c1 may not be zero.
        self.evaluator.add_plain(_constant(self), plain, ciphertext)
        self.evaluator.transform_from_ntt_inplace(ciphertext)
        (container,) = saved_each([ciphertext], most=4 * 8 * self.polynomial_words)
        body = members(container)
        found = np.frombuffer(body, "<u8", self.polynomial_words, len(body) - 2 * 8 * self.polynomial_words)
        return found.astype(np.uint64, copy=False)

    def _loaded(self, words: NDArray[np.uint64], scale: float) -> seal.Plaintext:
        plain = seal.Plaintext()
        with memory_path() as path:
            Path(path).write_bytes(write_plaintext(self.form(scale), words))
            plain.load(self.context, path)
        return plain


@cache
def _constant(public: Ring) -> Ciphertext:
    """The ciphertext of the polynomials 0 and 1."""
    return load_sum(public, np.repeat(np.array([0, 1], np.uint64), public.polynomial_words))


@cache
def chain_ring(poly_modulus_degree: int, chain_bits: tuple[int, ...], security_bits: int) -> Ring:
    """The last level of a chain of primes, one object per process.

    Raises:
        ValueError: If SEAL refuses it.
    """
    return _ring(poly_modulus_degree, chain_bits, security_bits, last=True)


@cache
def product_ring() -> Ring:
    """The first level, of two primes, in which ciphertexts can be multiplied once: of degree 8192, at 256 bits of security."""
    return _ring(8192, _PRODUCT_CHAIN_BITS, 256, last=False)


def _ring(poly_modulus_degree: int, chain_bits: tuple[int, ...], security_bits: int, *, last: bool) -> Ring:
    context = checked_context(encryption_parameters(poly_modulus_degree, chain_bits), security_bits)
    # Not `prime`: of several primes of the same size, SEAL puts the smallest first.
    primes = [modulus.value() for modulus in seal.CoeffModulus.Create(poly_modulus_degree, list(chain_bits))]
    return Ring(
        poly_modulus_degree=poly_modulus_degree,
        moduli=tuple(primes[:1] if last else primes[:-1]),
        chain_moduli=tuple(primes),
        chain_bits=chain_bits,
        security_bits=security_bits,
        parms_id=tuple(context.last_parms_id() if last else context.first_parms_id()),
        context=context,
        encoder=seal.CKKSEncoder(context),
        evaluator=seal.Evaluator(context),
    )


def ring(poly_modulus_degree: int, modulus: int, *, slots: bool) -> Ring:
    """The ring of these numbers: one prime at 256 bits of security or, with slots, the last level of TenSEAL's chain at 192.

    A modulus that no prime of SEAL reaches is that of `product_ring`.

    Raises:
        ValueError: If SEAL refuses it.
    """
    if modulus.bit_length() > _LARGEST_PRIME_BITS:
        product = product_ring()
        if (poly_modulus_degree, modulus, slots) != (product.poly_modulus_degree, product.modulus, True):
            raise ValueError("expected the degree, the modulus and the slots of the product ring, or a modulus of one prime, got others")
        return product
    chain_bits = (modulus.bit_length(), *(_TENSEAL_CHAIN_BITS if slots else ()))
    return chain_ring(poly_modulus_degree, chain_bits, 192 if slots else 256)


class Savable(Protocol):
    """A SEAL object that writes itself to a path."""

    def save(self, path: str, /) -> None: ...


@contextmanager
def memory_path() -> Generator[str]:
    """A path that SEAL can write and read: memory on Linux, elsewhere a file of mode 0600 that is removed."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("privfed")
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        try:
            yield path
        finally:
            Path(path).unlink()


def saved(thing: Savable) -> bytes:
    """The container that SEAL writes for an object."""
    with memory_path() as path:
        thing.save(path)
        return Path(path).read_bytes()


def saved_each(things: Iterable[Savable], *, most: int) -> Iterator[bytes]:
    """The containers that SEAL writes for objects, each of at most `most` bytes, by way of one path.

    A pipe that holds a whole container takes a fifth less time than a file in memory, whose pages come and go each time.
    """
    with pipe_path(most) as pipe:
        if pipe is None:
            yield from map(saved, things)
            return
        path, output = pipe
        for thing in things:
            thing.save(path)
            yield os.read(output, most)


@contextmanager
def pipe_path(least: int) -> Generator[tuple[str, int] | None]:
    """A path that SEAL can write, and the descriptor where that is read; none where no pipe can hold so many bytes at once."""
    output, into = os.pipe()
    try:
        try:
            # Pages, of which a write may leave one half empty: four times as many bytes as there will be.
            held = fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4 * least) if sys.platform == "linux" else 0
        except OSError:
            held = 0
        yield (f"/proc/self/fd/{into}", output) if held >= 4 * least else None
    finally:
        os.close(output)
        os.close(into)


Load = Callable[[NDArray[np.uint64], bytes], Ciphertext]
"""Builds a ciphertext from words below the modulus; a seed stands for the second polynomial."""


@contextmanager
def loader(public: Ring) -> Generator[Load]:
    """Loads as `load_fresh` and `load_sum`, by way of one path for all: a sixth less time where there are many.

    What it gives does not look at lengths, and raises `InvalidMessageError` if SEAL refuses the ciphertext, or it is not a
    non-transparent one of the ring at scale 1.
    """
    with memory_path() as path, Path(path).open("r+b", buffering=0) as file:

        def load(words: NDArray[np.uint64], seed: bytes) -> Ciphertext:
            file.seek(0)
            file.write(write_ciphertext(public.form(_SCALE), words, seed=seed))
            file.truncate()
            return _loaded(public, path)

        yield load


Expand = Callable[[bytes], Ciphertext]
"""Builds the ciphertext whose first polynomial is zero and whose second one this seed stands for."""


@contextmanager
def expander(public: Ring) -> Generator[Expand]:
    """Expands seeds of 64 bytes, by way of one file of which only the seed is written anew.

    What it gives does not look at lengths, and raises as `loader`.
    """
    container = write_ciphertext(public.form(_SCALE), np.zeros(public.polynomial_words, np.uint64), seed=bytes(SEED_BYTES))
    with memory_path() as path, Path(path).open("r+b", buffering=0) as file:
        file.write(container)

        def expanded(seed: bytes) -> Ciphertext:
            file.seek(len(container) - SEED_BYTES)
            file.write(seed)
            return _loaded(public, path)

        yield expanded


def _load(public: Ring, words: NDArray[np.uint64], seed: bytes, *, polynomials: int = 2) -> Ciphertext:
    with memory_path() as path:
        Path(path).write_bytes(write_ciphertext(public.form(_SCALE, polynomials=polynomials), words, seed=seed))
        return _loaded(public, path, polynomials=polynomials)


def _loaded(public: Ring, path: str, *, polynomials: int = 2) -> Ciphertext:
    ciphertext = Ciphertext()
    try:
        ciphertext.load(public.context, path)
    except (RuntimeError, ValueError):
        raise InvalidMessageError from None
    # Belt and braces: the container is ours and SEAL checked it, but a transparent ciphertext loads without complaint.
    as_expected = (
        ciphertext.size() == polynomials
        and ciphertext.poly_modulus_degree() == public.poly_modulus_degree
        and ciphertext.coeff_modulus_size() == len(public.moduli)
        and ciphertext.is_ntt_form()
        and ciphertext.scale == _SCALE
        and tuple(ciphertext.parms_id()) == public.parms_id
        and not ciphertext.is_transparent()
        and seal.is_valid_for(ciphertext, public.context)
    )
    if not as_expected:
        raise InvalidMessageError
    return ciphertext


def load_fresh(public: Ring, words: NDArray[np.uint64], seed: bytes) -> Ciphertext:
    """A fresh ciphertext, its second polynomial expanded by SEAL from the seed.

    Args:
        public: The ring.
        words: First polynomial in NTT form, every word below its modulus.
        seed: 64 bytes.

    Raises:
        ValueError: If a length is wrong.
        InvalidMessageError: If it is not a valid, non-transparent ciphertext.
    """
    if words.shape != (public.polynomial_words,) or len(seed) != SEED_BYTES:
        raise ValueError(f"expected {public.polynomial_words} words and {SEED_BYTES} bytes, got {words.shape} and {len(seed)}")
    return _load(public, words, seed)


def load_sum(public: Ring, words: NDArray[np.uint64]) -> Ciphertext:
    """A whole ciphertext, from both polynomials in NTT form, every word below its modulus.

    Raises:
        ValueError: If the length is wrong.
        InvalidMessageError: If it is not a valid, non-transparent ciphertext.
    """
    return load_whole(public, words, polynomials=2)


def load_whole(public: Ring, words: NDArray[np.uint64], *, polynomials: int) -> Ciphertext:
    """As `load_sum`, for a ciphertext of so many polynomials: three of a product."""
    count = polynomials * public.polynomial_words
    if words.shape != (count,):
        raise ValueError(f"expected {count} words, got {words.shape}")
    return _load(public, words, b"", polynomials=polynomials)


def ciphertext_members(body: bytes, public: Ring, *, seeded: bool, polynomials: int = 2) -> tuple[NDArray[np.uint64], bytes]:
    """Words and seed (empty if there is none) of a ciphertext that SEAL saved, without its container.

    Raises:
        RuntimeError: If this SEAL writes another format. Nothing was sent.
    """
    count = public.polynomial_words * (1 if seeded else polynomials)
    return read_ciphertext(body, public.form(_SCALE, polynomials=polynomials), count, seeded=seeded)


def expand(public: Ring, seed: bytes) -> NDArray[np.uint64]:
    """The second polynomial, in NTT form, for which a seed stands."""
    ciphertext = load_fresh(public, np.zeros(public.polynomial_words, np.uint64), seed)
    words, _ = ciphertext_members(members(saved(ciphertext)), public, seeded=False)
    return words[public.polynomial_words :]


class WeightedSum:
    """The one accumulator of a weighted sum of ciphertexts, exact modulo the prime."""

    def __init__(self, public: Ring) -> None:
        self._ring = public
        self._sum: Ciphertext | None = None

    def add(self, coefficient: int, ciphertext: Ciphertext) -> None:
        """Adds coefficient times a ciphertext, which it consumes.

        Raises:
            InvalidMessageError: If the sum becomes transparent, which no honest ciphertexts do.
        """
        try:
            if coefficient != 1:
                weight = seal.Plaintext()
                # A constant polynomial at scale 1 is the integer itself: no rounding, no rescaling, no level.
                self._ring.encoder.encode(float(coefficient), list(self._ring.parms_id), _SCALE, weight)
                self._ring.evaluator.multiply_plain_inplace(ciphertext, weight)
            if self._sum is None:
                self._sum = ciphertext
            else:
                self._ring.evaluator.add_inplace(self._sum, ciphertext)
        except RuntimeError:
            raise InvalidMessageError from None

    def ciphertext(self) -> Ciphertext:
        """The sum, which is not to be used any more afterwards.

        Raises:
            ValueError: If nothing was added.
        """
        if self._sum is None:
            raise ValueError("expected at least one ciphertext in the sum, got none")
        return self._sum

    def words(self) -> NDArray[np.uint64]:
        """Both polynomials of the sum in NTT form, every word below its modulus.

        Raises:
            ValueError: If nothing was added.
        """
        words, _ = ciphertext_members(members(saved(self.ciphertext())), self._ring, seeded=False)
        return words

    def add_signed(self, sign: int, ciphertext: Ciphertext) -> None:
        """Adds a ciphertext, which it consumes, or takes it away.

        Args:
            sign: 1 or -1.
            ciphertext: The ciphertext.

        Raises:
            InvalidMessageError: As `add`.
        """
        if sign < 0:
            try:
                self._ring.evaluator.negate_inplace(ciphertext)
            except RuntimeError:
                raise InvalidMessageError from None
        self.add(1, ciphertext)


class ProductSum:
    """The one accumulator of a sum of products of two ciphertexts: three polynomials, and nothing relinearised, rescaled or rotated."""

    def __init__(self, public: Ring) -> None:
        self._ring = public
        self._sum: Ciphertext | None = None

    def add(self, first: Ciphertext, second: Ciphertext) -> None:
        """Adds the product of two ciphertexts, which stay as they are.

        Raises:
            InvalidMessageError: If SEAL refuses it, or the sum becomes transparent.
        """
        product = Ciphertext()
        try:
            if first is second:
                self._ring.evaluator.square(first, product)
            else:
                self._ring.evaluator.multiply(first, second, product)
            if self._sum is None:
                self._sum = product
            else:
                self._ring.evaluator.add_inplace(self._sum, product)
        except RuntimeError:
            raise InvalidMessageError from None

    def words(self) -> NDArray[np.uint64]:
        """The three polynomials of the sum in NTT form, every word below its modulus.

        Raises:
            ValueError: If nothing was added.
        """
        if self._sum is None:
            raise ValueError("expected at least one product in the sum, got none")
        words, _ = ciphertext_members(members(saved(self._sum)), self._ring, seeded=False, polynomials=3)
        return words


Zero = Callable[[], NDArray[np.uint64]]
"""Gives words of both polynomials, in NTT form, of an encryption of zero: another one each time."""


def zeros_under(public: Ring, public_key: NDArray[np.uint64]) -> Zero:
    """Makes encryptions of zero under a public key, of the operating system's randomness. What made them is forgotten.

    Args:
        public: The ring.
        public_key: Words of both polynomials, each with a word for every prime of the chain.

    Raises:
        InvalidMessageError: If SEAL refuses the key.
    """
    key = seal.PublicKey()
    with memory_path() as path:
        Path(path).write_bytes(write_ciphertext(public.chain_form(), public_key))
        try:
            key.load(public.context, path)
        except (RuntimeError, ValueError):
            raise InvalidMessageError from None
    encryptor = seal.Encryptor(public.context, key)

    def zero() -> NDArray[np.uint64]:
        ciphertext = Ciphertext()
        encryptor.encrypt_zero(ciphertext)
        words, _ = ciphertext_members(members(saved(ciphertext)), public, seeded=False)
        return words

    return zero


def word_sum(words: NDArray[np.uint64], modulus: int) -> int:
    """Sum of words below a modulus, modulo it: N times the constant coefficient of a polynomial in NTT form.

    The powers of the 2N-th roots of unity at which the words are values sum to zero, but for the power 0.
    """
    low, high = words & np.uint64((1 << _LIMB_BITS) - 1), words >> np.uint64(_LIMB_BITS)
    return ((int(high.sum()) << _LIMB_BITS) + int(low.sum())) % modulus

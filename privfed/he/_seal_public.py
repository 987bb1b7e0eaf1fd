"""SEAL without secrets: rings, weighted sums of ciphertexts, and the byte layout of SEAL's containers.

No secret key can be reached from here: the contexts are made from public numbers, and nothing takes or holds a key. SEAL
objects do not leave this module, except to `_seal_secret`.

`tenseal.sealapi` saves and loads by path, compressed with zstd. Ciphertexts come from outside as bare words below the
modulus; the container around them is written here, so no length, type or version that a sender chose reaches SEAL.
"""

import os
import struct
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import tenseal
import tenseal.sealapi as seal
import zstandard
from numpy.typing import NDArray
from tenseal.sealapi import Ciphertext

from privfed.errors import InvalidMessageError

SEED_BYTES = 64

# SEAL 4 native/src/seal/serialization.h, SEALHeader: magic, header size, major, minor, compression, reserved, total size.
_HEADER = struct.Struct("<HBBBBHQ")
_MAGIC = 0xA15E
_UNCOMPRESSED, _ZSTD = 0, 2
# ciphertext.cpp, save_members: parameters id, NTT form, size, N, number of primes, scale, correction factor, then the words.
_CIPHERTEXT = struct.Struct("<32sBQQQdQ")
_COUNT = struct.Struct("<Q")
_PRIMES = 1
_SCALE = 1.0
# randomgen.h: the generator that expands a seed; 1 is BLAKE2xb, the only one this SEAL is built to use by default.
_BLAKE2XB = 1


def tenseal_version() -> str:
    """Version of TenSEAL."""
    return tenseal.__version__


@cache
def seal_version() -> str:
    """Major and minor version of the SEAL inside TenSEAL, as it writes them into its files."""
    _, _, major, minor, *_ = _HEADER.unpack_from(saved(seal.Plaintext()))
    return f"{major}.{minor}"


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


def encryption_parameters(poly_modulus_degree: int, modulus: int) -> seal.EncryptionParameters:
    """SEAL's CKKS parameters of the ring with this one prime."""
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
    parameters.set_poly_modulus_degree(poly_modulus_degree)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(poly_modulus_degree, [modulus.bit_length()]))
    return parameters


def checked_context(parameters: seal.EncryptionParameters) -> seal.SEALContext:
    """SEAL's context of the parameters, at its 256-bit security level.

    Raises:
        ValueError: If SEAL refuses the parameters, among other reasons because the security level is not reached.
    """
    context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC256)  # noqa: FBT003
    if not context.parameters_set():
        raise ValueError(f"expected parameters that SEAL accepts at 256 bits of security: {context.parameters_error_message()}")
    return context


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ring:
    """SEAL's public objects for one degree and prime; nothing in it is random or secret."""

    poly_modulus_degree: int
    modulus: int
    context: seal.SEALContext
    encoder: seal.CKKSEncoder
    evaluator: seal.Evaluator


@cache
def ring(poly_modulus_degree: int, modulus: int) -> Ring:
    """The ring of these numbers, one object per process.

    Raises:
        ValueError: If SEAL refuses it.
    """
    context = checked_context(encryption_parameters(poly_modulus_degree, modulus))
    return Ring(
        poly_modulus_degree=poly_modulus_degree,
        modulus=modulus,
        context=context,
        encoder=seal.CKKSEncoder(context),
        evaluator=seal.Evaluator(context),
    )


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


def members(container: bytes) -> bytes:
    """What is inside a container that SEAL wrote, decompressed. Only for SEAL's own output, never for bytes from outside."""
    magic, _, _, _, compression, _, size = _HEADER.unpack_from(container)
    body = container[_HEADER.size :]
    if magic != _MAGIC or size != len(container) or compression not in {_UNCOMPRESSED, _ZSTD}:
        raise RuntimeError("this SEAL writes another container format")
    return body if compression == _UNCOMPRESSED else zstandard.ZstdDecompressor().decompressobj().decompress(body)


def _container(body: bytes) -> bytes:
    major, minor = (int(part) for part in seal_version().split("."))
    return _HEADER.pack(_MAGIC, _HEADER.size, major, minor, _UNCOMPRESSED, 0, _HEADER.size + len(body)) + body


def _load(public: Ring, words: NDArray[np.uint64], seed: bytes) -> Ciphertext:
    """Builds a ciphertext from words below the modulus; a seed stands for the second polynomial.

    Raises:
        InvalidMessageError: If SEAL refuses it, or it is not a non-transparent ciphertext of the ring at scale 1.
    """
    parms_id = public.context.first_parms_id()
    header = _CIPHERTEXT.pack(struct.pack("<4Q", *parms_id), 1, 2, public.poly_modulus_degree, _PRIMES, _SCALE, 1)
    body = header + _container(_COUNT.pack(words.size) + words.astype("<u8", copy=False).tobytes())
    if seed:
        body += _container(bytes([_BLAKE2XB]) + seed)
    ciphertext = Ciphertext()
    try:
        with memory_path() as path:
            Path(path).write_bytes(_container(body))
            ciphertext.load(public.context, path)
    except (RuntimeError, ValueError):
        raise InvalidMessageError from None
    # Belt and braces: the container is ours and SEAL checked it, but a transparent ciphertext loads without complaint.
    as_expected = (
        ciphertext.size() == 2
        and ciphertext.poly_modulus_degree() == public.poly_modulus_degree
        and ciphertext.coeff_modulus_size() == _PRIMES
        and ciphertext.is_ntt_form()
        and ciphertext.scale == _SCALE
        and ciphertext.parms_id() == parms_id
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
        words: First polynomial in NTT form, of shape (N,), every word below the modulus.
        seed: 64 bytes.

    Raises:
        ValueError: If a length is wrong.
        InvalidMessageError: If it is not a valid, non-transparent ciphertext.
    """
    if words.shape != (public.poly_modulus_degree,) or len(seed) != SEED_BYTES:
        raise ValueError(f"expected {public.poly_modulus_degree} words and {SEED_BYTES} bytes, got {words.shape} and {len(seed)}")
    return _load(public, words, seed)


def load_sum(public: Ring, words: NDArray[np.uint64]) -> Ciphertext:
    """A whole ciphertext, from both polynomials in NTT form, of shape (2 N,), every word below the modulus.

    Raises:
        ValueError: If the length is wrong.
        InvalidMessageError: If it is not a valid, non-transparent ciphertext.
    """
    if words.shape != (2 * public.poly_modulus_degree,):
        raise ValueError(f"expected {2 * public.poly_modulus_degree} words, got {words.shape}")
    return _load(public, words, b"")


def ciphertext_members(container: bytes, public: Ring, *, seeded: bool) -> tuple[NDArray[np.uint64], bytes]:
    """Words and seed (empty if there is none) of a ciphertext that SEAL saved.

    Raises:
        RuntimeError: If this SEAL writes another format. Nothing was sent.
    """
    body = members(container)
    count = public.poly_modulus_degree * (1 if seeded else 2)
    start = _CIPHERTEXT.size + _HEADER.size + _COUNT.size
    stop = start + 8 * count
    header = _CIPHERTEXT.pack(struct.pack("<4Q", *public.context.first_parms_id()), 1, 2, public.poly_modulus_degree, _PRIMES, _SCALE, 1)
    tail = _HEADER.size + 1 + SEED_BYTES if seeded else 0
    if len(body) != stop + tail or body[: len(header)] != header or _COUNT.unpack_from(body, start - _COUNT.size) != (count,):
        raise RuntimeError("this SEAL writes another ciphertext format; nothing was sent")
    if seeded and body[stop + _HEADER.size] != _BLAKE2XB:
        raise RuntimeError("this SEAL expands seeds with another generator; nothing was sent")
    return np.frombuffer(body, "<u8", count, start).astype(np.uint64, copy=False), body[len(body) - SEED_BYTES :] if seeded else b""


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
        weight = seal.Plaintext()
        # A constant polynomial at scale 1 is the integer itself: no rounding, no rescaling, no level.
        self._ring.encoder.encode(float(coefficient), _SCALE, weight)
        try:
            self._ring.evaluator.multiply_plain_inplace(ciphertext, weight)
            if self._sum is None:
                self._sum = ciphertext
            else:
                self._ring.evaluator.add_inplace(self._sum, ciphertext)
        except RuntimeError:
            raise InvalidMessageError from None

    def words(self) -> NDArray[np.uint64]:
        """Both polynomials of the sum in NTT form, of shape (2 N,), every word below the modulus.

        Raises:
            ValueError: If nothing was added.
        """
        if self._sum is None:
            raise ValueError("expected at least one ciphertext in the sum, got none")
        words, _ = ciphertext_members(saved(self._sum), self._ring, seeded=False)
        return words

"""The byte layout of SEAL's files: pure bytes, no SEAL.

Every file is a container, compressed or not, whose body says what is in it.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from privfed.errors import InvalidMessageError

SEED_BYTES = 64

# SEAL 4 native/src/seal/serialization.h, SEALHeader: magic, header size, major, minor, compression, reserved, total size.
_HEADER = struct.Struct("<HBBBBHQ")
_MAGIC = 0xA15E
CONTAINER_MAGIC = _MAGIC.to_bytes(2, "little")
_COMPRESSION = 5
_UNCOMPRESSED, _ZSTD = 0, 2
# SEAL compresses with a window of 2 MiB at most.
_LARGEST_WINDOW = 1 << 23
# ciphertext.cpp, save_members: parameters id, NTT form, size, N, number of primes, scale, correction factor, then the words.
CIPHERTEXT = struct.Struct("<32sBQQQdQ")
# plaintext.cpp, save_members: parameters id, number of words, scale, then the words.
_PLAINTEXT = struct.Struct("<32sQd")
_COUNT = struct.Struct("<Q")
# randomgen.h: the generator that expands a seed; 1 is BLAKE2xb, the only one this SEAL is built to use by default.
_BLAKE2XB = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands in front of the words of a ciphertext or a plaintext. Public.

    Args:
        parms_id: Names the parameters, four integers.
        poly_modulus_degree: Degree N of the ring.
        scale: What the numbers are multiplied by.
        version: Major and minor version of SEAL.
        primes: Words of each coefficient.
        polynomials: Polynomials of a ciphertext: three of a product, else two.
    """

    parms_id: tuple[int, ...]
    poly_modulus_degree: int
    scale: float
    version: str
    primes: int = 1
    polynomials: int = 2

    def ciphertext(self, *, ntt: bool = True) -> bytes:
        """Header of a ciphertext, in NTT form or as coefficients."""
        name = struct.pack("<4Q", *self.parms_id)
        return CIPHERTEXT.pack(name, ntt, self.polynomials, self.poly_modulus_degree, self.primes, self.scale, 1)

    def container(self, body: bytes) -> bytes:
        """A body as SEAL writes it, uncompressed."""
        major, minor = (int(part) for part in self.version.split("."))
        return _HEADER.pack(_MAGIC, _HEADER.size, major, minor, _UNCOMPRESSED, 0, _HEADER.size + len(body)) + body

    def array(self, words: NDArray[np.uint64]) -> bytes:
        """Words as SEAL writes them."""
        return self.container(_COUNT.pack(words.size) + words.astype("<u8", copy=False).tobytes())


def version_of(container: bytes) -> str:
    """Major and minor version of the SEAL that wrote a container."""
    _, _, major, minor, *_ = _HEADER.unpack_from(container)
    return f"{major}.{minor}"


def members(container: bytes) -> bytes:
    """What is inside a container that SEAL wrote, decompressed. Only for SEAL's own output, never for bytes from outside."""
    (body,) = members_of_each([container])
    return body


def members_of_each(containers: Iterable[bytes]) -> Iterator[bytes]:
    """The same of many containers: to make a decompressor takes half as long as to use it."""
    decompressor = zstandard.ZstdDecompressor()
    for container in containers:
        magic, _, _, _, compression, _, size = _HEADER.unpack_from(container)
        if magic != _MAGIC or size != len(container) or compression not in {_UNCOMPRESSED, _ZSTD}:
            raise RuntimeError("this SEAL writes another container format")
        body = memoryview(container)[_HEADER.size :]
        yield bytes(body) if compression == _UNCOMPRESSED else decompressor.decompressobj().decompress(body)


def write_ciphertext(form: Form, words: NDArray[np.uint64], *, seed: bytes = b"") -> bytes:
    """A ciphertext of these words; a seed stands for the second polynomial."""
    body = form.ciphertext() + form.array(words)
    return form.container(body + form.container(bytes([_BLAKE2XB]) + seed) if seed else body)


def coefficients_header(form: Form) -> bytes:
    """What stands in front of the 2 N words of a pair of polynomials that are not in NTT form."""
    nothing = form.container(form.ciphertext(ntt=False) + form.array(np.zeros(2 * form.poly_modulus_degree, np.uint64)))
    return nothing[: -16 * form.poly_modulus_degree]


def write_plaintext(form: Form, words: NDArray[np.uint64]) -> bytes:
    """A plaintext of these words."""
    header = _PLAINTEXT.pack(struct.pack("<4Q", *form.parms_id), form.poly_modulus_degree * form.primes, form.scale)
    return form.container(header + form.array(words))


def read_ciphertext(body: bytes, form: Form, count: int, *, seeded: bool) -> tuple[NDArray[np.uint64], bytes]:
    """The `count` words, and the seed if there is one, inside a ciphertext of this form that SEAL wrote.

    Raises:
        RuntimeError: If this SEAL writes another format. Nothing was sent.
    """
    start = CIPHERTEXT.size + _HEADER.size + _COUNT.size
    stop = start + 8 * count
    tail = _HEADER.size + 1 + SEED_BYTES if seeded else 0
    as_expected = (
        len(body) == stop + tail
        and body[: CIPHERTEXT.size] == form.ciphertext()
        and _COUNT.unpack_from(body, start - _COUNT.size) == (count,)
    )
    if not as_expected:
        raise RuntimeError("this SEAL writes another ciphertext format; nothing was sent")
    if seeded and body[stop + _HEADER.size] != _BLAKE2XB:
        raise RuntimeError("this SEAL expands seeds with another generator; nothing was sent")
    return np.frombuffer(body, "<u8", count, start).astype(np.uint64, copy=False), body[len(body) - SEED_BYTES :] if seeded else b""


def read_foreign_ciphertext(container: bytes, form: Form, modulus: int) -> NDArray[np.uint64]:
    """Both polynomials, of shape (2 N,), of a ciphertext that somebody else's SEAL wrote, compressed or not.

    Nothing is allocated by a number in it.

    Raises:
        InvalidMessageError: If it is not a whole ciphertext of this form, or a word is not below the modulus.
    """
    count = 2 * form.poly_modulus_degree
    like = write_ciphertext(form, np.zeros(count, np.uint64))
    header = bytearray(like[: _HEADER.size])
    header[_COMPRESSION:] = container[_COMPRESSION : _COMPRESSION + 1] + _HEADER.pack(0, 0, 0, 0, 0, 0, len(container))[_COMPRESSION + 1 :]
    if container[: _HEADER.size] != bytes(header):
        raise InvalidMessageError
    body = container[_HEADER.size :]
    if container[_COMPRESSION] == _ZSTD:
        try:
            with zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(body) as reader:
                body = reader.read(len(like))  # one byte more than there may be is enough to see
        except zstandard.ZstdError:
            raise InvalidMessageError from None
    elif container[_COMPRESSION] != _UNCOMPRESSED:
        raise InvalidMessageError
    expected = like[_HEADER.size :]
    start = len(expected) - 8 * count
    if len(body) != len(expected) or body[:start] != expected[:start]:
        raise InvalidMessageError
    words = np.frombuffer(body, "<u8", count, start).astype(np.uint64, copy=False)
    if (words >= modulus).any():
        raise InvalidMessageError
    return words

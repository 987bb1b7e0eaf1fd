"""What secret keys look like in bytes: SEAL's, TenSEAL's and our own.

SEAL writes every object as a container, plain or compressed. A secret key is a plaintext polynomial in NTT form at scale 1, over all
primes; a polynomial that somebody encoded at scale 1 looks the same and is taken for one. Nothing is handed to SEAL, and no length
in the bytes is believed.
"""

import binascii
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from enum import Enum

import zstandard

from privfed.he.tenseal_vectors import varint
from privfed.keys.chain import CHAIN_FILE_BYTES, CHAIN_HEADER, CHAIN_KEY_BYTES, chain_in

AHEAD = 1 << 18
"""How many bytes behind its first one are enough to know a key: SEAL's compressed blocks are half as long."""
BEHIND = 64
"""How many bytes before it."""
SHARED_KEY_HEADER = b"privfed shared key v1\n"
"""How a file of `SharedKey.save` begins."""
ESCROW_KEY_HEADER = b"privfed escrow key v1\n"
"""How a file of `EscrowKey.save` begins."""


class SecretKind(Enum):
    """What was found."""

    TENSEAL = "TenSEAL context with its secret key"
    SEAL = "SEAL secret key"
    SEAL_BASE64 = "SEAL secret key in base64"
    SHARED_KEY = "privfed shared key"
    ESCROW_KEY = "privfed escrow key"
    CHAIN = "privfed key chain"
    SIGNING = "Ed25519 private key"
    DECRYPTION = "X25519 private key"


# SEAL native/src/seal/serialization.h, SEALHeader: magic 0xA15E, header size 16, major, minor, compression, reserved, total size.
_CONTAINER = struct.Struct("<HBBBBHQ")
_SEAL = b"\x5e\xa1\x10"
_PLAIN, _ZLIB, _ZSTD = 0, 1, 2
# plaintext.cpp, save_members: parameters id, number of words, scale; then a container with the number of words and the words.
_SECRET_KEY = struct.Struct("<32sQd16sQ")
_LARGEST_WINDOW = 1 << 23
_PEM = b"-----BEGIN PRIVATE KEY-----"
# RFC 8410: the same 16 bytes before the 32 of the key, but for the last one of the algorithm's name.
_PEM_KEY = re.compile(_PEM + rb"\r?\nMC4CAQAwBQYDK2V([wu])BCIEI[A-Za-z0-9+/]{43}[\r\n]")
# The first bytes of a container in base64, by how many bytes of its group of three stand before it (0, 1 or 2): characters that are
# always there, with or without the end of a line between groups, and how many of the group stand before them.
_BASE64 = {b"XqEQ": (0, 0), b"6hEA": (2, 1), b"6h\nEA": (2, 1), b"6h\r\nEA": (2, 1), b"oRAD": (4, 2), b"oRAE": (4, 2)}
_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/\r\n]*={0,2}")
_NEWLINES = b"\r\n"


def secrets_in(data: bytes, start: int, stop: int) -> Iterator[SecretKind]:
    """The secret keys whose first byte stands in `data[start:stop]`.

    Args:
        data: Bytes, with `BEHIND` before the start and `AHEAD` behind the stop, as far as there are any.
        start: First place to look at.
        stop: First place not to look at.
    """
    for mark, known in _MARKS.items():
        for place in places(data, mark, start, stop):
            kind = known(data, place)
            if kind is not None:
                yield kind


def places(data: bytes, mark: bytes, start: int, stop: int) -> Iterator[int]:
    """Where a mark begins in `data[start:stop]`."""
    place = data.find(mark, start, stop + len(mark) - 1)
    while place >= 0:
        yield place
        place = data.find(mark, place + 1, stop + len(mark) - 1)


def _seal(data: bytes, place: int) -> SecretKind | None:
    size = _secret_container(data[place : place + AHEAD])
    if size is None:
        return None
    # Protocol buffers: a context keeps its key as field 1 of a message, that is behind the byte 10 and the length.
    return SecretKind.TENSEAL if data[max(0, place - BEHIND) : place].endswith(b"\n" + varint(size)) else SecretKind.SEAL


def _seal_base64(characters: int, before: int) -> Callable[[bytes, int], SecretKind | None]:
    def known(data: bytes, place: int) -> SecretKind | None:
        behind = data[max(0, place - BEHIND) : place].translate(None, _NEWLINES)
        first = behind[len(behind) - characters :] if characters else b""
        # A few characters are enough to refuse nearly all that is something else.
        for length in (4 * _CONTAINER.size, AHEAD):
            run = _BASE64_RUN.match(data, place, place + length)
            text = first + (b"" if run is None else run.group().translate(None, _NEWLINES))
            try:
                container = binascii.a2b_base64(text[: len(text) // 4 * 4])[before:]
            except binascii.Error:
                return None
            if _container(container) is None:
                return None
        return None if _secret_container(container) is None else SecretKind.SEAL_BASE64

    return known


def _container(data: bytes) -> tuple[int, int] | None:
    """Compression and total size of the container that begins here."""
    if len(data) < _CONTAINER.size or not data.startswith(_SEAL):
        return None
    _, _, _, _, compression, reserved, size = _CONTAINER.unpack_from(data)
    return (compression, size) if compression in {_PLAIN, _ZLIB, _ZSTD} and not reserved and size > _CONTAINER.size else None


def _secret_container(data: bytes) -> int | None:
    """Total size of the container that begins here, if it holds a secret key."""
    found = _container(data)
    if found is None:
        return None
    compression, size = found
    content = _expanded(data[_CONTAINER.size : size], compression, _SECRET_KEY.size)
    if len(content) < _SECRET_KEY.size:
        return None
    parms_id, words, scale, inner, inner_words = _SECRET_KEY.unpack(content)
    is_key = any(parms_id) and scale == 1.0 and words == inner_words > 0 and inner.startswith(_SEAL)
    return size if is_key else None


def _expanded(data: bytes, compression: int, size: int) -> bytes:
    """The first bytes of what was compressed; no more than these are ever made."""
    try:
        if compression == _ZLIB:
            return zlib.decompressobj().decompress(data, size)
        if compression == _ZSTD:
            with zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(io.BytesIO(data)) as reader:
                return reader.read(size)
    except (zlib.error, zstandard.ZstdError):
        return b""
    return data[:size]


def _stored(header: bytes, kind: SecretKind) -> Callable[[bytes, int], SecretKind | None]:
    def known(data: bytes, place: int) -> SecretKind | None:
        # Compiled Python keeps the header of this very format as a constant, behind its length.
        constant = data[max(0, place - 4) : place] == len(header).to_bytes(4, "little")
        return kind if len(data) >= place + len(header) + CHAIN_KEY_BYTES and not constant else None

    return known


def _chain(data: bytes, place: int) -> SecretKind | None:
    return SecretKind.CHAIN if chain_in(data[place : place + CHAIN_FILE_BYTES]) else None


def _pem(data: bytes, place: int) -> SecretKind | None:
    key = _PEM_KEY.match(data, place)
    if key is None:
        return None
    return SecretKind.SIGNING if key.group(1) == b"w" else SecretKind.DECRYPTION


_MARKS: dict[bytes, Callable[[bytes, int], SecretKind | None]] = {
    _SEAL: _seal,
    SHARED_KEY_HEADER: _stored(SHARED_KEY_HEADER, SecretKind.SHARED_KEY),
    ESCROW_KEY_HEADER: _stored(ESCROW_KEY_HEADER, SecretKind.ESCROW_KEY),
    CHAIN_HEADER: _chain,
    _PEM: _pem,
    **{mark: _seal_base64(characters, before) for mark, (characters, before) in _BASE64.items()},
}

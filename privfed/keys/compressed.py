"""How compressed streams begin, and what expands them."""

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

_XZ_MEMORY_BYTES = 1 << 27
# A local file header: version, flags, method, ..., lengths of name and extra field.
_ZIP = struct.Struct("<4sHHH16sHH")
_STORED, _DEFLATED, _BZIP2 = 0, 8, 12
_ENCRYPTED = 1
_LATEST_ZIP = 63
_GZIP = re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL)
_BZIP2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
_XZ_STREAM = re.compile(rb"\xfd7zXZ\x00\x00[\x00-\x0f]")


class Decoder(Protocol):
    """What expands a compressed stream: those of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int = ...) -> bytes: ...


class _Inflater:
    """zlib's decoder with the face of the others: it keeps what it could not expand yet."""

    def __init__(self, *, window_bits: int) -> None:
        self._decoder = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes | memoryview, max_length: int = 0) -> bytes:
        return self._decoder.decompress(data or self._decoder.unconsumed_tail, max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first byte of a compressed stream.

    Args:
        decoder: Expands it.
        body: Where that begins.
        name: What it is called.
    """

    decoder: Decoder
    body: int
    name: str


def expanded(decoder: Decoder, block: memoryview, *, most: int) -> Iterator[bytes]:
    """What a block expands to, in pieces of `most` bytes at most."""
    data: bytes | memoryview = block
    while not decoder.eof:
        piece = decoder.decompress(data, most)
        if piece:
            yield piece
        if decoder.needs_input:
            return
        data = b""


def _zip(data: bytes, place: int) -> Beginning | str | None:
    """A member of a zip archive. Its sizes are not needed, and not believed. Members that are not compressed need no expanding."""
    if len(data) < place + _ZIP.size:
        return None
    _, version, flags, method, _, name_bytes, extra_bytes = _ZIP.unpack_from(data, place)
    raw_name = data[place + _ZIP.size : place + _ZIP.size + name_bytes]
    # The mark alone stands in many a program.
    if version & 0xFF > _LATEST_ZIP or not name_bytes or any(byte < 32 for byte in raw_name) or method == _STORED:
        return None
    if flags & _ENCRYPTED:
        return "a member of a zip archive is encrypted"
    if method not in {_DEFLATED, _BZIP2}:
        return "a member of a zip archive is compressed in a way that is not known here"
    decoder = _Inflater(window_bits=-15) if method == _DEFLATED else bz2.BZ2Decompressor()
    body = place + _ZIP.size + name_bytes + extra_bytes
    return Beginning(decoder=decoder, body=body, name=raw_name.decode(errors="replace"))


def _gzip(data: bytes, place: int) -> Beginning | None:
    whole = _GZIP.match(data, place)
    return whole and Beginning(decoder=_Inflater(window_bits=31), body=place, name="gzip")


def _bzip2(data: bytes, place: int) -> Beginning | None:
    whole = _BZIP2_STREAM.match(data, place)
    return whole and Beginning(decoder=bz2.BZ2Decompressor(), body=place, name="bzip2")


def _xz(data: bytes, place: int) -> Beginning | None:
    whole = _XZ_STREAM.match(data, place)
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    return whole and Beginning(decoder=decoder, body=place, name="xz")


BEGINNINGS: dict[bytes, Callable[[bytes, int], Beginning | str | None]] = {
    b"PK\x03\x04": _zip,
    b"\x1f\x8b\x08": _gzip,
    b"BZh": _bzip2,
    b"\xfd7zXZ": _xz,
}

"""Bytes with compressed streams in them, searched as they come: in bounded memory, whatever they expand to.

Compressed streams are known by how they begin, at any place, and end where they say themselves. No directory of an archive is read,
so none can hide a member or claim one that takes all memory.
"""

import heapq
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from privfed.keys.compressed import BEGINNINGS, Beginning, Decoder, expanded
from privfed.keys.marks import AHEAD, BEHIND, SecretKind, places, secrets_in

BLOCK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 12
_MOST_AT_ONCE = 8
_CLOSED = {b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A secret key, once per kind and place.

    Args:
        path: The file.
        inside: Where in it, if something had to be expanded.
        kind: What it is.
    """

    path: Path
    inside: str
    kind: SecretKind


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSearched:
    """What was not looked into, so that nothing is known about it.

    Args:
        path: The file or folder.
        inside: Where in it.
        reason: Why.
    """

    path: Path
    inside: str
    reason: str


class Allowance:
    """What expanding one file may cost.

    Args:
        count: How many bytes it may expand to, all streams in it together.
    """

    def __init__(self, count: int) -> None:
        self._left = count
        self._open = 0

    def take(self, count: int) -> bool:
        """Whether so many more bytes may come out."""
        self._left -= count
        return self._left >= 0

    def open(self) -> bool:
        """Whether one more stream may be expanded inside those that have not ended."""
        if self._open == _MOST_AT_ONCE:
            return False
        self._open += 1
        return True

    def close(self) -> None:
        """One of them has ended."""
        self._open -= 1


class Stream:
    """Bytes that come block by block, from a file or out of a compressed stream in one.

    Args:
        path: The file.
        allowance: Of the file.
        inside: Where in it.
    """

    def __init__(self, *, path: Path, allowance: Allowance, inside: str = "") -> None:
        self._path = path
        self._inside = inside
        self._allowance = allowance
        self._kept = b""
        self._seen = 0  # so many of the kept bytes were looked at
        self._next = 0  # and before this one no compressed stream begins
        self._at_start = True
        self._found: set[SecretKind] = set()
        self._compressed: _Compressed | None = None

    def feed(self, block: bytes) -> Iterator[Found | NotSearched]:
        """What is in the next bytes, as far as it can be known before more of them come."""
        data = self._kept + block
        if self._compressed is not None:
            yield from self._feed_compressed(self._compressed, memoryview(block), end=len(data))
        yield from self._search(data, max(self._seen, len(data) - AHEAD))

    def finish(self) -> Iterator[Found | NotSearched]:
        """What is in the last bytes."""
        yield from self._search(self._kept, len(self._kept))
        if self._compressed is not None:
            yield from self._compressed.finish()

    def not_searched(self, reason: str, name: str = "") -> NotSearched:
        """That something in here was not looked into."""
        return NotSearched(path=self._path, inside=self._within(name), reason=reason)

    def _within(self, name: str) -> str:
        return "!".join(part for part in (self._inside, name) if part)

    def _search(self, data: bytes, stop: int) -> Iterator[Found | NotSearched]:
        """Searches up to `stop`: what is compressed is expanded, one stream after the other, and the rest searched as it is."""
        beginning = self._at_start and stop > 0
        if beginning:
            self._at_start = False
            if closed := next((name for mark, name in _CLOSED.items() if data.startswith(mark)), None):
                yield self.not_searched(f"{closed} archives are not opened")
        start = max(self._seen, self._next)
        marked = heapq.merge(*([(place, mark) for place in places(data, mark, start, stop)] for mark in BEGINNINGS))
        while self._compressed is None:
            place, begin = next(self._beginnings(data, marked), (stop, None))
            yield from self._secrets(data, start, place)
            if begin is None:
                break
            if isinstance(begin, str):
                yield self.not_searched(begin)
                start = place
            elif not self._allowance.open():
                yield self.not_searched(f"more than {_MOST_AT_ONCE} compressed streams are inside each other", begin.name)
                start = place
            else:
                yield from self._expand(data, begin, certain=beginning and place == 0)
                start = max(place, self._next)
        if self._compressed is not None and not self._compressed.certain:  # it may turn out to be none
            yield from self._secrets(data, start, stop)
        first = max(0, stop - BEHIND)
        self._kept, self._seen, self._next = data[first:], stop - first, self._next - first

    def _beginnings(self, data: bytes, marked: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Beginning | str]]:
        """Where a compressed stream begins that is not inside of one that was expanded."""
        for place, mark in marked:
            if place >= self._next and (begin := BEGINNINGS[mark](data, place)) is not None:
                yield place, begin

    def _secrets(self, data: bytes, start: int, stop: int) -> Iterator[Found]:
        for kind in secrets_in(data, start, stop):
            if kind not in self._found:
                self._found.add(kind)
                yield Found(path=self._path, inside=self._inside, kind=kind)

    def _expand(self, data: bytes, begin: Beginning, *, certain: bool) -> Iterator[Found | NotSearched]:
        """Expands what is there of a compressed stream; it goes on with the next block if it has not ended."""
        stream = Stream(path=self._path, allowance=self._allowance, inside=self._within(begin.name))
        self._compressed = compressed = _Compressed(begin.decoder, stream, allowance=self._allowance, certain=certain)
        # Most members of an archive are small: what follows is not copied for each of them.
        left, size = memoryview(data)[begin.body :], _FIRST_BYTES
        while left and not compressed.ended:
            block, left, size = left[:size], left[size:], 2 * size
            yield from self._feed_compressed(compressed, block, end=len(data) - len(left))

    def _feed_compressed(self, compressed: "_Compressed", block: memoryview, *, end: int) -> Iterator[Found | NotSearched]:
        yield from compressed.feed(block)
        if compressed.ended:
            self._compressed = None
            if compressed.certain:
                self._next = end - compressed.left


class _Compressed:
    """A compressed stream in another stream, which ends where it says.

    Args:
        decoder: Expands it.
        stream: Takes what comes out.
        allowance: Of the whole file.
        certain: Whether it is one for sure, though nothing came out yet: many a program knows how archives begin.
    """

    def __init__(self, decoder: Decoder, stream: Stream, *, allowance: Allowance, certain: bool) -> None:
        self._decoder = decoder
        self.certain = certain
        self._stream = stream
        self._allowance = allowance
        self.ended = False
        self.left = 0  # bytes of the last block behind its end

    def feed(self, block: memoryview) -> Iterator[Found | NotSearched]:
        try:
            for piece in expanded(self._decoder, block, most=BLOCK_BYTES):
                self.certain = True
                if not self._allowance.take(len(piece)):
                    yield from self._end(len(block), "it expands to more than is reasonable")
                    return
                yield from self._stream.feed(piece)
        except (zlib.error, lzma.LZMAError, OSError):  # bz2 has no error of its own
            yield from self._end(len(block), "it is damaged, or cannot be expanded here")
        else:
            if self._decoder.eof:
                yield from self._end(len(self._decoder.unused_data))

    def finish(self) -> Iterator[Found | NotSearched]:
        yield from self._end(0, "it ends early")

    def _end(self, left: int, reason: str | None = None) -> Iterator[Found | NotSearched]:
        self.ended, self.left = True, left
        yield from self._stream.finish()
        self._allowance.close()
        if reason is not None and self.certain:
            yield self._stream.not_searched(reason)

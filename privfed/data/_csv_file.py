"""A comma-separated text file as bytes: opened, unpacked, and looked through once before anything parses it.

Parsers forgive: they stop a number at a NUL byte, drop surplus cells, fill up missing ones, and read a line without an end
into memory. A survey of the bytes, in blocks, refuses all of that by line number. No message quotes what a line holds.
"""

import codecs
import csv
import gzip
import io
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from privfed.errors import UnsupportedDataError

LINE_BYTES = 1 << 16
"""Longest line that is read. PaySim's have about a hundred bytes."""

_BLOCK_BYTES = 1 << 20

_GZIP = b"\x1f\x8b"

# First bytes of what people have instead of a .csv.
_FORMATS = {
    b"PK\x03\x04": "a zip archive or an .xlsx workbook; unpack it, or save the sheet as comma-separated UTF-8",
    b"\xd0\xcf\x11\xe0": "an .xls workbook; save the sheet as comma-separated UTF-8",
    b"PAR1": "a Parquet file; convert it to comma-separated UTF-8",
    b"ARROW1": "an Arrow file; convert it to comma-separated UTF-8",
    b"SQLite format 3\0": "an SQLite database; export the table as comma-separated UTF-8",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"BZh": "packed with bzip2; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "packed with xz; unpack it, or pack it with gzip",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it, or pack it with gzip",
    b"\xff\xfe": "not text in UTF-8 but in UTF-16; save it as comma-separated UTF-8",
    b"\xfe\xff": "not text in UTF-8 but in UTF-16; save it as comma-separated UTF-8",
}


def is_gzip(path: Path) -> bool:
    """Whether the file is packed, by its first bytes and whatever its name is.

    Raises:
        OSError: If it cannot be opened.
        UnsupportedDataError: If it is a pipe or a device, or in a format that holds no text.
    """
    if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait; a directory is an OSError
        raise UnsupportedDataError(f"{path.name} is a pipe or a device, and it is read more than once; nothing was loaded; make it a file")
    with path.open("rb") as file:
        start = file.read(16)
    for magic, what in _FORMATS.items():
        if start.startswith(magic):
            raise UnsupportedDataError(f"{path.name} is {what.replace(';', '; nothing was loaded;', 1)}")
    return start.startswith(_GZIP)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The unpacked bytes of the file; a damaged archive is one error. Raises as `is_gzip` does."""
    opener = gzip.open if is_gzip(path) else open
    try:
        with opener(path, "rb") as file:
            yield file  # pyright: ignore[reportReturnType] -- a GzipFile reads like any
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UnsupportedDataError(f"{path.name} is a damaged or cut-off gzip file; nothing was loaded; fetch it anew") from None


def header(path: Path) -> list[str]:
    """The names in the first line.

    Raises:
        UnsupportedDataError: If there is none, or it is no comma-separated UTF-8.
    """
    with opened(path) as file:
        line = file.readline(LINE_BYTES + 1)
    if b"\0" in line or b"\r" in line.removesuffix(b"\r\n"):
        _refuse_byte(path, 1)
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse_encoding(path, 1)
    if len(line) > LINE_BYTES:
        _refuse_length(path, 1)
    names = next(csv.reader([text]), [])
    if not names:
        raise UnsupportedDataError(f"{path.name} is empty or starts with an empty line; nothing was loaded; expected a header line")
    if text.startswith("sep="):
        raise UnsupportedDataError(f"{path.name} starts with a spreadsheet's sep= line; nothing was loaded; delete that line")
    if len(names) == 1:
        separator = next((character for character in ";\t|" if character in text), None)
        if separator:
            raise UnsupportedDataError(
                f"{path.name} is separated by {separator!r} and not by commas; nothing was loaded; save it as comma-separated UTF-8, "
                "with a point in numbers"
            )
    return names


def survey(path: Path) -> bool:
    """Looks at every byte, in bounded memory, and tells whether all lines have as many commas as the first, and no quotes.

    Returns:
        False if lines have to be counted by somebody who understands quotes. Empty lines do not matter.

    Raises:
        UnsupportedDataError: At a line that is too long, holds a NUL byte, ends in a lone carriage return, or is no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, length, commas, expected, regular = 0, 0, 0, -1, True
    for block in _blocks(path):
        bare = block.replace(b"\r\n", b"\n") if b"\r" in block else block
        if (odd := max(bare.find(b"\0"), bare.find(b"\r"))) >= 0:
            _refuse_byte(path, lines + 1 + bare.count(b"\n", 0, odd))
        if not block.isascii() or decoder.getstate()[0]:
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                _refuse_encoding(path, lines + 1 + block.count(b"\n", 0, max(error.start - pending, 0)))
        data = np.frombuffer(block, dtype=np.uint8)
        ends, cells = np.flatnonzero(data == ord("\n")), np.flatnonzero(data == ord(","))
        lengths = np.diff(ends, prepend=-1 - length)
        if (long := np.flatnonzero(lengths > LINE_BYTES)).size:
            _refuse_length(path, lines + 1 + int(long[0]))
        before = np.searchsorted(cells, ends)
        empty = lengths == 1 + (data[ends - 1] == ord("\r"))  # no block ends in a carriage return, should the index be -1
        counts = np.diff(before, prepend=-commas)[~empty]
        if ends.size:
            length, commas = len(block) - 1 - int(ends[-1]), len(cells) - int(before[-1])
        else:
            length, commas = length + len(block), commas + len(cells)
        if length > LINE_BYTES:
            _refuse_length(path, lines + 1 + len(ends))
        if counts.size:
            expected = int(counts[0]) if expected < 0 else expected
            regular = regular and bool((counts == expected).all())
        regular = regular and b'"' not in block
        lines += len(ends)
    return regular


def rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Every row with the number of its last line, read slowly and strictly; empty lines are left out.

    Raises:
        UnsupportedDataError: Where a quote is not closed, or `opened` refuses.
    """
    last = 1
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            for row in reader:
                last = reader.line_num + 1
                if len(row) > 1 or (row and row[0].strip()):
                    yield reader.line_num, row
        except csv.Error:
            raise UnsupportedDataError(f"the quotes of line {last} of {path.name} do not match; nothing was loaded") from None


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in blocks: no end of line is torn apart, and the last line has one."""
    with opened(path) as file:
        rest = b""
        while chunk := file.read(_BLOCK_BYTES):
            block = rest + chunk
            rest = block[-1:] if block.endswith(b"\r") else b""
            yield block[: len(block) - len(rest)]
        yield rest + b"\n"


def _refuse_byte(path: Path, line: int) -> NoReturn:
    raise UnsupportedDataError(
        f"line {line} of {path.name} holds a byte that text has not (NUL, or a carriage return in the line): it is another kind of "
        "file or a damaged one; nothing was loaded; save it as comma-separated UTF-8"
    )


def _refuse_encoding(path: Path, line: int) -> NoReturn:
    raise UnsupportedDataError(
        f"line {line} of {path.name} is not text in UTF-8; nothing was loaded; save it as comma-separated UTF-8"
    ) from None


def _refuse_length(path: Path, line: int) -> NoReturn:
    raise UnsupportedDataError(
        f"line {line} of {path.name} is longer than {LINE_BYTES:,} bytes, or a quote in it is not closed; nothing was loaded; "
        "expected one transaction per line"
    )

"""Looks for byte patterns in the memory of another process (Linux), to test that a server holds no key."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 24


def _regions(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        # Device and kernel pages ([vvar], [vsyscall]) cannot be read through mem; they hold no data of the process.
        if permissions.startswith("r") and not line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            start, stop = span.split("-")
            yield int(start, 16), int(stop, 16)


def patterns_in_process(pid: int, patterns: Sequence[bytes]) -> tuple[bool, ...]:
    """Says for each pattern whether it stands in the readable memory of a process.

    Args:
        pid: A process that this one may trace (its child, or any process for root).
        patterns: Byte strings of at least 16 bytes; shorter ones occur by chance.

    Returns:
        One flag per pattern.

    Raises:
        ValueError: If there is no pattern, or one is shorter than 16 bytes.
        NotImplementedError: Where there is no /proc: nothing was looked at, so nothing is known.
        PermissionError: If the process may not be traced.
        RuntimeError: If nothing could be read, which must not pass for "not found".
    """
    if not patterns or any(len(pattern) < 16 for pattern in patterns):
        raise ValueError("expected at least one pattern, each of at least 16 bytes")
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("reading another process's memory is implemented for Linux only; nothing was looked at")
    overlap = max(len(pattern) for pattern in patterns) - 1
    found = [False] * len(patterns)
    read = 0
    descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for start, stop in _regions(pid):
            position = start
            while position < stop:
                try:
                    block = os.pread(descriptor, min(_CHUNK_BYTES + overlap, stop - position), position)
                except OSError:  # the process unmapped the region meanwhile; what it mapped instead is read as its own region
                    break
                if not block:
                    break
                read += len(block)
                found = [known or pattern in block for known, pattern in zip(found, patterns, strict=True)]
                position += max(1, min(_CHUNK_BYTES, len(block)))
    finally:
        os.close(descriptor)
    if not read:
        raise RuntimeError(f"no memory of process {pid} could be read; nothing is known about it")
    return tuple(found)

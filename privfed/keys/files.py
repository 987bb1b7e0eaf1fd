"""Files with secrets: readable by their owner alone, written whole or not at all."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def read_private(path: Path, *, most: int) -> bytes:
    """Content of a file that nobody but its owner may touch, cut off after `most` bytes.

    Raises:
        PermissionError: If others than the owner may read or write the file.
        ValueError: If it is no regular file.
    """
    return _read(path, most=most, forbidden=0o077, demand="readable by its owner only; run chmod 600 on it")


def read_pinned(path: Path, *, most: int) -> bytes:
    """Content of a public file that nobody but its owner may change, cut off after `most` bytes.

    Raises:
        PermissionError: If others than the owner may write the file.
        ValueError: If it is no regular file.
    """
    return _read(path, most=most, forbidden=0o022, demand="writable by its owner only; run chmod 644 on it")


def _read(path: Path, *, most: int, forbidden: int, demand: str) -> bytes:
    # Without O_NONBLOCK, a named pipe in place of the file would hang its reader.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        # The mode of the open file, not of the path: the file at the path could be exchanged in between.
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"expected {path.name} to be a file, got something else")
        if stat.S_IMODE(mode) & forbidden:
            raise PermissionError(f"expected {path.name} to be {demand}")
        return file.read(most)


def create(path: Path, data: bytes) -> None:
    """Writes a new file of mode 0600, synchronised before this returns.

    Raises:
        FileExistsError: If there is one already; it stays as it is.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _synchronise(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Puts a file of mode 0600 in the place of another one, synchronised before this returns.

    After a crash there is the old file or the new one, never a mixture. The blocks of the old one are free, not overwritten.
    """
    target = path.resolve()  # a link that was replaced would leave the old content where it points
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _synchronise(target.parent)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Keeps other processes from replacing a file meanwhile: a lock on its folder, because the file itself is exchanged."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _synchronise(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A party's own files: readable by their owner alone, written whole or not at all, in folders that one process at a time uses."""

import fcntl
import os
import stat
import tempfile
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from privfed.errors import FolderInUseError

_UNFINISHED = ".unfinished-"
_LOCK = ".lock"


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


def create(path: Path, data: bytes | memoryview) -> None:
    """Writes a new file of mode 0600, whole or not at all, synchronised before this returns.

    Raises:
        FileExistsError: If there is one already; it stays as it is.
    """
    with _unfinished(path.parent) as (file, temporary):
        file.write(data)
        _synchronise_file(file)
        os.link(temporary, path)  # fails where a rename would replace
        os.unlink(temporary)
    synchronise_folder(path.parent)


@contextmanager
def replacement(path: Path) -> Generator[IO[bytes]]:
    """A file of mode 0600 to write to, which takes the place of another one when the block ends; synchronised by then.

    After a crash there is the old file or the new one, never a mixture. The blocks of the old one are free, not overwritten.
    """
    target = path.resolve()  # a link that was replaced would leave the old content where it points
    with _unfinished(target.parent) as (file, temporary):
        yield file
        _synchronise_file(file)
        os.replace(temporary, target)
    synchronise_folder(target.parent)


@contextmanager
def replacements(folder: Path) -> Generator[Path]:
    """An empty folder whose files go to another one when the block ends without an error, in place of those of the same names there.

    Until then nothing in the other one changes. A crash while they go can leave old and new files beside each other.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as name:
        yield Path(name)
        for path in Path(name).iterdir():
            os.replace(path, folder / path.name)
    synchronise_folder(folder)


def replace(path: Path, data: bytes) -> None:
    """As `replacement`, with all that is to be written."""
    with replacement(path) as file:
        file.write(data)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Keeps other processes from replacing a file meanwhile: a lock on its folder, because the file itself is exchanged."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder of mode 0700, and the folders above it that are missing. One that is there stays as it is."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    if not path.is_dir():
        path.mkdir(mode=0o700, exist_ok=True)
        synchronise_folder(path.parent)


def sweep(folder: Path) -> None:
    """Removes what a crash left unfinished in a folder. Only for who holds it: see `FolderLock`."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        path.unlink()


class FolderLock:
    """Holds a folder against other processes and other objects, until `release`, or until the object or the process ends.

    Args:
        folder: It must exist. A file `.lock` is made in it, and stays.

    Raises:
        FolderInUseError: If it is held already.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.samestat(os.fstat(descriptor), os.stat(folder / _LOCK))  # the file was exchanged meanwhile
        except (BlockingIOError, FileNotFoundError):
            taken = True
        if taken:
            os.close(descriptor)
            raise FolderInUseError(
                f"the folder {folder.name!r} is in use by another process, or by another object in this one; nothing was done; wait until "
                "that has ended, or take another folder"
            )
        self._folder, self._descriptor, self._process = folder, descriptor, os.getpid()
        self.release = weakref.finalize(self, _release, descriptor, self._process)

    def check(self) -> None:
        """Refuses to work on in a folder that is not held any more.

        Raises:
            FolderInUseError: If it was released, or this is a forked child of the process that holds it.
        """
        if not self.release.alive or os.getpid() != self._process or not self._stands():
            raise FolderInUseError(
                f"the folder {self._folder.name!r} is not held here any more: it was let go, or belongs to the process that opened "
                "it; nothing was done; open it again"
            )

    def _stands(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._folder / _LOCK))
        except FileNotFoundError:
            return False


def _release(descriptor: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the lock in common with its parent, and must leave it alone
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_bookkeeping(path: Path) -> bool:
    """Whether a file is a lock, or what a crash left unfinished."""
    return path.name == _LOCK or path.name.startswith(_UNFINISHED)


@contextmanager
def _unfinished(folder: Path) -> Generator[tuple[IO[bytes], str]]:
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, temporary
    except BaseException:
        os.unlink(temporary)
        raise


def _synchronise_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def synchronise_folder(folder: Path) -> None:
    """Returns when the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

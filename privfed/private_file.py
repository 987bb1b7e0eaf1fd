"""Files with secrets: readable by their owner only, and never written over another one."""

import os
import stat
from pathlib import Path


def read_private(path: Path, *, most: int) -> bytes:
    """The first `most` bytes of a file with a secret.

    Raises:
        PermissionError: If others than the owner may read the file.
    """
    with path.open("rb") as file:
        # The mode of the open file, not of the path: the file at the path could be exchanged in between.
        if os.name == "posix" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise PermissionError(f"expected {path.name} to be readable by its owner only; run chmod 600 on it")
        return file.read(most)


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file with a secret, mode 0600, synchronised before this returns.

    Raises:
        FileExistsError: If there is one at that path.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

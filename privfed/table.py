"""A party's durable memory in one SQLite file, which no crash leaves half-written."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from privfed.errors import DamagedFileError
from privfed.files import create

# What the file cannot be blamed for.
_PASSING: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
)


class Table:
    """Opens the file, or makes it with mode 0600.

    Args:
        path: The file, of this party and no other.
        schema: Statement that makes the table if it is not there.

    Raises:
        PermissionError: If others than the owner may write the file.
        DamagedFileError: If it holds something else.
    """

    def __init__(self, path: Path, *, schema: str) -> None:
        if not path.exists():
            with suppress(FileExistsError):  # another thread was faster
                create(path, _empty(schema))
        with path.open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o022:
                raise PermissionError(f"expected {path.name} to be writable by its owner only; run chmod 600 on it")
            if not file.read(1):
                raise DamagedFileError(f"{path.name} is empty, and was not when it was made; nothing was done; put it back as it was")
        self._path = path
        with self.transaction() as connection:
            connection.execute(schema)

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """A connection per transaction: threads and processes may share the file, and nothing is left open.

        Raises:
            DamagedFileError: If the file is gone, or not what it was; nothing was written.
            OSError: If it cannot be written now; nothing was written.
        """
        try:
            # mode=rw: a file that was taken away must not come back empty.
            address = f"{self._path.resolve().as_uri()}?mode=rw"
            with closing(sqlite3.connect(address, uri=True, isolation_level=None, timeout=60)) as connection:
                connection.execute("PRAGMA synchronous = EXTRA")  # also survives a power cut right after the commit
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    if connection.in_transaction:  # a full disk ends it by itself
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in _PASSING:
                raise OSError(f"{self._path.name} cannot be written now ({error.sqlite_errorname}); nothing was done") from error
            raise DamagedFileError(
                f"{self._path.name} is missing, damaged, or was written by something else; nothing was done; put it back as it was"
            ) from error


def _empty(schema: str) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(schema)
        return connection.serialize()

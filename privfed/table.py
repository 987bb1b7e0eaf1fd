"""A party's durable memory in one SQLite file, which no crash leaves half-written, and which no damage changes unnoticed."""

import hashlib
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
_SEAL: Final = "CREATE TABLE seal (digest BLOB NOT NULL)"


class Table:
    """Opens the file, or makes it with mode 0600.

    A digest of all rows stands in the file, and is compared at the start of every transaction. It is no signature: it finds damage
    and the file of another table, not somebody who may write the file and knows how.

    Args:
        path: The file, of this party and no other.
        name: Name of the table.
        columns: Its columns, as SQL.

    Raises:
        PermissionError: If others than the owner may write the file.
        DamagedFileError: If it holds something else, or its rows are not what was written; it stays as it is.
    """

    def __init__(self, path: Path, *, name: str, columns: str) -> None:
        self._path, self._name = path, name
        self._schema = f"CREATE TABLE {name} ({columns})"
        if not path.exists():
            with suppress(FileExistsError):  # another thread was faster
                create(path, self._empty())
        with path.open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o022:
                raise PermissionError(f"expected {path.name} to be writable by its owner only; run chmod 600 on it")
            if not file.read(1):
                raise self._damaged()
        with self.transaction() as connection:
            if connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                raise self._damaged()

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
                    self._check(connection)
                    before = connection.total_changes
                    yield connection
                    if connection.total_changes != before:
                        connection.execute("UPDATE seal SET digest = ?", (self._digest(connection),))
                except BaseException:
                    if connection.in_transaction:  # a full disk ends it by itself
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # Errors of the Python side have no code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                raise OSError(f"{self._path.name} cannot be written now; nothing was done") from error
            raise self._damaged() from error

    def _check(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
        if found != [(self._schema,), (_SEAL,)]:
            raise self._damaged()
        if connection.execute("SELECT digest FROM seal").fetchall() != [(self._digest(connection),)]:
            raise self._damaged()

    def _digest(self, connection: sqlite3.Connection) -> bytes:
        state = hashlib.sha256(b"privfed table v1" + self._schema.encode())
        for row in connection.execute(f"SELECT rowid, * FROM {self._name} ORDER BY rowid"):  # noqa: S608 # a name of this program
            for value in row:
                data = value if isinstance(value, bytes) else str(value).encode()
                state.update(type(value).__name__.encode() + len(data).to_bytes(8, "big") + data)
        return state.digest()

    def _empty(self) -> bytes:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            connection.execute(self._schema)
            connection.execute(_SEAL)
            connection.execute("INSERT INTO seal VALUES (?)", (self._digest(connection),))
            return connection.serialize()

    def _damaged(self) -> DamagedFileError:
        return DamagedFileError(
            f"{self._path.name} is missing, damaged, or was written by something else; nothing was done; put it back as it was"
        )

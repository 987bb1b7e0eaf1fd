"""An append-only file of rows, each bound to all earlier ones by a hash, that one object at a time may hold.

Two files: a SQLite database with the rows, and next to it `<name>.head`, a few bytes that say how many rows there are and
what the last hash is. The head catches what a chain alone cannot: a database that lost its last rows, or that was replaced
by an older copy of itself. The same file carries the lock.

A row is written before it is counted, and reported as written after. So the last row may be one that is not counted, after a crash; nobody
was told of it, and if it is lost, nobody notices.

What no local file can show: that *both* were replaced by copies which belong together, or that somebody who may write both
computed a whole new chain. Only a party that remembers `head` from outside notices that. It can be shown, without the content
of any row, that a later head extends an earlier one: a head is the hash of the head before it and of the *hash* of a row, and
every row holds a random number, so that its hash tells nothing.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from privfed.errors import LedgerError, LedgerLockedError, LedgerTamperedError

_TAG: Final = b"privfed ledger v1"
_HASH_BYTES: Final = 32
START: Final = bytes(_HASH_BYTES)  # the head before the first row
_SLOT_BYTES: Final = 8 + 2 * _HASH_BYTES  # number of rows, hash of the last one, checksum
_NONCE_BYTES: Final = 16
_DATABASE: Final = b"SQLite format 3\0"  # how every one begins


def extend(head: bytes, links: Iterable[bytes]) -> bytes:
    """The head after more rows.

    Args:
        head: Of the rows before them, 32 bytes; zeros if there were none.
        links: `link` of each of them, 32 bytes, in order.
    """
    for link_of_row in links:
        head = hashlib.sha256(_TAG + head + link_of_row).digest()
    return head


def link(body: str) -> bytes:
    """What a row adds to the chain, 32 bytes, from which its content cannot be guessed."""
    return hashlib.sha256(_TAG + b" row" + body.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: its number from 0, its content as canonical JSON, and the hash over it and all earlier rows."""

    number: int
    body: str
    digest: bytes


class Chain:
    """The rows of one file, locked and verified when opened. Not for use in a forked child.

    Args:
        path: The database. Made with mode 0600 if `create` is set and there is none. Beside a file that holds something else, nothing
            is made.
        create: Whether a missing file is made, or refused.
        read_only: Whether rows can only be read. A copy is opened, and the files stay as they are, to the byte.

    Raises:
        FileNotFoundError: If there is no such file and `create` is not set, or no such directory.
        LedgerLockedError: If another process, or another object in this one, holds the file.
        LedgerTamperedError: If the rows are not what was once written.
        LedgerError: If others than the owner may access the file, or the file system cannot write durably.
    """

    def __init__(self, path: Path, *, create: bool, read_only: bool = False) -> None:
        resolved = path.resolve()  # two names of one file share one lock
        if not create and not resolved.exists():
            raise FileNotFoundError(f"expected a ledger at {path}, found none")
        if not resolved.parent.is_dir():
            raise FileNotFoundError(f"expected a folder {path.parent} to make the ledger in, found none; nothing was made")
        head = resolved.with_name(resolved.name + ".head")
        self._name, self._path = path.name, resolved
        self._process = os.getpid()
        self._read_only = read_only
        self._check_files(resolved, head, create=create)
        with ExitStack() as resources:
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            self._head = resources.enter_context(os.fdopen(os.open(head, flags, 0o600), "rb" if read_only else "r+b", buffering=0))
            self._lock()
            if not read_only:
                os.close(os.open(resolved, os.O_RDWR | os.O_CREAT, 0o600))
            if any(stat.S_IMODE(file.stat().st_mode) & 0o077 for file in (resolved, head)):
                raise LedgerError(
                    f"expected {path.name} and its .head file to belong to the owner only; nothing was opened; run chmod 600 on both"
                )
            if read_only:
                # Even to read a database after a crash, SQLite writes to it and to its log.
                resolved = _copy(resolved, Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="privfed-ledger-"))))
            self._connection = resources.enter_context(closing(self._connect(resolved)))
            self._rows = self._read()
            self._counted = self._read_head()[0]
            if not read_only and not self._rows:
                self._write_head()  # that there is none: else nobody could tell a slot that was wiped from one that was never written
            if not read_only and self._counted < len(self._rows):
                self._write_head()  # else a second crash at the same place would leave it two rows behind, as if rows had been added
            self._resources = resources.pop_all()
        self._closed = False

    @property
    def path(self) -> Path:
        """The file, without links in its name."""
        return self._path

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, oldest first."""
        return tuple(self._rows)

    @property
    def head(self) -> bytes:
        """Hash over all rows, 32 bytes; zeros if there is none."""
        return self.head_of(len(self._rows))

    def head_of(self, rows: int) -> bytes:
        """Hash over the first so many rows."""
        return self._rows[rows - 1].digest if rows else START

    def links(self, start: int) -> tuple[bytes, ...]:
        """What each row from number `start` on adds to the chain."""
        return tuple(link(row.body) for row in self._rows[start:])

    def append(self, body: Mapping[str, object]) -> Row:
        """Writes one more row, with a random number in it. It is on the disk when this returns.

        Raises:
            LedgerError: If the file is closed, or writing failed; then it closes itself, and the row may have been written.
        """
        if self._closed:
            raise LedgerError("the ledger is closed; nothing was written")
        if self._read_only:
            raise LedgerError("the ledger was opened to be read; nothing was written or charged; open it with Ledger.open or Ledger.reopen")
        if os.getpid() != self._process:
            raise LedgerLockedError("the ledger belongs to the process that forked this one; nothing was written; open it in one process")
        content = {**body, "nonce": os.urandom(_NONCE_BYTES).hex()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        row = Row(number=len(self._rows), body=text, digest=extend(self.head, (link(text),)))
        try:
            if self._counted < len(self._rows):
                self._write_head()  # an interrupt arrived after the row before; the head is never two rows behind
            self._connection.execute("INSERT INTO rows VALUES (?, ?, ?)", (row.number, row.body, row.digest))
            self._rows.append(row)
            self._write_head()
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise LedgerError(
                f"writing to the ledger failed ({type(error).__name__}) and it was closed; free space or repair the disk and "
                "open it again: whatever was written counts as spent"
            ) from error
        return row

    def verify(self) -> None:
        """Reads everything again and compares it.

        Raises:
            LedgerTamperedError: If the files do not hold what this object read and wrote.
            LedgerError: If the file is closed.
        """
        if self._closed:
            raise LedgerError("the ledger is closed; open it again to verify it")
        if self._read() != self._rows:
            self._tampered("rows changed while it was open")

    def close(self) -> None:
        """Releases the file. Closing twice does nothing."""
        self._closed = True
        self._resources.close()

    def _check_files(self, path: Path, head: Path, *, create: bool) -> None:
        """Looks before anything is made: a file that is no ledger, or lost its head, gets none."""
        if not path.exists():
            return
        with path.open("rb") as file:
            start = file.read(len(_DATABASE))
        if start != _DATABASE and (start or not (create or head.exists())):
            if not head.exists():
                raise LedgerTamperedError(
                    f"{self._name} is no ledger: it is not a database, and no {self._name}.head lies beside it; nothing was opened or "
                    "spent; name the file that was made as a ledger; if this is the one, restore it, its -wal file and its .head file"
                )
            self._tampered("it is not a database, or its first bytes are damaged")
        if start and not head.exists():
            self._headless()

    def _lock(self) -> None:
        # It ends with the process, however that ends. SQLite's own lock is not enough: whatever in this process opens and closes
        # the database, even to read it, drops a POSIX lock.
        try:
            fcntl.flock(self._head, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._locked() from None

    def _connect(self, path: Path) -> sqlite3.Connection:
        with ExitStack() as resources:
            connection = resources.enter_context(closing(sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)))
            try:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # keeps other SQLite programs out, too
                mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("BEGIN IMMEDIATE")
                if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, body TEXT NOT NULL, digest BLOB NOT NULL)")
                    connection.execute("CREATE TRIGGER no_update BEFORE UPDATE ON rows BEGIN SELECT RAISE(ABORT, 'append-only'); END")
                    connection.execute("CREATE TRIGGER no_delete BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'append-only'); END")
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise self._locked() from None
                raise LedgerError(f"{self._name} cannot be opened for writing ({error.sqlite_errorname}); nothing was opened") from error
            except sqlite3.DatabaseError:
                self._tampered("it is not a database")
            if mode != ("wal",):
                raise LedgerError(f"SQLite cannot write ahead on the file system of {self._name}; nothing was opened; use a local disk")
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # else a power failure could lose the directory entries of new files
            finally:
                os.close(descriptor)
            resources.pop_all()
        return connection

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        previous = START
        try:
            self._connection.execute("PRAGMA shrink_memory")  # so that a second reading comes from the disk, not from the cache
            for number, body, digest in self._connection.execute("SELECT number, body, digest FROM rows ORDER BY number"):
                if number != len(rows) or not isinstance(body, str) or digest != extend(previous, (link(body),)):
                    self._tampered(f"row {len(rows)} is not what was written")
                rows.append(Row(number=number, body=body, digest=digest))
                previous = digest
        except sqlite3.DatabaseError:
            self._tampered("the database is damaged")
        # A crash between the two writes leaves the head one row behind, never more and never ahead.
        count, digest, torn = self._read_head()
        if not count and len(rows) > 1:
            self._headless()
        if not count <= len(rows) <= count + 1:
            self._tampered(f"it has {len(rows)} rows where its head file counts {count}")
        if torn and len(rows) <= count:
            self._tampered("its head file is damaged, and the row is missing whose count was written where it is")
        if digest != (rows[count - 1].digest if count else START):
            self._tampered("its head file belongs to other rows")
        return rows

    def _write_head(self) -> None:
        # Two slots in turn: a torn write damages one and leaves the other, which is one row behind.
        content = len(self._rows).to_bytes(8, "big") + self.head
        os.pwrite(self._head.fileno(), content + hashlib.sha256(_TAG + content).digest(), len(self._rows) % 2 * _SLOT_BYTES)
        os.fsync(self._head.fileno())
        self._counted = len(self._rows)

    def _read_head(self) -> tuple[int, bytes, bool]:
        """How many rows there are, the hash of the last one, and whether the slot of the next row is torn: then there is that row."""
        content = os.pread(self._head.fileno(), 2 * _SLOT_BYTES, 0)
        slots = (content[:_SLOT_BYTES], content[_SLOT_BYTES:])
        found: list[tuple[int, bytes]] = []
        for place, slot in enumerate(slots):
            count = int.from_bytes(slot[:8], "big")
            if count % 2 == place and hashlib.sha256(_TAG + slot[:-_HASH_BYTES]).digest() == slot[-_HASH_BYTES:]:
                found.append((count, slot[8:-_HASH_BYTES]))
        count, digest = max(found, default=(0, START))
        # The other slot holds the row before, which may be no row; before the first, there is nothing in it.
        torn = len(found) < 2 if count else any(slots[1])
        return count, digest, torn

    def _locked(self) -> LedgerLockedError:
        return LedgerLockedError(
            f"{self._name} is open in another process, or already in this one; nothing was opened; close it there, or wait until "
            "that process ends: two that spend at once would spend too much"
        )

    def _headless(self) -> NoReturn:
        raise LedgerTamperedError(
            f"the head file {self._name}.head is missing or damaged, so nobody could tell whether rows were cut off; nothing was opened or "
            f"spent; restore it with {self._name}, and its -wal file if there is one, from one copy, or treat the budget as used up"
        )

    def _tampered(self, reason: str) -> NoReturn:
        raise LedgerTamperedError(
            f"{self._name} is not the ledger that was written: {reason}; nothing was opened or spent; restore the file, its -wal "
            "file and its .head file together, or treat the budget as used up"
        )


def _copy(path: Path, folder: Path) -> Path:
    """A copy of a database and of its log, if it has one. The folder is the owner's alone."""
    for suffix in ("", "-wal"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            shutil.copyfile(file, folder / file.name)
    return folder / path.name

"""Ledgers that cannot be set back: in every round each party shows its ledger's head, and the others remember and sign it.

A copy of all files of a ledger from last week belongs together and holds; nothing at the owner can tell. But its head does not
extend the one that the peers remember, and they refuse it in the next round. They learn how many rows there are, and nothing
about what is in them. It takes one peer whose own memory was not set back.

A round goes: reserve, `state_head`, upload; every participant answers all statements of the round with one signature
(`HeadMemory.countersign`), and every owner keeps the answers in its ledger (`record`).
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from privfed.dp._chain import extend
from privfed.dp.entries import Party, Signer
from privfed.dp.ledger import Ledger
from privfed.errors import InvalidMessageError, LedgerError, LedgerTamperedError
from privfed.table import Table

CONTEXT_BYTES: Final = 32
_HASH_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_NUMBER_BYTES: Final = 8
_MOST_LINKS: Final = 1_000_000
# No ledger has so many rows, and what remembers their number takes twice as many.
_MOST_ROWS: Final = 1 << 62
_TAG: Final = b"privfed ledger head v2"
_COUNTERSIGN_TAG: Final = b"privfed ledger heads countersigned v2"

_COLUMNS: Final = """
    owner TEXT NOT NULL,
    population TEXT NOT NULL,
    rows INTEGER NOT NULL,
    head BLOB NOT NULL,
    PRIMARY KEY (owner, population)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStatement:
    """A party's signed word on how its ledger grew. All fields are public.

    Args:
        owner: Name of the party.
        population: Declared name of the data set.
        context: What it was stated for: 32 bytes, for example `RoundContext.digest`.
        start: Number of rows from which it shows the growth.
        start_head: Head at that point.
        links: What every row since then added, see `Ledger.links`.
        data: What `state_head` returned.
    """

    owner: str
    population: str
    context: bytes
    start: int
    start_head: bytes
    links: tuple[bytes, ...]
    data: bytes

    @property
    def rows(self) -> int:
        """Number of rows now."""
        return self.start + len(self.links)

    @property
    def head(self) -> bytes:
        """Head now."""
        return extend(self.start_head, self.links)

    def head_of(self, rows: int) -> bytes:
        """Head when there were so many rows, from `start` to `rows`."""
        return extend(self.start_head, self.links[: rows - self.start])


def countersigned(context: bytes, hashes: Sequence[bytes]) -> bytes:
    """What a peer signs: that it saw these heads, for this.

    Args:
        context: What they were stated for, 32 bytes.
        hashes: `hashes_of` the statements.
    """
    return _COUNTERSIGN_TAG + context + b"".join(hashes)


def hashes_of(statements: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """SHA-256 of each statement and whose it is, 32 bytes, in their order.

    Args:
        statements: What `state_head` returned, by owner, in the order of the round's participants.
    """
    return tuple(sha256(_text(owner) + statement).digest() for owner, statement in statements.items())


def state_head(ledger: Ledger, signer: Signer, *, context: bytes, peers: tuple[str, ...]) -> bytes:
    """The signed statement of a ledger's head, for its owner's peers.

    Args:
        ledger: The owner's.
        signer: The owner's key.
        context: What it is stated for, 32 bytes; the same at every party.
        peers: Names of those that will read it, at least one. It shows the growth since the oldest head that one of them
            countersigned, and everything to one that never did: a peer has seen at least what its countersignature says.

    Raises:
        ValueError: If the context is not 32 bytes, or there is no peer.
    """
    if len(context) != CONTEXT_BYTES or not peers:
        raise ValueError(f"expected a context of {CONTEXT_BYTES} bytes and at least one peer, got {len(context)} and {len(peers)}")
    start = min(ledger.countersigned(peer) for peer in peers)
    shown = _number(start) + ledger.head_of(start) + b"".join(ledger.links(start))
    return shown + signer.sign(_stated(signer.name, ledger.population, context, shown))


def read_statement(data: bytes, *, owner: Party, population: str, context: bytes) -> HeadStatement:
    """The statement in bytes from a peer. The signature is verified before anything is parsed.

    Args:
        data: What the owner's `state_head` returned: number of rows and head from which it shows the growth, what every row since then
            added, and a signature under these, its name, the population and the context.
        owner: The pinned identity of the ledger's owner.
        population: The data set that it takes part with, as it was agreed.
        context: What the statement must be for, 32 bytes.

    Raises:
        InvalidMessageError: If the owner did not sign it, of this population and for this.
    """
    shown, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    links, rest = divmod(len(shown) - _NUMBER_BYTES - _HASH_BYTES, _HASH_BYTES)
    if not 0 <= links <= _MOST_LINKS or rest:
        raise InvalidMessageError
    owner.verify(_stated(owner.name, population, context, shown), signature)
    start = int.from_bytes(shown[:_NUMBER_BYTES], "big")
    if start + links > _MOST_ROWS:
        raise InvalidMessageError
    start_head, *added = (shown[place : place + _HASH_BYTES] for place in range(_NUMBER_BYTES, len(shown), _HASH_BYTES))
    return HeadStatement(
        owner=owner.name,
        population=population,
        context=context,
        start=start,
        start_head=start_head,
        links=tuple(added),
        data=data,
    )


def _stated(owner: str, population: str, context: bytes, shown: bytes) -> bytes:
    return _TAG + _text(owner) + _text(population) + context + shown


class HeadMemory:
    """What a party remembers of the ledgers of others, durably. It holds no data and nothing about any budget.

    Args:
        path: SQLite file of this party and no other, made with mode 0600 if it is not there. It must survive restarts: a party that
            loses it takes each ledger as it is shown next.

    Raises:
        PermissionError: If others than the owner may write the file.
        DamagedFileError: If it holds something else. So does every method, and nothing was countersigned.
    """

    def __init__(self, path: Path) -> None:
        self._table = Table(path, name="heads", columns=_COLUMNS)

    @property
    def empty(self) -> bool:
        """Whether it remembers no ledger."""
        with self._table.transaction() as connection:
            return connection.execute("SELECT 1 FROM heads").fetchone() is None

    def known_rows(self, owner: str, population: str) -> int | None:
        """How many rows the ledger had when it was last shown; None if it never was."""
        with self._table.transaction() as connection:
            found = self._find(connection, owner, population)
        return None if found is None else found[0]

    def countersign(self, statements: Sequence[HeadStatement], *, signer: Signer) -> bytes:
        """Checks that each ledger extends what was last seen of it, remembers the heads, all or none, and signs them.

        The heads are remembered before they are signed. The same statements again get the same answer, as long as no later ones were
        shown.

        Args:
            statements: What `read_statement` gave of each participant that keeps a ledger, in their order. If this party is one of
                them, it signs its own too, so that all sign the same, and does not remember it.
                They are of one context.
            signer: This party's key.

        Returns:
            A signature under all of them, 64 bytes.

        Raises:
            LedgerTamperedError: If a ledger does not extend what was last seen; nothing was countersigned or remembered.
            LedgerError: If a statement begins after what was last seen; nothing was countersigned or remembered.
        """
        (context,) = {statement.context for statement in statements}
        with self._table.transaction() as connection:
            for statement in statements:
                if statement.owner == signer.name:
                    continue
                found = self._find(connection, statement.owner, statement.population)
                if found is not None:
                    _check_growth(statement, *found)
                row = (statement.owner, statement.population, statement.rows, statement.head)
                connection.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?)", row)
        return signer.sign(countersigned(context, hashes_of({statement.owner: statement.data for statement in statements})))

    @staticmethod
    def _find(connection: sqlite3.Connection, owner: str, population: str) -> tuple[int, bytes] | None:
        query = "SELECT rows, head FROM heads WHERE owner = ? AND population = ?"
        found: tuple[int, bytes] | None = connection.execute(query, (owner, population)).fetchone()
        return found


def remembered_head(path: Path, *, population: str) -> bytes:
    """The head of a population's ledger that a party remembers, 32 bytes, out of its `HeadMemory` file, which is not written to.

    Raises:
        LedgerError: If the file is no such memory, or remembers no ledger of that population, or those of several owners.
    """
    query = "SELECT head FROM heads WHERE population = ?"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            found: list[tuple[bytes]] = connection.execute(query, (population,)).fetchall()
    except sqlite3.DatabaseError:
        raise LedgerError(f"{path.name} is no memory of heads, or it is damaged; nothing was compared") from None
    if len(found) != 1:
        raise LedgerError(
            f"expected {path.name} to remember one ledger of population {population!r}, got {len(found)}; nothing was compared; give the "
            "head itself"
        )
    return found[0][0]


def check_stated(ledger: Ledger, statement: bytes, *, owner: Party, context: bytes) -> HeadStatement:
    """Refuses to go on with a ledger that does not extend what its own owner stated of it.

    Args:
        ledger: The owner's.
        statement: What `state_head` returned.
        owner: The owner's public identity.
        context: What the statement was for, 32 bytes.

    Raises:
        InvalidMessageError: As `read_statement`, of the ledger's population.
        LedgerTamperedError: If the ledger does not extend what its owner stated.
    """
    stated = read_statement(statement, owner=owner, population=ledger.population, context=context)
    if stated.rows > len(ledger.rows()) or stated.head != ledger.head_of(stated.rows):
        raise LedgerTamperedError(
            f"the ledger for {ledger.population!r} does not extend the one that its owner showed in an earlier round, of {stated.rows} "
            "rows; nothing was recorded; it was set back or replaced: put back the newest copy, or treat its budget as used up"
        )
    return stated


def record(ledger: Ledger, answers: Sequence[tuple[Party, bytes]], *, shown: Mapping[str, bytes], owner: Party, context: bytes) -> None:
    """Keeps the peers' countersignatures in the ledger, for auditors, and to know what each peer has seen.

    An answer that is not a peer's signature under this head is left out: one peer must not keep the others' from being recorded. What is
    kept is enough to verify the signatures: where the statement begins and its signature, for its other bytes follow from the ledger; and
    the hashes of all that were signed with it.

    Args:
        ledger: The owner's.
        answers: Of each peer, its pinned identity and what its `HeadMemory.countersign` returned.
        shown: The statements of all participants in the round, the owner's among them, by owner, in their order.
        owner: The owner's public identity.
        context: What the statement was for, 32 bytes.

    Raises:
        ValueError: If the owner's statement is not among those shown; nothing was recorded.
        InvalidMessageError: As `check_stated`; nothing was recorded.
        LedgerTamperedError: If the ledger does not extend what its owner stated; nothing was recorded.
        LedgerError: If writing failed.
    """
    statement = shown.get(owner.name)
    if statement is None:
        raise ValueError("expected the owner's statement among those of the round; nothing was recorded")
    stated = check_stated(ledger, statement, owner=owner, context=context)
    hashes = hashes_of(shown)
    signatures = {peer.name: signature for peer, signature in answers if _signed(peer, countersigned(context, hashes), signature)}
    if signatures:
        ledger.record_countersignatures(
            rows=stated.rows,
            start=stated.start,
            context=context,
            signature=statement[-_SIGNATURE_BYTES:],
            hashes=hashes,
            signatures=signatures,
        )


def has_countersigned(peer: Party, signature: bytes, *, shown: Mapping[str, bytes], context: bytes) -> bool:
    """Whether a signature is a peer's under exactly these statements.

    Args:
        peer: Its pinned identity.
        signature: What its `HeadMemory.countersign` returned.
        shown: The statements of all participants in the round, by owner, in their order.
        context: What they were stated for, 32 bytes.
    """
    return _signed(peer, countersigned(context, hashes_of(shown)), signature)


def _signed(peer: Party, message: bytes, signature: bytes) -> bool:
    try:
        peer.verify(message, signature)
    except InvalidMessageError:
        return False
    return True


def _check_growth(statement: HeadStatement, rows: int, head: bytes) -> None:
    what = f"the ledger of {statement.owner!r} for {statement.population!r}"
    if statement.start > rows:
        raise LedgerError(
            f"{what} was last seen with {rows} rows and is shown from row {statement.start} on only; nothing was countersigned; its "
            "owner must show all that this party has not countersigned"
        )
    if statement.rows < rows or statement.head_of(rows) != head:
        raise LedgerTamperedError(
            f"{what} does not extend the one that was seen before, of {rows} rows; nothing was countersigned; it was set back or "
            "replaced: treat its budget as used up until its owner shows the ledger that was seen"
        )


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(2, "big") + encoded


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")

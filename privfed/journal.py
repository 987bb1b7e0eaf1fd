"""What a party promised and opened, durably, so that no crash and no second digest makes it open a round twice."""

import sqlite3
from pathlib import Path

from privfed.agreement import RoundContext
from privfed.errors import AlreadyOpenedError, OpeningRefusedError
from privfed.table import Table

_COLUMNS = """
    session BLOB NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    digest BLOB NOT NULL,
    approval BLOB,
    products BLOB,
    decision BLOB,
    aggregate BLOB,
    finished INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session, round)
"""


class Journal:
    """A party's durable memory, one row per round of a session: the one digest to which it stands, and whether it opened it.

    The first digest of a round that a party approves or begins to open is the only one, in this attempt and in every other.
    An opening takes the approvals of all participants, so of two digests of one round that share a participant at most one
    can ever be opened, by anybody: not only by this party. An attempt that failed after its digest was approved is therefore
    given up together with the round number; the next round has a new update.

    Args:
        path: SQLite file of this party and no other, made with mode 0600 if it is not there. It holds digests and no data. It
            must survive restarts: a party that loses it may be talked into a second opening.

    Raises:
        PermissionError: If others than the owner may write the file.
        DamagedFileError: If it holds something else. So does every method, and nothing was recorded.
    """

    def __init__(self, path: Path) -> None:
        self._table = Table(path, name="rounds", columns=_COLUMNS)

    def approve(self, context: RoundContext, digest: bytes) -> None:
        """Records that this party stands to a digest. The same digest again is fine.

        Args:
            context: Session, round and attempt.
            digest: 32 bytes of `RoundDigest.digest`.

        Raises:
            AlreadyOpenedError: If the round is promised to another digest, of whatever attempt; nothing was recorded.
        """
        with self._table.transaction() as connection:
            self._claim(connection, context, digest)

    def approval(self, context: RoundContext, digest: bytes) -> bytes | None:
        """The approval message that was kept for exactly this digest; None if there is none."""
        with self._table.transaction() as connection:
            found: tuple[bytes | None] | None = connection.execute(
                "SELECT approval FROM rounds WHERE session = ? AND round = ? AND attempt = ? AND digest = ?",
                (context.agreement.session, context.round, context.attempt, digest),
            ).fetchone()
        return None if found is None else found[0]

    def keep_approval(self, context: RoundContext, approval: bytes) -> None:
        """Keeps the approval message of the digest that this party stands to, to give the same one when it is asked again."""
        with self._table.transaction() as connection:
            connection.execute(
                "UPDATE rounds SET approval = ? WHERE session = ? AND round = ?", (approval, context.agreement.session, context.round)
            )

    def opened(self, session: bytes) -> dict[int, bool]:
        """The rounds of a session whose opening began, and whether it was finished, in ascending order."""
        with self._table.transaction() as connection:
            rows = connection.execute(
                "SELECT round, finished FROM rounds WHERE session = ? AND aggregate IS NOT NULL ORDER BY round", (session,)
            ).fetchall()
        return {number: bool(finished) for number, finished in rows}

    def promises(self, session: bytes) -> tuple[int, ...]:
        """The rounds of a session for which this party stands to a digest, in ascending order."""
        with self._table.transaction() as connection:
            rows = connection.execute("SELECT round FROM rounds WHERE session = ? ORDER BY round", (session,)).fetchall()
        return tuple(number for (number,) in rows)

    def promised(self, context: RoundContext) -> bool:
        """Whether this party stands to a digest of this attempt."""
        place = (context.agreement.session, context.round, context.attempt)
        with self._table.transaction() as connection:
            query = "SELECT 1 FROM rounds WHERE session = ? AND round = ? AND attempt = ?"
            return connection.execute(query, place).fetchone() is not None

    def begin_products(self, context: RoundContext, digest: bytes, *, products: bytes) -> bytes | None:
        """Records, before the decryption, that this party opens the inner products of a round: one set of them, once.

        Args:
            context: Session, round and attempt.
            digest: 32 bytes of `RoundDigest.digest`.
            products: SHA-256 of the whole products message.

        Returns:
            What `keep_decision` kept, if these products were opened before; None if they are to be opened now.

        Raises:
            AlreadyOpenedError: If the round is promised to another digest, other products were opened, or the round is finished.
        """
        place = (context.agreement.session, context.round)
        with self._table.transaction() as connection:
            self._claim(connection, context, digest)
            begun, decision, finished = connection.execute(
                "SELECT products, decision, finished FROM rounds WHERE session = ? AND round = ?", place
            ).fetchone()
            if finished or (begun is not None and begun != products):
                raise AlreadyOpenedError(
                    f"inner products of round {context.round} were already opened{'' if finished else ', and others than these'}; "
                    "nothing was decrypted"
                )
            connection.execute("UPDATE rounds SET products = ? WHERE session = ? AND round = ?", (products, *place))
        return decision

    def keep_decision(self, context: RoundContext, decision: bytes) -> None:
        """Keeps what this party made of the inner products of a round: the only coefficients under which it opens the aggregate."""
        with self._table.transaction() as connection:
            connection.execute(
                "UPDATE rounds SET decision = ? WHERE session = ? AND round = ?", (decision, context.agreement.session, context.round)
            )

    def decision(self, context: RoundContext, digest: bytes) -> bytes | None:
        """What `keep_decision` kept for exactly this digest; None if there is nothing."""
        with self._table.transaction() as connection:
            found: tuple[bytes | None] | None = connection.execute(
                "SELECT decision FROM rounds WHERE session = ? AND round = ? AND attempt = ? AND digest = ?",
                (context.agreement.session, context.round, context.attempt, digest),
            ).fetchone()
        return None if found is None else found[0]

    def begin(self, context: RoundContext, digest: bytes, *, aggregate: bytes) -> None:
        """Records, before the decryption, that this party opens one aggregate of a round.

        The same aggregate may begin again as long as the opening is not finished: the party may have crashed in between.

        Args:
            context: Session, round and attempt.
            digest: 32 bytes of `RoundDigest.digest`.
            aggregate: SHA-256 of the whole aggregate message.

        Raises:
            AlreadyOpenedError: If the round is promised to another digest, another aggregate was begun, or the opening is finished.
        """
        with self._table.transaction() as connection:
            self._claim(connection, context, digest)
            begun, finished = connection.execute(
                "SELECT aggregate, finished FROM rounds WHERE session = ? AND round = ?", (context.agreement.session, context.round)
            ).fetchone()
            if finished or (begun is not None and begun != aggregate):
                raise AlreadyOpenedError(
                    f"round {context.round} was already opened{'' if finished else ' with another aggregate'}; nothing was decrypted"
                )
            connection.execute(
                "UPDATE rounds SET aggregate = ? WHERE session = ? AND round = ?", (aggregate, context.agreement.session, context.round)
            )

    def finish(self, context: RoundContext, *, aggregate: bytes) -> None:
        """Records that what was opened is stored, so it is never opened again.

        Raises:
            OpeningRefusedError: If this aggregate was not begun, or is finished; nothing was recorded.
        """
        with self._table.transaction() as connection:
            changed = connection.execute(
                "UPDATE rounds SET finished = 1, approval = NULL WHERE session = ? AND round = ? AND aggregate = ? AND finished = 0",
                (context.agreement.session, context.round, aggregate),
            ).rowcount
            if changed != 1:
                raise OpeningRefusedError(f"no opening of round {context.round} is under way; nothing was recorded")

    def settle(self, context: RoundContext) -> None:
        """Finishes an opening whose aggregate turned out to be stored already: the party crashed in between. Else, it does nothing."""
        with self._table.transaction() as connection:
            connection.execute(
                "UPDATE rounds SET finished = 1, approval = NULL WHERE session = ? AND round = ? AND aggregate IS NOT NULL",
                (context.agreement.session, context.round),
            )

    @staticmethod
    def _claim(connection: sqlite3.Connection, context: RoundContext, digest: bytes) -> None:
        connection.execute(
            "INSERT OR IGNORE INTO rounds (session, round, attempt, digest) VALUES (?, ?, ?, ?)",
            (context.agreement.session, context.round, context.attempt, digest),
        )
        attempt, promised = connection.execute(
            "SELECT attempt, digest FROM rounds WHERE session = ? AND round = ?", (context.agreement.session, context.round)
        ).fetchone()
        if promised != digest:
            raise AlreadyOpenedError(
                f"round {context.round} is promised to another digest, of attempt {attempt}; nothing was approved and nothing "
                "was decrypted; go on with a new round"
            )

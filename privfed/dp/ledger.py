"""What was spent on one data set: a file at the data owner's that charges before it lets anything be trained.

The order is reserve, train, commit. A reservation is on the disk before `reserve` returns, and nothing ever gives it back:
a crash or a kill between reserve and commit leaves it charged. Opening verifies every row against a hash chain. All jobs and
all queries about a population are charged to the same file.

What a local file cannot show, and this one does not: that all its files were replaced by an older copy, which belongs
together and holds. Peers that remember the head can tell; `privfed.dp.countersign` makes them. Nor does anything here stop an
owner who makes two ledgers for the same data: the population is declared, not measured.
"""

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast, final

import numpy as np
from numpy.typing import ArrayLike

from privfed.dp._account import Accounts, Terms
from privfed.dp._chain import Chain
from privfed.dp.entries import (
    DisjointnessDeclaration,
    LedgerRow,
    Reservation,
    Signer,
    check_place,
    disjointness,
    read_declaration,
    read_reservation,
)
from privfed.dp.mechanism import (
    Budget,
    Composition,
    DiscreteGaussianSum,
    Event,
    Relation,
    Unit,
    describe_event,
    encode_event,
)
from privfed.errors import LedgerError, LedgerTamperedError

_FINGERPRINT_BYTES: Final = 32
_MOST_REASON: Final = 1000


@final
class Ledger:
    """The privacy ledger of one population. Use it as a context manager, or close it.

    One object in one process at a time holds the file; its methods may be called from several threads. The bound that
    `spent` gives covers events whose parameters were fixed beforehand, not ones chosen after looking at outcomes, unless the
    ledger was made with `Composition.ADAPTIVE`.

    Example:
        >>> from tempfile import mkdtemp
        >>> from privfed.dp.mechanism import GaussianRelease
        >>> path = Path(mkdtemp()) / "bank_a.ledger"
        >>> with Ledger.open(path, population="bank_a", budget=Budget(epsilon=2.0, delta=1e-5)) as ledger:
        ...     reservation = ledger.reserve(GaussianRelease(noise_multiplier=4.0), session=b"example", round=0, attempt=0)
        ...     ledger.commit(reservation)  # after training
        ...     print(round(ledger.spent(), 2), ledger.rounds_possible(reservation.event))
        0.93 3
    """

    def __init__(self, chain: Chain, *, terms: Terms) -> None:
        self._chain = chain
        self._terms = terms
        self._accounts = Accounts(terms)
        self._reservations: dict[str, Reservation] = {}  # by id, oldest first
        self._ids: dict[tuple[bytes, int, int], str] = {}
        self._next: dict[bytes, int] = {}  # number of the next round of each session
        self._declarations: list[DisjointnessDeclaration] = []
        self._countersigned: dict[str, int] = {}  # rows in the last head that a peer countersigned
        self._rows: list[LedgerRow] = []
        self._mutex = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        population: str,
        budget: Budget,
        unit: Unit = Unit.RECORD,
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        composition: Composition = Composition.FIXED_SCHEDULE,
        silo_budget: Budget | None = None,
    ) -> Self:
        """Opens the ledger of a population, or makes it, with mode 0600. Its terms are recorded when it is made and stay.

        Args:
            path: The file. Next to it are `<name>.head` and, while open, SQLite's `<name>-wal`; back them up together.
            population: Declared name of the data set, 1 to 200 characters. One population has one ledger, whatever is trained.
            budget: What may be spent in total.
            unit: Whose presence is protected: records or customers.
            relation: How neighbouring data sets differ.
            composition: Whether events may be chosen after looking at outcomes.
            silo_budget: What may be spent in total on the silo as a whole, kept beside the budget; None to promise nothing about it.

        Raises:
            LedgerLockedError: If it is open already, here or in another process.
            LedgerTamperedError: If a row was edited, deleted or cut off, or the file is no ledger.
            LedgerError: If it was made on other terms, or this version does not know what it holds.
            ValueError: If the terms make no sense.
        """
        terms = Terms(population=population, budget=budget, unit=unit, relation=relation, composition=composition, silo_budget=silo_budget)
        with ExitStack() as resources:
            chain = resources.enter_context(closing(Chain(Path(path), create=True)))
            if not chain.rows:
                key = os.urandom(_FINGERPRINT_BYTES)
                chain.append({**terms.body(), "kind": "open", "fingerprint_key": key.hex(), "time": _now()})
            ledger = cls._load(chain)
            if ledger.terms != terms:
                raise LedgerError(
                    f"the ledger was made for {ledger.terms}, and was opened for {terms}; nothing was opened or changed; what was promised "
                    "once cannot be changed"
                )
            resources.pop_all()
        return ledger

    @classmethod
    def reopen(cls, path: Path | str) -> Self:
        """Opens a ledger that exists, as it was made. Raises as `open` does, and FileNotFoundError; then it leaves nothing behind."""
        return cls._existing(Chain(Path(path), create=False))

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """As `reopen`, to show or verify a ledger: no file of it is written to, and nothing can be charged."""
        return cls._existing(Chain(Path(path), create=False, read_only=True))

    @classmethod
    def _existing(cls, chain: Chain) -> Self:
        with ExitStack() as resources:
            ledger = cls._load(resources.enter_context(closing(chain)))
            resources.pop_all()
        return ledger

    @classmethod
    def _load(cls, chain: Chain) -> Self:
        try:
            ledger = cls(chain, terms=Terms.read(chain.rows[0].body))
            ledger._replay()
        except (ValueError, TypeError, LookupError) as error:
            raise LedgerError(
                "this version of privfed does not understand everything in the ledger, so it cannot tell what was spent; nothing was "
                "opened; use the version that wrote it"
            ) from error
        return ledger

    @property
    def path(self) -> Path:
        """The file, without links in its name."""
        return self._chain.path

    @property
    def terms(self) -> Terms:
        """What the ledger was made for."""
        return self._terms

    @property
    def population(self) -> str:
        """Declared name of the data set."""
        return self._terms.population

    @property
    def budget(self) -> Budget:
        """What may be spent in total."""
        return self._terms.budget

    @property
    def unit(self) -> Unit:
        """Whose presence is protected."""
        return self._terms.unit

    @property
    def head(self) -> bytes:
        """Hash over all rows, 32 bytes. Keep it elsewhere to notice that the whole ledger was set back."""
        return self._chain.head

    @property
    def declarations(self) -> tuple[DisjointnessDeclaration, ...]:
        """All declarations of disjointness, oldest first, for an auditor to verify and to ask about."""
        return tuple(self._declarations)

    def fingerprint(self, *columns: ArrayLike) -> bytes:
        """Keyed hash of data, 32 bytes, to recognise them again. It stays in the ledger: whoever guesses data could test the guess.

        Args:
            columns: Arrays of numbers that make up the data, always in the same order. Private.
        """
        key: str = json.loads(self._chain.rows[0].body)["fingerprint_key"]
        state = hmac.new(bytes.fromhex(key), b"privfed data v1", hashlib.sha256)
        for column in columns:
            array = np.ascontiguousarray(column)
            state.update(f"{array.dtype.str} {array.shape} ".encode())
            state.update(array.data.cast("B") if array.size else b"")
        return state.digest()

    def declare_disjoint(self, fingerprint: bytes, *, by: Signer, reason: str) -> DisjointnessDeclaration:
        """Gives data an account of their own, on somebody's signed word that none of their units was ever charged here.

        Without it, other data than before are charged to the same account, because all but one of their rows may be the same.

        Args:
            fingerprint: `fingerprint` of the data.
            by: Who declares it, and answers for it.
            reason: Why, 1 to 1000 characters. It is recorded.

        Raises:
            LedgerError: If these data were charged or declared before, or writing failed.
            ValueError: If an argument is out of its range.
        """
        if len(fingerprint) != _FINGERPRINT_BYTES or not 1 <= len(reason) <= _MOST_REASON:
            raise ValueError(f"expected a fingerprint of {_FINGERPRINT_BYTES} bytes and a reason of 1 to {_MOST_REASON} characters")
        with self._mutex:
            self._replay()
            if self._accounts.knows(fingerprint):
                raise LedgerError("these data were charged or declared before; nothing was declared; their account stays what it is")
            signature = by.sign(disjointness(self.head, fingerprint, reason))
            who = {"by": by.name, "public_key": by.public.public_key.hex(), "signature": signature.hex()}
            self._chain.append({"kind": "declare", "fingerprint": fingerprint.hex(), "reason": reason, **who, "time": _now()})
            self._replay()
            return self._declarations[-1]

    def reserve(
        self,
        event: Event,
        *,
        session: bytes,
        round: int,  # noqa: A002 -- the field's word
        attempt: int,
        silo_event: DiscreteGaussianSum | None = None,
        fingerprint: bytes | None = None,
    ) -> Reservation:
        """Charges an event to the budget, on the disk before it returns. Call it before touching the data.

        Args:
            event: What is about to happen.
            session: Session of the round, 1 to 64 bytes.
            round: Number of the round, from 0.
            attempt: Number of the attempt at that round, from 0; a retry reserves anew.
            silo_event: What is about to happen to the silo as a whole, charged to its budget. Both are charged, or none.
            fingerprint: `fingerprint` of the data. Without one, and with an unknown one, every account is charged.

        Raises:
            BudgetExceededError: If it would spend more than a budget. Nothing was written or spent.
            LedgerError: If this attempt was reserved before, or writing failed.
            TypeError: If it is no event.
            ValueError: If an argument is out of its range, or the event speaks of another unit than the ledger.
        """
        with self._mutex:
            self._replay()  # a row that was written when an interrupt arrived counts, too
            return self._reserve(event, (session, round, attempt), silo_event, fingerprint)

    def reserve_next(self, event: Event, *, session: bytes, fingerprint: bytes | None = None) -> Reservation:
        """As `reserve`, as the next round of a session: for queries, which are never resumed."""
        with self._mutex:
            self._replay()
            return self._reserve(event, (session, self._next.get(session, 0), 0), None, fingerprint)

    def _reserve(
        self, event: Event, place: tuple[bytes, int, int], silo_event: DiscreteGaussianSum | None, fingerprint: bytes | None
    ) -> Reservation:
        session, number, attempt = place
        check_place(session, number, attempt)
        if fingerprint is not None and len(fingerprint) != _FINGERPRINT_BYTES:
            raise ValueError(f"expected a fingerprint of {_FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
        encoded: dict[str, object] = {"event": encode_event(event)}
        if place in self._ids:
            raise LedgerError(
                f"round {number}, attempt {attempt} of this session is reserved already; nothing was charged again; resume it, or "
                "take the next attempt"
            )
        self._accounts.check(event, silo_event=silo_event, fingerprint=fingerprint)
        if silo_event is not None:
            encoded["silo_event"] = encode_event(silo_event)
        if fingerprint is not None:
            encoded["fingerprint"] = fingerprint.hex()
        where = {"session": session.hex(), "round": number, "attempt": attempt}
        row = self._chain.append({"kind": "reserve", **encoded, **where, "time": _now()})
        self._replay()
        return self._reservations[row.digest.hex()]

    def commit(self, reservation: Reservation) -> None:
        """Records, on the disk, that what was reserved was done. It changes nothing about what was spent.

        Raises:
            LedgerError: If this ledger has no such reservation, it was committed before, or writing failed.
        """
        with self._mutex:
            self._replay()
            known = self._reservations.get(reservation.id)
            if known is None:
                raise LedgerError("this ledger holds no such reservation; nothing was committed; reserve before training")
            if known.committed:
                raise LedgerError(f"round {known.round}, attempt {known.attempt} was committed before; nothing was committed again")
            self._chain.append({"kind": "commit", "reservation": known.id, "time": _now()})
            self._replay()

    def reservation(self, *, session: bytes, round: int, attempt: int) -> Reservation | None:  # noqa: A002 -- the field's word
        """The reservation of an attempt, to resume after a crash; None if that attempt was never charged."""
        known = self._ids.get((session, round, attempt))
        return None if known is None else self._reservations[known]

    def events(self) -> tuple[Event, ...]:
        """Every event that was charged, reserved or committed, oldest first, to whatever account."""
        return tuple(reservation.event for reservation in tuple(self._reservations.values()))

    def silo_events(self) -> tuple[DiscreteGaussianSum, ...]:
        """Every event that was charged for the silo as a whole, oldest first."""
        found = (reservation.silo_event for reservation in tuple(self._reservations.values()))
        return tuple(event for event in found if event is not None)

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of everything that was charged to any one unit, at the budget's delta unless another is given.

        With `Composition.ADAPTIVE` it is what the filter compares with the budget, and the budget is what is promised.
        """
        return self._accounts.spent(delta)

    def silo_spent(self, delta: float | None = None) -> float:
        """Epsilon of everything that was charged for the silo as a whole, at its budget's delta unless another is given.

        Raises:
            ValueError: If the ledger has no silo budget.
        """
        return self._accounts.silo_spent(delta)

    def rounds_possible(self, event: Event, *, silo_event: DiscreteGaussianSum | None = None, fingerprint: bytes | None = None) -> int:
        """How many more times an event fits into the budget; see `accounting.rounds_possible`."""
        return self._accounts.rounds_possible(event, silo_event=silo_event, fingerprint=fingerprint)

    def links(self, start: int) -> tuple[bytes, ...]:
        """What every row from number `start` on adds to the head, 32 bytes each; they tell nothing about the rows."""
        return self._chain.links(start)

    def head_of(self, rows: int) -> bytes:
        """The head when there were so many rows, from 0 to all."""
        if not 0 <= rows <= len(self._rows):
            raise ValueError(f"expected a number of rows from 0 to {len(self._rows)}, got {rows}")
        return self._chain.head_of(rows)

    def rows_since(self, head: bytes) -> int:
        """How many rows were added since the ledger had a head that somebody remembers; 0 if it has it now.

        Args:
            head: What `head` was, 32 bytes.

        Raises:
            LedgerTamperedError: If it never had that head: it was set back or exchanged, or the head is that of another ledger.
        """
        for rows in range(len(self._rows), 0, -1):
            if self._chain.head_of(rows) == head:
                return len(self._rows) - rows
        raise LedgerTamperedError(
            f"the ledger of {self.population!r} does not extend the head that is remembered; nothing was changed; it was set back to an "
            "older copy or exchanged, or the head is that of another ledger: restore the files that had it, or treat the budget as used up"
        )

    def countersigned(self, peer: str) -> int:
        """How many rows there were in the last head that a peer countersigned; 0 if it never did."""
        return self._countersigned.get(peer, 0)

    def record_countersignatures(
        self, *, rows: int, start: int, context: bytes, signature: bytes, hashes: Sequence[bytes], signatures: Mapping[str, bytes]
    ) -> None:
        """Keeps verified signatures of peers under a head of this ledger; `countersign.record` verifies them.

        Args:
            rows: In the head.
            start: Number of rows from which its owner showed the growth.
            context: What the head was stated for, 32 bytes.
            signature: Its owner's, 64 bytes, under what it stated: all other bytes of that follow from the rows here.
            hashes: What the peers signed: of this statement, and of those of other owners, 32 bytes each.
            signatures: By peer, 64 bytes each.

        Raises:
            LedgerError: If writing failed.
            ValueError: If there are no such rows.
        """
        head = self.head_of(rows)
        by = {name: countersignature.hex() for name, countersignature in signatures.items()}
        with self._mutex:
            self._chain.append(
                {
                    "kind": "countersign",
                    "rows": rows,
                    "head": head.hex(),
                    "context": context.hex(),
                    "start": start,
                    "signature": signature.hex(),
                    "statements": [statement_hash.hex() for statement_hash in hashes],
                    "by": by,
                    "time": _now(),
                }
            )
            self._replay()

    def rows(self) -> tuple[LedgerRow, ...]:
        """All rows, oldest first, for display."""
        return tuple(self._rows)

    def text(self) -> str:
        """The whole ledger for people: its terms, every row, and what is left."""
        terms, budget = self._terms, self._terms.budget
        lines = [
            f"Ledger of {terms}",
            f"Protected: {terms.unit.value}; {terms.relation.value}; {terms.composition.value}.",
            *(f"  {row.number:>6}  {row.time}  {row.text}" for row in self._rows),
            f"Spent: epsilon {self.spent():.4g} of {f'{budget.epsilon:g}' if budget.limited else 'no limit'} at delta {budget.delta:g}.",
        ]
        if terms.silo_budget is not None:
            limit = f"{terms.silo_budget.epsilon:g}" if terms.silo_budget.limited else "no limit"
            lines.append(f"Spent on the silo as a whole: epsilon {self.silo_spent():.4g} of {limit} at delta {terms.silo_budget.delta:g}.")
        return "\n".join([*lines, f"Head of {len(self._rows)} rows: {self.head.hex()}"]) + "\n"

    def verify(self) -> None:
        """Reads the files again and checks every row.

        Raises:
            LedgerTamperedError: If they do not hold what was read and written.
        """
        with self._mutex:
            self._chain.verify()

    def close(self) -> None:
        """Releases the file. Closing twice does nothing."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger(population={self.population!r}, budget={self.budget}, rows={len(self._rows)})"

    def _replay(self) -> None:
        """Takes over the rows that are in the file and not yet here."""
        for row in self._chain.rows[len(self._rows) :]:
            body = cast("dict[str, Any]", json.loads(row.body))
            reservation = None
            match body["kind"]:
                case "open" if row.number == 0:
                    text = "opened"
                case "reserve":
                    reservation = read_reservation(row.digest.hex(), body)
                    self._take(reservation)
                    text = f"reserved {reservation.where}: {describe_event(reservation.event)}"
                    text += "" if reservation.silo_event is None else f"; and for the silo: {describe_event(reservation.silo_event)}"
                case "commit":
                    reservation = replace(self._reservations[body["reservation"]], committed=True)
                    text = f"committed {reservation.where}"
                case "declare":
                    declaration = read_declaration(self._chain.head_of(row.number), body)
                    if self._accounts.knows(declaration.fingerprint):
                        raise ValueError("expected data to be declared before they are charged, and once")
                    self._accounts.declare(declaration.fingerprint)
                    self._declarations.append(declaration)
                    text = f"{body['by']!r} declared other data to be disjoint from all before: {body['reason']}"
                case "countersign":
                    if body["head"] != self._chain.head_of(body["rows"]).hex():
                        raise ValueError("expected countersignatures of this ledger's head")
                    self._countersigned.update(dict.fromkeys(body["by"], body["rows"]))
                    text = f"head of {body['rows']} rows countersigned by {', '.join(sorted(body['by']))}"
                case _:
                    raise ValueError("expected a known kind of row")
            if reservation is not None:
                self._reservations[reservation.id] = reservation
            self._rows.append(LedgerRow(number=row.number, time=body["time"], kind=body["kind"], reservation=reservation, text=text))

    def _take(self, reservation: Reservation) -> None:
        place = (reservation.session, reservation.round, reservation.attempt)
        if self._ids.setdefault(place, reservation.id) != reservation.id:
            raise ValueError("expected every attempt to be reserved once")
        self._next[reservation.session] = max(self._next.get(reservation.session, 0), reservation.round + 1)
        self._accounts.charge(reservation.event, silo_event=reservation.silo_event, fingerprint=reservation.fingerprint)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

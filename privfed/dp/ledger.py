"""What was spent on one data set: a file at the data owner's that charges before it lets anything be trained.

The order is reserve, train, commit. A reservation is on the disk before `reserve` returns, and nothing ever gives it back:
a crash or a kill between reserve and commit leaves it charged. Opening verifies every row against a hash chain.

What a local file cannot show, and this one does not: that all its files were replaced by an older copy, which belongs
together and holds. Whoever has seen `Ledger.head` before can tell; `privfed.dp._chain` has the details. Nor does anything
here stop an owner who makes two ledgers for the same data: the population is declared, not measured.
"""

import json
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast, final

from privfed.dp._chain import Chain
from privfed.dp.accounting import epsilon, rounds_possible
from privfed.dp.mechanism import (
    Budget,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Relation,
    Unit,
    decode_event,
    encode_event,
)
from privfed.errors import BudgetExceededError, LedgerError

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A charge that is in the ledger. All fields are public.

    Args:
        id: Hash of its row and all earlier ones, hexadecimal: it belongs to one place in one ledger.
        event: What was charged.
        session: Session of the round, 1 to 64 bytes.
        round: Number of the round, from 0.
        attempt: Number of the attempt at that round, from 0.
        committed: Whether the training was reported as done. Charged it is either way.
    """

    id: str
    event: Event
    session: bytes
    round: int
    attempt: int
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A row as people read it.

    Args:
        number: From 0, which is the row that opened the ledger.
        time: When it was written, by this machine's clock, in UTC.
        kind: "open", "reserve" or "commit".
        reservation: What was reserved or committed, as it stood then; None for the row that opened the ledger.
    """

    number: int
    time: str
    kind: str
    reservation: Reservation | None


@final
class Ledger:
    """The privacy ledger of one population. Use it as a context manager, or close it.

    One object in one process at a time holds the file; its methods may be called from several threads. The bound that
    `spent` gives covers events whose parameters were fixed beforehand, not ones chosen after looking at outcomes.

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

    def __init__(self, chain: Chain, *, population: str, budget: Budget, unit: Unit) -> None:
        self._chain = chain
        self._population = population
        self._budget = budget
        self._unit = unit
        self._reservations: dict[str, Reservation] = {}  # by id, oldest first
        self._ids: dict[tuple[bytes, int, int], str] = {}
        self._rows: list[LedgerRow] = []
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, path: Path | str, *, population: str, budget: Budget, unit: Unit = Unit.RECORD) -> Self:
        """Opens the ledger of a population, or makes it, with mode 0600.

        Args:
            path: The file. Next to it are `<name>.head` and, while open, SQLite's `<name>-wal`; back them up together.
            population: Declared name of the data set, 1 to 200 characters. One population has one ledger, whatever is trained.
            budget: What may be spent in total. It is recorded when the ledger is made and cannot be changed.
            unit: Whose presence is protected.

        Raises:
            LedgerLockedError: If it is open already, here or in another process.
            LedgerTamperedError: If a row was edited, deleted or cut off, or the file is no ledger.
            LedgerError: If it was made for another population, unit or budget, or this version does not know what it holds.
            ValueError: If the population's name is empty or too long.
        """
        if not 1 <= len(population) <= 200:
            raise ValueError(f"expected a population name of 1 to 200 characters, got {len(population)}")
        with ExitStack() as resources:
            chain = resources.enter_context(closing(Chain(Path(path), create=True)))
            if not chain.rows:
                chain.append({**_terms(population, budget, unit), "kind": "open", "time": _now()})
            ledger = cls._load(chain)
            if (ledger.population, ledger.budget, ledger.unit) != (population, budget, unit):
                raise LedgerError(
                    f"the ledger was made for {_describe(ledger.population, ledger.budget, ledger.unit)}, and was opened for "
                    f"{_describe(population, budget, unit)}; nothing was opened or changed; what was promised once cannot be changed"
                )
            resources.pop_all()
        return ledger

    @classmethod
    def reopen(cls, path: Path | str) -> Self:
        """Opens a ledger that exists, as it was made: to show or verify it. Raises as `open` does, and FileNotFoundError."""
        with ExitStack() as resources:
            ledger = cls._load(resources.enter_context(closing(Chain(Path(path), create=False))))
            resources.pop_all()
        return ledger

    @classmethod
    def _load(cls, chain: Chain) -> Self:
        try:
            terms = json.loads(chain.rows[0].body)
            epsilon_limit, delta = terms["epsilon"], terms["delta"]
            budget = Budget.unlimited(delta=delta) if epsilon_limit is None else Budget(epsilon=epsilon_limit, delta=delta)
            ledger = cls(chain, population=terms["population"], budget=budget, unit=Unit[terms["unit"]])
            understood = {**_terms(ledger.population, budget, ledger.unit), "kind": "open", "time": terms["time"]} == terms
            ledger._replay()
        except (ValueError, TypeError, LookupError) as error:
            raise _not_understood() from error
        if not understood:
            raise _not_understood()
        return ledger

    @property
    def population(self) -> str:
        """Declared name of the data set."""
        return self._population

    @property
    def budget(self) -> Budget:
        """What may be spent in total."""
        return self._budget

    @property
    def unit(self) -> Unit:
        """Whose presence is protected."""
        return self._unit

    @property
    def head(self) -> bytes:
        """Hash over all rows, 32 bytes. Keep it elsewhere to notice that the whole ledger was set back."""
        return self._chain.head

    def reserve(self, event: Event, *, session: bytes, round: int, attempt: int) -> Reservation:  # noqa: A002 -- the field's word
        """Charges an event to the budget, on the disk before it returns. Call it before touching the data.

        Args:
            event: What is about to happen.
            session: Session of the round, 1 to 64 bytes.
            round: Number of the round, from 0.
            attempt: Number of the attempt at that round, from 0; a retry reserves anew.

        Raises:
            BudgetExceededError: If it would spend more than the budget. Nothing was written or spent.
            LedgerError: If this attempt was reserved before, or writing failed.
            TypeError: If it is no event.
            ValueError: If session, round or attempt are outside their ranges.
        """
        _check_place(session, round, attempt)
        encoded = encode_event(event)
        with self._mutex:
            self._replay()  # a row that was written when an interrupt arrived counts, too
            if (session, round, attempt) in self._ids:
                raise LedgerError(
                    f"round {round}, attempt {attempt} of this session is reserved already; nothing was charged again; resume it, or "
                    "take the next attempt"
                )
            self._check_budget(event)
            place = {"session": session.hex(), "round": round, "attempt": attempt}
            row = self._chain.append({"kind": "reserve", "event": encoded, **place, "time": _now()})
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
        """Every event that was charged, reserved or committed, oldest first."""
        return tuple(reservation.event for reservation in tuple(self._reservations.values()))

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of everything that was charged, at the budget's delta unless another is given."""
        return epsilon(self.events(), delta=self._budget.delta if delta is None else delta)

    def rounds_possible(self, event: Event) -> int:
        """How many more times an event fits into the budget; see `accounting.rounds_possible`."""
        return rounds_possible(event, budget=self._budget, charged=self.events())

    def rows(self) -> tuple[LedgerRow, ...]:
        """All rows, oldest first, for display."""
        return tuple(self._rows)

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
        return f"Ledger(population={self._population!r}, budget={self._budget}, rows={len(self._rows)})"

    def _check_budget(self, event: Event) -> None:
        budget = self._budget
        after = epsilon((*self.events(), event), delta=budget.delta)
        if after <= budget.epsilon:
            return
        match event:
            case PoissonSampledGaussian():
                advice = f"of its {event.steps} steps, {self.rounds_possible(replace(event, steps=1))} would still fit"
            case GaussianRelease():
                advice = f"of its {event.count} releases, {self.rounds_possible(replace(event, count=1))} would still fit"
            case NonPrivateRelease():
                advice = "to go without privacy, make another ledger with Budget.unlimited"
        raise BudgetExceededError(
            f"this event would bring what is spent from epsilon {self.spent():.4g} to {after:.4g}, over the budget of {budget.epsilon:g} "
            f"at delta {budget.delta:g}; nothing was spent or trained; 0 more rounds of this event are possible; {advice}"
        )

    def _replay(self) -> None:
        """Takes over the rows that are in the file and not yet here."""
        for row in self._chain.rows[len(self._rows) :]:
            body = cast("dict[str, Any]", json.loads(row.body))
            reservation = None
            if body["kind"] == "reserve":
                session, number, attempt = bytes.fromhex(body["session"]), body["round"], body["attempt"]
                _check_place(session, number, attempt)
                event = decode_event(body["event"])
                reservation = Reservation(id=row.digest.hex(), event=event, session=session, round=number, attempt=attempt, committed=False)
                if self._ids.setdefault((session, number, attempt), reservation.id) != reservation.id:
                    raise ValueError("expected every attempt to be reserved once")
            elif body["kind"] == "commit":
                reservation = replace(self._reservations[body["reservation"]], committed=True)
            elif row.number > 0:
                raise ValueError("expected a known kind of row")
            if reservation is not None:
                self._reservations[reservation.id] = reservation
            self._rows.append(LedgerRow(number=row.number, time=body["time"], kind=body["kind"], reservation=reservation))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _terms(population: str, budget: Budget, unit: Unit) -> dict[str, object]:
    return {
        "version": _VERSION,
        "population": population,
        "unit": unit.name,
        "relation": Relation.ADD_OR_REMOVE_ONE.name,
        "epsilon": budget.epsilon if budget.limited else None,
        "delta": budget.delta,
    }


def _describe(population: str, budget: Budget, unit: Unit) -> str:
    limit = f"epsilon {budget.epsilon:g}" if budget.limited else "unlimited epsilon"
    return f"population {population!r}, unit {unit.name}, {limit} at delta {budget.delta:g}"


def _check_place(session: object, number: object, attempt: object) -> None:
    if not isinstance(session, bytes) or not 1 <= len(session) <= 64:
        raise ValueError("expected a session of 1 to 64 bytes, got something else")
    if not isinstance(number, int) or not isinstance(attempt, int) or number < 0 or attempt < 0:
        raise ValueError(f"expected round and attempt to be integers from 0, got {number!r} and {attempt!r}")


def _not_understood() -> LedgerError:
    return LedgerError(
        "this version of privfed does not understand everything in the ledger, so it cannot tell what was spent; nothing was opened; "
        "use the version that wrote it"
    )

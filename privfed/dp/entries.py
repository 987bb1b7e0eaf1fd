"""What the rows of a ledger say: reservations, declarations, and the words for people."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from privfed.dp.mechanism import DiscreteGaussianSum, Event, decode_event


def is_population(name: object) -> bool:
    """Whether a data set may be declared under this name: 1 to 200 printable characters, so that it adds no line to a statement."""
    return type(name) is str and 1 <= len(name) <= 200 and name.isprintable()


class Party(Protocol):
    """Another party's name and public key; `privfed.identity.PublicIdentity` is one."""

    @property
    def name(self) -> str: ...
    @property
    def public_key(self) -> bytes: ...
    def verify(self, message: bytes, signature: bytes) -> None: ...


class Signer(Protocol):
    """A party's private key; `privfed.identity.Identity` is one."""

    @property
    def name(self) -> str: ...
    @property
    def public(self) -> Party: ...
    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A charge that is in the ledger. All fields but the fingerprint are public.

    Args:
        id: Hash of its row and all earlier ones, hexadecimal: it belongs to one place in one ledger.
        event: What was charged.
        session: Session of the round, or purpose of the query, 1 to 64 bytes.
        round: Number of the round, or of the query, from 0.
        attempt: Number of the attempt at that round, from 0.
        committed: Whether the training was reported as done. Charged it is either way.
        silo_event: What was charged for the silo as a whole.
        fingerprint: `Ledger.fingerprint` of the data. It stays with the owner.
    """

    id: str
    event: Event
    session: bytes
    round: int
    attempt: int
    committed: bool
    silo_event: DiscreteGaussianSum | None = None
    fingerprint: bytes | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """Session, round and attempt in words."""
        session = self.session.decode() if self.session.isascii() else self.session.hex()
        return f"round {self.round}, attempt {self.attempt} of {session!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisjointnessDeclaration:
    """Somebody's signed word that no unit of one data set was in any data set that the ledger charged before.

    Args:
        head: `Ledger.head` when it was declared, which covers everything before.
        fingerprint: `Ledger.fingerprint` of the data set.
        reason: Why, in the words of who declares it.
        declared_by: Their name.
        public_key: Their Ed25519 key, 32 bytes.
        signature: Over all of it.
    """

    head: bytes
    fingerprint: bytes = field(repr=False)
    reason: str
    declared_by: str
    public_key: bytes
    signature: bytes = field(repr=False)

    def verify(self, party: Party) -> None:
        """Checks that a party signed it.

        Raises:
            InvalidMessageError: If it did not.
        """
        party.verify(disjointness(self.head, self.fingerprint, self.reason), self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A row as people read it.

    Args:
        number: From 0, which is the row that opened the ledger.
        time: When it was written, by this machine's clock, in UTC.
        kind: "open", "reserve", "commit", "declare" or "countersign".
        reservation: What was reserved or committed, as it stood then; None for other rows.
        text: The row in words.
    """

    number: int
    time: str
    kind: str
    reservation: Reservation | None
    text: str


def read_reservation(identity: str, body: dict[str, Any]) -> Reservation:
    """The reservation in a row.

    Raises:
        ValueError, TypeError, LookupError: If this version does not understand it.
    """
    session, number, attempt = bytes.fromhex(body["session"]), body["round"], body["attempt"]
    check_place(session, number, attempt)
    silo_event = decode_event(body["silo_event"]) if "silo_event" in body else None
    if silo_event is not None and not isinstance(silo_event, DiscreteGaussianSum):
        raise ValueError("expected another event for the silo")
    return Reservation(
        id=identity,
        event=decode_event(body["event"]),
        session=session,
        round=number,
        attempt=attempt,
        committed=False,
        silo_event=silo_event,
        fingerprint=bytes.fromhex(body["fingerprint"]) if "fingerprint" in body else None,
    )


def read_declaration(head: bytes, body: dict[str, Any]) -> DisjointnessDeclaration:
    """The declaration in a row that follows a head. Raises as `read_reservation`."""
    return DisjointnessDeclaration(
        head=head,
        fingerprint=bytes.fromhex(body["fingerprint"]),
        reason=body["reason"],
        declared_by=body["by"],
        public_key=bytes.fromhex(body["public_key"]),
        signature=bytes.fromhex(body["signature"]),
    )


def disjointness(head: bytes, fingerprint: bytes, reason: str) -> bytes:
    """What is signed to declare data disjoint from all that the ledger held at a head."""
    return b"privfed disjoint data v1" + head + fingerprint + reason.encode()


def check_place(session: object, number: object, attempt: object) -> None:
    """Refuses a session that is not 1 to 64 bytes, and numbers that are not whole and from 0, with a ValueError."""
    if not isinstance(session, bytes) or not 1 <= len(session) <= 64:
        raise ValueError("expected a session of 1 to 64 bytes, got something else")
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in (number, attempt)):
        raise ValueError(f"expected round and attempt to be integers from 0, got {number!r} and {attempt!r}")

"""What the server stored of one attempt at one round, verified again whenever it is read."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from privfed.agreement import RoundContext
from privfed.digest import RoundDigest, abridge, hash_abridged
from privfed.errors import CohortError, DamagedFileError, InvalidMessageError, RoundMismatchError
from privfed.he.params import KEY_ID_BYTES
from privfed.identity import SIGNATURE_BYTES
from privfed.message import Kind
from privfed.spool import Spool
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.wire import decode_setup, setup_public_key, upload_chunk
from privfed.wire_commit import decode_commitments
from privfed.wire_digest import decode_digest
from privfed.wire_escrow import decode_holder_key
from privfed.wire_shares import decode_dealt_setup

HOLDER_KEY = "holder_key"
COMMITMENTS = "commitments"
PRODUCTS = "products"
OPENED = "opened"


class Phase(Enum):
    """Where a round stands. A phase ends when the file of its value is in the spool; they follow each other in this order.

    A message in the wrong phase is refused without a look at it.
    """

    SETUP = "key"
    """Setup messages come in: every client says which key it derived."""
    UPLOAD = "digest"
    """Uploads come in."""
    APPROVAL = "aggregate"
    """The digest is announced and approvals come in."""
    DONE = "done"
    """The aggregate is made; there is no such file, so it never ends."""


class RoundSpool:
    """The signed messages of one attempt, and the files that end its phases, on which a new object goes on where the last one stopped.

    Args:
        context: Agreement, round and attempt.
        directory: For the messages of all rounds; a subdirectory is made for this attempt.

    What was kept was verified when it came. Where it is not what came any more, whatever reads it raises `DamagedFileError`.
    """

    def __init__(self, *, context: RoundContext, directory: Path) -> None:
        self.context = context
        self.files = Spool(directory / f"{context.agreement.session.hex()}-{context.round}-{context.attempt}")

    @property
    def phase(self) -> Phase:
        """Where the round stands.

        Raises:
            DamagedFileError: If what ended an earlier phase is gone, and something of a later one is there.
        """
        phase = next(phase for phase in Phase if not self.files.has(phase.value))
        later = {Phase.SETUP: (Kind.COMMIT, Kind.UPLOAD, Kind.APPROVAL), Phase.UPLOAD: (Kind.APPROVAL,)}.get(phase, ())
        with self.reading():
            order = list(Phase)
            ended = [after for after in order[order.index(phase) :] if self.files.has(after.value)]
            if ended or any(self.files.names(_prefix(kind)) for kind in later):
                raise InvalidMessageError
        return phase

    @contextmanager
    def reading(self) -> Generator[None]:
        """For what was verified when it came, and kept: now it can only be damaged.

        Raises:
            DamagedFileError: In place of what a damaged or missing message raises.
        """
        try:
            yield
        except (InvalidMessageError, RoundMismatchError, FileNotFoundError, IsADirectoryError) as error:
            raise DamagedFileError(
                f"the server's spool of round {self.context.round} is damaged: a message is missing or is not what came; nothing was "
                "summed; put the folder back as it was, end the round with the version of privfed that began it, or go on with a new round"
            ) from error

    def received(self, kind: Kind) -> tuple[str, ...]:
        """Names of the clients whose message of this kind is stored, in roster order."""
        stored = set(self.files.names(_prefix(kind)))
        return tuple(name for name in self.context.agreement.roster.names if name in stored)

    def store(self, kind: Kind, sender: str, data: bytes, *, phase: Phase, cohort: Collection[str]) -> str:
        """Keeps a verified message, or refuses it; the same bytes again are fine whenever they come.

        Args:
            kind: Of the message.
            sender: Name of the client that signed it.
            data: The message.
            phase: In which it may come.
            cohort: Names of the clients that may send it.

        Returns:
            The sender.

        Raises:
            CohortError: If another one of that sender came before, or it comes in another phase or of another client.
        """
        name = _prefix(kind) + sender
        if self.files.has(name):
            stored = self.files.get(name)
            if stored != data:
                with self.reading():
                    self.context.agreement.roster.client(sender).verify(memoryview(stored)[:-SIGNATURE_BYTES], stored[-SIGNATURE_BYTES:])
                raise CohortError(f"{sender!r} sent another {kind.name} message before; this one was dropped")
            return sender
        if self.phase is not phase:
            raise CohortError(f"the {kind.name} message of {sender!r} came in the phase {self.phase.name}; it was dropped")
        if sender not in cohort:
            raise CohortError(f"{sender!r} takes no part in round {self.context.round}; its {kind.name} message was dropped")
        self.files.put(name, data)
        return sender

    def path(self, kind: Kind, name: str) -> Path:
        """Where the message of this kind of a client is or would be."""
        return self.files.path(_prefix(kind) + name)

    def message(self, kind: Kind, name: str) -> bytes:
        """A client's message of this kind, not verified again.

        Raises:
            FileNotFoundError: If it is not stored; inside `reading`, a `DamagedFileError`.
        """
        return self.files.get(_prefix(kind) + name)

    def holder_key(self) -> tuple[bytes, bytes]:
        """The key holder's public key of the attempt, as it signed it, and the key id in it.

        Raises:
            CohortError: If it has not come.
        """
        if not self.files.has(HOLDER_KEY) and not self.received(Kind.SETUP):
            raise CohortError(f"the key holder has announced no key for round {self.context.round}; nothing happened; ask it")
        with self.reading():
            data = self.files.get(HOLDER_KEY)
            return data, decode_holder_key(data, self.context).key_id

    def setup(self, name: str) -> tuple[bytes, bytes]:
        """Key id and public key, empty where there is none, in a client's setup message."""
        with self.reading():
            data = self.message(Kind.SETUP, name)
            sender, key_id = read_setup(data, self.context)
            if sender != name:
                raise InvalidMessageError
            return key_id, setup_public_key(data, self.context)

    def shares_for(self, name: str) -> Mapping[str, bytes]:
        """The share message that each client of the setup made for one of them, by name of its maker."""
        with self.reading():
            setups = {sender: decode_dealt_setup(self.message(Kind.SETUP, sender), self.context) for sender in self.received(Kind.SETUP)}
            if any(setup[0] != sender for sender, setup in setups.items()):
                raise InvalidMessageError
        return {sender: setup[2][name] for sender, setup in setups.items()}

    @property
    def key_id(self) -> bytes:
        """Name of the key of the round, 16 bytes, once the setup has ended."""
        key_id = self.files.get(Phase.SETUP.value)
        with self.reading():
            if len(key_id) != KEY_ID_BYTES:
                raise InvalidMessageError
        return key_id

    def public_key(self) -> bytes:
        """The public key that every client of the round made. One alone could choose a key under which zeros hide nothing from it."""
        made = {self.setup(name) for name in self.received(Kind.SETUP)}
        with self.reading():
            if len(made) != 1:
                raise InvalidMessageError
            ((key_id, public_key),) = made
            if key_id != self.key_id:
                raise InvalidMessageError
        return public_key

    def commitments(self) -> Mapping[str, bytes]:
        """Hash of the upload to which each client committed, by name, in roster order; none before the commitments were closed."""
        uploaded = isinstance(self.context.agreement.trust, EscrowTrust) and self.received(Kind.UPLOAD)
        if not uploaded and not self.files.has(COMMITMENTS):
            return {}
        with self.reading():
            return decode_commitments(self.files.get(COMMITMENTS), self.context, self.key_id)

    def digest(self) -> RoundDigest:
        """The announced digest.

        Raises:
            CohortError: If none was announced.
        """
        if self.phase in (Phase.SETUP, Phase.UPLOAD):
            raise CohortError(f"round {self.context.round} has no digest yet; close the uploads first; nothing happened")
        key_id = self.key_id
        with self.reading():
            return decode_digest(self.files.get(Phase.UPLOAD.value), self.context, key_id)

    def announced(self, digest: RoundDigest, name: str) -> bytes:
        """What `abridge` leaves of a participant's upload, if it is the one that was announced."""
        with self.reading():
            abridged = abridge(self.message(Kind.UPLOAD, name))
            if hash_abridged(abridged) != digest.upload_hashes[digest.participants.index(name)]:
                raise InvalidMessageError
        return abridged

    def chunk(self, name: str, index: int) -> bytes:
        """Chunk `index` of a client's upload, read from disk alone."""
        with self.reading():
            path = self.path(Kind.UPLOAD, name)
            span = upload_chunk(path.stat().st_size, self.context, index)
            with path.open("rb") as file:
                file.seek(span.start)
                return file.read(span.stop - span.start)

    def opened(self) -> bytes:
        """What the key holder published of the round, as it came.

        Raises:
            CohortError: If nothing came yet.
        """
        if not self.files.has(OPENED):
            raise CohortError(f"the key holder has not opened round {self.context.round}; nothing happened; ask it")
        return self.files.get(OPENED)


def read_setup(data: bytes, context: RoundContext) -> tuple[str, bytes]:
    """Sender and key id of a setup message of the trust mode.

    Raises:
        PrivFedError: As `wire.decode_setup`.
    """
    if isinstance(context.agreement.trust, ThresholdTrust):
        return decode_dealt_setup(data, context)[:2]
    return decode_setup(data, context)


def _prefix(kind: Kind) -> str:
    return f"{kind.name.lower()}-"

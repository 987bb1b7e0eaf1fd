"""A client's side of a session in `EscrowKey` mode: it encrypts to the key holder, and cannot decrypt."""

from collections.abc import Mapping
from pathlib import Path

from privfed.agreement import Agreement, RoundContext
from privfed.client import Trainer
from privfed.digest import hash_message
from privfed.errors import DamagedFileError, OpeningRefusedError, PrivFedError
from privfed.he.escrow import HolderKey
from privfed.identity import Identity
from privfed.keys.party import Party
from privfed.protect import Protected, protect
from privfed.session import ClientSession, outbox_name
from privfed.session_checks import agreed_trust
from privfed.trust import EscrowTrust
from privfed.update import PlainVector, Update
from privfed.wire_commit import decode_commitments, encode_commitment
from privfed.wire_escrow import decode_holder_key


class EscrowSession(ClientSession):
    """One client's side of a session with a key holder.

    It encrypts to the public key that the agreed holder signed for this very attempt, and it takes one of these: nothing of an earlier
    attempt can be added to a sum. It seals what comes of it to the other one, so that nobody but the holder can decrypt it with any key.

    It hands out its upload when it holds the commitments of all clients to theirs, and approves a sum of exactly these and no others: so
    nobody chose an upload that depends on this one. What it committed to and what it saw of the others is in its outbox, and stays.

    Args:
        trainer: The client's training.
        identity: Its signing key.
        party: Its keys, to which the key holder encrypts what it opened. Secret.
        agreement: What the session agreed on.
        start: See `ClientSession`.
        directory: See `ClientSession`.

    Raises:
        AgreementMismatchError: If the agreement is of another trust mode, or names another encryption key of this client.
        PrivFedError: As `ClientSession`.
    """

    def __init__(
        self, *, trainer: Trainer, identity: Identity, party: Party, agreement: Agreement, start: PlainVector, directory: Path
    ) -> None:
        agreed_trust(EscrowTrust, party=party, identity=identity, agreement=agreement)
        super().__init__(trainer=trainer, identity=identity, agreement=agreement, keys=None, start=start, directory=directory)
        self.party = party
        self._holder_key: HolderKey | None = None

    def take_key(self, context: RoundContext, data: bytes) -> None:
        """Checks and keeps the key holder's public key of an attempt: one, once. It comes before everything else.

        Raises:
            OpeningRefusedError: If another one was kept before. Nothing was kept.
            PrivFedError: As `check_history` and `wire_escrow.decode_holder_key`.
        """
        self.check_history(context)
        key = decode_holder_key(data, context)
        try:
            self._outbox.put(_key_name(context), data)
        except FileExistsError:
            raise OpeningRefusedError(
                f"another key of the key holder for round {context.round} came to {self.name!r} before; this one was dropped; begin a new "
                "attempt"
            ) from None
        self._holder_key = key

    def key_id(self, context: RoundContext) -> bytes:
        """Name of the key holder's key of the attempt, 16 bytes. Public.

        Raises:
            OpeningRefusedError: If it has not come.
            DamagedFileError: If it is not what was kept.
        """
        return self._taken_key(context).key_id

    def _taken_key(self, context: RoundContext) -> HolderKey:
        if self._holder_key is None or self._holder_key.binding != context.digest:
            name = _key_name(context)
            if not self._outbox.has(name):
                raise OpeningRefusedError(
                    f"the key holder's key for this attempt at round {context.round} has not come to {self.name!r}; nothing was done; it "
                    "comes first"
                )
            try:
                self._holder_key = decode_holder_key(self._outbox.get(name), context)
            except PrivFedError as error:
                raise DamagedFileError(
                    f"the key holder's key that {self.name!r} kept of round {context.round} is not what was written; nothing was done; put "
                    "it back, or leave this client out of the round"
                ) from error
        return self._holder_key

    def keep_scores(self, context: RoundContext, scores: Mapping[str, float]) -> None:
        """Keeps nothing: the scores are the key holder's, and no client sees any."""

    def commit(self, context: RoundContext) -> bytes:
        """Charges the ledger, trains, encrypts and stores as `ClientSession.upload` does; returns the commitment to what it stored.

        Again, it returns the same bytes.

        Raises:
            PrivFedError: As `ClientSession.upload`.
        """
        upload = super().upload(context)
        return encode_commitment(context, self._identity, hash_message(upload), key_id=self.key_id(context))

    def take_commitments(self, context: RoundContext, data: bytes) -> None:
        """Checks and keeps what the clients of the attempt committed to: one set of them, once.

        Raises:
            OpeningRefusedError: If this client has not committed, its own commitment is not among them, they are fewer than a round
                needs, or other ones were kept before. Nothing was kept, and the upload was not handed out for them.
            PrivFedError: As `check_history` and `wire_commit.decode_commitments`.
        """
        self.check_history(context)
        name, least = outbox_name(context), context.agreement.least_participants
        if not self._outbox.has(name):
            raise OpeningRefusedError(
                f"{self.name!r} has not committed to an upload in round {context.round}; nothing was kept; it comes first"
            )
        committed = decode_commitments(data, context, self.key_id(context))
        if committed.get(self.name) != hash_message(self._outbox.get(name)):
            raise OpeningRefusedError(f"the commitments that came to {self.name!r} lack its own; nothing was kept; begin a new attempt")
        if len(committed) < least:
            raise OpeningRefusedError(
                f"a round needs {least} clients, and {len(committed)} committed; nothing was kept; wait for more, or begin a new attempt"
            )
        try:
            self._outbox.put(_commitments_name(context), data)
        except FileExistsError:
            raise OpeningRefusedError(
                f"other commitments of round {context.round} came to {self.name!r} before; these were dropped; begin a new attempt"
            ) from None

    def upload(self, context: RoundContext) -> bytes:
        """The stored upload message, once the commitments of the others were taken. It trains and charges nothing.

        Raises:
            OpeningRefusedError: If they have not come; nothing was handed out.
            PrivFedError: As `ClientSession.upload`.
        """
        self.check_history(context)
        self._committed(context)
        return super().upload(context)

    def _check_ready(self, context: RoundContext) -> None:
        if self._outbox.has(_commitments_name(context)):
            raise DamagedFileError(
                f"the upload of {self.name!r} for round {context.round}, to which it committed, is gone; nothing was trained or charged; "
                "put the outbox back, or leave this client out of the round"
            )

    def _committed(self, context: RoundContext) -> Mapping[str, bytes]:
        name = _commitments_name(context)
        if not self._outbox.has(name):
            raise OpeningRefusedError(
                f"the commitments of the others have not come to {self.name!r}; nothing was handed out or approved; they come first"
            )
        try:
            return decode_commitments(self._outbox.get(name), context, self.key_id(context))
        except PrivFedError as error:
            raise DamagedFileError(
                f"the commitments that {self.name!r} kept of round {context.round} are not what was written; nothing was handed out or "
                "approved; put them back, or leave this client out of the round"
            ) from error

    def _protect(self, update: Update[PlainVector], context: RoundContext) -> Protected:
        return protect(update, context, round_key=self._taken_key(context), weight=self._trainer.weight)


def _key_name(context: RoundContext) -> str:
    return f"{outbox_name(context)}-key"


def _commitments_name(context: RoundContext) -> str:
    return f"{outbox_name(context)}-commitments"

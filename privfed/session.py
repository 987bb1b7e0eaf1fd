"""A client's side of a session, up to the approval of a digest. Bytes in, bytes out."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privfed.aggregation.rules import CumulativeRule
from privfed.agreement import Agreement, RoundContext
from privfed.approval import Answer, approve
from privfed.client import Trainer
from privfed.contribution.scores import Scores, ScoreStore
from privfed.digest import RoundDigest, hash_message
from privfed.dp.countersign import HeadMemory
from privfed.errors import (
    DamagedFileError,
    HistoryMismatchError,
    InvalidMessageError,
    LayoutMismatchError,
    OpeningRefusedError,
    PrivFedError,
)
from privfed.files import FolderLock, make_folder, sweep
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keys.chain import KeyChain
from privfed.protect import Protected, protect, round_key
from privfed.session_checks import HEADS, JOURNAL, check_agreed, check_charged, check_complete, check_same_rounds
from privfed.session_heads import LedgerHeads
from privfed.spool import Spool
from privfed.state import ModelState, ModelStore
from privfed.update import Aggregate, PlainVector, Update
from privfed.wire import decode_upload, encode_abort, encode_setup, encode_upload, upload_statement
from privfed.wire_approved import SignedHeads
from privfed.wire_products import encode_coefficients

if TYPE_CHECKING:
    from privfed.he.secret import RoundKey, SharedKey


_SCORES = "scores.json"


class ClientSession:
    """One client's side of a session: it trains, protects, sends, and approves.

    Everything it must not forget is in its directory: the encrypted uploads, the promises, the model, the heads of its peers' privacy
    ledgers. A new object on the same
    directory goes on where the last one stopped. An upload is stored before the ledger's reservation is committed, and a retry
    resends the stored bytes; so nothing is trained, encrypted or charged twice for one upload.

    One object at a time holds the directory, until `close`, or until the object or the process ends.

    Args:
        trainer: The client's training.
        identity: Its signing key.
        agreement: What the session agreed on.
        keys: The clients' shared key; or their `KeyChain`, whose keys are erased as soon as a round is in the model; None in a trust mode
            in which they share none (`ThresholdSession`). Secret.
        start: The weights from which the session starts, if the directory holds no later ones.
        directory: This client's own; made with mode 0700 if it is not there.

    Raises:
        AgreementMismatchError: If the identity, the key, the start, the model, the encryption parameters, the weight, the ledger or the
            silo noise is another one than the agreement names; nothing was done.
        FolderInUseError: If another object holds the directory; nothing was done.
        DamagedFileError: If a file in the directory is damaged, or was taken away, or is an older copy than the others; nothing was
            done. An older copy of the journal from before a promise, with no opened round in between, is not noticed.
        PrivFedError: As `Trainer.remember`.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        identity: Identity,
        agreement: Agreement,
        keys: "SharedKey | KeyChain | None",
        start: PlainVector,
        directory: Path,
    ) -> None:
        check_agreed(agreement, identity=identity, trainer=trainer, keys=keys, start=start)
        make_folder(directory)
        with ExitStack() as stack:
            lock = FolderLock(directory)
            stack.callback(lock.release)
            self._trainer = trainer
            self._identity = identity
            self._agreement = agreement
            self._keys = keys
            self._outbox = Spool(directory / "outbox")
            for folder in (directory, directory / "outbox"):
                sweep(folder)
            self._store = ModelStore(directory / "model.npz", layout=agreement.layout)
            stored = self._store.load()
            check_complete(directory, used=stored is not None or bool(self._outbox.names("")))
            self._state = stored or ModelState(values=start)
            trainer.remember(directory, rounds=self._state.rounds)
            self._round_key: tuple[bytes, RoundKey] | None = None
            memory = HeadMemory(directory / HEADS)  # before the journal: see `check_complete`
            self._heads = LedgerHeads(trainer=trainer, identity=identity, memory=memory)
            self.journal = Journal(directory / JOURNAL)
            check_same_rounds(self.journal, self._state, session=agreement.session, name=self.name)
            rule = agreement.rule
            self._scores = ScoreStore(directory / _SCORES, rule=rule.name) if isinstance(rule, CumulativeRule) else None
            self._erase_stored()
            stack.pop_all()
        self._lock = lock

    def close(self) -> None:
        """Lets go of the folder, so that another object may go on there."""
        self._lock.release()

    @property
    def name(self) -> str:
        """Name in the roster. Public."""
        return self._identity.name

    @property
    def state(self) -> ModelState:
        """The model as this client holds it."""
        return self._state

    def round_key(self, context: RoundContext) -> "RoundKey":
        """The key of a round. Secret. Kept until another round asks for its own, because deriving it takes longer than using it.

        Raises:
            ValueError: If the clients share no key.
        """
        if self._keys is None:
            raise ValueError("expected a session whose clients share a key")
        if self._round_key is None or self._round_key[0] != context.digest:
            self._round_key = (context.digest, round_key(self._keys, context))
        return self._round_key[1]

    def key_id(self, context: RoundContext) -> bytes:
        """Name of the key of a round, 16 bytes. Public."""
        return self.round_key(context).key_id

    def setup(self, context: RoundContext) -> bytes:
        """The setup message: which key this client derived for the round, and its public half where the server multiplies uploads.

        Raises:
            HistoryMismatchError: If this client has not opened the rounds that the context builds on.
        """
        self.check_history(context)
        public_key = self.round_key(context).public_key() if context.agreement.setup_key_bytes else b""
        return encode_setup(context, self._identity, self.key_id(context), public_key)

    def upload(self, context: RoundContext) -> bytes:
        """Charges the ledger, trains, encrypts, stores; returns the upload message. Again, it returns the stored bytes.

        Raises:
            HistoryMismatchError: If this client has not opened the rounds that the context builds on; nothing was trained.
            BudgetExceededError: If the budget does not cover the round; nothing was trained.
            DamagedFileError: If the stored bytes are not what was written, or are gone; nothing was trained or sent.
            LedgerError: If the head of the ledger does not fit into a message; nothing was charged.
            PrivFedError: As `Trainer.train`; what was charged stays charged.
        """
        self.check_history(context)
        place: dict[str, Any] = {"session": context.agreement.session, "round": context.round, "attempt": context.attempt}
        name = outbox_name(context)
        if self._outbox.has(name):
            self._check_stored(context, self._outbox.get(name))
        else:
            if self._trainer.committed(**place) or self.journal.promised(context):
                raise DamagedFileError(
                    f"the upload of {self.name!r} for round {context.round} was stored and is gone; nothing was trained or charged; put "
                    "the outbox back, or leave this client out of the round"
                )
            self._check_ready(context)
            self._heads.check_fits(context)
            try:
                self._outbox.put(name, self._new_upload(context, place))
            except BaseException:
                self._round_key = None  # it has encrypted, and nothing of that left: the next try needs it anew
                raise
        self._trainer.commit(**place)
        return self._outbox.get(name)

    def _new_upload(self, context: RoundContext, place: Mapping[str, Any]) -> bytes:
        update = self._trainer.train(self._state.values, **place)
        protected = self._protect(update, context)
        return encode_upload(context, self._identity, protected.update, statement=self._heads.statement(context))

    def _protect(self, update: Update[PlainVector], context: RoundContext) -> Protected:
        return protect(update, context, round_key=self.round_key(context), weight=self._trainer.weight)

    def _check_ready(self, context: RoundContext) -> None:
        """For what must be there before a client trains."""

    def check_charges(self) -> None:
        """Refuses a ledger that does not know of an upload in the outbox: it was lost, or is an older copy. For who opens a folder anew.

        Raises:
            LedgerError: If it does not; nothing was done.
        """
        check_charged(self._trainer, self._outbox, session=self._agreement.session)

    def _check_stored(self, context: RoundContext, data: bytes) -> None:
        try:
            if decode_upload(data, context, self.key_id(context)).sender != self.name:
                raise InvalidMessageError
        except PrivFedError as error:
            raise DamagedFileError(
                f"the stored upload of {self.name!r} for round {context.round} is not what was written; nothing was sent; put it back, "
                "end the round with the version of privfed that wrote it, or leave this client out of the round: its model and its ledger "
                "are not concerned"
            ) from error

    def approve(self, context: RoundContext, digest: bytes) -> bytes:
        """Checks the server's digest and signs it. Whatever the digest is, nothing is trained, encrypted or charged for it.

        Raises:
            HistoryMismatchError: If this client has not opened the rounds that the context builds on.
            OpeningRefusedError: If this client has uploaded nothing in this round.
            PrivFedError: As `approval.approve`.
        """
        self.check_history(context)
        name = outbox_name(context)
        if not self._outbox.has(name):
            raise OpeningRefusedError(f"{self.name!r} has uploaded nothing in round {context.round}; nothing was approved")
        upload = self._outbox.get(name)
        return approve(
            context,
            self._identity,
            digest,
            key_id=self.key_id(context),
            upload_hash=hash_message(upload),
            journal=self.journal,
            statement=upload_statement(upload, context),
            witness=lambda statements: self._heads.countersign(context, statements),
            answer=self._answer(context),
            committed=self._committed(context),
        )

    def scores(self) -> Mapping[str, float]:
        """Cumulative scores after the rounds in the model, for rules that keep some. Private to the openers."""
        return self._stored_scores().values

    def _stored_scores(self) -> Scores:
        return Scores(rule=self._agreement.rule.name) if self._scores is None else self._scores.load()

    def keep_scores(self, context: RoundContext, scores: Mapping[str, float]) -> None:
        """Keeps the scores after a round, once: again, it does nothing. Called before the aggregate enters the model."""
        stored = self._stored_scores()
        if self._scores is not None and context.round not in stored.rounds:
            self._scores.save(stored.after(context.round, scores))

    def encode_coefficients(self, context: RoundContext, digest: RoundDigest, coefficients: Sequence[int]) -> bytes:
        """The message that tells the server what it is to multiply by, and nothing else of the scores."""
        return encode_coefficients(context, self._identity, digest, coefficients)

    def _answer(self, context: RoundContext) -> Answer | None:  # noqa: ARG002 (for subclasses)
        return None

    def _committed(self, context: RoundContext) -> Mapping[str, bytes] | None:  # noqa: ARG002 (for subclasses)
        return None

    def check_heads(self, context: RoundContext, heads: SignedHeads) -> None:
        """Refuses an aggregate that says of ledgers what was never said, or of this client's what its ledger does not hold any more.

        With statements other than those that the participants signed, their countersignatures would be nobody's, and none recorded.

        Raises:
            TamperedAggregateError: If this client's statement is not the one that it sent, or the statements are not those that it
                countersigned.
            InvalidMessageError, LedgerError: As `countersign.check_stated`.
        """
        name = outbox_name(context)
        sent = upload_statement(self._outbox.get(name), context) if self._outbox.has(name) else None
        self._heads.check(context, heads, sent=sent)

    def abort(self, context: RoundContext) -> bytes:
        """The message that tells the server that this client did not open the aggregate, and not why."""
        return encode_abort(context, self._identity, self.key_id(context))

    def keep_countersignatures(self, context: RoundContext, heads: SignedHeads) -> None:
        """Records in this client's ledger which peers countersigned its head in an opened round. One that is none is left out."""
        self._heads.keep(context, heads)

    def check_history(self, context: RoundContext) -> None:
        """Refuses a round that builds on other rounds than this client has opened, or is not later than all of them.

        Raises:
            HistoryMismatchError: If it does.
            FolderInUseError: If this object let its folder go, or belongs to another process.
        """
        self._lock.check()
        last = self._state.rounds[-1] if self._state.rounds else -1
        if context.history != self._state.history or context.round <= last:
            raise HistoryMismatchError(
                f"round {context.round} builds on other rounds than {self.name!r} has opened ({list(self._state.rounds)}); "
                "nothing was done; open the missed aggregates first"
            )

    def apply(self, aggregate: Aggregate[PlainVector], *, history: bytes, attempt: int = 0) -> None:
        """Moves the model by an opened aggregate, as the agreed server optimiser does, durably, after training took note of it.

        The opening has begun in `journal`, as `KeyHolder` does it: a start on a model whose rounds the journal does not know is refused.

        Args:
            aggregate: Of a later round than those in the model.
            history: `RoundDigest.history` of that round, 32 bytes: the history from here on.
            attempt: Number of the attempt that was opened.

        Raises:
            ValueError: If the round is not later than those in the model.
            LayoutMismatchError: If the aggregate has another layout; the model is as it was.
            PrivFedError: As `Trainer.opened`; the model is as it was.
        """
        self._lock.check()
        if aggregate.vector.layout != self._agreement.layout:
            raise LayoutMismatchError("the aggregate has another layout than the agreement; the model is as it was")
        state = self._state.after(aggregate.vector, round=aggregate.round, optimizer=self._agreement.server_optimizer, history=history)
        self._trainer.opened(aggregate, attempt=attempt)
        self._store.save(state)
        self._state = state
        self._erase_stored()

    def _erase_stored(self) -> None:
        """Erases the keys of the rounds that are in the model, if the key can be erased round by round."""
        if isinstance(self._keys, KeyChain) and self._state.rounds:
            self._round_key = None
            self._keys.erase_through(self._state.rounds[-1])


def outbox_name(context: RoundContext) -> str:
    """Name of the file with the upload of an attempt."""
    return f"{context.agreement.session.hex()}-{context.round}-{context.attempt}"

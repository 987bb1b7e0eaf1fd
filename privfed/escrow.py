"""`EscrowKey`: the one key holder."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from privfed.aggregation.rules import CumulativeRule
from privfed.agreement import Agreement, NamedRule, RoundContext
from privfed.approval import check_digest
from privfed.contribution.scores import ScoreStore
from privfed.decision import Decision, decide
from privfed.digest import RoundDigest, hash_message
from privfed.errors import (
    AgreementMismatchError,
    AlreadyOpenedError,
    DamagedFileError,
    DecryptionError,
    InvalidMessageError,
    OpeningRefusedError,
    PrivFedError,
    RoundMismatchError,
    TamperedAggregateError,
)
from privfed.files import make_folder
from privfed.he.escrow import RunningSum, SealedVector, WholeVector
from privfed.he.escrow_secret import AttemptKey, EscrowKey
from privfed.he.product_secret import open_escrowed_products
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keyholder import check_all_approved, scored_mean
from privfed.release import seal_release
from privfed.spool import Spool
from privfed.trust import EscrowTrust
from privfed.wire import decode_upload
from privfed.wire_aggregate import SealedSum
from privfed.wire_escrow import Chosen, decode_holder_key, decode_opened, decode_request, encode_holder_key, encode_opened

_MOST_KEYS = 16
"""Of how many histories of one attempt a key is announced. There is one, unless the server's own record was put back."""


class EscrowHolder:
    """The key holder's side of a session. It neither trains nor holds a model, and it trusts no sum and no product that it did not compute.

    Where a rule chooses the coefficients, it is the one who opens inner products and keeps the scores.

    Args:
        identity: Its signing key, which the agreement pins.
        key: Its key. Secret.
        agreement: What the session agreed on.
        directory: Its own folder, for what it promised and what it published; made with mode 0700 if it is not there.

    Raises:
        AgreementMismatchError: If the agreement is of another trust mode, pins another holder, or names a rule that looks at inner products
            by its name alone.
        DamagedFileError: If its journal or its scores were lost, or are older than the other; nothing was done.
        ValueError: If the scores are those of another rule.
    """

    def __init__(self, *, identity: Identity, key: EscrowKey, agreement: Agreement, directory: Path) -> None:
        trust = agreement.trust
        if not isinstance(trust, EscrowTrust) or trust.holder != identity.public:
            raise AgreementMismatchError(f"the agreement pins another key holder than {identity.name!r}; nothing was done")
        if isinstance(agreement.rule, NamedRule):
            raise AgreementMismatchError(
                f"the agreement has {agreement.rule.name} by name alone; nothing was done; put the rule in its place"
            )
        make_folder(directory)
        self._identity = identity
        self._key = key
        self._trust = trust
        self._journal = Journal(directory / "journal.sqlite")
        self._outbox = Spool(directory / "outbox")
        rule = agreement.rule
        self._scores = ScoreStore(directory / "scores.json", rule=rule.name) if isinstance(rule, CumulativeRule) else None
        if self._scores is not None:
            self._check_scores(self._scores, agreement.session)

    def _check_scores(self, scores: ScoreStore, session: bytes) -> None:
        """Refuses a journal and scores that are not of the same time: one of them was lost, or is an older copy."""
        opened = self._journal.opened(session)
        finished = {number for number, done in opened.items() if done}
        if not finished <= set(scores.load().rounds) <= opened.keys():
            raise DamagedFileError(
                f"the journal and the scores of {self._identity.name!r} do not hold the same rounds: one of them is an older copy or was "
                "lost; nothing was done; put back both as they were last, or begin a new session"
            )

    def announce_key(self, context: RoundContext) -> bytes:
        """The public keys of one attempt at one round, signed, for the clients; the same bytes again when called again.

        The pairs are derived from the holder's secret, so they are there again after a restart. What is kept are the public halves: each
        one that is made of the first is another encryption of zero, and all clients must have the same. They are dropped as soon as a
        later attempt or round begins; so what a server can have the holder keep is bounded.

        Raises:
            RoundMismatchError: If a key of a later attempt or round was announced; nothing was done.
            OpeningRefusedError: If keys of too many histories were announced for this attempt; nothing was done.
        """
        name, session = _key_name(context), context.agreement.session
        announced = {each: _attempt_of(each) for each in self._outbox.names("") if each.startswith(_session_keys(session))}
        attempt = _attempt_of(name)
        if any(each > attempt for each in announced.values()):
            raise RoundMismatchError(
                f"the request for a key of round {context.round}, attempt {context.attempt}, came after one for a later round or attempt; "
                "nothing was done"
            )
        if name not in announced:
            histories = sum(each == attempt for each in announced.values())
            if histories >= _MOST_KEYS:
                raise OpeningRefusedError(
                    f"keys of {histories} histories were announced for attempt {context.attempt} at round {context.round}; "
                    "nothing was done; begin a new attempt"
                )
            key = self._attempt_key(context)
            self._outbox.put(name, encode_holder_key(context, self._identity, key.public_key(), key.encryption_key))
        for each, earlier in announced.items():
            if earlier < attempt:
                self._outbox.path(each).unlink()
        self.key_id(context)
        return self._outbox.get(name)

    def _attempt_key(self, context: RoundContext) -> AttemptKey:
        return self._key.attempt_key(binding=context.digest, params=context.agreement.params)

    def key_id(self, context: RoundContext) -> bytes:
        """Name of the key of an attempt, 16 bytes. Public.

        Raises:
            OpeningRefusedError: If none was announced for it.
            DamagedFileError: If what was announced is not what was written.
        """
        name = _key_name(context)
        if not self._outbox.has(name):
            raise OpeningRefusedError(
                f"no key was announced for attempt {context.attempt} at round {context.round}; nothing was decrypted; begin a new attempt"
            )
        try:
            return decode_holder_key(self._outbox.get(name), context).key_id
        except PrivFedError as error:
            raise DamagedFileError(
                f"the public key that {self._identity.name!r} announced for round {context.round} is not what was written; nothing was "
                "decrypted; put it back, or begin a new attempt"
            ) from error

    def open(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes:
        """Verifies everything, computes the sum of the signed uploads itself, records the opening, then decrypts and publishes.

        In a scored session the inner products of the signed uploads come first, computed here too: their opening is on record before it
        happens, once per round, and the coefficients that follow from it are kept. If the policy allows none, the message says so and no
        sum is opened. The same request again gets the same bytes; after a crash it goes on with what was decided.

        Args:
            context: Agreement, round and attempt.
            request: The server's request.
            upload: Gives the upload message of a participant, as its client signed it.

        Returns:
            A message for the clients, which the server carries and cannot read.

        Raises:
            OpeningRefusedError: If a participant did not approve or had not committed to its upload, the coefficients or the rule are
                not the agreed ones, the policy does not allow the opening, or no key was announced for the attempt.
            TamperedAggregateError: If an upload is not the one that was approved.
            AlreadyOpenedError: If the round was opened, or promised to another digest.
            DecryptionError: If an upload was not sealed by its client to this attempt's key, or the sum does not decrypt to grid points: an
                upload is no encryption of any, or one to the key of another attempt; or as `keyholder.scored_mean`.
            PrivFedError: As `wire_escrow.decode_request` and `wire.decode_upload`.
        """
        key_id, name = self.key_id(context), f"{context.agreement.session.hex()}-{context.round}"
        if self._outbox.has(name):
            published = self._outbox.get(name)
            if decode_opened(published, context, key_id)[0] != request:
                raise AlreadyOpenedError(f"round {context.round} was already opened; nothing was decrypted")
            self._journal.settle(context)
            return published
        message = decode_request(request, context, key_id)
        check_all_approved(message)
        check_digest(context, message.digest)
        digest, asked = message.digest, hash_message(request)
        key = self._attempt_key(context)
        uploads: Iterable[WholeVector] = _verified(context, digest, upload, key_id=key_id, key=key)
        decision, chosen = None, None
        if context.agreement.scored:
            uploads = list(uploads)
            decision = self._decide(context, digest, uploads, key=key, asked=asked)
            coefficients = tuple(decision.coefficients[participant] for participant in digest.participants)
            chosen = Chosen(coefficients=coefficients, fallback=decision.fallback)
            if chosen.skipped:
                nothing = SealedSum(sealed={}, ciphertext=b"")
                self._outbox.put(name, encode_opened(context, self._identity, request, nothing, key_id=key_id, chosen=chosen))
                return self._outbox.get(name)
            digest = replace(digest, coefficients=coefficients)
        total = _sum(context, digest, uploads, key_id=key_id)
        self._journal.begin(context, message.digest.digest(context), aggregate=asked)
        grid_sum = key.open_sum(total.total(), coefficients=tuple(total.coefficients))
        if decision is not None:
            scored_mean(grid_sum, context.agreement, coefficients=tuple(total.coefficients))
            self._keep_scores(context, decision)
        scale = None if decision is None else decision.scale
        release = seal_release(grid_sum, context, self._trust, digest=digest.digest(context), scale=scale)
        self._outbox.put(name, encode_opened(context, self._identity, request, release, key_id=key_id, chosen=chosen))
        self._journal.finish(context, aggregate=asked)
        return self._outbox.get(name)

    def _decide(
        self, context: RoundContext, digest: RoundDigest, uploads: Sequence[WholeVector], *, key: AttemptKey, asked: bytes
    ) -> Decision:
        """What was made of the inner products of these uploads, now or before a crash."""
        round_digest = digest.digest(context)
        kept = self._journal.begin_products(context, round_digest, products=asked)
        if kept is not None:
            return Decision.from_bytes(kept)
        agreement = context.agreement
        scores: Mapping[str, float] = {} if self._scores is None else self._scores.load().values
        opened = open_escrowed_products(uploads, key)
        decision = decide(
            agreement, digest.participants, opened.products, scores=scores, assurance=opened.assurance.name, digest=round_digest
        )
        self._journal.keep_decision(context, decision.to_bytes())
        return decision

    def _keep_scores(self, context: RoundContext, decision: Decision) -> None:
        """Keeps the scores after a round, once, before what follows from them leaves."""
        if self._scores is not None and context.round not in (stored := self._scores.load()).rounds:
            self._scores.save(stored.after(context.round, decision.scores))


def _verified(
    context: RoundContext, digest: RoundDigest, upload: Callable[[str], bytes], *, key_id: bytes, key: AttemptKey
) -> Iterator[WholeVector]:
    """The uploads that were announced, one at a time, as their clients signed them, and without their seals."""
    for name, upload_hash in zip(digest.participants, digest.upload_hashes, strict=True):
        data = upload(name)
        if hash_message(data) != upload_hash:
            raise TamperedAggregateError
        update = decode_upload(data, context, key_id)
        if not isinstance(update.vector, SealedVector):
            raise TamperedAggregateError
        try:
            vector = key.unseal(update.vector, sender=update.sender)
        except InvalidMessageError:
            raise DecryptionError(
                f"what {name!r} signed was not sealed by it to the key of this attempt; nothing was decrypted; leave it out, in a new "
                "attempt"
            ) from None
        yield vector


def _sum(context: RoundContext, digest: RoundDigest, uploads: Iterable[WholeVector], *, key_id: bytes) -> RunningSum:
    agreement = context.agreement
    total = RunningSum(layout=agreement.sent_layout, params=agreement.params, key_id=key_id)
    for multiplier, vector in zip(agreement.weighting.multipliers(digest.coefficients), uploads, strict=True):
        # Only where a rule chose them, a coefficient can be zero.
        if multiplier or not agreement.scored:
            total.add(multiplier, vector)
    return total


def _session_keys(session: bytes) -> str:
    return f"key-{session.hex()}-"


def _key_name(context: RoundContext) -> str:
    """Names in the order of `_attempt_of`.

    With its history: what a server says of it must not use up the one name of an attempt.
    """
    return f"{_session_keys(context.agreement.session)}{context.round:010d}-{context.attempt:010d}-{context.digest.hex()}"


def _attempt_of(name: str) -> str:
    """The part of a key's name that says session, round and attempt, in the order of rounds and attempts."""
    return name.rpartition("-")[0]

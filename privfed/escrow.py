"""`EscrowKey`: the one key holder, and how a client opens what it published."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    OpeningRefusedError,
    TamperedAggregateError,
)
from privfed.files import make_folder
from privfed.he.escrow import RunningSum, WholeVector
from privfed.he.escrow_secret import EscrowKey
from privfed.he.product_secret import open_escrowed_products
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keyholder import Opener, check_all_approved
from privfed.keys.party import Party
from privfed.release import open_release, open_scored_release, seal_release
from privfed.spool import Spool
from privfed.trust import EscrowTrust
from privfed.wire import decode_upload
from privfed.wire_aggregate import OpenableAggregate, SealedSum, SignedHeads, Total
from privfed.wire_escrow import Chosen, Weighing, decode_opened, decode_request, encode_opened, read_opened


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
                not the agreed ones, or the policy does not allow the opening.
            TamperedAggregateError: If an upload is not the one that was approved.
            AlreadyOpenedError: If the round was opened, or promised to another digest.
            DecryptionError: If the sum does not decrypt to grid points.
            PrivFedError: As `wire_escrow.decode_request` and `wire.decode_upload`.
        """
        key_id, name = self._trust.key_id, f"{context.agreement.session.hex()}-{context.round}"
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
        decision, chosen = None, None
        if context.agreement.scored:
            decision = self._decide(context, digest, upload, asked=asked)
            coefficients = tuple(decision.coefficients[participant] for participant in digest.participants)
            chosen = Chosen(coefficients=coefficients, fallback=decision.fallback)
            if chosen.skipped:
                nothing = SealedSum(sealed={}, ciphertext=b"")
                self._outbox.put(name, encode_opened(context, self._identity, request, nothing, key_id=key_id, chosen=chosen))
                return self._outbox.get(name)
            digest = replace(digest, coefficients=coefficients)
        total = self._sum(context, digest, upload)
        self._journal.begin(context, message.digest.digest(context), aggregate=asked)
        grid_sum = self._key.open_sum(total.total(), session=context.agreement.session, coefficients=tuple(total.coefficients))
        if decision is not None:
            self._keep_scores(context, decision)
        scale = None if decision is None else decision.scale
        release = seal_release(grid_sum, context, self._trust, digest=digest.digest(context), scale=scale)
        self._outbox.put(name, encode_opened(context, self._identity, request, release, key_id=key_id, chosen=chosen))
        self._journal.finish(context, aggregate=asked)
        return self._outbox.get(name)

    def _decide(self, context: RoundContext, digest: RoundDigest, upload: Callable[[str], bytes], *, asked: bytes) -> Decision:
        """What was made of the inner products of these uploads, now or before a crash."""
        vectors = [vector for _, vector in self._verified(context, digest, upload)]
        kept = self._journal.begin_products(context, digest.digest(context), products=asked)
        if kept is not None:
            return Decision.from_bytes(kept)
        agreement = context.agreement
        scores: Mapping[str, float] = {} if self._scores is None else self._scores.load().values
        opened = open_escrowed_products(vectors, self._key, session=agreement.session)
        decision = decide(agreement, digest.participants, opened.products, scores=scores, assurance=opened.assurance.name)
        self._journal.keep_decision(context, decision.to_bytes())
        return decision

    def _keep_scores(self, context: RoundContext, decision: Decision) -> None:
        """Keeps the scores after a round, once, before what follows from them leaves."""
        if self._scores is not None and context.round not in (stored := self._scores.load()).rounds:
            self._scores.save(stored.after(context.round, decision.scores))

    def _sum(self, context: RoundContext, digest: RoundDigest, upload: Callable[[str], bytes]) -> RunningSum:
        agreement = context.agreement
        total = RunningSum(layout=agreement.sent_layout, params=agreement.params, key_id=self._trust.key_id)
        multipliers = agreement.weighting.multipliers(digest.coefficients)
        for multiplier, (_, vector) in zip(multipliers, self._verified(context, digest, upload), strict=True):
            # Only where a rule chose them, a coefficient can be zero.
            if multiplier or not agreement.scored:
                total.add(multiplier, vector)
        return total

    def _verified(self, context: RoundContext, digest: RoundDigest, upload: Callable[[str], bytes]) -> Iterator[tuple[str, WholeVector]]:
        """The uploads that were announced, one at a time, as their clients signed them."""
        for name, upload_hash in zip(digest.participants, digest.upload_hashes, strict=True):
            data = upload(name)
            if hash_message(data) != upload_hash:
                raise TamperedAggregateError
            vector = decode_upload(data, context, self._trust.key_id).vector
            if not isinstance(vector, WholeVector):
                raise TamperedAggregateError
            yield name, vector


class ReleaseOpener(Opener):
    """Takes over what the key holder opened, after the same checks as everywhere. Coefficients that a rule chose are held to the policy.

    Args:
        context: Agreement, round and attempt.
        trust: The key holder.
        party: This client, to which the release is encrypted. Secret.
        journal: See `Opener`.
        check_heads: See `Opener`.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        trust: EscrowTrust,
        party: Party,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        super().__init__(context=context, key_id=trust.key_id, journal=journal, check_heads=check_heads)
        self._party = party
        self._weighing: Weighing | None = None

    def _decode(self, data: bytes) -> OpenableAggregate:
        opened = read_opened(data, self._context, self._key_id)
        self._weighing = opened.weighing
        return opened.message

    def _decided(self, message: OpenableAggregate) -> RoundDigest:
        digest, agreement = message.digest, self._context.agreement
        if not agreement.scored:
            return digest
        if not any(message.coefficients):
            raise OpeningRefusedError(f"round {self._context.round} is skipped: no weights are allowed; nothing was opened")
        final = replace(digest, coefficients=message.coefficients)
        contributors = agreement.contributors(digest.participants)
        agreement.policy.check_chosen({name: final.by_name[name] for name in contributors})
        if any(coefficient for name, coefficient in final.by_name.items() if name not in contributors):
            raise OpeningRefusedError("the reference has a share in the aggregate, which nobody may open; nothing was opened")
        return final

    def _checked_sum(self, message: OpenableAggregate) -> Total:
        return message.total

    def _open(self, total: Total, message: OpenableAggregate) -> NDArray[np.int64]:
        if not isinstance(total, SealedSum):
            raise TamperedAggregateError
        digest = replace(message.digest, coefficients=message.coefficients).digest(self._context)
        if self._weighing is None:
            return open_release(total, self._context, self._party, digest=digest)
        grid_sum, scale = open_scored_release(total, self._context, self._party, digest=digest)
        self._decision = Decision(
            coefficients=dict(zip(message.digest.participants, message.coefficients, strict=True)),
            scale=scale,
            scores={},
            fallback=self._weighing.fallback,
            disclosed=self._weighing.disclosed,
            assurance=self._weighing.assurance,
        )
        return grid_sum

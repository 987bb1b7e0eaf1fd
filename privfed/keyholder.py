"""The one place that opens an aggregate: after all approvals, once per round, on the record.

In `SharedKey` mode every client is its own key holder; the same class serves a separate one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from privfed.agreement import RoundContext
from privfed.approval import check_digest
from privfed.decision import Decision
from privfed.digest import RoundDigest, hash_abridged, hash_message, sealed_tags
from privfed.errors import OpeningRefusedError, TamperedAggregateError
from privfed.he.additive import CkksVector
from privfed.he.codec import dequantise
from privfed.he.secret import RoundKey, check_sum, open_sum
from privfed.journal import Journal
from privfed.update import Aggregate, PlainVector
from privfed.wire_aggregate import OpenableAggregate, SignedHeads, decode_aggregate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What is known of an aggregate that was opened."""

    aggregate: bytes
    digest: bytes
    heads: SignedHeads


class KeyHolder:
    """Opens the aggregate of one round.

    Args:
        context: Agreement, round and attempt.
        round_key: The key of this round and attempt. Secret.
        journal: This party's own; a participant hands the one in which it approved.
        check_heads: Is handed the heads of the ledgers before anything is begun, and may refuse.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        round_key: RoundKey,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        self._context = context
        self._round_key = round_key
        self._journal = journal
        self._check_heads = check_heads
        self._opened: _Opened | None = None
        self._decision: Decision | None = None

    def open(self, data: bytes) -> Aggregate[PlainVector]:
        """Verifies everything, records the opening, then decrypts.

        What is not the announced combination of the signed uploads is refused before the opening is recorded, and long before a key
        touches it: the right aggregate can still be opened. After a crash the same bytes may be opened again until `finish`. No
        other bytes, and nothing after `finish`. What fails here is told to the server as `wire.encode_abort`, and in no more words.

        Args:
            data: The server's aggregate message.

        Returns:
            The weighted mean of the participants' updates on the grid. It is released data: public or the consortium's.

        Raises:
            OpeningRefusedError: If a participant did not approve, the coefficients or the rule are not the agreed ones, or the
                policy does not allow the opening; or, where a rule chooses the coefficients, if they are not those that this party found.
            TamperedAggregateError: If it is not the announced combination of the signed uploads.
            AlreadyOpenedError: If the round is promised to another digest, another aggregate was begun, or it is finished.
            DecryptionError: If it does not decrypt to grid points, or to no weights that the agreement allows.
            PrivFedError: As `wire_aggregate.decode_aggregate`, and as `check_heads`.
        """
        message = decode_aggregate(data, self._context, self._round_key.key_id)
        digest = message.digest
        if message.approved_by != digest.participants:
            missing = [name for name in digest.participants if name not in message.approved_by]
            raise OpeningRefusedError(f"expected the approval of every participant, once; missing {missing}; nothing was decrypted")
        check_digest(self._context, digest)
        final = self._decided(message)
        total = self._checked_sum(message, final.by_name)
        if self._check_heads is not None:
            self._check_heads(message.heads)
        opened = _Opened(aggregate=hash_message(data), digest=final.digest(self._context), heads=message.heads)
        self._journal.begin(self._context, digest.digest(self._context), aggregate=opened.aggregate)
        agreement = self._context.agreement
        grid_sum = open_sum(total, self._round_key, coefficients=self._multipliers(final.by_name))
        private = agreement.private_weights
        if agreement.scored:
            values = dequantise(grid_sum, sum(final.coefficients), agreement.params)
        elif private is None:
            values = dequantise(grid_sum, agreement.weighting.divisor(digest.participants), agreement.params)
        else:
            values = private.mean(grid_sum, clients=len(digest.participants), params=agreement.params)
        self._opened = opened
        return Aggregate(round=self._context.round, vector=PlainVector(layout=agreement.layout, values=values), coefficients=final.by_name)

    def _decided(self, message: OpenableAggregate) -> RoundDigest:
        """The digest with the coefficients of the sum. Where a rule chose them, they are those that this party found itself."""
        digest = message.digest
        if not self._context.agreement.scored:
            return digest
        kept = self._journal.decision(self._context, digest.digest(self._context))
        if kept is None:
            raise OpeningRefusedError(
                f"the inner products of round {self._context.round} were not opened here, so its coefficients are not known; nothing was "
                "decrypted; open the products first"
            )
        decision = Decision.from_bytes(kept)
        if not any(decision.coefficients.values()):
            raise OpeningRefusedError(f"round {self._context.round} is skipped: no weights are allowed; nothing was decrypted")
        if tuple(decision.coefficients.get(name) for name in digest.participants) != message.coefficients:
            raise OpeningRefusedError("the aggregate has other coefficients than follow from the inner products; nothing was decrypted")
        self._decision = decision
        return replace(digest, coefficients=message.coefficients)

    def _multipliers(self, coefficients: Mapping[str, int]) -> tuple[int, ...]:
        """What the uploads in the sum were multiplied by: of a scored round, only those are in it that count."""
        return self._context.agreement.weighting.multipliers([coefficient for coefficient in coefficients.values() if coefficient])

    def _checked_sum(self, message: OpenableAggregate, coefficients: Mapping[str, int]) -> CkksVector:
        digest = message.digest
        # A participant approved the hash of its own upload, so the hash ties these tags to what it sent.
        if tuple(hash_abridged(upload) for upload in message.uploads) != digest.upload_hashes:
            raise TamperedAggregateError
        return check_sum(
            message.total,
            self._round_key,
            sealed_tags={
                name: sealed_tags(upload) for name, upload in zip(digest.participants, message.uploads, strict=True) if coefficients[name]
            },
            coefficients=self._multipliers(coefficients),
        )

    @property
    def digest(self) -> bytes:
        """`RoundDigest.digest` of what was opened, 32 bytes: the history of the next round.

        Raises:
            OpeningRefusedError: If nothing was opened here.
        """
        return self._what_was_opened().digest

    @property
    def decision(self) -> Decision | None:
        """What this party made of the inner products of what was opened; None where coefficients were agreed."""
        return self._decision

    @property
    def heads(self) -> SignedHeads:
        """Heads of the participants' privacy ledgers, and who countersigned them, in what was opened.

        Raises:
            OpeningRefusedError: If nothing was opened here.
        """
        return self._what_was_opened().heads

    def finish(self) -> None:
        """Records that the model with the aggregate in it is stored. From here on nothing of this round is opened again.

        Raises:
            OpeningRefusedError: If nothing was opened here, or the opening was finished before.
        """
        self._journal.finish(self._context, aggregate=self._what_was_opened().aggregate)

    def _what_was_opened(self) -> _Opened:
        if self._opened is None:
            raise OpeningRefusedError(f"no aggregate of round {self._context.round} was opened here; nothing was recorded")
        return self._opened

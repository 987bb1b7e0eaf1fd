"""The one place that opens an aggregate: after all approvals, once per round, on the record.

In `SharedKey` mode every client is its own key holder; the same class serves a separate one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privfed.agreement import Agreement, RoundContext
from privfed.approval import check_digest
from privfed.decision import Decision
from privfed.digest import RoundDigest, hash_abridged, hash_message, sealed_tags
from privfed.errors import DecryptionError, OpeningRefusedError, TamperedAggregateError
from privfed.he.additive import CkksVector
from privfed.he.codec import dequantise
from privfed.he.product_params import ProductParams
from privfed.he.secret import RoundKey, check_sum, open_sum
from privfed.he.threshold import OnePolynomialVector
from privfed.journal import Journal
from privfed.update import Aggregate, PlainVector
from privfed.wire_aggregate import OpenableAggregate, SealedSum, Total, decode_aggregate
from privfed.wire_approved import SignedHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What is known of an aggregate that was opened."""

    aggregate: bytes
    history: bytes
    heads: SignedHeads


def check_all_approved(message: OpenableAggregate) -> None:
    """Refuses what not every participant approved.

    Raises:
        OpeningRefusedError: If an approval is missing.
    """
    participants = message.digest.participants
    if message.approved_by != participants:
        missing = [name for name in participants if name not in message.approved_by]
        raise OpeningRefusedError(f"expected the approval of every participant, once; missing {missing}; nothing was decrypted")


def scored_mean(grid_sum: NDArray[np.int64], agreement: Agreement, *, coefficients: Sequence[int]) -> NDArray[np.float64]:
    """The mean that an opened sum of a scored round says, of shape (layout.size,).

    A client that sends a longer update than the agreement allows may have it look short (`decision.decide`), but not in the mean.

    Args:
        grid_sum: Of shape (layout.size,).
        agreement: Layout and parameters.
        coefficients: What each upload in the sum was multiplied by.

    Raises:
        DecryptionError: If it is longer than any mean of updates within the bound.
    """
    params = agreement.params
    values = dequantise(grid_sum, sum(coefficients), params)
    if isinstance(params, ProductParams) and np.linalg.norm(values) > params.longest(values.size):
        raise DecryptionError(
            "the opened mean is longer than the agreed bound; nothing was put into the model; a client sent a longer update than the "
            "agreement allows, in a form that made it look shorter"
        )
    return values


class Opener(ABC):
    """Opens the aggregate of one round. What a trust mode has of its own is in the subclasses.

    Args:
        context: Agreement, round and attempt.
        key_id: Of the round's key, 16 bytes.
        journal: This party's own; a participant hands the one in which it approved.
        check_heads: Is handed the heads of the ledgers before anything is begun, and may refuse.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        key_id: bytes,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        self._context = context
        self._key_id = key_id
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
            OpeningRefusedError: If an approval that the trust mode demands is missing, the coefficients or the rule are not the agreed
                ones, or the policy does not allow the opening; or, where a rule chooses the coefficients, if they are not those that this
                party found.
            TamperedAggregateError: If it is not the announced combination of the signed uploads, where tags tell.
            AlreadyOpenedError: If the round is promised to another digest, another aggregate was begun, or it is finished.
            DecryptionError: If it does not decrypt to grid points, or to no weights or no length that the agreement allows.
            PrivFedError: As `wire_aggregate.decode_aggregate`, and as `check_heads`.
        """
        message = self._decode(data)
        digest = message.digest
        self._check_approvals(message)
        check_digest(self._context, digest)
        final = self._decided(message)
        total = self._checked_sum(message)
        if self._check_heads is not None:
            self._check_heads(message.heads)
        opened = _Opened(aggregate=hash_message(data), history=final.history(self._context, data), heads=message.heads)
        self._journal.begin(self._context, digest.digest(self._context), aggregate=opened.aggregate)
        agreement = self._context.agreement
        grid_sum = self._open(total, message)
        private = agreement.private_weights
        if agreement.scored:
            values = scored_mean(grid_sum, agreement, coefficients=final.coefficients)
        elif private is None:
            values = dequantise(grid_sum, agreement.weighting.divisor(digest.participants), agreement.params)
        else:
            values = private.mean(grid_sum, clients=len(digest.participants), params=agreement.params)
        self._opened = opened
        return Aggregate(round=self._context.round, vector=PlainVector(layout=agreement.layout, values=values), coefficients=final.by_name)

    def _decode(self, data: bytes) -> OpenableAggregate:
        return decode_aggregate(data, self._context, self._key_id)

    def _check_approvals(self, message: OpenableAggregate) -> None:
        check_all_approved(message)

    def _decided(self, message: OpenableAggregate) -> RoundDigest:
        """The digest with the coefficients of the sum: those that were agreed, where no rule chooses them."""
        return message.digest

    @abstractmethod
    def _checked_sum(self, message: OpenableAggregate) -> Total: ...

    @abstractmethod
    def _open(self, total: Total, message: OpenableAggregate) -> NDArray[np.int64]: ...

    @property
    def history(self) -> bytes:
        """`RoundDigest.history` of what was opened, 32 bytes.

        Raises:
            OpeningRefusedError: If nothing was opened here.
        """
        return self._what_was_opened().history

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


class KeyHolder(Opener):
    """Opens the aggregate of one round with the key that the clients share, after all participants approved.

    Args:
        context: Agreement, round and attempt.
        round_key: The key of this round and attempt. Secret.
        journal: See `Opener`.
        check_heads: See `Opener`.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        round_key: RoundKey,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        super().__init__(context=context, key_id=round_key.key_id, journal=journal, check_heads=check_heads)
        self._round_key = round_key

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

    def _multipliers(self, coefficients: Sequence[int]) -> tuple[int, ...]:
        """What the uploads in the sum were multiplied by: of a scored round, only those are in it that count."""
        return self._context.agreement.weighting.multipliers([coefficient for coefficient in coefficients if coefficient])

    def _checked_sum(self, message: OpenableAggregate) -> CkksVector:
        digest, total = message.digest, message.total
        # A participant approved the hash of its own upload, so the hash ties these tags to what it sent.
        if tuple(hash_abridged(upload) for upload in message.uploads) != digest.upload_hashes:
            raise TamperedAggregateError
        if isinstance(total, OnePolynomialVector | SealedSum):
            raise TamperedAggregateError
        return check_sum(
            total,
            self._round_key,
            sealed_tags={
                name: sealed_tags(upload)
                for name, upload, coefficient in zip(digest.participants, message.uploads, message.coefficients, strict=True)
                if coefficient
            },
            coefficients=self._multipliers(message.coefficients),
        )

    def _open(self, total: Total, message: OpenableAggregate) -> NDArray[np.int64]:
        if not isinstance(total, CkksVector):
            raise TamperedAggregateError
        return open_sum(total, self._round_key, coefficients=self._multipliers(message.coefficients))

"""How a client opens what the key holder of `EscrowKey` published."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from privfed.agreement import RoundContext
from privfed.decision import Decision
from privfed.digest import RoundDigest
from privfed.errors import OpeningRefusedError, TamperedAggregateError
from privfed.journal import Journal
from privfed.keyholder import Opener
from privfed.keys.party import Party
from privfed.release import open_release, open_scored_release
from privfed.wire_aggregate import OpenableAggregate, SealedSum, Total
from privfed.wire_approved import SignedHeads
from privfed.wire_escrow import Weighing, read_opened


class ReleaseOpener(Opener):
    """Takes over what the key holder opened, after the same checks as everywhere. Coefficients that a rule chose are held to the policy.

    Args:
        context: Agreement, round and attempt.
        key_id: Of the key holder's key of the attempt, 16 bytes.
        party: This client, to which the release is encrypted. Secret.
        journal: See `Opener`.
        check_heads: See `Opener`.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        key_id: bytes,
        party: Party,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        super().__init__(context=context, key_id=key_id, journal=journal, check_heads=check_heads)
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

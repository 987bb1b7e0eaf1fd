"""The opening of an aggregate by what a quorum answered: `ThresholdKey`, in which nobody holds a key."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from privfed.agreement import RoundContext
from privfed.errors import OpeningRefusedError, TamperedAggregateError
from privfed.he.threshold import OnePolynomialVector, key_id
from privfed.he.threshold_secret import open_sum
from privfed.journal import Journal
from privfed.keyholder import Opener
from privfed.trust import ThresholdTrust
from privfed.wire_aggregate import OpenableAggregate, Total
from privfed.wire_approved import SignedHeads


class QuorumOpener(Opener):
    """Opens the aggregate of one round with the answers of a quorum, each of which is the approval of the digest as well.

    As any two quorums share an honest client, which answers once in a round, no two digests of one round are ever both opened, by
    anybody: see `ThresholdKey`. That the sum is the sum of the uploads is not checked here: the server may make it another one, the
    same for all who are to go on together, see `RoundDigest.history`.

    Args:
        context: Agreement, round and attempt.
        trust: The session's quorum.
        journal: See `Opener`.
        check_heads: See `Opener`.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        trust: ThresholdTrust,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        super().__init__(context=context, key_id=key_id(context.digest), journal=journal, check_heads=check_heads)
        self._trust = trust

    def _check_approvals(self, message: OpenableAggregate) -> None:
        approved = message.approved_by
        if approved != tuple(name for name in message.digest.participants if name in approved) or len(approved) < self._trust.quorum:
            raise OpeningRefusedError(
                f"expected the answers of {self._trust.quorum} participants or more, each once, got {len(approved)}; nothing was opened"
            )

    def _checked_sum(self, message: OpenableAggregate) -> Total:
        return message.total

    def _open(self, total: Total, message: OpenableAggregate) -> NDArray[np.int64]:
        if not isinstance(total, OnePolynomialVector):
            raise TamperedAggregateError
        names = self._context.agreement.roster.names
        answers = {names.index(name) + 1: answer for name, answer in message.answers.items()}
        return open_sum(total, self._context.digest, answers, summands=len(message.digest.participants), quorum=self._trust.quorum)

"""The one place that opens inner products: after all approvals, once per round, on the record.

What leaves it for the server is a coefficient for each participant. In `SharedKey` mode every client opens for itself, from what the
server multiplied: the result says so. Whoever has the signed uploads does not depend on that: see `he.product_secret.open_own_products`.
"""

from collections.abc import Mapping

from privfed.agreement import RoundContext
from privfed.approval import check_digest
from privfed.decision import Decision, decide
from privfed.digest import RoundDigest, hash_message
from privfed.errors import OpeningRefusedError
from privfed.he.product_secret import open_products
from privfed.he.secret import RoundKey
from privfed.journal import Journal
from privfed.wire_products import decode_products


class Scorer:
    """Opens the inner products of one round, and decides.

    Args:
        context: Agreement, round and attempt.
        round_key: The key of this round and attempt. Secret.
        journal: This party's own; a participant hands the one in which it approved.
        scores: Cumulative scores after the rounds before.
    """

    def __init__(self, *, context: RoundContext, round_key: RoundKey, journal: Journal, scores: Mapping[str, float]) -> None:
        self._context = context
        self._round_key = round_key
        self._journal = journal
        self._scores = scores

    def open(self, data: bytes) -> tuple[RoundDigest, Decision]:
        """Verifies everything, records the opening, then decrypts, and keeps what it decided. The same bytes again get the same decision.

        Args:
            data: The server's products message.

        Returns:
            The digest of the round, and the decision.

        Raises:
            OpeningRefusedError: If a participant did not approve, or the policy does not allow the round.
            AlreadyOpenedError: If the round is promised to another digest, other products of it were opened, or it is finished.
            TamperedProductsError: If the products are not masked as they must be.
            PrivFedError: As `wire_products.decode_products`.
        """
        message = decode_products(data, self._context, self._round_key.key_id)
        digest = message.digest
        if message.approved_by != digest.participants:
            missing = [name for name in digest.participants if name not in message.approved_by]
            raise OpeningRefusedError(f"expected the approval of every participant, once; missing {missing}; nothing was decrypted")
        check_digest(self._context, digest)
        round_digest = digest.digest(self._context)
        kept = self._journal.begin_products(self._context, round_digest, products=hash_message(data))
        if kept is not None:
            return digest, Decision.from_bytes(kept)
        opened = open_products(message.products, self._round_key)
        decision = decide(
            self._context.agreement,
            digest.participants,
            opened.products,
            scores=self._scores,
            assurance=opened.assurance.name,
            digest=round_digest,
        )
        self._journal.keep_decision(self._context, decision.to_bytes())
        return digest, decision

"""A client's part in the heads of ledgers: it states its own, and remembers and countersigns those of its peers."""

from collections.abc import Mapping

from privfed.agreement import RoundContext
from privfed.client import Trainer
from privfed.dp.countersign import HeadMemory, HeadStatement, has_countersigned, read_statement
from privfed.errors import InvalidMessageError, LedgerError, OpeningRefusedError, TamperedAggregateError
from privfed.identity import Identity
from privfed.wire import MAX_STATEMENT_BYTES
from privfed.wire_approved import SignedHeads

_ROOM_BYTES = 4096


class LedgerHeads:
    """The heads of ledgers in a session, as one client states, sees and signs them.

    Args:
        trainer: The client's, with its ledger.
        identity: Its signing key.
        memory: What it remembers of the ledgers of its peers.
    """

    def __init__(self, *, trainer: Trainer, identity: Identity, memory: HeadMemory) -> None:
        self._trainer = trainer
        self._identity = identity
        self.memory = memory

    def statement(self, context: RoundContext) -> bytes:
        """The head of the client's own ledger as it says it in a round; empty if it keeps none."""
        peers = tuple(peer for peer in context.agreement.roster.names if peer != self._identity.name)
        return self._trainer.state_head(self._identity, context=context.digest, peers=peers)

    def check_fits(self, context: RoundContext) -> None:
        """Refuses a ledger whose head would not fit into a message after the charge of this round.

        Raises:
            LedgerError: If it would not; nothing was charged.
        """
        # The charge of this round adds a row or two.
        if len(self.statement(context)) > MAX_STATEMENT_BYTES - _ROOM_BYTES:
            raise LedgerError(
                f"the ledger of {self._identity.name!r} has more rows that some peer never countersigned than one message shows; nothing "
                "was charged; begin a new session with peers that hold them, or use another ledger"
            )

    def countersign(self, context: RoundContext, statements: Mapping[str, bytes]) -> bytes:
        """One signature under the heads that the participants of a round stated, by name, once it remembers them.

        Raises:
            OpeningRefusedError: If one of them is not valid; nothing was approved.
            PrivFedError: As `HeadMemory.countersign`.
        """
        stated: list[HeadStatement] = []
        for name, statement in statements.items():
            owner, population = context.agreement.roster.client(name), context.agreement.populations[name]
            try:
                stated.append(read_statement(statement, owner=owner, population=population, context=context.digest))
            except InvalidMessageError as error:
                raise OpeningRefusedError(f"{name!r} stated no valid head of its ledger; nothing was approved; leave it out") from error
        return self.memory.countersign(stated, signer=self._identity)

    def check(self, context: RoundContext, heads: SignedHeads, *, sent: bytes | None) -> None:
        """Refuses heads other than those that this client countersigned, stated, and whose rows its ledger still holds.

        With statements other than those that the participants signed, their countersignatures would be nobody's, and none recorded.

        Args:
            context: Agreement, round and attempt.
            heads: Out of an aggregate.
            sent: The statement in the client's upload; None if it has none stored.

        Raises:
            TamperedAggregateError: If the client countersigned other statements, or sent another one.
            InvalidMessageError, LedgerError: As `countersign.check_stated`.
        """
        own = heads.countersignatures.get(self._identity.name)
        if own is not None and not has_countersigned(self._identity.public, own, shown=heads.statements, context=context.digest):
            raise TamperedAggregateError
        statement = heads.statements.get(self._identity.name)
        if statement is None:
            return
        if sent is not None and sent != statement:
            raise TamperedAggregateError
        self._trainer.check_head(statement, owner=self._identity.public, context=context.digest)

    def keep(self, context: RoundContext, heads: SignedHeads) -> None:
        """Records in the client's ledger which peers countersigned its head in an opened round. One that is none is left out."""
        name = self._identity.name
        if name in heads.statements:
            signed = ((peer, heads.countersignatures.get(peer.name)) for peer in context.agreement.roster.clients)
            answers = [(peer, signature) for peer, signature in signed if signature is not None and peer.name != name]
            self._trainer.record_head(answers, shown=heads.statements, owner=self._identity.public, context=context.digest)

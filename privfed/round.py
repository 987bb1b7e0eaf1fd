"""One encrypted round on one machine: joins server, clients and key holders, and records what happened.

The joint guarantee: every client that opens gets the integer-weighted mean of the uploads that all participants approved, or an
error; and each upload was paid for in its owner's ledger before training began.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from privfed.agreement import RoundContext
from privfed.decision import Decision
from privfed.errors import BudgetExceededError, ModelMismatchError, PrivFedError, UnsupportedInThisModeError
from privfed.escrow_opener import ReleaseOpener
from privfed.escrow_session import EscrowSession
from privfed.keyholder import KeyHolder, Opener
from privfed.phases import Outcome, Reply, RoundServer, Step, hold
from privfed.quorum import QuorumOpener
from privfed.round_record import RoundRecord, Stage
from privfed.scorer import Scorer
from privfed.session import ClientSession
from privfed.threshold_session import ThresholdSession
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import Aggregate, PlainVector
from privfed.wire_approved import SignedHeads
from privfed.wire_escrow import Weighing


class RoundClient(Protocol):
    """What a round needs of a client, wherever that runs. `Participant` is one."""

    def opened_rounds(self) -> tuple[int, ...]: ...
    def take_key(self, context: RoundContext, data: bytes) -> None: ...
    def setup(self, context: RoundContext) -> bytes: ...
    def take_shares(self, context: RoundContext, data: bytes) -> None: ...
    def commit(self, context: RoundContext) -> bytes: ...
    def take_commitments(self, context: RoundContext, data: bytes) -> None: ...
    def upload(self, context: RoundContext) -> bytes: ...
    def approve(self, context: RoundContext, digest: bytes) -> bytes: ...
    def weigh(self, context: RoundContext, data: bytes) -> tuple[bytes, Decision]: ...
    def open(self, context: RoundContext, data: bytes) -> None: ...
    def abort(self, context: RoundContext) -> bytes: ...


class RoundHolder(Protocol):
    """What a round needs of a separate key holder. `privfed.escrow.EscrowHolder` is one."""

    def announce_key(self, context: RoundContext) -> bytes: ...
    def open(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes: ...


class Participant:
    """A client that also opens: its session, and the key holder of each round.

    Args:
        session: The client's side of the session.
    """

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.opened: Aggregate[PlainVector] | None = None

    def opened_rounds(self) -> tuple[int, ...]:
        """Numbers of the rounds that are in this client's model, ascending."""
        return self.session.state.rounds

    def take_key(self, context: RoundContext, data: bytes) -> None:
        """See `EscrowSession.take_key`.

        Raises:
            UnsupportedInThisModeError: If the session is of another trust mode.
        """
        self._with_holder().take_key(context, data)

    def setup(self, context: RoundContext) -> bytes:
        """See `ClientSession.setup`."""
        return self.session.setup(context)

    def take_shares(self, context: RoundContext, data: bytes) -> None:
        """See `ThresholdSession.take_shares`.

        Raises:
            UnsupportedInThisModeError: If the session is of another trust mode.
        """
        if not isinstance(self.session, ThresholdSession):
            raise UnsupportedInThisModeError("shares exist in ThresholdKey mode only; nothing was kept")
        self.session.take_shares(context, data)

    def commit(self, context: RoundContext) -> bytes:
        """See `EscrowSession.commit`.

        Raises:
            UnsupportedInThisModeError: If the session is of another trust mode.
        """
        return self._with_holder().commit(context)

    def take_commitments(self, context: RoundContext, data: bytes) -> None:
        """See `EscrowSession.take_commitments`.

        Raises:
            UnsupportedInThisModeError: If the session is of another trust mode.
        """
        self._with_holder().take_commitments(context, data)

    def _with_holder(self) -> EscrowSession:
        if not isinstance(self.session, EscrowSession):
            raise UnsupportedInThisModeError("a key holder and commitments exist in EscrowKey mode only; nothing was trained or kept")
        return self.session

    def upload(self, context: RoundContext) -> bytes:
        """See `ClientSession.upload`."""
        return self.session.upload(context)

    def approve(self, context: RoundContext, digest: bytes) -> bytes:
        """See `ClientSession.approve`."""
        return self.session.approve(context, digest)

    def weigh(self, context: RoundContext, data: bytes) -> tuple[bytes, Decision]:
        """Opens the inner products of a round, once, and decides; returns the message for the server, and what was decided.

        Raises:
            HistoryMismatchError: As `open`.
            PrivFedError: As `Scorer.open`.
        """
        session = self.session
        session.check_history(context)
        scorer = Scorer(context=context, round_key=session.round_key(context), journal=session.journal, scores=session.scores())
        digest, decision = scorer.open(data)
        return session.encode_coefficients(context, digest, tuple(decision.coefficients.values())), decision

    def open(self, context: RoundContext, data: bytes) -> None:
        """Opens an aggregate message and puts it into the model, once: a round that is in the model is left alone.

        The same call serves a client that missed the round: it opens the missed rounds in their order. A gap is refused before
        anything is begun or decrypted, and so is a round that the rounds in the model do not build on.

        Raises:
            HistoryMismatchError: If this client has opened other rounds than those that this one builds on; its model is as it was.
            PrivFedError: As `Opener.open`; its model is as it was.
        """
        if context.round in self.session.state.rounds:
            self.session.journal.settle(context)
            return
        self.session.check_history(context)
        holder = self._opener(context)
        aggregate = holder.open(data)
        moved = aggregate
        if (decision := holder.decision) is not None:
            self.session.keep_scores(context, decision.scores)
            layout = aggregate.vector.layout
            moved = replace(aggregate, vector=PlainVector(layout=layout, values=decision.scale * aggregate.vector.values))
        self.session.apply(moved, history=holder.history, attempt=context.attempt)
        self.session.keep_countersignatures(context, holder.heads)
        holder.finish()
        self.opened = aggregate

    def _opener(self, context: RoundContext) -> Opener:
        session, trust = self.session, context.agreement.trust

        def check_heads(heads: SignedHeads) -> None:
            session.check_heads(context, heads)

        if isinstance(session, EscrowSession):
            key_id = session.key_id(context)
            return ReleaseOpener(context=context, key_id=key_id, party=session.party, journal=session.journal, check_heads=check_heads)
        if not isinstance(trust, ThresholdTrust):
            key = session.round_key(context)
            return KeyHolder(context=context, round_key=key, journal=session.journal, check_heads=check_heads)
        return QuorumOpener(context=context, trust=trust, journal=session.journal, check_heads=check_heads)

    def abort(self, context: RoundContext) -> bytes:
        """See `ClientSession.abort`."""
        return self.session.abort(context)


def ask(client: RoundClient, step: Step, context: RoundContext, data: bytes, *, name: str) -> Iterator[Reply]:
    """What a client does with a question of a round, and its reply; none where it has done it in a round before.

    Args:
        client: Who is asked.
        step: What is asked.
        context: Agreement, round, attempt and history.
        data: What the server sends along.
        name: Of the client.

    Raises:
        PrivFedError: As the client's methods. Of an aggregate that it refuses, its reply to the server comes first.
        ValueError: If clients are not asked for this step.
    """
    match step:
        case Step.SETUP:
            if isinstance(context.agreement.trust, EscrowTrust):
                client.take_key(context, data)
            yield Reply(name=name, message=client.setup(context))
        case Step.TAKE_KEY:
            if context.round not in client.opened_rounds():
                client.take_key(context, data)
            yield Reply(name=name)
        case Step.COMMIT:
            yield _charged(name, lambda: client.commit(context))
        case Step.UPLOAD:
            if isinstance(context.agreement.trust, EscrowTrust):
                client.take_commitments(context, data)
            elif isinstance(context.agreement.trust, ThresholdTrust):
                client.take_shares(context, data)
            yield _charged(name, lambda: client.upload(context))
        case Step.APPROVE:
            yield Reply(name=name, message=client.approve(context, data))
        case Step.WEIGH:
            if context.round not in client.opened_rounds():
                message, decision = client.weigh(context, data)
                public = Weighing(fallback=decision.fallback, disclosed=decision.disclosed, assurance=decision.assurance)
                yield Reply(name=name, message=message, weighing=public, reason=decision.reason)
        case Step.OPEN:
            try:
                client.open(context, data)
            except PrivFedError:
                if context.round not in client.opened_rounds():
                    yield Reply(name=name, outcome=Outcome.ABORTED, message=client.abort(context))
                raise
            yield Reply(name=name)
        case _:
            raise ValueError(f"expected a step of a round, got {step.name}")


def _charged(name: str, train: Callable[[], bytes]) -> Reply:
    try:
        return Reply(name=name, message=train())
    except BudgetExceededError:
        return Reply(name=name, outcome=Outcome.OVER_BUDGET)


class LocalParties:
    """Clients and key holder in this process, asked one after the other. A refusal of any of them ends the round.

    Args:
        clients: Every client, by name.
        silent: Clients that do not answer in time, from a stage on.
        holder: The key holder, in `EscrowKey` mode.
    """

    def __init__(self, clients: Mapping[str, RoundClient], *, silent: Mapping[str, Stage], holder: RoundHolder | None) -> None:
        self._clients = clients
        self._holder = holder
        self.silent = silent

    @property
    def names(self) -> tuple[str, ...]:
        """See `Parties.names`."""
        return tuple(self._clients)

    def ask(self, step: Step, context: RoundContext, questions: Iterable[tuple[str, bytes]]) -> Iterator[Reply]:
        """See `Parties.ask`. No question is put before the reply to the one before it was taken."""
        for name, data in questions:
            yield from ask(self._clients[name], step, context, data, name=name)

    def leave_out(self, name: str, step: Step, error: PrivFedError) -> None:  # noqa: ARG002 (nobody is left out here)
        """Raises the refusal."""
        raise error

    def announced_key(self, context: RoundContext) -> bytes | None:
        """See `Parties.announced_key`."""
        return None if self._holder is None else self._holder.announce_key(context)

    def key_holder(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes | None:
        """See `Parties.key_holder`."""
        return None if self._holder is None else self._holder.open(context, request, upload)


def run_round(
    *,
    server: RoundServer,
    clients: Mapping[str, RoundClient],
    context: RoundContext,
    selected: Sequence[str],
    silent: Mapping[str, Stage] = MappingProxyType({}),
    holder: RoundHolder | None = None,
) -> RoundRecord:
    """Runs the phases of one round with parties in this process: see `privfed.phases.hold`.

    Args:
        server: The server of this round.
        clients: Every client, by name. All of them open the aggregate; the selected ones take part.
        context: Agreement, round, attempt and history.
        selected: Names of the clients that are asked to take part.
        silent: Clients that do not answer in time, from a stage on.
        holder: The key holder, in `EscrowKey` mode.

    Returns:
        The record of the round.

    Raises:
        CohortError: If too few answered; nothing was opened. What was trained stays charged.
        RoundSkippedError: If the rule found no weights that the policy allows; no aggregate was opened.
        PrivFedError: If a party refuses what another one sent. Of a client that refuses the aggregate the server learns no reason.
    """
    parties = LocalParties(clients, silent=silent, holder=holder)
    return hold(server=server, parties=parties, context=context, selected=selected)


def check_same_model(sessions: Sequence[ClientSession]) -> None:
    """Refuses to go on when clients with the same history hold different models.

    Raises:
        ModelMismatchError: If they do. It cannot happen while opened sums are exact, and no file is exchanged.
    """
    models: dict[bytes, ClientSession] = {}
    for session in sessions:
        known = models.setdefault(session.state.history, session)
        if (known.state.values.values != session.state.values.values).any():
            raise ModelMismatchError(
                f"{known.name!r} and {session.name!r} opened the same rounds and hold different models; nothing more was done; put back "
                "the folder of the one whose model was changed"
            )

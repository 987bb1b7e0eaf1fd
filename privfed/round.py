"""One encrypted round: joins server, clients and key holders, and records what happened.

The joint guarantee: every client that opens gets the integer-weighted mean of the uploads that all participants approved, or an
error; and each upload was paid for in its owner's ledger before training began.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

from privfed.agreement import RoundContext
from privfed.decision import Decision, Fallback
from privfed.errors import (
    BudgetExceededError,
    CohortError,
    ModelMismatchError,
    PrivFedError,
    RoundSkippedError,
    UnsupportedInThisModeError,
)
from privfed.escrow_opener import ReleaseOpener, weighing
from privfed.escrow_session import EscrowSession
from privfed.keyholder import KeyHolder, Opener
from privfed.quorum import QuorumOpener
from privfed.scorer import Scorer
from privfed.session import ClientSession
from privfed.threshold_session import ThresholdSession
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import Aggregate, PlainVector, effective_clients
from privfed.wire_aggregate import SignedHeads
from privfed.wire_escrow import decode_holder_key


class Stage(IntEnum):
    """What a client does in a round, in this order. Who is silent at one stage is silent for the rest of the round."""

    SETUP = 1
    UPLOAD = 2
    APPROVAL = 3
    OPENING = 4


class RoundServer(Protocol):
    """What a round needs of its server, wherever that runs. `privfed.server.Server` is one."""

    def cohort(self) -> tuple[str, ...]: ...
    def participants(self) -> tuple[str, ...]: ...
    def missing_approvals(self) -> tuple[str, ...]: ...
    def next_history(self) -> bytes: ...
    def receive_holder_key(self, data: bytes) -> None: ...
    def holder_key(self) -> bytes: ...
    def receive_setup(self, data: bytes) -> str: ...
    def start_uploads(self) -> tuple[str, ...]: ...
    def receive_commitment(self, data: bytes) -> str: ...
    def close_commitments(self) -> tuple[str, ...]: ...
    def committed(self) -> tuple[str, ...]: ...
    def relay(self, name: str) -> bytes: ...
    def receive_upload(self, data: bytes) -> str: ...
    def close(self) -> bytes: ...
    def receive_approval(self, data: bytes) -> str: ...
    def products(self) -> bytes: ...
    def receive_coefficients(self, data: bytes) -> str: ...
    def coefficients(self) -> Mapping[str, int]: ...
    def aggregate(self) -> bytes: ...
    def upload(self, name: str) -> bytes: ...
    def receive_opened(self, data: bytes) -> None: ...
    def result(self) -> bytes: ...
    def receive_abort(self, data: bytes) -> str: ...
    def received_bytes(self) -> Mapping[str, int]: ...


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


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What happened in one round. Public.

    Args:
        round: Number of the round.
        selected: Clients that were asked to take part.
        refused: Clients whose privacy budget did not cover the round; they trained nothing.
        silent: Clients that did not answer in time, and the stage at which they fell silent.
        history: `RoundDigest.digest` of the round, hexadecimal: the history of the next one. Empty without encryption.
        coefficients: Integer coefficient of each participant.
        bytes_up: Bytes that each participant sent.
        bytes_down: Bytes that each client received.
        seconds: Wall-clock seconds by phase.
        disclosed: How many inner products each opener, or the key holder, opened to find the coefficients; 0 where they were agreed.
        assurance: What these rest on, the name of an `Assurance`; empty without any.
        fallback: Name of the `Fallback` that was taken; empty without inner products.
        bytes_scoring: Bytes that each opener received to find the coefficients, which `bytes_down` holds too.
        attempt: Number of the attempt.
    """

    round: int
    selected: tuple[str, ...]
    refused: tuple[str, ...]
    silent: Mapping[str, Stage]
    history: str
    coefficients: Mapping[str, int]
    bytes_up: Mapping[str, int]
    bytes_down: Mapping[str, int]
    seconds: Mapping[str, float]
    disclosed: int = 0
    assurance: str = ""
    fallback: str = ""
    bytes_scoring: int = 0
    attempt: int = 0

    @property
    def participants(self) -> tuple[str, ...]:
        """Clients in the aggregate."""
        return tuple(self.coefficients)

    @property
    def effective_clients(self) -> float:
        """Effective number of clients in the aggregate."""
        return effective_clients(tuple(self.coefficients.values()))


class Clock:
    """Adds up wall-clock seconds by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what happens inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds so far, by phase."""
        return dict(self._seconds)


def run_round(
    *,
    server: RoundServer,
    clients: Mapping[str, RoundClient],
    context: RoundContext,
    selected: Sequence[str],
    silent: Mapping[str, Stage] = MappingProxyType({}),
    holder: RoundHolder | None = None,
) -> RoundRecord:
    """Runs the phases of one round: setup, training and upload, digest, approval, aggregate, opening.

    Shares, or the holder's key, belong to the setup; commitments come before the upload.

    A round that was interrupted, at whatever party, is gone on with where it stood. It is held with those who answer, if the policy
    holds; their integer weights are apportioned anew. A client whose budget does not cover the round says so, and is told apart
    from one that is silent.

    Args:
        server: The server of this round.
        clients: Every client, by name. All of them open the aggregate; the selected ones take part.
        context: Agreement, round, attempt and history.
        selected: Names of the clients that are asked to take part.
        silent: Clients that do not answer in time, from a stage on. An engine knows them by its time-outs.
        holder: The key holder, in `EscrowKey` mode.

    Returns:
        The record of the round.

    Raises:
        CohortError: If too few answered; nothing was opened. What was trained stays charged.
        RoundSkippedError: If the rule found no weights that the policy allows; no aggregate was opened.
        PrivFedError: If a party refuses what another one sent. Of a client that refuses the aggregate the server learns no reason.
    """
    clock = Clock()
    trust = context.agreement.trust
    shares, commits = isinstance(trust, ThresholdTrust), isinstance(trust, EscrowTrust)

    def answers(name: str, stage: Stage) -> bool:
        return silent.get(name, stage + 1) > stage

    if not server.cohort():
        with clock.phase("setup"):
            if holder is not None:
                server.receive_holder_key(holder.announce_key(context))
            for name in selected:
                if answers(name, Stage.SETUP):
                    if holder is not None:
                        clients[name].take_key(context, server.holder_key())
                    server.receive_setup(clients[name].setup(context))
            server.start_uploads()
    refused: list[str] = []
    uploading = [name for name in server.cohort() if answers(name, Stage.UPLOAD)] if not server.participants() else []
    if commits and uploading:
        # Who had not committed when the commitments were closed is not asked to train.
        for name in () if server.committed() else uploading:
            try:
                with clock.phase("train and encrypt"):
                    message = clients[name].commit(context)
            except BudgetExceededError:
                refused.append(name)
                continue
            server.receive_commitment(message)
        with _naming(refused):
            uploading = [name for name in server.close_commitments() if name in uploading]
    for name in uploading:
        try:
            if commits:
                with clock.phase("commitments"):
                    clients[name].take_commitments(context, server.relay(name))
            if shares:
                with clock.phase("shares"):
                    clients[name].take_shares(context, server.relay(name))
            with clock.phase("train and encrypt"):
                message = clients[name].upload(context)
        except BudgetExceededError:
            refused.append(name)
            continue
        with clock.phase("receive"):
            server.receive_upload(message)
    with clock.phase("approve"):
        with _naming(refused):
            digest = server.close()
        participants = server.participants()
        for name in server.missing_approvals():
            if answers(name, Stage.APPROVAL):
                server.receive_approval(clients[name].approve(context, digest))
    decision: Decision | None = None
    products = b""
    if context.agreement.weighed_by_clients:
        with clock.phase("multiply"):
            products = server.products()
        with clock.phase("weigh"):
            for name, client in clients.items():
                if answers(name, Stage.OPENING) and context.round not in client.opened_rounds():
                    message, decision = client.weigh(context, products)
                    if name in participants:
                        server.receive_coefficients(message)
        if decision is not None and decision.fallback is Fallback.SKIPPED:
            raise RoundSkippedError(f"round {context.round} is skipped: {decision.reason}; no aggregate was opened")
    with clock.phase("sum"):
        request = server.aggregate()
    if holder is not None:
        with clock.phase("key holder"):
            server.receive_opened(holder.open(context, request, server.upload))
    data = server.result()
    holder_key = b"" if holder is None else server.holder_key()
    published = None if holder is None else weighing(data, context, decode_holder_key(holder_key, context).key_id)
    if published is not None and published.fallback is Fallback.SKIPPED:
        raise RoundSkippedError(
            f"round {context.round} is skipped: the key holder found no weights that the policy allows; no aggregate was opened"
        )
    weighed = published or decision
    # From here on nothing is counted from what happened in this call alone: the round may have begun before a restart.
    down = {name: len(holder_key) + len(digest) + (len(server.relay(name)) if shares or commits else 0) for name in participants}
    with clock.phase("open"):
        for name, client in clients.items():
            if answers(name, Stage.OPENING):
                if holder_key and context.round not in client.opened_rounds():
                    # Whoever was not at the setup has it from here; without it a client cannot even say that it did not open.
                    client.take_key(context, holder_key)
                try:
                    client.open(context, data)
                except PrivFedError:
                    # Why is the client's own knowledge: an answer that tells a server more helps it to forge.
                    if context.round not in client.opened_rounds():
                        server.receive_abort(client.abort(context))
                    raise
                down[name] = down.get(name, len(holder_key)) + len(products) + len(data)
    coefficients = server.coefficients()
    up = server.received_bytes()
    return RoundRecord(
        round=context.round,
        selected=tuple(selected),
        refused=tuple(name for name in server.cohort() if name not in participants and answers(name, Stage.UPLOAD)),
        silent={name: stage for name, stage in silent.items() if name in selected or stage is Stage.OPENING},
        history=server.next_history().hex(),
        coefficients=coefficients,
        bytes_up={name: up[name] for name in participants},
        bytes_down={name: down[name] for name in clients if name in down},
        seconds=clock.seconds,
        disclosed=0 if weighed is None else weighed.disclosed,
        assurance="" if weighed is None else weighed.assurance,
        fallback="" if weighed is None else weighed.fallback.name,
        bytes_scoring=len(products),
        attempt=context.attempt,
    )


@contextmanager
def _naming(refused: Sequence[str]) -> Iterator[None]:
    """Where too few clients are left, says which of them refused."""
    try:
        yield
    except CohortError as error:
        if not refused:
            raise
        raise CohortError(
            f"{error}. Refused by {', '.join(refused)}: the privacy budget does not cover the round (privfed ledger show tells what "
            "was spent)"
        ) from error


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

"""The phases of one encrypted round, as whoever calls the parties goes through them: on one machine or on many, the same code.

It needs no key and no torch. What a client does when it is asked is in `privfed.round`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from privfed.agreement import RoundContext
from privfed.decision import Fallback
from privfed.errors import CohortError, OpeningRefusedError, PrivFedError, RoundSkippedError
from privfed.round_record import Clock, RoundRecord, Stage
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.wire_escrow import Weighing, weighing


class Step(IntEnum):
    """What a party is asked to do. The number is a byte on the wire of engines and is never given to another step."""

    STATUS = 1
    """Say which rounds it holds."""
    SETUP = 2
    COMMIT = 3
    UPLOAD = 4
    APPROVE = 5
    WEIGH = 6
    OPEN = 7
    STORE = 8
    """Of a key holder: keep an upload until it is asked for the sum."""
    HOLD = 9
    """Of a key holder: open the sum."""

    @property
    def stage(self) -> Stage:
        """At which stage a client that does not answer falls silent."""
        stages = {Step.STATUS: Stage.SETUP, Step.SETUP: Stage.SETUP, Step.COMMIT: Stage.UPLOAD, Step.UPLOAD: Stage.UPLOAD}
        return (stages | {Step.APPROVE: Stage.APPROVAL}).get(self, Stage.OPENING)


class Outcome(Enum):
    """How a client that answered did with what it was asked."""

    DONE = "it did it"
    OVER_BUDGET = "its privacy budget does not cover the round; it trained nothing"
    ABORTED = "it did not open the aggregate, and does not say why"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reply:
    """What came back from a client.

    Args:
        name: Who it is.
        outcome: How it did.
        message: For the server, signed by the client. Empty where there is nothing to say.
        weighing: After `Step.WEIGH`, what everybody may know of how the coefficients were found.
        reason: Why the round is skipped, if it is. Private to the openers: empty where they are elsewhere.
    """

    name: str
    outcome: Outcome = Outcome.DONE
    message: bytes = b""
    weighing: Weighing | None = None
    reason: str = ""


class RoundServer(Protocol):
    """What a round needs of its server, wherever that runs. `privfed.server.Server` is one."""

    def cohort(self) -> tuple[str, ...]: ...
    def participants(self) -> tuple[str, ...]: ...
    def missing_approvals(self) -> tuple[str, ...]: ...
    def next_history(self) -> bytes: ...
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


class Parties(Protocol):
    """How a round reaches its clients and its key holder: one question to many of them, wherever they are."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every client that may open the aggregate."""
        ...

    @property
    def silent(self) -> Mapping[str, Stage]:
        """Clients that did not answer in time so far, and from which stage on. It may grow with every question."""
        ...

    def ask(self, step: Step, context: RoundContext, questions: Iterable[tuple[str, bytes]]) -> Iterator[Reply]:
        """Asks clients, each with its own bytes, and gives what came back from those that answered."""
        ...

    def leave_out(self, name: str, step: Step, error: PrivFedError) -> None:
        """Goes on without a client whose answer was refused, or raises the refusal."""
        ...

    def key_holder(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes | None:
        """What the key holder made of a request; None if there is no holder or no answer."""
        ...


def hold(*, server: RoundServer, parties: Parties, context: RoundContext, selected: Sequence[str]) -> RoundRecord:
    """Goes through the phases of one round: setup, training and commitments and upload, digest, approval, aggregate, opening.

    A round that was interrupted, at whatever party, is gone on with where it stood. It is held with those who answer, if the policy
    holds; their integer weights are apportioned anew. A client whose budget does not cover the round says so, and is told apart
    from one that is silent.

    Args:
        server: The server of this round.
        parties: Everybody else.
        context: Agreement, round, attempt and history.
        selected: Names of the clients that are asked to take part.

    Returns:
        The record of the round.

    Raises:
        CohortError: If too few answered; nothing was opened. What was trained stays charged.
        RoundSkippedError: If the rule found no weights that the policy allows; no aggregate was opened.
        OpeningRefusedError: If nobody opened the aggregate, and somebody refused to.
        PrivFedError: If a party refuses what another one sent, and `parties` do not go on without it.
    """
    clock = Clock()
    shares, commits = isinstance(context.agreement.trust, ThresholdTrust), isinstance(context.agreement.trust, EscrowTrust)

    def answering(names: Iterable[str], stage: Stage) -> list[str]:
        return [name for name in names if parties.silent.get(name, stage + 1) > stage]

    def ask(step: Step, questions: Iterable[tuple[str, bytes]], *, phase: str) -> Iterator[Reply]:
        return clock.each(phase, parties.ask(step, context, questions))

    def take(reply: Reply, step: Step, receive: Callable[[bytes], object]) -> None:
        try:
            receive(reply.message)
        except PrivFedError as error:
            parties.leave_out(reply.name, step, error)

    if not server.cohort():
        for reply in ask(Step.SETUP, [(name, b"") for name in answering(selected, Stage.SETUP)], phase="setup"):
            take(reply, Step.SETUP, server.receive_setup)
        with clock.phase("setup"):
            server.start_uploads()
    refused: list[str] = []
    uploading = answering(server.cohort(), Stage.UPLOAD) if not server.participants() else []
    if commits and uploading:
        # Who had not committed when the commitments were closed is not asked to train.
        committing = [] if server.committed() else uploading
        for reply in ask(Step.COMMIT, [(name, b"") for name in committing], phase="train and encrypt"):
            if reply.outcome is Outcome.OVER_BUDGET:
                refused.append(reply.name)
            else:
                take(reply, Step.COMMIT, server.receive_commitment)
        with _naming(refused):
            uploading = answering((name for name in server.close_commitments() if name in uploading), Stage.UPLOAD)
    for reply in ask(Step.UPLOAD, ((name, server.relay(name)) for name in uploading), phase="train and encrypt"):
        if reply.outcome is Outcome.OVER_BUDGET:
            refused.append(reply.name)
            continue
        with clock.phase("receive"):
            take(reply, Step.UPLOAD, server.receive_upload)
    with clock.phase("approve"):
        with _naming(refused):
            digest = server.close()
        participants = server.participants()
    missing = answering(server.missing_approvals(), Stage.APPROVAL)
    for reply in ask(Step.APPROVE, [(name, digest) for name in missing], phase="approve"):
        take(reply, Step.APPROVE, server.receive_approval)
    weighed: Weighing | None = None
    products = b""
    if context.agreement.weighed_by_clients:
        with clock.phase("multiply"):
            products = server.products()
        reason = ""
        for reply in ask(Step.WEIGH, [(name, products) for name in answering(parties.names, Stage.OPENING)], phase="weigh"):
            weighed, reason = reply.weighing or weighed, reply.reason or reason
            if reply.name in participants and reply.message:
                take(reply, Step.WEIGH, server.receive_coefficients)
        if weighed is not None and weighed.fallback is Fallback.SKIPPED:
            why = reason or "its openers found no weights that the policy allows"
            raise RoundSkippedError(f"round {context.round} is skipped: {why}; no aggregate was opened")
    with clock.phase("sum"):
        request = server.aggregate()
    data = request
    if commits:
        with clock.phase("key holder"):
            data = _published(server, parties, context, request)
        weighed = weighing(data, context)
    if commits and weighed is not None and weighed.fallback is Fallback.SKIPPED:
        raise RoundSkippedError(
            f"round {context.round} is skipped: the key holder found no weights that the policy allows; no aggregate was opened"
        )
    # From here on nothing is counted from what happened in this call alone: the round may have begun before a restart.
    down = {name: len(digest) + (len(server.relay(name)) if shares or commits else 0) for name in participants}
    opened, aborted = False, False
    for reply in ask(Step.OPEN, [(name, data) for name in answering(parties.names, Stage.OPENING)], phase="open"):
        if reply.outcome is Outcome.ABORTED:
            # Why is the client's own knowledge: an answer that tells a server more helps it to forge.
            aborted = True
            take(reply, Step.OPEN, server.receive_abort)
            continue
        opened = True
        down[reply.name] = down.get(reply.name, 0) + len(products) + len(data)
    if aborted and not opened:
        raise OpeningRefusedError(
            f"every client that answered refused the aggregate of round {context.round}; nothing was opened; find out why at the clients "
            "before you go on"
        )
    coefficients, silent, up = server.coefficients(), dict(parties.silent), server.received_bytes()
    return RoundRecord(
        round=context.round,
        selected=tuple(selected),
        refused=tuple(answering((name for name in server.cohort() if name not in participants), Stage.UPLOAD)),
        silent={name: stage for name, stage in silent.items() if name in selected or stage is Stage.OPENING},
        history=server.next_history().hex(),
        coefficients=coefficients,
        bytes_up={name: up[name] for name in participants},
        bytes_down={name: down[name] for name in parties.names if name in down},
        seconds=clock.seconds,
        disclosed=0 if weighed is None else weighed.disclosed,
        assurance="" if weighed is None else weighed.assurance,
        fallback="" if weighed is None else weighed.fallback.name,
        bytes_scoring=len(products),
        attempt=context.attempt,
    )


def _published(server: RoundServer, parties: Parties, context: RoundContext, request: bytes) -> bytes:
    """What the key holder published, which the server may hold from before a restart: then nobody is asked again."""
    try:
        return server.result()
    except CohortError:
        published = parties.key_holder(context, request, server.upload)
        if published is not None:
            server.receive_opened(published)
        return server.result()


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

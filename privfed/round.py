"""One encrypted round: joins server, clients and key holders, and records what happened.

The joint guarantee: every client that opens gets the integer-weighted mean of the uploads that all participants approved, or an
error; and each upload was paid for in its owner's ledger before training began.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from privfed.agreement import RoundContext
from privfed.errors import BudgetExceededError, OpeningRefusedError
from privfed.keyholder import KeyHolder
from privfed.session import ClientSession
from privfed.update import Aggregate, PlainVector, effective_clients


class RoundServer(Protocol):
    """What a round needs of its server, wherever that runs. `privfed.server.Server` is one."""

    def receive_setup(self, data: bytes) -> str: ...
    def start_uploads(self) -> tuple[str, ...]: ...
    def receive_upload(self, data: bytes) -> str: ...
    def close(self) -> bytes: ...
    def receive_approval(self, data: bytes) -> str: ...
    def aggregate(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What happened in one round. Public, except in a simulation's own hands.

    Args:
        round: Number of the round.
        selected: Clients that were asked to take part.
        refused: Clients whose privacy budget did not cover the round; they trained nothing.
        coefficients: Integer coefficient of each participant.
        bytes_up: Bytes that each participant sent.
        bytes_down: Bytes that each client received.
        seconds: Wall-clock seconds by phase.
        aggregate: The opened weighted mean, the same at every opener.
    """

    round: int
    selected: tuple[str, ...]
    refused: tuple[str, ...]
    coefficients: Mapping[str, int]
    bytes_up: Mapping[str, int]
    bytes_down: Mapping[str, int]
    seconds: Mapping[str, float]
    aggregate: Aggregate[PlainVector] = field(repr=False)

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
        return MappingProxyType(dict(self._seconds))


def open_aggregate(session: ClientSession, context: RoundContext, data: bytes) -> Aggregate[PlainVector]:
    """One client opens an aggregate message and puts it into its model, once.

    Raises:
        PrivFedError: As `KeyHolder.open`; the model is as it was.
    """
    holder = KeyHolder(context=context, round_key=session.round_key(context), journal=session.journal)
    aggregate = holder.open(data)
    session.apply(aggregate)
    holder.finish()
    return aggregate


def run_round(*, server: RoundServer, sessions: Mapping[str, ClientSession], context: RoundContext, selected: Sequence[str]) -> RoundRecord:
    """Runs the phases of one round: setup, training and upload, digest, approval, aggregate, opening.

    A client whose budget does not cover the round is recorded as refusing; the round goes on without it if the policy holds.

    Args:
        server: The server of this round.
        sessions: Every client's session, by name. All of them open the aggregate, the selected ones take part.
        context: Agreement, round and attempt.
        selected: Names of the clients that take part.

    Returns:
        The record of the round.

    Raises:
        PrivFedError: If the round cannot be held, or an opener refuses.
    """
    clock = Clock()
    bytes_up: dict[str, int] = dict.fromkeys(selected, 0)
    with clock.phase("setup"):
        for name in selected:
            message = sessions[name].setup(context)
            bytes_up[name] += len(message)
            server.receive_setup(message)
        cohort = server.start_uploads()
    refused: list[str] = []
    for name in cohort:
        try:
            with clock.phase("train and encrypt"):
                message = sessions[name].upload(context)
        except BudgetExceededError:
            refused.append(name)
            continue
        with clock.phase("receive"):
            server.receive_upload(message)
        bytes_up[name] += len(message)
    with clock.phase("approve"):
        digest = server.close()
        participants = [name for name in cohort if name not in refused]
        for name in participants:
            message = sessions[name].approve(context, digest)
            bytes_up[name] += len(message)
            server.receive_approval(message)
    with clock.phase("sum"):
        data = server.aggregate()
    with clock.phase("open"):
        opened = {name: open_aggregate(session, context, data) for name, session in sessions.items()}
    aggregate = next(iter(opened.values()))
    if any((other.vector.values != aggregate.vector.values).any() for other in opened.values()):
        raise OpeningRefusedError("openers disagree about the aggregate; their models differ from here on")
    return RoundRecord(
        round=context.round,
        selected=tuple(selected),
        refused=tuple(refused),
        coefficients=aggregate.coefficients,
        bytes_up={name: count for name, count in bytes_up.items() if name in aggregate.coefficients},
        bytes_down={name: len(data) + (len(digest) if name in participants else 0) for name in sessions},
        seconds=clock.seconds,
        aggregate=aggregate,
    )

"""The server's side of a whole run with parties on other machines. It loads no torch and no secret key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from privfed.agreement import RoundContext
from privfed.engines.correspondence import Correspondence
from privfed.engines.exchange import Exchange, TimeOuts
from privfed.engines.metrics import EventLog, Metrics
from privfed.engines.party_folder import ROUNDS, SPOOL, own_identity, read_agreement
from privfed.engines.remote import RemoteParties
from privfed.engines.server_log import ServerLog
from privfed.errors import CohortError, DamagedFileError, OpeningRefusedError, ParametersMismatchError, PrivFedError
from privfed.files import FolderLock, make_folder, sweep
from privfed.phases import Step, hold
from privfed.round_record import FailedRound, RoundRecord, Stage
from privfed.server import Server
from privfed.trust import EscrowTrust

_MOST_REASONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatedRun:
    """What a server knows of a run. Public.

    Args:
        rounds: A record per round that was held.
        failed: Rounds that were not held.
        first: Number of the round with which this call began; those before were in the folder.
    """

    rounds: tuple[RoundRecord, ...]
    failed: tuple[FailedRound, ...]
    first: int

    def check_held(self) -> None:
        """Fails where rounds failed that this call was to hold: an engine would call such a run completed.

        Raises:
            CohortError: If one failed in this call, or there was nothing left to do and one had failed before. It says which, and why.
        """
        total = len(self.rounds) + len(self.failed)
        if failed := [each for each in self.failed if each.round >= self.first or self.first == total]:
            raise CohortError(
                f"{len(failed)} of {total} rounds were not held, and nothing of them was opened: {_reasons(failed)}; what was held stays; "
                "ask for more rounds to go on"
            )


def coordinate(
    folder: Path,
    exchange: Exchange,
    *,
    rounds: int,
    time_outs: TimeOuts | None = None,
    progress: Callable[[RoundRecord], None] | None = None,
) -> CoordinatedRun:
    """Holds rounds with parties on other machines, from the server's folder, and goes on where that stands.

    At each step all clients are asked at once. Who does not answer in time is silent for the rest of the round; the round goes on with the
    others if the policy allows it, and else is recorded as failed, with nothing opened. For whose approval a round failed does not
    train in the next one, and in up to 7 if it happens again, as long as there are enough others: each such round is charged to all. A
    client that missed rounds is sent what it missed, in order, before it is asked to take part.

    Args:
        folder: The server's; see `privfed.engines.party_folder`. One process at a time works in it.
        exchange: Carries the bytes.
        rounds: Number of all rounds, those in the folder among them, at least 1.
        time_outs: How long answers are waited for; left out, `TimeOuts()`.
        progress: Is called with the record of each round that was held.

    Returns:
        What happened, in all rounds.

    Raises:
        CohortError: If none of the rounds could be held.
        AgreementMismatchError: If the key in the folder is not that of the agreement's server.
        OpeningRefusedError: If a client does not approve what is to be summed, or the key holder does not open it, and the round fails for
            it; or every client that answers refuses to open what the server made of a round. No further round is begun. The next call
            goes on with the next round, in the last case after it asked them once more.
        PrivFedError: If the folder is damaged or in use.
        ValueError: If `rounds` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"expected at least 1 round, got {rounds}")
    with _Coordinator(folder, exchange, time_outs or TimeOuts()) as coordinator:
        return coordinator.run(rounds, progress)


def _reasons(failed: Sequence[FailedRound]) -> str:
    """Which rounds failed and why, the last ones of many; rounds count from 0, as in the record of rounds."""
    left_out = len(failed) - _MOST_REASONS
    words = [f"{left_out} earlier ones"] if left_out > 0 else []
    return "; ".join(words + [f"round {each.round}: {each.reason}" for each in failed[-_MOST_REASONS:]])


class _Coordinator:
    def __init__(self, folder: Path, exchange: Exchange, time_outs: TimeOuts) -> None:
        self._agreement = read_agreement(folder)
        self._identity = own_identity(folder, [self._agreement.roster.server])
        self._parties: RemoteParties | None = None
        self._lock = FolderLock(folder)
        try:
            self._spool = folder / SPOOL
            make_folder(self._spool)
            for place in (folder, *(path for path in self._spool.iterdir() if path.is_dir())):
                sweep(place)
            self._log = ServerLog(folder / ROUNDS, used=any(stored.is_file() for stored in self._spool.rglob("*")))
            self._events = EventLog(folder, party=self._identity.name)
            self._metrics = Metrics(folder, party=self._identity.name)
            self._correspondence = Correspondence(
                exchange, identity=self._identity, time_outs=time_outs, events=self._events, metrics=self._metrics
            )
        except BaseException:
            self._lock.release()
            raise

    def run(self, rounds: int, progress: Callable[[RoundRecord], None] | None) -> CoordinatedRun:
        log = self._log
        log.begin()
        self._events.write("started", rounds=rounds, held=len(log.held), failed=len(log.failed))
        first = len(log.held) + len(log.failed)
        for number in range(first, rounds):
            self._parties = None
            try:
                record = self._hold(number)
            except CohortError as error:
                self._fail(number, error)
                self._check_approved(number, error)
            except OpeningRefusedError as error:
                self._refuse(number, error)
                raise
            else:
                log.add_held(record)
                self._events.write("round held", round=number, attempt=record.attempt, participants=list(record.participants))
                if progress is not None:
                    progress(record)
            self._write_metrics()
        self._write_metrics()
        if not log.held:
            raise CohortError(f"none of {rounds} rounds could be held: {_reasons(log.failed)}")
        return CoordinatedRun(rounds=tuple(log.held), failed=tuple(log.failed), first=first)

    def _fail(self, number: int, error: PrivFedError) -> None:
        log, parties = self._log, self._parties
        silent = log.silent(number, attempt=len(log.abandoned(number)))
        if parties is not None:
            stalling = [name for name, stage in parties.silent.items() if stage is Stage.APPROVAL and name not in parties.disapproving]
            if stalling:
                log.add_stalled(number, stalling)
        log.add_failed(FailedRound(round=number, silent=silent, reason=str(error)))
        self._events.write("round failed", round=number, reason=str(error))

    def _refuse(self, number: int, error: OpeningRefusedError) -> None:
        """The next start asks once more, because the reason may have been at the clients; the one after it goes on with another round.

        Else a client whose upload nobody can open would be in the way of all rounds to come.
        """
        if self._log.was_refused(number):
            self._fail(number, error)
        else:
            self._log.add_refused(number)
        self._write_metrics()

    def _check_approved(self, number: int, error: CohortError) -> None:
        """Stops where a client, or the key holder, saw the digest and said no: the next round might be charged for the same refusal.

        Raises:
            OpeningRefusedError: If one did. The round is recorded as failed.
        """
        if self._parties is not None and (disapproving := self._parties.disapproving):
            self._write_metrics()
            raise OpeningRefusedError(
                f"round {number} was not approved or opened by {', '.join(disapproving)}; nothing was opened, and no further round was "
                "begun; find out why in events.jsonl there, then start again"
            ) from error

    def _write_metrics(self) -> None:
        self._metrics.set("rounds_held", len(self._log.held))
        self._metrics.set("rounds_failed", len(self._log.failed))
        if self._log.held:
            self._metrics.set("round_last", self._log.held[-1].round)
        self._metrics.write()

    def _hold(self, number: int) -> RoundRecord:
        """Holds a round, in as many attempts as it takes: each one is given up for another reason, or another client."""
        log, roster = self._log, self._agreement.roster
        while True:
            abandoned = log.abandoned(number)
            context = RoundContext(agreement=self._agreement, round=number, attempt=len(abandoned), history=log.history(number))
            server = self._server(context)
            announced = bool(server.participants())
            statuses = self._statuses(context)
            left_out = {name for attempt in abandoned for name in attempt["left_out"]}
            lost = [name for name, facts in statuses.items() if facts.get("secret_lost") is True and name not in left_out]
            if lost and not announced:
                # Once for each client: one that always says so is left out instead of being asked for ever.
                again = {name for attempt in abandoned for name in attempt["by"]}
                log.add_abandoned(context, by=lost, left_out=sorted(again & set(lost)), reason="a client lost its secret of the attempt")
                continue
            behind = self._catch_up(number, statuses)
            for name, reason in behind.items():
                self._events.write("left out", round=number, of=name, reason=reason)
            silent = dict.fromkeys((name for name in roster.names if name not in statuses or name in left_out), Stage.SETUP)
            if announced:
                silent = {
                    name: stage for name, stage in log.silent(number, attempt=context.attempt).items() if stage <= Stage.UPLOAD
                } | silent
            present = [name for name in roster.names if name not in behind]
            resting = [] if server.cohort() else self._resting(number, there=set(present) - set(silent))
            fell_silent = partial(log.add_silent, context)
            for name, stage in silent.items():
                fell_silent(name, stage)
            parties = self._parties = RemoteParties(
                self._correspondence, names=present, silent=silent, events=self._events, fell_silent=fell_silent
            )
            try:
                return hold(server=server, parties=parties, context=context, selected=[name for name in present if name not in resting])
            except ParametersMismatchError as error:
                if not error.names:
                    raise
                self._events.write("attempt given up", round=number, attempt=context.attempt, of=list(error.names), reason=str(error))
                log.add_abandoned(context, by=[], left_out=error.names, reason=str(error))

    def _resting(self, number: int, *, there: set[str]) -> list[str]:
        """Who is not asked to train in a round for what it did to earlier ones, if the round can be held without. It opens it like all."""
        agreement = self._agreement
        resting = self._log.resting(number) & there
        needed = agreement.validator is not None and agreement.validator.name in resting
        if needed or len(there - resting) < agreement.least_participants:
            return []
        for name in sorted(resting):
            self._events.write("left out", round=number, of=name, reason="an earlier round failed for want of its approval")
        return sorted(resting)

    def _server(self, context: RoundContext) -> Server:
        return Server(context=context, identity=self._identity, selected=self._agreement.roster.names, spool=self._spool)

    def _statuses(self, context: RoundContext) -> dict[str, Mapping[str, Any]]:
        """What the clients that are there say of themselves.

        Raises:
            CohortError: If there is a key holder, and it is not there: then nobody is to train.
        """
        trust, names = self._agreement.trust, self._agreement.roster.names
        holder = (trust.holder.name,) if isinstance(trust, EscrowTrust) else ()
        answers = self._correspondence.ask(Step.STATUS, context, [(name, b"") for name in (*names, *holder)])
        there = {answer.name: answer.facts for answer in answers if not answer.refusal}
        if any(name not in there for name in holder):
            raise CohortError("the key holder does not answer; nobody was asked to train; start it")
        return {name: there[name] for name in names if name in there}

    def _catch_up(self, number: int, statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Sends the rounds that clients missed, in their order. Returns who cannot take part for all that, and why."""
        behind: dict[str, str] = {}
        held: dict[str, set[int]] = {}
        known = {record.round for record in self._log.held}
        for name, facts in statuses.items():
            rounds = facts.get("rounds")
            if not isinstance(rounds, list) or not set(map(type, rounds)) <= {int} or set(rounds) - known - {number}:
                behind[name] = "it holds rounds that this server does not know"
            else:
                held[name] = set(rounds)
        for record in self._log.held:
            missing = [name for name, rounds in held.items() if name not in behind and record.round not in rounds]
            if not missing:
                continue
            context = RoundContext(
                agreement=self._agreement, round=record.round, attempt=record.attempt, history=self._log.history(record.round)
            )
            server = self._server(context)
            try:
                products = server.products() if self._agreement.weighed_by_clients else b""
                holder_key = server.holder_key() if isinstance(self._agreement.trust, EscrowTrust) else b""
                data = server.result()
            except (CohortError, DamagedFileError):
                behind |= dict.fromkeys(missing, f"it missed round {record.round}, which this server has lost")
                continue
            if products:
                list(self._correspondence.ask(Step.WEIGH, context, [(name, products) for name in missing]))
            if holder_key:
                list(self._correspondence.ask(Step.TAKE_KEY, context, [(name, holder_key) for name in missing]))
            answers = self._correspondence.ask(Step.OPEN, context, [(name, data) for name in missing])
            opened = {answer.name for answer in answers if not answer.refusal}
            behind |= {name: f"it has not opened round {record.round}, which it missed" for name in missing if name not in opened}
            self._events.write("caught up", round=record.round, parties=[name for name in missing if name in opened])
        return behind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._lock.release()

"""One bank, or the key holder, on its own machine: it answers what the server asks, one request at a time, from its own folder."""

import hashlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from privfed.engines.allowance import Allowance
from privfed.engines.envelope import Answer, Request, most_bytes, open_request, seal_answer
from privfed.engines.metrics import EventLog, Metrics
from privfed.engines.party_folder import ROUNDS, answering_parties, own_identity, read_agreement
from privfed.engines.run_log import RunLog, damaged
from privfed.errors import (
    AgreementMismatchError,
    BudgetExceededError,
    HistoryMismatchError,
    InvalidMessageError,
    KeyErasedError,
    PrivFedError,
    RoundMismatchError,
)
from privfed.files import FolderLock, sweep
from privfed.phases import Step
from privfed.strict_json import whole

if TYPE_CHECKING:
    from privfed.engines.bank import Bank
    from privfed.engines.holder import Holder

# What a server may know of a refusal: its kind, and only of these. Why an aggregate was not opened it does not learn at all.
_TOLD = (AgreementMismatchError, BudgetExceededError, HistoryMismatchError, InvalidMessageError, KeyErasedError, RoundMismatchError)
_UNTOLD = (Step.WEIGH, Step.OPEN, Step.HOLD)
# Of what anybody on the way can send again and again: bytes that are no request of the server, and copies of requests.
_LOGGED_AT_ONCE = 100
_LOGGED_EVERY_SECONDS = 10.0


class Node:
    """Opens a party's folder, and answers requests until it is closed.

    What it answers is signed by the party. A refusal is an answer too: it says of which kind it is and no more; the reason is in the
    party's own `events.jsonl`. Which party it is follows from the key in the folder.

    Bytes that are no request of the server, and copies of a request, cost no more than a line of the log and the metrics' files every ten
    seconds once a hundred of them came; how many lines were left out stands in the next one, and the metrics count all of them.

    Args:
        folder: The party's, on its own disk; see `privfed.engines.party_folder`. One node at a time works in it.

    Raises:
        AgreementMismatchError: If the key is of no party of the agreement.
        PrivFedError: If something in the folder is not as agreed, damaged or in use; nothing was done.
        OSError: If a file cannot be read, or others may read or write what they must not.
        ValueError: If a file holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self._agreement = read_agreement(folder)
        self._identity = own_identity(folder, answering_parties(self._agreement).values())
        self._one_at_a_time = threading.Lock()
        self._folder_lock = FolderLock(folder)
        try:
            sweep(folder)
            self._events = EventLog(folder, party=self._identity.name)
            self._metrics = Metrics(folder, party=self._identity.name)
            self._rounds = RunLog(folder / ROUNDS)
            self._recorded = _recorded(self._rounds, folder / ROUNDS)
            self._allowance = Allowance(burst=_LOGGED_AT_ONCE, seconds=_LOGGED_EVERY_SECONDS)
            self._answered: set[bytes] = set()
            self._left_out = 0
            self._logged = True
            self._party = self._open(folder)
        except BaseException:
            self._folder_lock.release()
            raise
        self._agreement = self._party.agreement
        self._events.write("started", session=self._agreement.session.hex(), seeded=self._party.seeded)

    def _open(self, folder: Path) -> "Bank | Holder":
        if self._identity.name in self._agreement.roster.names:
            from privfed.engines.bank import Bank  # noqa: PLC0415 # a key holder does without torch

            return Bank(folder, agreement=self._agreement, identity=self._identity)
        from privfed.engines.holder import Holder  # noqa: PLC0415 # a bank does without the key holder's code

        return Holder(folder, agreement=self._agreement, identity=self._identity)

    @property
    def name(self) -> str:
        """The party's name in the agreement. Public."""
        return self._identity.name

    @property
    def most_bytes(self) -> int:
        """Longest request that can be one; see `envelope.most_bytes`. Public."""
        return most_bytes(self._agreement)

    def answer(self, request: bytes) -> bytes:
        """What the party answers to a request, or to any other bytes.

        The same request again gets the same answer, as far as it can: nothing is trained, charged or opened for it a second time.

        Raises:
            FolderInUseError: If the node was closed.

        Whatever else is raised is a fault of this machine, not of a message: there is no answer, and the node can go on.
        """
        with self._one_at_a_time:
            self._folder_lock.check()
            begun = time.monotonic()
            asked: Request | None = None
            self._metrics.add("received_bytes", len(request))
            self._logged = True
            try:
                asked = self._opened(request)
                answer, kept_back = self._party.answer(asked)
                if kept_back is not None:
                    self._refused(asked, kept_back)
                self._record(asked, answer)
            except (PrivFedError, ValueError, OSError) as error:
                answer = Answer(name=self.name, refusal=_told(asked, error))
                self._refused(asked, error)
            reply = seal_answer(answer, request, self._identity)
            step = "INVALID" if asked is None else asked.step.name
            self._metrics.add("requests", label=step)
            self._metrics.add("seconds", time.monotonic() - begun, label=step)
            self._metrics.add("sent_bytes", len(reply))
            if self._logged:
                self._metrics.write()
            return reply

    def _opened(self, request: bytes) -> Request:
        """The request, and whether it is written down that it came.

        Raises:
            PrivFedError: As `open_request`.
        """
        try:
            asked = open_request(request, self._agreement)
        except PrivFedError:
            self._logged = self._allowance.take()
            raise
        digest = hashlib.sha256(request).digest()
        if digest in self._answered:
            self._logged = self._allowance.take()
        self._answered.add(digest)  # as many as the server signed: nobody else makes it longer
        return asked

    def _log(self, event: str, **facts: object) -> None:
        if not self._logged:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self._events.write(event, **facts, **({"left_out": left_out} if left_out else {}))

    def _refused(self, request: Request | None, error: Exception) -> None:
        place = {} if request is None else _place(request)
        # Errors of privfed hold no private value; what another library says of a file or a number is not known to.
        reason = str(error) if isinstance(error, PrivFedError) else ""
        self._log("refused", **place, kind=type(error).__name__, reason=reason)
        self._metrics.add("refusals", label=type(error).__name__)

    def _record(self, request: Request, answer: Answer) -> None:
        self._log("answered", **_place(request), refusal=answer.refusal)
        if answer.refusal or answer.facts:
            return
        opened = self._party.opened(request)
        if opened is not None and request.context.round not in self._recorded:
            self._rounds.append({"opened": opened})
            self._recorded.add(request.context.round)
            self._logged = True  # also if the request came before, and could not be carried out then
            self._log("round opened", **_place(request))
        self._metrics.set("rounds_held", len(self._recorded))
        if self._recorded:
            self._metrics.set("round_last", max(self._recorded))
        if (epsilon := self._party.epsilon) is not None:
            self._metrics.set("epsilon_spent", epsilon)

    def close(self) -> None:
        """Lets go of the folder, so that another node may work in it. Waits for the answer that is being made."""
        with self._one_at_a_time:
            if self._folder_lock.release.alive:
                self._party.close()
                self._logged = True
                self._log("stopped")
                self._metrics.write()
                self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _recorded(log: RunLog, path: Path) -> set[int]:
    """The rounds of which there is a record already.

    Raises:
        DamagedFileError: If a line is none that a node writes; nothing was changed.
    """
    try:
        return {whole(entry["opened"]["round"]) for entry in log.entries(used=False)}
    except (ValueError, TypeError, LookupError) as error:
        raise damaged(path) from error


def _place(request: Request) -> dict[str, object]:
    return {"step": request.step.name, "round": request.context.round, "attempt": request.context.attempt}


def _told(request: Request | None, error: Exception) -> str:
    """The kind of a refusal as the server may know it."""
    if isinstance(error, _TOLD) and (request is None or request.step not in _UNTOLD):
        return type(error).__name__
    return PrivFedError.__name__

"""The parties of a round on other machines: asked all at once, and left out when they do not answer, or not as they should."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from privfed.agreement import RoundContext
from privfed.decision import Fallback
from privfed.engines.correspondence import Correspondence
from privfed.engines.envelope import Answer
from privfed.engines.metrics import EventLog
from privfed.errors import BudgetExceededError, PrivFedError
from privfed.phases import Outcome, Reply, Step
from privfed.round_record import Stage
from privfed.trust import EscrowTrust
from privfed.wire_escrow import Weighing

_MOST_ASSURANCE = 64


class RemoteParties:
    """Clients and key holder on other machines; see `privfed.phases.Parties`.

    Args:
        correspondence: How they are asked.
        names: Clients that may open the aggregate.
        silent: Clients that are silent already.
        events: Where is written who is left out.
        fell_silent: Is told who falls silent, and from which stage on.

    Attributes:
        disapproving: Clients that answered, and did not approve the digest; the key holder, if it answered, and did not open the sum.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        *,
        names: Collection[str],
        silent: Mapping[str, Stage],
        events: EventLog,
        fell_silent: Callable[[str, Stage], None],
    ) -> None:
        self._correspondence = correspondence
        self._events = events
        self._fell_silent = fell_silent
        self._silent = dict(silent)
        self.disapproving: list[str] = []
        self.names = tuple(names)

    @property
    def silent(self) -> Mapping[str, Stage]:
        """See `Parties.silent`. Who answers, and not as it should, is silent from there on too."""
        return self._silent

    def ask(self, step: Step, context: RoundContext, questions: Iterable[tuple[str, bytes]]) -> Iterator[Reply]:
        """See `Parties.ask`."""
        asked = list(questions)
        waiting = {name for name, _ in asked}
        for answer in self._correspondence.ask(step, context, asked):
            reply = _reply(answer, step)
            if reply is not None:
                waiting.discard(answer.name)
                yield reply
            elif step is Step.APPROVE:
                self.disapproving.append(answer.name)
        for name, _ in asked:
            if name in waiting:
                self._fall_silent(name, step)

    def leave_out(self, name: str, step: Step, error: PrivFedError) -> None:
        """Goes on without the client."""
        self._events.write("left out", step=step.name, of=name, kind=type(error).__name__)
        self._fall_silent(name, step)

    def _fall_silent(self, name: str, step: Step) -> None:
        self._silent[name] = step.stage
        self._fell_silent(name, step.stage)

    def announced_key(self, context: RoundContext) -> bytes | None:
        """See `Parties.announced_key`."""
        trust = context.agreement.trust
        if not isinstance(trust, EscrowTrust):
            return None
        answer = next(self._correspondence.ask(Step.ANNOUNCE, context, [(trust.holder.name, b"")]), None)
        return None if answer is None or answer.refusal else answer.payload

    def key_holder(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes | None:
        """See `Parties.key_holder`. It says which uploads it lacks, and gets them one at a time."""
        trust = context.agreement.trust
        if not isinstance(trust, EscrowTrust):
            return None
        name = trust.holder.name
        for _ in range(2):
            answer = next(self._correspondence.ask(Step.HOLD, context, [(name, request)]), None)
            if answer is None:
                return None
            if answer.refusal:
                self.disapproving.append(name)
                return None
            lacking = answer.facts.get("lacking", [])
            if not lacking:
                return answer.payload
            if not isinstance(lacking, list):
                return None
            for client in context.agreement.roster.names:
                if client in lacking:
                    list(self._correspondence.ask(Step.STORE, context, [(name, upload(client))], about=client))
        return None


def _reply(answer: Answer, step: Step) -> Reply | None:
    """The reply in an answer; None if the client refused what it was asked."""
    if not answer.refusal:
        return Reply(name=answer.name, message=answer.payload, weighing=_weighing(answer.facts) if step is Step.WEIGH else None)
    if answer.refusal == BudgetExceededError.__name__ and step in (Step.COMMIT, Step.UPLOAD):
        return Reply(name=answer.name, outcome=Outcome.OVER_BUDGET)
    if step is Step.OPEN and answer.payload:
        return Reply(name=answer.name, outcome=Outcome.ABORTED, message=answer.payload)
    return None


def _weighing(facts: Mapping[str, Any]) -> Weighing | None:
    """What a client says of how it found coefficients. It goes into the record and nowhere else."""
    fallback, disclosed, assurance = (facts.get(name) for name in ("fallback", "disclosed", "assurance"))
    if (
        not isinstance(fallback, str)
        or fallback not in Fallback.__members__
        or type(disclosed) is not int
        or not 0 <= disclosed < 2**32
        or not isinstance(assurance, str)
    ):
        return None
    return Weighing(fallback=Fallback[fallback], disclosed=disclosed, assurance=assurance[:_MOST_ASSURANCE])

"""What the coordinator sends and takes: requests that it signs, and answers that are authentic and in time. Nothing else gets through."""

import time
from collections.abc import Iterable, Iterator

from privfed.agreement import RoundContext
from privfed.engines.envelope import Answer, Request, open_answer, seal_request
from privfed.engines.exchange import Exchange, TimeOuts
from privfed.engines.metrics import EventLog, Metrics
from privfed.engines.party_folder import answering_parties
from privfed.errors import InvalidMessageError
from privfed.identity import Identity
from privfed.phases import Step


class Correspondence:
    """The coordinator's side of an `Exchange`.

    Args:
        exchange: Carries the bytes.
        identity: The server's signing key.
        time_outs: How long answers are waited for.
        events: Where is written what was asked, and who did not answer.
        metrics: Where it is counted.
    """

    def __init__(self, exchange: Exchange, *, identity: Identity, time_outs: TimeOuts, events: EventLog, metrics: Metrics) -> None:
        self._exchange = exchange
        self._identity = identity
        self._time_outs = time_outs
        self._events = events
        self._metrics = metrics

    def ask(self, step: Step, context: RoundContext, questions: Iterable[tuple[str, bytes]], *, about: str = "") -> Iterator[Answer]:
        """Asks parties, all at once, and gives the authentic answers of those that answered in time, refusals among them."""
        requests: dict[str, bytes] = {}
        last, sealed = None, b""
        for name, payload in questions:
            if payload is not last:  # what all are asked alike is in memory once: an aggregate is large
                last, sealed = payload, seal_request(Request(step=step, context=context, about=about, payload=payload), self._identity)
            requests[name] = sealed
        if not requests:
            return
        place = {"step": step.name, "round": context.round, "attempt": context.attempt}
        self._events.write("asked", **place, parties=list(requests))
        self._metrics.add("requests", len(requests), label=step.name)
        self._metrics.add("sent_bytes", sum(map(len, requests.values())))
        begun = time.monotonic()
        replies = dict(self._exchange.ask(requests, seconds=self._time_outs.of(step)))
        seconds = time.monotonic() - begun
        self._metrics.add("seconds", seconds, label=step.name)
        self._metrics.add("received_bytes", sum(map(len, replies.values())))
        silent = [name for name in requests if name not in replies]
        self._events.write("answered", **place, parties=[name for name in requests if name in replies], seconds=round(seconds, 3))
        if silent:
            self._events.write("silent", **place, parties=silent)
            self._metrics.add("silences", len(silent), label=step.name)
        parties = answering_parties(context.agreement)
        for name, request in requests.items():
            data = replies.pop(name, None)  # a reply may be large, and is let go as soon as it was taken
            if data is None:
                continue
            try:
                answer = open_answer(data, request, parties[name], agreement=context.agreement)
            except InvalidMessageError:
                self._events.write("dropped", **place, of=name, why="no authentic answer to this request")
                self._metrics.add("refusals", label=InvalidMessageError.__name__)
                continue
            if answer.refusal:
                self._events.write("refused", **place, of=name, kind=answer.refusal)
                self._metrics.add("refusals", label=answer.refusal)
            yield answer

"""What is kept of a round, held or not: all of it is public."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, TypeVar

from privfed.strict_json import real, whole
from privfed.update import effective_clients

T = TypeVar("T")


class Stage(IntEnum):
    """What a client does in a round, in this order. Who is silent at one stage is silent for the rest of the round."""

    SETUP = 1
    UPLOAD = 2
    APPROVAL = 3
    OPENING = 4


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What happened in one round. Public.

    Args:
        round: Number of the round.
        selected: Clients that were asked to take part.
        refused: Clients whose privacy budget did not cover the round; they trained nothing.
        silent: Clients that did not answer in time, and the stage at which they fell silent.
        history: `RoundDigest.digest` of the round, hexadecimal: the history of the next one. Empty without encryption.
        coefficients: Integer coefficient of each participant; 0 for one that the rule left out.
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
        """Clients whose uploads came in time; those with coefficient 0, which a rule may choose, are not in the aggregate."""
        return tuple(self.coefficients)

    @property
    def effective_clients(self) -> float:
        """Effective number of clients in the aggregate."""
        return effective_clients(tuple(self.coefficients.values()))

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        fields = asdict(replace(self, coefficients=dict(self.coefficients)))
        return fields | {"silent": {name: stage.name for name, stage in self.silent.items()}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RoundRecord":
        """Reads what `to_json` gave.

        Raises:
            ValueError: If it is something else.
        """
        try:
            _check_kinds(fields)
            values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
            values["silent"] = {name: Stage[stage] for name, stage in fields["silent"].items()}
            return cls(**values)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("expected a round as RoundRecord.to_json gives it, got something else") from error


def _check_kinds(record: Mapping[str, Any]) -> None:
    """Refuses a record with a text for a number, or the like, with a ValueError."""
    counted = [record["round"], *(count for part in ("coefficients", "bytes_up", "bytes_down") for count in record[part].values())]
    counted += [record[name] for name in ("attempt", "disclosed", "bytes_scoring") if name in record]
    for count in counted:
        whole(count)
    for number in record["seconds"].values():
        real(number)
    lists = (record["selected"], record["refused"])
    texts = [*(record[name] for name in ("assurance", "fallback") if name in record), record["history"]]
    texts += [text for part in lists for text in part]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(part, list) for part in lists):
        raise ValueError("expected names in a round, got something else")


@dataclass(frozen=True, kw_only=True)
class FailedRound:
    """A round that was not held, because too few answered in time. Nothing was opened; what was trained stays charged.

    Args:
        round: Number of the round.
        silent: Clients that did not answer, and from which stage on.
        reason: What was refused.
    """

    round: int
    silent: Mapping[str, Stage]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The round as JSON values."""
        return {"round": self.round, "silent": {name: stage.name for name, stage in self.silent.items()}, "reason": self.reason}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "FailedRound":
        """Reads what `to_json` gave.

        Raises:
            ValueError: If it is something else.
        """
        try:
            silent = {name: Stage[stage] for name, stage in fields["silent"].items()}
            number, reason = whole(fields["round"]), fields["reason"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("expected a round as FailedRound.to_json gives it, got something else") from error
        if not isinstance(reason, str):
            raise ValueError("expected the number of a round and a reason, got something else")
        return cls(round=number, silent=silent, reason=reason)


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

    def each(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Times what it takes to make each of the items, and not what is done with them."""
        while True:
            with self.phase(name):
                item = next(items, None)
            if item is None:
                return
            yield item

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds so far, by phase."""
        return dict(self._seconds)

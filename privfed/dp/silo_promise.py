"""What was promised about a data owner as a whole, beside what was promised about its records."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, Self

from privfed.dp.accounting import epsilon
from privfed.dp.mechanism import DiscreteGaussianSum, Event, Relation, Unit, check_delta, check_unit, decode_event, encode_event
from privfed.dp.silo import SiloNoise
from privfed.strict_json import real

_MOST_ROUNDS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloPromise:
    """Epsilon of a whole silo, for those who see sums and for those who can read single uploads. All fields are public.

    Args:
        events: All that was charged for the silo, in order.
        epsilon: Epsilon of all of them together towards whoever sees the opened sums, in the worst case that is tolerated.
        delta: Above 0 and below 1.
        clients: Clients of the consortium, each of which adds a share of the noise.
        colluders: How many of them may tell the adversary their shares.
        dropouts: How many of them may be missing from an opened sum.

    Raises:
        ValueError: If epsilon is not what the events cost, they do not allow for so many colluders and dropouts, or another
            field is outside its range.
    """

    events: tuple[DiscreteGaussianSum, ...]
    epsilon: float
    delta: float
    clients: int
    colluders: int
    dropouts: int

    def __post_init__(self) -> None:
        check_delta(real(self.delta))
        counts = {"clients": (self.clients, 1), "colluders": (self.colluders, 0), "dropouts": (self.dropouts, 0)}
        for name, (count, least) in counts.items():
            if type(count) is not int or count < least:
                raise ValueError(f"expected {name} to be a whole number of at least {least}, got {count}")
        if any(event.shares > self.clients - self.colluders - self.dropouts for event in self.events):
            raise ValueError("expected events that count on no more shares than colluders and dropouts leave")
        check_epsilon(self.epsilon, self.recompute())

    @classmethod
    def of(cls, events: Iterable[DiscreteGaussianSum], *, delta: float, noise: SiloNoise) -> Self:
        """Returns the promise about events, for example `Ledger.silo_events`, with the epsilon that they cost."""
        known = tuple(events)
        return cls(
            events=known,
            epsilon=epsilon(known, delta=delta, relation=Relation.ZERO_OUT_ONE),
            delta=delta,
            clients=len(noise.weights),
            colluders=noise.colluders,
            dropouts=noise.dropouts,
        )

    def recompute(self) -> float:
        """Computes epsilon from the events alone."""
        return epsilon(self.events, delta=self.delta, relation=Relation.ZERO_OUT_ONE)

    @property
    def single_upload_epsilon(self) -> float:
        """Epsilon towards whoever reads single uploads, or knows all other shares: one share of the noise is left."""
        alone = (replace(event, shares=1) for event in self.events)
        return epsilon(alone, delta=self.delta, relation=Relation.ZERO_OUT_ONE)

    def claims(self) -> dict[str, str]:
        """What holds against whom."""
        together = f"epsilon {show_epsilon(self.epsilon)} at delta {self.delta:g} for the silo as a whole"
        alone = f"epsilon {show_epsilon(self.single_upload_epsilon)} at delta {self.delta:g} for the silo as a whole"
        return {
            "an outsider": f"{together}: it sees at most opened sums",
            "another client": f"{together}: it sees opened sums, and one share of the noise is its own",
            "the server": f"{together}: that it chose who takes part makes nothing better",
            f"up to {self.colluders} clients together": f"{together}: their shares are not counted on",
            "the server together with whoever can decrypt": f"{alone}: they read each upload, under its own share of the noise, and "
            "so does a key holder that gets the uploads",
            "all other parties together": f"{alone}: they know every share but one",
        }

    def lines(self) -> list[str]:
        """The promise for people."""
        return [
            f"For the silo as a whole: {Unit.SILO.value}; {Relation.ZERO_OUT_ONE.value}.",
            f"  Each of {self.clients} clients adds a share of the noise, of which {self.colluders} may be known to the adversary and "
            f"{self.dropouts} may be missing.",
            *(f"  - {who}: {what}" for who, what in self.claims().items()),
        ]

    def content(self) -> dict[str, Any]:
        """The promise as JSON values."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "events": encode_events(self.events),
            "clients": self.clients,
            "colluders": self.colluders,
            "dropouts": self.dropouts,
            "claims": self.claims(),
        }

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """Reads what `content` gave.

        Raises:
            ValueError, TypeError, KeyError: If it is something else, or its epsilon is not that of its events.
        """
        events = decode_events(content["events"])
        for event in events:
            check_unit(event, Unit.SILO)
        return cls(
            events=tuple(event for event in events if isinstance(event, DiscreteGaussianSum)),
            epsilon=math.inf if content["epsilon"] is None else content["epsilon"],
            delta=content["delta"],
            clients=content["clients"],
            colluders=content["colluders"],
            dropouts=content["dropouts"],
        )


def count_events(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Each run of equal events once, with its length."""
    return [(event, len(list(equal))) for event, equal in groupby(events)]


def encode_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Events as JSON values, equal ones in a row once."""
    return [{"rounds": count, "event": encode_event(event)} for event, count in count_events(events)]


def decode_events(runs: list[dict[str, Any]]) -> tuple[Event, ...]:
    """Reads what `encode_events` gave.

    Raises:
        ValueError, TypeError, KeyError: If it is something else, or there are more than a million events.
    """
    if any(type(run["rounds"]) is not int or run["rounds"] < 1 for run in runs):
        raise ValueError("expected events that were charged once or more often")
    if sum(run["rounds"] for run in runs) > _MOST_ROUNDS:
        raise ValueError(f"expected at most {_MOST_ROUNDS} rounds in a statement, got more")
    return tuple(decode_event(run["event"]) for run in runs for _ in range(run["rounds"]))


def check_epsilon(stated: float, cost: float) -> None:
    """Refuses a stated epsilon that is not what the events cost, but for rounding on another machine, with a ValueError."""
    if not math.isclose(real(stated), cost, rel_tol=1e-6, abs_tol=1e-9):
        raise ValueError(f"expected the epsilon of the events, which is {cost:.4g}, got {stated:.4g}")


def show_epsilon(epsilon_value: float) -> str:
    """Epsilon in three digits; above 100 it protects nothing, and no digits are given."""
    return f"{epsilon_value:.3g}" if epsilon_value <= 100 else "above 100"

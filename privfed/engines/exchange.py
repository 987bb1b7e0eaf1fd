"""How the coordinator reaches the other parties, whatever carries the bytes; and for how long it waits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from privfed.phases import Step


class Exchange(Protocol):
    """One request to each of many parties, and what came back in time. It is not trusted: what must be signed is signed inside."""

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:
        """Sends all requests at once, and waits until every party has answered or the time is over.

        Args:
            requests: One for each party, by its name in the agreement.
            seconds: Longest time to wait.

        Returns:
            The replies of those that answered, by name. A reply that comes later is dropped, here or by who reads it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOuts:
    """Seconds that the coordinator waits at each step. Who has not answered by then is silent for the rest of the round.

    Args:
        status: For parties to say that they are there, and which rounds they hold.
        setup: For the derivation of the round key, or fresh shares.
        training: For training and encryption, and the upload's way.
        approval: For the approval of the digest.
        weighing: For the opening of inner products.
        holder: For an upload on its way to the key holder, and for its opening of the sum.
        opening: For the opening of an aggregate.

    Raises:
        ValueError: If one is not above 0 and finite.
    """

    status: float = 60.0
    setup: float = 120.0
    training: float = 3600.0
    approval: float = 120.0
    weighing: float = 600.0
    holder: float = 600.0
    opening: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
                raise ValueError(f"expected {field.name} to be a number of seconds above 0, got {seconds!r}")

    def of(self, step: Step) -> float:
        """Seconds for one step."""
        match step:
            case Step.STATUS:
                return self.status
            case Step.SETUP:
                return self.setup
            case Step.COMMIT | Step.UPLOAD:
                return self.training
            case Step.APPROVE:
                return self.approval
            case Step.WEIGH:
                return self.weighing
            case Step.STORE | Step.HOLD:
                return self.holder
            case Step.OPEN:
                return self.opening

"""What happened to the data: frozen events, and what a promise about them means.

An event states facts and computes nothing. `privfed.dp.accounting` interprets events, and refuses those it does not know.
All fields are public: nothing here depends on the values of private records.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Final, Self, TypeAlias


class Unit(Enum):
    """Whose presence the promise hides. The value says it in words."""

    RECORD = "one record: a single row of the table"


class Relation(Enum):
    """How two neighbouring data sets differ. The value says it in words.

    There is no replace-one relation: accountants disagree about it (privacy loss distributions double the sensitivity,
    Renyi accountants do not), so that one number would mean two things.
    """

    ADD_OR_REMOVE_ONE = "one data set has exactly one unit more than the other"


def check_delta(delta: float) -> None:
    """Refuses a delta that is not above 0 and below 1, with a ValueError."""
    if not 0 < delta < 1:
        raise ValueError(f"expected delta to be above 0 and below 1, got {delta}")


def _check_noise(noise_multiplier: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(f"expected noise_multiplier to be positive and finite, got {noise_multiplier}")


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"expected {name} to be an integer of at least 1, got {number!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSampledGaussian:
    """Steps of DP-SGD: sum over a Poisson sample, each record clipped, plus Gaussian noise.

    Args:
        noise_multiplier: Standard deviation of the noise divided by the clipping norm. Positive.
        sample_rate: Probability that a step draws a given record, independently of all others, above 0 and up to 1.
        steps: Number of noisy sums that were released. A step whose sample happened to be empty counts.

    Raises:
        ValueError: If a field is outside its range.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        _check_noise(self.noise_multiplier)
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"expected sample_rate to be above 0 and up to 1, got {self.sample_rate}")
        _check_number("steps", self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianRelease:
    """Numbers released with Gaussian noise, computed from all records.

    Args:
        noise_multiplier: Standard deviation of the noise divided by the L2 sensitivity to one unit. Positive.
        count: Number of such releases, each with fresh noise.

    Raises:
        ValueError: If a field is outside its range.
    """

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check_noise(self.noise_multiplier)
        _check_number("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonPrivateRelease:
    """Something was released without noise. Its epsilon is infinite."""


Event: TypeAlias = PoissonSampledGaussian | GaussianRelease | NonPrivateRelease

_KINDS: Final[Mapping[str, type[PoissonSampledGaussian] | type[GaussianRelease] | type[NonPrivateRelease]]] = {
    "poisson sampled gaussian": PoissonSampledGaussian,
    "gaussian release": GaussianRelease,
    "non-private release": NonPrivateRelease,
}


def encode_event(event: Event) -> dict[str, str | float | int]:
    """Returns the event as a mapping of JSON values, with its kind.

    Raises:
        TypeError: If it is not an event.

    Example:
        >>> encode_event(GaussianRelease(noise_multiplier=2.0))
        {'kind': 'gaussian release', 'noise_multiplier': 2.0, 'count': 1}
    """
    for kind, event_type in _KINDS.items():
        if type(event) is event_type:
            return {"kind": kind, **asdict(event)}
    raise TypeError(f"expected an event of privfed.dp.mechanism, got {type(event).__name__}")


def decode_event(encoded: object) -> Event:
    """Returns the event that `encode_event` made the mapping from.

    Raises:
        ValueError: If the kind is unknown, a field is missing, not of that kind, or outside its range.
    """
    if not isinstance(encoded, dict):
        raise ValueError(f"expected an encoded event to be a mapping, got {type(encoded).__name__}")
    values: dict[str, object] = dict(encoded)  # pyright: ignore[reportUnknownArgumentType] -- keys are compared below
    kind = values.pop("kind", None)
    event_type = _KINDS.get(kind) if isinstance(kind, str) else None
    if event_type is None:
        raise ValueError("expected a known kind of event, got another")
    if set(values) != {field.name for field in fields(event_type)}:
        raise ValueError(f"expected exactly the fields of a {kind}, got others")
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values.values()):
        raise ValueError(f"expected numbers in a {kind}, got something else")
    return event_type(**values)  # pyright: ignore[reportArgumentType] -- numbers, checked above; __post_init__ checks ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that may be spent: (epsilon, delta)-differential privacy of everything together.

    Args:
        epsilon: Positive and finite. To have no limit, use `Budget.unlimited`, which has to be typed.
        delta: Above 0 and below 1; far below one over the number of records to mean anything.

    Raises:
        ValueError: If a field is outside its range.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"expected epsilon to be positive and finite, got {self.epsilon}; Budget.unlimited has no limit")
        check_delta(self.delta)

    @classmethod
    def unlimited(cls, *, delta: float) -> Self:
        """Returns a budget without limit, for comparisons that promise no privacy. What is spent is still recorded.

        Args:
            delta: The delta at which what was spent is stated, above 0 and below 1.
        """
        check_delta(delta)
        budget = cls.__new__(cls)  # the constructor refuses an infinite epsilon
        object.__setattr__(budget, "epsilon", math.inf)
        object.__setattr__(budget, "delta", delta)
        return budget

    @property
    def limited(self) -> bool:
        """False only for `Budget.unlimited`."""
        return math.isfinite(self.epsilon)

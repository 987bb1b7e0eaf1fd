"""What happened to the data: frozen events, and what a promise about them means.

An event states facts and computes nothing. `privfed.dp.accounting` interprets events, and refuses those it does not know.
All fields are public: nothing here depends on the values of private records.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Final, Self, TypeAlias


class Unit(Enum):
    """Whose presence the promise hides. The value says it in words."""

    RECORD = "one record: a single row of the table"
    CUSTOMER = "one customer: all rows with its declared id, as many as the events say at most"
    SILO = "one silo: everything that one data owner has"


class Relation(Enum):
    """How two neighbouring data sets differ. The value says it in words.

    Noise multipliers are always relative to what *one* unit can contribute. Where a unit is replaced, the difference of two
    contributions is up to twice that, and `privfed.dp.accounting` doubles it; accountants elsewhere disagree (dp-accounting's
    privacy loss distributions double it as well, its Renyi accountant does not).
    """

    ADD_OR_REMOVE_ONE = "one data set has exactly one unit more than the other"
    REPLACE_ONE = "the data sets have equally many units, and one unit of the one is another unit in the other"
    ZERO_OUT_ONE = "in one of the data sets one unit contributes nothing; that it takes part is not hidden"


class Composition(Enum):
    """When the events of an account were chosen. The value says it in words."""

    FIXED_SCHEDULE = "what each event does was fixed before anything was seen of the outcomes of earlier ones"
    ADAPTIVE = "what an event does may have been chosen after looking at the outcomes of earlier ones"


# Beyond, an accountant's squares and products would leave the range of a float. No training needs such numbers.
_LEAST_NOISE: Final = 1e-9
_MOST_NOISE: Final = 1e9
_ACCOUNTED: Final = 0.25  # the accountant itself makes events of less noise: of half for a replaced unit, and of a sum and a count together
_LEAST_SAMPLE_RATE: Final = 1e-15
_MOST_SAMPLE_RATE: Final = 1 - 1e-12  # but for 1, without sampling
_LEAST_DELTA: Final = 1e-100
_LEAST_EPSILON: Final = 1e-9
_MOST_STEPS: Final = 10**12
_MOST_GRID_STEPS: Final = 2**128


def check_real(name: str, number: object, *, least: float, most: float) -> None:
    """Refuses what is not a Python float or int from least to most, with a ValueError.

    A numpy scalar that is no float is refused as well: it could not be written to a ledger, and half or single precision would round
    what is charged.
    """
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise ValueError(f"expected {name} to be a float, got {type(number).__name__}")
    if not least <= number <= most:
        raise ValueError(f"expected {name} from {least:g} to {most:g}, got {number!r}")


def check_count(name: str, number: object, *, most: int = _MOST_STEPS) -> None:
    """Refuses what is not a Python int from 1 to most, with a ValueError."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"expected {name} to be an integer, got {type(number).__name__}")
    if not 1 <= number <= most:
        raise ValueError(f"expected {name} to be an integer from 1 to {most}, got {number}")


def check_noise(name: str, number: object) -> None:
    """Refuses what is no noise multiplier, which is a float from 1e-9 to 1e9, with a ValueError."""
    check_real(name, number, least=_ACCOUNTED * _LEAST_NOISE, most=_MOST_NOISE)


def check_sample_rate(sample_rate: object) -> None:
    """Refuses what is no sample rate, which is 1 or a float from 1e-15 to 1 - 1e-12, with a ValueError."""
    check_real("sample_rate", sample_rate, least=_LEAST_SAMPLE_RATE, most=1.0 if sample_rate == 1 else _MOST_SAMPLE_RATE)


def check_delta(delta: object) -> None:
    """Refuses a delta that is not a float from 1e-100 to below 1, with a ValueError."""
    check_real("delta", delta, least=_LEAST_DELTA, most=math.nextafter(1.0, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSampledGaussian:
    """Steps of DP-SGD: sum over a Poisson sample, each record clipped, plus Gaussian noise.

    Args:
        noise_multiplier: Standard deviation of the noise divided by the clipping norm, from 1e-9 to 1e9.
        sample_rate: Probability that a step draws a given record, independently of all others, from 1e-15 to 1.
        steps: Number of noisy sums that were released, up to 10^12. A step whose sample happened to be empty counts.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_sample_rate(self.sample_rate)
        check_count("steps", self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedPoissonSampledGaussian:
    """Steps of DP-SGD whose batch has a capacity: of a larger Poisson sample, a uniformly random subset of that size is taken.

    Whether a record is in a batch then depends on the others, so the number of records matters: with more than `max_records`
    of them the promise does not hold, and a client with more must not train.

    Args:
        noise_multiplier: As in `PoissonSampledGaussian`.
        sample_rate: As in `PoissonSampledGaussian`.
        capacity: Most records in a batch, at least 1.
        max_records: Declared largest number of records, public, at least 1.
        steps: As in `PoissonSampledGaussian`.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    noise_multiplier: float
    sample_rate: float
    capacity: int
    max_records: int
    steps: int

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_sample_rate(self.sample_rate)
        for name in ("capacity", "max_records", "steps"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerSampledGaussian:
    """Steps of DP-SGD over *records*, stated for a customer who has several of them.

    Each of a customer's records is drawn independently and clipped on its own, so that a step can take none or all of them.

    Args:
        noise_multiplier: Standard deviation of the noise divided by the clipping norm of one record. Positive.
        sample_rate: Probability that a step draws a given record, above 0 and up to 1.
        records_per_customer: Most records of one customer in the table that is trained on, at least 1.
        steps: Number of noisy sums that were released.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    noise_multiplier: float
    sample_rate: float
    records_per_customer: int
    steps: int

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_sample_rate(self.sample_rate)
        for name in ("records_per_customer", "steps"):
            check_count(name, getattr(self, name))
        if self.noise_multiplier < _LEAST_NOISE * self.records_per_customer:
            raise ValueError(
                f"expected noise_multiplier of at least 1e-9 for each of the records_per_customer, got {self.noise_multiplier} for "
                f"{self.records_per_customer}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivelyClippedGaussian:
    """Steps of DP-SGD that also release how many records of the batch were below the clipping norm, to adapt it.

    Each step clips to its own norm, adds noise in multiples of that same norm, and releases the count, centred by one half per
    record, with noise of its own (Andrew et al., 2021, arXiv:1905.03871, algorithm 1).

    Args:
        noise_multiplier: Standard deviation of the noise on the sum divided by the clipping norm of the same step. Positive.
        count_noise: Standard deviation of the noise on the count. Positive.
        sample_rate: As in `PoissonSampledGaussian`.
        steps: As in `PoissonSampledGaussian`.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    noise_multiplier: float
    count_noise: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_noise("count_noise", self.count_noise)
        check_sample_rate(self.sample_rate)
        check_count("steps", self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteGaussianSum:
    """Sums of integer vectors to which several parties each added a share of discrete Gaussian noise.

    Args:
        share_variance: Parameter sigma^2 of each share, in squared grid steps, at least 1.
        shares: Number of independent shares in the sum that the adversary does not know, at least 1. More do no harm.
        l2_sensitivity: Largest Euclidean norm of one unit's contribution, in grid steps, at least 1.
        l1_sensitivity: Largest sum of absolute values of one unit's contribution, in grid steps, at least `l2_sensitivity`.
        coordinates: Length of the vector.
        count: Number of such sums, each with fresh noise.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    share_variance: int
    shares: int
    l2_sensitivity: int
    l1_sensitivity: int
    coordinates: int
    count: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name), most=_MOST_GRID_STEPS)
        if self.l1_sensitivity < self.l2_sensitivity:
            raise ValueError(f"expected l1_sensitivity to be at least l2_sensitivity, got {self.l1_sensitivity} and {self.l2_sensitivity}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianRelease:
    """Numbers released with Gaussian noise, computed from all records.

    Args:
        noise_multiplier: Standard deviation of the noise divided by the L2 norm of what one unit can contribute. Positive.
        count: Number of such releases, each with fresh noise.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_count("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonPrivateRelease:
    """Something was released without noise. Its epsilon is infinite."""


Event: TypeAlias = (
    PoissonSampledGaussian
    | CappedPoissonSampledGaussian
    | CustomerSampledGaussian
    | AdaptivelyClippedGaussian
    | GaussianRelease
    | DiscreteGaussianSum
    | NonPrivateRelease
)

_KINDS: Final[Mapping[str, type[Event]]] = {
    "poisson sampled gaussian": PoissonSampledGaussian,
    "capped poisson sampled gaussian": CappedPoissonSampledGaussian,
    "customer sampled gaussian": CustomerSampledGaussian,
    "adaptively clipped gaussian": AdaptivelyClippedGaussian,
    "gaussian release": GaussianRelease,
    "discrete gaussian sum": DiscreteGaussianSum,
    "non-private release": NonPrivateRelease,
}

# What one unit can contribute is part of an event. So an event speaks of one unit, unless its noise is relative to any.
_UNITS: Final[Mapping[type[Event], frozenset[Unit]]] = {
    PoissonSampledGaussian: frozenset({Unit.RECORD}),
    CappedPoissonSampledGaussian: frozenset({Unit.RECORD}),
    CustomerSampledGaussian: frozenset({Unit.CUSTOMER}),
    AdaptivelyClippedGaussian: frozenset({Unit.RECORD}),
    GaussianRelease: frozenset(Unit),
    DiscreteGaussianSum: frozenset({Unit.SILO}),
    NonPrivateRelease: frozenset(Unit),
}


def check_unit(event: Event, unit: Unit) -> None:
    """Refuses an event that says nothing about a unit: a record's noise protects no customer, a silo's no record by itself.

    Raises:
        TypeError: If it is not an event.
        ValueError: If it speaks of another unit.
    """
    units = _UNITS.get(type(event))
    if units is None:
        raise TypeError(f"expected an event of privfed.dp.mechanism, got {type(event).__name__}")
    if unit not in units:
        raise ValueError(f"expected an event about one {unit.name.lower()}, got {type(event).__name__}, which speaks of another unit")


def describe_event(event: Event) -> str:
    """Returns the event in plain words, for people.

    Raises:
        TypeError: If it is not an event.

    Example:
        >>> describe_event(GaussianRelease(noise_multiplier=8.0, count=2))
        '2 noisy sums over all records; noise multiplier 8'
    """
    match event:
        case PoissonSampledGaussian():
            return f"{_steps(event.steps, event.sample_rate)} (Poisson sampling); noise multiplier {event.noise_multiplier:g}"
        case CappedPoissonSampledGaussian():
            return (
                f"{_steps(event.steps, event.sample_rate)} (Poisson sampling), at most {event.capacity} of at most {event.max_records} "
                f"records in all; noise multiplier {event.noise_multiplier:g}"
            )
        case CustomerSampledGaussian():
            return (
                f"{_steps(event.steps, event.sample_rate)} (Poisson sampling), of a customer at most {event.records_per_customer} "
                f"records; noise multiplier {event.noise_multiplier:g}"
            )
        case AdaptivelyClippedGaussian():
            return (
                f"{_steps(event.steps, event.sample_rate)} (Poisson sampling), with adaptive clipping; noise multiplier "
                f"{event.noise_multiplier:g}, count noise {event.count_noise:g}"
            )
        case GaussianRelease():
            return f"{event.count} noisy sums over all records; noise multiplier {event.noise_multiplier:g}"
        case DiscreteGaussianSum():
            return (
                f"{event.count} sums of integer vectors with {event.shares} shares of discrete Gaussian noise that the adversary does not "
                f"know, each of variance {event.share_variance}; contributions of norm up to {event.l2_sensitivity}, both in grid steps"
            )
        case NonPrivateRelease():
            return "a release without noise"
        case _:  # pyright: ignore[reportUnnecessaryComparison] -- callers without a type checker
            raise TypeError(f"expected an event of privfed.dp.mechanism, got {type(event).__name__}")


def _steps(steps: int, sample_rate: float) -> str:
    return f"{steps} noisy training steps; each draws every record independently with probability {sample_rate:g}"


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
        epsilon: From 1e-9 up, finite. To have no limit, use `Budget.unlimited`, which has to be typed.
        delta: From 1e-100 to below 1; far below one over the number of records to mean anything.

    Raises:
        ValueError: If a field is outside its range, or no Python float or int.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if self.epsilon == math.inf:
            raise ValueError("expected a finite epsilon, got infinity; Budget.unlimited has no limit")
        check_real("epsilon", self.epsilon, least=_LEAST_EPSILON, most=sys.float_info.max)
        check_delta(self.delta)

    @classmethod
    def unlimited(cls, *, delta: float) -> Self:
        """Returns a budget without limit, for comparisons that promise no privacy. What is spent is still recorded.

        Args:
            delta: The delta at which what was spent is stated, from 1e-100 to below 1.
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

"""What was promised about one data set, in a form that a privacy officer can read and an auditor can recompute.

A statement is about one population. Statements are never averaged: a person whose records are in several of them adds up
their epsilons, and their deltas.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Self

from privfed.dp.accounting import ACCOUNTANT
from privfed.dp.charges import Charges
from privfed.dp.entries import is_population
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import (
    AdaptivelyClippedGaussian,
    Budget,
    CappedPoissonSampledGaussian,
    Composition,
    CustomerSampledGaussian,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Relation,
    Unit,
    check_delta,
    check_unit,
    describe_event,
)
from privfed.dp.silo import SiloNoise
from privfed.dp.silo_promise import SiloPromise, check_epsilon, count_events, decode_events, encode_events, show_epsilon
from privfed.strict_json import canonical, checksum, parse, real

_FORMAT: Final = "privfed privacy statement v2"

NOISE_ADDED_BY: Final = "the owner of the data, on its own machine, before anything is encrypted or leaves it"

MODEL_RELEASED: Final = "the change of the model's weights in every round, with noise, encrypted or not"
ANSWERS_RELEASED: Final = "answers to questions about the data, with noise"
NOISELESS_RELEASED: Final = "something without noise: the change of the model's weights, or an answer"

NOT_COVERED: Final = (
    "a person or company with several records: the promise is for each record alone",
    "the same person's records at other parties: their epsilons and deltas add up to these",
    "the number of records, class counts and weights in the aggregation, unless they were public beforehand",
    "ranges and scales of features that were computed from the data instead of being declared",
    "evaluation metrics computed on private data: they exist in simulations only and must not be published",
    "running time, and whether the party took part at all",
    "choices made after looking at private results, such as this noise multiplier or this model",
    "anything released that is not listed here",
)

NOT_COVERED_FOR_CUSTOMERS: Final = (
    "which records carry which customer's id, and that they exist: whoever deals with a customer knows that much",
    "a customer's records beyond the declared number: they must have been left out before training",
    *NOT_COVERED[1:],
)


class Randomness(Enum):
    """Where noise and samples were drawn from. The value says it in words."""

    OPERATING_SYSTEM = "the operating system's entropy"
    SEEDED = "a seed that others may know or try"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """Everything that is needed to understand, and to recompute, one epsilon. All fields are public.

    Args:
        population: Declared name of the data set.
        events: All that was charged, in order.
        epsilon: Epsilon of all events together; infinite if the statement is not private.
        delta: Above 0 and below 1.
        max_grad_norm: Norm to which each record's gradient was clipped; None if there was no clipping.
        randomness: Where noise and samples were drawn from. With a seed nothing is private, whatever the events say.
        unit: Whose presence is protected.
        relation: How neighbouring data sets differ.
        adaptive_budget: The budget of an account whose events may have been chosen after looking at outcomes. A filter kept to it,
            so it is what is promised. None for a fixed schedule.
        silo: What was promised beside it about the owner as a whole; None if nothing was.

    Raises:
        ValueError: If epsilon is not what the events cost, or another field is outside its range.

    Example:
        >>> event = PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
        >>> statement = PrivacyStatement.of([event] * 20, population="bank_a", delta=1e-5, max_grad_norm=1.0)
        >>> round(statement.epsilon, 2), statement.private
        (2.16, True)
        >>> PrivacyStatement.from_json(statement.to_json()) == statement
        True
    """

    population: str
    events: tuple[Event, ...]
    epsilon: float
    delta: float
    max_grad_norm: float | None
    randomness: Randomness
    unit: Unit = Unit.RECORD
    relation: Relation = Relation.ADD_OR_REMOVE_ONE
    adaptive_budget: Budget | None = None
    silo: SiloPromise | None = None

    accountant: ClassVar[str] = ACCOUNTANT
    """Name and version of what computed epsilon."""
    noise_added_by: ClassVar[str] = NOISE_ADDED_BY
    """Who added the noise."""

    def __post_init__(self) -> None:
        if not is_population(self.population):
            raise ValueError("expected a population of 1 to 200 printable characters: a line of its own would read as a promise")
        check_delta(real(self.delta))
        for event in self.events:
            check_unit(event, self.unit)
        sampled = any(isinstance(event, _CLIPPED) for event in self.events)
        norm = self.max_grad_norm
        if (norm is None and sampled) or (norm is not None and not 0 < real(norm) < math.inf):
            raise ValueError(f"expected the clipping norm of the sampled steps to be positive and finite, got {norm}")
        check_epsilon(self.epsilon, self.recompute())

    @classmethod
    def of(
        cls,
        events: Iterable[Event],
        *,
        population: str,
        delta: float,
        max_grad_norm: float | None,
        randomness: Randomness = Randomness.OPERATING_SYSTEM,
        unit: Unit = Unit.RECORD,
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        adaptive_budget: Budget | None = None,
        silo: SiloPromise | None = None,
    ) -> Self:
        """Returns the statement about events, for example those of a ledger, with the epsilon that they cost.

        Raises:
            TypeError: If one of them is not a known event.
            ValueError: If a field is outside its range.
        """
        known = tuple(events)
        return cls(
            population=population,
            events=known,
            epsilon=_epsilon(known, delta, randomness, relation, adaptive_budget),
            delta=delta,
            max_grad_norm=max_grad_norm,
            randomness=randomness,
            unit=unit,
            relation=relation,
            adaptive_budget=adaptive_budget,
            silo=silo,
        )

    @classmethod
    def of_ledger(
        cls,
        ledger: Ledger,
        *,
        max_grad_norm: float | None,
        randomness: Randomness = Randomness.OPERATING_SYSTEM,
        silo: SiloNoise | None = None,
    ) -> Self:
        """Returns the statement about everything that a ledger charged, on the ledger's terms.

        If the ledger has several accounts, of disjoint data, it is stated as if one unit had paid for all of them.

        Args:
            ledger: The owner's.
            max_grad_norm: Clipping norm of the training; None if nothing was trained.
            randomness: Where the noise was drawn from.
            silo: The agreed noise behind what the ledger charged for the silo as a whole; how many may collude or be missing is not in
                the ledger.

        Raises:
            ValueError: If the ledger charged for the silo as a whole and `silo` is missing, or allows for more than was charged.
        """
        terms = ledger.terms
        charged = ledger.silo_events()
        if charged and silo is None:
            raise ValueError("expected the silo noise that was agreed, because the ledger charged for the silo as a whole")
        silo_delta = None if terms.silo_budget is None else terms.silo_budget.delta
        promise = None if silo is None or silo_delta is None else SiloPromise.of(charged, delta=silo_delta, noise=silo)
        return cls.of(
            ledger.events(),
            population=terms.population,
            delta=terms.budget.delta,
            max_grad_norm=max_grad_norm,
            randomness=randomness,
            unit=terms.unit,
            relation=terms.relation,
            adaptive_budget=terms.budget if terms.composition is Composition.ADAPTIVE else None,
            silo=promise,
        )

    @property
    def private(self) -> bool:
        """Whether anything is promised: epsilon is finite, which it is not if the noise was seeded or missing."""
        return math.isfinite(self.epsilon)

    @property
    def released(self) -> tuple[str, ...]:
        """What left the owner's machine, as far as it was charged."""
        kinds = ((_CLIPPED, MODEL_RELEASED), ((GaussianRelease,), ANSWERS_RELEASED), ((NonPrivateRelease,), NOISELESS_RELEASED))
        return tuple(what for types, what in kinds if any(isinstance(event, types) for event in self.events))

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the promise is not about."""
        return NOT_COVERED_FOR_CUSTOMERS if self.unit is Unit.CUSTOMER else NOT_COVERED

    @property
    def rounds(self) -> int:
        """Number of charges."""
        return len(self.events)

    @property
    def best_guess(self) -> float:
        """How often anybody can be right about whether a given record was used, at even odds: from 0.5 (a coin) to 1.

        (exp(epsilon) + delta) / (exp(epsilon) + 1): Kairouz et al., 2015, arXiv:1311.0776, theorem 2.1.
        """
        return 1.0 if not self.private else 1 - (1 - self.delta) / (1 + math.exp(min(self.epsilon, 700.0)))

    def recompute(self, *, delta: float | None = None) -> float:
        """Computes epsilon from the events alone, with the accountant that is installed; infinite if the noise was seeded.

        Args:
            delta: Above 0 and below 1; left out, that of the statement. A budget for adaptive choices holds at its own delta only.
        """
        delta = self.delta if delta is None else delta
        return _epsilon(self.events, delta, self.randomness, self.relation, self.adaptive_budget)

    def claims(self) -> dict[str, str]:
        """What holds against whom. Encryption is never a reason: the noise is in the numbers whoever reads them."""
        if not self.private:
            reason = "nothing is promised; what encryption hides from this party is not differential privacy"
            return dict.fromkeys(_ADVERSARIES, reason)
        number = f"epsilon {show_epsilon(self.epsilon)} at delta {self.delta:g}"
        return {who: f"{number} per {self.unit.name.lower()}: {why}" for who, why in _ADVERSARIES.items()} | {
            "the owner itself": "nothing is hidden from it: it has the records"
        }

    def to_json(self) -> str:
        """Returns the statement as JSON, from which `from_json` restores it. An infinite epsilon is null."""
        budget = self.adaptive_budget
        content = {
            "format": _FORMAT,
            "private": self.private,
            "population": self.population,
            "unit": self.unit.name,
            "relation": self.relation.name,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "events": encode_events(self.events),
            "max_grad_norm": self.max_grad_norm,
            "randomness": self.randomness.name,
            "noise_added_by": self.noise_added_by,
            "adaptive_budget": None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta},
            "silo": None if self.silo is None else self.silo.content(),
            "accountant": self.accountant,
            "released": list(self.released),
            "not_covered": list(self.not_covered),
            "claims": self.claims(),
        }
        return json.dumps(content | {"checksum": checksum(content)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the statement that `to_json` wrote. All that follows from other fields is computed anew, and must be what is written.

        What follows from nothing else, such as the clipping norm, is bound by the checksum, which is no signature: whether a statement
        is about a certain ledger, only the ledger tells.

        Raises:
            ValueError: If it is not such a statement, it was edited, or another version of privfed or of its accountant wrote it.
        """
        try:
            content: dict[str, Any] = parse(text)
            budget, silo = content["adaptive_budget"], content["silo"]
            statement = cls(
                population=content["population"],
                events=decode_events(content["events"]),
                epsilon=math.inf if content["epsilon"] is None else content["epsilon"],
                delta=content["delta"],
                max_grad_norm=content["max_grad_norm"],
                randomness=Randomness[content["randomness"]],
                unit=Unit[content["unit"]],
                relation=Relation[content["relation"]],
                adaptive_budget=None if budget is None else Budget(epsilon=real(budget["epsilon"]), delta=real(budget["delta"])),
                silo=None if silo is None else SiloPromise.of_content(silo),
            )
            same = canonical(json.loads(statement.to_json())) == canonical(content)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError("expected a privacy statement of this version, got something else") from error
        if not same:
            raise ValueError("expected a privacy statement whose parts agree, got one that was edited or is of another version")
        return statement

    def text(self) -> str:
        """Returns the statement for people, in plain English."""
        noun = self.unit.name.lower()
        lines = [f"Privacy statement for {self.population}", ""]
        if self.private:
            lines += [
                f"Promise: epsilon {show_epsilon(self.epsilon)} at delta {self.delta:g} (differential privacy).",
                f"  Whoever sees everything that was released, and knows every other {noun}, is right about whether a given {noun} was "
                f"used at most {self.best_guess:.1%} of the time, where a coin is right 50.0% of the time.",
            ]
        else:
            reason = "the noise came from a seed" if self.randomness is Randomness.SEEDED else "something was released without noise"
            lines += [f"NOT PRIVATE: {reason}. Nothing is promised. Use this for comparisons only."]
        lines += [
            f"Protected: {self.unit.value}; {self.relation.value}.",
            *([] if self.adaptive_budget is None else [f"Adaptive: {Composition.ADAPTIVE.value}."]),
            "",
            "What was done:",
            *(f"  - {count} x {describe_event(event)}" for event, count in count_events(self.events)),
            *([] if self.events else ["  - nothing"]),
        ]
        if self.max_grad_norm is not None:
            adaptive = any(isinstance(event, AdaptivelyClippedGaussian) for event in self.events)
            norm = f"{'a norm of its step, at most' if adaptive else 'norm'} {self.max_grad_norm:g}"
            lines.append(f"  Each record's gradient was clipped to {norm}; the noise is in multiples of that norm.")
        lines += [
            "  Every attempt that was charged is counted, whether or not its update was ever sent.",
            f"  Noise is added by {self.noise_added_by}.",
            f"  Noise and samples come from {self.randomness.value}.",
            f"  Computed by {self.accountant}.",
            "",
            "Against whom:",
            *(f"  - {who}: {what}" for who, what in self.claims().items()),
            *([] if self.silo is None else ["", *self.silo.lines()]),
            "",
            "Released:",
            *(f"  - {item}" for item in self.released or ("nothing",)),
            "",
            "Not covered:",
            *(f"  - {item}" for item in self.not_covered),
        ]
        return "\n".join(lines) + "\n"


_CLIPPED: Final = (PoissonSampledGaussian, CappedPoissonSampledGaussian, CustomerSampledGaussian, AdaptivelyClippedGaussian)

_ADVERSARIES: Final = {
    "an outsider": "it sees at most the models that were released",
    "another client": "it sees the models, and updates if it can decrypt them; both carry this noise",
    "the server": "it would read the same if it could decrypt",
    "the server together with whoever can decrypt": "they read the updates, which carry this noise",
    "all other parties together": "each client's noise is its own and does not rely on theirs",
}


def _epsilon(events: tuple[Event, ...], delta: float, randomness: Randomness, relation: Relation, adaptive_budget: Budget | None) -> float:
    charges = Charges(events)
    if randomness is Randomness.SEEDED:
        return math.inf
    if adaptive_budget is None:
        return charges.epsilon(delta=delta, relation=relation)
    within = delta == adaptive_budget.delta and charges.filtered_epsilon(delta=delta, relation=relation) <= adaptive_budget.epsilon
    return adaptive_budget.epsilon if within else math.inf

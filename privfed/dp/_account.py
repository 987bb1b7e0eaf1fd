"""What a ledger holds in memory: its terms, and what was charged to which of its accounts."""

import json
from dataclasses import dataclass, replace
from typing import Any, Final, Self, cast

from privfed.dp.accounting import most
from privfed.dp.charges import Charges
from privfed.dp.entries import is_population
from privfed.dp.mechanism import (
    Budget,
    Composition,
    DiscreteGaussianSum,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    Relation,
    Unit,
    check_unit,
)
from privfed.errors import BudgetExceededError

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a ledger was made for. It cannot be changed afterwards.

    Args:
        population: Declared name of the data set, 1 to 200 characters.
        budget: What may be spent in total.
        unit: Whose presence is protected: records or customers.
        relation: How neighbouring data sets differ.
        composition: Whether events may be chosen after looking at outcomes.
        silo_budget: What may be spent in total on the silo as a whole; None if nothing is promised about it.

    Raises:
        ValueError: If the population's name is empty or too long, the unit is the silo, or an adaptive account has no limit.
    """

    population: str
    budget: Budget
    unit: Unit
    relation: Relation
    composition: Composition
    silo_budget: Budget | None

    def __post_init__(self) -> None:
        if not is_population(self.population):
            raise ValueError("expected a population name of 1 to 200 printable characters, got something else")
        if self.unit is Unit.SILO:
            raise ValueError(
                "expected the unit to be the record or the customer, got the silo; give its budget as silo_budget, beside theirs"
            )
        if self.composition is Composition.ADAPTIVE and not self.budget.limited:
            raise ValueError("expected a limited budget for adaptive events, got an unlimited one, with which nothing has to be adapted")

    def body(self) -> dict[str, object]:
        """The terms as JSON values, for the row that opens a ledger."""
        return {
            "version": _VERSION,
            "population": self.population,
            "unit": self.unit.name,
            "relation": self.relation.name,
            "composition": self.composition.name,
            "budget": _encode_budget(self.budget),
            "silo_budget": None if self.silo_budget is None else _encode_budget(self.silo_budget),
        }

    @classmethod
    def read(cls, body: str) -> Self:
        """The terms in a row that opened a ledger.

        Raises:
            ValueError, TypeError, LookupError: If this version does not understand all of it.
        """
        found = cast("dict[str, Any]", json.loads(body))
        silo = found["silo_budget"]
        terms = cls(
            population=found["population"],
            budget=_decode_budget(found["budget"]),
            unit=Unit[found["unit"]],
            relation=Relation[found["relation"]],
            composition=Composition[found["composition"]],
            silo_budget=None if silo is None else _decode_budget(silo),
        )
        kept = {"kind": "open", "time": found["time"], "nonce": found["nonce"], "fingerprint_key": found["fingerprint_key"]}
        if {**terms.body(), **kept} != found:
            raise ValueError("expected the terms of this version, got others")
        return terms

    def __str__(self) -> str:
        words = f"population {self.population!r}, unit {self.unit.name}, relation {self.relation.name}, {_limit(self.budget)}"
        if self.composition is not Composition.FIXED_SCHEDULE:
            words += ", adaptive"
        return words if self.silo_budget is None else f"{words}, and for the silo {_limit(self.silo_budget)}"


class Accounts:
    """What was charged, to whom of a population. At first there is one account, for all of its units.

    A data set that was declared to be disjoint from all earlier ones gets an account of its own: no unit is in both, so nobody
    pays for both. Data that nobody declared anything about may hold anybody, and are charged to every account.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._accounts = [Charges()]
        self._silo = Charges()
        self._known: dict[bytes, tuple[int, ...]] = {}

    def knows(self, fingerprint: bytes) -> bool:
        """Whether these data were charged or declared before."""
        return fingerprint in self._known

    def declare(self, fingerprint: bytes) -> None:
        """Opens an account for data that were not seen before."""
        self._known[fingerprint] = (len(self._accounts),)
        self._accounts.append(Charges())

    def charge(self, event: Event, *, silo_event: DiscreteGaussianSum | None, fingerprint: bytes | None) -> None:
        """Charges an event, whatever the budget. Raises as `check_units`; then nothing was charged."""
        self.check_units(event, silo_event)
        affected = self._affected(fingerprint)
        if fingerprint is not None:
            self._known.setdefault(fingerprint, affected)
        for index in affected:
            self._accounts[index].add(event)
        if silo_event is not None:
            self._silo.add(silo_event)

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of the unit that paid most; in an adaptive account, what its filter compares with the budget."""
        return max(self._cost(charges, delta) for charges in self._accounts)

    def silo_spent(self, delta: float | None = None) -> float:
        """Epsilon of the silo as a whole."""
        budget = self._silo_budget()
        return self._silo.epsilon(delta=budget.delta if delta is None else delta, relation=Relation.ZERO_OUT_ONE)

    def check_units(self, event: Event, silo_event: DiscreteGaussianSum | None) -> None:
        """Refuses events that speak of other units than the ledger, or a silo's event without its budget, with a ValueError."""
        check_unit(event, self._terms.unit)
        if silo_event is not None:
            check_unit(silo_event, Unit.SILO)
            self._silo_budget()

    def check(self, event: Event, *, silo_event: DiscreteGaussianSum | None, fingerprint: bytes | None) -> None:
        """Refuses what is over one of the budgets.

        Raises:
            BudgetExceededError: If it is; nothing was charged.
            ValueError: As `check_units`, or if nothing is known about the event in an adaptive account.
        """
        self.check_units(event, silo_event)
        affected = [self._accounts[index] for index in self._affected(fingerprint)]
        after = max(self._cost(charges.plus(event)) for charges in affected)
        if after > self._terms.budget.epsilon:
            before = max(self._cost(charges) for charges in affected)
            self._refuse("what is spent", before, after, self._terms.budget, self._advice(event, fingerprint))
        if silo_event is None:
            return
        budget = self._silo_budget()
        after = self._silo.plus(silo_event).epsilon(delta=budget.delta, relation=Relation.ZERO_OUT_ONE)
        if after > budget.epsilon:
            self._refuse(
                "what is spent on the silo as a whole", self.silo_spent(), after, budget, "the silo's noise would have to be larger"
            )

    def rounds_possible(self, event: Event, *, silo_event: DiscreteGaussianSum | None = None, fingerprint: bytes | None = None) -> int:
        """How many more times both events fit into the budgets together, from 0 to 1,000,000 (which then means "at least")."""
        self.check_units(event, silo_event)
        affected = [self._accounts[index] for index in self._affected(fingerprint)]

        def fits(rounds: int) -> bool:
            if silo_event is not None:
                budget = self._silo_budget()
                if self._silo.plus(silo_event, times=rounds).epsilon(delta=budget.delta, relation=Relation.ZERO_OUT_ONE) > budget.epsilon:
                    return False
            return all(self._cost(charges.plus(event, times=rounds)) <= self._terms.budget.epsilon for charges in affected)

        return most(fits)

    def _affected(self, fingerprint: bytes | None) -> tuple[int, ...]:
        everybody = tuple(range(len(self._accounts)))
        return everybody if fingerprint is None else self._known.get(fingerprint, everybody)

    def _cost(self, charges: Charges, delta: float | None = None) -> float:
        terms = self._terms
        delta = terms.budget.delta if delta is None else delta
        if terms.composition is Composition.ADAPTIVE:
            return charges.filtered_epsilon(delta=delta, relation=terms.relation)
        return charges.epsilon(delta=delta, relation=terms.relation)

    def _silo_budget(self) -> Budget:
        if self._terms.silo_budget is None:
            raise ValueError("expected a ledger with a silo_budget, got one that promises nothing about the silo as a whole")
        return self._terms.silo_budget

    def _advice(self, event: Event, fingerprint: bytes | None) -> str:
        match event:
            case NonPrivateRelease():
                return "to go without privacy, make another ledger with Budget.unlimited"
            case GaussianRelease():
                count, one, noun = event.count, replace(event, count=1), "releases"
            case DiscreteGaussianSum():
                count, one, noun = event.count, replace(event, count=1), "sums"
            case _:
                count, one, noun = event.steps, replace(event, steps=1), "steps"
        return f"of its {count} {noun}, {self.rounds_possible(one, fingerprint=fingerprint)} would still fit"

    @staticmethod
    def _refuse(what: str, before: float, after: float, budget: Budget, advice: str) -> None:
        raise BudgetExceededError(
            f"this event would bring {what} from epsilon {before:.4g} to {after:.4g}, over the budget of {budget.epsilon:g} "
            f"at delta {budget.delta:g}; nothing was spent or trained; 0 more rounds of this event are possible; {advice}"
        )


def _limit(budget: Budget) -> str:
    return f"{f'epsilon {budget.epsilon:g}' if budget.limited else 'unlimited epsilon'} at delta {budget.delta:g}"


def _encode_budget(budget: Budget) -> dict[str, float | None]:
    return {"epsilon": budget.epsilon if budget.limited else None, "delta": budget.delta}


def _decode_budget(encoded: dict[str, Any]) -> Budget:
    limit, delta = encoded["epsilon"], encoded["delta"]
    return Budget.unlimited(delta=delta) if limit is None else Budget(epsilon=limit, delta=delta)

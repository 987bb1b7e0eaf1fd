"""Privacy statements of all clients together, and of one person whose records are at several of them.

Nothing is averaged: a federation promises each person what the client promises that has them, and the worst of these is what can
be said about all. Nor does anybody's noise count for anybody else's records.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from privfed.dp.mechanism import Unit
from privfed.dp.silo_promise import show_epsilon
from privfed.dp.statement import PrivacyStatement
from privfed.strict_json import canonical, checksum, parse

_FORMAT: Final = "privfed federation statement v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationStatement:
    """The privacy statements of all clients of a federation. All fields are public.

    Args:
        mode: Name of the trust mode: who holds the key.
        statements: One per client, each about its own population.

    Raises:
        ValueError: If the mode has no name, there is no statement, two are about one population, or their units differ.

    Example:
        >>> from privfed.dp.mechanism import GaussianRelease
        >>> one = PrivacyStatement.of([GaussianRelease(noise_multiplier=8.0)], population="a", delta=1e-6, max_grad_norm=None)
        >>> two = PrivacyStatement.of([GaussianRelease(noise_multiplier=4.0)], population="b", delta=1e-6, max_grad_norm=None)
        >>> federation = FederationStatement(mode="SharedKey", statements=(one, two))
        >>> federation.worst.population, round(federation.person_at(["a", "b"]).epsilon - one.epsilon, 2) == round(two.epsilon, 2)
        ('b', True)
    """

    mode: str
    statements: tuple[PrivacyStatement, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or not self.mode:  # pyright: ignore[reportUnnecessaryIsInstance] -- from JSON
            raise ValueError("expected the trust mode to have a name")
        _check_together(self.statements)

    @property
    def worst(self) -> PrivacyStatement:
        """The statement with the largest epsilon at the smallest delta of all: epsilons at different deltas do not compare."""
        least = min(statement.delta for statement in self.statements)
        return max(self.statements, key=lambda statement: statement.recompute(delta=least))

    @property
    def private(self) -> bool:
        """Whether every client promises anything."""
        return all(statement.private for statement in self.statements)

    def person_at(self, populations: Iterable[str]) -> "PersonPromise":
        """What somebody is promised who is in several of the populations.

        Raises:
            ValueError: If one of them is not in this federation.
        """
        by_name = {statement.population: statement for statement in self.statements}
        wanted = tuple(populations)
        if not set(wanted) <= set(by_name):
            raise ValueError(f"expected populations of {sorted(by_name)}, got {sorted(wanted)}")
        return merge(by_name[name] for name in wanted)

    def claims(self) -> dict[str, str]:
        """What holds against whom, for every client: the worst of them."""
        claims = {who: f"at worst, at {self.worst.population}: {claim}" for who, claim in self.worst.claims().items()}
        silos = [statement for statement in self.statements if statement.silo is not None]
        if len(silos) == len(self.statements):
            # The silo that is worst off with opened sums need not be the one that is worst off with its single uploads.
            for weakest in (
                max(silos, key=lambda statement: statement.silo.single_upload_epsilon if statement.silo else 0.0),
                max(silos, key=lambda statement: statement.silo.epsilon if statement.silo else 0.0),
            ):
                if weakest.silo is None:
                    continue
                sums = f"epsilon {show_epsilon(weakest.silo.epsilon)} "
                for who, claim in weakest.silo.claims().items():
                    key = f"{who}, about a silo as a whole"
                    if key not in claims or claim.startswith(sums):
                        claims[key] = f"at worst, at {weakest.population}: {claim}"
        return claims

    def to_json(self) -> str:
        """Returns the statement as JSON, with the whole statement of each client, from which `from_json` restores it."""
        content = {
            "format": _FORMAT,
            "private": self.private,
            "mode": self.mode,
            "claims": self.claims(),
            "statements": [json.loads(statement.to_json()) for statement in self.statements],
        }
        return json.dumps(content | {"checksum": checksum(content)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the statement that `to_json` wrote; see `PrivacyStatement.from_json` for what is checked, at each client and here.

        Raises:
            ValueError: If it is not such a statement, it was edited, or another version of privfed or of its accountant wrote it.
        """
        try:
            content: dict[str, Any] = parse(text)
            statements = tuple(PrivacyStatement.from_json(json.dumps(part)) for part in content["statements"])
            federation = cls(mode=content["mode"], statements=statements)
            same = canonical(json.loads(federation.to_json())) == canonical(content)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError("expected a federation statement of this version, got something else") from error
        if not same:
            raise ValueError("expected a federation statement whose parts agree, got one that was edited or is of another version")
        return federation

    def text(self) -> str:
        """Returns the statement for people: the federation first, then every client."""
        noun = self.worst.unit.name.lower()
        lines = [f"Privacy statement for {len(self.statements)} clients; key: {self.mode}", ""]
        lines += [f"  {statement.population}: {_promise(statement)}" for statement in self.statements]
        lines += ["", f"A {noun} at one client has that client's promise. For somebody at several, epsilons and deltas add up."]
        if len(self.statements) > 1:
            everywhere = merge(self.statements)
            lines.append(f"  At all of them: {everywhere.words}.")
        lines += ["", "Against whom:", *(f"  - {who}: {claim}" for who, claim in self.claims().items()), ""]
        return "\n".join(lines) + "\n" + "\n".join(statement.text() for statement in self.statements)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonPromise:
    """What somebody is promised whose data several clients hold: basic composition, valid whatever the clients' data have in common.

    Args:
        populations: The data sets they are in.
        unit: What each of them has of the person: one record, or one customer.
        epsilon: Sum of the epsilons.
        delta: Sum of the deltas; from 1 on nothing is promised.
    """

    populations: tuple[str, ...]
    unit: Unit
    epsilon: float
    delta: float

    @property
    def words(self) -> str:
        """The promise in words."""
        if self.delta >= 1 or not math.isfinite(self.epsilon):
            return "nothing is promised"
        return f"epsilon {show_epsilon(self.epsilon)} at delta {self.delta:g}, for one {self.unit.name.lower()} at each"


def merge(statements: Iterable[PrivacyStatement]) -> PersonPromise:
    """What somebody is promised who is in the populations of several statements: epsilons and deltas add up.

    Raises:
        ValueError: If there is no statement, two are about one population, or their units differ.
    """
    known = tuple(statements)
    _check_together(known)
    return PersonPromise(
        populations=tuple(statement.population for statement in known),
        unit=known[0].unit,
        epsilon=sum(statement.epsilon for statement in known),
        delta=sum(statement.delta for statement in known),
    )


def _check_together(statements: tuple[PrivacyStatement, ...]) -> None:
    names = {statement.population for statement in statements}
    if not statements or len(names) != len(statements):
        raise ValueError("expected at least one statement, and each about another population")
    if len({(statement.unit, statement.relation) for statement in statements}) > 1:
        raise ValueError("expected statements about one kind of unit and one relation, got several: they do not add up")


def _promise(statement: PrivacyStatement) -> str:
    if not statement.private:
        return "NOT PRIVATE, nothing is promised"
    return f"epsilon {show_epsilon(statement.epsilon)} at delta {statement.delta:g} per {statement.unit.name.lower()}"

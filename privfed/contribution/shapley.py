"""Shapley values of any utility, by averaging updates again for every coalition: for simulations, in the clear, and slow.

A utility such as the loss on validation records does not follow from inner products, so each coalition's mean is formed and
evaluated. These are baselines: `privfed.contribution.trajectory` needs neither the updates nor a loop over coalitions.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

# Cycles of permutations over which an estimate must stand still.
_SETTLED_CYCLES = 10

CoalitionUtility = Callable[[PlainVector], float]
"""What a movement of the model is worth, for example minus the loss on validation records after it. Finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Valuation:
    """Shapley values, and what they cost.

    Args:
        values: Of each client, by name.
        evaluations: How many coalitions were averaged and evaluated.
        permutations: How many orders of the clients were gone through.
    """

    values: Mapping[str, float]
    evaluations: int
    permutations: int


@dataclass(slots=True, kw_only=True)
class _Coalitions:
    """Worth of coalitions by their members, each evaluated once."""

    names: tuple[str, ...]
    updates: Mapping[str, PlainVector]
    utility: CoalitionUtility
    known: dict[frozenset[str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, updates: Mapping[str, PlainVector], utility: CoalitionUtility) -> "_Coalitions":
        if not updates:
            raise ValueError("expected at least one update, got none")
        if len({vector.layout for vector in updates.values()}) > 1:
            raise LayoutMismatchError("expected updates of one layout, got different ones; nothing was evaluated")
        return cls(names=tuple(sorted(updates)), updates=updates, utility=utility)

    def worth(self, members: Sequence[str]) -> float:
        key = frozenset(members)
        if key not in self.known:
            layout = self.updates[self.names[0]].layout
            total = np.zeros(layout.size)
            for name in sorted(key):
                total += self.updates[name].values
            worth = float(self.utility(PlainVector(layout=layout, values=total / max(len(key), 1))))
            if not math.isfinite(worth):
                raise ValueError("expected a finite utility, got NaN or infinity")
            self.known[key] = worth
        return self.known[key]

    def marginals(self, order: Sequence[str], *, tolerance: float) -> dict[str, float]:
        """What each client adds in an order; once all that is left to gain is within the tolerance, nothing."""
        whole, last = self.worth(self.names), self.worth(())
        added: dict[str, float] = {}
        for place, name in enumerate(order):
            now = last if abs(whole - last) < tolerance else self.worth(order[: place + 1])
            added[name] = now - last
            last = now
        return added


def exact_by_utility(updates: Mapping[str, PlainVector], utility: CoalitionUtility) -> Valuation:
    """The Shapley values by their definition: 2^n evaluations.

    Raises:
        ValueError: If there is no update, or a utility is NaN or infinite.
        LayoutMismatchError: If layouts differ.
    """
    coalitions = _Coalitions.of(updates, utility)
    count = len(coalitions.names)
    values: dict[str, float] = {}
    for name in coalitions.names:
        others = [other for other in coalitions.names if other != name]
        values[name] = math.fsum(
            (coalitions.worth((*some, name)) - coalitions.worth(some)) / (count * math.comb(count - 1, size))
            for size in range(count)
            for some in itertools.combinations(others, size)
        )
    return _valuation(updates, values, coalitions, permutations=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedMonteCarlo:
    """Sampled permutations, each cut short once the rest cannot add much (Ghorbani and Zou, 2019, algorithm 1).

    Args:
        permutations: How many are drawn, at least 1.
        tolerance: A permutation is cut short where its worth is this close to that of all, from 0 (never).

    Raises:
        ValueError: If a number is out of range.
    """

    permutations: int
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.permutations < 1 or not 0 <= self.tolerance < math.inf:
            raise ValueError(f"expected permutations from 1 and a finite tolerance from 0, got {self.permutations} and {self.tolerance}")

    def values(self, updates: Mapping[str, PlainVector], utility: CoalitionUtility, *, rng: np.random.Generator) -> Valuation:
        """The Shapley values, estimated.

        Raises:
            ValueError: If there is no update, or a utility is NaN or infinite.
            LayoutMismatchError: If layouts differ.
        """
        coalitions = _Coalitions.of(updates, utility)
        totals = dict.fromkeys(coalitions.names, 0.0)
        for _ in range(self.permutations):
            order = [coalitions.names[place] for place in rng.permutation(len(coalitions.names))]
            for name, marginal in coalitions.marginals(order, tolerance=self.tolerance).items():
                totals[name] += marginal
        means = {name: total / self.permutations for name, total in totals.items()}
        return _valuation(updates, means, coalitions, permutations=self.permutations)


@dataclass(frozen=True, slots=True, kw_only=True)
class GtgShapley:
    """Sampled permutations that put each client first equally often, until the estimate settles; none in a round that changed little.

    Permutations are cut short as in `TruncatedMonteCarlo`. Source: Liu et al., 2022, "GTG-Shapley", ACM TIST 13(4), algorithm 1.

    Args:
        round_tolerance: A round whose worth is this close to that of no movement gives nobody anything, from 0.
        tolerance: A permutation is cut short where its worth is this close to that of all, from 0.
        settled: The estimate has settled once it moved by less than this share of its size in each of the last ten cycles.
        most_cycles: Cycles of n permutations after which to stop in any case, at least 1.

    Raises:
        ValueError: If a number is out of range.
    """

    round_tolerance: float = 1e-3
    tolerance: float = 1e-3
    settled: float = 0.05
    most_cycles: int = 100

    def __post_init__(self) -> None:
        if not (0 <= self.round_tolerance < math.inf and 0 <= self.tolerance < math.inf and 0 < self.settled < math.inf):
            raise ValueError("expected finite tolerances from 0 and a positive share at which the estimate has settled, got others")
        if self.most_cycles < 1:
            raise ValueError(f"expected most_cycles of at least 1, got {self.most_cycles}")

    def values(self, updates: Mapping[str, PlainVector], utility: CoalitionUtility, *, rng: np.random.Generator) -> Valuation:
        """The Shapley values, estimated.

        Raises:
            ValueError: If there is no update, or a utility is NaN or infinite.
            LayoutMismatchError: If layouts differ.
        """
        coalitions = _Coalitions.of(updates, utility)
        names = coalitions.names
        totals = np.zeros(len(names))
        if abs(coalitions.worth(names) - coalitions.worth(())) <= self.round_tolerance:
            return _valuation(updates, dict.fromkeys(names, 0.0), coalitions, permutations=0)
        changes: list[float] = []
        cycles = 0
        while cycles < self.most_cycles and not (len(changes) >= _SETTLED_CYCLES and max(changes[-_SETTLED_CYCLES:]) < self.settled):
            before = totals / max(cycles, 1)
            for first in range(len(names)):
                rest = [place for place in rng.permutation(len(names)).tolist() if place != first]
                added = coalitions.marginals([names[first], *(names[place] for place in rest)], tolerance=self.tolerance)
                totals += [added[name] / len(names) for name in names]
            cycles += 1
            now = totals / cycles
            changes.append(float(np.abs(now - before).mean() / max(np.abs(now).mean(), np.finfo(np.float64).tiny)))
        means = dict(zip(names, (totals / cycles).tolist(), strict=True))
        return _valuation(updates, means, coalitions, permutations=cycles * len(names))


def _valuation(updates: Mapping[str, PlainVector], values: Mapping[str, float], coalitions: _Coalitions, *, permutations: int) -> Valuation:
    return Valuation(values={name: values[name] for name in updates}, evaluations=len(coalitions.known), permutations=permutations)

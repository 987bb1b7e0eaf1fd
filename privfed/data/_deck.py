"""How groups of records are dealt to clients and moved between them; `partition` says what is promised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from privfed.data.generator import check_generator
from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suit:
    """The groups that are dealt by one class, shuffled. Prefix sums start with 0."""

    cards: NDArray[np.int64]  # numbers of the groups
    weights: NDArray[np.int64]  # prefix sum of the records of the class
    sizes: NDArray[np.int64]  # prefix sum of all records
    positives: NDArray[np.int64]  # prefix sum of the records of classes other than 0

    def cut(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """Where the groups, laid end to end, are cut: client k gets the cards from cut k to cut k + 1.

        A group that a cut meets goes to the side that its middle is on, so a cut moves by half a group at most, and a count,
        which lies between two cuts, by one group at most. Single records are cut between records, by largest remainder.
        """
        total = int(self.weights[-1])
        counts = largest_remainder(shares, total) if total == len(self.cards) else shares * total
        middles = (self.weights[:-1] + self.weights[1:]) / 2
        return np.array([0, *np.searchsorted(middles, np.cumsum(counts)[:-1]), len(self.cards)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deck:
    """The groups of a table as shuffled cards. A deal is the array of cuts of each suit."""

    clients: int
    group_of: NDArray[np.int64]  # of each record
    classes: NDArray[np.int64]  # of each record; all 0 where classes do not matter
    sizes: NDArray[np.int64]  # of each group
    positives: NDArray[np.int64]  # of each group
    suits: tuple[Suit, ...]

    @classmethod
    def shuffled(cls, samples: Samples, *, clients: int, rng: np.random.Generator, by_class: bool = True) -> Self:
        check_generator(rng)
        if clients < 1:
            raise ValueError(f"expected clients >= 1, got {clients}")
        records = len(samples)
        group_of = np.arange(records) if samples.groups is None else np.unique(samples.groups, return_inverse=True)[1]
        groups = int(group_of.max()) + 1
        if groups < clients:
            raise UnsupportedDataError(
                f"the data have fewer groups of records than clients={clients}; nothing was split; use fewer clients"
            )
        classes = samples.labels if by_class else np.zeros(records, dtype=np.int64)
        counts = np.bincount(classes)
        rarest_first = np.lexsort((-np.arange(len(counts)), counts))
        ranks = np.empty_like(rarest_first)
        ranks[rarest_first] = np.arange(len(counts))
        suit_ranks = np.full(groups, len(counts))
        np.minimum.at(suit_ranks, group_of, ranks[classes])
        suit_of = rarest_first[suit_ranks]
        weights = np.bincount(group_of[suit_of[group_of] == classes], minlength=groups)
        sizes = np.bincount(group_of, minlength=groups)
        positives = np.bincount(group_of[samples.labels > 0], minlength=groups)
        suits: list[Suit] = []
        for suit in range(len(counts)):
            cards = rng.permutation(np.flatnonzero(suit_of == suit))
            suits.append(
                Suit(cards=cards, weights=_prefix(weights[cards]), sizes=_prefix(sizes[cards]), positives=_prefix(positives[cards]))
            )
        return cls(clients=clients, group_of=group_of, classes=classes, sizes=sizes, positives=positives, suits=tuple(suits))

    def cut(self, shares: NDArray[np.float64]) -> list[NDArray[np.int64]]:
        """The deal for shares of shape (classes, clients)."""
        return [suit.cut(quota) for suit, quota in zip(self.suits, shares, strict=True)]

    def held(self, deal: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Records and positive records of each client, without dealing a card."""
        sizes = sum(np.diff(suit.sizes[cuts]) for suit, cuts in zip(self.suits, deal, strict=True))
        positives = sum(np.diff(suit.positives[cuts]) for suit, cuts in zip(self.suits, deal, strict=True))
        return np.asarray(sizes), np.asarray(positives)

    def owners(self, deal: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Client of each group."""
        owners = np.empty(len(self.sizes), dtype=np.int64)
        for suit, cuts in zip(self.suits, deal, strict=True):
            owners[suit.cards] = np.repeat(np.arange(self.clients), np.diff(cuts))
        return owners

    def move(
        self,
        owners: NDArray[np.int64],
        rng: np.random.Generator,
        *,
        weights: NDArray[np.int64],
        minimum: int,
        movable: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Owners after each client below the minimum was given groups of those that have most, smallest groups first.

        A client stays below it where the others have no whole group to spare.
        """
        owners = owners.copy()
        totals = np.bincount(owners, weights=weights, minlength=self.clients)
        for client in np.flatnonzero(totals < minimum):
            for donor in np.argsort(-totals, kind="stable"):
                candidates = rng.permutation(np.flatnonzero((owners == donor) & movable))
                candidates = candidates[np.argsort(weights[candidates], kind="stable")]
                ends = np.cumsum(weights[candidates])
                wanted = np.searchsorted(ends, minimum - totals[client]) + 1
                spare = np.searchsorted(ends, totals[donor] - minimum, side="right")
                given = candidates[: min(wanted, spare)]
                owners[given] = client
                totals = np.bincount(owners, weights=weights, minlength=self.clients)
                if totals[client] >= minimum:
                    break
        return owners

    def cover(self, owners: NDArray[np.int64], rng: np.random.Generator, *, min_positive: int, min_samples: int) -> NDArray[np.int64]:
        """Owners after the guards were met from scratch, client by client, as far as possible; the rest stays where it was dealt.

        Each client in turn takes groups with positive records until it has enough of these. Then each takes of what is left until it has
        enough records: groups without a positive record first, and small ones. Nobody takes more than it has to, but for the last group.
        """
        shuffled = rng.permutation(len(self.sizes))
        first = _taken(shuffled[self.positives[shuffled] > 0], self.positives, held=[0] * self.clients, minimum=min_positive)
        groups = np.array(list(first), dtype=np.int64)
        held = np.bincount(np.array(list(first.values()), dtype=np.int64), weights=self.sizes[groups], minlength=self.clients)
        left = shuffled[~np.isin(shuffled, groups)]
        left = left[np.lexsort((self.sizes[left], self.positives[left] > 0))]
        covered = owners.copy()
        for group, client in (first | _taken(left, self.sizes, held=held.tolist(), minimum=min_samples)).items():
            covered[group] = client
        return covered

    def short(self, owners: NDArray[np.int64], *, min_positive: int, min_samples: int) -> tuple[int, str, int] | None:
        """The first client below a guard, the guard and its number; None if there is no such client."""
        for guard, weights, minimum in (("min_positive", self.positives, min_positive), ("min_samples", self.sizes, min_samples)):
            below = np.flatnonzero(np.bincount(owners, weights=weights, minlength=self.clients) < minimum)
            if below.size:
                return int(below[0]), guard, minimum
        return None


def largest_remainder(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers that sum to the total, each floor or ceiling of its share of it (Hamilton's method)."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return counts


def _taken(order: NDArray[np.int64], weights: NDArray[np.int64], *, held: Sequence[float], minimum: int) -> dict[int, int]:
    """Which client takes which group, where each in turn takes the next ones until it has as much as the minimum."""
    remaining = iter(order.tolist())
    taken: dict[int, int] = {}
    for client, before in enumerate(held):
        has = before
        while has < minimum and (group := next(remaining, None)) is not None:
            taken[group] = client
            has += int(weights[group])
    return taken


def _prefix(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])

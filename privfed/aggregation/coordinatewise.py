"""Rules that need every update in the clear, because they sort coordinates or release one client's update.

They have another type than the rules of the Gram matrix, and no encrypted session takes that type. Weights do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import gram
from privfed.aggregation.rules import krum_scores, lowest
from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Krum:
    """The one update that is closest to its neighbours (Blanchard et al., 2017, section 4): it shows that client's update to all.

    Args:
        byzantine: Number of clients that may send anything. From 0.

    Raises:
        ValueError: If it is negative.
    """

    byzantine: int

    def __post_init__(self) -> None:
        _check_byzantine(self.byzantine)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"Krum(byzantine={self.byzantine})"

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """The update with the lowest score; of equal scores, that of the name that sorts first.

        Raises:
            ValueError: If there are fewer than 2 * byzantine + 3 updates.
            LayoutMismatchError: If layouts differ.
        """
        _check(self.name, updates, least=2 * self.byzantine + 3)
        matrix = gram(updates)
        scores = krum_scores(matrix.squared_distances(), neighbours=len(updates) - self.byzantine - 2)
        return updates[matrix.names[lowest(scores, matrix.names, count=1)[0]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian:
    """The median of each coordinate (Yin et al., 2018, algorithm 1, option I)."""

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return "CoordinateMedian"

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """The medians; of an even number of updates, the mean of the two middle ones.

        Raises:
            ValueError: If there is no update.
            LayoutMismatchError: If layouts differ.
        """
        return _by_coordinate(self.name, updates, least=1, combine=_median)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean:
    """The mean of each coordinate without its `byzantine` lowest and highest values (Yin et al., 2018, algorithm 1, option II).

    The number to cut is a count, not a share of the clients, so that it never rounds to nothing.

    Args:
        byzantine: Number of clients that may send anything. From 0.

    Raises:
        ValueError: If it is negative.
    """

    byzantine: int

    def __post_init__(self) -> None:
        _check_byzantine(self.byzantine)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"TrimmedMean(byzantine={self.byzantine})"

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """The trimmed means.

        Raises:
            ValueError: If there are fewer than 2 * byzantine + 1 updates.
            LayoutMismatchError: If layouts differ.
        """
        cut = self.byzantine
        return _by_coordinate(
            self.name, updates, least=2 * cut + 1, combine=lambda ascending: ascending[cut : len(ascending) - cut].mean(axis=0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulyan:
    """Krum again and again until n - 2 byzantine updates are chosen, then per coordinate the mean of those around the median.

    Each choice is made anew among the updates that are left, which a single Multi-Krum is not. The last choices are among too few
    for Krum's n - byzantine - 2 neighbours; they look at one. Source: El Mhamdi et al., 2018, section 4.

    Args:
        byzantine: Number of clients that may send anything. From 0.

    Raises:
        ValueError: If it is negative.
    """

    byzantine: int

    def __post_init__(self) -> None:
        _check_byzantine(self.byzantine)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"Bulyan(byzantine={self.byzantine})"

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """Per coordinate, the mean of the n - 4 byzantine chosen values that are closest to the median of the chosen.

        Raises:
            ValueError: If there are fewer than 4 * byzantine + 3 updates.
            LayoutMismatchError: If layouts differ.
        """
        _check(self.name, updates, least=4 * self.byzantine + 3)
        chosen = self.select(updates)
        count = len(chosen) - 2 * self.byzantine

        def around_median(ascending: NDArray[np.float64]) -> NDArray[np.float64]:
            distance = np.abs(ascending - _median(ascending))
            nearest = np.argsort(distance, axis=0, kind="stable")[:count]
            return np.sort(np.take_along_axis(ascending, nearest, axis=0), axis=0).mean(axis=0)

        return _by_coordinate(self.name, {name: updates[name] for name in chosen}, least=1, combine=around_median)

    def select(self, updates: Mapping[str, PlainVector]) -> tuple[str, ...]:
        """Names of the n - 2 byzantine chosen updates, in the order of choice."""
        matrix = gram(updates)
        distances = matrix.squared_distances()
        left = list(range(len(updates)))
        chosen: list[str] = []
        for _ in range(len(updates) - 2 * self.byzantine):
            among = distances[np.ix_(left, left)]
            scores = krum_scores(among, neighbours=max(1, len(left) - self.byzantine - 2))
            row = left.pop(lowest(scores, [matrix.names[row] for row in left], count=1)[0])
            chosen.append(matrix.names[row])
        return tuple(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedMedian:
    """The coordinate median of the means of fixed groups of clients.

    The groups must not change over the rounds: the differences of two groupings would single clients out. A group whose members
    are all absent drops out.

    Args:
        groups: Names of the clients of each group; every client is in one.
        byzantine: Number of clients that may send anything; more than twice as many groups are needed. From 0.

    Raises:
        ValueError: If a client is in two groups, a group is empty, or there are at most 2 * byzantine groups.

    Example:
        >>> BucketedMedian.of(["a", "b", "c", "d", "e", "f", "g"], size=2, byzantine=1).groups
        (('a', 'b'), ('c', 'd'), ('e', 'f', 'g'))
    """

    groups: tuple[tuple[str, ...], ...]
    byzantine: int

    def __post_init__(self) -> None:
        _check_byzantine(self.byzantine)
        names = [name for group in self.groups for name in group]
        if len(set(names)) != len(names) or not all(self.groups):
            raise ValueError("expected every client in one group and no group empty")
        self._check_groups(len(self.groups))

    @classmethod
    def of(cls, names: Sequence[str], *, size: int, byzantine: int) -> "BucketedMedian":
        """Groups of the given size, in the order of the names; the last one takes the rest.

        Raises:
            ValueError: If the size is not from 1 to the number of names, or that leaves too few groups.
        """
        if not 1 <= size <= len(names):
            raise ValueError(f"expected a size from 1 to {len(names)}, got {size}")
        starts = range(0, len(names) - size + 1, size)
        stops = [*starts[1:], len(names)]
        return cls(groups=tuple(tuple(names[start:stop]) for start, stop in zip(starts, stops, strict=True)), byzantine=byzantine)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"BucketedMedian(groups={self.groups!r}, byzantine={self.byzantine})"

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """The median over the groups of the mean over the members that are present.

        Raises:
            ValueError: If a client is in no group, or at most 2 * byzantine groups are present.
            LayoutMismatchError: If layouts differ.
        """
        strangers = sorted(set(updates) - {name for group in self.groups for name in group})
        if strangers:
            raise ValueError(f"expected clients of the groups, got {strangers}")
        present = [[name for name in group if name in updates] for group in self.groups]
        present = [members for members in present if members]
        self._check_groups(len(present))
        _check(self.name, updates, least=1)
        means = {
            members[0]: PlainVector(
                layout=updates[members[0]].layout, values=np.mean([updates[name].values for name in sorted(members)], axis=0)
            )
            for members in present
        }
        return _by_coordinate(self.name, means, least=1, combine=_median)

    def _check_groups(self, count: int) -> None:
        if count <= 2 * self.byzantine:
            raise ValueError(f"BucketedMedian with byzantine={self.byzantine} needs at least {2 * self.byzantine + 1} groups, got {count}")


def _check_byzantine(byzantine: int) -> None:
    if byzantine < 0:
        raise ValueError(f"expected byzantine from 0, got {byzantine}")


def _check(rule: str, updates: Mapping[str, PlainVector], *, least: int) -> None:
    if len(updates) < least:
        raise ValueError(f"{rule} needs at least {least} clients, got {len(updates)}")
    layouts = {vector.layout for vector in updates.values()}
    if len(layouts) > 1:
        raise LayoutMismatchError("expected updates of one layout, got different ones; nothing was combined")


def _median(ascending: NDArray[np.float64]) -> NDArray[np.float64]:
    count = len(ascending)
    return (ascending[(count - 1) // 2] + ascending[count // 2]) / 2


def _by_coordinate(
    rule: str, updates: Mapping[str, PlainVector], *, least: int, combine: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> PlainVector:
    """Applies `combine` to the values of each coordinate, sorted, so that the order of the clients cannot change a digit."""
    _check(rule, updates, least=least)
    vectors = list(updates.values())
    layout = vectors[0].layout
    values = np.empty(layout.size)
    for start in range(0, layout.size, _BLOCK):
        block = np.stack([vector.values[start : start + _BLOCK] for vector in vectors])
        block.sort(axis=0)
        values[start : start + _BLOCK] = combine(block)
    return PlainVector(layout=layout, values=values)

"""The rows of a row space, when it is told which directions show one row alone: what they are, and how well they explain the neurons."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.row_space import RowSpace
from privfed.attacks.silent_neurons import SILENT

AGREEMENT = 0.98
"""Rows explain the neurons if each does so for this share of them: one in fifty may have changed sides between steps, or hardly fired."""

# So near to its threshold, as a share of what it usually gets, a neuron may be on either side.
_UNDECIDED = 0.02
_LEAST_SHARE = 1e-6
_STARTS, _MOST_TRIED = 10, 5_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Separation:
    """Rows of shape (rank, width), their deviations, and the share of neurons that behave as each row says.

    Args:
        rows: Of shape (rank, width).
        deviations: Standard deviations of their entries.
        agreement: Of shape (rank,), from 0 to 1.
        rival: Whether other rows, among those that were compared, explain the neurons as well.
    """

    rows: NDArray[np.float64]
    deviations: NDArray[np.float64]
    agreement: NDArray[np.float64]
    rival: bool = False

    @property
    def explained(self) -> NDArray[np.float64]:
        """How much better than chance each row explains the neurons, from 0 to 1."""
        return np.clip(2 * self.agreement - 1, 0, 1)

    @property
    def complete(self) -> bool:
        """Whether every row explains the neurons."""
        return float(self.agreement.min()) >= AGREEMENT


def separate(space: RowSpace, directions: NDArray[np.float64]) -> Separation:
    """The rows that show alone in these directions.

    Args:
        space: The row space.
        directions: Of shape (rank, rank), of length 1 and independent.
    """
    rows, deviations = space.rows(np.asarray(np.linalg.inv(directions.T), dtype=np.float64))
    extended = np.column_stack([rows, np.ones(len(rows))])
    before, after = extended @ space.before.T, extended @ space.after.T
    undecided = _UNDECIDED * before.std(axis=1, keepdims=True)
    fired = np.abs(directions @ space.coordinates.T) >= SILENT
    wrong = np.where(fired, np.maximum(before, after) < -undecided, np.minimum(before, after) > undecided)
    return Separation(rows=rows, deviations=deviations, agreement=1 - wrong.mean(axis=1))


def choose(space: RowSpace, points: NDArray[np.float64], rng: np.random.Generator) -> Separation | None:
    """Of points that may be rows, those that explain the neurons best together: one is exchanged for another as long as that helps.

    A network that has learnt something often fires for a row nearly everywhere. Then too few neurons are silent for the row to lie on a
    plane that is no accident, but all rows together still decide which neurons may show which row.

    Args:
        space: The row space.
        points: Combinations of its basis, of shape (any, rank).
        rng: Decides where it starts.

    Returns:
        None if the points do not span the space.
    """
    best: Separation | None = None
    tried = 0
    for _ in range(_STARTS):
        start = _independent(points / space.scales, rng)
        if start is None:
            return None
        chosen, found, moved = start, _of_points(space, points[start]), True
        while moved and tried < _MOST_TRIED:
            moved, rival = False, False
            for place, candidate in _exchanges(points, chosen):
                exchanged = chosen.copy()
                exchanged[place] = candidate
                other, tried = _of_points(space, points[exchanged]), tried + 1
                rival |= other.complete
                if other.agreement.sum() > found.agreement.sum() + 1e-9:
                    chosen, found, moved = exchanged, other, True
                    break
            if not moved:
                found = Separation(rows=found.rows, deviations=found.deviations, agreement=found.agreement, rival=rival)
        if best is None or found.agreement.sum() > best.agreement.sum():
            best = found
        if best.complete or tried >= _MOST_TRIED:
            break
    return best


def _of_points(space: RowSpace, points: NDArray[np.float64]) -> Separation:
    directions = np.linalg.inv(points).T
    return separate(space, directions / np.linalg.norm(directions, axis=1, keepdims=True))


def _exchanges(points: NDArray[np.float64], chosen: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Places and points of other sets that are independent as well."""
    shares = points @ np.linalg.inv(points[chosen])
    shares[chosen] = 0.0
    return [(int(place), int(candidate)) for candidate, place in np.argwhere(np.abs(shares) > _LEAST_SHARE)]


def _independent(points: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.intp] | None:
    """As many points as dimensions, none a combination of others, in random order; None if there are not so many."""
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    basis, chosen = np.zeros((points.shape[1], 0)), list[int]()
    for index in rng.permutation(len(points)):
        point = points[index] / lengths[index]
        rest = point - basis @ (basis.T @ point)
        length = np.linalg.norm(rest)
        if length > 1e-3:
            chosen.append(int(index))
            basis = np.column_stack([basis, rest / length])
        if len(chosen) == points.shape[1]:
            return np.array(chosen, dtype=np.intp)
    return None

"""Directions of a row space in which one row alone shows, found through the ReLU neurons that the row leaves silent.

The neurons' changes are points of as many dimensions as there are rows. Those of neurons that a row does not fire lie on one plane:
the plane of all other rows. A plane through many more neurons than it takes to fix it is no accident, and one whose neurons are those
that some row of the space would leave silent is that row's (Dimitrov et al., 2024, arXiv:2403.03945, section 3).

SPEAR draws the neurons that fix a plane at random, which for n rows succeeds once in 2^n. Here a plane is fitted to many neurons at
once with least absolute distances, so that those that are not on it do not count. It starts from a guess: a neuron's change is a
mixture of the rows that fire it, and the neurons that the mixture leaves silent are more often silent than not for one of them. For
sixteen rows every other start ends at a row.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.row_space import RowSpace

SILENT = 7.0
"""A neuron shows a row if its change in that row's direction is this many standard deviations of the noise."""

# Neurons fix a plane if they stand this far out of the noise in all its dimensions.
_FIRM = 30.0
STARTS = 200
"""Number of places from which one search starts."""

_FITTING_STEPS, _FALLOFF, _LEAST = 30, 0.6, 1e-7
_KEPT_PLANES = 200
# From hardly random to nearly independent of the guess: few rows need variety, many need good guesses.
_TEMPERATURES = (0.1, 0.3, 1.0, 3.0)
# A plane's score falls by this for every neuron on the wrong side of it.
_WRONG_SIDE = 4
_SAME_PLANE, _SAME_FIT = 1e-6, 1e-12
_NEWTON_STEPS, _RIDGE = 30, 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class _Planes:
    """Planes, best first: unit directions across them, of shape (n, rank), and scores of shape (n,)."""

    directions: NDArray[np.float64]
    scores: NDArray[np.float64]


class SilentNeurons:
    """Collects planes of one row space. It changes with each search.

    Args:
        space: The row space, of rank at least 2.
        rng: Decides where searches start.
        guesses: Points that may be near a row, as combinations of the basis, of shape (any, rank).
    """

    def __init__(self, space: RowSpace, rng: np.random.Generator, *, guesses: NDArray[np.float64]) -> None:
        loud = np.linalg.norm(space.coordinates, axis=1) > SILENT * np.sqrt(space.rank)
        self.space = replace(space, coordinates=space.coordinates[loud], before=space.before[loud], after=space.after[loud])
        self._planes = _Planes(directions=np.zeros((0, space.rank)), scores=np.zeros(0))
        self._rng = rng
        different, self._multiples = _different(self.space.coordinates)
        points = self.space.coordinates[different] / space.scales
        self._points = points / np.linalg.norm(points, axis=1, keepdims=True)
        weights = (self.space.before + self.space.after) / 2
        self._firing = self.space.basis @ weights[different].T
        self._guesses = guesses
        inputs = weights @ (self.space.basis * space.scales[:, None]).T
        inputs /= np.linalg.norm(inputs, axis=1, keepdims=True) + 1e-300
        self._inputs = np.linalg.svd(inputs, full_matrices=False)[0] * np.sqrt(len(inputs))

    @property
    def enough(self) -> bool:
        """Whether there are enough neurons to fix a plane and to notice it."""
        return len(self._points) >= self.space.rank and len(self.space.coordinates) >= self.space.rank + 2

    def search(self) -> None:
        """Fits planes from many starts, and keeps those that many neurons are on."""
        directions = _fit_planes(self._points, self._starts()) / self.space.scales
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        fitted = [self._fitted(direction) for direction in directions[self._first_of_each(directions, _SAME_PLANE)]]
        self.add([direction for direction in fitted if direction is not None])

    def add(self, directions: list[NDArray[np.float64]]) -> None:
        """Adds planes by the directions across them, scores all, and keeps the best."""
        if not directions:
            return
        found = np.concatenate([self._planes.directions, np.array(directions)])
        found = found[self._first_of_each(found, _SAME_FIT)]
        on = np.abs(found @ self.space.coordinates.T) < SILENT
        scores = on.sum(axis=1) - _WRONG_SIDE * _wrong_sides(np.where(on, -1.0, 1.0), self._inputs)
        best = np.argsort(-scores, kind="stable")
        # Of planes that are nearly the same, the one with the better score is fitted to the right neurons.
        best = best[self._first_of_each(found[best], _SAME_PLANE)][:_KEPT_PLANES]
        self._planes = _Planes(directions=found[best], scores=scores[best])

    def independent(self) -> NDArray[np.float64]:
        """The best planes' directions that are independent of better ones, of shape (up to rank, rank)."""
        chosen: list[int] = []
        basis = np.zeros((self.space.rank, 0))
        for index, direction in enumerate(self._whitened(self._planes.directions)):
            rest = direction - basis @ (basis.T @ direction)
            length = np.linalg.norm(rest)
            if length > 1e-3:
                chosen.append(index)
                basis = np.column_stack([basis, rest / length])
            if len(chosen) == self.space.rank:
                break
        return self._planes.directions[chosen]

    def _starts(self) -> NDArray[np.float64]:
        """Weights of neurons that may be silent together, of shape (starts, different neurons); 0 for those that may not."""
        count, rank = len(self._points), self.space.rank
        mixtures = self._others(self._rng.choice(self.space.coordinates, size=STARTS))
        # The sign of a mixture is not known where rows enter it with different signs.
        mixtures *= np.sign(mixtures @ self.space.basis[:, -1:]) * self._rng.choice((1.0, 1.0, 1.0, -1.0), size=(STARTS, 1))
        if len(self._guesses):
            mixtures[::2] = self._rng.choice(self._guesses, size=len(mixtures[::2]))
        guesses = mixtures @ self._firing
        guesses /= guesses.std(axis=1, keepdims=True) + 1e-300
        guesses += self._rng.choice(_TEMPERATURES, size=(STARTS, 1)) * self._rng.gumbel(size=(STARTS, count))
        # Small sets are more often silent for one row throughout; large ones fix its plane in spite of some that are not.
        smallest, largest = rank - 1, max(rank, min(3 * rank, round(0.8 * count)))
        sizes = np.round(smallest * (largest / smallest) ** self._rng.random((STARTS, 1)))
        # Many multiples of one neuron are either all on a row's plane, or what all rows fire in the same proportion.
        powers = self._rng.choice((0.0, 1.0), size=(STARTS, 1))
        return (guesses.argsort(axis=1).argsort(axis=1) < sizes) * self._multiples**powers

    def _others(self, mixtures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mixtures cut down to what can be rows other than some of those that were found.

        A row's direction stands at right angles on all other rows, so the directions of all rows but one leave that row alone.
        """
        found = self.independent()
        # Any may be wrong: at times the best few are trusted, at times all but a few.
        if self._rng.random() < 0.5:
            found = found[: self._rng.integers(min(len(found), self.space.rank - 1) + 1)]
        else:
            found = self._rng.permutation(found)[self._rng.geometric(0.5) - (len(found) < self.space.rank) :]
        across, _ = np.linalg.qr((found * self.space.scales).T)
        scaled = mixtures / self.space.scales
        return (scaled - scaled @ across @ across.T) * self.space.scales

    def _fitted(self, direction: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """The direction across the plane that fits the neurons on it best; None if they do not fix one, or are no more than it takes."""
        # A fit with weights is less precise than one to the neurons on the plane alone.
        for tolerance in (10 * SILENT, SILENT, SILENT):
            on = np.abs(self.space.coordinates @ direction) < tolerance
            if on.sum() <= self.space.rank:
                return None
            _, scales, right = np.linalg.svd(self.space.coordinates[on], full_matrices=False)
            if scales[-2] < _FIRM:
                return None
            direction = right[-1]
        return direction

    def _whitened(self, directions: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = directions * self.space.scales
        return scaled / np.linalg.norm(scaled, axis=1, keepdims=True)

    def _first_of_each(self, directions: NDArray[np.float64], tolerance: float) -> NDArray[np.bool_]:
        """Which directions are not the same, up to sign, as an earlier one."""
        whitened = self._whitened(directions)
        same = np.abs(whitened @ whitened.T) > 1 - tolerance
        np.fill_diagonal(same, val=True)
        return same.argmax(axis=1) == np.arange(len(directions))


def _different(points: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Indices of points none of which is a multiple of another within unit noise, the longest of each kind, and the kinds' sizes."""
    lengths = np.linalg.norm(points, axis=1)
    left = np.argsort(-lengths)
    kept: list[int] = []
    sizes: list[int] = []
    while len(left):
        first, lengths_left = left[0], lengths[left]
        kept.append(int(first))
        along = points[left] @ (points[first] / lengths[first])
        across = np.sqrt(np.maximum(lengths_left**2 - along**2, 0))
        others = left[across > 3 * np.sqrt(points.shape[1] * (1 + (along / lengths[first]) ** 2))]
        sizes.append(len(left) - len(others))
        left = others
    return np.array(kept, dtype=np.intp), np.array(sizes, dtype=np.float64)


def _fit_planes(points: NDArray[np.float64], starts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Directions across the planes through zero with the smallest weighted sum of distances to points, by reweighted squares.

    Args:
        points: Of shape (points, rank).
        starts: Of shape (starts, points): weights, at least 0.
    """
    rank = points.shape[1]
    products = (points[:, :, None] * points[:, None, :]).reshape(len(points), -1)
    weights, least = starts, 1.0
    directions = np.linalg.eigh((weights @ products).reshape(-1, rank, rank))[1][:, :, 0]
    for _ in range(_FITTING_STEPS):
        least = max(least * _FALLOFF, _LEAST)
        weights = starts / (np.abs(directions @ points.T) + least)
        moments = (weights @ products).reshape(-1, rank, rank)
        # A step of inverse iteration follows the smallest eigenvector while the weights change, at a fraction of its cost.
        moments += 1e-12 * np.trace(moments, axis1=1, axis2=2)[:, None, None] * np.eye(rank)
        directions = np.linalg.solve(moments, directions[:, :, None])[:, :, 0]
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions


def _wrong_sides(sides: NDArray[np.float64], inputs: NDArray[np.float64]) -> NDArray[np.intp]:
    """For each plane, the fewest neurons found on the wrong side by any row: 0 if a row fires just those that are off the plane.

    A linear classifier of neurons with squared hinge loss, by Newton's method with step halving, for all planes at once.

    Args:
        sides: Of shape (planes, neurons): -1 where the neuron is on the plane, which asks for silence, else 1.
        inputs: Of shape (neurons, rank): what each neuron gets from each vector of the basis.
    """
    planes, rank = len(sides), inputs.shape[1]
    products = (inputs[:, :, None] * inputs[:, None, :]).reshape(len(inputs), -1)
    rows, fewest = np.zeros((planes, rank)), np.full(planes, len(inputs), dtype=np.intp)

    def loss(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return (np.maximum(0, 1 - sides * (rows @ inputs.T)) ** 2).sum(axis=1) + _RIDGE * (rows**2).sum(axis=1)

    for _ in range(_NEWTON_STEPS):
        active = (sides * (rows @ inputs.T) < 1).astype(np.float64)
        curvature = (active @ products).reshape(planes, rank, rank) + _RIDGE * np.eye(rank)
        move = np.linalg.solve(curvature, ((active * sides) @ inputs)[:, :, None])[:, :, 0] - rows
        current, lengths = loss(rows), 2.0 ** -np.arange(8.0)
        better = np.stack([loss(rows + length * move) < current for length in lengths])
        moving = better.any(axis=0)
        rows = rows + np.where(moving, lengths[better.argmax(axis=0)], 0.0)[:, None] * move
        fewest = np.minimum(fewest, ((rows @ inputs.T > 0) != (sides > 0)).sum(axis=1))
        if not moving.any() or not fewest.any():
            break
    return fewest

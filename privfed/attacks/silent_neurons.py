"""Directions of a row space in which one row alone shows, found through the ReLU neurons that the row leaves silent.

Where neurons' changes are points of as many dimensions as there are rows, the neurons that a row does not fire lie on one plane: the
plane of all other rows. A plane through many more neurons than it takes to fix it is no accident, and one whose neurons are those
that some row of the space would leave silent is that row's (Dimitrov et al., 2024, arXiv:2403.03945, section 3).

SPEAR draws the neurons that fix a plane at random, which for n rows succeeds with probability 2^-n. Here they are drawn by a guess: a
neuron's change is a mixture of the rows that fire it, and neurons that the mixture leaves silent are often silent for one of them.
For sixteen rows this finds planes a thousand times more often.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.row_space import RowSpace

SILENT = 7.0
"""A neuron shows a row if its change in that row's direction is this many standard deviations of the noise."""

# A drawn neuron must add this much to what the others fix, or the plane hangs on noise.
_FIRM = 30.0
_DRAWS_AT_ONCE = 1000
_NEW_PLANES, _KEPT_PLANES = 150, 200
# From hardly random to nearly independent of the guess: few rows need variety, many need good guesses.
_TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 30.0)
# A plane's score falls by this for every neuron on the wrong side of it.
_WRONG_SIDE = 4
_SAME_PLANE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Planes:
    """Planes of a row space, best first, with the direction across each.

    Args:
        directions: Of shape (n, rank), of unit length.
        scores: Of shape (n,): neurons on the plane, less a multiple of those on which no row agrees with it.
    """

    directions: NDArray[np.float64]
    scores: NDArray[np.float64]


class SilentNeurons:
    """Collects planes of one row space. It changes with each search.

    Args:
        space: The row space, of rank at least 2.
        rng: Decides which neurons are drawn.
    """

    def __init__(self, space: RowSpace, rng: np.random.Generator) -> None:
        loud = np.linalg.norm(space.coordinates, axis=1) > SILENT * np.sqrt(space.rank)
        self.space = replace(space, coordinates=space.coordinates[loud], before=space.before[loud], after=space.after[loud])
        self.planes = Planes(directions=np.zeros((0, space.rank)), scores=np.zeros(0))
        self._rng = rng
        self._representatives = _different(self.space.coordinates)
        weights = (self.space.before + self.space.after) / 2
        mixtures = self.space.coordinates @ self.space.basis
        guessed = np.sign(mixtures[:, -1:]) * mixtures @ weights.T
        # The sign of a mixture is not known where rows enter it with different signs.
        self._guesses = guessed[:, self._representatives] / (guessed.std(axis=1, keepdims=True) + 1e-300)
        inputs = weights @ (self.space.basis * space.scales[:, None]).T
        inputs /= np.linalg.norm(inputs, axis=1, keepdims=True) + 1e-300
        self._inputs = np.linalg.svd(inputs, full_matrices=False)[0] * np.sqrt(len(inputs))

    @property
    def enough(self) -> bool:
        """Whether there are enough neurons to fix a plane and to notice it."""
        return len(self._representatives) >= self.space.rank and len(self.space.coordinates) >= self.space.rank + 2

    def search(self) -> None:
        """Draws neurons, and adds the planes through them that many other neurons are on."""
        directions, on = self._drawn()
        counts = on.sum(axis=1)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > self.space.rank]
        order = order[self._first_of_each(directions[order], 10 * _SAME_PLANE)][:_NEW_PLANES]
        self.add([fitted for index in order if (fitted := self._fitted(on[index])) is not None])

    def add(self, directions: list[NDArray[np.float64]]) -> None:
        """Adds planes by the directions across them, scores all, and keeps the best."""
        if not directions:
            return
        found = np.concatenate([self.planes.directions, np.array(directions)])
        found = found[self._first_of_each(found, _SAME_PLANE)]
        on = np.abs(found @ self.space.coordinates.T) < SILENT
        scores = on.sum(axis=1) - _WRONG_SIDE * _wrong_sides(np.where(on, -1.0, 1.0), self._inputs)
        best = np.argsort(-scores, kind="stable")[:_KEPT_PLANES]
        self.planes = Planes(directions=found[best], scores=scores[best])

    def independent(self) -> NDArray[np.float64]:
        """The best planes' directions that are independent of better ones, of shape (up to rank, rank)."""
        chosen: list[int] = []
        basis = np.zeros((self.space.rank, 0))
        for index, direction in enumerate(self._whitened(self.planes.directions)):
            rest = direction - basis @ (basis.T @ direction)
            length = np.linalg.norm(rest)
            if length > 1e-3:
                chosen.append(index)
                basis = np.column_stack([basis, rest / length])
            if len(chosen) == self.space.rank:
                break
        return self.planes.directions[chosen]

    def _drawn(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Directions across planes through drawn neurons, and which neurons are on each plane within its error."""
        count, rank = len(self._representatives), self.space.rank
        guesses = self._guesses[self._rng.integers(len(self._guesses), size=_DRAWS_AT_ONCE)]
        guesses = guesses * self._rng.choice((1.0, 1.0, 1.0, -1.0), size=(_DRAWS_AT_ONCE, 1))
        temperatures = self._rng.choice(_TEMPERATURES, size=(_DRAWS_AT_ONCE, 1))
        keys = guesses + temperatures * self._rng.gumbel(size=(_DRAWS_AT_ONCE, count))
        drawn = self._representatives[np.argpartition(keys, rank - 1, axis=1)[:, : rank - 1]]
        points = self.space.coordinates[drawn]
        rotations, triangles = np.linalg.qr(points.transpose(0, 2, 1), mode="complete")
        triangles = triangles[:, : rank - 1]
        firm = np.abs(np.diagonal(triangles, axis1=1, axis2=2)).min(axis=1) > _FIRM
        rotations, triangles = rotations[firm], triangles[firm]
        directions = rotations[:, :, -1]
        # Unit noise on the drawn neurons tilts the plane, and moves a neuron by the length of its coordinates in those drawn.
        along = self.space.coordinates @ rotations[:, :, :-1]
        shares = np.linalg.solve(triangles, along.transpose(0, 2, 1)) if len(triangles) else np.zeros((0, rank - 1, len(along)))
        noise = np.sqrt(1 + (shares**2).sum(axis=1))
        return directions, np.abs(directions @ self.space.coordinates.T) < SILENT * noise

    def _fitted(self, on: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """The direction across the plane that fits the neurons on it best; None if they do not fix one."""
        for _ in range(3):
            if on.sum() <= self.space.rank:
                return None
            _, scales, right = np.linalg.svd(self.space.coordinates[on], full_matrices=False)
            again = np.abs(self.space.coordinates @ right[-1]) < SILENT
            if scales[-2] < _FIRM or (again == on).all():
                break
            on = again
        return right[-1] if scales[-2] >= _FIRM else None

    def _whitened(self, directions: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = directions * self.space.scales
        return scaled / np.linalg.norm(scaled, axis=1, keepdims=True)

    def _first_of_each(self, directions: NDArray[np.float64], tolerance: float) -> NDArray[np.bool_]:
        """Which directions are not the same, up to sign, as an earlier one."""
        if not len(directions):
            return np.zeros(0, dtype=np.bool_)
        whitened = self._whitened(directions)
        same = np.abs(whitened @ whitened.T) > 1 - tolerance
        np.fill_diagonal(same, val=True)
        return same.argmax(axis=1) == np.arange(len(directions))


def _different(points: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of points none of which is a multiple of another within unit noise, the longest of each kind."""
    lengths = np.linalg.norm(points, axis=1)
    left = np.argsort(-lengths)
    kept: list[int] = []
    while len(left):
        first, lengths_left = left[0], lengths[left]
        kept.append(int(first))
        along = points[left] @ (points[first] / lengths[first])
        across = np.sqrt(np.maximum(lengths_left**2 - along**2, 0))
        left = left[across > 3 * np.sqrt(points.shape[1] * (1 + (along / lengths[first]) ** 2))]
    return np.array(kept, dtype=np.intp)


def _wrong_sides(sides: NDArray[np.float64], inputs: NDArray[np.float64], *, steps: int = 30) -> NDArray[np.intp]:
    """For each plane, the fewest neurons found on the wrong side by any row: 0 if a row fires just those that are off the plane.

    A linear classifier of neurons with squared hinge loss, by Newton's method with step halving, for all planes at once.

    Args:
        sides: Of shape (planes, neurons): -1 where the neuron is on the plane, which asks for silence, else 1.
        inputs: Of shape (neurons, rank): what each neuron gets from each vector of the basis.
        steps: Number of Newton steps.
    """
    planes, rank = len(sides), inputs.shape[1]
    ridge = 1e-3
    products = (inputs[:, :, None] * inputs[:, None, :]).reshape(len(inputs), -1)
    rows, fewest = np.zeros((planes, rank)), np.full(planes, len(inputs), dtype=np.intp)

    def loss(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return (np.maximum(0, 1 - sides * (rows @ inputs.T)) ** 2).sum(axis=1) + ridge * (rows**2).sum(axis=1)

    current = loss(rows)
    for _ in range(steps):
        active = (sides * (rows @ inputs.T) < 1).astype(np.float64)
        curvature = (active @ products).reshape(planes, rank, rank) + ridge * np.eye(rank)
        move = np.linalg.solve(curvature, ((active * sides) @ inputs)[:, :, None])[:, :, 0] - rows
        length = np.ones(planes)
        for _ in range(8):
            stuck = loss(rows + length[:, None] * move) >= current
            if not stuck.any():
                break
            length = np.where(stuck, length / 2, length)
        rows = rows + np.where(stuck, 0.0, length)[:, None] * move
        current = loss(rows)
        fewest = np.minimum(fewest, ((rows @ inputs.T > 0) != (sides > 0)).sum(axis=1))
        if stuck.all() or not fewest.any():
            break
    return fewest

"""The space that the rows of a batch span, read off the first layer's change.

The change of [weight | bias] is a sum over rows of (what the row does to each neuron) x [row, 1], whatever the loss, the later
layers and the number of steps. Its rank is the number of rows that can be seen, and every [row, 1] lies in its row space. Both
need a change that is the sum of gradients: an optimiser that rescales each coordinate hides them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from privfed.attacks.observation import NotApplicable, Observation, gradient_part, linear_layers

# A matrix of unit noise of shape (m, n) has singular values up to sqrt(m) + sqrt(n), and hardly ever a tenth more.
_ABOVE_NOISE = 1.2
# A row that stands less than this far above what is treated as noise cannot be told from it neuron by neuron.
_GAP = 10.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RowSpace:
    """The change of the first layer as coordinates @ basis, in units in which the noise of each coordinate is 1. Private.

    Neurons whose change is exactly zero are left out.

    Args:
        coordinates: Of shape (neurons, rank): each neuron's change in the basis, with unit noise.
        scales: Singular values of the coordinates, of shape (rank,), falling.
        basis: Of shape (rank, inputs + 1): each [row, 1] is a combination of these.
        column_noise: Of shape (inputs + 1,): a combination t of the basis has entries that are off by this times |t / scales|.
        before: The neurons' [weight | bias] before the round, of shape (neurons, inputs + 1).
        after: Likewise after the round.
        smaller: Singular values that were taken for noise, falling.
        edge: What the largest singular value of the noise is expected to be, at most.
    """

    coordinates: NDArray[np.float64]
    scales: NDArray[np.float64]
    basis: NDArray[np.float64]
    column_noise: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    smaller: NDArray[np.float64]
    edge: float

    @property
    def rank(self) -> int:
        """Number of rows that stand out of the noise: the size of the batch, if it is not larger than the layer."""
        return len(self.scales)

    @property
    def gap(self) -> float:
        """How far the last row stands above the noise, above 1."""
        floor = max(self.edge, float(self.smaller[0]) if len(self.smaller) else 0.0)
        return float(self.scales[-1]) / floor if self.rank else 1.0

    def rows(self, combinations: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rows of shape (n, inputs), and standard deviations of their entries, from combinations of the basis of shape (n, rank).

        A combination without a bias is no row: its entries are not finite.
        """
        extended = combinations @ self.basis
        noise = np.linalg.norm(combinations / self.scales, axis=1)[:, None] * self.column_noise
        bias = extended[:, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = extended[:, :-1] / bias
            return rows, np.hypot(noise[:, :-1], rows * noise[:, -1:]) / np.abs(bias)

    def cut(self, rank: int) -> "RowSpace":
        """The space of the strongest rows only; what the others do counts as noise, and noise is 1 again."""
        noise = max(1.0, float(self.scales[rank]) / self.edge) if rank < self.rank else 1.0
        return replace(
            self,
            coordinates=self.coordinates[:, :rank] / noise,
            scales=self.scales[:rank] / noise,
            column_noise=self.column_noise * noise,
            basis=self.basis[:rank],
            smaller=np.concatenate([self.scales[rank:], self.smaller]) / noise,
        )

    def cuts(self) -> Iterator["RowSpace"]:
        """This space, cut where its singular values fall steeply, the largest first."""
        floor = np.append(self.scales[1:], self.edge)
        for rank in np.flatnonzero(self.scales > _GAP * floor)[::-1] + 1:
            yield self.cut(int(rank))


# Matrices this small only wait for each other's threads.
@threadpool_limits.wrap(limits=1)
def row_space(observation: Observation) -> RowSpace | NotApplicable:
    """The row space of the first layer's change, its rank decided by what stands above the known errors.

    Not applicable where there is no sum of gradients to see, no fully connected first layer with bias on the schema's columns, or
    at least as many rows as the layer has inputs or neurons: then every vector is in the space.
    """
    part = gradient_part(observation)
    if isinstance(part, NotApplicable):
        return part
    width = observation.schema.width
    first = next((layer for layer in linear_layers(observation.layout) if layer.inputs == width), None)
    if first is None:
        return NotApplicable(reason=f"the model has no fully connected layer with bias on the schema's {width} columns")
    unflatten = observation.layout.unflatten
    before, after, change, deviation = (
        np.column_stack([tensors[first.weight], tensors[first.bias]])
        for tensors in map(unflatten, (part.before, part.after, part.change, part.deviation))
    )
    moved = (change != 0).any(axis=1)
    before, after, change, deviation = before[moved], after[moved], change[moved], deviation[moved]
    if not len(change):
        return NotApplicable(reason="no neuron of the first layer moved: there is nothing to read")
    # The noise differs between rows and between columns; as a product of both it is divided out.
    column_noise = np.sqrt((deviation**2).mean(axis=0))
    neuron_noise = np.sqrt(((deviation / column_noise) ** 2).mean(axis=1))
    left, scales, right = np.linalg.svd(change / neuron_noise[:, None] / column_noise, full_matrices=False)
    columns = int((change != 0).any(axis=0).sum())
    edge = float(np.sqrt(len(change)) + np.sqrt(columns))
    rank = int(np.sum(scales > _ABOVE_NOISE * edge))
    # The columns of a block add up to the bias column in every row.
    most = min(len(change), columns - len(observation.schema.blocks))
    if rank >= most > 1:
        return NotApplicable(
            reason=f"at least as many rows as the first layer can keep apart ({most}), or undeclared noise, are mixed in its change"
        )
    return RowSpace(
        coordinates=left[:, :rank] * scales[:rank],
        scales=scales[:rank],
        basis=right[:rank] * column_noise,
        column_noise=column_noise,
        before=before,
        after=after,
        smaller=scales[rank:],
        edge=edge,
    )

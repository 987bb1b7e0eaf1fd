"""The Gram matrix of updates: the n x n inner products from which every rule's coefficients and every score follow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

_BLOCK = 1 << 13
# An update shorter than this share of the median is not brought to the length of the others: three times as much as a median update is
# the most that length alone buys. Of three clients, the fewest that may be opened, one with up to four times the weight of each other one
# leaves two effective clients, which is what `OpeningPolicy` demands; 3 and not 4 leaves room for integer coefficients.
_SHORTEST = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Reference:
    """Inner products of n updates with one more vector: a validator's update, a known centre, or the last aggregate.

    Args:
        products: Inner product of each update with it, of shape (n,), finite. Private data.
        square: Its squared norm, finite, at least 0.

    Raises:
        ValueError: If a number is NaN, infinite or out of range, or the products are not a vector.
    """

    products: NDArray[np.float64]
    square: float

    def __post_init__(self) -> None:
        products = np.array(self.products, dtype=np.float64)
        if products.ndim != 1 or not np.isfinite(products).all() or not (math.isfinite(self.square) and self.square >= 0):
            raise ValueError("expected a vector of finite inner products and a finite squared norm from 0, got something else")
        products.setflags(write=False)
        object.__setattr__(self, "products", products)

    def take(self, rows: Sequence[int]) -> Self:
        """The reference for some of the updates, in the given order."""
        return replace(self, products=self.products[list(rows)])

    def without_noise(self, energy: float) -> Self:
        """The reference with the squared norm that it has without noise of this expected squared norm.

        Its inner products are right as they are: noise has none with anything else, on average. What is left of the norm is at least a
        hundredth, because chance can leave less than nothing.

        Args:
            energy: As `noise_energy` gives it, at least 0.
        """
        return replace(self, square=max(self.square - energy, 0.01 * self.square))

    def at_length(self, length: float) -> Self:
        """The inner products with the vector brought to a length.

        Raises:
            ValueError: If the vector is zero, or a number overflows.
        """
        if self.square == 0:
            raise ValueError("expected a reference that is not zero")
        # Divided first: the product with a direction is at most the norm of an update, whatever the two lengths are.
        return replace(self, products=self.products / math.sqrt(self.square) * length, square=length**2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Gram:
    """What rules and scores see of the updates of one round: inner products, and no update. Private data: norms and angles.

    It is the same type whether the products were computed in the clear or opened from products of ciphertexts.

    Args:
        names: The clients, unique, in the order of the rows.
        size: Number of coordinates of an update. Public.
        products: Inner products of the updates, of shape (n, n), symmetric and finite, with nothing negative on the diagonal.
        noise_energy: Expected squared norm of the noise that each client declared, of shape (n,), at least 0; left out, no noise.
            Public: it follows from the declared mechanism, see `noise_energy`.
        reference: Inner products with one more vector, for the rules that need one.
        seed: What estimators draw from, from 0: every opener of a round has the same, and every round another. Public.

    Raises:
        ValueError: If shapes disagree, a name repeats, or a number is NaN, infinite or out of range. Nothing is ever scored on such
            numbers: the message does not say which client they belong to.
    """

    names: tuple[str, ...]
    size: int
    products: NDArray[np.float64]
    noise_energy: NDArray[np.float64] | None = None
    reference: Reference | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        names = tuple(self.names)
        count = len(names)
        if not names or len(set(names)) != count or self.size < 1:
            raise ValueError("expected at least one client, each name once, and updates of at least one coordinate")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"expected a seed from 0, got {self.seed!r}")
        products = np.array(self.products, dtype=np.float64)
        if products.shape != (count, count):
            raise ValueError(f"expected a Gram matrix of shape ({count}, {count}), got {products.shape}")
        # Room for every sum of distances that a rule takes, so that no rule overflows half-way.
        if not np.abs(products).max(initial=0.0) <= np.finfo(np.float64).max / (4.0 * count**2) or not np.array_equal(products, products.T):
            raise ValueError("expected a symmetric Gram matrix with finite entries and distances, got another")
        if np.diag(products).min() < 0:
            raise ValueError("expected a Gram matrix without a negative squared norm, got another")
        noise_energy = np.zeros(count) if self.noise_energy is None else np.array(self.noise_energy, dtype=np.float64)
        if noise_energy.shape != (count,) or not np.isfinite(noise_energy).all() or noise_energy.min() < 0:
            raise ValueError(f"expected {count} finite noise energies from 0, got something else")
        if self.reference is not None and len(self.reference.products) != count:
            raise ValueError(f"expected {count} inner products with the reference, got {len(self.reference.products)}")
        products.setflags(write=False)
        noise_energy.setflags(write=False)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "products", products)
        object.__setattr__(self, "noise_energy", noise_energy)

    @property
    def squared_norms(self) -> NDArray[np.float64]:
        """Squared norm of each update as it was sent, of shape (n,)."""
        return np.diag(self.products)

    @property
    def declared_noise(self) -> NDArray[np.float64]:
        """Expected squared norm of each client's declared noise, of shape (n,); zeros without noise."""
        return np.zeros(len(self.names)) if self.noise_energy is None else self.noise_energy

    @property
    def resolution(self) -> NDArray[np.float64]:
        """Standard deviation of the squared norm of each client's declared noise, of shape (n,).

        Differences below it are chance. The squared norm of d normal numbers of variance b/d has variance 2 b^2 / d.
        """
        return self.declared_noise * math.sqrt(2 / self.size)

    @property
    def lengths(self) -> NDArray[np.float64]:
        """What each update is divided by to bring it to length 1, of shape (n,): its norm, but at least a third of the median one.

        The median is that of the updates which are not zero; all are 0 if there is none. Below, an update stays shorter than the others,
        in proportion: a rule that divides by its own norm would hand an update of nearly nothing nearly all of the weight, or what
        rounding has left of its angle.
        """
        norms = np.sqrt(self.squared_norms)
        sent = norms[norms > 0]
        return np.maximum(norms, _SHORTEST * float(np.median(sent))) if sent.size else norms

    @property
    def median_norm(self) -> float:
        """Median norm of the updates without their declared noise."""
        return float(np.median(np.sqrt(np.maximum(self.squared_norms - self.declared_noise, self.resolution))))

    def without_noise(self) -> Self:
        """The expected Gram matrix of the updates before their declared noise: the noise is independent, so only norms hold it.

        Estimates below zero become zero. For rules that measure distances; a cosine of a de-biased norm would only amplify chance.
        """
        products = np.array(self.products)
        np.fill_diagonal(products, np.maximum(self.squared_norms - self.declared_noise, 0.0))
        return replace(self, products=products, noise_energy=None)

    def squared_distances(self) -> NDArray[np.float64]:
        """Squared distances between the updates without their declared noise, of shape (n, n), zero on the diagonal.

        Under noise they are estimates without a bias, and chance puts some of them below zero. They stay there: were they all raised to
        zero, the clients would be equal where noise is heavy, and their names would decide.
        """
        norms, noise = self.squared_norms, self.declared_noise
        as_sent = np.maximum(norms[:, np.newaxis] + norms[np.newaxis, :] - 2 * self.products, 0.0)
        distances = as_sent - (noise[:, np.newaxis] + noise[np.newaxis, :])
        np.fill_diagonal(distances, 0.0)
        return distances

    def take(self, names: Sequence[str]) -> Self:
        """The Gram matrix of some of the clients, in the given order.

        Raises:
            ValueError: If a name is not among the rows.
        """
        strangers = sorted(set(names) - set(self.names))
        if strangers:
            raise ValueError(f"expected clients of the Gram matrix, got {strangers}")
        rows = [self.names.index(name) for name in names]
        return replace(
            self,
            names=tuple(names),
            products=self.products[np.ix_(rows, rows)],
            noise_energy=self.declared_noise[rows],
            reference=None if self.reference is None else self.reference.take(rows),
        )

    def known_reference(self) -> Reference:
        """The reference.

        Raises:
            ValueError: If there is none.
        """
        if self.reference is None:
            raise ValueError("expected a Gram matrix with a reference, got one without")
        return self.reference

    def with_declared_noise(self, declared: Mapping[str, float], *, reference: str | None) -> Self:
        """The same matrix, with what is believed of the noise that clients declare, and without that of the reference.

        Whoever declares more noise than it adds is taken to be nearer to the others than it is. So nobody's declaration counts for more
        than the median of all, which those who tell the truth decide while they are the majority.

        Args:
            declared: Expected squared norm of the noise in an update, by name; clients that are not named declare none.
            reference: Whose update the reference is; None where there is none.
        """
        energies = np.array([declared.get(name, 0.0) for name in self.names])
        known = self.reference
        if known is not None and reference is not None:
            known = known.without_noise(declared.get(reference, 0.0))
        return replace(self, noise_energy=np.minimum(energies, np.median(energies)), reference=known)

    def __repr__(self) -> str:
        return f"Gram(clients={len(self.names)}, reference={self.reference is not None})"


def gram(
    updates: Mapping[str, PlainVector], *, reference: PlainVector | None = None, noise_energy: Mapping[str, float] | None = None
) -> Gram:
    """The Gram matrix of updates in the clear.

    Accumulated in float64 over blocks of coordinates, so the extra memory is n times the block and not a copy of all updates.
    Hand it *updates* (differences to the received model), not models: inner products of models that differ in the fourth
    digit have lost the difference.

    Args:
        updates: Updates of one layout, by client, at least one.
        reference: One more vector of that layout.
        noise_energy: Declared noise of each client; see `Gram`.

    Raises:
        ValueError: If there is no update, or an inner product overflows.
        LayoutMismatchError: If the vectors have different layouts.

    Example:
        >>> from privfed.update import Layout
        >>> layout = Layout(names=("weight",), shapes=((2,),))
        >>> gram({"a": PlainVector(layout=layout, values=[1, 2]), "b": PlainVector(layout=layout, values=[3, 0])}).products
        array([[5., 3.],
               [3., 9.]])
    """
    if not updates:
        raise ValueError("expected at least one update, got none")
    names = tuple(updates)
    vectors = [*updates.values()] if reference is None else [*updates.values(), reference]
    layout = vectors[0].layout
    if any(vector.layout != layout for vector in vectors):
        raise LayoutMismatchError("expected vectors of one layout, got different ones; nothing was computed")
    products = np.zeros((len(vectors), len(vectors)))
    block = np.empty((len(vectors), min(_BLOCK, layout.size)))
    with np.errstate(over="ignore", invalid="ignore"):  # refused by Gram
        for start in range(0, layout.size, _BLOCK):
            width = min(_BLOCK, layout.size - start)
            for row, vector in enumerate(vectors):
                block[row, :width] = vector.values[start : start + width]
            products += block[:, :width] @ block[:, :width].T
    count = len(names)
    if not np.isfinite(products).all():
        raise ValueError("expected updates whose inner products are finite in float64, got an overflow")
    return Gram(
        names=names,
        size=layout.size,
        products=products[:count, :count],
        noise_energy=None if noise_energy is None else np.array([noise_energy[name] for name in names]),
        reference=None if reference is None else Reference(products=products[:count, count], square=float(products[count, count])),
    )


def noise_energy(
    size: int, *, steps: int, learning_rate: float, noise_multiplier: float, max_grad_norm: float, expected_batch_size: int
) -> float:
    """Expected squared norm of the noise that DP-SGD leaves in an update: size * steps * (lr * z * C / B)^2.

    It holds for plain gradient descent at one learning rate. Momentum, adaptive steps, a proximal term or a decay change it.

    Args:
        size: Number of coordinates of an update.
        steps: Noised steps of one training run.
        learning_rate: Step length.
        noise_multiplier: Standard deviation of the noise on the sum of gradients, in units of `max_grad_norm`.
        max_grad_norm: Clipping norm.
        expected_batch_size: What the noised sum is divided by.

    Raises:
        ValueError: If a number is not positive.
    """
    if min(size, steps, learning_rate, noise_multiplier, max_grad_norm, expected_batch_size) <= 0:
        raise ValueError("expected positive numbers, got another; without noise there is no noise energy")
    return size * steps * (learning_rate * noise_multiplier * max_grad_norm / expected_batch_size) ** 2

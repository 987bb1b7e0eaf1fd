"""Aggregation rules: pure functions from public weights, and for some the Gram matrix, to the proportions of a mixture.

What a rule has to see is its type, because under encryption the Gram matrix takes products of ciphertexts and an opening of its
own, and a rule that has to see updates cannot exist at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import Gram
from privfed.aggregation.linear import integer_weights
from privfed.aggregation.mixture import Mixture
from privfed.update import PlainVector


class WeightRule(Protocol):
    """A rule whose coefficients follow from the public weights alone."""

    needs_gram: ClassVar[Literal[False]]

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def coefficients(self, weights: Mapping[str, float], *, total: int) -> dict[str, int]:
        """Positive integer coefficient of each client, with a sum of at most `total`."""
        ...


class GramRule(Protocol):
    """A rule that looks at the inner products of the updates."""

    needs_gram: ClassVar[Literal[True]]

    @property
    def needs_reference(self) -> bool:
        """Whether it also looks at inner products with a reference."""
        ...

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """Proportions of the updates. `weights` names the clients of `gram`, in its order."""
        ...


@runtime_checkable
class CumulativeRule(Protocol):
    """A rule that looks at the inner products of this round and remembers scores of the rounds before."""

    needs_gram: ClassVar[Literal[True]]

    @property
    def needs_reference(self) -> bool:
        """Whether it also looks at inner products with a reference."""
        ...

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def step(self, scores: Mapping[str, float], gram: Gram) -> tuple[dict[str, float], Mixture]:
        """Scores after this round, those of absent clients unchanged, and the proportions of this round's updates.

        Args:
            scores: Scores after the rounds before, by client; empty at the start.
            gram: This round's inner products.
        """
        ...


@runtime_checkable
class PlaintextRule(Protocol):
    """A rule that has to see every update: for comparison runs in the clear, by its type."""

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it. Public."""
        ...

    def aggregate(self, updates: Mapping[str, PlainVector]) -> PlainVector:
        """How the model moves."""
        ...


Rule: TypeAlias = WeightRule | GramRule


def check_clients(rule: str, weights: Mapping[str, float], gram: Gram, *, least: int) -> None:
    """Refuses a Gram matrix of other clients than the weights, and too few clients.

    Raises:
        ValueError: If there are fewer than `least`, with that bound, or the names differ.
    """
    if len(weights) < least:
        raise ValueError(f"{rule} needs at least {least} clients, got {len(weights)}")
    if tuple(weights) != gram.names:
        raise ValueError("expected a Gram matrix of the weighted clients in their order, got one of other clients")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """Weighted mean by the public weights (McMahan et al., 2017, algorithm 1, with agreed weights in place of record counts).

    Example:
        >>> FedAvg().coefficients({"a": 1, "b": 2, "c": 1}, total=4096)
        {'a': 1, 'b': 2, 'c': 1}
    """

    needs_gram: ClassVar[Literal[False]] = False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return "FedAvg"

    def coefficients(self, weights: Mapping[str, float], *, total: int) -> dict[str, int]:
        """Positive integer coefficient of each client: `integer_weights`.

        Raises:
            ValueError: As `integer_weights`.
        """
        return integer_weights(weights, total=total)


def krum_scores(squared_distances: NDArray[np.float64], *, neighbours: int) -> NDArray[np.float64]:
    """Sum of the squared distances of each update to its nearest others, of shape (n,) (Blanchard et al., 2017, section 4)."""
    distances = squared_distances.copy()
    np.fill_diagonal(distances, np.inf)  # an update is not its own neighbour
    # Summed in ascending order, so that a permutation of the clients cannot change the last digit of a score.
    return np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)


def lowest(values: NDArray[np.float64], names: Sequence[str], *, count: int) -> list[int]:
    """Rows of the `count` lowest values; equal values go to the name that sorts first."""
    return np.lexsort((np.argsort(np.argsort(names)), values))[:count].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum:
    """Plain mean of the `keep` updates that are closest to their neighbours (Blanchard et al., 2017, section 4 and Multi-Krum).

    The score of an update is the sum of its squared distances to its n - byzantine - 2 nearest others, the lowest scores are
    kept, and equal scores go to the name that sorts first. With `keep=1` this is Krum. Weights do not count, so that nobody
    buys influence with a weight. Declared noise is taken out of the distances.

    Args:
        byzantine: Number of clients that may send anything. From 0.
        keep: Number of updates in the mean. From 1 to n - byzantine.

    Raises:
        ValueError: If `byzantine` is negative or `keep` is not positive.

    Example:
        >>> import numpy as np
        >>> far = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
        >>> gram = Gram(names=tuple("abcde"), size=1, products=np.outer(far, far))
        >>> dict(MultiKrum(byzantine=1, keep=3).mixture(dict.fromkeys("abcde", 1.0), gram).weights)
        {'a': 1.0, 'b': 1.0, 'c': 1.0, 'd': 0.0, 'e': 0.0}
    """

    needs_gram: ClassVar[Literal[True]] = True

    byzantine: int
    keep: int

    def __post_init__(self) -> None:
        if self.byzantine < 0 or self.keep < 1:
            raise ValueError(f"expected byzantine from 0 and keep from 1, got byzantine={self.byzantine} and keep={self.keep}")

    @property
    def needs_reference(self) -> bool:
        """It does not."""
        return False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"MultiKrum(byzantine={self.byzantine}, keep={self.keep})"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """1 for the updates that are kept and 0 for the others.

        Raises:
            ValueError: If there are fewer than 2 * byzantine + 3 clients or fewer than byzantine + keep, or `gram` has other clients.
        """
        count = len(weights)
        check_clients(self.name, weights, gram, least=max(2 * self.byzantine + 3, self.byzantine + self.keep))
        scores = krum_scores(gram.squared_distances(), neighbours=count - self.byzantine - 2)
        kept = lowest(scores, gram.names, count=self.keep)
        return Mixture(weights={name: float(row in kept) for row, name in enumerate(gram.names)})


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNeighbourMixing:
    """Replaces each update by the mean of its n - byzantine nearest, itself among them, and hands these to another rule.

    Honest updates that differ a lot come closer together, which a robust rule needs on unequal data. Source: Allouah et al.,
    2023, "Fixing by mixing", algorithm 2.

    Args:
        byzantine: Number of clients that may send anything. From 0.
        rule: The rule on the mixed updates.

    Raises:
        ValueError: If `byzantine` is negative.
    """

    needs_gram: ClassVar[Literal[True]] = True

    byzantine: int
    rule: GramRule

    def __post_init__(self) -> None:
        if self.byzantine < 0:
            raise ValueError(f"expected byzantine from 0, got {self.byzantine}")

    @property
    def needs_reference(self) -> bool:
        """As the rule on the mixed updates."""
        return self.rule.needs_reference

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"NearestNeighbourMixing(byzantine={self.byzantine}, rule={self.rule.name})"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """Proportions of the updates that are behind the inner rule's proportions of the mixed updates.

        Raises:
            ValueError: If there are fewer than 2 * byzantine + 1 clients, `gram` has other clients, or the inner rule refuses.
        """
        check_clients(self.name, weights, gram, least=2 * self.byzantine + 1)
        count = len(gram.names)
        near = count - self.byzantine
        mixing = np.zeros((count, count))
        distances = gram.squared_distances()
        np.fill_diagonal(distances, -np.inf)  # an update is among its nearest, whatever noise leaves of the others' distances
        for row, of_row in enumerate(distances):
            mixing[row, lowest(of_row, gram.names, count=near)] = 1 / near
        # Mixed updates share noise, so the diagonal is cleared of it before the mixing and not after.
        products = mixing @ (gram.products - np.diag(gram.declared_noise)) @ mixing.T
        products = (products + products.T) / 2
        np.fill_diagonal(products, np.maximum(np.diag(products), 0.0))
        reference = gram.reference
        if reference is not None:
            reference = replace(reference, products=mixing @ reference.products)
        mixed = self.rule.mixture(weights, replace(gram, products=products, noise_energy=None, reference=reference))
        # A mean of means: the inner weights are taken relative to their sum, and every row of the mixing sums to 1.
        inner = np.array([mixed.shares[name] for name in gram.names])
        return replace(mixed, weights=dict(zip(gram.names, (inner @ mixing).tolist(), strict=True)))

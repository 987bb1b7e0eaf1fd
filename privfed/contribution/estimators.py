"""Shapley values of a game: exactly, by strata, or by sampled permutations.

The Shapley value of client i is 1/n times the sum over sizes s of E[v(S) | i in S] - E[v(S') | i not in S'], where S has s clients
and S' has s - 1. Every estimator here is exact for the sizes at both ends, where a single client matters most.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from privfed.contribution.game import Floats, Game

MOST_EXACT = 20
"""Largest number of clients whose coalitions are all looked at: 2^20 of them take some 0.2 s and 60 MB."""

# Sizes up to this, and from n minus this, have few enough coalitions to look at all of them: n (n - 1) / 2 pairs.
_EDGE = 2
# Where the norms differ by more than this, the mean coalition of a size stands for too little, and permutations are sampled.
_SPREAD = 3.0
_AT_ONCE = 256


class Estimator(Protocol):
    """A way to compute Shapley values. The same game gives the same values, at whatever party; see `Game.seed`."""

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it. Public."""
        ...

    def values(self, game: Game) -> Floats:
        """The Shapley value of each client, of shape (n,). They sum to the worth of all minus the worth of nobody."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Looks at all 2^n coalitions. For at most 20 clients."""

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return "Exact"

    def values(self, game: Game) -> Floats:
        """The Shapley values.

        Raises:
            ValueError: If there are more than 20 clients.
        """
        count = game.clients
        if count > MOST_EXACT:
            raise ValueError(f"expected at most {MOST_EXACT} clients, got {count}; take Strata or MonteCarlo")
        square, product, size = _coalitions(game)
        worth = np.empty(1 << count)
        worth[0] = game.empty
        worth[1:] = game.utility.value(square[1:], product[1:], size[1:])
        # The share of orders in which a client finds exactly s others before it.
        shares = np.array([1 / (count * math.comb(count - 1, s)) for s in range(count)])
        weight = shares[np.minimum(size.astype(np.int64), count - 1)]
        values = np.empty(count)
        for client in range(count):
            # Coalition number m has client i iff bit i of m is set.
            without, with_ = worth.reshape(-1, 2, 1 << client)[:, 0], worth.reshape(-1, 2, 1 << client)[:, 1]
            values[client] = (weight.reshape(-1, 2, 1 << client)[:, 0] * (with_ - without)).sum()
        return values


def _coalitions(game: Game) -> tuple[Floats, Floats, Floats]:
    """Square, product and size of each coalition, of shape (2^n,), by doubling: first those of the first client, then of two, ..."""
    square, product, size = np.zeros(1), np.zeros(1), np.zeros(1)
    for client in range(game.clients):
        cross = np.zeros(1)  # inner product of each coalition of earlier clients with this one
        for earlier in range(client):
            cross = np.concatenate([cross, cross + game.products[earlier, client]])
        square = np.concatenate([square, square + 2 * cross + game.products[client, client]])
        product = np.concatenate([product, product + game.linear[client]])
        size = np.concatenate([size, size + 1])
    return square, product, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """Exact for coalitions of at most `edge` or at least n - `edge` clients; in between, the worth of the mean coalition of a size.

    Deterministic, some milliseconds for 100 clients. The middle is off by the curvature of the utility times the variance among
    coalitions of one size, which is small where no update is much longer than the others. With `edge` of n / 2 it is exact.

    Args:
        edge: From 1; the work grows like n^edge.

    Raises:
        ValueError: If it is below 1.
    """

    edge: int = _EDGE

    def __post_init__(self) -> None:
        if self.edge < 1:
            raise ValueError(f"expected an edge of at least 1, got {self.edge}")

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"Strata(edge={self.edge})"

    def values(self, game: Game) -> Floats:
        """The Shapley values; see `Estimator.values`."""
        means = _Means.of(game)
        inside = game.utility.value(means.square_with, means.product_with, means.size)
        outside = game.utility.value(means.square_without, means.product_without, means.size)
        values = _shapley(game, inside, outside, edge=self.edge)
        # What the middle sizes are off by together is spread evenly, so that the values sum to what they must; no order changes.
        return values + (game.whole - game.empty - values.sum()) / game.clients


@dataclass(frozen=True, slots=True, kw_only=True)
class MonteCarlo:
    """Sampled permutations, with the linearised game as a control variate and exact coalitions at both ends.

    Only the difference between the game and its linearisation is sampled; the Shapley values of the rest are known in closed form.

    Args:
        permutations: How many are drawn, at least 1. The error falls with the square root.
        seed: Of the permutations, together with that of the game, from 0. Public and agreed: every party computes the same values, and in
            every round others are drawn, so that over rounds the errors cancel out and favour nobody.

    Raises:
        ValueError: If a number is out of range.
    """

    permutations: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.permutations < 1 or self.seed < 0:
            raise ValueError(f"expected permutations from 1 and a seed from 0, got {self.permutations} and {self.seed}")

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"MonteCarlo(permutations={self.permutations}, seed={self.seed})"

    def values(self, game: Game) -> Floats:
        """The Shapley values; see `Estimator.values`."""
        means = _Means.of(game)
        line = _Line.of(game, means)
        inside = line.value(means.square_with, means.product_with, means.size)
        outside = line.value(means.square_without, means.product_without, means.size)
        exact = _shapley(game, inside, outside, edge=_EDGE)
        rng = np.random.default_rng((self.seed, game.seed))
        sampled = np.zeros(game.clients)
        for start in range(0, self.permutations, _AT_ONCE):
            count = min(_AT_ONCE, self.permutations - start)
            order = rng.permuted(np.tile(np.arange(game.clients), (count, 1)), axis=1)
            sampled += self._marginals(game, line, order)
        return exact + sampled / self.permutations

    @staticmethod
    def _marginals(game: Game, line: "_Line", order: NDArray[np.int64]) -> Floats:
        """Sum over permutations of what each client adds to the game minus its linearisation, of shape (n,)."""
        count, clients = order.shape
        inner = np.arange(_EDGE + 1, clients - _EDGE)  # the other sizes are exact already
        if not inner.size:
            return np.zeros(clients)
        newcomers = np.ascontiguousarray(order.T)
        own, rows = np.diag(game.products), np.arange(count) * clients
        square, squares = np.zeros(count), np.empty((clients, count))
        with_members = np.zeros((count, clients))  # inner product of each coalition with each client
        flat, joining = with_members.reshape(-1), np.empty((count, clients))
        for step, new in enumerate(newcomers[: inner[-1]]):
            square = square + 2 * flat[rows + new] + own[new]
            squares[step] = square
            np.take(game.products, new, axis=0, out=joining, mode="clip")
            with_members += joining
        square, product = squares[inner - 1], np.cumsum(game.linear[newcomers], axis=0)[inner - 1]
        rest = np.zeros((clients + 1, count))  # of each size from 0
        rest[inner] = game.utility.value(square, product, inner[:, np.newaxis]) - line.value_at(square, product, inner)
        total = np.zeros(clients)
        total += np.bincount(newcomers.ravel(), weights=np.diff(rest, axis=0).ravel(), minlength=clients)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Automatic:
    """`Exact` up to 20 clients; above, `Strata` where no update is longer than three times the median, else `MonteCarlo`.

    Args:
        sampling: What to sample with.
    """

    sampling: MonteCarlo = MonteCarlo()

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"Automatic(sampling={self.sampling.name})"

    def values(self, game: Game) -> Floats:
        """The Shapley values; see `Estimator.values`."""
        return self.choose(game).values(game)

    def choose(self, game: Game) -> Exact | Strata | MonteCarlo:
        """The estimator for a game."""
        if game.clients <= MOST_EXACT:
            return Exact()
        norms = np.sqrt(np.maximum(np.diag(game.products), 0.0))
        return Strata() if norms.max() <= _SPREAD * np.median(norms) else self.sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Means:
    """Mean square and product over the coalitions of each size that have, or do not have, a client.

    Arrays of shape (n, n): row i is client i, column s - 1 is size s. Of the size n there is no coalition without i; its column
    holds no meaning and `_shapley` never reads it.
    """

    square_with: Floats
    product_with: Floats
    square_without: Floats
    product_without: Floats
    size: Floats

    @classmethod
    def of(cls, game: Game) -> "_Means":
        count = game.clients
        size = np.arange(1, count + 1, dtype=np.float64)
        own = np.diag(game.products)[:, np.newaxis]
        others = own.sum() - own  # squares of the others
        cross = game.products.sum(axis=1, keepdims=True) - own  # products of this one with the others
        pairs = game.products.sum() - own.sum() - 2 * cross  # products of two different others, both orders
        one, two = max(count - 1, 1), max((count - 1) * (count - 2), 1)
        # Of s - 1 others drawn without replacement, one given client is in with p1, two given clients with p2.
        with_1, with_2 = (size - 1) / one, (size - 1) * (size - 2) / two
        without_1, without_2 = size / one, size * (size - 1) / two
        linear = game.linear[:, np.newaxis]
        rest = game.linear.sum() - linear
        return cls(
            square_with=np.maximum(own + 2 * with_1 * cross + with_1 * others + with_2 * pairs, 0.0),
            product_with=linear + with_1 * rest,
            square_without=np.maximum(without_1 * others + without_2 * pairs, 0.0),
            product_without=without_1 * rest,
            size=size,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """The utility of each size, linearised at the mean coalition of that size: arrays of shape (n,)."""

    worth: Floats
    square: Floats
    product: Floats
    by_square: Floats
    by_product: Floats

    @classmethod
    def of(cls, game: Game, means: _Means) -> "_Line":
        size = means.size
        # A coalition of size s has client i with probability s / n; averaged over i, both kinds together are all coalitions.
        share = size / game.clients
        square = (share * means.square_with + (1 - share) * means.square_without).mean(axis=0)
        product = (share * means.product_with + (1 - share) * means.product_without).mean(axis=0)
        by_square, by_product = game.utility.slopes(square, product, size)
        worth = game.utility.value(square, product, size)
        return cls(worth=worth, square=square, product=product, by_square=by_square, by_product=by_product)

    def value(self, square: Floats, product: Floats, size: Floats | float) -> Floats:  # noqa: ARG002
        """As `Utility.value` for arrays whose last axis is the size."""
        return self.worth + self.by_square * (square - self.square) + self.by_product * (product - self.product)

    def value_at(self, square: Floats, product: Floats, sizes: NDArray[np.int64]) -> Floats:
        """As `value`, for arrays whose first axis is the size, of some sizes."""
        worth, by_square, by_product, mean_square, mean_product = (
            of_size[sizes - 1, np.newaxis] for of_size in (self.worth, self.by_square, self.by_product, self.square, self.product)
        )
        return worth + by_square * (square - mean_square) + by_product * (product - mean_product)


def _shapley(game: Game, inside: Floats, outside: Floats, *, edge: int) -> Floats:
    """Shapley values from mean worths, after those of the sizes at both ends are replaced by exact ones.

    Args:
        game: The game.
        inside: Mean worth of the coalitions with each client, of shape (n, n), column s - 1 for size s.
        outside: Of those without it.
        edge: Up to which size, and from n minus which, to be exact.
    """
    count = game.clients
    inside, outside = inside.copy(), outside.copy()
    row_sums, whole, linear = game.products.sum(axis=1), game.products.sum(), game.linear.sum()
    for size in range(1, min(edge, count // 2) + 1):
        members = _subsets(count, size)
        square = game.products[members[:, :, np.newaxis], members[:, np.newaxis, :]].sum(axis=(1, 2))
        product = game.linear[members].sum(axis=1)
        worth = game.utility.value(square, product, size)
        inside[:, size - 1], outside[:, size - 1] = _means_by_member(worth, members, count)
        if size < count - size:
            # The coalitions of n - s clients are what these leave out.
            left = np.maximum(whole - 2 * row_sums[members].sum(axis=1) + square, 0.0)
            worth = game.utility.value(left, linear - product, count - size)
            outside[:, count - size - 1], inside[:, count - size - 1] = _means_by_member(worth, members, count)
    inside[:, count - 1] = game.whole
    return (inside.sum(axis=1) - outside[:, : count - 1].sum(axis=1) - game.empty) / count


def _subsets(count: int, size: int) -> NDArray[np.int64]:
    """All sets of `size` clients, of shape (sets, size)."""
    if size == 1:
        return np.arange(count)[:, np.newaxis]
    if size == 2:
        return np.stack(np.triu_indices(count, k=1), axis=1)
    return np.array(list(itertools.combinations(range(count), size)))


def _means_by_member(worth: Floats, members: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """Mean worth of the sets with each client, and of those without it."""
    size = members.shape[1]
    with_client = np.bincount(members.ravel(), weights=np.repeat(worth, size), minlength=count)
    sets_with = len(worth) * size / count
    return with_client / sets_with, (worth.sum() - with_client) / max(len(worth) - sets_with, 1)

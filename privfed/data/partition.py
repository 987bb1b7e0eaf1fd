"""Splits a table among clients, for simulations of a consortium. Every record goes to exactly one client.

Groups (`Samples.groups`) are never torn apart. All randomness comes from the `numpy.random.Generator` that is passed in, so
the same generator state gives the same partition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from privfed.data._deck import Deck
from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError

EXTREME = 0.1
"""Dirichlet alpha at which most clients hold almost one class only."""
CONSORTIUM = 0.5
"""Dirichlet alpha of banks with different business."""
MODERATE = 1.0
"""Dirichlet alpha at which every mix of classes is equally likely."""

_REDRAWS = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Partition:
    """Which records each client holds. The indices are disjoint, ascending, and cover all records.

    Args:
        indices: One array of record positions per client, none empty. Private where the data are: sizes are data.
        deviation: 0 where every count is its drawn share rounded to a whole record; otherwise the largest distance, in
            records, between the count of a class at a client and its drawn share. Groups and guards cause it.
        redraws: How often the guards made the shares be drawn anew.
        moved: Number of records that the guards moved after the last draw.

    Raises:
        ValueError: If a client has no record, or the indices are not every position exactly once.
    """

    indices: tuple[NDArray[np.int64], ...]
    deviation: float = 0.0
    redraws: int = 0
    moved: int = 0

    def __post_init__(self) -> None:
        indices = tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in self.indices)
        if not indices or any(part.ndim != 1 or part.size == 0 for part in indices):
            raise ValueError("expected at least one client, and at least one record at each")
        everything = np.concatenate(indices)
        if everything.min() < 0 or everything.max() >= len(everything) or np.bincount(everything).max() > 1:
            raise ValueError("expected every record position exactly once, got one missing or repeated")
        for part in indices:
            part.setflags(write=False)
        object.__setattr__(self, "indices", indices)

    def split(self, samples: Samples) -> list[Samples]:
        """The samples of each client, in the order of the clients.

        Raises:
            ValueError: If the samples are not as many as were partitioned.
        """
        if len(samples) != sum(len(part) for part in self.indices):
            raise ValueError("expected the samples that were partitioned, got another number of records")
        return [samples.take(part) for part in self.indices]

    def __repr__(self) -> str:
        return f"Partition(clients={len(self.indices)})"


def dirichlet_partition(
    samples: Samples, *, clients: int = 3, alpha: float, rng: np.random.Generator, min_samples: int = 1, min_positive: int = 0
) -> Partition:
    """Label skew: the shares of each class are drawn from Dir(alpha, ..., alpha), independently (Yurochkin et al., arXiv:1905.12022).

    Without groups the count of class c at client k is q_ck N_c rounded by largest remainder. With groups of one class each it
    is within one group of q_ck N_c. A group of several classes is dealt with the rarest of them (of equally rare ones, the
    higher label); its other records come on top and show in the deviation.

    Where a client falls short of a guard, the shares are drawn anew up to 100 times; then groups are moved to it from the
    clients that have most; and where none of them has one to spare, the guards are met from scratch and the rest stays as it was dealt.
    All of it conditions the distribution, and the partition says how often it happened.

    The guards are met whenever single records can meet them: with K min_positive records of classes other than 0, and K times the larger
    guard in all. Whether groups can meet them is a packing problem. With groups of at most m records they are met where there are
    K (min_positive + m - 1) such records, and K times the larger of m min_positive and min_samples + m - 1 in all; with fewer,
    the data may be refused although some deal would have met them.

    Args:
        samples: What to split.
        clients: Number of clients, K.
        alpha: Concentration, above 0. Small is skewed: `EXTREME` is 0.1, `CONSORTIUM` 0.5, `MODERATE` 1.
        rng: Source of the shares and of who gets which record.
        min_samples: Records that each client must have, at least 1.
        min_positive: Records of a class other than 0 that each client must have.

    Returns:
        The deal; `split(samples)` of it gives each client's records, in a list.

    Raises:
        TypeError: If `rng` is no generator, a bare seed for example.
        ValueError: If clients < 1, alpha is not a positive finite number (or so extreme that no shares result),
            min_samples < 1 or min_positive < 0.
        UnsupportedDataError: If the data have fewer groups than clients, or no deal was found that meets the guards. Nothing was split.

    Example:
        >>> samples = Samples(features=np.zeros((100, 1)), labels=np.arange(100) % 2, groups=None, columns=("x",))
        >>> partition = dirichlet_partition(samples, alpha=CONSORTIUM, rng=np.random.default_rng(1))
        >>> sum(len(part) for part in partition.split(samples)), partition.deviation
        (100, 0.0)
    """
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"expected alpha to be a finite number above 0, got {alpha}")
    if min_samples < 1 or min_positive < 0:
        raise ValueError(f"expected min_samples >= 1 and min_positive >= 0, got {min_samples} and {min_positive}")
    deck = Deck.shuffled(samples, clients=clients, rng=rng)
    redraws = 0
    while True:
        shares = rng.dirichlet(np.full(clients, alpha), size=samples.classes)
        if not np.isclose(shares.sum(axis=1), 1.0).all():  # NaN or 0: the gamma variates under- or overflowed
            raise ValueError(f"expected an alpha from which shares can be drawn, got {alpha}")
        deal = deck.cut(shares)
        sizes, positives = deck.held(deal)
        if redraws == _REDRAWS or (sizes.min() >= min_samples and positives.min() >= min_positive):
            break
        redraws += 1
    dealt = deck.owners(deal)
    owners = deck.move(dealt, rng, weights=deck.positives, minimum=min_positive, movable=deck.positives > 0)
    # Giving away a fraud could break the first guard, so with that guard on only groups without one move.
    movable = deck.positives == 0 if min_positive else deck.sizes > 0
    owners = deck.move(owners, rng, weights=deck.sizes, minimum=min_samples, movable=movable)
    if deck.short(owners, min_positive=min_positive, min_samples=min_samples) is not None:
        owners = deck.cover(dealt, rng, min_positive=min_positive, min_samples=min_samples)
    short = deck.short(owners, min_positive=min_positive, min_samples=min_samples)
    if short is not None:
        client, guard, minimum = short
        raise UnsupportedDataError(
            f"client {client} would have fewer records than {guard}={minimum} asks, and the others have no whole group of records to "
            f"spare; nothing was split; lower {guard}, or use fewer clients"
        )
    return _partition(deck, owners, shares, redraws=redraws, moved=int(deck.sizes[owners != dealt].sum()))


def iid_partition(samples: Samples, *, clients: int, rng: np.random.Generator) -> Partition:
    """Equal sizes, records at random: no skew but chance. Raises as `share_partition` does."""
    if clients < 1:
        raise ValueError(f"expected clients >= 1, got {clients}")
    return share_partition(samples, shares=(1 / clients,) * clients, rng=rng)


def share_partition(samples: Samples, *, shares: Sequence[float], rng: np.random.Generator) -> Partition:
    """Quantity skew: client k gets the given share of all records, drawn at random whatever their class.

    Args:
        samples: What to split.
        shares: Share of each client, above 0, summing to 1 (within 1e-9).
        rng: Decides who gets which record.

    Raises:
        ValueError: If the shares are not positive numbers that sum to 1.
        UnsupportedDataError: If there are fewer groups than clients, or a share is so small that a client would be empty.
    """
    parts = _checked(shares)
    deck = Deck.shuffled(samples, clients=len(parts), rng=rng, by_class=False)
    return _partition(deck, deck.owners(deck.cut(parts[np.newaxis])), parts[np.newaxis])


def stratified_partition(samples: Samples, *, shares: Sequence[float], rng: np.random.Generator) -> Partition:
    """As `share_partition`, but client k gets its share of every class: no label skew. Raises as that does."""
    parts = _checked(shares)
    deck = Deck.shuffled(samples, clients=len(parts), rng=rng)
    per_class = np.tile(parts, (samples.classes, 1))
    return _partition(deck, deck.owners(deck.cut(per_class)), per_class)


def partition_by(values: ArrayLike) -> Partition:
    """One client per distinct value, in ascending order of the values: by bank, or by range of a feature.

    The values decide alone: where the two legs of a fraud were booked at two banks, each bank gets its own leg.

    Args:
        values: One value per record, of shape (records,), such as a column of a table.

    Raises:
        ValueError: If there is none, they are not a flat array, or one is missing (NaN, None).
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0 or bool(pd.isna(array).any()):
        raise ValueError("expected a flat array with one value per record, none missing")
    return Partition(indices=_positions(np.unique(array, return_inverse=True)[1]))


def _partition(deck: Deck, owners: NDArray[np.int64], shares: NDArray[np.float64], *, redraws: int = 0, moved: int = 0) -> Partition:
    owner_of = owners[deck.group_of]
    empty = np.flatnonzero(np.bincount(owner_of, minlength=deck.clients) == 0)
    if empty.size:
        raise UnsupportedDataError(f"client {empty[0]} would have no record; nothing was split; enlarge its share or use fewer clients")
    cells = deck.classes * deck.clients + owner_of
    counts = np.bincount(cells, minlength=shares.size).reshape(shares.shape)
    distance = float(np.abs(counts - shares * counts.sum(axis=1, keepdims=True)).max())
    return Partition(indices=_positions(owner_of), deviation=0.0 if distance < 1 else distance, redraws=redraws, moved=moved)


def _checked(shares: Sequence[float]) -> NDArray[np.float64]:
    parts = np.asarray(shares, dtype=np.float64)
    if parts.ndim != 1 or parts.size == 0 or not (parts > 0).all() or abs(parts.sum() - 1) > 1e-9:
        raise ValueError("expected positive shares that sum to 1")
    return parts


def _positions(owners: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Positions of the records of owner 0, 1, ...; every owner has one."""
    return tuple(np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1]))

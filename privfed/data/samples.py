"""One client's private records, in the form that training takes."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Samples:
    """Labelled records: read-only copies, finite, and silent about what they hold. Private data, the number of records included.

    Args:
        features: Feature values, of shape (records, columns), finite in float32.
        labels: Class of each record, from 0, of shape (records,). In fraud data 1 is a fraud.
        groups: Number of the group of each record, of shape (records,). Records with one number (such as the two legs of a
            fraud) stay together in every split and partition. None: every record is a group of its own.
        columns: Name of each feature column, unique. Public.

    Raises:
        ValueError: If there is no record or no column, shapes disagree, a feature is not finite in float32, a label is
            negative, labels or groups are not integers, or a column name repeats.

    Example:
        >>> samples = Samples(features=[[0.5, 1.0], [0.0, 2.0]], labels=[0, 1], groups=None, columns=("hour", "amount"))
        >>> samples
        Samples(columns=2)
        >>> len(samples.take([1]))
        1
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        columns = tuple(self.columns)
        if not columns or len(set(columns)) != len(columns):
            raise ValueError("expected at least one column, each name once")
        with np.errstate(over="ignore"):  # the overflow is refused two lines below, in words
            features = np.array(self.features, dtype=np.float32, order="C")
        if features.ndim != 2 or features.shape[0] < 1 or features.shape[1] != len(columns):
            raise ValueError(f"expected features of shape (records, {len(columns)}) with at least one record")
        if not np.isfinite(features).all():
            raise ValueError("expected finite features, got NaN, infinity or a number beyond float32; nothing was kept")
        labels = _integers(self.labels, records=len(features), what="labels")
        if labels.min() < 0:
            raise ValueError("expected labels from 0, got a negative one")
        groups = None if self.groups is None else _integers(self.groups, records=len(features), what="groups")
        for array in (features, labels, groups):
            if array is not None:
                array.setflags(write=False)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "columns", columns)

    @property
    def classes(self) -> int:
        """Number of classes up to the largest label present, at least 1."""
        return int(self.labels.max()) + 1

    def take(self, indices: ArrayLike) -> Self:
        """The records at the given positions, in that order, as new samples.

        Args:
            indices: Whole numbers from 0 to len(self) - 1, of shape (n,), n at least 1.

        Raises:
            ValueError: If there is none, or they are not such positions; a boolean mask is none either.
        """
        positions = np.asarray(indices)
        if positions.ndim != 1 or positions.size == 0 or positions.dtype.kind not in "iu":
            raise ValueError("expected at least one position, in a flat array of integers")
        if positions.min() < 0 or positions.max() >= len(self):
            raise ValueError("expected positions from 0 to the number of records - 1")
        groups = None if self.groups is None else self.groups[positions]
        return type(self)(features=self.features[positions], labels=self.labels[positions], groups=groups, columns=self.columns)

    def first_of_groups(self, most: int) -> Self:
        """The first records of each group, at most so many, in the order of the table.

        Whether a record is among them depends on the records of its own group alone.

        Args:
            most: At least 1.

        Raises:
            ValueError: If there are no groups, or `most` is below 1.
        """
        if self.groups is None or most < 1:
            raise ValueError("expected groups, and at least one record of each")
        order = np.argsort(self.groups, kind="stable")
        _, starts, counts = np.unique(self.groups[order], return_index=True, return_counts=True)
        rank = np.arange(len(self)) - np.repeat(starts, counts)
        return self.take(np.sort(order[rank < most]))

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Samples(columns={len(self.columns)})"


def _integers(values: ArrayLike, *, records: int, what: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.shape != (records,) or array.dtype.kind not in "biu":
        raise ValueError(f"expected {what} as integers of shape (records,)")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"expected {what} within 64-bit signed integers")
    return array.astype(np.int64)

"""How far the clients' label distributions are from the whole.

Free where one party holds all labels anyway, as in a simulation. On private labels these numbers are releases: compute them
at each client, and publish them only through a mechanism that its ledger is charged for.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

_SUM_TOLERANCE = 1e-9


def label_distribution(labels: ArrayLike, *, classes: int) -> NDArray[np.float64]:
    """Share of each class among the labels, of shape (classes,), summing to 1.

    Raises:
        ValueError: If there is no label, or one is not a whole number from 0 to classes - 1.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "biu":
        raise ValueError("expected at least one label, in a flat array of integers")
    if array.min() < 0 or array.max() >= classes:
        raise ValueError(f"expected labels from 0 to classes - 1 = {classes - 1}")
    return np.bincount(array.astype(np.int64), minlength=classes) / array.size


def kl_divergence(p: ArrayLike, q: ArrayLike, *, eps: float = 1e-12) -> float:
    """Kullback-Leibler divergence of p from q in nats: sum_c p_c ln((p_c + eps) / (q_c + eps)).

    With eps > 0 it is finite where q lacks a class that p has, at most ln((1 + eps) / eps).

    Args:
        p: Distribution of one client, of shape (classes,).
        q: Distribution of the whole, of the same shape.
        eps: Smoothing constant of the formula, above 0. It has nothing to do with differential privacy.

    Raises:
        ValueError: If p or q is no distribution, their shapes differ, or eps is not a finite number above 0.

    Example:
        >>> round(kl_divergence([1.0, 0.0], [0.5, 0.5]), 6)  # ln 2
        0.693147
    """
    if not (np.isfinite(eps) and eps > 0):
        raise ValueError(f"expected eps to be a finite number above 0, got {eps}")
    first, second = _distributions(p, q)
    return float(np.sum(first * np.log((first + eps) / (second + eps))))


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Total variation distance, 1/2 sum_c |p_c - q_c|: from 0 (equal) to 1 (no class in common).

    Raises:
        ValueError: If p or q is no distribution, or their shapes differ.

    Example:
        >>> total_variation([1.0, 0.0], [0.5, 0.5])
        0.5
    """
    first, second = _distributions(p, q)
    return float(np.abs(first - second).sum() / 2)


def divergence_table(labels: Sequence[ArrayLike]) -> pd.DataFrame:
    """One row per client: its size, its share of each class, and its divergence from all labels together.

    Args:
        labels: Class of each record, one array per client. Private data, and so is the table.

    Returns:
        Columns records, class_0, class_1, ... (shares), kl_divergence (nats) and total_variation; the index is the client's
        position.

    Raises:
        ValueError: If there is no client, a client has no label, or a label is not a whole number from 0.

    Example:
        >>> print(divergence_table([[0, 0, 0, 1], [0, 1, 1, 1]]).round(3).to_string(index_names=False))
           records  class_0  class_1  kl_divergence  total_variation
        0        4     0.75     0.25          0.131             0.25
        1        4     0.25     0.75          0.131             0.25
    """
    arrays = [np.asarray(part) for part in labels]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("expected at least one client, and at least one label at each")
    everything = np.concatenate(arrays)
    classes = int(everything.max()) + 1
    whole = label_distribution(everything, classes=classes)
    rows: list[dict[str, float]] = []
    for array in arrays:
        own = label_distribution(array, classes=classes)
        shares = {f"class_{position}": float(share) for position, share in enumerate(own)}
        rows.append(
            {
                "records": array.size,
                **shares,
                "kl_divergence": kl_divergence(own, whole),
                "total_variation": total_variation(own, whole),
            }
        )
    return pd.DataFrame(rows, index=pd.RangeIndex(len(rows), name="client"))


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"expected two distributions over the same classes, got shapes {first.shape} and {second.shape}")
    for values in (first, second):
        if not (values >= 0).all() or not abs(values.sum() - 1) <= _SUM_TOLERANCE:
            raise ValueError("expected distributions: no negative share, no NaN, and a sum of 1")
    return first, second

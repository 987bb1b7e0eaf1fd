"""Compares membership scores with the truth, beside a coin. Only an auditor can run this."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipScore:
    """How well scores tell members from others. A coin has an area of one half, and as many members found as others accused.

    Args:
        area: Area under the ROC curve: the share of pairs of a member and another record in which the member scores higher. Below one
            half it is shown as it is.
        found_at_1_percent: Share of members found where at most one in a hundred others is accused.
        found_at_1_per_mille: Likewise for one in a thousand; with fewer than a thousand others, none may be accused.
    """

    area: float
    found_at_1_percent: float
    found_at_1_per_mille: float


def score_membership(scores: NDArray[np.float64], members: NDArray[np.bool_]) -> MembershipScore:
    """Compares scores, higher for members, with who is one.

    Args:
        scores: Of shape (records,).
        members: Whether each record was trained on, of the same shape. Private.

    Raises:
        ValueError: If the shapes differ, or there is no member, or nobody else.
    """
    if scores.shape != members.shape or scores.ndim != 1 or members.all() or not members.any():
        raise ValueError(f"expected a score for each record, some of them members and some not, got shapes {scores.shape}, {members.shape}")
    return MembershipScore(
        area=float(roc_auc_score(members, scores)),
        found_at_1_percent=_found(scores[members], scores[~members], accused=0.01),
        found_at_1_per_mille=_found(scores[members], scores[~members], accused=0.001),
    )


def _found(members: NDArray[np.float64], others: NDArray[np.float64], *, accused: float) -> float:
    """Share of members above a threshold that so small a share of the others exceeds."""
    threshold = np.sort(others)[::-1][int(accused * len(others))]
    return float((members > threshold).mean())

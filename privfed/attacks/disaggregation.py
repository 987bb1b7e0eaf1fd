"""Single clients solved for from many opened sums, when not everybody takes part in every round.

Each opening is a mean with known coefficients. Where rounds differ in who took part, they are equations for the clients' own mean updates
(Lam et al., 2021, arXiv:2106.06089, section 3). How exactly they can be solved follows from the public coefficients alone, so a client
can ask before it takes part in the next round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.observation import Observation
from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

# A client counts as determined if the equations leave out no more of it than rounding does.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Disaggregation:
    """What many opened sums say about each client. Private.

    Args:
        updates: Estimated mean update of each client, None for clients that the equations do not determine.
        standard_errors: How far the rounds' differences put a coordinate of each estimate off, of shape (clients,): infinite for clients
            that are not determined, NaN where there are no more rounds than it takes to solve.
        confidence: Share of each estimate's length that is not such an error, from 0 to 1; 0 where it is not known.
    """

    updates: tuple[PlainVector | None, ...]
    standard_errors: NDArray[np.float64]
    confidence: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"Disaggregation(clients={len(self.updates)}, determined={sum(update is not None for update in self.updates)})"

    def observation(self, client: int, *, opened: Observation) -> Observation | None:
        """What an attack on records gets: one client's estimated update, where the sum stood. None if it is not determined.

        Args:
            client: Its column among the coefficients.
            opened: What was seen of one of the rounds.
        """
        update = self.updates[client]
        return None if update is None else replace(opened, seen=update, coefficients=(1,))


def disaggregation_risk(coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """How exactly each client's own mean update follows from the openings, of shape (clients,). Public, before anything is opened.

    The factor by which the solution is less exact than if the client had been opened alone in one round: 1 for a client that was, and
    infinite for one that no combination of openings tells from others.

    Args:
        coefficients: Of every client in every opening, of shape (openings, clients); 0 for those that were not in it.

    Raises:
        ValueError: If a coefficient is negative or not finite, or an opening has none.

    Example:
        >>> disaggregation_risk(np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])).round(2).tolist()
        [inf, inf, 3.61]
    """
    inverse, determined = _solution(coefficients)
    return np.where(determined, np.linalg.norm(inverse, axis=1), np.inf)


def disaggregate(coefficients: NDArray[np.float64], opened: Sequence[PlainVector]) -> Disaggregation:
    """Solves for each client's mean update by least squares.

    Exact where clients send the same again, as in two openings of the same uploads. Where they train on, what they do differently from
    round to round is an error, whose size shows if there are more openings than unknowns.

    Args:
        coefficients: As for `disaggregation_risk`.
        opened: What each opening showed: the mean of the updates in it, weighted by the coefficients.

    Raises:
        LayoutMismatchError: If the openings have different layouts.
        ValueError: As `disaggregation_risk`, or if there is not one opening for each row of coefficients.
    """
    inverse, determined = _solution(coefficients)
    if len(opened) != len(coefficients):
        raise ValueError(f"expected one opening for each row of coefficients, got {len(opened)} for {len(coefficients)}")
    layout = opened[0].layout
    if any(vector.layout != layout for vector in opened):
        raise LayoutMismatchError("expected openings of one layout, got several; nothing was attacked")
    seen = np.stack([vector.values for vector in opened])
    shares = coefficients / coefficients.sum(axis=1, keepdims=True)
    found = inverse @ seen
    spare = len(shares) - int(np.linalg.matrix_rank(shares))
    between = math.sqrt(float(np.sum((seen - shares @ found) ** 2)) / (spare * layout.size)) if spare else math.nan
    errors = np.where(determined, between * np.linalg.norm(inverse, axis=1), np.inf)
    lengths = np.linalg.norm(found, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        confidence = np.clip(1 - np.sqrt(layout.size) * errors / lengths, 0, 1)
    return Disaggregation(
        updates=tuple(PlainVector(layout=layout, values=row) if known else None for row, known in zip(found, determined, strict=True)),
        standard_errors=errors,
        confidence=np.nan_to_num(confidence, nan=0.0),
    )


def _solution(coefficients: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What to multiply openings by to get clients, of shape (clients, openings), and which clients are determined."""
    if coefficients.ndim != 2 or not np.isfinite(coefficients).all() or coefficients.min(initial=0.0) < 0:
        raise ValueError(f"expected finite coefficients of at least 0, of shape (openings, clients), got shape {coefficients.shape}")
    totals = coefficients.sum(axis=1, keepdims=True)
    if not len(coefficients) or not totals.min() > 0:
        raise ValueError("expected at least one opening, and a positive coefficient in each")
    shares = coefficients / totals
    inverse = np.linalg.pinv(shares)
    missed = np.abs(inverse @ shares - np.eye(shares.shape[1])).max(axis=1)
    return inverse, missed < _ROUNDING

"""Who contributes nothing of its own: checks of one round from the same inner products that the scores use.

Every finding is a reason for a human to ask, never evidence, and no rule acts on one: who decides so hands `Findings.flagged` to
`Mixture.without`. An attacker who adds a little of an honest update, or noise that is
not alike in all coordinates, is not found; and a client whose records resemble nobody's can look like noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from privfed.aggregation.gram import Gram, Reference

# Copies of one grid update agree to the last bit, and their inner products to some 1e-16 of the norms. A scaled copy is rounded to
# the grid anew: half a step per coordinate, some 1e-7 of the bound. One minus a cosine of 1e-6 is an angle of 0.08 degrees.
_SAME = 1e-6
# Squared norm, relative to the median, below which an update counts as nothing: a norm of a millionth.
_NOTHING = 1e-12
# Keeps the cosines of copies invertible. Far below any share of noise, k / d, and far above rounding.
_RIDGE = 1e-10


class Suspicion(Enum):
    """What an update looks like."""

    ZERO = "sends nothing"
    DUPLICATE = "sends what another client sends, but for a factor"
    REPLAY = "sends the last aggregate, but for a factor, which may be negative"
    UNRELATED = "sends what looks like noise, with or without the last aggregate in it"
    MISSING_NOISE = "sends less than the noise that it declared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the checks of a round say of each client.

    Args:
        suspicions: Of each client, by name; empty for most.
    """

    suspicions: Mapping[str, frozenset[Suspicion]]

    @property
    def flagged(self) -> frozenset[str]:
        """Clients of which there is any suspicion: what `Mixture.without` can be handed."""
        return frozenset(name for name, suspicions in self.suspicions.items() if suspicions)


def check_round(gram: Gram, *, last: Reference | None = None, level: float = 1e-3) -> Findings:
    """All checks of one round.

    Args:
        gram: This round's inner products.
        last: Inner products with the last aggregate; left out, replays are not looked for.
        level: See `unrelated_clients` and `clients_without_noise`.

    Raises:
        ValueError: If the level is not between 0 and 1, or the reference is of other clients.
    """
    by_kind = {
        Suspicion.ZERO: zero_clients(gram),
        Suspicion.DUPLICATE: duplicate_clients(gram),
        Suspicion.REPLAY: frozenset[str]() if last is None else replaying_clients(gram, last),
        Suspicion.UNRELATED: unrelated_clients(gram, last=last, level=level),
        Suspicion.MISSING_NOISE: clients_without_noise(gram, level=level),
    }
    return Findings(suspicions={name: frozenset(kind for kind, names in by_kind.items() if name in names) for name in gram.names})


def zero_clients(gram: Gram) -> frozenset[str]:
    """Clients whose update is nothing next to the median update. If most send nothing, all who do."""
    most = _NOTHING * float(np.median(gram.squared_norms))
    return frozenset(name for name, norm in zip(gram.names, gram.squared_norms.tolist(), strict=True) if norm <= most)


def duplicate_clients(gram: Gram) -> frozenset[str]:
    """Clients with an update that another one sends too, but for a positive factor. Who copied whom does not show."""
    cosines = _cosines(gram.products)
    np.fill_diagonal(cosines, 0.0)
    return _named(gram, cosines.max(axis=1) >= 1 - _SAME)


def replaying_clients(gram: Gram, last: Reference) -> frozenset[str]:
    """Clients whose update is the last aggregate, but for a factor of either sign.

    Raises:
        ValueError: If the reference is of other clients.
    """
    _check_rows(gram, last)
    lengths = np.sqrt(gram.squared_norms * last.square)
    cosines = np.divide(last.products, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
    return _named(gram, np.abs(cosines) >= 1 - _SAME)


def unrelated_clients(gram: Gram, *, last: Reference | None = None, level: float = 1e-3) -> frozenset[str]:
    """Clients whose update has nothing in common with the others, as it is or once the last aggregate is taken out of all updates.

    Noise in d coordinates lies in the span of k vectors that it does not know with a share of its energy that has the distribution
    Beta(k / 2, (d - k) / 2), however these are related. A client is flagged if the share of its update in the span of the others is
    no larger than noise would make it; noise escapes with probability `level`. Updates that are nothing, or nothing but the last
    aggregate, are not flagged here. With fewer than three clients nobody is: the only other one may be the noise.

    Nobody is flagged where a client with as much in common with the others as the median client has would be, with a probability above
    `level`. Updates of honest clients have little else in common than the last aggregate where their data are alike and the model hardly
    turns, and little at all under heavy noise: there a replay in noise is what an honest update is, and escapes. So do all who send noise
    where they are half of the clients.

    Args:
        gram: This round's inner products.
        last: Inner products with the last aggregate.
        level: Probability with which noise escapes, and with which the median client may be taken for noise, between 0 and 1.

    Raises:
        ValueError: If the level is out of range, or the reference is of other clients.
    """
    _check_level(level)
    found = _unrelated(gram, gram.products, gram.size, level=level)
    if last is not None:
        _check_rows(gram, last)
        if last.square > 0:
            found |= _unrelated(gram, gram.products - np.outer(last.products, last.products) / last.square, gram.size - 1, level=level)
    return found


def _unrelated(gram: Gram, products: NDArray[np.float64], size: int, *, level: float) -> frozenset[str]:
    """`unrelated_clients` for what is left of the updates: its inner products, and in how many dimensions it lies."""
    if len(gram.names) < 3 or size < 1:
        return frozenset()
    norms = gram.squared_norms
    left = (norms > _NOTHING * np.median(norms)) & (np.diag(products) > _SAME * norms)
    others = int(left.sum()) - 1
    if others < 1 or others >= size:
        return frozenset()
    rows = np.flatnonzero(left)
    # The share outside the span of all others is one over the diagonal of the inverse, as in a variance inflation factor.
    inverse = np.linalg.inv(_cosines(products)[np.ix_(rows, rows)] + _RIDGE * np.eye(len(rows)))
    inside = 1 - 1 / np.diag(inverse)
    threshold = float(stats.beta.ppf(1 - level, others / 2, (size - others) / 2))
    if _taken_for_noise(float(np.median(inside)), threshold, span=others, size=size) > level:
        return frozenset()
    return frozenset(gram.names[row] for row, share in zip(rows.tolist(), inside.tolist(), strict=True) if share <= threshold)


def _taken_for_noise(typical: float, threshold: float, *, span: int, size: int) -> float:
    """Probability that the share in the span is at most the threshold, for updates of which it is `typical` in expectation.

    Of a fixed part in the span and noise in all coordinates, the ratio of the two energies has a noncentral F distribution.
    """
    # A noncentrality for which (span + it) / (size + it) is the share.
    fixed = max((typical * size - span) / max(1 - typical, _RIDGE), 0.0)
    ratio = threshold / (1 - threshold) * (size - span) / span
    return float(stats.ncf.cdf(ratio, span, size - span, fixed))


def clients_without_noise(gram: Gram, *, level: float = 1e-3) -> frozenset[str]:
    """Clients whose update is shorter than the noise that they declared can have left it.

    The squared norm of the noise alone has mean b and standard deviation b sqrt(2 / d); a signal only adds to it. Flagged is who
    is below b (1 - z sqrt(2 / d)). If all clients did add their noise, anybody is flagged with probability at most `level`, up to
    the normal approximation, which is good from some hundreds of coordinates. It holds for plain gradient descent only, because
    `noise_energy` does. A client that is not flagged may have added no noise all the same.

    Args:
        gram: This round's inner products, with the declared noise.
        level: Probability of any false flag in a round, between 0 and 1.

    Raises:
        ValueError: If the level is out of range.
    """
    _check_level(level)
    deviations = float(stats.norm.isf(level / len(gram.names)))
    return _named(gram, gram.squared_norms < gram.declared_noise - deviations * gram.resolution)


def _cosines(products: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.sqrt(np.maximum(np.diag(products), 0.0))
    lengths = np.outer(norms, norms)
    return np.divide(products, lengths, out=np.zeros(lengths.shape), where=lengths > 0)


def _named(gram: Gram, rows: NDArray[np.bool_]) -> frozenset[str]:
    return frozenset(name for name, row in zip(gram.names, rows.tolist(), strict=True) if row)


def _check_rows(gram: Gram, last: Reference) -> None:
    if len(last.products) != len(gram.names):
        raise ValueError(f"expected {len(gram.names)} inner products with the last aggregate, got {len(last.products)}")


def _check_level(level: float) -> None:
    if not (math.isfinite(level) and 0 < level < 1):
        raise ValueError(f"expected level between 0 and 1, got {level}")

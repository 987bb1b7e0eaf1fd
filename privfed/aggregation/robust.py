"""Rules that shorten or down-weight updates by their norms, distances and angles; all of them from the Gram matrix."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import Gram
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.rules import CumulativeRule, MultiKrum, PlaintextRule, Rule, check_clients
from privfed.errors import CohortError, UnsupportedInThisModeError

# Weiszfeld's iteration is linear; from the mean, a relative change below the tolerance takes some tens of steps unless two updates
# tie for the median, where more steps change nothing that an integer coefficient could express.
_ITERATIONS, _TOLERANCE = 1000, 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class NormBound:
    """Weighted mean of the updates, each shortened to a bound on its norm (Sun et al., 2019, arXiv:1911.07963, section 5).

    No client moves the model by more than its share times `max_norm`. The norm is that of the update as sent, noise included,
    because that is what moves the model.

    Args:
        max_norm: Largest Euclidean norm of an update in the mean. Positive, public.

    Raises:
        ValueError: If the bound is not positive and finite.

    Example:
        >>> import numpy as np
        >>> gram = Gram(names=("a", "b"), size=1, products=np.outer([1.0, 100.0], [1.0, 100.0]))
        >>> mixture = NormBound(max_norm=10.0).mixture({"a": 1.0, "b": 1.0}, gram)
        >>> mixture.shares["b"] * mixture.scale  # of an update of norm 100: it moves the model by half of 10
        0.05
    """

    needs_gram: ClassVar[Literal[True]] = True

    max_norm: float

    def __post_init__(self) -> None:
        _check_radius("max_norm", self.max_norm)

    @property
    def needs_reference(self) -> bool:
        """It does not."""
        return False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"NormBound(max_norm={self.max_norm!r})"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """The public weights, each times the factor that shortens its update; their sum is what scales the mean.

        Raises:
            ValueError: If a weight is not positive and finite, or `gram` has other clients.
        """
        check_clients(self.name, weights, gram, least=1)
        public = np.array(list(weights.values()), dtype=np.float64)
        if not np.isfinite(public).all() or not (public > 0).all():
            raise ValueError("expected positive, finite weights, got others")
        public /= public.max()
        shortened = public * _shortening(gram.squared_norms, self.max_norm)
        return _mixture(gram, shortened, scale=float(shortened.sum() / public.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CenteredClipping:
    """A known centre plus the mean of the differences to it, each shortened to a radius (Karimireddy et al., 2021, algorithm 2).

    The reference of the Gram matrix is the centre: the last aggregate, or a validator's update. One step is taken. No client moves
    the result by more than radius / n. Distances are those of the updates as sent, and weights do not count.

    Args:
        radius: Largest Euclidean distance to the centre that counts. Positive, public.

    Raises:
        ValueError: If the radius is not positive and finite.
    """

    needs_gram: ClassVar[Literal[True]] = True

    radius: float

    def __post_init__(self) -> None:
        _check_radius("radius", self.radius)

    @property
    def needs_reference(self) -> bool:
        """It does: the centre."""
        return True

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"CenteredClipping(radius={self.radius!r})"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """The factor that shortens each difference; what is cut off stays at the centre.

        Raises:
            ValueError: If `gram` has other clients or no reference.
        """
        check_clients(self.name, weights, gram, least=1)
        centre = gram.known_reference()
        shortened = _shortening(gram.squared_norms - 2 * centre.products + centre.square, self.radius)
        scale = float(shortened.mean())
        return _mixture(gram, shortened, scale=scale, reference_share=1 - scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class FLTrust:
    """Mean of the updates at the reference's length, weighted by how far they point its way (Cao et al., 2021, algorithm 2).

    An update that points against the reference counts nothing, and length buys no influence. Weights do not count either. Updates shorter
    than a third of the median stay that much shorter than the others (`Gram.lengths`): of them the paper's rule would make the most.
    """

    needs_gram: ClassVar[Literal[True]] = True

    @property
    def needs_reference(self) -> bool:
        """It does."""
        return True

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return "FLTrust"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """Trust in each update (its cosine with the reference, from 0), over its norm: both with `Gram.lengths` for the norm.

        Raises:
            ValueError: If `gram` has other clients or no reference, or the reference is zero.
            CohortError: If no update points the way of the reference.
        """
        check_clients(self.name, weights, gram, least=1)
        reference = gram.known_reference()
        if reference.square == 0:
            raise ValueError("expected a reference that is not zero")
        length, lengths = math.sqrt(reference.square), gram.lengths
        towards = np.maximum(reference.products / length, 0.0)
        trust = np.divide(towards, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
        if not trust.any():
            raise CohortError("no update points the way of the reference; nothing was summed")
        at_length = np.divide(trust * length, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
        return _mixture(gram, at_length, scale=float(at_length.sum() / trust.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian:
    """The point with the least sum of distances to the updates, by smoothed Weiszfeld iteration (RFA; Pillutla et al., 2022).

    Distances below `smoothing` times the median norm count as that, so the scale of the updates changes nothing. Weights do not
    count. Declared noise is taken out of the distances, which else are all alike.

    Args:
        smoothing: Share of the median norm, above 0 and below 1.

    Raises:
        ValueError: If the share is out of its range.

    Example:
        >>> import numpy as np
        >>> line = np.array([0.0, 1.0, 2.0, 100.0, 1000.0])
        >>> gram = Gram(names=tuple("abcde"), size=1, products=np.outer(line, line))
        >>> shares = GeometricMedian().mixture(dict.fromkeys("abcde", 1.0), gram).shares
        >>> round(float(sum(share * place for share, place in zip(shares.values(), line))), 3)  # of points on a line, the median
        2.0
    """

    needs_gram: ClassVar[Literal[True]] = True

    smoothing: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < 1:
            raise ValueError(f"expected smoothing between 0 and 1, got {self.smoothing}")

    @property
    def needs_reference(self) -> bool:
        """It does not."""
        return False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"GeometricMedian(smoothing={self.smoothing!r})"

    def mixture(self, weights: Mapping[str, float], gram: Gram) -> Mixture:
        """The weights under which the mean of the updates is their smoothed geometric median.

        Raises:
            ValueError: If `gram` has other clients.
        """
        check_clients(self.name, weights, gram, least=1)
        clean = gram.without_noise()
        if gram.median_norm == 0:  # most updates are zero, and so is their median
            return _mixture(gram, (gram.squared_norms == 0).astype(np.float64))
        # What is closer than the smoothing, or than the chance in a de-biased distance, is as close as that.
        closest = (self.smoothing * gram.median_norm) ** 2 + gram.resolution
        share = np.full(len(gram.names), 1 / len(gram.names))
        for _ in range(_ITERATIONS):
            towards = clean.products @ share
            squared = np.diag(clean.products) - 2 * towards + share @ towards
            new = 1 / np.sqrt(np.maximum(squared, closest))
            new /= new.sum()
            change = float(np.abs(new - share).sum())
            share = new
            if change < _TOLERANCE:
                break
        return _mixture(gram, share)


def _check_radius(name: str, radius: float) -> None:
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"expected {name} to be positive and finite, got {radius}")


def _shortening(squared: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """Factor that brings each length to at most the radius, from 0 (exclusive) to 1."""
    return radius / np.maximum(np.sqrt(np.maximum(squared, 0.0)), radius)


def _mixture(gram: Gram, weights: NDArray[np.float64], *, scale: float = 1.0, reference_share: float = 0.0) -> Mixture:
    return Mixture(weights=dict(zip(gram.names, weights.tolist(), strict=True)), scale=scale, reference_share=reference_share)


def check_openable(rule: Rule | CumulativeRule | PlaintextRule, *, min_clients: int) -> Rule | CumulativeRule:
    """The rule, if what it asks for can ever be opened.

    Args:
        rule: How updates are to be combined.
        min_clients: Fewest clients in an aggregate that the policy allows.

    Raises:
        UnsupportedInThisModeError: If it cannot.
    """
    if isinstance(rule, PlaintextRule):
        raise UnsupportedInThisModeError(f"{rule.name} needs to see every update; nothing was started; take Plaintext for a comparison run")
    if isinstance(rule, CenteredClipping):
        raise UnsupportedInThisModeError(
            f"{rule.name} moves the model by a share of the reference, which nobody opens; nothing was started; take FLTrust"
        )
    if isinstance(rule, MultiKrum) and rule.keep < min_clients:
        raise UnsupportedInThisModeError(
            f"{rule.name} would open a mean of {rule.keep}, and the policy demands {min_clients}; nothing was started; keep more updates"
        )
    return rule

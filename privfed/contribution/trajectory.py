"""FedTSV: clients are weighted by the trajectory Shapley value, how much they move the model towards a reference update.

Source: Kuznetsov and Wang, 2026, arXiv:2605.30336. Its choices are named values here, `FedTsv.published`. The defaults differ in
two of them, because as published a client that sends anything earns: if nobody is worth nothing, whoever comes first in an order is
paid the worth of any update at all, and if the reference is much shorter than the updates, those earn most that pull the mean back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import numpy as np

from privfed.aggregation.gram import Gram, Reference
from privfed.aggregation.mixture import Mixture
from privfed.contribution.estimators import Automatic, Estimator
from privfed.contribution.game import AngularUtility, EuclideanUtility, Game, Utility

# Worths are at most 1 and scores sums of them. What is left of a score of nothing after rounding must not be all the weight there is.
_ROUNDING = 1e-12


class ReferenceScale(Protocol):
    """How long the reference is taken to be."""

    def apply(self, gram: Gram) -> Reference:
        """The reference of a Gram matrix, rescaled."""
        ...


@dataclass(frozen=True, slots=True)
class MedianNorm:
    """As long as the median update without its noise: a validator need not know how many steps the clients do."""

    def apply(self, gram: Gram) -> Reference:
        """See `ReferenceScale.apply`."""
        reference = gram.known_reference()
        return reference if gram.median_norm == 0 else reference.at_length(gram.median_norm)


@dataclass(frozen=True, slots=True)
class AsSent:
    """As the validator made it, which is what the paper does."""

    def apply(self, gram: Gram) -> Reference:
        """See `ReferenceScale.apply`."""
        return gram.known_reference()


class Distance(Protocol):
    """What being close to the reference means."""

    def game(self, gram: Gram, scale: ReferenceScale) -> tuple[Utility, Gram]:
        """The utility, and the Gram matrix that it is to be computed on."""
        ...


@dataclass(frozen=True, slots=True)
class Euclidean:
    """1 / (1 + |mean - reference|^2 / |reference|^2). Declared noise is taken out of the norms."""

    def game(self, gram: Gram, scale: ReferenceScale) -> tuple[Utility, Gram]:
        """See `Distance.game`."""
        reference = scale.apply(gram)
        utility = EuclideanUtility(reference_square=reference.square, unit=reference.square)
        return utility, replace(gram.without_noise(), reference=reference)


@dataclass(frozen=True, slots=True)
class Angular:
    """1 / (1 + 2 (1 - cosine)): length does not count, and honest clients with unusual data keep more. The scale has no effect."""

    def game(self, gram: Gram, scale: ReferenceScale) -> tuple[Utility, Gram]:  # noqa: ARG002
        """See `Distance.game`."""
        return AngularUtility(reference_square=1.0), replace(gram, reference=gram.known_reference().at_length(1.0))


class WorthOfNobody(Protocol):
    """What the empty coalition is worth."""

    def worth(self, utility: Utility) -> float:
        """Its worth."""
        ...


@dataclass(frozen=True, slots=True)
class ZeroUpdate:
    """Nobody moves the model by nothing, and that has a worth like any other update: 1/2, or 1/3 by angle."""

    def worth(self, utility: Utility) -> float:
        """See `WorthOfNobody.worth`."""
        return float(utility.value(np.zeros(()), np.zeros(()), 1.0))


@dataclass(frozen=True, slots=True)
class Nothing:
    """0, which is what the paper does: whoever is not there earns nothing, and whoever is there something."""

    def worth(self, utility: Utility) -> float:  # noqa: ARG002
        """See `WorthOfNobody.worth`."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGame:
    """How a round becomes a game.

    Args:
        distance: What being close to the reference means.
        scale: How long the reference is taken to be.
        nobody: What the empty coalition is worth.
    """

    distance: Distance = Euclidean()
    scale: ReferenceScale = MedianNorm()
    nobody: WorthOfNobody = ZeroUpdate()

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"distance={self.distance!r}, scale={self.scale!r}, nobody={self.nobody!r}"

    def of(self, gram: Gram) -> Game:
        """The game of a round; client i is row i.

        Raises:
            ValueError: If there is no reference, or it is zero.
        """
        if gram.known_reference().square == 0:
            raise ValueError("expected a reference that is not zero")
        utility, matrix = self.distance.game(gram, self.scale)
        reference = matrix.known_reference()
        return Game(products=matrix.products, linear=reference.products, utility=utility, empty=self.nobody.worth(utility), seed=gram.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTsv:
    """Mean of the updates, weighted by each client's cumulative trajectory Shapley value, where that is positive.

    Args:
        game: What a coalition of this round is worth.
        estimator: How Shapley values are computed.

    Example:
        >>> import numpy as np
        >>> reference = Reference(products=np.array([4.0, 4.0, -4.0]), square=4.0)
        >>> gram = Gram(names=("a", "b", "c"), size=9, products=np.array([[4.0, 4, -4], [4, 4, -4], [-4, -4, 4]]), reference=reference)
        >>> scores, mixture = FedTsv().step({}, gram)
        >>> {name: round(share, 3) for name, share in mixture.shares.items()}
        {'a': 0.5, 'b': 0.5, 'c': 0.0}
    """

    needs_gram: ClassVar[Literal[True]] = True

    game: TrajectoryGame = field(default_factory=TrajectoryGame)
    estimator: Estimator = field(default_factory=Automatic)

    @classmethod
    def published(cls) -> "FedTsv":
        """As the paper has it."""
        return cls(game=TrajectoryGame(distance=Euclidean(), scale=AsSent(), nobody=Nothing()))

    @property
    def needs_reference(self) -> bool:
        """It does."""
        return True

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"FedTsv({self.game.name}, estimator={self.estimator.name})"

    def scores(self, gram: Gram) -> dict[str, float]:
        """The Shapley value of each client in this round alone. They sum to the worth of all minus the worth of nobody.

        Raises:
            ValueError: If there is no reference, or it is zero.
        """
        in_order = gram.take(sorted(gram.names))  # so that sampled permutations do not depend on the order of the rows
        values = dict(zip(in_order.names, self.estimator.values(self.game.of(in_order)).tolist(), strict=True))
        return {name: values[name] for name in gram.names}

    def step(self, scores: Mapping[str, float], gram: Gram) -> tuple[dict[str, float], Mixture]:
        """See `CumulativeRule.step`. If no participant has a positive score, all count alike.

        Raises:
            ValueError: If there is no reference, or it is zero.
        """
        after = added(scores, self.scores(gram))
        return after, positive_mixture(after, gram)


def added(scores: Mapping[str, float], of_round: Mapping[str, float]) -> dict[str, float]:
    """Cumulative scores with those of a round; absent clients keep theirs."""
    return dict(scores) | {name: scores.get(name, 0.0) + score for name, score in of_round.items()}


def positive_mixture(scores: Mapping[str, float], gram: Gram) -> Mixture:
    """Weights of the clients of a round: their scores where positive; if none is, all alike."""
    weights = {name: scores[name] if scores[name] > _ROUNDING else 0.0 for name in gram.names}
    return Mixture(weights=weights if any(weights.values()) else dict.fromkeys(gram.names, 1.0))

"""What a rule decides: in what proportions the updates of a round are mixed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from privfed.aggregation.linear import apportion
from privfed.errors import CohortError
from privfed.update import PlainVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The model moves by `scale` times the weighted mean of the updates, plus `reference_share` times the reference.

    Only the weighted mean is summed (and, under encryption, opened); its opener does the rest, from numbers that all know.

    Args:
        weights: Weight of each client, by name: finite, at least 0, one of them positive.
        scale: Factor on the weighted mean, finite, from 0. Below 1 where a rule shortens updates.
        reference_share: Factor on the reference, which only a rule about a known centre has; finite.

    Raises:
        ValueError: If a number is out of range.
    """

    weights: Mapping[str, float]
    scale: float = 1.0
    reference_share: float = 0.0

    def __post_init__(self) -> None:
        weights = {name: float(weight) for name, weight in self.weights.items()}
        if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights.values()) or not any(weights.values()):
            raise ValueError("expected finite weights from 0 with at least one positive, got others")
        if not (math.isfinite(self.scale) and self.scale >= 0 and math.isfinite(self.reference_share)):
            raise ValueError(f"expected a finite scale from 0 and a finite reference_share, got {self.scale} and {self.reference_share}")
        object.__setattr__(self, "weights", MappingProxyType(weights))

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of each client in the weighted mean, summing to 1."""
        largest = max(self.weights.values())  # first, so that the sum cannot overflow
        relative = {name: weight / largest for name, weight in self.weights.items()}
        whole = math.fsum(relative.values())
        return {name: weight / whole for name, weight in relative.items()}

    def coefficients(self, *, total: int) -> dict[str, int]:
        """Integer coefficients with a sum of at most `total`; see `apportion`."""
        return apportion(self.weights, total=total)

    def without(self, names: Collection[str]) -> Self:
        """The mixture with nothing of the named clients.

        Raises:
            CohortError: If nobody with a positive weight is left.
        """
        weights = {name: 0.0 if name in names else weight for name, weight in self.weights.items()}
        if not any(weights.values()):
            raise CohortError("no client with a positive weight is left; nothing was summed")
        return replace(self, weights=weights)

    def moved(self, mean: PlainVector, reference: PlainVector | None = None) -> PlainVector:
        """How the model moves, given the weighted mean of the updates.

        Args:
            mean: Mean of the updates, weighted by the coefficients.
            reference: The reference; needed where `reference_share` is not 0.

        Raises:
            ValueError: If the reference is missing.
            LayoutMismatchError: If the reference has another layout than the mean.
        """
        if self.scale == 1 and self.reference_share == 0:
            return mean
        if self.reference_share == 0:
            return PlainVector(layout=mean.layout, values=self.scale * mean.values)
        if reference is None:
            raise ValueError("expected the reference, of which this mixture has a share, got none")
        return PlainVector(layout=mean.layout, values=self.scale * mean.values + self.reference_share * reference.values)

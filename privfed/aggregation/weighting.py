"""Who applies the public weights: the server to ciphertexts, or each client before it encrypts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from privfed.aggregation.rules import WeightRule
from privfed.he.params import CkksParams


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """The weights of a session, and what follows from them for a round. Public; every party computes it for itself.

    Where the server applies the weights, the coefficients of a round are apportioned among those who answered. Where the clients
    pre-scale, each multiplies by its share of the weights of *all* clients, before anybody knows who answers; a mean is then
    divided by the share that those who answered hold together. Coefficients and shares are public, so the division is exact.

    Args:
        weights: Weight of every client, by name.
        rule: How coefficients follow from the weights.
        params: Who applies them, and the largest sum.

    Raises:
        ValueError: If the rule cannot express the weights, or, where the clients pre-scale, there are more clients than the parameters
            have room for, or one holds more than half of all weights.

    Example:
        >>> from privfed.aggregation.rules import FedAvg
        >>> terms = {"weights": {"a": 1, "b": 2, "c": 1}, "rule": FedAvg()}
        >>> Weighting(**terms, params=CkksParams.standard()).divisor(["a", "b"])
        Fraction(3, 1)
        >>> prescaled = Weighting(**terms, params=CkksParams.parity(clients=3))
        >>> prescaled.share("b"), prescaled.divisor(["a", "b"])
        (Fraction(1, 2), Fraction(3, 4))
    """

    weights: Mapping[str, float]
    rule: WeightRule
    params: CkksParams

    def __post_init__(self) -> None:
        if not self.params.prescaled:
            return
        if len(self.weights) > self.params.weight_sum:
            raise ValueError(f"expected at most {self.params.weight_sum} clients for these parameters, got {len(self.weights)}")
        largest = max(self._all, key=lambda name: self._all[name])
        if 2 * self._all[largest] > sum(self._all.values()):
            raise ValueError(
                f"expected at most half of all weights for {largest!r}, because the clients pre-scale; take parameters with which the "
                "server applies the weights, for example CkksParams.standard"
            )

    @cached_property
    def _all(self) -> dict[str, int]:
        return self.rule.coefficients(self.weights, total=self.params.weight_total)

    def coefficients(self, participants: Collection[str]) -> dict[str, int]:
        """Integer weight of each participant in the mean, in the order of the weights. Policies look at these.

        Raises:
            ValueError: As the rule.
        """
        if self.params.prescaled:
            return {name: coefficient for name, coefficient in self._all.items() if name in participants}
        weights = {name: weight for name, weight in self.weights.items() if name in participants}
        return self.rule.coefficients(weights, total=self.params.weight_total)

    def share(self, name: str) -> Fraction | None:
        """What a client multiplies its update by before it encrypts: its share of all weights, or None where the server does it."""
        return Fraction(self._all[name], sum(self._all.values())) if self.params.prescaled else None

    def divisor(self, participants: Collection[str]) -> Fraction:
        """What the opened sum of these participants is divided by."""
        total = sum(self.coefficients(participants).values())
        return Fraction(total, sum(self._all.values()) if self.params.prescaled else 1)

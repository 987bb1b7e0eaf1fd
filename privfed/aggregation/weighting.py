"""Who applies the public weights: the server to ciphertexts, or each client before it encrypts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from privfed.aggregation.rules import FedAvg, WeightRule
from privfed.dp.silo import SiloNoise
from privfed.errors import InsufficientCapacityError, UnsupportedInThisModeError
from privfed.he.params import CkksParams


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """The weights of a session, and what follows from them for a round. Public; every party computes it for itself.

    Where the server applies the weights, the coefficients of a round are apportioned among those who answered. Where the clients
    pre-scale, each multiplies by its share of the weights of *all* clients, before anybody knows who answers; a mean is then
    divided by the share that those who answered hold together. Coefficients and shares are public, so the division is exact.

    With `SiloNoise` the clients apply whole weights before they add their noise, the server only adds, and a mean is over the weights
    of all clients, whoever answers: who does not counts as an update of zeros.

    Args:
        weights: Weight of every client, by name.
        rule: How coefficients follow from the weights.
        params: Who applies them, and the largest sum.
        silo: The noise that protects whole silos, if there is any.

    Raises:
        ValueError: If the rule cannot express the weights, or, where the clients pre-scale, there are more clients than the parameters
            have room for, or one holds more than half of all weights; or if the noise was agreed for other weights.
        UnsupportedInThisModeError: If silo noise meets another rule than FedAvg, or parameters for which the clients pre-scale.
        InsufficientCapacityError: If the parameters do not hold the updates with their noise.

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
    silo: SiloNoise | None = None

    def __post_init__(self) -> None:
        if self.silo is not None:
            self._check_silo(self.silo)
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

    def _check_silo(self, silo: SiloNoise) -> None:
        if not isinstance(self.rule, FedAvg) or self.params.prescaled:
            raise UnsupportedInThisModeError(
                f"noise for whole silos needs {FedAvg().name} and parameters for which the clients do not pre-scale, got {self.rule.name}; "
                "a coefficient that is chosen after the noise voids its promise; nothing was agreed; take CkksParams.standard"
            )
        if dict(silo.weights) != dict(self.weights):
            raise ValueError("expected the weights for which the silo noise was made, got others")
        silo.check_capacity(amplitude=self.params.amplitude, weight_sum=self.params.weight_sum)
        if silo.denominator > self.params.weight_sum:
            raise InsufficientCapacityError(
                f"the weights add up to {silo.denominator} and the parameters hold {self.params.weight_sum}; nothing was agreed; take "
                "smaller weights of the same proportions"
            )

    @cached_property
    def _all(self) -> dict[str, int]:
        if self.silo is not None:
            return dict(self.silo.weights)
        return self.rule.coefficients(self.weights, total=self.params.weight_total)

    def coefficients(self, participants: Collection[str]) -> dict[str, int]:
        """Integer weight of each participant in the mean, in the order of the weights. Policies look at these.

        Raises:
            ValueError: As the rule.
        """
        present = frozenset(participants)
        if self.silo is not None or self.params.prescaled:
            return {name: coefficient for name, coefficient in self._all.items() if name in present}
        weights = {name: weight for name, weight in self.weights.items() if name in present}
        return self.rule.coefficients(weights, total=self.params.weight_total)

    def share(self, name: str) -> Fraction | None:
        """What a client that pre-scales multiplies its update by before it encrypts: its share of all weights; else None."""
        return Fraction(self._all[name], sum(self._all.values())) if self.params.prescaled else None

    def multipliers(self, coefficients: Sequence[int]) -> tuple[int, ...]:
        """What the server multiplies the ciphertexts by: these coefficients, or 1 each where the clients applied them."""
        return (1,) * len(coefficients) if self.silo is not None else self.params.multipliers(coefficients)

    def divisor(self, participants: Collection[str]) -> Fraction:
        """What the opened sum of these participants is divided by."""
        if self.silo is not None:
            return Fraction(self.silo.denominator)
        total = sum(self.coefficients(participants).values())
        return Fraction(total, sum(self._all.values()) if self.params.prescaled else 1)

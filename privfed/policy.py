"""When an aggregate may be opened."""

from collections.abc import Mapping
from dataclasses import dataclass

from privfed.errors import OpeningRefusedError
from privfed.update import effective_clients


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningPolicy:
    """When an aggregate may be opened: enough clients are in it, and no client is most of it. Public.

    Args:
        min_clients: Fewest clients with a positive coefficient. At least 2: an aggregate of one client is its update.
        max_share: Largest share of one client in the sum of the coefficients, above 0 and below 1.
        min_effective_clients: Smallest effective number of clients, (sum c)^2 / sum c^2, of coefficients that a rule chose after it saw
            inner products of the updates. At least 1. Agreed weights are not held to it.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> OpeningPolicy(min_clients=3, max_share=0.75).check({"a": 5, "b": 3, "c": 2})
    """

    min_clients: int = 3
    max_share: float = 0.75
    min_effective_clients: float = 2.0

    def __post_init__(self) -> None:
        if type(self.min_clients) is not int or not 2 <= self.min_clients < 2**32:
            raise ValueError(f"expected min_clients to be a whole number from 2, below 2^32, got {self.min_clients!r}")
        if not isinstance(self.max_share, float) or not 0 < self.max_share < 1:
            raise ValueError(f"expected max_share between 0 and 1, got {self.max_share!r}")
        if not isinstance(self.min_effective_clients, float) or not 1 <= self.min_effective_clients < 2**32:
            raise ValueError(f"expected min_effective_clients from 1, below 2^32, got {self.min_effective_clients!r}")

    def check(self, coefficients: Mapping[str, int]) -> None:
        """Refuses coefficients under which an opening would show too much of one client.

        Args:
            coefficients: Non-negative integer coefficient of each participant, by name.

        Raises:
            OpeningRefusedError: If too few clients have a positive coefficient, or one has too large a share.
        """
        positive = [coefficient for coefficient in coefficients.values() if coefficient > 0]
        if len(positive) < self.min_clients:
            raise OpeningRefusedError(
                f"{len(positive)} clients have a positive coefficient and the policy demands {self.min_clients}; nothing was opened"
            )
        if max(positive) / sum(positive) > self.max_share:
            raise OpeningRefusedError(
                f"one client would be more than {self.max_share:.0%} of the aggregate "
                f"({effective_clients(positive):.2f} effective clients); nothing was opened"
            )

    def check_chosen(self, coefficients: Mapping[str, int]) -> None:
        """Refuses coefficients that a rule chose after it saw inner products, if they would show too much of one client.

        Raises:
            OpeningRefusedError: As `check`; or if too few clients are effective.
        """
        self.check(coefficients)
        effective = effective_clients(tuple(coefficients.values()))
        if effective < self.min_effective_clients:
            raise OpeningRefusedError(
                f"the rule leaves {effective:.2f} effective clients, the policy demands {self.min_effective_clients:g}; nothing was opened"
            )

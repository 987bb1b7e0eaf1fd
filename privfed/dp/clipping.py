"""Adaptive clipping at record level: a clipping norm that follows a quantile of the gradients' norms, paid for with noise.

Andrew, Thakkar, McMahan and Ramaswamy, 2021, arXiv:1905.03871, algorithm 1. Every step clips to its own norm, and the noise of the
step is in multiples of that same norm. Which share of the batch was below it is counted with noise and moves the norm of the next
step. The norm is then a function of released numbers: it may be printed.
"""

import math
from dataclasses import dataclass

from privfed.dp.mechanism import AdaptivelyClippedGaussian, check_noise, check_real

# Gradients are float32: what is far smaller or larger is a mistake of units, and squares of it may leave the range.
LEAST_NORM = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """How the clipping norm follows the gradients. All of it is public.

    Args:
        initial_norm: Clipping norm of the first step, from 1e-12 to 1e12.
        target_quantile: Share of the records that should be below the norm, above 0 and below 1.
        learning_rate: How fast the norm moves: by at most about this factor's exponential per step. From 1e-9 to 100.
        count_noise: Standard deviation of the noise on the count of records below the norm, from 1e-9 to 1e9.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> clipping = AdaptiveClipping(initial_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=10.0)
        >>> clipping.next_norm(1.0, noised_count=256.0, expected_batch_size=512) < 1.0
        True
    """

    initial_norm: float
    target_quantile: float
    learning_rate: float
    count_noise: float

    def __post_init__(self) -> None:
        check_real("initial_norm", self.initial_norm, least=LEAST_NORM, most=1 / LEAST_NORM)
        check_real("learning_rate", self.learning_rate, least=1e-9, most=100.0)
        check_noise("count_noise", self.count_noise)
        check_real("target_quantile", self.target_quantile, least=0.0, most=1.0)
        if self.target_quantile in {0.0, 1.0}:
            raise ValueError(f"expected target_quantile to be above 0 and below 1, got {self.target_quantile}")

    def sum_noise_multiplier(self, noise_multiplier: float) -> float:
        """The noise on the sum, in multiples of the clipping norm, with which both releases cost what one of `noise_multiplier` costs.

        z' = (z^-2 - (2 s)^-2)^(-1/2), theorem 1.

        Raises:
            ValueError: If the count alone would cost as much: `count_noise` must be above half of the noise multiplier.
        """
        left = noise_multiplier**-2 - (2 * self.count_noise) ** -2
        if not left > 0:
            raise ValueError(f"expected count_noise above half of the noise multiplier {noise_multiplier}, got {self.count_noise}")
        return left**-0.5

    def event(self, *, noise_multiplier: float, sample_rate: float, steps: int) -> AdaptivelyClippedGaussian:
        """What steps cost whose sums carry the noise of `sum_noise_multiplier`: as much as plain steps of `noise_multiplier`."""
        return AdaptivelyClippedGaussian(
            noise_multiplier=self.sum_noise_multiplier(noise_multiplier),
            count_noise=self.count_noise,
            sample_rate=sample_rate,
            steps=steps,
        )

    def next_norm(self, norm: float, *, noised_count: float, expected_batch_size: int) -> float:
        """The clipping norm of the next step.

        Args:
            norm: Clipping norm of this step.
            noised_count: Over the records of the batch, the sum of 1/2 for each that was not clipped and of -1/2 for each that was,
                plus noise of standard deviation `count_noise`. Centred, because its sensitivity is then 1/2, not 1.
            expected_batch_size: What the count is divided by: declared, never the real size.
        """
        share = min(max(noised_count / expected_batch_size + 0.5, 0.0), 1.0)
        return norm * math.exp(-self.learning_rate * (share - self.target_quantile))

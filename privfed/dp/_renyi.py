"""Renyi divergences of single steps, for quick brackets, for integer noise, and for jobs that adapt to what they see.

They add up under composition, and convert to epsilon (Canonne, Kamath and Steinke, 2020, arXiv:2004.00010v4, proposition 12).
"""

import math
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from privfed.dp.mechanism import DiscreteGaussianSum, GaussianRelease, PoissonSampledGaussian

# What has known Renyi divergences, each standing for one step or release, for data sets of which one has one unit more.
RenyiStep: TypeAlias = GaussianRelease | PoissonSampledGaussian | DiscreteGaussianSum
RenyiSteps: TypeAlias = tuple[tuple[RenyiStep, int], ...]

# Whole numbers, for which the divergence of a sampled Gaussian is a finite sum.
WHOLE_ORDERS: Final = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024], np.float64)
# 4 % apart: epsilon is within 0.03 % of its minimum over all orders.
FINE_ORDERS: Final = 1 + 2.0 ** (np.arange(-64, 161) / 16)

# Few, because each takes its part of delta.
FILTER_ORDERS: Final = np.array([2, 3, 4, 6, 8, 12, 16, 32, 64], np.float64)

# Noise so large that it does not fit into the encryption is refused. That happens with probability at most 2^-128 in a sum, and up
# to epsilon 50 it costs at most (1 + exp(50)) * 2^-128 of delta.
OVERFLOW_DELTA: Final = 2.0**-55


def renyi_epsilon(steps: RenyiSteps, *, delta: float) -> float:
    """Epsilon of all steps together, never below the true value."""
    sampled = any(isinstance(step, PoissonSampledGaussian) for step, _ in steps)
    orders = WHOLE_ORDERS if sampled else FINE_ORDERS
    sums = sum(count for step, count in steps if isinstance(step, DiscreteGaussianSum))
    usable_delta = delta - sums * OVERFLOW_DELTA
    if usable_delta <= 0:
        return math.inf
    found = float(np.min(_total(steps, orders) + _conversion(orders, usable_delta)))
    return max(0.0, found) if not sums or found <= 50 else math.inf


def filtered_epsilon(steps: RenyiSteps, *, delta: float) -> float:
    """What a filter compares with a budget: as long as it is within, the budget's epsilon and delta hold.

    Even if the parameters of steps were chosen after looking at the outcomes of earlier ones. At one order that is fixed
    beforehand, this is a proven filter (Feldman and Zrnic, 2021, arXiv:2008.11193, section 4; Lecuyer, 2021, arXiv:2103.01379,
    theorem 1). With an equal part of delta for each of several orders, it is enough that one of them is within: each outcome
    belongs to an order that was, and those of one order together are bounded by its filter.
    """
    if not steps:
        return 0.0
    sums = sum(count for step, count in steps if isinstance(step, DiscreteGaussianSum))
    usable_delta = (delta - sums * OVERFLOW_DELTA) / FILTER_ORDERS.size
    if usable_delta <= 0:
        return math.inf
    return max(0.0, float(np.min(_total(steps, FILTER_ORDERS) + _conversion(FILTER_ORDERS, usable_delta))))


def _conversion(orders: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    return np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)


def _total(steps: RenyiSteps, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.zeros_like(orders)
    for step, count in steps:
        total += count * _divergence(step, orders)
    return total


def _divergence(step: RenyiStep, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    match step:
        case GaussianRelease():
            return orders / (2 * step.noise_multiplier**2)
        case PoissonSampledGaussian():
            return np.array([_sampled_gaussian(step, int(order)) for order in orders])
        case DiscreteGaussianSum():
            return _discrete_gaussian_sum(step, orders)


def _sampled_gaussian(step: PoissonSampledGaussian, order: int) -> float:
    """Mironov, Talwar and Zhang, 2019, arXiv:1908.10530, section 3.3, for a whole order."""
    drawn = np.arange(order + 1, dtype=np.float64)
    terms = log_binomial(order, step.sample_rate) + drawn * (drawn - 1) / (2 * step.noise_multiplier**2)
    return float(np.logaddexp.reduce(terms)) / (order - 1)


def log_binomial(trials: int, probability: float) -> NDArray[np.float64]:
    """Logarithms of the probabilities of 0 to `trials` successes, for a probability above 0 and below 1."""
    successes = np.arange(trials + 1, dtype=np.float64)
    factorials = np.append(0.0, np.cumsum(np.log(successes[1:])))
    choices = factorials[-1] - factorials - factorials[::-1]
    return choices + (trials - successes) * math.log1p(-probability) + successes * math.log(probability)


def _discrete_gaussian_sum(step: DiscreteGaussianSum, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kairouz, Liu and Steinke, 2021, arXiv:2102.06387, proposition 14. With one share, tau is 0: one discrete Gaussian."""
    variance = step.shares * step.share_variance
    l2, l1 = step.l2_sensitivity / math.sqrt(variance), step.l1_sensitivity / math.sqrt(variance)
    tau = 10 * math.fsum(math.exp(-2 * math.pi**2 * step.share_variance * k / (k + 1)) for k in range(1, step.shares))
    one = orders * l2**2 / 2 + tau * step.coordinates
    two = orders / 2 * (l2**2 + 2 * l1 * tau + tau**2 * step.coordinates)
    three = orders / 2 * (l2 + tau * math.sqrt(step.coordinates)) ** 2
    return np.minimum(np.minimum(one, two), three)

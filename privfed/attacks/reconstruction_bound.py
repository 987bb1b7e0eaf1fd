"""How often any attacker can tell at most which of several candidates was trained on: the limit that measured attacks stand beside."""

import math

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.special import ndtr, ndtri

from privfed.dp.mechanism import PoissonSampledGaussian

# Steps of losses and of epsilons; finer ones move the bound by less than 1e-4.
_LOSS_STEP, _FURTHEST, _STEP = 1e-3, 15.0, 0.02


def reconstruction_bound(event: PoissonSampledGaussian, *, candidates: int) -> float:
    """Largest probability with which the right one of equally likely candidates is named, whoever tries and whatever else they know.

    An attacker that names one of K candidates is right once in K times when none of them takes part. Taking part can raise that to
    what the trade-off function of DP-SGD allows (Hayes et al., 2023, arXiv:2302.07225, theorem 2): 1 - Phi(Phi^-1(1 - 1/K) - mu) with
    mu = sqrt(steps) / noise_multiplier where every step takes all records, and min over epsilon of delta(epsilon) + exp(epsilon) / K
    for sampled ones.

    Args:
        event: What was released: all steps of all rounds that the record could be in.
        candidates: Number of candidates, at least 2.

    Raises:
        ValueError: If there are fewer than two candidates.

    Example:
        >>> event = PoissonSampledGaussian(noise_multiplier=0.6002, sample_rate=1.0, steps=1)  # epsilon 8 at delta 1e-5
        >>> round(reconstruction_bound(event, candidates=10), 3)
        0.65
    """
    if candidates < 2:
        raise ValueError(f"expected at least two candidates, got {candidates}")
    if event.sample_rate == 1:
        return float(ndtr(math.sqrt(event.steps) / event.noise_multiplier - ndtri(1 - 1 / candidates)))
    # The distribution rounds losses up, so delta is at most too large, and every epsilon of the list gives a bound.
    one = from_gaussian_mechanism(event.noise_multiplier, sampling_prob=event.sample_rate, value_discretization_interval=_LOSS_STEP)
    losses = one.self_compose(event.steps)
    epsilons = math.log(candidates) - np.arange(_FURTHEST, -_STEP / 2, -_STEP)
    return float(min(1.0, (losses.get_delta_for_epsilon(epsilons) + np.exp(epsilons) / candidates).min()))

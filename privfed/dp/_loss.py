"""Privacy loss distributions of single steps, and of many together, on one grid of losses.

Everything of dp-accounting's distributions ends here. They are upper bounds: connect the dots, Doroshenko et al., 2022,
arXiv:2207.04380, algorithm 1.
"""

import math
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_truncated_subsampled_gaussian_mechanism,
)
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
from numpy.typing import NDArray

from privfed.dp._renyi import log_binomial
from privfed.dp.mechanism import CappedPoissonSampledGaussian, CustomerSampledGaussian, GaussianRelease, PoissonSampledGaussian, Relation

# What has a privacy loss distribution, each standing for one step or release.
Step: TypeAlias = GaussianRelease | PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian
Steps: TypeAlias = tuple[tuple[Step, int], ...]  # each kind once, with how many there were

_STEPS_AT_ONCE: Final = 100_000  # beyond, dp-accounting bounds the sum's tails so loosely that it is twenty times slower
_HALVINGS: Final = 70  # of an interval below 2^16 standard deviations: to the last bit of a double

_RELATIONS: Final = {
    Relation.ADD_OR_REMOVE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    Relation.ZERO_OUT_ONE: NeighboringRelation.REPLACE_SPECIAL,
}


@lru_cache(maxsize=64)
def compose(steps: Steps, grid: float, relation: Relation) -> PrivacyLossDistribution:
    """The distribution of all steps together.

    Halves are composed and kept: when one kind of step becomes more, as many compositions are needed as a tree of kinds is high.

    Args:
        steps: At least one kind.
        grid: Distance of two losses.
        relation: How neighbouring data sets differ.
    """
    if len(steps) == 1:
        ((step, count),) = steps
        return _self_composed(step, count, grid, relation)
    half = len(steps) // 2
    return compose(steps[:half], grid, relation).compose(compose(steps[half:], grid, relation))


@lru_cache(maxsize=32)
def _self_composed(step: Step, count: int, grid: float, relation: Relation) -> PrivacyLossDistribution:
    single = _single(step, grid, relation)
    if count <= _STEPS_AT_ONCE:
        return single.self_compose(count)
    inner = math.isqrt(count)
    outer, rest = divmod(count, inner)
    composed = single.self_compose(inner).self_compose(outer)
    return composed.compose(single.self_compose(rest)) if rest else composed


@lru_cache(maxsize=64)
def _single(step: Step, grid: float, relation: Relation) -> PrivacyLossDistribution:
    neighbours = _RELATIONS[relation]
    match step:
        case GaussianRelease():
            return from_gaussian_mechanism(
                step.noise_multiplier, value_discretization_interval=grid, use_connect_dots=True, neighboring_relation=neighbours
            )
        case PoissonSampledGaussian():
            return from_gaussian_mechanism(
                step.noise_multiplier,
                sampling_prob=step.sample_rate,
                value_discretization_interval=grid,
                use_connect_dots=True,
                neighboring_relation=neighbours,
            )
        case CappedPoissonSampledGaussian():
            # Removing a record from a full batch lets another one in (arXiv:2508.15089).
            return from_truncated_subsampled_gaussian_mechanism(
                dataset_size=step.max_records,
                sampling_probability=step.sample_rate,
                truncated_batch_size=step.capacity,
                noise_multiplier=step.noise_multiplier,
                value_discretization_interval=grid,
                use_connect_dots=True,
                neighboring_relation=neighbours,
            )
        case CustomerSampledGaussian():
            if relation is Relation.REPLACE_ONE:
                raise ValueError(
                    "expected customers to be added, removed or zeroed out, got Relation.REPLACE_ONE: no bound is known for it"
                )
            return _mixture(step, grid)


class _Mixture(MixtureGaussianPrivacyLoss):
    """dp-accounting's loss of a mixture of Gaussians, inverted at all points at once: ten times faster, and to the last bit."""

    def inverse_privacy_losses(self, privacy_losses: NDArray[np.float64], precision: float = 0.0) -> NDArray[np.float64]:
        del precision
        sign = 1.0 if self.adjacency_type is AdjacencyType.ADD else -1.0
        constants, slopes = self._precompute_privacy_loss_constants[:, None], sign * (self.sensitivities / self._variance)[:, None]
        reach = 100 * self._standard_deviation + 2 * self._max_sens
        reach += float(np.abs(privacy_losses).max(initial=0)) * self._variance / self._min_sens
        low, high = np.full(privacy_losses.shape, -reach), np.full(privacy_losses.shape, reach)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            loss = -sign * np.logaddexp.reduce(constants + slopes * middle, axis=0)  # falls as the outcome grows
            low, high = np.where(loss > privacy_losses, middle, low), np.where(loss > privacy_losses, high, middle)
        return high


def _mixture(step: CustomerSampledGaussian, grid: float) -> PrivacyLossDistribution:
    """A customer of k records: how many of them a step draws is binomial, and the norms of what they contribute add up at most.

    Choquette-Choo et al., 2024, arXiv:2310.15526, corollary 4.7: no vectors are worse than the numbers 0 to k on one line.
    """
    drawn = np.arange(step.records_per_customer + 1, dtype=np.float64)
    probabilities = np.exp(log_binomial(step.records_per_customer, step.sample_rate))
    possible = probabilities > 0  # the others are too rare for a double
    pmfs: list[pld_pmf.PLDPmf] = []
    for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD):
        loss = _Mixture(
            step.noise_multiplier,
            drawn[possible],
            probabilities[possible] / probabilities[possible].sum(),
            adjacency_type=adjacency,
        )
        bounds = loss.connect_dots_bounds()
        lowest, highest = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
        deltas = loss.get_delta_for_epsilon(np.arange(lowest, highest + 1, dtype=np.float64) * grid)
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, lowest, highest, deltas))
    return PrivacyLossDistribution(*pmfs)

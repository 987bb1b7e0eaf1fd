"""What events cost: epsilon at a given delta, and the noise that a budget demands.

The result is an upper bound on the true epsilon for the relation `Relation.ADD_OR_REMOVE_ONE`: from dp-accounting's privacy
loss distributions (connect the dots; Doroshenko et al., 2022, arXiv:2207.04380, algorithm 1), or from the analytic
Gaussian (Balle and Wang, 2018, arXiv:1805.06530, theorem 8) where nothing was sampled. Opacus' accountants are here as
cross-checks only.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from typing import Final, Protocol, TypeAlias, cast

import dp_accounting
from dp_accounting import rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism

from privfed.dp.mechanism import Budget, Event, GaussianRelease, NonPrivateRelease, PoissonSampledGaussian, check_delta

ACCOUNTANT: Final = f"privacy loss distributions (connect the dots) and analytic Gaussian, dp-accounting {version('dp-accounting')}"

_GRID_UNIT: Final = 1e-3
_FINEST_GRID: Final = -6  # a sixty-fourth of the unit: beyond, one distribution takes seconds
_COARSEST_GRID: Final = 16
_STEPS_AT_ONCE: Final = 100_000  # beyond, dp-accounting bounds the sum's tails so loosely that it is twenty times slower
_LEAST_NOISE: Final = 0.01  # below, losses are in the thousands: a bound will do
_RENYI_ORDERS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
_DOUBLE_PRECISION: Final = 2.0**-52
_MOST_ROUNDS: Final = 1_000_000

# Aim 0.3 % below the budget, give or take 0.24 %: from round to round the grid may change, and epsilon with it by 0.05 %.
_CALIBRATION_AIM: Final = 0.003
_CALIBRATION_WINDOW: Final = 0.0024

_Charges: TypeAlias = tuple[tuple[tuple[float, float], int], ...]  # ((noise multiplier, sample rate), steps), sorted


def epsilon(events: Iterable[Event], *, delta: float) -> float:
    """Epsilon of all events together, at least 0; `math.inf` if any of them was not private.

    Never below the true value, and within 0.2 % of it, except where epsilon is below sqrt(steps) / 1000, a noise multiplier
    below 0.01, or delta below steps * 5e-16: there the bound is looser. Order does not matter, and an event of n steps costs
    what n events of one step cost. The events' parameters must not have been chosen after looking at earlier outcomes.

    Args:
        events: What happened to one data set. Public.
        delta: Above 0 and below 1.

    Raises:
        TypeError: If one of them is not a known event.
        ValueError: If delta is outside its range.

    Example:
        >>> round(epsilon([GaussianRelease(noise_multiplier=1.0)], delta=1e-5), 4)
        4.3772
    """
    check_delta(delta)
    charges = _charges(events)
    return math.inf if charges is None else _epsilon(_sorted(charges), delta)


def rounds_possible(event: Event, *, budget: Budget, charged: Iterable[Event] = ()) -> int:
    """How many more times an event fits into a budget, from 0 to 1,000,000 (which then means "at least").

    Args:
        event: What one round will do.
        budget: A limited budget.
        charged: What was already charged to it.

    Raises:
        TypeError: If one of them is not a known event.
        ValueError: If the budget is unlimited.
    """
    if not budget.limited:
        raise ValueError("expected a limited budget, got an unlimited one, into which everything fits")
    before, one = _charges(charged), _charges((event,))
    if before is None or one is None:
        return 0

    def fits(rounds: int) -> bool:
        total = before + Counter({key: rounds * steps for key, steps in one.items()})
        return _epsilon(_sorted(total), budget.delta) <= budget.epsilon

    if not fits(1):
        return 0
    possible, refused = 1, 2
    while refused < _MOST_ROUNDS and fits(refused):
        possible, refused = refused, 2 * refused
    refused = min(refused, _MOST_ROUNDS + 1)
    while refused - possible > 1:
        middle = (possible + refused) // 2
        possible, refused = (middle, refused) if fits(middle) else (possible, middle)
    return possible


def calibrate_noise_multiplier(budget: Budget, *, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which a whole job costs just less than a budget.

    The job costs at most epsilon, and at least 0.99 epsilon: never less private than asked, and less than 1 % noisier than
    needed. The job may be charged in rounds; each of them then fits.

    Args:
        budget: Limited, with epsilon up to 100.
        sample_rate: Probability that a step draws a given record, above 0 and up to 1.
        steps: Number of steps of the whole job, over all rounds.

    Raises:
        ValueError: If an argument is outside its range, or no noise multiplier from 0.1 to 10,000 fits.

    Example:
        >>> noise = calibrate_noise_multiplier(Budget(epsilon=2.0, delta=1e-5), sample_rate=0.01, steps=1000)
        >>> 1.98 < epsilon([PoissonSampledGaussian(noise_multiplier=noise, sample_rate=0.01, steps=1000)], delta=1e-5) <= 2
        True
    """
    if budget.epsilon > 100:
        raise ValueError(f"expected a budget with epsilon up to 100, got {budget.epsilon}, which protects nothing")
    job = PoissonSampledGaussian(noise_multiplier=1.0, sample_rate=sample_rate, steps=steps)

    def excess(log_noise: float) -> float:
        cost = epsilon((replace(job, noise_multiplier=math.exp(log_noise)),), delta=budget.delta)
        return math.log(max(cost, 1e-300) / budget.epsilon) + _CALIBRATION_AIM

    lowest, highest = math.log(0.1), math.log(10_000)
    guess = min(max(_central_limit_guess(budget, job), lowest), highest)
    too_little: tuple[float, float] | None = None  # logarithm of the noise multiplier, and excess there
    enough: tuple[float, float] | None = None
    for _ in range(60):
        found = excess(guess)
        if abs(found) <= _CALIBRATION_WINDOW:
            return math.exp(guess)
        last = guess
        if found > 0:
            too_little = (guess, found)
        else:
            enough = (guess, found)
        if too_little and enough:
            share = too_little[1] / (too_little[1] - enough[1])
            guess = too_little[0] + min(max(share, 0.05), 0.95) * (enough[0] - too_little[0])
        else:
            # Epsilon falls at least as fast as 1/noise, so this step reaches the other side; a factor of 2 at most.
            guess = min(max(guess + min(max(1.1 * found, -0.7), 0.7), lowest), highest)
        if guess == last:
            break
    raise ValueError(
        f"expected a budget that some noise multiplier from 0.1 to 10000 meets, got epsilon={budget.epsilon} and "
        f"delta={budget.delta} for {steps} steps at sample rate {sample_rate}; change the budget, or train for fewer steps"
    )


def epsilon_rdp(events: Iterable[Event], *, delta: float) -> float:
    """Epsilon by Opacus' Renyi accountant, as a cross-check: looser than `epsilon`. Same arguments and errors."""
    # Opacus loads torch. Only these cross-checks need it; the ledger must work without.
    from opacus.accountants import RDPAccountant  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return _opacus(RDPAccountant(), events, delta=delta)


def epsilon_prv(events: Iterable[Event], *, delta: float) -> float:
    """Epsilon by Opacus' privacy-random-variable accountant, as a cross-check: within 0.011 above. Same arguments and errors."""
    from opacus.accountants import PRVAccountant  # noqa: PLC0415 -- as above  # pyright: ignore[reportMissingTypeStubs]

    return _opacus(PRVAccountant(), events, delta=delta)


class _OpacusAccountant(Protocol):
    """The part of Opacus' accountants that is used here."""

    history: list[tuple[float, float, int]]

    def get_epsilon(self, delta: float) -> float: ...


def _opacus(accountant: object, events: Iterable[Event], *, delta: float) -> float:
    check_delta(delta)
    charges = _charges(events)
    if charges is None:
        return math.inf
    if not charges:
        return 0.0
    typed = cast("_OpacusAccountant", accountant)
    typed.history = [(noise_multiplier, sample_rate, steps) for (noise_multiplier, sample_rate), steps in _sorted(charges)]
    return float(typed.get_epsilon(delta=delta))


def _charges(events: Iterable[Event]) -> Counter[tuple[float, float]] | None:
    """Steps by (noise multiplier, sample rate), or None if anything was not private. Interprets events, nothing else does."""
    charges: Counter[tuple[float, float]] = Counter()
    private = True
    for event in events:
        match event:
            case PoissonSampledGaussian():
                charges[float(event.noise_multiplier), float(event.sample_rate)] += event.steps
            case GaussianRelease():
                charges[float(event.noise_multiplier), 1.0] += event.count
            case NonPrivateRelease():
                private = False
            case _:  # pyright: ignore[reportUnnecessaryComparison] -- callers without a type checker
                raise TypeError(f"expected an event of privfed.dp.mechanism, got {type(event).__name__}; it was not accounted")
    return charges if private else None


def _sorted(charges: Mapping[tuple[float, float], int]) -> _Charges:
    return tuple(sorted(charges.items()))


@lru_cache(maxsize=1024)
def _epsilon(charges: _Charges, delta: float) -> float:
    if not charges:
        return 0.0
    sampled = tuple(charge for charge in charges if charge[0][1] < 1)
    # Sampling never costs more than no sampling (the hockey-stick divergence is jointly convex): an upper bound to start from.
    bound = float(dp_accounting.get_epsilon_gaussian(_combined_noise(charges), delta))
    if not sampled or bound == 0:
        return bound
    bound = min(bound, _renyi_bound(charges, delta))
    steps = sum(count for _, count in sampled)
    # The Fourier transform to the power of `steps` is rounded: measured against the closed form, the result's delta is wrong
    # by about steps * 1e-17, either way. A Gaussian composed a million times came out 6 % too cheap at delta 1e-12.
    usable_delta = delta - steps * _DOUBLE_PRECISION
    if usable_delta < delta / 2 or any(noise_multiplier < _LEAST_NOISE for (noise_multiplier, _), _ in sampled):
        return bound
    unsampled = tuple(charge for charge in charges if charge[0][1] == 1)
    grid = math.inf
    while bound > 0 and _grid(bound, steps=steps) < grid:
        grid = _grid(bound, steps=steps)
        bound = min(bound, float(_compose(sampled, unsampled, grid).get_epsilon_for_delta(usable_delta)))
    return bound


def _combined_noise(charges: _Charges) -> float:
    """Noise multiplier of the one Gaussian that unsampled Gaussians compose to, exactly."""
    return math.fsum(steps / noise_multiplier**2 for (noise_multiplier, _), steps in charges) ** -0.5


def _grid(expected_epsilon: float, *, steps: int) -> float:
    """Width of the loss grid, a power of two times 1e-3, so that cached distributions can be composed.

    The relative error is about 3 (grid * sqrt(steps) / epsilon)^2: what matters is the grid against the loss of one step.
    The divisor 64 keeps it below 0.1 %. A grid that follows epsilon alone is 6 % off at a million steps.
    """
    wanted = expected_epsilon / max(300.0, 64.0 * math.sqrt(steps))
    exponent = math.floor(math.log2(wanted / _GRID_UNIT))
    return math.ldexp(_GRID_UNIT, min(max(exponent, _FINEST_GRID), _COARSEST_GRID))


def _compose(sampled: _Charges, unsampled: _Charges, grid: float) -> PrivacyLossDistribution:
    parts = [_self_composed(noise_multiplier, sample_rate, steps, grid) for (noise_multiplier, sample_rate), steps in sampled]
    if unsampled:
        parts.append(_single(_combined_noise(unsampled), 1.0, grid))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return total


@lru_cache(maxsize=32)
def _single(noise_multiplier: float, sample_rate: float, grid: float) -> PrivacyLossDistribution:
    return from_gaussian_mechanism(noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=grid, use_connect_dots=True)


@lru_cache(maxsize=16)
def _self_composed(noise_multiplier: float, sample_rate: float, steps: int, grid: float) -> PrivacyLossDistribution:
    single = _single(noise_multiplier, sample_rate, grid)
    if steps <= _STEPS_AT_ONCE:
        return single.self_compose(steps)
    inner = math.isqrt(steps)
    outer, rest = divmod(steps, inner)
    composed = single.self_compose(inner).self_compose(outer)
    return composed.compose(single.self_compose(rest)) if rest else composed


def _renyi_bound(charges: _Charges, delta: float) -> float:
    accountant = rdp.RdpAccountant(_RENYI_ORDERS)
    for (noise_multiplier, sample_rate), steps in charges:
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian), steps)
    return float(accountant.get_epsilon(delta))


def _central_limit_guess(budget: Budget, job: PoissonSampledGaussian) -> float:
    """Logarithm of a noise multiplier to start from (Bu et al., 2020, arXiv:1911.11607, corollary 4); never an answer."""
    separation = 1 / float(dp_accounting.get_sigma_gaussian(budget.epsilon, budget.delta))
    return -0.5 * math.log(math.log1p((separation / job.sample_rate) ** 2 / job.steps))

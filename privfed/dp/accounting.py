"""What events cost: epsilon at a given delta, and the noise that a budget demands.

The result is an upper bound on the true epsilon: from dp-accounting's privacy loss distributions, or from the analytic Gaussian
(Balle and Wang, 2018, arXiv:1805.06530, theorem 8) where nothing was sampled, or, for integer noise in several shares, from
Renyi divergences. Opacus' accountants are here as cross-checks only.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from typing import Final, Protocol, TypeVar, cast

import dp_accounting

from privfed.dp.charges import Charges, interpret
from privfed.dp.mechanism import (
    Budget,
    CappedPoissonSampledGaussian,
    CustomerSampledGaussian,
    Event,
    GaussianRelease,
    PoissonSampledGaussian,
    Relation,
    check_delta,
)

ACCOUNTANT: Final = (
    "privacy loss distributions (connect the dots), analytic Gaussian, and Renyi divergences for discrete Gaussian sums; "
    f"dp-accounting {version('dp-accounting')}"
)

MOST_CALIBRATED_NOISE: Final = 10_000.0
"""The largest noise multiplier that `calibrate` tries."""

_MOST_ROUNDS: Final = 1_000_000

# Aim 0.3 % below the budget, give or take 0.24 %: from round to round the grid may change, and epsilon with it by 0.05 %.
_CALIBRATION_AIM: Final = 0.003
_CALIBRATION_WINDOW: Final = 0.0024

_Noised = TypeVar("_Noised", bound=PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian | GaussianRelease)


def epsilon(events: Iterable[Event], *, delta: float, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> float:
    """Epsilon of all events together, at least 0; `math.inf` if any of them was not private.

    Never below the true value, and within 0.2 % of it, except where epsilon is below sqrt(steps) / 1000, a noise multiplier
    below 0.01, or delta below steps * 5e-16: there the bound is looser. It is looser as well for discrete Gaussian sums (their
    Renyi bound is some 5 % above), and where they stand beside events that have no known Renyi divergences (their epsilons at half
    of delta add up). Order does not matter, and an event of n steps costs what n events of one step cost. The events' parameters
    must not have been chosen after looking at earlier outcomes.

    Args:
        events: What happened to one data set. Public.
        delta: Above 0 and below 1.
        relation: How neighbouring data sets differ.

    Raises:
        TypeError: If one of them is not a known event.
        ValueError: If delta is outside its range, or no bound is known for the relation.

    Example:
        >>> round(epsilon([GaussianRelease(noise_multiplier=1.0)], delta=1e-5), 4)
        4.3772
        >>> round(epsilon([GaussianRelease(noise_multiplier=2.0)], delta=1e-5, relation=Relation.REPLACE_ONE), 4)
        4.3772
    """
    return Charges(events).epsilon(delta=delta, relation=relation)


def rounds_possible(event: Event, *, budget: Budget, charged: Iterable[Event] = (), relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> int:
    """How many more times an event fits into a budget, from 0 to 1,000,000 (which then means "at least").

    Args:
        event: What one round will do.
        budget: A limited budget.
        charged: What was already charged to it.
        relation: How neighbouring data sets differ.

    Raises:
        TypeError: If one of them is not a known event.
        ValueError: If the budget is unlimited.
    """
    if not budget.limited:
        raise ValueError("expected a limited budget, got an unlimited one, into which everything fits")
    before = Charges(charged)
    return most(lambda rounds: before.plus(event, times=rounds).epsilon(delta=budget.delta, relation=relation) <= budget.epsilon)


def most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, from 0 to 1,000,000, if every smaller one fits as well."""
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


def calibrate_noise_multiplier(budget: Budget, *, sample_rate: float, steps: int, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> float:
    """The noise multiplier with which a whole job costs just less than a budget. See `calibrate`, for this most common job.

    Args:
        budget: Limited, with epsilon up to 100.
        sample_rate: Probability that a step draws a given record, above 0 and up to 1.
        steps: Number of steps of the whole job, over all rounds.
        relation: How neighbouring data sets differ.

    Raises:
        ValueError: If an argument is outside its range, or no noise multiplier from 0.1 to 10,000 fits.

    Example:
        >>> noise = calibrate_noise_multiplier(Budget(epsilon=2.0, delta=1e-5), sample_rate=0.01, steps=1000)
        >>> 1.98 < epsilon([PoissonSampledGaussian(noise_multiplier=noise, sample_rate=0.01, steps=1000)], delta=1e-5) <= 2
        True
    """
    job = PoissonSampledGaussian(noise_multiplier=1.0, sample_rate=sample_rate, steps=steps)
    return calibrate(job, budget=budget, relation=relation).noise_multiplier


def calibrate(job: _Noised, *, budget: Budget, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> _Noised:
    """The job with the noise multiplier with which all of it costs just less than a budget.

    The job costs at most epsilon, and at least 0.99 epsilon: never less private than asked, and less than 1 % noisier than
    needed. The job may be charged in rounds; each of them then fits. The unit is the one that the event speaks of.

    Args:
        job: All steps of all rounds, with any noise multiplier.
        budget: Limited, with epsilon up to 100.
        relation: How neighbouring data sets differ.

    Raises:
        TypeError: If the budget is none.
        ValueError: If an argument is outside its range, or no noise multiplier from 0.1 to 10,000 fits.
    """
    if not isinstance(budget, Budget):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without a type checker
        raise TypeError(f"expected a Budget(epsilon=..., delta=...), got {type(budget).__name__}")
    if budget.epsilon > 100:
        raise ValueError(f"expected a budget with epsilon up to 100, got {budget.epsilon}, which protects nothing")

    def excess(log_noise: float) -> float:
        cost = epsilon((replace(job, noise_multiplier=math.exp(log_noise)),), delta=budget.delta, relation=relation)
        return math.log(max(cost, 1e-300) / budget.epsilon) + _CALIBRATION_AIM

    lowest, highest = math.log(0.1), math.log(MOST_CALIBRATED_NOISE)
    guess = min(max(_central_limit_guess(budget, job), lowest), highest)
    too_little: tuple[float, float] | None = None  # logarithm of the noise multiplier, and excess there
    enough: tuple[float, float] | None = None
    for _ in range(60):
        found = excess(guess)
        if abs(found) <= _CALIBRATION_WINDOW:
            return replace(job, noise_multiplier=math.exp(guess))
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
        f"delta={budget.delta} for {replace(job, noise_multiplier=1.0)}; change the budget, or train for fewer steps"
    )


def epsilon_rdp(events: Iterable[Event], *, delta: float) -> float:
    """Epsilon by Opacus' Renyi accountant, as a cross-check: looser than `epsilon`, for data sets of which one has a record more.

    Raises:
        TypeError: If one of them is not a known event.
        ValueError: If delta is outside its range, or Opacus has no such mechanism.
    """
    # Opacus loads torch. Only these cross-checks need it; the ledger must work without.
    from opacus.accountants import RDPAccountant  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return _opacus(RDPAccountant(), events, delta=delta)


def epsilon_prv(events: Iterable[Event], *, delta: float) -> float:
    """Epsilon by Opacus' privacy-random-variable accountant: within 0.011 above `epsilon`. Otherwise as `epsilon_rdp`."""
    from opacus.accountants import PRVAccountant  # noqa: PLC0415 -- as above  # pyright: ignore[reportMissingTypeStubs]

    return _opacus(PRVAccountant(), events, delta=delta)


class _OpacusAccountant(Protocol):
    """The part of Opacus' accountants that is used here."""

    history: list[tuple[float, float, int]]

    def get_epsilon(self, delta: float) -> float: ...


def _opacus(accountant: object, events: Iterable[Event], *, delta: float) -> float:
    check_delta(delta)
    history: list[tuple[float, float, int]] = []
    private = True
    for event in events:
        match interpret(event):
            case None:
                private = False
            case (GaussianRelease() as step, count):
                history.append((step.noise_multiplier, 1.0, count))
            case (PoissonSampledGaussian() as step, count):
                history.append((step.noise_multiplier, step.sample_rate, count))
            case (kind, _):
                raise ValueError(f"expected an event that Opacus can account, got {type(kind).__name__}")
    if not private:
        return math.inf
    if not history:
        return 0.0
    merged: Counter[tuple[float, float]] = Counter()
    for noise_multiplier, sample_rate, count in history:
        merged[noise_multiplier, sample_rate] += count
    typed = cast("_OpacusAccountant", accountant)
    typed.history = [(*key, count) for key, count in sorted(merged.items())]
    return float(typed.get_epsilon(delta=delta))


def _central_limit_guess(
    budget: Budget, job: PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian | GaussianRelease
) -> float:
    """Logarithm of a noise multiplier to start from (Bu et al., 2020, arXiv:1911.11607, corollary 4); never an answer."""
    sample_rate = 1.0 if isinstance(job, GaussianRelease) else job.sample_rate
    steps = job.count if isinstance(job, GaussianRelease) else job.steps
    separation = 1 / float(dp_accounting.get_sigma_gaussian(budget.epsilon, budget.delta))
    return -0.5 * math.log(math.log1p((separation / sample_rate) ** 2 / steps))

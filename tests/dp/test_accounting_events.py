"""What other events and other relations cost: against definitions, published bounds, and libraries."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism, from_mixture_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privfed.dp._renyi import FILTER_ORDERS, FINE_ORDERS, OVERFLOW_DELTA, WHOLE_ORDERS
from privfed.dp.accounting import calibrate, calibrate_noise_multiplier, epsilon, epsilon_prv, epsilon_rdp
from privfed.dp.charges import Charges
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.mechanism import (
    AdaptivelyClippedGaussian,
    Budget,
    CappedPoissonSampledGaussian,
    CustomerSampledGaussian,
    DiscreteGaussianSum,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Relation,
)

pytestmark = [  # all of them inside Opacus and dp-accounting
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

GRID_ERROR = 1e-3  # see accounting._grid; never negative
REPLACE = Relation.REPLACE_ONE
RATE, STEPS, DELTA = 512 / 1e5, 1955, 1e-6  # the job of the golden values: 10 epochs of 100,000 records in batches of 512


def records(noise_multiplier: float, sample_rate: float = RATE, steps: int = STEPS) -> PoissonSampledGaussian:
    return PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


def customers(noise_multiplier: float, count: int, sample_rate: float = RATE, steps: int = STEPS) -> CustomerSampledGaussian:
    return CustomerSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=sample_rate, records_per_customer=count, steps=steps)


def capped(max_records: int, capacity: int = 640) -> CappedPoissonSampledGaussian:
    return CappedPoissonSampledGaussian(noise_multiplier=1.0, sample_rate=RATE, capacity=capacity, max_records=max_records, steps=STEPS)


def hockey_stick_root(delta_of: Callable[[float], mpmath.mpf], delta: float) -> float:
    low, high = 1e-3, 60.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def mixture_delta(upper: list[tuple[float, float]], lower: list[tuple[float, float]], sigma: float, value: float) -> mpmath.mpf:
    """Hockey-stick divergence of two mixtures of Gaussians, given as (probability, mean), whose loss grows with the outcome."""
    e = mpmath.exp(value)

    def density(parts: list[tuple[float, float]], x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.fsum(p * mpmath.npdf(x, m, sigma) for p, m in parts)

    low, high = mpmath.mpf(-60 * sigma), mpmath.mpf(60 * sigma)
    for _ in range(120):
        middle = (low + high) / 2
        low, high = (low, middle) if density(upper, middle) > e * density(lower, middle) else (middle, high)
    tails = [mpmath.fsum(p * mpmath.ncdf((m - high) / sigma) for p, m in parts) for parts in (upper, lower)]
    return tails[0] - e * tails[1]


# --- replace-one ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise_multiplier", "count", "delta"), [(1.0, 1, 1e-5), (5.0, 50, 1e-5), (20.0, 7, 1e-9)])
def test_a_replaced_record_of_a_plain_release_costs_what_twice_the_sensitivity_costs(
    noise_multiplier: float, count: int, delta: float
) -> None:
    release = GaussianRelease(noise_multiplier=noise_multiplier, count=count)
    doubled = replace(release, noise_multiplier=noise_multiplier / 2)
    assert epsilon([release], delta=delta, relation=REPLACE) == epsilon([doubled], delta=delta)


def test_accountants_elsewhere_disagree_about_replaced_records_and_this_one_doubles() -> None:
    event = dp_accounting.GaussianDpEvent(2.0)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    losses, renyi = PLDAccountant(relation).compose(event), RdpAccountant(neighboring_relation=relation).compose(event)
    usual = RdpAccountant().compose(event)
    assert renyi.get_epsilon(1e-5) == usual.get_epsilon(1e-5)  # the trap: half the privacy loss
    ours = epsilon([GaussianRelease(noise_multiplier=2.0)], delta=1e-5, relation=REPLACE)
    assert ours == pytest.approx(losses.get_epsilon(1e-5), rel=1e-3)
    assert ours > 1.7 * renyi.get_epsilon(1e-5)


@pytest.mark.parametrize(("noise_multiplier", "sample_rate", "delta"), [(1.0, 0.01, 1e-5), (0.7, 0.3, 1e-6)])
def test_one_sampled_step_with_a_replaced_record_costs_what_the_definition_says(
    noise_multiplier: float, sample_rate: float, delta: float
) -> None:
    q = sample_rate
    with mpmath.workdps(40):
        exact = hockey_stick_root(lambda value: mixture_delta([(1 - q, 0), (q, 1)], [(1 - q, 0), (q, -1)], noise_multiplier, value), delta)
    found = epsilon([records(noise_multiplier, sample_rate, 1)], delta=delta, relation=REPLACE)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + GRID_ERROR)


# dp-accounting 0.6, PLDAccountant with REPLACE_ONE, grid 1e-4.
@pytest.mark.parametrize(
    ("job", "expected"),
    [((1.0, 0.01, 1000, 1e-5), 2.8434), ((1.1, 256 / 60000, 14063, 1e-5), 4.2219), ((4.0, 0.01, 10000, 1e-5), 1.9932)],
)
def test_sampled_steps_with_a_replaced_record_agree_with_dp_accounting(job: tuple[float, float, int, float], expected: float) -> None:
    *parameters, delta = job
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-4)
    gaussian = dp_accounting.GaussianDpEvent(parameters[0])
    reference = accountant.compose(dp_accounting.PoissonSampledDpEvent(parameters[1], gaussian), int(parameters[2])).get_epsilon(delta)
    assert reference == pytest.approx(expected, abs=2e-3)
    found = epsilon([records(*parameters)], delta=delta, relation=REPLACE)
    assert reference * (1 - 2e-3) <= found <= reference * (1 + 2e-3)


def test_calibration_keeps_a_budget_for_replaced_records_with_more_noise() -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    usual = calibrate_noise_multiplier(budget, sample_rate=0.01, steps=500)
    noise_multiplier = calibrate_noise_multiplier(budget, sample_rate=0.01, steps=500, relation=REPLACE)
    assert 1.98 <= epsilon([records(noise_multiplier, 0.01, 500)], delta=1e-5, relation=REPLACE) <= 2.0
    assert noise_multiplier > 1.1 * usual


# --- capped batches -------------------------------------------------------------------------------------------------------------


def test_a_capacity_of_one_and_a_quarter_batches_costs_nothing_at_the_declared_number_of_records() -> None:
    uncapped = epsilon([records(1.0)], delta=DELTA)
    assert uncapped == pytest.approx(1.4254, rel=GRID_ERROR)
    assert epsilon([capped(90_000)], delta=DELTA) == pytest.approx(uncapped, rel=1e-4)
    assert epsilon([capped(100_000)], delta=DELTA) == pytest.approx(1.4256, rel=GRID_ERROR)


# dp-accounting 0.6, TruncatedSubsampledGaussianDpEvent at grid 1e-3: 1.4993, 3.6259, 7.3949.
@pytest.mark.parametrize(("max_records", "expected"), [(105_000, 1.50), (110_000, 3.63), (120_000, 7.39)])
def test_a_capacity_costs_much_when_there_are_more_records_than_declared(max_records: int, expected: float) -> None:
    found = epsilon([capped(max_records)], delta=DELTA)
    assert found == pytest.approx(expected, abs=1e-2)
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(max_records, RATE, 640, 1.0)
    reference = PLDAccountant(value_discretization_interval=1e-3).compose(event, STEPS).get_epsilon(DELTA)
    assert found == pytest.approx(reference, rel=2e-3)


def test_what_is_declared_covers_every_smaller_number_of_records() -> None:
    prices = [epsilon([capped(max_records)], delta=DELTA) for max_records in (50_000, 90_000, 100_000, 104_000, 108_000)]
    assert all(smaller <= larger * (1 + GRID_ERROR) for smaller, larger in itertools.pairwise(prices))


@pytest.mark.parametrize("capacity", [200, 512])
def test_no_capped_batch_is_dearer_than_all_records_with_a_quarter_of_the_noise(capacity: int) -> None:
    found = epsilon([replace(capped(100_000, capacity), steps=20)], delta=DELTA)
    assert found <= epsilon([GaussianRelease(noise_multiplier=0.25, count=20)], delta=DELTA)


# --- customers --------------------------------------------------------------------------------------------------------------------


# dp-accounting 0.6, from_mixture_gaussian_mechanism at grid 1e-3: 1.43 for a record, 3.04 and 8.53 for two and five.
@pytest.mark.parametrize(("count", "expected"), [(1, 1.4254), (2, 3.037), (5, 8.531)])
def test_a_customer_with_more_records_pays_more(count: int, expected: float) -> None:
    assert epsilon([customers(1.0, count)], delta=DELTA) == pytest.approx(expected, rel=2e-3)


def test_a_mixture_inverted_at_once_is_what_dp_accounting_inverts_point_by_point() -> None:
    probabilities = [float(stats.binom.pmf(drawn, 3, 0.05)) for drawn in range(4)]
    reference = from_mixture_gaussian_mechanism(2.0, [0.0, 1.0, 2.0, 3.0], probabilities, value_discretization_interval=1e-3)
    expected = reference.self_compose(100).get_epsilon_for_delta(1e-6)
    assert epsilon([customers(2.0, 3, 0.05, 100)], delta=1e-6) == pytest.approx(expected, rel=GRID_ERROR)


@pytest.mark.parametrize(("noise_multiplier", "count", "sample_rate"), [(2.0, 3, 0.05), (1.5, 2, 0.4)])
def test_one_step_for_a_customer_costs_what_the_definition_says(noise_multiplier: float, count: int, sample_rate: float) -> None:
    drawn = [(float(stats.binom.pmf(number, count, sample_rate)), float(number)) for number in range(count + 1)]
    with mpmath.workdps(40):
        removed = hockey_stick_root(lambda value: mixture_delta(drawn, [(1.0, 0.0)], noise_multiplier, value), 1e-6)
        # The other way around the loss falls with the outcome, so the outcomes are mirrored.
        mirrored = [(probability, -mean) for probability, mean in drawn]
        added = hockey_stick_root(lambda value: mixture_delta([(1.0, 0.0)], mirrored, noise_multiplier, value), 1e-6)
    exact = max(removed, added)
    assert exact * (1 - 1e-9) <= epsilon([customers(noise_multiplier, count, sample_rate, 1)], delta=1e-6) <= exact * (1 + GRID_ERROR)


def test_a_customer_of_one_record_is_a_record_and_without_sampling_a_sum_of_records() -> None:
    assert epsilon([customers(1.0, 1)], delta=DELTA) == epsilon([records(1.0)], delta=DELTA)
    unsampled = epsilon([customers(8.0, 4, 1.0, 3)], delta=DELTA)
    assert unsampled == epsilon([GaussianRelease(noise_multiplier=2.0, count=3)], delta=DELTA)


@given(
    noise_multiplier=st.floats(1.0, 6.0),
    count=st.integers(1, 6),
    sample_rate=st.floats(1e-3, 0.3),
    steps=st.integers(1, 500),
)
@settings(deadline=None, max_examples=8)
def test_a_customer_pays_between_a_record_and_a_record_as_large_as_all_its_records(
    noise_multiplier: float, count: int, sample_rate: float, steps: int
) -> None:
    found = epsilon([customers(noise_multiplier, count, sample_rate, steps)], delta=1e-6)
    any_drawn = 1 - (1 - sample_rate) ** count
    assert epsilon([records(noise_multiplier, sample_rate, steps)], delta=1e-6) <= found * (1 + GRID_ERROR) + 1e-9
    assert found <= epsilon([records(noise_multiplier / count, any_drawn, steps)], delta=1e-6) * (1 + GRID_ERROR) + 1e-9


# --- discrete Gaussian sums -----------------------------------------------------------------------------------------------------


def shares_of(variance: int, shares: int, *, l2: int = 32, l1: int = 1024, count: int = 50) -> DiscreteGaussianSum:
    return DiscreteGaussianSum(
        share_variance=variance, shares=shares, l2_sensitivity=l2, l1_sensitivity=l1, coordinates=12_000, count=count
    )


def test_fifty_sums_cost_the_proven_bound_and_not_what_the_analytic_gaussian_would_say() -> None:
    # Noise of 4 times the sensitivity, fifty times. Balle and Wang, 2018, would say 9.482, and it is not proven for whole numbers.
    total = (4 * 32) ** 2
    assert epsilon([GaussianRelease(noise_multiplier=4.0, count=50)], delta=1e-6) == pytest.approx(9.482, abs=1e-3)
    # Agarwal, Kairouz and Liu, 2021, arXiv:2110.04995, corollary 4.1: Skellam noise of the same variance costs 10.090.
    orders = FINE_ORDERS
    skellam = orders * 32**2 / (2 * total) + np.minimum(((2 * orders - 1) * 32**2 + 6 * 1024) / (4 * total**2), 3 * 1024 / (2 * total))
    converted = 50 * skellam + np.log1p(-1 / orders) - np.log(1e-6 * orders) / (orders - 1)
    assert converted.min() == pytest.approx(10.090, abs=1e-3)
    # Discrete Gaussians cost a little less than Skellam noise, and never less than Gaussians by the same conversion.
    gaussian = 50 * orders * 32**2 / (2 * total) + np.log1p(-1 / orders) - np.log(1e-6 * orders) / (orders - 1)
    for shares in (1, 4, 8):
        found = epsilon([shares_of(total // shares, shares)], delta=1e-6)
        assert gaussian.min() * (1 - 1e-9) <= found <= converted.min()
        assert found == pytest.approx(10.0891, abs=1e-3)


@pytest.mark.parametrize(("variance", "shares"), [(1, 2), (1, 5), (1, 20), (4, 8)])
def test_the_divergence_of_a_sum_of_shares_is_below_its_bound(variance: int, shares: int) -> None:
    """Computed exactly on one coordinate, by convolution."""
    reach = 40 * math.isqrt(variance)
    points = np.arange(-reach, reach + 1)
    share = np.exp(-(points.astype(np.float64) ** 2) / (2 * variance))
    share /= share.sum()
    total = share
    for _ in range(shares - 1):
        total = np.convolve(total, share)
    total = np.maximum(total, 0)
    for shift in (1, 2, 3):
        upper, lower = total[shift:], total[:-shift]
        usable = (upper > 1e-200) & (lower > 1e-200)
        upper, lower = np.log(upper[usable]), np.log(lower[usable])
        event = DiscreteGaussianSum(
            share_variance=variance, shares=shares, l2_sensitivity=shift, l1_sensitivity=shift, coordinates=1, count=1
        )
        from privfed.dp._renyi import _divergence

        orders = np.array([1.5, 2.0, 4.0, 8.0])
        exact = [np.logaddexp.reduce(order * upper + (1 - order) * lower) / (order - 1) for order in orders]
        bound = _divergence(event, orders)
        assert (np.array(exact) <= bound * (1 + 1e-9) + 1e-12).all()
        assert (bound <= 10 * np.array(exact) + 1).all()  # and it says something


def test_one_discrete_gaussian_costs_no_less_than_its_exact_price() -> None:
    exact = from_discrete_gaussian_mechanism(4.0, sensitivity=2, value_discretization_interval=1e-3).get_epsilon_for_delta(1e-6)
    event = DiscreteGaussianSum(share_variance=16, shares=1, l2_sensitivity=2, l1_sensitivity=2, coordinates=1)
    assert exact <= epsilon([event], delta=1e-6) <= 1.2 * exact


def test_many_small_shares_cost_more_than_one_large_share() -> None:
    assert epsilon([shares_of(1, 4096, l2=16, l1=256, count=1)], delta=1e-6) > epsilon(
        [shares_of(4096, 1, l2=16, l1=256, count=1)], delta=1e-6
    )


def test_more_shares_never_cost_more_and_a_lost_share_does() -> None:
    prices = [epsilon([shares_of(2048, shares)], delta=1e-6) for shares in (5, 6, 7, 8, 9)]
    assert all(more > fewer for more, fewer in itertools.pairwise(prices))


def test_noise_that_does_not_fit_is_part_of_delta() -> None:
    assert epsilon([shares_of(2048, 8)], delta=49 * OVERFLOW_DELTA) == math.inf
    assert math.isfinite(epsilon([shares_of(2048, 8)], delta=1e-12))
    # OVERFLOW_DELTA covers what silo.py leaves over, 2^-128 in a sum, up to epsilon 50; above, nothing is stated.
    assert (1 + math.exp(50)) * 2.0**-128 < OVERFLOW_DELTA
    assert epsilon([shares_of(2048, 1, l2=320, l1=1024)], delta=1e-6) == math.inf


def test_sums_beside_other_events_cost_no_more_than_both_at_half_of_delta_and_no_less_than_either() -> None:
    sums, trained = shares_of(2048, 8, count=1), records(1.0, steps=100)
    for other in (trained, GaussianRelease(noise_multiplier=8.0), customers(2.0, 2, steps=100)):
        found = epsilon([sums, other], delta=1e-6)
        assert found <= (epsilon([sums], delta=5e-7) + epsilon([other], delta=5e-7)) * 1.2
        assert found > max(epsilon([sums], delta=1e-6), epsilon([other], delta=1e-6))
    halves = epsilon([sums], delta=5e-7) + epsilon([customers(2.0, 2, steps=100)], delta=5e-7)
    assert epsilon([sums, customers(2.0, 2, steps=100)], delta=1e-6) == halves


# --- adaptive clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise_multiplier", "count_noise"), [(1.0, 25.6), (1.1, 5.0), (4.0, 2.5)])
def test_a_noised_sum_and_a_noised_count_cost_what_one_gaussian_costs(noise_multiplier: float, count_noise: float) -> None:
    clipping = AdaptiveClipping(initial_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=count_noise)
    event = clipping.event(noise_multiplier=noise_multiplier, sample_rate=0.01, steps=300)
    assert event.noise_multiplier > noise_multiplier
    assert epsilon([event], delta=1e-6) == pytest.approx(epsilon([records(noise_multiplier, 0.01, 300)], delta=1e-6), rel=1e-9)
    # Unsampled, both are two coordinates with sensitivities 1 and 1/2, in units of their noises.
    both = math.hypot(1 / event.noise_multiplier, 0.5 / count_noise)
    together = AdaptivelyClippedGaussian(noise_multiplier=event.noise_multiplier, count_noise=count_noise, sample_rate=1.0, steps=1)
    assert epsilon([together], delta=1e-6) == pytest.approx(epsilon([GaussianRelease(noise_multiplier=1 / both)], delta=1e-6), rel=1e-9)


def test_count_noise_of_a_twentieth_of_the_batch_adds_half_a_percent_to_the_noise_of_the_sum() -> None:
    # The recommendation of Andrew et al., 2021, section 3.1, at noise 1: (1 - 1 / (2 * 5)^2)^(-1/2).
    clipping = AdaptiveClipping(initial_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=5.0)
    assert clipping.sum_noise_multiplier(1.0) == pytest.approx(1.00504, abs=1e-5)


# --- calibration of other events ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job", [customers(1.0, 3), GaussianRelease(noise_multiplier=1.0, count=10), replace(capped(100_000), steps=200), records(1.0)]
)
def test_every_job_with_gaussian_noise_is_calibrated_to_its_budget(
    job: PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian | GaussianRelease,
) -> None:
    budget = Budget(epsilon=3.0, delta=1e-6)
    found = calibrate(job, budget=budget)
    assert replace(found, noise_multiplier=job.noise_multiplier) == job
    assert 2.97 <= epsilon([found], delta=1e-6) <= 3.0
    assert epsilon([replace(found, noise_multiplier=0.98 * found.noise_multiplier)], delta=1e-6) > 3.0


# --- jobs that adapt to what they see -----------------------------------------------------------------------------------------------


def test_a_filter_asks_one_order_with_its_own_part_of_delta() -> None:
    charges = Charges([GaussianRelease(noise_multiplier=5.0, count=4)])
    part = 1e-6 / FILTER_ORDERS.size
    by_hand = [4 * a / (2 * 25) + math.log1p(-1 / a) - math.log(part * a) / (a - 1) for a in FILTER_ORDERS]
    assert charges.filtered_epsilon(delta=1e-6) == pytest.approx(min(by_hand), rel=1e-12)
    assert Charges().filtered_epsilon(delta=1e-6) == 0


@pytest.mark.parametrize("event", [records(1.0, 0.01, 10), GaussianRelease(noise_multiplier=20.0), shares_of(2048, 8, count=1)])
@pytest.mark.parametrize("limit", [1.5, 4.0])
def test_a_filter_lets_through_less_than_a_fixed_schedule_would_and_not_much_less(event: Event, limit: float) -> None:
    charges = Charges()
    while charges.plus(event).filtered_epsilon(delta=1e-6) <= limit:
        charges.add(event)
    assert 0.35 * limit < charges.plus(event).epsilon(delta=1e-6)  # the price of adapting, highest for few sampled steps
    assert charges.epsilon(delta=1e-6) < limit


def test_a_filter_refuses_what_has_no_known_divergences() -> None:
    for event in (customers(2.0, 2), capped(100_000)):
        with pytest.raises(ValueError, match="known Renyi divergences"):
            Charges([event]).filtered_epsilon(delta=1e-6)
    with pytest.raises(ValueError, match="known Renyi divergences"):
        Charges([records(1.0)]).filtered_epsilon(delta=1e-6, relation=REPLACE)
    assert Charges([NonPrivateRelease()]).filtered_epsilon(delta=1e-6) == math.inf
    assert Charges([shares_of(2048, 8)]).filtered_epsilon(delta=40 * OVERFLOW_DELTA) == math.inf


@pytest.mark.parametrize(("noise_multiplier", "sample_rate"), [(1.0, 0.01), (0.7, 0.2), (3.0, 0.5)])
def test_divergences_of_sampled_steps_agree_with_opacus(noise_multiplier: float, sample_rate: float) -> None:
    from opacus.accountants.analysis.rdp import compute_rdp

    from privfed.dp._renyi import _divergence

    orders = WHOLE_ORDERS[:10]
    expected = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=[int(order) for order in orders])
    assert _divergence(records(noise_multiplier, sample_rate, 1), orders) == pytest.approx(expected, rel=1e-9)


# --- three accountants over a grid of settings --------------------------------------------------------------------------------------


def check_order(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> None:
    event: Event = records(noise_multiplier, sample_rate, steps)
    ours, prv, rdp = (accountant([event], delta=delta) for accountant in (epsilon, epsilon_prv, epsilon_rdp))
    assert ours <= prv * (1 + GRID_ERROR)
    assert prv <= rdp + 0.011  # Opacus adds its error bound of 0.01
    assert prv <= ours + 0.012


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 3.0])
@pytest.mark.parametrize(("sample_rate", "steps"), [(0.001, 1000), (0.01, 200), (0.1, 50)])
def test_losses_are_below_prv_and_that_below_renyi(noise_multiplier: float, sample_rate: float, steps: int) -> None:
    check_order(noise_multiplier, sample_rate, steps, 1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("noise_multiplier", [0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("sample_rate", [0.001, 0.004, 0.016, 0.064, 0.25])
@pytest.mark.parametrize("steps", [1, 30, 1000, 10_000])
def test_losses_are_below_prv_and_that_below_renyi_everywhere(noise_multiplier: float, sample_rate: float, steps: int) -> None:
    event = records(noise_multiplier, sample_rate, steps)
    if epsilon([event], delta=1e-6) < 15:  # beyond, Opacus' PRV accountant fails
        check_order(noise_multiplier, sample_rate, steps, 1e-6)


def test_a_check_of_a_customers_ledger_takes_hundredths_of_a_second_once_its_losses_are_known() -> None:
    charges = Charges([customers(1.0, 3, 0.01, 100)])
    charges.plus(customers(1.0, 3, 0.01, 100)).epsilon(delta=1e-6)
    charges.epsilon(delta=1e-6)
    start = time.process_time()
    for _ in range(4):
        charges.add(customers(1.0, 3, 0.01, 100))
        charges.epsilon(delta=1e-6)
    assert (time.process_time() - start) / 4 < 0.5  # 0.06 s where this was written

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from privfed.dp import noise, silo
from privfed.dp.accounting import epsilon
from privfed.dp.mechanism import DiscreteGaussianSum, GaussianRelease, Relation
from privfed.dp.noise import discrete_gaussian
from privfed.dp.silo import SiloNoise, clip_on_grid
from privfed.errors import InsufficientCapacityError, OpeningRefusedError
from privfed.he.additive import weighted_sum
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, SharedKey, encrypt, open_sum
from privfed.update import Layout

BANKS = ("bank_a", "bank_b", "bank_c", "bank_d", "bank_e", "bank_f")
NEVER, SURELY = 1e-7, 1e-30


def agreed(**changes: Any) -> SiloNoise:
    terms: dict[str, Any] = {
        "weights": dict(zip(BANKS, (1, 2, 3, 1, 1, 2), strict=True)),
        "clip_steps": 32,
        "noise_multiplier": 4.0,
        "coordinates": 4096,
        "colluders": 1,
        "dropouts": 2,
    }
    return SiloNoise(**(terms | changes))


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    monkeypatch.setattr(noise, "_words", lambda count: rng.integers(0, 2**64, count, np.uint64))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, to look at what is under it."""
    monkeypatch.setattr(silo, "discrete_gaussian", lambda variance, count: np.zeros(count, np.int64))


# --- what is agreed and what it costs -----------------------------------------------------------------------------------------------


def test_shares_are_large_enough_for_what_colluders_know_and_dropouts_take_away() -> None:
    terms = agreed()
    assert (terms.shares, terms.min_arrivals, terms.denominator) == (3, 4, 10)
    assert terms.l2_sensitivity == 3 * 32
    assert terms.share_variance == math.ceil((4 * 96) ** 2 / 3)
    assert terms.shares * terms.share_variance >= (terms.noise_multiplier * terms.l2_sensitivity) ** 2


def test_what_is_charged_is_the_worst_case_that_is_tolerated() -> None:
    event = agreed().event(count=7)
    assert event == DiscreteGaussianSum(
        share_variance=49152, shares=3, l2_sensitivity=96, l1_sensitivity=64 * 96, coordinates=4096, count=7
    )
    for arrived in (3, 4, 5):  # honest shares that are in the sum when fewer collude, or more arrive
        assert epsilon([replace(event, shares=arrived)], delta=1e-6) <= epsilon([event], delta=1e-6)
    assert epsilon([replace(event, shares=2)], delta=1e-6) > epsilon([event], delta=1e-6)


def test_the_sum_of_absolute_values_is_bounded_by_both_of_its_bounds() -> None:
    assert agreed(coordinates=4).event().l1_sensitivity == 2 * 96
    assert agreed(coordinates=3).event().l1_sensitivity == math.ceil(math.sqrt(3) * 96)
    assert agreed(coordinates=10**9, weights=dict.fromkeys(BANKS, 1), clip_steps=5).event().l1_sensitivity == 25


def test_who_reads_single_uploads_is_promised_what_one_share_gives() -> None:
    terms = agreed()
    assert terms.one_share_event(count=3) == replace(terms.event(count=3), shares=1)
    alone, together = epsilon([terms.one_share_event()], delta=1e-6), epsilon([terms.event()], delta=1e-6)
    assert alone > 1.5 * together


def test_the_proven_bound_is_above_what_an_analytic_gaussian_would_say() -> None:
    terms = agreed(weights=dict.fromkeys(BANKS, 1), colluders=0, dropouts=0)
    found = epsilon([terms.event(count=50)], delta=1e-6)
    assert epsilon([GaussianRelease(noise_multiplier=4.0, count=50)], delta=1e-6) == pytest.approx(9.482, abs=1e-3)
    assert found == pytest.approx(10.089, abs=2e-3)


def test_a_replaced_silo_costs_what_a_contribution_twice_as_large_costs() -> None:
    event = agreed().event()
    doubled = replace(event, l2_sensitivity=2 * event.l2_sensitivity, l1_sensitivity=2 * event.l1_sensitivity)
    assert epsilon([event], delta=1e-6, relation=Relation.REPLACE_ONE) == epsilon([doubled], delta=1e-6)
    assert epsilon([event], delta=1e-6, relation=Relation.ZERO_OUT_ONE) == epsilon([event], delta=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": dict.fromkeys(BANKS[:3], 1)},
        {"weights": {**dict.fromkeys(BANKS, 1), "bank_a": 0}},
        {"weights": {**dict.fromkeys(BANKS, 1), "bank_a": 0.5}},
        {"weights": {}},
        {"clip_steps": 0},
        {"clip_steps": 1.5},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"coordinates": 0},
        {"colluders": -1},
        {"dropouts": 5},
    ],
)
def test_terms_that_leave_no_noise_or_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        agreed(**change)


def test_the_digest_covers_everything_that_is_agreed() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"weights": dict.fromkeys(BANKS, 1)},
        {"clip_steps": 33},
        {"noise_multiplier": 4.5},
        {"coordinates": 4097},
        {"colluders": 0},
        {"dropouts": 1},
    ]
    digests = {agreed(**change).digest for change in changes}
    assert len(digests) == len(changes)
    assert {len(digest) for digest in digests} == {32}
    assert agreed().digest == agreed(weights=dict(reversed(agreed().weights.items()))).digest


# --- clipping on the grid -----------------------------------------------------------------------------------------------------------


def norm_of(whole: NDArray[np.int64]) -> int:
    return sum(int(value) ** 2 for value in whole)


@given(
    values=st.lists(st.floats() | st.floats(-3, 3), min_size=1, max_size=60),
    norm=st.integers(1, 10**6),
)
@settings(deadline=None, max_examples=80)
def test_the_whole_numbers_never_exceed_the_norm_whatever_the_values(values: list[float], norm: int) -> None:
    clipped = clip_on_grid(np.array(values), norm)
    assert clipped.dtype == np.int64
    assert norm_of(clipped) <= norm**2


@given(whole=st.lists(st.integers(-50, 50), min_size=1, max_size=30))
def test_whole_numbers_within_the_norm_stay_as_they_are(whole: list[int]) -> None:
    norm = math.isqrt(sum(value**2 for value in whole)) + 1
    assert clip_on_grid(np.array(whole, float), norm).tolist() == whole


def test_rounding_alone_would_exceed_the_norm_and_is_clipped_again() -> None:
    sharp = np.where(np.arange(12_000) < 3_900, 0.5001, 0.0)
    assert np.linalg.norm(sharp) < 32 < np.linalg.norm(np.rint(sharp))  # 31.2 becomes 62.4
    clipped = clip_on_grid(sharp, 32)
    assert norm_of(clipped) <= 32**2


def test_what_is_clipped_keeps_its_direction_and_almost_all_of_the_norm() -> None:
    values = np.random.default_rng(3).normal(size=500) * 1000
    clipped = clip_on_grid(values, 5000).astype(float)
    cosine = clipped @ values / np.linalg.norm(clipped) / np.linalg.norm(values)
    assert cosine > 0.999999
    assert 4990 < np.linalg.norm(clipped) <= 5000


def test_the_norm_of_long_numbers_is_checked_exactly() -> None:
    norm = 2**40
    for factor in (0.999, 1.0, 1.001):
        clipped = clip_on_grid(np.array([factor * norm, 0.0, 0.0]), norm)
        assert norm_of(clipped) <= norm**2
    assert norm_of(clip_on_grid(np.full(4, norm / 2.0), norm)) == norm**2
    assert norm_of(clip_on_grid(np.full(4, norm / 2.0 + 1), norm)) <= norm**2


# --- what a client encrypts -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", BANKS)
def test_one_silo_changes_a_sum_by_no_more_than_the_sensitivity(name: str) -> None:
    terms = agreed()
    rng = np.random.default_rng(5)
    for values in (rng.normal(size=4096), rng.normal(size=4096) * 1e9, np.full(4096, np.nan), np.full(4096, np.inf), np.eye(4096)[0]):
        contribution = terms.noised(name, values, step=1e-3)
        assert norm_of(contribution) <= (terms.weights[name] * terms.clip_steps) ** 2 <= terms.l2_sensitivity**2
        assert np.abs(contribution).sum() <= terms.event().l1_sensitivity


@pytest.mark.usefixtures("silent")
def test_a_client_applies_its_own_weight_and_the_mean_is_over_all_agreed_clients() -> None:
    terms = agreed(coordinates=3, clip_steps=10_000)
    update = np.array([0.25, -0.5, 0.125])
    step = 1 / 1024
    grid = {name: terms.noised(name, update, step=step) for name in BANKS}
    assert grid["bank_c"].tolist() == [3 * 256, -3 * 512, 3 * 128]
    assert terms.mean(sum(grid.values()), step=step) == pytest.approx(update, abs=1e-12)
    without = sum(values for name, values in grid.items() if name != "bank_c")
    assert terms.mean(without, step=step) == pytest.approx(update * 7 / 10, abs=1e-12)  # the denominator does not follow arrivals


def test_two_calls_have_two_shares_of_noise_and_all_values_are_whole() -> None:
    terms = agreed()
    first, second = (terms.noised("bank_a", np.zeros(4096), step=1.0) for _ in range(2))
    assert first.dtype == second.dtype == np.int64
    assert (first != second).any()


@pytest.mark.parametrize(("name", "size"), [("stranger", 4096), ("bank_a", 4095)])
def test_a_stranger_or_an_update_of_another_shape_gets_no_noise(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        agreed().noised(name, np.zeros(size), step=1.0)


# --- the opened sum ---------------------------------------------------------------------------------------------------------------


def variance_p_value(sample: NDArray[np.int64], variance: float) -> float:
    """Two-sided, of a sample's mean square; by the central limit theorem, with the fourth moment of a Gaussian."""
    deviation = (float(np.mean(sample.astype(float) ** 2)) / variance - 1) / math.sqrt(2 / sample.size)
    return float(2 * stats.norm.sf(abs(deviation)))


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("arrived", [4, 5, 6])
def test_an_opened_sum_carries_exactly_as_much_noise_as_its_arrivals_gave(arrived: int) -> None:
    """From n - f to n arrivals, through encryption: the right variance is accepted, two thirds and three halves are rejected."""
    terms = agreed()
    params, layout = CkksParams.standard(), Layout(names=("weight",), shapes=((4096,),))
    terms.check_capacity(amplitude=params.amplitude, weight_sum=params.weight_sum)
    binding = RoundBinding(session=bytes(16), attempt=0, round=0, roster_digest=bytes(32), params=params)
    key = SharedKey.generate()
    signal = np.random.default_rng(1).integers(-1, 2, 4096).astype(float) * 0.4  # clipped or not, it is subtracted again
    names = BANKS[:arrived]
    grids = [terms.noised(name, signal, step=1.0) for name in names]
    vectors = [encrypt(grid, layout, params, key.round_key(binding), sender=name) for name, grid in zip(names, grids, strict=True)]
    opened = open_sum(weighted_sum(vectors, [1] * arrived), key.round_key(binding), coefficients=[1] * arrived)
    assert (opened == sum(grids)).all()
    terms.check_arrivals(names)
    under = sum(clip_on_grid(signal * terms.weights[name], terms.weights[name] * terms.clip_steps) for name in names)
    left = np.asarray(opened - under, np.int64)
    carried = arrived * terms.share_variance
    assert variance_p_value(left, carried) > NEVER
    assert variance_p_value(left, carried * 2 / 3) < SURELY
    assert variance_p_value(left, carried * 3 / 2) < SURELY
    assert stats.kstest(left / math.sqrt(carried), "norm").pvalue > NEVER


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("arrived", [2, 3])
def test_a_sum_of_small_shares_has_the_convolved_distribution(arrived: int) -> None:
    variance, points = 2, np.arange(-40, 41)
    share = np.exp(-(points.astype(float) ** 2) / (2 * variance))
    share /= share.sum()
    total = share
    for _ in range(arrived - 1):
        total = np.convolve(total, share)
    sample = sum(discrete_gaussian(variance, 50_000) for _ in range(arrived))
    counts = np.bincount(sample + total.size // 2, minlength=total.size).astype(float)
    for size, accepted in ((total, True), (share, False)):
        expected = np.zeros(total.size)
        start = (total.size - size.size) // 2
        expected[start : start + size.size] = size * 50_000
        common = expected >= 10
        pooled = [np.append(values[common], values[~common].sum()) for values in (counts, expected)]
        found = stats.chisquare(pooled[0], np.maximum(pooled[1], 1e-9) * pooled[0].sum() / pooled[1].sum()).pvalue
        assert (found > NEVER) if accepted else (found < SURELY)


def test_a_sum_with_fewer_arrivals_than_the_noise_allows_for_is_not_opened() -> None:
    terms = agreed()
    for names in itertools.chain(itertools.combinations(BANKS, 4), itertools.combinations(BANKS, 6)):
        terms.check_arrivals(names)
    for names in itertools.combinations(BANKS, 3):
        with pytest.raises(OpeningRefusedError, match=r"3 clients arrived.*nothing was opened"):
            terms.check_arrivals(names)


@pytest.mark.parametrize("names", [(*BANKS[:4], "stranger"), (*BANKS[:4], "bank_a")])
def test_a_stranger_or_a_client_twice_is_not_opened(names: tuple[str, ...]) -> None:
    with pytest.raises(OpeningRefusedError, match="each once; nothing was opened"):
        agreed().check_arrivals(names)


# --- capacity ---------------------------------------------------------------------------------------------------------------------


def test_parameters_must_hold_every_update_with_the_tails_of_its_noise() -> None:
    terms = agreed()
    needed = terms.largest_coordinate
    assert needed > terms.l2_sensitivity + 13 * math.sqrt(terms.share_variance)
    terms.check_capacity(amplitude=needed, weight_sum=6)
    with pytest.raises(InsufficientCapacityError, match="nothing was encrypted"):
        terms.check_capacity(amplitude=needed - 1, weight_sum=6)
    with pytest.raises(InsufficientCapacityError, match="adds? up to 5 clients"):
        terms.check_capacity(amplitude=needed, weight_sum=5)


def test_the_tail_bound_leaves_no_more_than_it_says() -> None:
    terms = agreed()
    # 2 exp(-t^2 / (2 sigma^2)) per coordinate and share, over all of them.
    t = terms.largest_coordinate - terms.l2_sensitivity
    exponent = math.log(2 * terms.coordinates * len(BANKS)) - t**2 / (2 * terms.share_variance)
    assert exponent <= -128 * math.log(2)
    # And the bound holds for the exact tail where that can be computed: parameter 4, beyond 12.
    points = np.arange(-60, 61, dtype=float)
    mass = np.exp(-(points**2) / 8)
    assert mass[np.abs(points) >= 12].sum() / mass.sum() <= 2 * math.exp(-(12**2) / 8)


def test_noise_that_does_not_fit_is_not_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo, "discrete_gaussian", lambda variance, count: np.full(count, 10**12, np.int64))
    with pytest.raises(InsufficientCapacityError, match="nothing was encrypted") as refusal:
        agreed().noised("bank_a", np.zeros(4096), step=1.0)
    assert not any(character.isdigit() for character in str(refusal.value))

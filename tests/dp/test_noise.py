import inspect
import math
import os
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from privfed.dp import noise
from privfed.dp.noise import discrete_gaussian, standard_normal, with_tail
from privfed.training.randomness import Randomness

NEVER = 1e-7  # a right sampler fails a test of this size once in ten million seeds, and the seed is fixed
SURELY = 1e-30


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words in every run, so that no test fails by chance."""
    rng = np.random.default_rng(7)
    monkeypatch.setattr(noise, "_words", lambda count: rng.integers(0, 2**64, count, np.uint64))
    monkeypatch.setattr(noise, "_large_below", lambda bound: int.from_bytes(rng.bytes(32), "big") % bound)  # uniform to 2^-100


def mass(variance: float, points: NDArray[np.int64]) -> NDArray[np.float64]:
    everywhere = np.arange(-2000, 2001, dtype=np.float64)
    return np.exp(-(points.astype(np.float64) ** 2) / (2 * variance)) / np.exp(-(everywhere**2) / (2 * variance)).sum()


def p_value(sample: NDArray[np.int64], variance: float) -> float:
    """Chi-square of a sample against the discrete Gaussian of a variance; points expected less than 10 times are put together."""
    points = np.arange(-2000, 2001)
    expected = mass(variance, points) * sample.size
    counts = np.bincount(sample + 2000, minlength=points.size).astype(np.float64)
    common = expected >= 10
    pooled = [np.append(values[common], values[~common].sum()) for values in (counts, expected)]
    return float(stats.chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue)


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("variance", [1, 2, 7, 100, 10_000])
def test_discrete_gaussians_have_their_distribution_and_not_that_of_two_thirds_or_three_halves_of_the_variance(variance: int) -> None:
    sample = discrete_gaussian(variance, 100_000)
    assert p_value(sample, variance) > NEVER
    assert p_value(sample, variance * 2 / 3) < SURELY
    assert p_value(sample, variance * 3 / 2) < SURELY


@pytest.mark.usefixtures("fixed")
def test_long_numbers_give_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_LARGEST_INT64", 1)
    assert p_value(discrete_gaussian(7, 20_000), 7) > NEVER


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("variance", [10**9, 2**60, 2**80])
def test_discrete_gaussians_of_a_large_variance_look_like_gaussians(variance: int) -> None:
    sample = discrete_gaussian(variance, 20_000) / math.sqrt(variance)
    assert stats.kstest(sample, "norm").pvalue > NEVER
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(sample, "norm", args=(0, math.sqrt(wrong))).pvalue < SURELY


@pytest.mark.usefixtures("fixed")
def test_the_parameter_is_the_variance_to_one_millionth() -> None:
    points = np.arange(-2000, 2001)
    for variance in (1, 2, 50):
        assert np.sum(mass(variance, points) * points.astype(float) ** 2) == pytest.approx(variance, rel=1e-6)


@pytest.mark.usefixtures("fixed")
def test_normal_numbers_are_normal_and_not_two_thirds_or_three_halves_as_wide() -> None:
    sample = standard_normal(100_001)
    assert sample.shape == (100_001,)
    assert np.abs(sample).max() < 6.5  # so many are larger once in 10^5 times
    assert stats.kstest(sample, "norm").pvalue > NEVER
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(sample, "norm", args=(0, wrong)).pvalue < SURELY


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 1), (1, 2), (7, 10)])
def test_a_coin_of_a_negative_exponential_comes_up_as_often_as_it_should(numerator: int, denominator: int) -> None:
    trials = 100_000
    heads = int(noise._bernoulli_exp(np.full(trials, numerator), denominator).sum())
    assert stats.binomtest(heads, trials, math.exp(-numerator / denominator)).pvalue > NEVER


def test_uniform_numbers_draw_again_what_does_not_divide_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([np.array([2**64 - 1, 5, 2**64 - 2], np.uint64), np.array([7, 0, 0], np.uint64)])
    monkeypatch.setattr(noise, "_words", lambda count: next(drawn))
    assert noise._below(3, 3).tolist() == [1, 2, 2]  # 2^64 - 1 is the one word too many
    bound = 2**70 + 3
    assert all(0 <= value < bound for value in noise._below(bound, 50))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_as_many_come_as_were_asked_for(count: int) -> None:
    assert discrete_gaussian(5, count).shape == standard_normal(count).shape == (count,)


@pytest.mark.parametrize(("variance", "count"), [(0, 1), (-1, 1), (2**80 + 1, 1), (1, -1)])
def test_a_variance_or_a_count_out_of_its_range_is_refused(variance: int, count: int) -> None:
    with pytest.raises(ValueError, match="expected a variance"):
        discrete_gaussian(variance, count)


@pytest.mark.parametrize("sampler", [discrete_gaussian, standard_normal])
def test_no_sampler_takes_a_seed(sampler: Callable[..., object]) -> None:
    assert set(inspect.signature(sampler).parameters) <= {"variance", "count"}


def test_two_calls_and_a_forked_process_draw_different_noise() -> None:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, discrete_gaussian(10**9, 50).tobytes())
        os._exit(0)
    mine = discrete_gaussian(10**9, 50)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reader, 400), np.int64)
    assert theirs.size == 50
    assert not np.isin(mine, np.concatenate([theirs, discrete_gaussian(10**9, 50)])).all()
    assert len({tuple(values) for values in (mine, theirs)}) == 2


# ---------------------------------------------------------------- the tail of a normal number


def test_small_uniform_numbers_get_the_digits_that_multiples_of_2_to_the_minus_53_lack() -> None:
    unit = 2.0**-53
    drawn = iter([np.array([0.25, unit, unit]), np.array([0.5, 0.5]), np.array([1.0])])
    uniform = np.array([0.5, 7 * unit, unit, unit, 2.0**-32, 1.0])
    before = uniform.copy()
    found = with_tail(uniform, lambda count: next(drawn)[:count])
    assert found is uniform
    assert found[[0, 4, 5]].tolist() == before[[0, 4, 5]].tolist()
    assert found[1] == 6.25 * unit
    assert found[2] == found[3] == 0.5 * unit * unit
    assert next(drawn).tolist() == [1.0]


def test_however_small_every_uniform_number_stays_above_zero_and_the_refinement_ends() -> None:
    found = with_tail(np.full(3, 2.0**-53), lambda count: np.full(count, 2.0**-53))
    assert (found > 0).all()
    assert float(np.sqrt(-2 * np.log(found.max()))) > 35


def test_normal_numbers_of_both_sources_have_a_tail_beyond_what_53_digits_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of zeros is the smallest uniform number again and again: with 53 digits alone it would give 8.57."""

    class Zeros(Randomness):
        private = False

        def _stream(self, count: int) -> bytes:
            return bytes(count)

    monkeypatch.setattr(noise, "_words", lambda count: np.zeros(count, np.uint64))
    for numbers in (Zeros().normal(2), noise.standard_normal(2)):
        assert float(np.abs(numbers).max()) > 35


def test_the_tail_has_the_probability_that_it_should_have() -> None:
    """Numbers below 2^-32 are made common here, so that what refines them decides a distribution that is tested."""
    rng = np.random.default_rng(5)
    unit, count = 2.0**-53, 20_000

    def draw(size: int) -> np.ndarray:
        return (rng.integers(2**53, size=size) + 1) * unit

    whole = rng.integers(4, size=count)  # uniform from 0 to 4 units, after refinement
    found = with_tail((whole + 1) * unit, draw) / (4 * unit)
    assert stats.kstest(found, "uniform").pvalue > 1e-4
    assert stats.kstest(((whole + 1) * unit) / (4 * unit), "uniform").pvalue < 1e-4

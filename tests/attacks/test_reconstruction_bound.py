import math

import pytest
from scipy.stats import norm

from privfed.attacks.reconstruction_bound import reconstruction_bound
from privfed.dp.mechanism import PoissonSampledGaussian


def event(*, noise_multiplier: float = 1.0, sample_rate: float = 1.0, steps: int = 1) -> PoissonSampledGaussian:
    return PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


@pytest.mark.parametrize(("noise_multiplier", "candidates", "expected"), [(3.7306, 10, 0.155), (0.6002, 10, 0.650), (0.6002, 100, 0.255)])
def test_one_step_of_all_records_gives_the_gaussian_trade_off(noise_multiplier: float, candidates: int, expected: float) -> None:
    bound = reconstruction_bound(event(noise_multiplier=noise_multiplier), candidates=candidates)
    assert bound == pytest.approx(1 - norm.cdf(norm.ppf(1 - 1 / candidates) - 1 / noise_multiplier), abs=1e-12)
    assert bound == pytest.approx(expected, abs=5e-4)


def test_four_steps_are_one_with_half_the_noise() -> None:
    four = reconstruction_bound(event(noise_multiplier=2.0, steps=4), candidates=10)
    assert four == pytest.approx(reconstruction_bound(event(noise_multiplier=1.0), candidates=10), abs=1e-12)


@pytest.mark.parametrize("sample_rate", [0.1, 0.5])
def test_one_sampled_step_gives_the_mixtures_trade_off(sample_rate: float) -> None:
    for noise_multiplier, candidates in ((0.6, 10), (2.0, 10), (1.0, 100)):
        # The likeliest of a mixture is told from pure noise by a threshold, as without sampling.
        level = 1 / candidates
        exact = (1 - sample_rate) * level + sample_rate * norm.cdf(1 / noise_multiplier - norm.ppf(1 - level))
        bound = reconstruction_bound(event(noise_multiplier=noise_multiplier, sample_rate=sample_rate), candidates=candidates)
        assert exact - 1e-9 <= bound <= exact + 1e-3


def test_sampling_nearly_all_records_is_as_good_as_all() -> None:
    sampled = reconstruction_bound(event(noise_multiplier=2.0, sample_rate=1 - 1e-9, steps=4), candidates=10)
    exact = reconstruction_bound(event(noise_multiplier=2.0, steps=4), candidates=10)
    assert exact - 1e-6 <= sampled <= exact + 1e-3


def test_the_bound_is_never_below_chance_or_above_one_and_grows_with_steps() -> None:
    bounds = [reconstruction_bound(event(noise_multiplier=0.8, sample_rate=0.2, steps=steps), candidates=10) for steps in (1, 10, 300)]
    assert bounds == sorted(bounds)
    assert all(0.1 < bound <= 1 for bound in bounds)
    assert math.isclose(bounds[-1], 1, abs_tol=1e-2)


def test_a_single_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two candidates, got 1"):
        reconstruction_bound(event(), candidates=1)

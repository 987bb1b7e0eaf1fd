import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from privfed.compression import Compressor, Sign, StochasticQuantisation, TopK, with_feedback

ALL: list[Compressor] = [TopK(share=0.1), TopK(share=1.0), Sign(), StochasticQuantisation(levels=4)]
UPDATES = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e3, 1e3))


@pytest.mark.parametrize("compressor", ALL, ids=lambda compressor: compressor.name)
@given(values=UPDATES)
def test_what_is_sent_and_what_is_left_add_up_to_what_came_in(compressor: Compressor, values: np.ndarray) -> None:
    before = values.copy()
    sent, left = with_feedback(compressor, values, 0.5 * values, np.random.default_rng(0))
    # One rounding of a number of at most 1.5 times the largest magnitude in the sum, and one in the difference.
    np.testing.assert_allclose(sent + left, 1.5 * values, atol=8 * np.finfo(float).eps * max(1.0, float(np.abs(values).max())), rtol=0)
    assert np.array_equal(values, before)
    assert sent.shape == values.shape


@pytest.mark.parametrize("compressor", ALL, ids=lambda compressor: compressor.name)
def test_with_feedback_nothing_is_lost_over_many_rounds_and_without_it_something_is(compressor: Compressor) -> None:
    rng = np.random.default_rng(1)
    constant = rng.normal(size=200) * np.geomspace(1e-2, 1, 200)
    left, total = np.zeros(200), np.zeros(200)
    for _ in range(2000):
        sent, left = with_feedback(compressor, constant, left, rng)
        total += sent
    error = np.linalg.norm(total / 2000 - constant) / np.linalg.norm(constant)
    # What is missing is the last remainder alone, shared out over 2,000 rounds; it is bounded for these compressors.
    assert error == pytest.approx(np.linalg.norm(left) / 2000 / np.linalg.norm(constant), rel=1e-6, abs=1e-12)
    assert error < 0.03
    if isinstance(compressor, Sign) or (isinstance(compressor, TopK) and compressor.share < 1):
        forgetful = compressor.compress(constant, rng)
        assert np.linalg.norm(forgetful - constant) / np.linalg.norm(constant) > 0.3


def test_top_k_keeps_the_largest_coordinates_as_they_were() -> None:
    values = np.array([0.1, -3.0, 0.2, 2.0, -0.3])
    assert TopK(share=0.4).compress(values, np.random.default_rng(0)).tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]
    assert np.count_nonzero(TopK(share=1e-9).compress(values, np.random.default_rng(0))) == 1


def test_signs_have_one_magnitude_and_zeros_stay() -> None:
    assert Sign().compress(np.array([-3.0, 0.0, 1.0, 2.0]), np.random.default_rng(0)).tolist() == [-1.5, 0.0, 1.5, 1.5]


def test_quantisation_gives_neighbouring_levels_that_are_right_on_average() -> None:
    values, rng = np.array([-1.0, -0.3, 0.0, 0.1, 0.9]), np.random.default_rng(2)
    draws = np.stack([StochasticQuantisation(levels=4).compress(values, rng) for _ in range(4000)])
    assert set(np.unique(draws)) <= {-1.0, -0.5, -0.25, 0.0, 0.25, 0.75, 1.0}
    # A draw has a standard deviation of at most half a level: five standard errors of a mean of 4,000.
    assert np.abs(draws.mean(axis=0) - values).max() < 5 * 0.125 / np.sqrt(4000)
    assert np.array_equal(StochasticQuantisation(levels=1).compress(np.zeros(3), rng), np.zeros(3))


def test_compressors_that_keep_nothing_are_refused() -> None:
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share above 0 and at most 1"):
            TopK(share=share)
    with pytest.raises(ValueError, match="at least 1 level"):
        StochasticQuantisation(levels=0)

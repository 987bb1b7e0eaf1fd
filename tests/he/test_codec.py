import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError
from privfed.he import _seal_public
from privfed.he.codec import dequantise, evaluate, gather, interpolate, pack_words, quantise, spread, unpack_words, weighted_words
from privfed.he.params import CkksParams, transform_roundoff

PARAMS = CkksParams.standard(bound=0.75)
DEGREE = PARAMS.poly_modulus_degree
PARITY = CkksParams.parity(clients=4, bound=0.75)
EVERY = [PARAMS, CkksParams.compact(bound=0.75), PARITY, CkksParams.compatible(clients=4, bound=0.75)]


def seal_words(coefficients):
    """Words of the plaintext that SEAL makes of a polynomial: its values at the odd powers of a 2N-th root modulo q."""
    ring = _seal_public.ring(DEGREE, PARAMS.modulus, slots=False)
    words = ring.encode(evaluate(coefficients))
    return words.tolist(), ring.decode(words)


def adversarial(magnitude):
    rng = np.random.default_rng(5)
    alternating = np.where(np.arange(DEGREE) % 2, -1.0, 1.0)
    spike = np.zeros(DEGREE)
    spike[DEGREE - 1] = 1.0
    angles = np.pi * (np.arange(DEGREE) * pow(3, 700, 2 * DEGREE) % (2 * DEGREE)) / DEGREE
    patterns = {
        "all at the bound": np.ones(DEGREE),
        "all at the negative bound": -np.ones(DEGREE),
        "alternating": alternating,
        "single spike": spike,
        "in phase with one root": np.where(np.cos(angles) < 0, -1.0, 1.0),
        "random signs": rng.choice([-1.0, 1.0], DEGREE),
        "random": rng.integers(-(2**40), 2**40, DEGREE) / 2**40,
    }
    return {name: np.rint(pattern * magnitude) for name, pattern in patterns.items()}


def test_quantise_rounds_half_to_even():
    half_steps = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    params = CkksParams.standard(bound=float(PARAMS.amplitude))
    grid, saturated = quantise(half_steps, params)
    assert grid.tolist() == [0, 2, 2, 0, -2, -2]
    assert saturated == 0


def test_quantise_saturates_and_counts_what_is_beyond_the_bound():
    beyond = math.nextafter(PARAMS.bound, 2)
    grid, saturated = quantise([PARAMS.bound, beyond, -beyond, -PARAMS.bound, 1e300], PARAMS)
    assert grid.tolist() == [PARAMS.amplitude, PARAMS.amplitude, -PARAMS.amplitude, -PARAMS.amplitude, PARAMS.amplitude]
    assert saturated == 3


def test_quantise_maps_zeros_and_denormals_to_zero():
    grid, saturated = quantise([0.0, -0.0, 5e-324, -5e-324], PARAMS)
    assert grid.tolist() == [0, 0, 0, 0]
    assert saturated == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_quantise_refuses_nan_and_infinity_without_naming_the_place(value):
    with pytest.raises(ValueError, match="expected finite values, got NaN or infinity; nothing was quantised"):
        quantise([0.1, value], PARAMS)


def test_quantise_does_not_change_its_argument():
    values = np.array([0.1, 9.0])
    quantise(values, PARAMS)
    assert values.tolist() == [0.1, 9.0]


@given(
    values=st.lists(st.floats(-PARAMS.bound, PARAMS.bound), min_size=1, max_size=30),
    coefficients=st.lists(st.integers(1, 1000), min_size=1, max_size=4),
)
def test_weighted_mean_is_within_the_stated_error(values, coefficients):
    updates = [np.roll(values, shift) for shift in range(len(coefficients))]
    grid_sum = sum(coefficient * quantise(update, PARAMS)[0] for coefficient, update in zip(coefficients, updates, strict=True))
    mean = dequantise(grid_sum, sum(coefficients), PARAMS)
    for index, opened in enumerate(mean.tolist()):
        terms = [coefficient * float(update[index]) for coefficient, update in zip(coefficients, updates, strict=True)]
        assert abs(opened - math.fsum(terms) / sum(coefficients)) <= PARAMS.max_error * (1 + 1e-9)


def test_the_stated_error_is_reached_but_for_a_hundredth():
    half_steps = (np.arange(1000) + 0.5) * PARAMS.step
    error = np.abs(dequantise(quantise(half_steps, PARAMS)[0], 1, PARAMS) - half_steps).max()
    assert 0.99 * PARAMS.max_error < error <= PARAMS.max_error


@pytest.mark.parametrize("total", [0, -1, 4097])
def test_dequantise_refuses_coefficient_sums_out_of_range(total):
    with pytest.raises(ValueError, match="expected a divisor from 1 to 4096"):
        dequantise(np.zeros(3, np.int64), total, PARAMS)


@pytest.mark.parametrize("params", [PARITY, CkksParams.compatible(clients=4)], ids=["coefficients", "slots"])
def test_a_share_scales_the_grid_and_is_demanded_where_clients_pre_scale(params):
    grid, saturated = quantise([params.bound, -3 * params.bound, 0.0], params, Fraction(1, 4))
    assert grid.tolist() == [round(params.amplitude / 4), -round(params.amplitude / 4), 0]
    assert saturated == 1
    with pytest.raises(ValueError, match="expected a share of the weights for these parameters; nothing was quantised"):
        quantise([0.0], params)


def test_a_share_is_refused_where_the_server_applies_the_weights():
    with pytest.raises(ValueError, match="expected no share of the weights for these parameters; nothing was quantised"):
        quantise([0.0], PARAMS, Fraction(1, 4))


@pytest.mark.parametrize("share", [Fraction(0), Fraction(-1, 4), Fraction(501, 1000), Fraction(1)])
def test_shares_that_the_parameters_have_no_room_for_are_refused(share):
    with pytest.raises(ValueError, match="expected a share above 0 and at most 1/2"):
        quantise([0.0], PARITY, share)


@given(
    values=st.lists(st.floats(-PARITY.bound, PARITY.bound), min_size=1, max_size=20),
    weights=st.lists(st.integers(1, 2**32), min_size=4, max_size=4).filter(lambda weights: 2 * max(weights) <= sum(weights)),
    answering=st.sets(st.integers(0, 3), min_size=1),
)
@example(values=[PARITY.bound, 5e-324, -PARITY.bound], weights=[1, 1, 1, 1], answering={0, 1, 2, 3})
@example(values=[PARITY.bound / 3], weights=[2**32, 2**32, 1, 1], answering={2})
def test_mean_of_those_who_answered_is_within_the_stated_error_when_clients_pre_scale(values, weights, answering):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    updates = {index: np.roll(values, index) for index in answering}
    share = sum(shares[index] for index in answering)
    mean = dequantise(sum(quantise(update, PARITY, shares[index])[0] for index, update in updates.items()), share, PARITY)
    for place, opened in enumerate(mean.tolist()):
        exact = sum(shares[index] * Fraction(float(update[place])) for index, update in updates.items()) / share
        assert abs(Fraction(opened) - exact) <= Fraction(PARITY.mean_error(len(answering), share))


@pytest.mark.parametrize("divisor", [0, Fraction(0), Fraction(-1, 2), Fraction(1001, 1000), 2])
def test_dequantise_refuses_more_than_all_weights_when_clients_pre_scale(divisor):
    with pytest.raises(ValueError, match="expected a divisor from 0 to 1"):
        dequantise(np.zeros(3, np.int64), divisor, PARITY)


def test_evaluation_is_the_polynomial_at_powers_of_three_of_the_root():
    coefficients = np.arange(1.0, 17.0)
    root = np.exp(1j * np.pi / 16)
    expected = [sum(c * root ** (pow(3, slot, 32) * j) for j, c in enumerate(coefficients)) for slot in range(8)]
    np.testing.assert_allclose(evaluate(coefficients), expected, rtol=0, atol=1e-11)


def test_interpolation_inverts_evaluation():
    coefficients = np.random.default_rng(0).normal(size=DEGREE)
    np.testing.assert_allclose(interpolate(evaluate(coefficients)), coefficients, rtol=0, atol=1e-12)


def test_seal_encodes_the_monomial_that_the_coefficients_name():
    x, x_squared = np.zeros(DEGREE), np.zeros(DEGREE)
    x[1], x_squared[2] = 1, 1
    words, squares = seal_words(x)[0], seal_words(x_squared)[0]
    assert all(pow(word, DEGREE, PARAMS.modulus) == PARAMS.modulus - 1 for word in words)
    assert [word * word % PARAMS.modulus for word in words] == squares
    assert len(set(words)) == DEGREE


@pytest.mark.parametrize("name", adversarial(1.0))
def test_encoding_of_the_largest_grid_points_is_off_by_less_than_the_budget(name):
    largest = 2.0**PARAMS.guard_bits * PARAMS.amplitude
    coefficients = adversarial(largest)[name]
    # Decoding integers of 41 bits is exact after rounding, so what is left is the encoder's error.
    decoded = np.rint(interpolate(seal_words(coefficients)[1]))
    allowed = transform_roundoff(DEGREE) * np.linalg.norm(coefficients) + 0.5
    assert np.abs(decoded - coefficients).max() <= allowed
    assert allowed <= transform_roundoff(DEGREE) * math.sqrt(DEGREE) * largest + 0.5


@pytest.mark.parametrize("name", adversarial(1.0))
def test_transforms_of_values_as_large_as_seal_encodes_are_within_the_derived_roundoff(name):
    coefficients = adversarial(2.0**52 - 1)[name]
    decoded = interpolate(seal_words(coefficients)[1])
    error = np.linalg.norm(decoded - coefficients)
    # Both ways, and the encoder's rounding to integers in between.
    assert error <= 2 * transform_roundoff(DEGREE) * np.linalg.norm(coefficients) + 0.5 * math.sqrt(DEGREE)


def test_derived_roundoff_is_a_bound_but_not_a_wild_one():
    coefficients = adversarial(2.0**52)["random"]
    error = np.linalg.norm(interpolate(evaluate(coefficients)) - coefficients) / np.linalg.norm(coefficients)
    assert transform_roundoff(DEGREE) / 1000 < error < transform_roundoff(DEGREE)


@pytest.mark.parametrize("params", EVERY, ids=lambda params: f"{params.word_bytes} bytes")
@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 10_000])
def test_chunks_that_are_spread_gather_to_the_same_numbers(params, size):
    grid = np.random.default_rng(6).integers(-params.largest_point, params.largest_point + 1, size)
    chunks = spread(grid, params)
    assert chunks.shape == (math.ceil(size / params.chunk_coordinates), params.chunk_coordinates)
    assert 2 * np.abs(chunks).max() < params.modulus
    rows = [row.astype(np.complex128) if params.slots else evaluate(row.astype(np.float64)) for row in chunks]
    numbers = np.concatenate([gather(row, params) for row in rows]) / 2**params.guard_bits
    np.testing.assert_array_equal(np.rint(numbers)[:size], grid)
    assert not np.rint(numbers)[size:].any()


@settings(deadline=None, max_examples=30)
@given(data=st.data(), params=st.sampled_from(EVERY))
def test_packed_words_unpack_to_the_same_words(data, params):
    words = data.draw(st.lists(st.integers(0, params.modulus - 1), min_size=1, max_size=20))
    packed = pack_words(np.array(words, np.uint64), params)
    assert len(packed) == params.word_bytes * len(words)
    assert packed == b"".join(word.to_bytes(params.word_bytes, "little") for word in words)
    assert unpack_words(packed, params).tolist() == words
    for behind in (b"x", bytes(range(64))):
        assert pack_words(np.array(words, np.uint64), params, behind=behind) == packed + behind


def test_words_take_four_five_seven_and_eight_bytes():
    assert sorted(params.word_bytes for params in EVERY) == [4, 5, 7, 8]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), params=st.sampled_from(EVERY))
def test_weighted_words_are_the_sum_modulo_the_prime(data, params):
    count = data.draw(st.integers(1, 4 if params.prescaled else 6))
    top = 1 if params.prescaled else params.weight_sum // count
    coefficients = [data.draw(st.sampled_from([1, top, (top + 1) // 2])) for _ in range(count)]
    words = st.lists(
        st.sampled_from([0, 1, params.modulus // 2, params.modulus - 1]) | st.integers(0, params.modulus - 1), min_size=3, max_size=3
    )
    columns = [data.draw(words) for _ in range(count)]
    summed = weighted_words(((c, np.array(column, np.uint64)) for c, column in zip(coefficients, columns, strict=True)), params)
    expected = [sum(c * column[i] for c, column in zip(coefficients, columns, strict=True)) % params.modulus for i in range(3)]
    assert summed.tolist() == expected


@pytest.mark.parametrize("word", [PARAMS.modulus, PARAMS.modulus + 1, 2**56 - 1])
def test_words_that_are_not_below_the_modulus_are_refused(word):
    with pytest.raises(InvalidMessageError):
        unpack_words(bytes(7) + word.to_bytes(7, "little"), PARAMS)


def test_a_length_that_is_not_a_multiple_of_the_word_is_refused():
    with pytest.raises(InvalidMessageError):
        unpack_words(bytes(13), PARAMS)

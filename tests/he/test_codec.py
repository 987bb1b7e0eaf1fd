import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError
from privfed.he import _seal_public
from privfed.he.codec import dequantise, evaluate, interpolate, pack_words, quantise, unpack_words
from privfed.he.params import CkksParams, transform_roundoff

PARAMS = CkksParams.standard(bound=0.75)
DEGREE = PARAMS.poly_modulus_degree


def seal_words(coefficients):
    """Words of the plaintext that SEAL makes of a polynomial: its values at the odd powers of a 2N-th root modulo q."""
    import tenseal.sealapi as seal

    plain = seal.Plaintext()
    ring = _seal_public.ring(DEGREE, PARAMS.modulus)
    ring.encoder.encode(evaluate(coefficients).tolist(), 1.0, plain)
    members = _seal_public.members(_seal_public.saved(plain))
    return np.frombuffer(members, "<u8", DEGREE, len(members) - 8 * DEGREE).tolist(), np.array(ring.encoder.decode_complex(plain))


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
    with pytest.raises(ValueError, match="expected a coefficient sum from 1 to 4096"):
        dequantise(np.zeros(3, np.int64), total, PARAMS)


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


@settings(deadline=None, max_examples=30)
@given(words=st.lists(st.integers(0, PARAMS.modulus - 1), min_size=1, max_size=20))
def test_packed_words_unpack_to_the_same_words(words):
    packed = pack_words(np.array(words, np.uint64), PARAMS)
    assert len(packed) == 7 * len(words)
    assert packed == b"".join(word.to_bytes(7, "little") for word in words)
    assert unpack_words(packed, PARAMS).tolist() == words


@pytest.mark.parametrize("word", [PARAMS.modulus, PARAMS.modulus + 1, 2**56 - 1])
def test_words_that_are_not_below_the_modulus_are_refused(word):
    with pytest.raises(InvalidMessageError):
        unpack_words(bytes(7) + word.to_bytes(7, "little"), PARAMS)


def test_a_length_that_is_not_a_multiple_of_the_word_is_refused():
    with pytest.raises(InvalidMessageError):
        unpack_words(bytes(13), PARAMS)

"""Inner products of what was encrypted to a key holder: the noise of a slot, sums, openings, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.errors import (
    DecryptionError,
    InsufficientCapacityError,
    InvalidMessageError,
    ParametersMismatchError,
    RoundMismatchError,
)
from privfed.he import product_params
from privfed.he.codec import dequantise, quantise, unpack_public_key, unpack_words, weighted_words
from privfed.he.escrow import RunningSum, WholeVector, check_whole_chunk
from privfed.he.escrow_secret import AttemptKey, EscrowKey, encrypt_to_holder
from privfed.he.params import CkksParams
from privfed.he.product import Assurance
from privfed.he.product_params import ProductParams
from privfed.he.product_secret import open_escrowed_products
from privfed.update import Layout

BINDING = b"binding of one attempt, 32 bytes"
PARAMS = ProductParams.escrow(bound=2.0)
SLOTS = PARAMS.chunk_coordinates
LAYOUT = Layout(names=("weight",), shapes=((2 * SLOTS + 100,),))
DEVIATION = math.sqrt(PARAMS.fresh_noise_variance * PARAMS.poly_modulus_degree / 2)


@pytest.fixture(scope="module")
def stored() -> EscrowKey:
    return EscrowKey.generate()


@pytest.fixture(scope="module")
def key(stored: EscrowKey) -> AttemptKey:
    return stored.attempt_key(binding=BINDING, params=PARAMS)


@pytest.fixture(scope="module")
def public(key: AttemptKey) -> bytes:
    return key.public_key()


@pytest.fixture(scope="module")
def noise(key: AttemptKey, public: bytes) -> NDArray[np.float64]:
    """Of the slots of 300 ciphertexts, of shape (300, 4096)."""
    layout = Layout(names=("zeros",), shapes=((300 * SLOTS,),))
    vector = encrypt_to_holder(np.zeros(layout.size, np.int64), layout, PARAMS, public)
    ring_key = key._ring_key
    return np.array([ring_key.decrypt_unrounded(unpack_words(chunk, PARAMS)).real for chunk in vector.chunks])


def exceeded(deviations: float) -> float:
    """Chernoff's bound on the probability that a slot is off by more, as `ProductParams.slot_noise` derives it."""
    y = np.linspace(0, 1, 100_001)[:-1]
    return float((2 * np.exp(-y * math.sqrt(2) * deviations) / (1 - y**2)).min())


# ---- noise


def test_the_noise_of_a_slot_has_the_variance_that_the_parameters_count_with(noise: NDArray[np.float64]) -> None:
    """And another one is told apart: half and twice of it, that of a symmetric ciphertext, and that without the division by a prime."""
    # Given the key, the squares of a slot have a mean of |s(z)|^2 and twice its square as variance: sqrt(2 * 2 / (300 * 4096)) = 0.0018
    # of the mean. The key's own squared length varies by 0.0078 / sqrt(2).
    tolerance = 6 * math.hypot(0.0018, 0.0078 / math.sqrt(2))
    measured = np.mean(noise**2) / DEVIATION**2
    assert abs(measured - 1) < tolerance
    symmetric = ProductParams.exact().fresh_noise_variance / PARAMS.fresh_noise_variance
    undivided = (2 * PARAMS.poly_modulus_degree * 2 / 3 + 1) * 10.5 / PARAMS.fresh_noise_variance
    for wrong in (0.5, 2.0, symmetric, undivided):
        assert abs(measured - wrong) > tolerance


def test_the_noise_of_a_slot_has_the_tail_of_a_laplace_distribution_and_not_of_a_normal_one(noise: NDArray[np.float64]) -> None:
    for deviations in (3, 4, 5):
        expected = math.exp(-math.sqrt(2) * deviations)
        beyond = np.mean(np.abs(noise) > deviations * DEVIATION)
        # Which slots have a large |s(z)| is the key's: of 4096 slots those that count are some dozens.
        assert 0.5 * expected < beyond < 2 * expected
        assert beyond > 5 * math.erfc(deviations / math.sqrt(2))


def test_slots_stay_within_the_bound_of_their_probability_and_not_within_half_of_it(noise: NDArray[np.float64]) -> None:
    """Of 1.2 million slots one is beyond 16 deviations with a probability of 2e-4, and 15 are beyond half of them."""
    assert exceeded(16) < 1e-8
    assert np.abs(noise).max() < 16 * DEVIATION
    assert np.abs(noise).max() > 8 * DEVIATION


def test_the_bound_on_a_slot_leaves_less_than_two_to_the_minus_72_and_no_smaller_whole_number_does() -> None:
    assert pytest.approx(product_params._SLOT_DEVIATIONS * DEVIATION + SLOTS) == PARAMS.slot_noise
    assert exceeded(product_params._SLOT_DEVIATIONS) < 2.0**-72 < exceeded(product_params._SLOT_DEVIATIONS - 1)
    # Ten deviations do for a coefficient, whose noise is close to normal, and not for a slot.
    assert math.exp(-math.sqrt(2) * 10) == pytest.approx(7.2e-7, rel=0.01)
    assert exceeded(10) > 1e-6


def test_the_noise_fits_below_the_grid_and_parameters_that_do_not_hold_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PARAMS.weight_sum * PARAMS.slot_noise < PARAMS.noise < 2 ** (PARAMS.guard_bits - 1)
    monkeypatch.setattr(product_params, "_SLOT_DEVIATIONS", 200)
    with pytest.raises(InsufficientCapacityError, match="do not fit into the modulus; nothing was encrypted"):
        ProductParams.escrow()
    assert ProductParams.exact()  # of symmetric encryption the bound is no probability, and stays what it was


# ---- parameters


def test_there_is_one_set_of_parameters_and_no_sketch_to_a_key_holder() -> None:
    exact = ProductParams.exact(bound=2.0)
    assert replace(exact, asymmetric=True) == PARAMS
    assert len({exact.digest, PARAMS.digest, ProductParams.escrow().digest, ProductParams.sketched(bound=2.0).digest}) == 4
    with pytest.raises(ValueError, match="expected no sketches where clients encrypt to a key holder"):
        replace(PARAMS, sketch=True)
    with pytest.raises(ValueError, match="expected weight_sum=1024"):
        ProductParams.escrow(weight_sum=256)
    with pytest.raises(ValueError, match="expected asymmetric to be True or False"):
        replace(PARAMS, asymmetric=1)
    assert PARAMS.sum_chunk_bytes / SLOTS == 52


def test_words_of_two_primes_are_summed_modulo_each() -> None:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([rng.integers(0, prime, 8192, dtype=np.uint64) for prime in PARAMS.moduli * 2]) for _ in range(3)]
    moduli = np.tile(np.repeat(np.array(PARAMS.moduli, object), 8192), 2)
    expected = sum(c * row.astype(object) for c, row in zip((1000, 20, 4), rows, strict=True)) % moduli
    assert (weighted_words(zip((1000, 20, 4), rows, strict=True), PARAMS).astype(object) == expected).all()


# ---- sums and openings


def uploads(public: bytes, rows: NDArray[np.float64]) -> tuple[list[NDArray[np.int64]], list[WholeVector]]:
    grids = [quantise(row, PARAMS)[0] for row in rows]
    return grids, [encrypt_to_holder(grid, LAYOUT, PARAMS, public) for grid in grids]


def rows(*norms: float) -> NDArray[np.float64]:
    drawn = np.random.default_rng(1).normal(size=(len(norms), LAYOUT.size))
    drawn[1:] += drawn[0]
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True) * np.array(norms)[:, np.newaxis]


def summed(vectors: list[WholeVector], coefficients: tuple[int, ...]) -> RunningSum:
    total = RunningSum(layout=LAYOUT, params=PARAMS, key_id=vectors[0].key_id)
    for coefficient, vector in zip(coefficients, vectors, strict=True):
        total.add(coefficient, vector)
    return total


@pytest.mark.parametrize("coefficients", [(1000, 20, 3, 1), (1, 1, 1, 1), (256,) * 4])
def test_the_sum_of_the_uploads_that_are_scored_opens_bit_for_bit(key: AttemptKey, public: bytes, coefficients: tuple[int, ...]) -> None:
    grids, vectors = uploads(public, rows(2.0, 1.0, 0.1, 2.0))
    opened = key.open_sum(summed(vectors, coefficients).total(), coefficients=coefficients)
    assert np.array_equal(opened, sum(c * grid for c, grid in zip(coefficients, grids, strict=True)))


def test_the_sum_is_exact_at_the_largest_numbers(key: AttemptKey, public: bytes) -> None:
    grids = [np.full(LAYOUT.size, sign * PARAMS.amplitude) for sign in (1, -1)]
    total = summed([encrypt_to_holder(grid, LAYOUT, PARAMS, public) for grid in grids], (1023, 1)).total()
    assert np.array_equal(key.open_sum(total, coefficients=(1023, 1)), 1022 * grids[0])


def test_opened_inner_products_are_those_of_the_uploads_within_their_error(key: AttemptKey, public: bytes) -> None:
    """Also of one number that is as large as the bound, and of the shortest among long ones: within 1e-6 of the largest, and 1e-8."""
    values = rows(2.0, 1.0, 0.1, 2.0)
    values[3] = 0.0
    values[3, 7] = 2.0
    grids, vectors = uploads(public, values)
    opened = open_escrowed_products(vectors, key)
    sent = np.stack([dequantise(grid, 1, PARAMS) for grid in grids])
    exact = sent @ sent.T
    assert opened.assurance is Assurance.RECOMPUTED
    assert opened.disclosed == 10
    assert np.abs(opened.products - exact).max() <= PARAMS.scalar_error(LAYOUT.size) < 1e-8 * np.abs(exact).max()
    assert PARAMS.scalar_error(10_000_000) < 1e-6 * PARAMS.bound**2


def test_another_key_another_attempt_and_other_coefficients_do_not_open(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    _, vectors = uploads(public, rows(1.0, 1.0))
    total = summed(vectors, (1, 1)).total()
    for other in (EscrowKey.generate().attempt_key(binding=BINDING, params=PARAMS), stored.attempt_key(binding=bytes(32), params=PARAMS)):
        with pytest.raises(DecryptionError):
            other.open_sum(total, coefficients=(1, 1))
    with pytest.raises(DecryptionError):
        key.open_sum(total, coefficients=(2, 2))


def test_what_does_not_belong_together_is_not_multiplied(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    grids, vectors = uploads(public, rows(1.0, 1.0))
    with pytest.raises(ValueError, match="at least 2 uploads, got 1; nothing was opened"):
        open_escrowed_products(vectors[:1], key)
    other = encrypt_to_holder(grids[0], LAYOUT, PARAMS, key.public_key())
    with pytest.raises(RoundMismatchError, match="different keys; nothing was opened"):
        open_escrowed_products([vectors[0], other], key)
    renamed = encrypt_to_holder(grids[0], Layout(names=("other",), shapes=LAYOUT.shapes), PARAMS, public)
    with pytest.raises(ParametersMismatchError, match="different parameters or layouts; nothing was opened"):
        open_escrowed_products([vectors[0], renamed], key)
    sums = CkksParams.escrow()
    alone = encrypt_to_holder(grids[0], LAYOUT, sums, stored.attempt_key(binding=BINDING, params=sums).public_key())
    with pytest.raises(ParametersMismatchError, match="cannot be multiplied"):
        open_escrowed_products([alone, alone], key)


def test_keys_and_chunks_that_are_none_are_refused(key: AttemptKey, public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    assert len(public) == PARAMS.public_key_bytes == 2 * 8192 * (8 + 5 + 3)
    assert key.public_key() != public
    half = len(public) // 2
    one_prime = public[:half] + bytes(8192 * 8) + public[half + 8192 * 8 :]
    for wrong in (b"", public[:-1], public[:half] + bytes(half), one_prime, b"\xff" * len(public), public[: PARAMS.sum_chunk_bytes]):
        with pytest.raises(InvalidMessageError):
            unpack_public_key(wrong, PARAMS)
        with pytest.raises(RoundMismatchError):
            encrypt_to_holder(grid, LAYOUT, PARAMS, wrong)
    chunk = encrypt_to_holder(grid, LAYOUT, PARAMS, public).chunks[0]
    check_whole_chunk(chunk, PARAMS)
    half = len(chunk) // 2
    for wrong in (b"", chunk[:-1], chunk[:half] + bytes(half), b"\xff" * len(chunk)):
        with pytest.raises(InvalidMessageError):
            check_whole_chunk(wrong, PARAMS)
    first, second = (encrypt_to_holder(grid, LAYOUT, PARAMS, public) for _ in range(2))
    assert not set(first.chunks) & set(second.chunks)

"""Inner products of encrypted updates: what is opened, what is hidden, and what is refused."""

import copy
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from privfed.errors import (
    InvalidMessageError,
    MaskUsedError,
    ParametersMismatchError,
    RoundKeyUsedError,
    RoundMismatchError,
    TamperedAggregateError,
    TamperedProductsError,
)
from privfed.he import _seal_public, product
from privfed.he.additive import weighted_sum
from privfed.he.codec import dequantise, gather, interpolate, pack_words, quantise, unpack_public_key, unpack_words
from privfed.he.params import FRESH_NOISE_VARIANCE, SEED_BYTES, CkksParams
from privfed.he.product import Assurance, MaskedProducts, ZeroSumMask, masked_products, pairs, unmasked_products
from privfed.he.product_params import ProductParams
from privfed.he.product_secret import open_own_products, open_products
from privfed.he.profiles import STANDARD
from privfed.he.secret import RoundKey, check_sum, open_sum
from privfed.he.sketch import arranged, chunk_signs, restored, standard_error
from privfed.he.tags import TAG_SECRET_BYTES

EXACT, SKETCHED = ProductParams.exact(bound=2.0), ProductParams.sketched(bound=2.0)
SIZE = 2 * 4096 + 100
NAMES = ("bank_a", "bank_b", "bank_c", "bank_d")
# As the first version drew them: a version that draws others cannot read its uploads.
ARRANGED, SIGNS = [6, 3, 7, -2, 4, -5, 1, -8], [-1, 1, -1, -1, 1, -1, -1, -1]


def updates(count, size=SIZE, *, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=size)
    return (shared + rng.normal(size=(count, size)) * rng.uniform(0.3, 2, (count, 1))) / (2 * math.sqrt(size))


def plain_products(values, params):
    sent = np.stack([dequantise(quantise(row, params)[0], 1, params) for row in values])
    return sent @ sent.T


@pytest.fixture(scope="module")
def uploaded(seal, new_key):
    """Uploads of some updates, and the key of their round."""

    def make(values, params=EXACT, **changes):
        uploads = [seal(quantise(row, params)[0], sender=name, params=params, **changes) for row, name in zip(values, NAMES, strict=False)]
        return uploads, new_key(params=params, **changes)

    return make


def multiplied(key, uploads, **changes):
    first = uploads[0]
    given = {"count": len(uploads), "layout": first.layout, "params": first.params, "key_id": first.key_id, "public_key": key.public_key()}
    return masked_products(lambda upload, chunk: uploads[upload].chunks[chunk], **(given | changes))


def new_mask(key):
    return ZeroSumMask(EXACT, zero_of(key))


def zero_of(key):
    return _seal_public.zeros_under(_seal_public.product_ring(), unpack_public_key(key.public_key(), EXACT))


def no_zero():
    """In place of an encryption of zero: nothing is hidden by it."""
    return np.zeros(2 * _seal_public.product_ring().polynomial_words, np.uint64)


@pytest.fixture(scope="module")
def four(uploaded):
    values = updates(4)
    uploads, key = uploaded(values)
    return values, uploads, key, multiplied(key, uploads)


# ---- parameters


def test_parameters_reach_256_bits_of_security():
    assert _seal_public.product_ring().security_bits == 256
    assert sum(_seal_public.product_ring().chain_bits) <= 118  # of the HE standard's table, for degree 8192


def test_there_is_one_set_of_parameters():
    for field in ("weight_sum", "guard_bits", "amplitude", "poly_modulus_degree", "modulus"):
        with pytest.raises(ValueError, match=f"expected {field}="):
            dataclasses.replace(EXACT, **{field: getattr(EXACT, field) - 1})
    for field in ("prescaled", "slots", "seeded_sums"):
        with pytest.raises(ValueError, match=f"expected {field}="):
            dataclasses.replace(EXACT, **{field: not getattr(EXACT, field)})
    with pytest.raises(ValueError, match="expected sketch to be True or False"):
        dataclasses.replace(EXACT, sketch=1)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, 2.0**300])
def test_a_bound_out_of_its_range_is_refused(bound):
    with pytest.raises(ValueError, match="expected bound from"):
        ProductParams.exact(bound=bound)


def test_one_more_guard_bit_is_needed_by_no_sum_and_one_less_does_not_do():
    assert EXACT.noise < 2 ** (EXACT.guard_bits - 1)
    assert 2 ** (EXACT.guard_bits - 2) < EXACT.noise


def test_the_largest_inner_product_has_thirteen_bits_to_spare():
    longest = (EXACT.amplitude * 2**EXACT.guard_bits) ** 2 // (EXACT.poly_modulus_degree // 2)
    assert 2**12 < EXACT.modulus // 2 // longest < 2**14
    assert longest < EXACT.largest_constant < EXACT.modulus // 2


@pytest.mark.parametrize("make", [lambda: ProductParams.from_profile(STANDARD, bound=1.0), ProductParams.compact])
def test_profiles_of_sums_are_refused(make):
    with pytest.raises(ValueError, match="is one of sums alone"):
        make()


def test_parameters_have_digests_of_their_own():
    others = [ProductParams.exact(bound=3.0), SKETCHED, CkksParams.standard(bound=2.0)]
    assert EXACT.digest == ProductParams.standard(bound=2.0).digest
    assert EXACT.digest not in {other.digest for other in others}


def test_a_modulus_of_two_primes_belongs_to_the_product_ring_alone():
    with pytest.raises(ValueError, match="product ring"):
        _seal_public.ring(4096, EXACT.modulus, slots=True)


# ---- quantisation and packing


def test_a_long_update_is_shortened_to_the_bound_and_a_short_one_is_left_alone():
    values = updates(1)[0]
    short, changed = quantise(values, EXACT)
    assert changed == 0
    assert np.abs(dequantise(short, 1, EXACT) - values).max() <= EXACT.step / 2
    grid, changed = quantise(values * 100, EXACT)
    assert changed == values.size
    sent = dequantise(grid, 1, EXACT)
    assert abs(np.linalg.norm(sent) - EXACT.bound) < EXACT.step * math.sqrt(values.size)
    assert sent @ values / np.linalg.norm(sent) / np.linalg.norm(values) > 1 - 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="expected finite values"):
        quantise([1.0, bad], EXACT)


def test_words_of_two_primes_are_packed_and_unpacked():
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, prime, EXACT.poly_modulus_degree, dtype=np.uint64) for prime in EXACT.moduli * 2])
    packed = pack_words(words, EXACT, behind=b"behind")
    assert len(packed) == 2 * EXACT.polynomial_bytes + 6
    assert np.array_equal(unpack_words(packed[:-6], EXACT), words)
    for bad in (packed[:-7], packed[:-6] + b"1", b"\xff" * EXACT.polynomial_bytes):
        with pytest.raises(InvalidMessageError):
            unpack_words(bad, EXACT)


# ---- sums of the same ciphertexts


def test_the_sum_of_the_uploads_that_are_scored_is_exact_on_the_grid(four):
    values, uploads, key, _ = four
    grids = [quantise(row, EXACT)[0] for row in values]
    for coefficients in ((1, 1, 1, 1), (1000, 20, 3, 1)):
        total = weighted_sum(uploads, coefficients)
        opened = open_sum(total, key, coefficients=coefficients)
        assert np.array_equal(opened, sum(c * grid for c, grid in zip(coefficients, grids, strict=True)))


def test_the_sum_is_exact_at_the_largest_numbers(seal, new_key):
    key, size = new_key(params=EXACT), 4096
    grids = [np.full(size, sign * EXACT.amplitude) for sign in (1, -1)]
    total = weighted_sum([seal(grid, params=EXACT) for grid in grids], [1023, 1])
    assert np.array_equal(open_sum(total, key, coefficients=[1023, 1]), 1022 * grids[0])


def test_tags_tie_the_sum_to_the_uploads_at_both_primes(four):
    _, uploads, key, _ = four
    total = weighted_sum(uploads, [1, 2, 3, 4])
    tags = {name: upload.sealed_tags for name, upload in zip(NAMES, uploads, strict=True)}
    assert check_sum(total, key, sealed_tags=tags, coefficients=[1, 2, 3, 4]) is total
    with pytest.raises(TamperedAggregateError):
        check_sum(total, key, sealed_tags=tags, coefficients=[1, 2, 4, 3])
    for place in (0, 8 * 8192, EXACT.polynomial_bytes, EXACT.polynomial_bytes + 8 * 8192):  # each prime of each polynomial
        chunk = bytearray(total.chunks[1])
        chunk[place] ^= 1
        changed = dataclasses.replace(total, chunks=(total.chunks[0], bytes(chunk), total.chunks[2]))
        with pytest.raises(TamperedAggregateError):
            check_sum(changed, key, sealed_tags=tags, coefficients=[1, 2, 3, 4])


def test_a_round_key_encrypts_one_upload_under_these_parameters_too(new_key):
    key = new_key(params=EXACT)
    key._take()
    with pytest.raises(RoundKeyUsedError):
        key._take()


# ---- inner products


def test_opened_inner_products_are_within_the_stated_error_of_those_of_the_sent_updates(four):
    values, _, key, masked = four
    opened = open_products(masked, key)
    expected = plain_products(values, EXACT)
    assert np.abs(opened.products - expected).max() <= EXACT.scalar_error(SIZE)
    assert EXACT.scalar_error(SIZE) <= 1e-6 * np.abs(expected).max()
    assert opened.assurance is Assurance.HONEST_BUT_CURIOUS
    assert opened.disclosed == 10


def test_inner_products_of_updates_at_the_bound_are_within_the_stated_error(uploaded):
    rng = np.random.default_rng(1)
    ones = np.ones(SIZE)
    values = np.stack([ones, -ones, rng.normal(size=SIZE)]) * 1000
    uploads, key = uploaded(values)
    opened = open_products(multiplied(key, uploads), key).products
    assert np.abs(opened - plain_products(values, EXACT)).max() <= EXACT.scalar_error(SIZE)
    assert opened[0, 1] == pytest.approx(-(EXACT.bound**2), rel=1e-4)


def test_a_square_is_opened_modulo_the_stated_number_of_squared_bounds(seal, new_key):
    # Who does not shorten its update, and chooses its length, has a small square opened; up to half of that it has not.
    size, key, wraps = 20_000, new_key(params=EXACT), EXACT.wraps_at
    assert wraps == pytest.approx(2**14, rel=1e-5)
    for square, opened in ((wraps + 0.5, 0.5), (1.05 * wraps, 0.05 * wraps), (0.45 * wraps, 0.45 * wraps)):
        uploads = [seal(np.full(size, round(EXACT.amplitude * math.sqrt(square / size))), params=EXACT) for _ in range(2)]
        products = open_products(multiplied(key, uploads), key).products / EXACT.bound**2
        assert np.allclose(products, opened, rtol=0, atol=0.05)


def test_opened_inner_products_are_rounded_to_the_stated_step(four):
    _, _, key, masked = four
    steps = open_products(masked, key).products / EXACT.scalar_step
    assert np.array_equal(steps, np.rint(steps))


def test_what_the_opener_multiplies_itself_is_the_same_but_for_the_noise_of_the_mask(four):
    values, uploads, key, masked = four
    own = open_own_products(uploads, key, announced=masked)
    assert own.assurance is Assurance.RECOMPUTED
    assert np.abs(own.products - open_products(masked, key).products).max() <= 2 * EXACT.scalar_step
    # Without the noise of a mask only half a step of rounding and the noise of encryption are left.
    error = EXACT.scalar_error(SIZE) - EXACT.scalar_step
    assert np.abs(own.products - plain_products(values, EXACT)).max() <= error


def test_pairs_in_batches_are_the_same_pairs(four):
    values, uploads, key, _ = four
    opened = open_products(multiplied(key, uploads, most_at_once=3), key).products
    assert np.abs(opened - plain_products(values, EXACT)).max() <= EXACT.scalar_error(SIZE)


def test_no_more_numbers_are_opened_than_there_are_pairs(four, monkeypatch):
    _, _, key, masked = four
    opened = []
    real = type(key._ring_key).decrypt_product
    monkeypatch.setattr(type(key._ring_key), "decrypt_product", lambda self, words: opened.append(1) or real(self, words))
    assert open_products(masked, key).disclosed == len(opened) == len(pairs(4)) == 10


# ---- masks


def hidden(masked, key, pair):
    """All coefficients of what is inside a product, as shares of the modulus: what a curious opener can look at."""
    _, values = key._ring_key.decrypt_product(unpack_words(masked[pair], EXACT))
    return interpolate(values) / EXACT.modulus


def test_a_masked_product_shows_uniform_coefficients_and_an_unmasked_one_the_product(four):
    values, uploads, key, masked = four
    shown = hidden(masked.chunks, key, 0)[1:]
    # 8191 uniform numbers from -1/2 to 1/2: the mean square is 1/12 with a relative standard deviation of sqrt(4 / 5 / 8191).
    assert np.mean(shown**2) == pytest.approx(1 / 12, rel=6 * math.sqrt(0.8 / 8191))
    bare = [
        pack_words(words, EXACT)
        for words in unmasked_products(lambda upload, chunk: uploads[upload].chunks[chunk], count=4, layout=uploads[0].layout, params=EXACT)
    ]
    _, slots = key._ring_key.decrypt_product(unpack_words(bare[1], EXACT))
    sent = [np.pad(dequantise(quantise(row, EXACT)[0], 1, EXACT), (0, 3 * 4096 - SIZE)).reshape(3, 4096) for row in values[:2]]
    unit = (EXACT.amplitude * 2.0**EXACT.guard_bits / EXACT.bound) ** 2
    assert np.allclose(slots.real / unit, (sent[0] * sent[1]).sum(axis=0), atol=1e-9)  # the control: coordinate by coordinate
    with pytest.raises(TamperedProductsError):
        open_products(dataclasses.replace(masked, chunks=tuple(bare)), key)


def test_a_mask_sums_to_noise_of_at_most_one_step():
    ring = _seal_public.product_ring()
    constants = []
    for _ in range(50):
        words = ZeroSumMask(EXACT, no_zero)._polynomial()
        sums = [_seal_public.word_sum(part, prime) for part, prime in zip(words.reshape(2, -1), ring.moduli, strict=True)]
        constant = sums[0] * pow(8192, -1, ring.moduli[0]) % ring.moduli[0]
        constant -= ring.moduli[0] if constant > ring.moduli[0] // 2 else 0
        constants.append(constant / EXACT.constant_per_scalar)
    assert max(map(abs, constants)) <= 1
    # Uniform from -1 to 1: none of 50 is beyond 2/3 with a probability of 2^-29, and all alike never.
    assert max(map(abs, constants)) > 2 / 3


def test_masks_are_drawn_below_each_prime_and_never_twice_the_same():
    first, second = (ZeroSumMask(EXACT, no_zero)._polynomial().reshape(2, -1) for _ in range(2))
    for prime, one, other in zip(EXACT.moduli, first, second, strict=True):
        assert one.max() < prime
        assert not (one == other).all()
        assert np.mean(one / prime) == pytest.approx(0.5, abs=6 * math.sqrt(1 / 12 / one.size))


def test_words_beyond_a_prime_are_drawn_again(monkeypatch):
    draws = [bytes([255] * 8 + [1] * 24), bytes([1] * 8)]
    monkeypatch.setattr(product.os, "urandom", lambda count: draws.pop(0))
    assert product._uniform(EXACT.moduli[0], 4).tolist() == [0x0101010101010101] * 4


def test_a_mask_and_its_zeros_hide_one_ciphertext(four):
    mask = new_mask(four[2])
    mask.take()
    with pytest.raises(MaskUsedError, match="a second one would show both"):
        mask.take()


def test_a_repeated_mask_is_refused_and_shows_the_difference_of_the_products_when_forced(four, monkeypatch):
    values, uploads, key, _ = four
    once = new_mask(key).take()
    monkeypatch.setattr(ZeroSumMask, "take", lambda self: once)
    repeated = multiplied(key, uploads[:3])
    with pytest.raises(TamperedProductsError):
        open_products(repeated, key)
    # The control: without the refusal, the products of two pairs are read off each other, slot by slot.
    moduli = np.repeat(np.array(EXACT.moduli, np.uint64), EXACT.poly_modulus_degree)
    first, second = (unpack_words(repeated.chunks[pair], EXACT) for pair in (0, 1))
    every = np.tile(moduli, 3)
    _, slots = key._ring_key.decrypt_product((first + every - second) % every)
    sent = [np.pad(dequantise(quantise(row, EXACT)[0], 1, EXACT), (0, 3 * 4096 - SIZE)).reshape(3, 4096) for row in values[:2]]
    unit = (EXACT.amplitude * 2.0**EXACT.guard_bits / EXACT.bound) ** 2
    assert np.allclose(slots.real / unit, (sent[0] * sent[0] - sent[0] * sent[1]).sum(axis=0), atol=1e-9)


# ---- clients that divide what is public by what is theirs


def polynomials(upload, seed):
    """Both polynomials of what is multiplied of an upload: of each chunk, or of its sketch. Words of the shape (2, chunks, words)."""
    ring, moduli = _seal_public.product_ring(), np.repeat(np.array(EXACT.moduli, object), 8192)
    pieces = [
        (unpack_words(chunk[:-SEED_BYTES], EXACT).astype(object), _seal_public.expand(ring, chunk[-SEED_BYTES:]).astype(object))
        for chunk in upload.chunks
    ]
    every = np.stack(pieces, axis=1)
    if not upload.params.sketch:
        return every, moduli
    signs = chunk_signs(len(upload.chunks), seed=seed).astype(object)
    return (every * signs[:, np.newaxis]).sum(axis=1, keepdims=True) % moduli, moduli


def divided(masked, key, own, victim, seed=b""):
    """What curious clients read of a victim's upload, in grid steps: they solve the public products for it, with as many own as chunks.

    The third polynomials are linear in the victim's c1, with the own c1 as coefficients; then so are the second ones in its c0.
    """
    places = dict(own)
    know = {place: polynomials(upload, seed) for place, upload in places.items()}
    moduli = next(iter(know.values()))[1]
    products = {}
    for place in places:
        words = unpack_words(masked.chunks[pairs(masked.count).index((min(place, victim), max(place, victim)))], EXACT)
        products[place] = words.astype(object).reshape(3, -1)
    rows = np.stack([know[place][0][1] for place in places])  # own c1: (clients, chunks, words)

    def solved(right):
        if len(rows) == 1:
            return right * inverse % moduli
        (a, b), (c, d) = rows
        return np.stack([d * right[0] - b * right[1], a * right[1] - c * right[0]]) * inverse % moduli

    determinant = rows[0, 0] if len(rows) == 1 else rows[0, 0] * rows[1, 1] - rows[0, 1] * rows[1, 0]
    inverse = np.array([pow(int(word), -1, int(prime)) for word, prime in zip(determinant, moduli, strict=True)], object)
    c1 = solved(np.stack([products[place][2] for place in places]))
    c0 = solved(np.stack([(products[place][1] - (c1 * know[place][0][0]).sum(axis=0)) % moduli for place in places]))
    read = [np.concatenate(pair).astype(np.uint64) for pair in zip(c0, c1, strict=True)]
    return np.concatenate([gather(key._ring_key.decrypt_unrounded(words), EXACT) for words in read]) / 2**EXACT.guard_bits


def bare_products(key, uploads, monkeypatch, **changes):
    """What a server sends that masks the first polynomial alone."""
    with monkeypatch.context() as patch:
        patch.setattr(_seal_public, "zeros_under", lambda ring, words: no_zero)
        return multiplied(key, uploads, **changes)


def assert_guessed(read, true):
    """That what was read says nothing of what is true: 6 standard deviations of the correlation of unrelated numbers."""
    assert not (np.rint(read) == true).any()
    assert abs(np.corrcoef(read, true)[0, 1]) <= 6 / math.sqrt(len(true))


def test_a_client_that_divides_by_its_own_upload_reads_nothing_of_another_and_everything_where_only_the_plaintext_is_masked(
    uploaded, monkeypatch
):
    values = updates(4, 4000)
    uploads, key = uploaded(values)
    bare, masked = bare_products(key, uploads, monkeypatch), multiplied(key, uploads)
    # Both open to the same numbers: nothing that an opener is for tells them apart.
    assert np.abs(open_products(bare, key).products - open_products(masked, key).products).max() <= 2 * EXACT.scalar_error(4000)
    for victim in (0, 1, 3):
        sent, own = quantise(values[victim], EXACT)[0], [(2, uploads[2])]
        assert np.array_equal(np.rint(divided(bare, key, own, victim))[:4000], sent)
        assert_guessed(divided(masked, key, own, victim)[:4000], sent)


def test_two_clients_that_pool_their_uploads_read_nothing_of_two_chunks_and_everything_where_only_the_plaintext_is_masked(
    uploaded, monkeypatch
):
    values = updates(4, 8000)
    uploads, key = uploaded(values)
    bare, masked, own = bare_products(key, uploads, monkeypatch), multiplied(key, uploads), [(1, uploads[1]), (3, uploads[3])]
    for victim in (0, 2):
        sent = quantise(values[victim], EXACT)[0]
        assert np.array_equal(np.rint(divided(bare, key, own, victim))[:8000], sent)
        assert_guessed(divided(masked, key, own, victim)[:8000], sent)


def test_a_client_that_divides_by_its_own_sketch_reads_no_other_and_the_sketch_where_only_the_plaintext_is_masked(uploaded, monkeypatch):
    values, seed = updates(3), b"after the uploads"
    uploads, key = uploaded(values, SKETCHED)
    grid = np.pad(arranged(quantise(values[0], SKETCHED)[0], seed=key.key_id), (0, 3 * 4096 - SIZE)).reshape(3, 4096)
    sketch = (grid * chunk_signs(3, seed=seed)[:, np.newaxis]).sum(axis=0)
    bare, masked = bare_products(key, uploads, monkeypatch, seed=seed), multiplied(key, uploads, seed=seed)
    assert np.array_equal(np.rint(divided(bare, key, [(2, uploads[2])], 0, seed)), sketch)
    assert_guessed(divided(masked, key, [(2, uploads[2])], 0, seed), sketch)


def test_every_polynomial_of_a_product_is_hidden_by_something_fresh(four):
    _, uploads, _, masked = four
    moduli = np.tile(np.repeat(np.array(EXACT.moduli, np.uint64), 8192), 3)
    read = unmasked_products(lambda upload, chunk: uploads[upload].chunks[chunk], count=4, layout=uploads[0].layout, params=EXACT)
    added = [(unpack_words(chunk, EXACT) + moduli - words) % moduli for chunk, words in zip(masked.chunks, read, strict=True)]
    shares = np.stack([words / moduli for words in added]).reshape(len(added), 3, 2, 8192)
    for polynomial in range(3):
        for prime in range(2):
            rows = shares[:, polynomial, prime]
            # Uniform: mean and mean square of all words, each within 6 standard deviations.
            assert abs(rows.mean() - 1 / 2) <= 6 * math.sqrt(1 / 12 / rows.size)
            assert abs((rows**2).mean() - 1 / 3) <= 6 * math.sqrt(4 / 45 / rows.size)
            # Fresh: what two pairs have in common is no more than chance.
            correlations = np.corrcoef(rows) - np.eye(len(rows))
            assert np.abs(correlations).max() <= 6 / math.sqrt(8192)
    # The two zeros of one product are two: its polynomials do not follow from each other.
    assert abs(np.corrcoef(shares[:, 1].ravel(), shares[:, 2].ravel())[0, 1]) <= 6 / math.sqrt(shares[:, 1].size)


def test_zeros_are_fresh_and_open_to_noise_within_the_stated_bound(four, new_key, monkeypatch):
    key, stranger, seen = four[2], new_key(params=EXACT, round=1), set()
    zero = zero_of(key)
    monkeypatch.setattr(ZeroSumMask, "_polynomial", lambda self: np.zeros(16384, np.uint64))  # the zeros alone
    for _ in range(20):
        words = ZeroSumMask(EXACT, zero).take()
        seen.update(part.tobytes() for part in words.reshape(3, -1))
        constant, values = key._ring_key.decrypt_product(words)
        assert abs(constant) <= EXACT.zeros_noise
        assert 0 < np.abs(interpolate(values)).max() <= EXACT.zeros_noise
    assert len(seen) == 60
    # The control: under another round's key they are no zeros.
    assert np.abs(interpolate(stranger._ring_key.decrypt_product(words)[1])).max() > 2.0**90


def test_the_noise_of_zeros_is_far_below_that_of_a_mask_and_part_of_the_stated_error(monkeypatch):
    assert EXACT.zeros_noise < 2**26 < 2.0**-29 * EXACT.constant_per_scalar
    sizes = (5, SIZE, 10**7)
    stated = [EXACT.scalar_error(size) for size in sizes]
    monkeypatch.setattr(ProductParams, "zeros_noise", EXACT.zeros_noise + 2**56)  # as much as a step
    assert all(EXACT.scalar_error(size) - before >= 0.9 * EXACT.scalar_step for size, before in zip(sizes, stated, strict=True))


def test_a_round_has_one_public_key_which_all_who_derive_its_key_make_alike(four, new_key):
    key = four[2]
    public_key = key.public_key()
    assert len(public_key) == EXACT.public_key_bytes
    assert new_key(params=EXACT).public_key() == key.public_key() == public_key
    others = [new_key(params=EXACT, round=1), new_key(params=EXACT, attempt=1), new_key(params=SKETCHED)]
    assert len({public_key, *(other.public_key() for other in others)}) == 4
    with pytest.raises(ParametersMismatchError, match="only where ciphertexts are multiplied"):
        new_key().public_key()


def test_the_noise_of_the_public_key_is_drawn_from_another_seed_than_the_key():
    # SEAL draws the seed of `a` first, and then the noise: of the key's own seed that would be what the key was drawn from.
    seed = bytes(range(64))
    key = RoundKey(params=EXACT, seed=seed, tag_secret=bytes(TAG_SECRET_BYTES))
    made, wrong = unpack_public_key(key.public_key(), EXACT), key._ring_key.public_key_of(seed)
    assert key._public_seed != seed
    assert not np.array_equal(made, wrong)
    assert np.array_equal(made, key._ring_key.public_key_of(key._public_seed))


def test_products_without_the_rounds_public_key_are_refused(four):
    _, uploads, key, _ = four
    half = EXACT.public_key_bytes // 2
    good = key.public_key()
    for bad in (b"", good[:-1], good + b"1", bytes(len(good)), good[:half] + bytes(half), b"\xff" * len(good)):
        with pytest.raises(InvalidMessageError):
            multiplied(key, uploads, public_key=bad)
    with pytest.raises(ValueError, match="expected a mask for all"):
        product._masked(np.zeros(3 * 16384, np.uint64), np.zeros(16384, np.uint64), EXACT)


# ---- servers that lie


def test_a_pair_that_is_not_a_pair_is_refused_and_reads_a_coordinate_where_the_server_is_believed(four, new_key):
    values, uploads, key, masked = four
    ring, place = _seal_public.product_ring(), 17
    unit = np.zeros(4096, np.complex128)
    unit[place] = 2.0**49
    # The server multiplies by a plaintext of its own, which takes no key.
    chunk = uploads[0].chunks[0]
    pieces = unpack_words(chunk[:-64], EXACT), _seal_public.expand(ring, chunk[-64:])
    moduli = np.repeat(np.array(ring.moduli, dtype=object), 8192)
    lie = [(piece.astype(object) * ring.encode(unit).astype(object) % moduli).astype(np.uint64) for piece in pieces]
    words = np.concatenate((*lie, np.zeros(ring.polynomial_words, np.uint64)))
    whole = product._masked(words, new_mask(key).take(), EXACT)
    lying = dataclasses.replace(masked, chunks=(pack_words(whole, EXACT), *masked.chunks[1:]))
    with pytest.raises(TamperedProductsError):
        open_own_products(uploads, key, announced=lying)
    # The control: whoever believes the server opens the coordinate.
    opened = open_products(lying, key)
    assert opened.assurance is Assurance.HONEST_BUT_CURIOUS
    coordinate = dequantise(quantise(values[0], EXACT)[0], 1, EXACT)[place]
    scale = EXACT.amplitude * 2.0**EXACT.guard_bits / EXACT.bound / 2.0**49
    assert opened.products[0, 0] * scale == pytest.approx(coordinate, abs=1e-6)


def test_products_of_other_uploads_are_refused(four):
    _, uploads, key, masked = four
    swapped = (masked.chunks[1], masked.chunks[0], *masked.chunks[2:])
    other = multiplied(key, [uploads[1], uploads[0], *uploads[2:]])
    fewer = multiplied(key, uploads[:3])
    for announced in (dataclasses.replace(masked, chunks=swapped), other, fewer):
        with pytest.raises(TamperedProductsError):
            open_own_products(uploads, key, announced=announced)


def test_products_of_another_key_or_other_parameters_are_refused(four, uploaded, new_key):
    _, uploads, _, masked = four
    with pytest.raises(RoundMismatchError):
        open_products(masked, new_key(params=EXACT, round=1))
    with pytest.raises(RoundMismatchError):
        open_own_products(uploads, new_key(params=EXACT, round=1))
    with pytest.raises(ParametersMismatchError):
        open_products(masked, new_key(params=SKETCHED))
    with pytest.raises(ParametersMismatchError):
        open_own_products([*uploads[:2], *uploaded(updates(1, 5))[0]], new_key(params=EXACT))
    with pytest.raises(ParametersMismatchError):
        open_own_products([dataclasses.replace(uploads[0], params=SKETCHED), uploads[1]], new_key(params=SKETCHED))


def test_uploads_that_cannot_be_multiplied_are_refused(seal, new_key, four):
    _, uploads, key, _ = four
    with pytest.raises(ParametersMismatchError, match="cannot be multiplied"):
        open_own_products([seal(np.arange(5)), seal(np.arange(5))], new_key())
    with pytest.raises(ValueError, match="at least 2 fresh uploads"):
        open_own_products(uploads[:1], key)
    with pytest.raises(ValueError, match="at least 2 fresh uploads"):
        open_own_products([weighted_sum(uploads, [1, 1, 1, 1]), uploads[0]], key)
    with pytest.raises(ValueError, match="at least 2 uploads"):
        multiplied(key, uploads[:1])


def test_hostile_chunks_are_refused_with_one_error(four):
    _, uploads, key, masked = four
    for bad in (b"", bytes(10), uploads[0].chunks[0][:-1], b"\xff" * EXACT.fresh_chunk_bytes):
        with pytest.raises(InvalidMessageError):
            masked_products(
                lambda upload, chunk, bad=bad: bad,
                count=2,
                layout=uploads[0].layout,
                params=EXACT,
                key_id=uploads[0].key_id,
                public_key=key.public_key(),
            )
    for bad in (bytes(EXACT.product_bytes), b"\xff" * EXACT.product_bytes):
        with pytest.raises(InvalidMessageError):
            open_products(dataclasses.replace(masked, chunks=(bad, *masked.chunks[1:])), key)


def test_masked_products_of_another_shape_are_refused(four):
    *_, masked = four
    for changes in (
        {"key_id": b"short"},
        {"count": 1},
        {"count": 3},
        {"chunks": masked.chunks[1:]},
        {"chunks": (masked.chunks[0][1:], *masked.chunks[1:])},
    ):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(masked, **changes)


# ---- sketches


def test_an_arrangement_is_undone_and_depends_on_the_round():
    grid = np.random.default_rng(0).integers(-1000, 1000, 5000)
    there = arranged(grid, seed=b"round 1")
    assert np.array_equal(restored(there, seed=b"round 1"), grid)
    assert not np.array_equal(there, arranged(grid, seed=b"round 2"))
    assert np.array_equal(np.sort(np.abs(there)), np.sort(np.abs(grid)))


def test_the_arrangement_and_the_signs_are_the_same_numbers_on_every_machine():
    assert arranged(np.arange(1, 9), seed=b"x").tolist() == ARRANGED
    assert chunk_signs(8, seed=b"x").tolist() == SIGNS


def test_signs_are_fair_and_unlike_those_of_another_seed():
    one, other = chunk_signs(4000, seed=b"1"), chunk_signs(4000, seed=b"2")
    for numbers in (one, other, one * other):
        assert abs(numbers.sum()) <= 6 * math.sqrt(4000)
        assert set(numbers.tolist()) == {-1, 1}


def test_sketches_have_the_inner_product_as_their_mean_and_the_stated_error():
    rng, size, draws = np.random.default_rng(3), 3 * 4096 - 5, 120
    spread, spike = rng.normal(size=size), np.zeros(size)
    spike[[0, 4096, 8192]] = 50.0  # in one slot, if it were not for the order
    for u, v in ((spread, spread), (spread, rng.normal(size=size)), (spike, spike), (spike, spread)):
        found = []
        for draw in range(draws):
            seed = draw.to_bytes(4, "big")
            signs = chunk_signs(3, seed=b"chunks" + seed)[:, np.newaxis]
            s, t = ((np.pad(arranged(w, seed=seed), (0, 5)).reshape(3, 4096) * signs).sum(axis=0) for w in (u, v))
            found.append(s @ t - u @ v)
        stated = standard_error(u @ v, u @ u, v @ v)
        assert abs(np.mean(found)) <= 6 * stated / math.sqrt(draws)
        if u is not spike:  # of a spike one draw in a thousand is off, by a lot
            assert 0.5 * stated <= np.std(found) <= 1.4 * stated


def test_without_the_order_two_coordinates_of_one_slot_are_off_by_all_they_have():
    u = np.zeros(2 * 4096)
    u[[0, 4096]] = 1.0
    for sign in (1, -1):
        assert (u.reshape(2, 4096) * [[1], [sign]]).sum(axis=0) @ (u.reshape(2, 4096) * [[1], [sign]]).sum(axis=0) in (0.0, 4.0)


def test_opened_sketches_are_the_inner_products_of_the_sketches_and_the_sum_is_exact(uploaded):
    values = updates(3)
    uploads, key = uploaded(values, SKETCHED)
    seed = b"after the uploads"
    masked = multiplied(key, uploads, seed=seed)
    grids = [quantise(row, SKETCHED)[0] for row in values]
    signs = chunk_signs(3, seed=seed)[:, np.newaxis]
    sketches = np.stack([(np.pad(arranged(g, seed=key.key_id), (0, 3 * 4096 - SIZE)).reshape(3, 4096) * signs).sum(axis=0) for g in grids])
    expected = (sketches @ sketches.T) * SKETCHED.step**2
    for opened in (open_products(masked, key), open_own_products(uploads, key, seed=seed, announced=masked)):
        assert np.abs(opened.products - expected).max() <= SKETCHED.scalar_error(SIZE)
    plain = plain_products(values, SKETCHED)
    for first, second in pairs(3):
        stated = standard_error(plain[first, second], plain[first, first], plain[second, second])
        assert abs(expected[first, second] - plain[first, second]) <= 6 * stated
    assert np.array_equal(open_sum(weighted_sum(uploads, [1, 2, 3]), key, coefficients=[1, 2, 3]), grids[0] + 2 * grids[1] + 3 * grids[2])


def test_a_seed_that_was_not_the_servers_gives_other_sketches_and_is_refused(uploaded):
    uploads, key = uploaded(updates(3), SKETCHED)
    masked = multiplied(key, uploads, seed=b"one")
    with pytest.raises(TamperedProductsError):
        open_own_products(uploads, key, seed=b"another", announced=masked)


# ---- silence and imports


def test_products_show_nothing_when_printed(four):
    _, _, key, masked = four
    assert repr(masked) == "MaskedProducts(uploads=4)"
    assert repr(open_products(masked, key)) == "OpenedProducts(uploads=4, assurance=HONEST_BUT_CURIOUS)"


def test_nothing_secret_can_be_reached_from_the_public_half():
    code = (
        "import sys, privfed.he.product\n"
        "names = ['torch', 'opacus', *('privfed.he.' + n for n in ('secret', '_seal_secret', 'product_secret'))]\n"
        "bad = [m for m in names if m in sys.modules]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_noise_of_a_sum_is_that_of_its_coefficients(four):
    _, uploads, key, _ = four
    total = weighted_sum(uploads, [200, 300, 400, 100])
    raw = key._ring_key.decrypt_unrounded(unpack_words(total.chunks[0], EXACT)).real
    residual = raw - np.rint(raw / 2**EXACT.guard_bits) * 2.0**EXACT.guard_bits
    expected = math.sqrt(FRESH_NOISE_VARIANCE * 4096 * (200**2 + 300**2 + 400**2 + 100**2))
    assert math.sqrt(np.mean(residual**2)) == pytest.approx(expected, rel=0.25)
    assert copy.copy(total) == total
    assert isinstance(multiplied(key, uploads[:2]), MaskedProducts)

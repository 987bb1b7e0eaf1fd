import dataclasses
import functools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError
from privfed.he.additive import (
    CkksVector,
    check_chunk,
    check_coefficients,
    seeded_sum,
    sum_chunks,
    sum_first_polynomials,
    weighted_sum,
)
from privfed.he.codec import pack_words, quantise, unpack_words
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, SharedKey, encrypt, open_sum
from privfed.update import Layout

IMPORTS = """
import sys
from fractions import Fraction
for name in ("torch", "opacus"):
    sys.modules[name] = None
import privfed.he.additive
from privfed.he.params import CkksParams
CkksParams.standard()
loaded = {name for name in sys.modules if sys.modules[name] is not None}
print(sorted(loaded & {"torch", "opacus", "privfed.he.secret", "privfed.he._seal_secret"}))
"""


@pytest.fixture(scope="module")
def grids(params):
    rng = np.random.default_rng(3)
    return [rng.integers(-params.amplitude, params.amplitude + 1, 5000) for _ in range(3)]


@pytest.fixture(scope="module")
def vectors(grids, seal):
    return [seal(grid) for grid in grids]


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_ciphertext_result_is_the_integer_weighted_sum_bit_for_bit(data, params):
    clients = data.draw(st.integers(2, 50), label="clients")
    size = data.draw(st.integers(1, 9000), label="size")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="numpy seed"))
    total = data.draw(st.integers(clients, params.weight_sum), label="sum of coefficients")
    # A uniform composition of the total into that many positive parts.
    cuts = np.sort(rng.choice(np.arange(1, total), clients - 1, replace=False))
    coefficients = [int(part) for part in np.diff([0, *cuts, total])]
    shared, layout = SharedKey.generate(), Layout(names=("w",), shapes=((size,),))
    binding = RoundBinding(session=rng.bytes(16), attempt=1, round=2, roster_digest=rng.bytes(32), params=params)
    expected, vectors = np.zeros(size, np.int64), []
    for coefficient in coefficients:
        grid = rng.integers(-params.amplitude, params.amplitude + 1, size)
        if rng.random() < 0.3:
            grid = np.full(size, params.amplitude * rng.choice([-1, 0, 1]))
        expected += coefficient * grid
        vectors.append(encrypt(grid, layout, params, shared.round_key(binding), sender="bank_a"))
    result = weighted_sum(vectors, coefficients)
    assert np.array_equal(open_sum(result, shared.round_key(binding), coefficients=coefficients), expected)


PATTERNS = ["+", "-", "alternating", "spike", "random signs", "random"]


def pattern(kind, size, rng):
    signs = {
        "+": np.ones(size, np.int64),
        "-": -np.ones(size, np.int64),
        "alternating": np.where(np.arange(size) % 2, -1, 1),
        "spike": np.eye(1, size, size - 1, dtype=np.int64)[0],
        "random signs": rng.choice(np.array([-1, 1]), size),
    }
    return signs.get(kind)


@functools.cache
def crowd(params):
    """Keys of one round for as many clients as any test here has: deriving one takes longer than using it."""
    shared = SharedKey.generate()
    return [shared.round_key(RoundBinding(session=bytes(16), attempt=0, round=0, roster_digest=bytes(32), params=params)) for _ in range(2)]


def sealed(grid, params, layout):
    encrypting = crowd(params)[0]
    encrypting._used = False  # another client that derived the same key
    return encrypt(grid, layout, params, encrypting, sender="bank")


@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "whole"])
@pytest.mark.parametrize("name", ["parity", "compact", "standard", "compatible"])
@pytest.mark.parametrize("clients", [2, 3, 17, 100])
def test_every_profile_opens_to_the_integer_sum_bit_for_bit_with_dropouts_and_at_the_limits(name, clients, seeded):
    prescaled = name in ("parity", "compatible")
    params = getattr(CkksParams, name)(**({"clients": clients} if prescaled else {}))
    if params.slots and seeded:
        pytest.skip("a TenSEAL server returns both polynomials")
    params = dataclasses.replace(params, seeded_sums=seeded)
    rng = np.random.default_rng(clients)
    size = params.chunk_coordinates if clients > 3 else params.chunk_coordinates + 5
    layout = Layout(names=("w",), shapes=((size,),))
    for kind in PATTERNS if clients <= 3 else ["+", "random"]:
        dropped = set(rng.choice(clients, clients // 4, replace=False).tolist()) if kind == "random" else set()
        answering = [client for client in range(clients) if client not in dropped]
        if prescaled:
            coefficients = [1] * len(answering)
            # The sum is at its limit: equal shares, each rounded away from zero.
            each = min(params.largest_sum // clients, params.largest_point)
        else:
            weights = np.sort(rng.choice(np.arange(1, params.weight_sum), len(answering) - 1, replace=False))
            coefficients = [int(part) for part in np.diff([0, *weights, params.weight_sum])]
            each = params.amplitude
        vectors, expected = [], np.zeros(size, np.int64)
        for coefficient in coefficients:
            signs = pattern(kind, size, rng)
            grid = rng.integers(-each, each + 1, size) if signs is None else signs * each
            vectors.append(sealed(grid, params, layout))
            expected += coefficient * grid
        if kind == "+" and not params.slots:
            assert int(np.abs(expected).max()) * 2**params.guard_bits > 0.95 * (params.modulus // 2) or params.amplitude == 2**23 - 1
        total = seeded_sum(vectors, coefficients).regenerate(coefficients) if seeded else weighted_sum(vectors, coefficients)
        assert np.array_equal(open_sum(total, crowd(params)[1], coefficients=coefficients), expected)


@pytest.mark.parametrize("clients", [2, 5])
def test_the_largest_point_of_a_client_with_half_of_all_weights_is_encoded(clients):
    for params in (CkksParams.parity(clients=clients), CkksParams.compatible(clients=clients)):
        layout = Layout(names=("w",), shapes=((4096,),))
        grid = np.full(4096, params.largest_point)
        total = weighted_sum([sealed(grid, params, layout)], [1])
        assert np.array_equal(open_sum(total, crowd(params)[1], coefficients=[1]), grid)


def test_a_seeded_sum_regenerates_to_the_weighted_sum(vectors):
    total = seeded_sum(vectors, [5, 1, 1000])
    assert total.regenerate([5, 1, 1000]) == weighted_sum(vectors, [5, 1, 1000])
    assert [len(chunk) for chunk in total.chunks] == [4096 * 7, 904 * 7]
    assert total.seeds == tuple(vector.seeds for vector in vectors)
    assert repr(total) == "SeededSum(size=5000, chunks=2, uploads=3)"


def test_a_seeded_sum_of_a_wrong_shape_is_refused(vectors):
    total = seeded_sum(vectors, [1, 1, 1])
    with pytest.raises(ValueError, match="expected chunk 1 to have 6328 bytes, got 6329"):
        dataclasses.replace(total, chunks=(total.chunks[0], total.chunks[1] + b"x"))
    with pytest.raises(ValueError, match="one seed for every chunk of every upload"):
        dataclasses.replace(total, seeds=(total.seeds[0][:-1], *total.seeds[1:]))
    for coefficients in ([1, 1], [1, 1, 1, 1]):
        with pytest.raises(ValueError, match="expected one coefficient for each of 3 uploads"):
            total.regenerate(coefficients)
    with pytest.raises(ValueError, match="positive int"):
        total.regenerate([1, 1, 0])
    with pytest.raises(InvalidMessageError):
        dataclasses.replace(total, chunks=(b"\xff" * 28672, total.chunks[1])).regenerate([1, 1, 1])


def test_first_polynomials_are_read_one_at_a_time_and_have_the_same_errors(vectors, params):
    for place, size in enumerate(params.first_polynomial_sizes(vectors[0].layout)):
        chunks = [(1, vectors[0].chunks[place]), (2, vectors[1].chunks[place])]
        assert sum_first_polynomials(iter(chunks), params, size) == seeded_sum(vectors[:2], [1, 2]).chunks[place]
        with pytest.raises(ValueError, match="a sum of at most 4096"):
            sum_first_polynomials([(1, vectors[0].chunks[place]), (4096, vectors[1].chunks[place])], params, size)
        for bad in (b"\xff" * len(vectors[0].chunks[place]), vectors[0].chunks[place][:-1], vectors[0].chunks[place] + bytes(7)):
            with pytest.raises(InvalidMessageError):
                sum_first_polynomials([(1, bad)], params, size)


@pytest.mark.parametrize("words", [1, 904, 4096])
def test_an_empty_column_is_refused_whatever_its_size(params, words):
    for operation in (sum_chunks, sum_first_polynomials):
        with pytest.raises(ValueError, match="expected at least one chunk in the sum, got none"):
            operation([], params, words * params.word_bytes)


@pytest.mark.parametrize("coefficient", [2, 4096])
def test_nothing_but_one_is_multiplied_by_where_clients_pre_scale(coefficient):
    params, layout = CkksParams.parity(clients=3000), Layout(names=("w",), shapes=((3,),))
    vectors = [sealed(np.ones(3, np.int64), params, layout) for _ in range(2)]
    for operation in (weighted_sum, seeded_sum):
        with pytest.raises(ValueError, match="expected every coefficient to be 1, because the clients have pre-scaled"):
            operation(vectors, [1, coefficient])
    with pytest.raises(ValueError, match="pre-scaled"):
        open_sum(weighted_sum(vectors, [1, 1]), crowd(params)[1], coefficients=[coefficient])


@pytest.mark.parametrize("coefficients", [(4096,), (2048, 2048), (1, 4095), (1366, 1365, 1365)])
@pytest.mark.parametrize("kind", PATTERNS[:-1])
def test_sums_next_to_half_the_modulus_are_exact(params, seal, new_key, coefficients, kind):
    grid = pattern(kind, 4096, np.random.default_rng(8)) * params.amplitude
    assert 4096 * int(np.abs(grid).max()) * 2**params.guard_bits > 0.99 * (params.modulus // 2)
    result = weighted_sum([seal(grid) for _ in coefficients], coefficients)
    assert np.array_equal(open_sum(result, new_key(), coefficients=coefficients), 4096 * grid)


def test_weighted_sum_opens_to_the_weighted_sum_and_changes_no_argument(vectors, grids, new_key):
    before = [vector.chunks for vector in vectors]
    result = weighted_sum(vectors, [5, 1, 1000])
    assert np.array_equal(open_sum(result, new_key(), coefficients=[5, 1, 1000]), 5 * grids[0] + grids[1] + 1000 * grids[2])
    assert [vector.chunks for vector in vectors] == before
    assert not result.fresh


def test_chunk_sums_read_one_chunk_at_a_time_and_equal_the_weighted_sum(vectors, params):
    expected = weighted_sum(vectors, [1, 2, 3])
    read = []

    def chunks(index):
        for coefficient, vector in zip([1, 2, 3], vectors, strict=True):
            read.append(index)
            yield coefficient, vector.chunks[index]

    sizes = params.first_polynomial_sizes(vectors[0].layout)
    assert tuple(sum_chunks(chunks(index), params, size) for index, size in enumerate(sizes)) == expected.chunks
    assert read == [0, 0, 0, 1, 1, 1]


def test_the_order_of_the_clients_does_not_matter(vectors):
    assert weighted_sum(vectors, [1, 2, 3]).chunks == weighted_sum(vectors[::-1], [3, 2, 1]).chunks


@pytest.mark.parametrize("coefficient", [0, -1, 1.0, True, np.int64(1)])
def test_coefficients_that_are_not_positive_ints_are_refused(vectors, params, coefficient):
    with pytest.raises(ValueError, match="expected every coefficient to be a positive int"):
        weighted_sum(vectors, [1, 1, coefficient])
    with pytest.raises(ValueError, match="expected every coefficient to be a positive int"):
        sum_chunks([(coefficient, vectors[0].chunks[0])], params, params.polynomial_bytes)


def test_coefficients_beyond_the_proven_sum_are_refused(vectors, params):
    with pytest.raises(ValueError, match="a sum of at most 4096"):
        weighted_sum(vectors, [1, 1, 4095])
    with pytest.raises(ValueError, match="a sum of at most 4096"):
        sum_chunks([(1, vectors[0].chunks[0]), (4096, vectors[1].chunks[0])], params, params.polynomial_bytes)


def test_an_empty_sum_is_refused(params):
    with pytest.raises(ValueError, match="at least one vector"):
        weighted_sum([], [])
    with pytest.raises(ValueError, match="at least one coefficient"):
        check_coefficients([], params)


def test_one_coefficient_per_vector_is_demanded(vectors):
    with pytest.raises(ValueError, match="one coefficient for each vector"):
        weighted_sum(vectors, [1, 2])


def test_mixed_layouts_are_refused(vectors):
    other = dataclasses.replace(vectors[0], layout=Layout(names=("other",), shapes=((5000,),)))
    with pytest.raises(LayoutMismatchError, match="nothing was added"):
        weighted_sum([vectors[0], other], [1, 1])


def test_mixed_parameters_are_refused(vectors):
    other = dataclasses.replace(vectors[0], params=CkksParams.standard(bound=2.0))
    with pytest.raises(ParametersMismatchError, match="nothing was added"):
        weighted_sum([vectors[0], other], [1, 1])


def test_mixed_keys_are_refused(vectors):
    other = dataclasses.replace(vectors[0], key_id=bytes(16))
    with pytest.raises(RoundMismatchError, match="nothing was added"):
        weighted_sum([vectors[0], other], [1, 1])


def test_a_sum_is_not_summed_again(vectors):
    total = weighted_sum(vectors, [1, 1, 1])
    with pytest.raises(ValueError, match="expected fresh vectors"):
        weighted_sum([vectors[0], total], [1, 1])


def test_vectors_of_a_wrong_shape_are_refused(vectors):
    fresh = vectors[0]
    with pytest.raises(ValueError, match="key id of 16 bytes"):
        dataclasses.replace(fresh, key_id=bytes(15))
    with pytest.raises(ValueError, match="expected 2 chunks"):
        dataclasses.replace(fresh, chunks=fresh.chunks[:1])
    with pytest.raises(ValueError, match="expected chunk 1 to have 6392 bytes, got 6391"):
        dataclasses.replace(fresh, chunks=(fresh.chunks[0], fresh.chunks[1][:-1]))
    with pytest.raises(ValueError, match="expected chunk 0 to have 57344 bytes, got 28736"):
        dataclasses.replace(fresh, fresh=False, sealed_tags=b"")
    for tags in (b"", bytes(91), bytes(93)):
        with pytest.raises(ValueError, match="sealed tags of 92 bytes on a fresh vector alone"):
            dataclasses.replace(fresh, sealed_tags=tags)
    with pytest.raises(ValueError, match="on a fresh vector alone"):
        dataclasses.replace(weighted_sum([fresh], [1]), sealed_tags=bytes(92))


def test_repr_shows_no_bytes(vectors):
    assert repr(vectors[0]) == "CkksVector(size=5000, chunks=2, fresh=True)"


def test_honest_chunks_pass_the_check(vectors, params):
    total = weighted_sum(vectors, [1, 1, 1])
    for place, size in enumerate(params.first_polynomial_sizes(total.layout)):
        check_chunk(vectors[0].chunks[place], params, size, fresh=True)
        check_chunk(total.chunks[place], params, size, fresh=False)


@pytest.mark.parametrize("words", [1, 904, 4095, 4096])
@pytest.mark.parametrize("fresh", [True, False])
def test_chunks_of_a_wrong_length_are_refused(params, fresh, words):
    first = words * params.word_bytes
    size = first + (64 if fresh else params.polynomial_bytes)
    for length in (0, 1, 64, 7 * 4096, size - 64, size - 7, size - 1, size + 1, size + 7, 2 * size):
        if length != size:
            with pytest.raises(InvalidMessageError):
                check_chunk(b"\1" * length, params, first, fresh=fresh)
    check_chunk(b"\1" * size, params, first, fresh=fresh)


@pytest.mark.parametrize(("place", "position"), [(0, 0), (0, 4095), (0, 8191), (1, 0), (1, 903), (1, 904), (1, 4999)])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_word_that_is_not_below_the_modulus_is_refused(vectors, params, fresh, place, position):
    size = params.first_polynomial_sizes(vectors[0].layout)[place]
    if fresh and 7 * position >= size:
        pytest.skip("a seed has no words")
    chunk = bytearray(vectors[0].chunks[place] if fresh else weighted_sum(vectors, [1, 1, 1]).chunks[place])
    chunk[7 * position : 7 * position + 7] = params.modulus.to_bytes(7, "little")
    with pytest.raises(InvalidMessageError):
        check_chunk(bytes(chunk), params, size, fresh=fresh)
    chunk[7 * position : 7 * position + 7] = (params.modulus - 1).to_bytes(7, "little")
    check_chunk(bytes(chunk), params, size, fresh=fresh)


@pytest.mark.parametrize("place", [0, 1])
def test_a_transparent_ciphertext_is_refused(vectors, params, place):
    size = params.first_polynomial_sizes(vectors[0].layout)[place]
    words = unpack_words(weighted_sum(vectors, [1, 1, 1]).chunks[place], params)
    words[-4096:] = 0
    with pytest.raises(InvalidMessageError):
        check_chunk(pack_words(words, params), params, size, fresh=False)
    with pytest.raises(InvalidMessageError):
        check_chunk(bytes(size + params.polynomial_bytes), params, size, fresh=False)


def test_a_bad_chunk_anywhere_stops_the_sum(vectors):
    bad = dataclasses.replace(vectors[2], chunks=(vectors[2].chunks[0], b"\xff" * len(vectors[2].chunks[1])))
    for operation in (weighted_sum, seeded_sum):
        with pytest.raises(InvalidMessageError):
            operation([*vectors[:2], bad], [1, 1, 1])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_mutated_chunks_are_ciphertexts_or_invalid_messages_and_nothing_else(data, params, vectors):
    place = data.draw(st.integers(0, 1))
    size = params.first_polynomial_sizes(vectors[0].layout)[place]
    chunk = bytearray(vectors[0].chunks[place])
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.sampled_from([0, 1, 63, 64, 127, 255]))
    if data.draw(st.booleans()):
        chunk = chunk[: data.draw(st.integers(0, len(chunk)))]
    words_in_range = len(chunk) == size + 64 and all(
        int.from_bytes(chunk[start : start + 7], "little") < params.modulus for start in range(0, size, 7)
    )
    if words_in_range:
        check_chunk(bytes(chunk), params, size, fresh=True)
    else:
        with pytest.raises(InvalidMessageError):
            check_chunk(bytes(chunk), params, size, fresh=True)


CUT = [
    dataclasses.replace(params, seeded_sums=seeded)
    for params in (CkksParams.standard(), CkksParams.compact(), CkksParams.parity(clients=3))
    for seeded in (True, False)
]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), params=st.sampled_from(CUT), size=st.sampled_from([1, 4095, 4096, 4097, 8199]) | st.integers(1, 9000))
def test_layouts_of_every_size_open_bit_for_bit_whatever_of_the_last_chunk_travels(data, params, size):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    coefficients = [1, 1] if params.prescaled else [data.draw(st.integers(1, params.weight_sum // 2)) for _ in range(2)]
    layout = Layout(names=("w",), shapes=((size,),))
    kind, grids = data.draw(st.sampled_from(PATTERNS)), []
    for _ in coefficients:
        signs = pattern(kind, size, rng)
        points = rng.integers(-params.largest_point, params.largest_point + 1, size)
        grids.append(points if signs is None else signs * params.largest_point)
    vectors = [sealed(grid, params, layout) for grid in grids]
    total = weighted_sum(vectors, coefficients)
    expected = sum(coefficient * grid for coefficient, grid in zip(coefficients, grids, strict=True))
    assert np.array_equal(open_sum(total, crowd(params)[1], coefficients=coefficients), expected)
    assert seeded_sum(vectors, coefficients).regenerate(coefficients) == total
    assert sum(map(len, vectors[0].chunks)) == size * params.word_bytes + 64 * params.chunks(layout)


def test_the_public_half_loads_neither_keys_nor_torch():
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_type_but_the_vector_flows():
    assert set(CkksVector.__dataclass_fields__) == {"layout", "params", "key_id", "chunks", "fresh", "sealed_tags"}


@pytest.mark.parametrize("name", ["parity", "compact", "standard", "compatible"])
def test_120_rounds_with_keys_of_their_own_stay_bit_exact_whatever_the_coordinates_are(name):
    prescaled = name in ("parity", "compatible")
    params = getattr(CkksParams, name)(bound=0.5, **({"clients": 3} if prescaled else {}))
    layout = Layout(names=("w",), shapes=((64,),))
    shared, share = SharedKey.generate(), Fraction(1, 3) if prescaled else None
    hostile = np.array(
        [0.5, -0.5, 5e-324, -5e-324, 2.0**-1040, -0.0, 1e300, -1e300, np.nextafter(0.5, 0), params.step / 2, 1.5 * params.step]
    )
    for number in range(120):
        rng = np.random.default_rng(number)
        binding = RoundBinding(session=bytes(16), attempt=0, round=number, roster_digest=bytes(32), params=params)
        answering = 2 + number % 2
        coefficients = [1] * answering if prescaled else [int(part) for part in rng.integers(1, params.weight_sum // 3, answering)]
        key, vectors, expected = shared.round_key(binding), [], np.zeros(64, np.int64)
        for client, coefficient in enumerate(coefficients):
            values = np.where(rng.random(64) < 0.5, rng.choice(hostile, 64), (-1.0) ** np.arange(64) * 0.5)
            grid, _ = quantise(values, params, share)
            key._used = False  # another client that derived the same key
            vectors.append(encrypt(grid, layout, params, key, sender=f"bank_{client}"))
            expected += coefficient * grid
        assert np.array_equal(open_sum(weighted_sum(vectors, coefficients), key, coefficients=coefficients), expected)

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError, LayoutMismatchError, ParametersMismatchError, RoundMismatchError
from privfed.he.additive import CkksVector, check_chunk, check_coefficients, sum_chunks, weighted_sum
from privfed.he.codec import pack_words, unpack_words
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, SharedKey, encrypt, open_sum
from privfed.update import Layout

IMPORTS = """
import sys
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
        vectors.append(encrypt(grid, layout, params, shared.round_key(binding)))
    result = weighted_sum(vectors, coefficients)
    assert np.array_equal(open_sum(result, shared.round_key(binding), coefficients=coefficients), expected)


@pytest.mark.parametrize("coefficients", [(4096,), (2048, 2048), (1, 4095), (1366, 1365, 1365)])
@pytest.mark.parametrize("pattern", ["+", "-", "alternating", "spike", "random signs"])
def test_sums_next_to_half_the_modulus_are_exact(params, seal, new_key, coefficients, pattern):
    signs = {
        "+": np.ones(4096, np.int64),
        "-": -np.ones(4096, np.int64),
        "alternating": np.where(np.arange(4096) % 2, -1, 1),
        "spike": np.eye(1, 4096, 4095, dtype=np.int64)[0],
        "random signs": np.random.default_rng(8).choice(np.array([-1, 1]), 4096),
    }
    grid = signs[pattern] * params.amplitude
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

    assert tuple(sum_chunks(chunks(index), params) for index in range(2)) == expected.chunks
    assert read == [0, 0, 0, 1, 1, 1]


def test_the_order_of_the_clients_does_not_matter(vectors):
    assert weighted_sum(vectors, [1, 2, 3]).chunks == weighted_sum(vectors[::-1], [3, 2, 1]).chunks


@pytest.mark.parametrize("coefficient", [0, -1, 1.0, True, np.int64(1)])
def test_coefficients_that_are_not_positive_ints_are_refused(vectors, params, coefficient):
    with pytest.raises(ValueError, match="expected every coefficient to be a positive int"):
        weighted_sum(vectors, [1, 1, coefficient])
    with pytest.raises(ValueError, match="expected every coefficient to be a positive int"):
        sum_chunks([(coefficient, vectors[0].chunks[0])], params)


def test_coefficients_beyond_the_proven_sum_are_refused(vectors, params):
    with pytest.raises(ValueError, match="a sum of at most 4096"):
        weighted_sum(vectors, [1, 1, 4095])
    with pytest.raises(ValueError, match="a sum of at most 4096"):
        sum_chunks([(1, vectors[0].chunks[0]), (4096, vectors[1].chunks[0])], params)


def test_an_empty_sum_is_refused(params):
    with pytest.raises(ValueError, match="at least one vector"):
        weighted_sum([], [])
    with pytest.raises(ValueError, match="at least one ciphertext"):
        sum_chunks([], params)
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
    with pytest.raises(ValueError, match="every chunk to have 28736 bytes"):
        dataclasses.replace(fresh, chunks=(fresh.chunks[0], fresh.chunks[1][:-1]))
    with pytest.raises(ValueError, match="every chunk to have 57344 bytes"):
        dataclasses.replace(fresh, fresh=False)


def test_repr_shows_no_bytes(vectors):
    assert repr(vectors[0]) == "CkksVector(size=5000, chunks=2, fresh=True)"


def test_honest_chunks_pass_the_check(vectors, params):
    check_chunk(vectors[0].chunks[0], params, fresh=True)
    check_chunk(weighted_sum(vectors, [1, 1, 1]).chunks[0], params, fresh=False)


@pytest.mark.parametrize("fresh", [True, False])
def test_chunks_of_a_wrong_length_are_refused(params, fresh):
    size = params.fresh_chunk_bytes if fresh else params.sum_chunk_bytes
    for length in (0, 1, size - 7, size - 1, size + 1, size + 7, 2 * size):
        with pytest.raises(InvalidMessageError):
            check_chunk(b"\1" * length, params, fresh=fresh)


@pytest.mark.parametrize("position", [0, 4095])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_word_that_is_not_below_the_modulus_is_refused(vectors, params, fresh, position):
    chunk = bytearray(vectors[0].chunks[0] if fresh else weighted_sum(vectors, [1, 1, 1]).chunks[0])
    chunk[7 * position : 7 * position + 7] = params.modulus.to_bytes(7, "little")
    with pytest.raises(InvalidMessageError):
        check_chunk(bytes(chunk), params, fresh=fresh)
    chunk[7 * position : 7 * position + 7] = (params.modulus - 1).to_bytes(7, "little")
    check_chunk(bytes(chunk), params, fresh=fresh)


def test_a_transparent_ciphertext_is_refused(vectors, params):
    words = unpack_words(weighted_sum(vectors, [1, 1, 1]).chunks[0], params)
    words[4096:] = 0
    with pytest.raises(InvalidMessageError):
        check_chunk(pack_words(words, params), params, fresh=False)
    with pytest.raises(InvalidMessageError):
        check_chunk(bytes(params.sum_chunk_bytes), params, fresh=False)


def test_a_bad_chunk_anywhere_stops_the_sum(vectors):
    bad = dataclasses.replace(vectors[2], chunks=(vectors[2].chunks[0], b"\xff" * len(vectors[2].chunks[1])))
    with pytest.raises(InvalidMessageError):
        weighted_sum([*vectors[:2], bad], [1, 1, 1])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_mutated_chunks_are_ciphertexts_or_invalid_messages_and_nothing_else(data, params, vectors):
    chunk = bytearray(vectors[0].chunks[0])
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.sampled_from([0, 1, 63, 64, 127, 255]))
    if data.draw(st.booleans()):
        chunk = chunk[: data.draw(st.integers(0, len(chunk)))]
    words_in_range = len(chunk) == params.fresh_chunk_bytes and all(
        int.from_bytes(chunk[start : start + 7], "little") < params.modulus for start in range(0, 4096 * 7, 7)
    )
    if words_in_range:
        check_chunk(bytes(chunk), params, fresh=True)
    else:
        with pytest.raises(InvalidMessageError):
            check_chunk(bytes(chunk), params, fresh=True)


def test_the_public_half_loads_neither_keys_nor_torch():
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_type_but_the_vector_flows():
    assert set(CkksVector.__dataclass_fields__) == {"layout", "params", "key_id", "chunks", "fresh"}

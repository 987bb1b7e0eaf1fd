import struct
from fractions import Fraction

import numpy as np
import pytest
import tenseal
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError, TamperedAggregateError
from privfed.he._seal_bytes import CONTAINER_MAGIC, members
from privfed.he.additive import weighted_sum
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
from privfed.he.secret import check_sum, open_sum
from privfed.he.tenseal_vectors import decode_sum, encode_vector

CLIENTS, SIZE = 3, 5000
PARAMS = CkksParams.compatible(clients=CLIENTS, bound=0.5)
NAMES = [f"bank_{index}" for index in range(CLIENTS)]


@pytest.fixture(scope="module")
def server():
    """A context without a secret key, as a server makes it that has never heard of us."""
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40])
    context.global_scale = 2**40
    return tenseal.context_from(context.serialize(save_secret_key=False))


@pytest.fixture(scope="module")
def grids():
    rng = np.random.default_rng(4)
    return [quantise(rng.normal(0, 0.3, SIZE), PARAMS, Fraction(1, CLIENTS))[0] for _ in NAMES]


@pytest.fixture(scope="module")
def uploads(seal, grids):
    return [seal(grid, sender=name, params=PARAMS) for name, grid in zip(NAMES, grids, strict=True)]


@pytest.fixture(scope="module")
def returned(server, uploads):
    """What the server makes of the uploads, with nothing but TenSEAL."""
    vectors = [tenseal.ckks_vector_from(server, encode_vector(upload)) for upload in uploads]
    return (vectors[0] + vectors[1] + vectors[2]).serialize()


@pytest.fixture
def read(layout, uploads):
    return lambda data: decode_sum(data, layout=layout(SIZE), params=PARAMS, key_id=uploads[0].key_id)


def test_a_server_with_tenseal_alone_adds_up_to_the_exact_sum_and_the_tags_hold(returned, read, uploads, grids, new_key):
    key, ones = new_key(params=PARAMS), [1] * CLIENTS
    total = read(returned)
    assert total == weighted_sum(uploads, ones)
    sealed = {name: upload.sealed_tags for name, upload in zip(NAMES, uploads, strict=True)}
    assert np.array_equal(open_sum(check_sum(total, key, sealed_tags=sealed, coefficients=ones), key, coefficients=ones), sum(grids))


def test_what_the_server_left_out_is_noticed(server, read, uploads, new_key):
    vectors = [tenseal.ckks_vector_from(server, encode_vector(upload)) for upload in uploads[:2]]
    sealed = {name: upload.sealed_tags for name, upload in zip(NAMES, uploads, strict=True)}
    with pytest.raises(TamperedAggregateError):
        check_sum(read((vectors[0] + vectors[1]).serialize()), new_key(params=PARAMS), sealed_tags=sealed, coefficients=[1] * CLIENTS)


def test_a_sum_travels_both_ways(uploads, read):
    total = weighted_sum(uploads, [1] * CLIENTS)
    assert read(encode_vector(total)) == total


def test_parameters_without_slots_are_refused(seal, layout):
    vector = seal(np.zeros(10, np.int64))
    with pytest.raises(ValueError, match="expected parameters with slots"):
        encode_vector(vector)
    with pytest.raises(ValueError, match="expected parameters with slots"):
        decode_sum(b"", layout=layout(10), params=vector.params, key_id=bytes(16))


def test_a_vector_of_another_layout_is_refused(returned, layout):
    for size in (SIZE - 1, SIZE + 1, 4096, 3 * 4096):
        with pytest.raises(InvalidMessageError):
            decode_sum(returned, layout=layout(size), params=PARAMS, key_id=bytes(16))


def test_a_vector_of_another_scale_or_level_is_refused(server, layout):
    for scale, bits in ((2.0**39, [60, 40, 40]), (2.0**40, [60, 40, 40])):
        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=bits)
        context.global_scale = scale
        data = tenseal.ckks_vector(context, [0.5] * 10).serialize()  # on the first level, where ours are on the last
        with pytest.raises(InvalidMessageError):
            decode_sum(data, layout=layout(10), params=PARAMS, key_id=bytes(16))


def test_truncated_and_extended_bytes_are_refused(returned, read):
    for data in (b"", returned[:1], returned[:100], returned[:-1], returned[: len(returned) // 2], returned + b"\0", returned[1:]):
        with pytest.raises(InvalidMessageError):
            read(data)


def container(returned):
    """Where the first ciphertext begins in a vector of two chunks, and its length."""
    start = returned.index(CONTAINER_MAGIC)
    return start, struct.unpack_from("<Q", returned, start + 8)[0]


def varint(number):
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])


def test_a_ciphertext_that_decompresses_to_something_else_is_refused(returned, read):
    start, length = container(returned)
    body = members(returned[start : start + length])
    header = returned[start : start + 8]
    beyond = bytearray(body)
    beyond[-8:] = PARAMS.modulus.to_bytes(8, "little")

    def exchanged(content, compression=2):
        packed = zstandard.ZstdCompressor().compress(content) if compression == 2 else content
        new = header[:5] + bytes([compression]) + header[6:8] + struct.pack("<Q", 16 + len(packed)) + packed
        return returned[: start - 3] + varint(len(new)) + new + returned[start + length :]

    assert read(exchanged(body)).chunks
    assert read(exchanged(body, compression=0)) == read(returned)
    for content in (body[:-8], body + bytes(8), bytes(len(body)), bytes(beyond), bytes(50_000_000)):
        with pytest.raises(InvalidMessageError):
            read(exchanged(content))
    for compression in (0, 1, 3):
        with pytest.raises(InvalidMessageError):
            read(exchanged(b"\0" * 100, compression=compression))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_mutated_bytes_are_another_sum_or_an_invalid_message_and_nothing_else(data, returned, layout):
    changed = bytearray(returned)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1) | st.integers(0, 200))
        changed[place] = data.draw(st.sampled_from([0, 1, 63, 64, 127, 128, 255]))
    try:
        total = decode_sum(bytes(changed), layout=layout(SIZE), params=PARAMS, key_id=bytes(16))
    except InvalidMessageError:
        return
    assert all(len(chunk) == PARAMS.sum_chunk_bytes for chunk in total.chunks)

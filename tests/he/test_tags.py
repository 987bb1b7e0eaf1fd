import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import TamperedAggregateError
from privfed.he import tags as tags_module
from privfed.he.additive import CkksVector, seeded_sum, weighted_sum
from privfed.he.codec import pack_words, unpack_words
from privfed.he.params import SEALED_TAGS_BYTES, CkksParams
from privfed.he.secret import check_sum, open_sum
from privfed.he.tags import TAGS, TagKey, Tags

NAMES = ("bank_a", "bank_b", "bank_c")
COEFFICIENTS = (3, 5, 7)
WHOLE = dataclasses.replace(CkksParams.standard(), seeded_sums=False)
EVERY = [
    CkksParams.standard(),
    WHOLE,
    CkksParams.compact(),
    CkksParams.parity(clients=3),
    dataclasses.replace(CkksParams.parity(clients=3), seeded_sums=False),
    CkksParams.compatible(clients=3),
]


def name(params):
    return f"{params.word_bytes} bytes, {'seeds' if params.seeded_sums else 'whole'}"


def tag_key(params=WHOLE, secret=bytes(32)):
    return TagKey(secret=secret, params=params)


def random_words(params, seed, size=100):
    return np.random.default_rng(seed).integers(0, params.modulus, size, dtype=np.uint64)


@pytest.fixture(scope="module")
def rounds(seal, new_key):
    """Of each kind of parameters: the uploads of three banks, their grids and the key."""
    made = {}

    def make(params):
        if params not in made:
            rng = np.random.default_rng(9)
            size = 2 * params.chunk_coordinates - 7  # so the last chunk is cut, but for slots
            grids = [rng.integers(-params.largest_point // 4, params.largest_point // 4, size) for _ in NAMES]
            uploads = [seal(grid, sender=sender, params=params) for grid, sender in zip(grids, NAMES, strict=True)]
            made[params] = uploads, grids, new_key(params=params)
        return made[params]

    return make


def summed(uploads, coefficients):
    params = uploads[0].params
    return (seeded_sum if params.seeded_sums else weighted_sum)(uploads, coefficients)


def check(total, key, uploads, coefficients=COEFFICIENTS, names=NAMES):
    sealed = {sender: upload.sealed_tags for sender, upload in zip(names, uploads, strict=True)}
    return check_sum(total, key, sealed_tags=sealed, coefficients=key.params.multipliers(coefficients))


def tampered(total, place, change):
    """The sum with one chunk changed by a function of its words."""
    words = unpack_words(total.chunks[place], total.params)
    chunks = list(total.chunks)
    chunks[place] = pack_words(change(words.copy()), total.params)
    return dataclasses.replace(total, chunks=tuple(chunks))


# ---- the inner product


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_tags_are_the_inner_products_with_aes_in_counter_mode_modulo_the_prime(params):
    key, chunks = tag_key(params), [random_words(params, seed) for seed in (1, 2)]
    chunks[1][:] = params.modulus - 1
    expected = [0] * TAGS
    block = Cipher(AES(key._random), ECB()).encryptor()  # noqa: S305 (the primitive, to build another mode of)
    for index, words in enumerate(chunks):
        # Counter mode without the mode: the numbers of the blocks, encrypted. A block of 16 bytes goes with each word.
        stream = b"".join(block.update(number.to_bytes(16, "big")) for number in range(100 * index, 100 * (index + 1)))
        # Of each random number, the low halves of all words come first, and then the high halves.
        halves = np.frombuffer(stream, "<u2").reshape(TAGS, 2, 100).tolist()
        for tag, (low, high) in enumerate(halves):
            expected[tag] += sum((a + (b << 16)) * word for a, b, word in zip(low, high, words.tolist(), strict=True))
    assert key.tag(chunks).values == tuple(value % params.modulus for value in expected)


@settings(deadline=None, max_examples=25)
@given(data=st.data(), params=st.sampled_from(EVERY))
def test_tags_of_a_combination_are_the_combination_of_the_tags(data, params):
    key = tag_key(params, secret=data.draw(st.binary(min_size=32, max_size=32)))
    coefficients = [data.draw(st.integers(1, 1000)) for _ in range(3)]
    words = [random_words(params, data.draw(st.integers(0, 999)), size=20).tolist() for _ in coefficients]
    combined = [sum(c * w for c, w in zip(coefficients, column, strict=True)) % params.modulus for column in zip(*words, strict=True)]
    tags = [key.tag([np.array(row, np.uint64)]) for row in words]
    assert key.tag([np.array(combined, np.uint64)]) == key.combine(tags, coefficients)


def test_products_are_exact_at_the_largest_words_and_random_numbers(monkeypatch):
    """16 bits of r times 16 bits of a word, 16384 of them, in double precision."""
    params = CkksParams.compatible(clients=3)
    monkeypatch.setattr(tags_module, "_key_stream", lambda key: lambda size: b"\xff" * size)
    words = np.full(16384, params.modulus - 1, np.uint64)
    assert tag_key(params).tag([words]).values == (16384 * (2**32 - 1) * (params.modulus - 1) % params.modulus,) * TAGS


def test_random_numbers_have_32_bits_and_differ_between_tags_words_chunks_and_keys():
    ones = [np.eye(1, 50, place, dtype=np.uint64)[0] for place in range(50)]
    values = [value for word in ones for value in tag_key().tag([word, word]).values]
    assert len(set(values)) == len(values)
    singles = [value for word in ones for value in tag_key().tag([word]).values]
    # 200 uniform numbers of 32 bits: the mean is within 6 standard deviations, and the largest beyond 0.9 but for 0.9^200.
    assert abs(np.mean(singles) / 2**32 - 0.5) < 6 / np.sqrt(12 * len(singles))
    assert 0.9 * 2**32 < max(singles) < 2**32
    assert tag_key(secret=b"k" * 32).tag(ones[:1]) != tag_key().tag(ones[:1])


# ---- sealing


def test_sealed_tags_open_to_the_tags_for_their_sender_alone():
    key, tags = tag_key(), Tags(values=(1, 2, 3, WHOLE.modulus - 1), seeds=b"s" * 32)
    sealed = key.seal(tags, sender="bank_a")
    assert len(sealed) == SEALED_TAGS_BYTES
    assert key.unseal(sealed, sender="bank_a") == tags
    for other, sender in ((key, "bank_b"), (tag_key(secret=b"k" * 32), "bank_a")):
        with pytest.raises(TamperedAggregateError):
            other.unseal(sealed, sender=sender)


def test_sealed_tags_hide_the_tags_and_differ_each_time():
    key, tags = tag_key(), Tags(values=(0, 0, 0, 0), seeds=bytes(32))
    first, second = key.seal(tags, sender="bank_a"), key.seal(tags, sender="bank_a")
    assert first[:12] != second[:12]
    assert first[12:] != second[12:]
    assert bytes(8) not in first


@pytest.mark.parametrize("place", range(0, SEALED_TAGS_BYTES, 13))
def test_a_changed_bit_of_sealed_tags_is_noticed(place):
    key = tag_key()
    sealed = bytearray(key.seal(Tags(values=(1, 2, 3, 4), seeds=bytes(32)), sender="bank_a"))
    sealed[place] ^= 1
    for data in (bytes(sealed), bytes(sealed[:-1]), b"", bytes(SEALED_TAGS_BYTES)):
        with pytest.raises(TamperedAggregateError):
            key.unseal(data, sender="bank_a")


@pytest.mark.parametrize("length", [0, 31, 33])
def test_secrets_of_another_length_are_refused(length):
    with pytest.raises(ValueError, match=f"expected a secret of 32 bytes, got {length}"):
        TagKey(secret=bytes(length), params=WHOLE)


def test_a_tag_key_and_tags_show_nothing():
    assert repr(tag_key()) == "TagKey(<secret>)"
    assert "Tags object" in repr(Tags(values=(123456, 2, 3, 4)))


def test_tag_keys_differ_between_rounds_attempts_and_groups(new_key, shared_key, bind):
    changes = [{}, {"round": 1}, {"attempt": 1}, {"session": b"\1" * 16}, {"roster_digest": b"\1" * 32}, {"params": WHOLE}]
    tags = [new_key(**change)._tag_key.tag([np.ones(5, np.uint64)]).values for change in changes]
    assert len(set(tags)) == len(changes)
    assert tags[0] == new_key()._tag_key.tag([np.ones(5, np.uint64)]).values


# ---- checking a sum


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_the_announced_combination_passes_and_opens(rounds, params):
    uploads, grids, key = rounds(params)
    multipliers = params.multipliers(COEFFICIENTS)
    checked = check(summed(uploads, multipliers), key, uploads)
    assert checked == weighted_sum(uploads, multipliers)
    expected = sum(c * grid for c, grid in zip(multipliers, grids, strict=True))
    assert np.array_equal(open_sum(checked, key, coefficients=multipliers), expected)


def refused(total, key, uploads, **how):
    with pytest.raises(TamperedAggregateError) as caught:
        check(total, key, uploads, **how)
    assert str(caught.value) == "the aggregate is not the announced combination of the signed uploads; nothing was decrypted"


@pytest.mark.parametrize("params", EVERY, ids=name)
@pytest.mark.parametrize("place", [0, 1])
def test_one_flipped_bit_is_refused(rounds, params, place):
    uploads, _, key = rounds(params)
    total = summed(uploads, params.multipliers(COEFFICIENTS))
    size = unpack_words(total.chunks[place], params).size
    for word in (0, size // 2, size - 1):
        for bit in (0, params.modulus.bit_length() - 2):

            def flip(words, word=word, bit=bit):
                words[word] ^= np.uint64(1 << bit)
                words[word] %= np.uint64(params.modulus)
                return words

            refused(tampered(total, place, flip), key, uploads)


@pytest.mark.parametrize("coefficients", [(3, 5, 8), (5, 3, 7), (6, 10, 14), (1, 1, 1)])
def test_other_weights_than_the_announced_ones_are_refused(rounds, coefficients):
    for params in (CkksParams.standard(), WHOLE):
        uploads, _, key = rounds(params)
        refused(summed(uploads, coefficients), key, uploads)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_a_substituted_repeated_or_swapped_chunk_is_refused(params, seal, new_key):
    uploads = [seal(np.arange(2 * params.chunk_coordinates) % 1000, sender=sender, params=params) for sender in NAMES]
    key, multipliers = new_key(params=params), params.multipliers(COEFFICIENTS)
    total = summed(uploads, multipliers)
    check(total, key, uploads)
    other = summed([uploads[0]] * 3, multipliers)
    first, second = total.chunks
    for chunks in ((other.chunks[0], second), (first, other.chunks[1]), (first, first), (second, second), (second, first)):
        refused(dataclasses.replace(total, chunks=chunks), key, uploads)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_a_substituted_last_chunk_is_refused_and_no_whole_one_takes_the_place_of_one_that_is_cut(rounds, params):
    uploads, _, key = rounds(params)
    multipliers = params.multipliers(COEFFICIENTS)
    total, other = summed(uploads, multipliers), summed([uploads[0]] * 3, multipliers)
    refused(dataclasses.replace(total, chunks=(total.chunks[0], other.chunks[1])), key, uploads)
    if not params.slots:
        with pytest.raises(ValueError, match="expected chunk 1 to have"):
            dataclasses.replace(total, chunks=(total.chunks[0],) * 2)


@pytest.mark.parametrize("params", EVERY[:5], ids=name)
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8199])
def test_any_changed_word_of_a_sum_is_refused_however_full_the_last_chunk_is(params, size, seal, new_key):
    rng, multipliers = np.random.default_rng(size), params.multipliers(COEFFICIENTS)
    grids = [rng.integers(-params.largest_point // 4, params.largest_point // 4, size) for _ in NAMES]
    uploads = [seal(grid, sender=sender, params=params) for grid, sender in zip(grids, NAMES, strict=True)]
    key, total = new_key(params=params), summed(uploads, multipliers)
    expected = sum(c * grid for c, grid in zip(multipliers, grids, strict=True))
    assert np.array_equal(open_sum(check(total, key, uploads), key, coefficients=multipliers), expected)
    for place, chunk in enumerate(total.chunks):
        words = unpack_words(chunk, params).size
        cut = params.first_polynomial_sizes(total.layout)[place] // params.word_bytes
        # The ends of c0 and, where the sum is whole, of c1; a few more; and of a cut chunk all of c0 if it is short.
        places = {0, cut - 1, cut % words, words - 1, *rng.integers(0, words, 5).tolist(), *(range(cut) if cut < 10 else ())}
        for word in places:
            for change in (1, params.modulus - 1, params.modulus // 2):

                def changed(row, word=word, change=change):
                    row[word] = (int(row[word]) + change) % params.modulus
                    return row

                refused(tampered(total, place, changed), key, uploads)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_one_client_alone_is_refused(rounds, params):
    uploads, _, key = rounds(params)
    for alone in (weighted_sum(uploads[:1], [1]), summed([uploads[0]] * 3, params.multipliers(COEFFICIENTS))):
        refused(alone, key, uploads)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_a_client_left_out_or_counted_twice_is_refused(rounds, params):
    uploads, _, key = rounds(params)
    multipliers = params.multipliers(COEFFICIENTS)
    if not params.seeded_sums:
        refused(weighted_sum(uploads[:2], multipliers[:2]), key, uploads)
    refused(summed([uploads[0], uploads[1], uploads[1]], multipliers), key, uploads)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_the_sum_of_another_round_is_refused(rounds, params, seal, new_key):
    uploads, _, key = rounds(params)
    grid = np.zeros(uploads[0].layout.size, np.int64)
    old = [seal(grid, sender=sender, params=params, round=7) for sender in NAMES]
    replayed = dataclasses.replace(summed(old, params.multipliers(COEFFICIENTS)), key_id=key.key_id)
    refused(replayed, key, uploads)
    refused(replayed, key, old)
    assert check(summed(old, params.multipliers(COEFFICIENTS)), new_key(params=params, round=7), old).chunks


@pytest.mark.parametrize("params", [params for params in EVERY if params.seeded_sums], ids=name)
def test_other_seeds_are_refused(rounds, params):
    uploads, _, key = rounds(params)
    total = summed(uploads, params.multipliers(COEFFICIENTS))
    first, *others = total.seeds
    changed = bytes([first[0] ^ 1]) + first[1:]
    for seeds in ((changed, *others), (others[0], first, *others[1:]), (first[64:] + first[:64], *others)):
        refused(dataclasses.replace(total, seeds=seeds), key, uploads)


def test_a_sum_of_the_other_kind_is_refused(rounds):
    seeded, whole = CkksParams.standard(), WHOLE
    uploads, _, key = rounds(seeded)
    refused(weighted_sum(uploads, COEFFICIENTS), key, uploads)
    uploads, _, key = rounds(whole)
    refused(seeded_sum(uploads, COEFFICIENTS), key, uploads)


def test_a_key_for_other_parameters_is_refused(rounds):
    uploads, _, _ = rounds(CkksParams.compact())
    _, _, key = rounds(CkksParams.standard())
    refused(seeded_sum(uploads, COEFFICIENTS), key, uploads)


def test_sealed_tags_of_another_sender_are_refused(rounds):
    uploads, _, key = rounds(CkksParams.standard())
    refused(summed(uploads, COEFFICIENTS), key, uploads, names=("bank_b", "bank_a", "bank_c"))


def test_one_coefficient_per_upload_is_demanded(rounds):
    uploads, _, key = rounds(CkksParams.standard())
    for coefficients in ((3, 5), (3, 5, 7, 1)):
        with pytest.raises(ValueError, match="expected one coefficient for each of 3 uploads"):
            check(summed(uploads, COEFFICIENTS), key, uploads, coefficients=coefficients)
    with pytest.raises(ValueError, match="positive int"):
        check(summed(uploads, COEFFICIENTS), key, uploads, coefficients=(3, 5, 0))


def test_nothing_is_decrypted_before_the_check(rounds, monkeypatch):
    uploads, _, key = rounds(CkksParams.standard())
    monkeypatch.setattr(type(key._ring_key), "decrypt_unrounded", lambda *_: pytest.fail("something was decrypted"))
    total = summed(uploads, COEFFICIENTS)
    assert isinstance(check(total, key, uploads), CkksVector)
    refused(summed(uploads, (1, 1, 1)), key, uploads)

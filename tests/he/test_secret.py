import copy
import dataclasses
import hashlib
import hmac
import os
import pickle
import stat
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import chi2

from privfed.errors import DecryptionError, InvalidMessageError, ParametersMismatchError, RoundKeyUsedError, RoundMismatchError
from privfed.he import _seal_public, secret
from privfed.he._seal_secret import RingKey, derive, transform
from privfed.he.additive import weighted_sum
from privfed.he.codec import evaluate, interpolate, pack_words, unpack_words
from privfed.he.params import FRESH_NOISE, FRESH_NOISE_VARIANCE, CkksParams
from privfed.he.secret import RoundBinding, SharedKey, encrypt, open_sum
from privfed.update import Layout

OTHER_PROCESS = """
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, SharedKey
binding = RoundBinding(session=bytes(16), attempt=3, round=5, roster_digest=bytes(32), params=CkksParams.standard())
print(SharedKey.from_bytes(bytes(range(32))).round_key(binding).key_id.hex())
"""


@pytest.fixture(scope="module")
def grid(params):
    return np.random.default_rng(4).integers(-params.amplitude, params.amplitude + 1, 5000)


@pytest.fixture(scope="module")
def total(grid, seal):
    """A sum with coefficients 3, 2 of twice the same grid."""
    return weighted_sum([seal(grid), seal(grid)], [3, 2])


def unrounded(chunk, params, key):
    return interpolate(key._ring_key.decrypt_unrounded(unpack_words(chunk, params)))


# ---- shared keys


def test_generated_keys_differ():
    assert len({SharedKey.generate().fingerprint for _ in range(10)}) == 10


def test_generated_keys_come_from_the_operating_system(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    assert SharedKey.generate().fingerprint == SharedKey.from_bytes(bytes(range(32))).fingerprint


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_secrets_of_another_length_are_refused(length):
    with pytest.raises(ValueError, match=f"expected a secret of 32 bytes, got {length}"):
        SharedKey.from_bytes(bytes(length))


def test_a_saved_key_is_readable_by_its_owner_only_and_loads_again(tmp_path, shared_key):
    path = tmp_path / "group.key"
    shared_key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SharedKey.load(path).fingerprint == shared_key.fingerprint


def test_a_key_is_never_saved_over_a_file(tmp_path, shared_key):
    path = tmp_path / "group.key"
    path.write_text("something else")
    with pytest.raises(FileExistsError):
        shared_key.save(path)
    assert path.read_text() == "something else"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path, shared_key, mode):
    path = tmp_path / "group.key"
    shared_key.save(path)
    path.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        SharedKey.load(path)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"x" + data[1:], lambda data: b""])
def test_a_file_that_holds_something_else_is_refused(tmp_path, shared_key, change):
    path = tmp_path / "group.key"
    shared_key.save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"expected a shared key in group\.key"):
        SharedKey.load(path)


def test_the_fingerprint_is_derived_and_not_part_of_the_key():
    raw = bytes(range(32))
    fingerprint = SharedKey.from_bytes(raw).fingerprint
    label = b"privfed shared key fingerprint v1"
    expected = hmac.new(raw, len(label).to_bytes(4, "big") + label + b"\1", hashlib.sha512).hexdigest()[:64]
    assert fingerprint.replace(" ", "") == expected
    assert fingerprint.count(" ") == 7


# ---- what secret types refuse


@pytest.fixture(params=["SharedKey", "RoundKey", "RingKey"])
def thing(request, shared_key, new_key):
    return {"SharedKey": lambda: shared_key, "RoundKey": new_key, "RingKey": lambda: new_key()._ring_key}[request.param]()


def test_secret_types_cannot_be_printed(thing):
    for shown in (repr(thing), str(thing), f"{thing}", f"{[thing]}"):
        assert "<secret>" in shown
        assert len(shown) < 25


def test_secret_types_cannot_be_copied_or_pickled(thing):
    for attempt in (copy.copy, copy.deepcopy, *(lambda it, p=p: pickle.dumps(it, protocol=p) for p in range(6))):
        with pytest.raises(TypeError, match="holds key material and cannot be copied or pickled"):
            attempt(thing)


def test_secret_types_do_not_hand_out_their_state(thing):
    with pytest.raises(TypeError, match="holds key material"):
        thing.__getstate__()


def test_each_secret_of_a_round_is_derived_under_a_label_of_its_own(monkeypatch):
    labels = []

    def note(secret, size, label, *fields):
        labels.append(label)
        return derive(secret, size, label, *fields)

    monkeypatch.setattr("privfed.he.secret.derive", note)
    key = SharedKey.generate()
    _ = key.fingerprint
    key.round_key(RoundBinding(session=bytes(16), attempt=0, round=0, roster_digest=bytes(32), params=CkksParams.standard()))
    assert len(set(labels)) == len(labels) == 4


def test_secret_types_have_no_dictionary_of_attributes(thing):
    with pytest.raises(TypeError):
        vars(thing)


# ---- derivation


def test_the_same_binding_gives_the_same_key_and_any_changed_field_another(shared_key, bind):
    bindings = [
        bind(),
        bind(session=b"\1" + bytes(15)),
        bind(attempt=1),
        bind(round=1),
        bind(roster_digest=bytes(31) + b"\1"),
        bind(params=CkksParams.standard(bound=2.0)),
    ]
    ids = [shared_key.round_key(binding).key_id for binding in bindings]
    assert ids == [shared_key.round_key(binding).key_id for binding in bindings]
    assert len(set(ids)) == len(bindings)
    assert {len(key_id) for key_id in ids} == {16}


def test_another_shared_key_gives_another_round_key(bind, new_key):
    assert SharedKey.generate().round_key(bind()).key_id != new_key().key_id


def test_another_process_derives_the_same_key(bind):
    result = subprocess.run([sys.executable, "-c", OTHER_PROCESS], capture_output=True, text=True, check=True)
    binding = bind(attempt=3, round=5)
    assert SharedKey.from_bytes(bytes(range(32))).round_key(binding).key_id.hex() == result.stdout.strip()


def test_derivation_is_hkdf_expand_over_length_prefixed_fields():
    key, fields = bytes(range(32)), (b"label", b"", b"field")
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    # RFC 5869, section 2.3: 64 bytes of output are one block of HMAC-SHA512.
    assert derive(key, 64, *fields) == hmac.new(key, info + b"\1", hashlib.sha512).digest()
    assert derive(key, 64, b"ab", b"c") != derive(key, 64, b"a", b"bc")


@pytest.mark.parametrize(
    "changes",
    [{"session": bytes(15)}, {"roster_digest": bytes(31)}, {"attempt": -1}, {"round": -1}, {"attempt": 2**32}, {"round": 2**32}],
)
def test_bindings_out_of_range_are_refused(bind, changes):
    with pytest.raises(ValueError, match="expected"):
        bind(**changes)


def test_the_key_is_ternary_and_balanced(params, bind, new_key):
    key = new_key()
    members = _seal_public.members(_seal_public.saved(key._ring_key._key))
    words = np.frombuffer(members, "<u8", 4096, len(members) - 8 * 4096)
    # Decrypting c0 = 0, c1 = 1 gives the key itself.
    coefficients = np.rint(interpolate(key._ring_key.decrypt_unrounded(np.repeat(np.array([0, 1], np.uint64), 4096))))
    counts = [int((coefficients == value).sum()) for value in (-1, 0, 1)]
    assert sum(counts) == 4096
    # Each count is binomial with p = 1/3: standard deviation 30.
    assert all(abs(count - 4096 / 3) < 6 * 30.2 for count in counts)
    assert len(np.unique(words)) > 4000


def test_ring_keys_need_64_bytes(params):
    ring = _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)
    with pytest.raises(ValueError, match="expected a seed of 64 bytes"):
        RingKey(ring, bytes(32))


# ---- encryption


def transformed(coefficients, params):
    """Words of the plaintexts that are made of integer coefficients."""
    ring = _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)
    with transform(ring) as plaintexts:
        bodies = [_seal_public.members(_seal_public.saved(plaintext)) for plaintext in plaintexts(np.array(coefficients))]
    return [np.frombuffer(body, "<u8", 4096, len(body) - 8 * 4096).tolist() for body in bodies]


@pytest.mark.parametrize(
    "profile", [CkksParams.standard(), CkksParams.compact(), CkksParams.parity(clients=4)], ids=lambda p: f"{p.word_bytes}"
)
def test_plaintexts_of_coefficients_are_what_seal_encodes_word_for_word(profile):
    ring = _seal_public.ring(profile.poly_modulus_degree, profile.modulus, slots=False)
    # Below 2^31 the encoder is exact too: its relative error is below 2^-44, of the norm, which is at most 2^6 times a coefficient.
    largest = min(2**31, profile.modulus >> 8)
    coefficients = np.random.default_rng(8).integers(-largest, largest + 1, (5, 4096))
    assert transformed(coefficients, profile) == [ring.encode(evaluate(row.astype(np.float64))).tolist() for row in coefficients]


def test_plaintexts_of_the_largest_coefficients_are_exact(params):
    largest, one = (params.modulus - 1) // 2, np.zeros(4096, np.int64)
    one[0] = 1
    x = np.roll(one, 1)
    words = np.array(transformed([one, x, largest * x, -largest * x], params), dtype=object)
    assert (words[0] == 1).all()
    assert all(pow(word, 4096, params.modulus) == params.modulus - 1 for word in words[1])
    assert (words[2] == largest * words[1] % params.modulus).all()
    assert (words[3] == -largest * words[1] % params.modulus).all()


@pytest.mark.parametrize("rows", [[0], [1], [0, 0], [1, 1], [0, 1, 1], [1, 0, 0, 0, 0], [2, 2, 1, 0]])
def test_chunks_that_are_alike_zero_or_odd_in_number_are_transformed_one_by_one(rows, params):
    random = np.random.default_rng(9).integers(-(2**40), 2**40, 4096)
    coefficients = np.array([np.zeros(4096, np.int64), random, -random])
    alone = [transformed(coefficients[row : row + 1], params)[0] for row in range(3)]
    assert alone[0] == [0] * 4096
    assert all((a + b) % params.modulus == 0 for a, b in zip(alone[1], alone[2], strict=True))
    assert transformed(coefficients[rows], params) == [alone[row] for row in rows]


def test_two_clients_encrypt_the_same_grid_differently_and_it_opens_to_the_same(grid, seal, new_key):
    one, two = seal(grid), seal(grid)
    assert one.key_id == two.key_id
    for mine, yours in zip(one.chunks, two.chunks, strict=True):
        assert mine[-64:] != yours[-64:]
        assert mine[:100] != yours[:100]
    assert np.array_equal(open_sum(weighted_sum([one], [1]), new_key(), coefficients=[1]), grid)
    assert np.array_equal(open_sum(weighted_sum([two], [1]), new_key(), coefficients=[1]), grid)


def test_every_chunk_has_its_own_seed(seal):
    chunks = seal(np.zeros(5 * 4096, np.int64)).chunks
    assert len({chunk[-64:] for chunk in chunks}) == 5
    assert len({chunk[:-64] for chunk in chunks}) == 5


def test_a_round_key_encrypts_once(params, new_key, layout, grid):
    key = new_key()
    encrypt(grid, layout(5000), params, key, sender="bank_a")
    with pytest.raises(RoundKeyUsedError, match="resend the stored bytes, or start a new attempt"):
        encrypt(grid, layout(5000), params, key, sender="bank_a")


def test_a_used_round_key_still_opens(params, new_key, layout, grid):
    key = new_key()
    vector = encrypt(grid, layout(5000), params, key, sender="bank_a")
    assert np.array_equal(open_sum(weighted_sum([vector], [7]), key, coefficients=[7]), 7 * grid)


def test_a_refused_grid_leaves_the_key_unused(params, new_key, layout, grid):
    key = new_key()
    for bad in (np.zeros(4999, np.int64), np.zeros(5000), np.zeros((5000, 1), np.int64), np.zeros(5000, np.int32)):
        with pytest.raises(ValueError, match="expected int64 grid points of shape"):
            encrypt(bad, layout(5000), params, key, sender="bank_a")
    for beyond in (params.amplitude + 1, -params.amplitude - 1, np.iinfo(np.int64).min):
        with pytest.raises(ValueError, match="within the amplitude, got one beyond it; nothing was encrypted") as caught:
            encrypt(np.full(5000, beyond), layout(5000), params, key, sender="bank_a")
        assert str(beyond) not in str(caught.value)
    encrypt(grid, layout(5000), params, key, sender="bank_a")


def test_other_parameters_than_the_keys_are_refused(new_key, layout, grid):
    with pytest.raises(ParametersMismatchError, match="nothing was encrypted"):
        encrypt(grid, layout(5000), CkksParams.standard(bound=2.0), new_key(), sender="bank_a")


def test_fresh_vectors_have_the_documented_size(params, seal):
    vector = seal(np.zeros(100_000, np.int64))
    assert sum(map(len, vector.chunks)) / 100_000 <= 7.4


def test_noise_is_what_the_budget_says(params, seal, new_key):
    key, grid = new_key(), np.zeros(12 * 4096, np.int64)
    total = weighted_sum([seal(grid)], [1])
    noise = np.concatenate([unrounded(chunk, params, key) for chunk in total.chunks])
    np.testing.assert_allclose(noise, np.rint(noise), rtol=0, atol=1e-9)
    # 21 is the most that SEAL can draw; one of 49152 draws is beyond 11 but for a probability of 1e-15.
    assert 11 <= np.abs(noise).max() <= FRESH_NOISE + 1e-9
    # The mean of 49152 squares of variance below 2 v^2 is within 6 standard deviations, 4 %.
    assert abs(np.mean(noise**2) / FRESH_NOISE_VARIANCE - 1) < 6 * np.sqrt(2 / noise.size)


# ---- opening


def test_opening_needs_a_sum(seal, grid, new_key):
    with pytest.raises(ValueError, match="expected a sum, got the vector of a single client; nothing was decrypted"):
        open_sum(seal(grid), new_key(), coefficients=[1])


@pytest.mark.parametrize("coefficients", [[], [0, 5], [4096, 1], [1.0, 2]])
def test_opening_needs_valid_coefficients(total, new_key, coefficients):
    with pytest.raises(ValueError, match="coefficient"):
        open_sum(total, new_key(), coefficients=coefficients)


def test_opening_with_another_rounds_key_is_refused_before_decrypting(total, new_key):
    with pytest.raises(RoundMismatchError, match="nothing was decrypted"):
        open_sum(total, new_key(round=1), coefficients=[3, 2])


def test_opening_with_a_key_for_other_parameters_is_refused(total, new_key):
    with pytest.raises(ParametersMismatchError, match="nothing was decrypted"):
        open_sum(total, new_key(params=CkksParams.standard(bound=2.0)), coefficients=[3, 2])


@pytest.mark.parametrize("coefficients", [(1,), (3, 2), (4096,), (1,) * 4096])
def test_a_wrong_key_is_noticed_even_if_it_claims_the_right_name(seal, grid, new_key, coefficients):
    wrong = new_key(round=1)
    vectors = [seal(grid)] if len(coefficients) == 1 else [seal(grid), seal(grid)]
    weights = coefficients if len(coefficients) < 3 else (2048, 2048)
    total = dataclasses.replace(weighted_sum(vectors, weights), key_id=wrong.key_id)
    with pytest.raises(DecryptionError, match="nothing was opened"):
        open_sum(total, wrong, coefficients=coefficients)


@pytest.mark.parametrize("index", [0, 1])
def test_one_changed_word_is_noticed(total, params, new_key, index):
    words = unpack_words(total.chunks[index], params)
    words[4097] = (int(words[4097]) + 1) % params.modulus
    chunks = list(total.chunks)
    chunks[index] = pack_words(words, params)
    with pytest.raises(DecryptionError, match=f"chunk {index} does not hold the sum"):
        open_sum(dataclasses.replace(total, chunks=tuple(chunks)), new_key(), coefficients=[3, 2])


def test_a_chunk_that_is_no_ciphertext_is_refused(total, params, new_key):
    chunks = (bytes(params.sum_chunk_bytes), total.chunks[1])
    with pytest.raises(InvalidMessageError):
        open_sum(dataclasses.replace(total, chunks=chunks), new_key(), coefficients=[3, 2])


def test_sums_beyond_what_the_coefficients_reach_are_refused(seal, params, new_key):
    total = weighted_sum([seal(np.full(10, params.amplitude)) for _ in range(2)], [3, 3])
    with pytest.raises(DecryptionError, match="nothing was opened"):
        # 4^2 + 1^2 is close enough to 3^2 + 3^2 for the noise, but 5 amplitudes are not 6.
        open_sum(total, new_key(), coefficients=[4, 1])


@pytest.mark.parametrize("coefficients", [[1, 1], [30, 20]])
def test_coefficients_that_do_not_fit_the_noise_are_refused(seal, new_key, coefficients):
    total = weighted_sum([seal(np.zeros(4096, np.int64)) for _ in range(2)], [3, 2])
    assert not open_sum(total, new_key(), coefficients=[3, 2]).any()
    with pytest.raises(DecryptionError, match="nothing was opened"):
        open_sum(total, new_key(), coefficients=coefficients)


def test_padding_that_does_not_open_to_zero_is_refused(seal, new_key):
    """Where the last chunk is cut, there is none."""
    slots, shorter = CkksParams.compatible(clients=3), Layout(names=("w",), shapes=((10,),))
    total = weighted_sum([seal(np.ones(11, np.int64), params=slots)], [1])
    with pytest.raises(DecryptionError, match="the last chunk does not end where the layout does"):
        open_sum(dataclasses.replace(total, layout=shorter), new_key(params=slots), coefficients=[1])
    with pytest.raises(ValueError, match="expected chunk 0 to have 28742 bytes, got 28749"):
        dataclasses.replace(weighted_sum([seal(np.ones(11, np.int64))], [1]), layout=shorter)


# ---- the last chunk, cut


PROFILES = [CkksParams.standard(), CkksParams.compact(), CkksParams.parity(clients=3)]
profiles = pytest.mark.parametrize("profile", PROFILES, ids=lambda params: f"{params.word_bytes} bytes")


@profiles
def test_coefficients_are_what_was_transformed_word_for_word(profile):
    ring = _seal_public.ring(4096, profile.modulus, slots=False)
    largest = (profile.modulus - 1) // 2
    numbers = np.random.default_rng(20).integers(-largest, largest + 1, (3, 4096))
    numbers[0, :4] = [largest, -largest, 0, -1]
    numbers[2] = 0
    with transform(ring) as plaintexts:
        bodies = [_seal_public.members(_seal_public.saved(plaintext)) for plaintext in plaintexts(numbers)]
    for row, body in zip(numbers, bodies, strict=True):
        words = np.frombuffer(body, "<u8", 4096, len(body) - 8 * 4096).astype(np.uint64)
        assert ring.coefficients(words).tolist() == (row % profile.modulus).tolist()


@profiles
@pytest.mark.parametrize("used", [1, 2, 100, 4095])
def test_a_cut_ciphertext_decrypts_to_the_coefficients_in_use_exactly_whatever_the_others_are(profile, used, new_key):
    """The worst case: the largest numbers at both ends, where the polynomial that the missing coefficients leave is anything."""
    ring, key = _seal_public.ring(4096, profile.modulus, slots=False), new_key(params=profile)._ring_key
    numbers = np.zeros((1, 4096), np.int64)
    numbers[0, :used] = (profile.largest_point * (-1) ** np.arange(used)) << profile.guard_bits
    ((words, seed),) = key.encrypt([numbers], slots=False)
    second, exact = (
        _seal_public.expand(ring, seed),
        key.decrypt_cut(ring.coefficients(words), _seal_public.expand(ring, seed)),
    )
    noise = exact - numbers[0]
    assert np.array_equal(noise, np.rint(noise))
    assert np.abs(noise).max() <= FRESH_NOISE
    first = ring.coefficients(words)[:used]
    assert key.decrypt_cut(first, second).tolist() == exact[:used].tolist()
    # At the ends of what there is a number for: half of the modulus, and one beyond it.
    half = profile.modulus // 2
    for beyond, expected in ((0, half), (1, -half)):
        moved = (first.astype(np.int64) - exact[:used].astype(np.int64) + half + beyond) % profile.modulus
        assert key.decrypt_cut(moved.astype(np.uint64), second).tolist() == [expected] * used


@profiles
@pytest.mark.parametrize("used", [1, 7, 4095])
def test_a_cut_sum_with_the_worst_noise_rounds_to_the_grid(profile, used, new_key):
    """Every client has all the noise that SEAL can draw in every coefficient. (Of many, no residual check accepts it.)"""
    coefficients = (1,) * profile.weight_sum if profile.prescaled else (profile.weight_sum,)
    worst = FRESH_NOISE * sum(coefficients)
    assert worst < 2 ** (profile.guard_bits - 1)
    assert 2**profile.guard_bits * profile.largest_sum + worst < profile.modulus / 2
    ring, key = _seal_public.ring(4096, profile.modulus, slots=False), new_key(params=profile)._ring_key
    point = profile.largest_sum if profile.prescaled else profile.amplitude * profile.weight_sum
    # Every encryption has noise of its own, which is taken out again.
    ((words, seed),) = key.encrypt([np.zeros((1, 4096), np.int64)], slots=False)
    first, second = ring.coefficients(words), _seal_public.expand(ring, seed)
    own = key.decrypt_cut(first, second).astype(np.int64)
    signs = np.resize([1, -1], used)
    target = (signs * ((point << profile.guard_bits) + worst) - own[:used]) % profile.modulus
    numbers = key.decrypt_cut((first[:used] + target.astype(np.uint64)) % np.uint64(profile.modulus), second)
    assert np.array_equal(np.rint(numbers / 2**profile.guard_bits), signs * point)
    assert np.array_equal(numbers - signs * (point << profile.guard_bits), signs * worst)


@pytest.mark.parametrize("used", [64, 1000, 4095])
def test_a_wrong_key_is_noticed_on_a_cut_chunk_alone(seal, new_key, used):
    wrong = new_key(round=1)
    total = weighted_sum([seal(np.zeros(used, np.int64))], [1])
    with pytest.raises(DecryptionError, match="nothing was opened"):
        open_sum(dataclasses.replace(total, key_id=wrong.key_id), wrong, coefficients=[1])


def test_a_cut_chunk_without_a_second_polynomial_is_refused(seal, new_key, params):
    total = weighted_sum([seal(np.zeros(10, np.int64))], [1])
    chunks = (total.chunks[0][:70] + bytes(params.polynomial_bytes),)
    with pytest.raises(InvalidMessageError):
        open_sum(dataclasses.replace(total, chunks=chunks), new_key(), coefficients=[1])


@pytest.mark.parametrize("count", [1, 2, 10, 50, 240, 300, 1000, 3993, 4095])
def test_the_residual_check_of_fewer_coefficients_has_the_same_probability_of_a_wrong_refusal(params, count):
    """By the tails of the normal distribution, which has the bound on the moments that the noise has: 2^-60 at each end."""
    deviation = np.sqrt(FRESH_NOISE_VARIANCE)

    def accepted(mean_square):
        return secret._is_residual_of(np.full(count, deviation * np.sqrt(mean_square)), [1], params)

    # Quantiles of the mean square at 2^-60: whatever honest noise has is accepted.
    low, high = chi2.ppf(2.0**-60, count) / count, chi2.isf(2.0**-60, count) / count
    assert accepted(high)
    assert accepted(low)
    # Not much more is: a third of a deviation of many, ten deviations of one.
    assert not accepted(1.1 * (1 + 2 * np.sqrt(60 * np.log(2) / count) + 2 * 60 * np.log(2) / count) + 0.1)
    assert accepted(0.0) is (count < 250)


def test_the_naive_chosen_ciphertext_is_refused(total, params, new_key):
    # c0 = 1, c1 = 2^g opens to the key on the grid, and its residual is 1 where the noise of a sum should be.
    evil = pack_words(np.repeat(np.array([1, 2**params.guard_bits], np.uint64), 4096), params)
    with pytest.raises(DecryptionError, match="nothing was opened"):
        open_sum(dataclasses.replace(total, chunks=(evil, total.chunks[1])), new_key(), coefficients=[3, 2])


@pytest.mark.parametrize("coefficients", [[1], [3, 2], [1000, 2000, 96]])
def test_residual_check_accepts_the_right_noise_and_rejects_two_thirds_and_three_halves(params, coefficients):
    rng = np.random.default_rng(12)
    deviation = np.sqrt(FRESH_NOISE_VARIANCE * sum(coefficient**2 for coefficient in coefficients))
    for factor, accepted in [(1, True), (2 / 3, False), (3 / 2, False), (0, False)]:
        for _ in range(20):
            residual = factor * deviation * rng.standard_normal(4096)
            assert secret._is_residual_of(residual, coefficients, params) is accepted


@pytest.mark.parametrize("coefficients", [[4096], [1] * 4096])
def test_residual_check_rejects_uniform_noise_for_every_coefficient(params, coefficients):
    uniform = np.random.default_rng(13).uniform(-(2**17), 2**17, 4096)
    assert not secret._is_residual_of(uniform, coefficients, params)


def test_what_is_opened_does_not_give_the_key_away_and_an_unrounded_decryption_would(seal, params, grid, new_key):
    key = new_key()
    total = weighted_sum([seal(grid), seal(grid)], [3, 2])
    ring = _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)
    words = unpack_words(total.chunks[0], params)

    def recovered(published):
        """Share of the key's words that (m - c0) / c1 gives, m being the published polynomial (Li and Micciancio, 2021)."""
        import tenseal.sealapi as seal_api

        plain = seal_api.Plaintext()
        ring.encoder.encode(evaluate(published).tolist(), 1.0, plain)
        members = _seal_public.members(_seal_public.saved(plain))
        message = np.frombuffer(members, "<u8", 4096, len(members) - 8 * 4096).tolist()
        members = _seal_public.members(_seal_public.saved(key._ring_key._key))
        truth = np.frombuffer(members, "<u8", 4096, len(members) - 8 * 4096).tolist()
        c0, c1 = words[:4096].tolist(), words[4096:].tolist()
        guesses = [(m - a) * pow(b, -1, params.modulus) % params.modulus for m, a, b in zip(message, c0, c1, strict=True)]
        return sum(map(int.__eq__, guesses, truth)) / 4096

    opened = open_sum(total, key, coefficients=[3, 2])[:4096]
    assert recovered(np.rint(unrounded(total.chunks[0], params, key))) == 1.0
    assert recovered(opened * 2.0**params.guard_bits) == 0.0


def test_the_seeded_context_would_repeat_itself_and_the_rings_does_not(params):
    ring = _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)
    zeros = np.zeros((2, 4096), np.int64)
    keys = [RingKey(ring, bytes(64)) for _ in range(2)]
    assert keys[0].digest(b"x") == keys[1].digest(b"x")
    seeds = [seed for key in keys for _, seed in key.encrypt([zeros, zeros[:1]], slots=False)]
    assert len(set(seeds)) == 6


def test_binding_shows_nothing_but_public_fields(bind):
    assert set(RoundBinding.__dataclass_fields__) == {"session", "attempt", "round", "roster_digest", "params"}

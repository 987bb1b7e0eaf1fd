import os
import re
import stat
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from privfed.errors import InvalidMessageError
from privfed.he import _seal_public
from privfed.he.codec import unpack_words

SECRET_NAMES = re.compile("secret|decrypt|encryptor|key", re.IGNORECASE)


@pytest.fixture
def ring(params):
    return _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)


@pytest.fixture(scope="module")
def fresh(seal, params):
    chunk = seal(np.arange(4096)).chunks[0]
    return unpack_words(chunk[:-64], params), chunk[-64:]


def test_nothing_secret_can_be_reached_from_the_public_half(ring):
    names = [*vars(_seal_public), *vars(_seal_public.Ring), *vars(_seal_public.WeightedSum), *vars(ring)]
    assert [name for name in names if SECRET_NAMES.search(name)] == []
    assert "KeyGenerator" not in Path(_seal_public.__file__).read_text()


def test_one_ring_serves_the_process(params, ring):
    assert _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False) is ring


def test_a_seed_expands_to_the_same_polynomial_each_time(ring, fresh):
    def expanded(seed):
        total = _seal_public.WeightedSum(ring)
        total.add(1, _seal_public.load_fresh(ring, fresh[0], seed))
        return total.words()

    once, again, other = expanded(fresh[1]), expanded(fresh[1]), expanded(bytes(64))
    assert np.array_equal(once, again)
    assert np.array_equal(once[:4096], fresh[0])
    assert not np.array_equal(once[4096:], other[4096:])


def test_an_expanded_seed_is_what_seal_reads_behind_it(ring, fresh):
    total = _seal_public.WeightedSum(ring)
    total.add(1, _seal_public.load_fresh(ring, *fresh))
    assert np.array_equal(_seal_public.expand(ring, fresh[1]), total.words()[4096:])


@pytest.mark.parametrize("slots", [False, True])
def test_words_of_encoded_values_decode_to_the_values(slots):
    ring = _seal_public.ring(8192, _seal_public.prime(8192, 60), slots=slots)
    values = np.random.default_rng(1).normal(size=4096) + 1j * np.random.default_rng(2).normal(size=4096)
    words = ring.encode(values, 2.0**40)
    assert words.shape == (8192,)
    assert (words < ring.modulus).all()
    # Rounding 8192 coefficients by a half each moves a slot by at most 4096.
    np.testing.assert_allclose(ring.decode(words, 2.0**40), values, rtol=0, atol=4097 * 2.0**-40)


def test_with_slots_the_ring_is_the_last_level_of_tenseals_chain_at_192_bits():
    import tenseal.sealapi as seal

    modulus = _seal_public.prime(8192, 60)
    ring = _seal_public.ring(8192, modulus, slots=True)
    assert (ring.chain_bits, ring.security_bits) == ((60, 40, 40), 192)
    assert ring.modulus == modulus == seal.CoeffModulus.Create(8192, [60, 40, 40])[0].value()
    with pytest.raises(ValueError, match="256 bits of security"):
        _seal_public.chain_ring(8192, (60, 40, 40), 256)
    assert _seal_public.ring(8192, _seal_public.prime(8192, 54), slots=False).parms_id != ring.parms_id


def test_a_ring_knows_the_first_of_several_primes_of_one_size():
    ring = _seal_public.chain_ring(4096, (54, 54), 128)
    one = ring.encode(np.ones(2048, np.complex128))
    assert ring.modulus != _seal_public.prime(4096, 54)
    assert one.tolist() == [1] * 4096
    assert ring.encode(-np.ones(2048, np.complex128)).tolist() == [ring.modulus - 1] * 4096


def test_a_coefficient_multiplies_every_word_exactly(ring, fresh, params):
    def words(coefficient):
        total = _seal_public.WeightedSum(ring)
        total.add(coefficient, _seal_public.load_fresh(ring, *fresh))
        return total.words().tolist()

    single = words(1)
    for coefficient in (2, 3, 4095, 4096):
        assert words(coefficient) == [coefficient * word % params.modulus for word in single]


def test_a_sum_that_becomes_transparent_is_refused(ring, fresh, params):
    total = _seal_public.WeightedSum(ring)
    total.add(1, _seal_public.load_fresh(ring, *fresh))
    negative = (params.modulus - total.words()) % np.uint64(params.modulus)
    with pytest.raises(InvalidMessageError):
        total.add(1, _seal_public.load_sum(ring, negative))


@pytest.mark.parametrize(("words", "seed"), [(4095, 64), (8192, 64), (4096, 63), (4096, 0)])
def test_fresh_ciphertexts_of_a_wrong_size_are_refused(ring, words, seed):
    with pytest.raises(ValueError, match="expected 4096 words and 64 bytes"):
        _seal_public.load_fresh(ring, np.ones(words, np.uint64), bytes(seed))


def test_sums_of_a_wrong_size_are_refused(ring):
    with pytest.raises(ValueError, match="expected 8192 words"):
        _seal_public.load_sum(ring, np.ones(4096, np.uint64))


def test_what_one_path_loads_is_what_it_would_be_alone_whatever_came_before(ring, fresh):
    def words(ciphertext):
        total = _seal_public.WeightedSum(ring)
        total.add(1, ciphertext)
        return total.words().tolist()

    alone = words(_seal_public.load_fresh(ring, *fresh))
    with _seal_public.loader(ring) as load:
        assert words(load(*fresh)) == alone
        assert words(load(np.array(alone, np.uint64), b"")) == alone  # a whole one is longer
        assert words(load(*fresh)) == alone
        with pytest.raises(InvalidMessageError):
            load(np.full(4096, ring.modulus, np.uint64), fresh[1])
        assert words(load(*fresh)) == alone


def test_words_beyond_the_modulus_do_not_get_past_seal_either(ring, params):
    words = np.ones(8192, np.uint64)
    words[5] = params.modulus
    with pytest.raises(InvalidMessageError):
        _seal_public.load_sum(ring, words)


def test_a_changed_container_format_is_noticed(ring):
    good = _seal_public.saved(_seal_public.encryption_parameters(4096, ring.chain_bits))
    assert _seal_public.members(good)
    for bad in (b"\0" + good[1:], good + b"\0", good[:5] + b"\1" + good[6:]):
        with pytest.raises(RuntimeError, match="another container format"):
            _seal_public.members(bad)


def test_a_changed_ciphertext_format_is_noticed(ring):
    parameters = _seal_public.saved(_seal_public.encryption_parameters(4096, ring.chain_bits))
    with pytest.raises(RuntimeError, match="another ciphertext format; nothing was sent"):
        _seal_public.ciphertext_members(parameters, ring, seeded=True)


def test_without_memory_files_a_private_temporary_file_is_used_and_removed(ring, fresh, monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _seal_public.memory_path() as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert Path(path).parent == tmp_path
    _seal_public.load_fresh(ring, *fresh)
    with pytest.raises(InvalidMessageError):
        _seal_public.load_sum(ring, np.zeros(8192, np.uint64))
    assert list(tmp_path.iterdir()) == []


def test_what_one_file_expands_is_what_each_seed_stands_for(ring, fresh):
    with _seal_public.expander(ring) as expand:
        for seed in (fresh[1], bytes(64), fresh[1]):
            total = _seal_public.WeightedSum(ring)
            total.add(1, expand(seed))
            assert total.words()[:4096].max() == 0
            assert np.array_equal(total.words()[4096:], _seal_public.expand(ring, seed))


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize("pipes", ["as they are", "refused", "small"])
@pytest.mark.parametrize("degree", [4096, 8192])
def test_what_goes_through_one_pipe_is_what_each_would_be_alone_and_no_descriptor_stays_open(pipes, degree, monkeypatch):
    ring = _seal_public.ring(degree, _seal_public.prime(degree, 54), slots=False)
    random = np.random.default_rng(3)
    things = [ring.plaintext(values.astype(np.complex128)) for values in random.integers(-(2**40), 2**40, (3, degree // 2))]
    things.insert(1, ring.plaintext(np.zeros(degree // 2, np.complex128)))  # compresses to next to nothing
    if pipes != "as they are":
        monkeypatch.setattr(_seal_public.fcntl, "fcntl", refuse if pipes == "refused" else lambda *_: 4096)
    before = len(os.listdir("/proc/self/fd"))
    containers = list(_seal_public.saved_each(things, most=16 * degree))
    assert len(os.listdir("/proc/self/fd")) == before
    assert containers == [_seal_public.saved(thing) for thing in things]
    assert len(set(containers)) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe can be set on Linux only")
def test_a_pipe_holds_four_containers_of_the_largest_profile():
    with _seal_public.pipe_path(16 * 8192) as pipe:
        assert pipe is not None
        path, output = pipe
        Path(path).write_bytes(bytes(4 * 16 * 8192))  # would wait for a reader if there were not room
        assert os.read(output, 4 * 16 * 8192) == bytes(4 * 16 * 8192)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files exist on Linux only")
def test_on_linux_nothing_touches_the_disk_and_no_descriptor_stays_open(ring, fresh):
    before = len(os.listdir("/proc/self/fd"))
    with _seal_public.memory_path() as path:
        assert "memfd:" in os.readlink(path)
    for _ in range(20):
        _seal_public.load_fresh(ring, *fresh)
    assert len(os.listdir("/proc/self/fd")) == before

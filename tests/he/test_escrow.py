import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.errors import (
    DecryptionError,
    InsufficientCapacityError,
    InvalidMessageError,
    LayoutMismatchError,
    ParametersMismatchError,
    RoundMismatchError,
    UnsupportedInThisModeError,
)
from privfed.he.codec import gather, pack_words, unpack_words
from privfed.he.escrow import (
    HolderKey,
    RunningSum,
    SealedVector,
    WholeVector,
    check_escrow_params,
    check_whole_chunk,
    public_key_id,
    seal_vector,
)
from privfed.he.escrow_secret import AttemptKey, EscrowKey, encrypt_to_holder
from privfed.he.params import CkksParams, asymmetric_noise_variance
from privfed.update import Layout

BINDING = b"binding of one attempt, 32 bytes"
LAYOUT = Layout(names=("weight",), shapes=((9000,),))
PARAMS = CkksParams.escrow()


@pytest.fixture(scope="module")
def stored() -> EscrowKey:
    return EscrowKey.generate()


@pytest.fixture(scope="module")
def key(stored: EscrowKey) -> AttemptKey:
    return stored.attempt_key(binding=BINDING, params=PARAMS)


@pytest.fixture(scope="module")
def public(key: AttemptKey) -> bytes:
    return key.public_key()


def add(vectors: list[WholeVector], coefficients: tuple[int, ...]) -> RunningSum:
    total = RunningSum(layout=LAYOUT, params=PARAMS, key_id=vectors[0].key_id)
    for coefficient, vector in zip(coefficients, vectors, strict=True):
        total.add(coefficient, vector)
    return total


@pytest.mark.parametrize("coefficients", [(128, 77, 51), (1, 1, 1), (256,), tuple(range(1, 11)), (2,) * 100])
def test_a_weighted_sum_of_what_was_encrypted_to_the_holder_opens_bit_for_bit(
    key: AttemptKey, public: bytes, coefficients: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    grids = rng.integers(-PARAMS.amplitude, PARAMS.amplitude, (len(coefficients), LAYOUT.size), endpoint=True)
    grids[:, :50], grids[:, 50:100] = PARAMS.amplitude, -PARAMS.amplitude
    total = add([encrypt_to_holder(grid, LAYOUT, PARAMS, public) for grid in grids], coefficients)
    assert total.coefficients == coefficients
    opened = key.open_sum(total.total(), coefficients=coefficients)
    assert np.array_equal(opened, np.array(coefficients) @ grids)


@pytest.mark.parametrize(("clients", "most"), [(3, 0), (10, 3), (100, 39)])
def test_a_sum_of_those_that_are_left_is_exact_with_every_number_of_dropouts(
    key: AttemptKey, public: bytes, clients: int, most: int
) -> None:
    """The weights are those of whoever is left; each upload may be the one that is missing."""
    rng, layout = np.random.default_rng(1), Layout(names=("weight",), shapes=((50,),))
    grids = rng.integers(-PARAMS.amplitude, PARAMS.amplitude, (clients, layout.size), endpoint=True)
    vectors = [encrypt_to_holder(grid, layout, PARAMS, public) for grid in grids]
    for lost in range(most + 1):
        left = sorted(rng.permutation(clients)[lost:].tolist())
        coefficients = tuple(1 + index % 2 for index in left)
        total = RunningSum(layout=layout, params=PARAMS, key_id=public_key_id(public))
        for coefficient, index in zip(coefficients, left, strict=True):
            total.add(coefficient, vectors[index])
        assert np.array_equal(key.open_sum(total.total(), coefficients=coefficients), np.array(coefficients) @ grids[left])


def test_the_noise_has_the_variance_that_the_parameters_count_with(key: AttemptKey, public: bytes) -> None:
    """And another one is told apart: that of symmetric encryption, and half and twice of this one."""
    noise = _noise(key, public, chunks=20)
    expected = asymmetric_noise_variance(PARAMS.poly_modulus_degree)
    # The mean square of a chunk has a relative standard deviation of about 0.03: a key and a u of one length each.
    tolerance = 6 * 0.03 / np.sqrt(20)
    assert np.mean(noise**2) == pytest.approx(expected, rel=tolerance)
    for wrong in (expected / 2, 2 * expected, 21 / 2):
        assert np.mean(noise**2) != pytest.approx(wrong, rel=tolerance)
    assert np.abs(noise).max() < 10 * np.sqrt(expected)


def _noise(key: AttemptKey, public: bytes, *, chunks: int) -> NDArray[np.float64]:
    layout = Layout(names=("zeros",), shapes=((chunks * PARAMS.poly_modulus_degree,),))
    vector = encrypt_to_holder(np.zeros(layout.size, np.int64), layout, PARAMS, public)
    return np.array([gather(key._ring_key.decrypt_unrounded(unpack_words(chunk, PARAMS)), PARAMS) for chunk in vector.chunks])


def test_the_solver_leaves_room_for_ten_deviations_and_refuses_where_nothing_fits() -> None:
    assert (PARAMS.weight_sum, PARAMS.amplitude, PARAMS.sum_chunk_bytes / PARAMS.poly_modulus_degree) == (256, 2**23 - 1, 14)
    deviation = 256 * np.sqrt(asymmetric_noise_variance(4096))
    assert 10 * deviation < PARAMS.noise < 2 ** (PARAMS.guard_bits - 1)
    assert CkksParams.escrow(weight_sum=4096).amplitude < 2**17
    with pytest.raises(InsufficientCapacityError, match="leaves no room for a grid"):
        CkksParams.escrow(weight_sum=2**24)
    with pytest.raises(ValueError, match="there are no seeds"):
        CkksParams(
            **{
                name: getattr(PARAMS, name) for name in ("poly_modulus_degree", "modulus", "weight_sum", "guard_bits", "amplitude", "bound")
            },
            prescaled=False,
            slots=False,
            seeded_sums=True,
            asymmetric=True,
        )
    with pytest.raises(UnsupportedInThisModeError, match=r"take CkksParams.escrow"):
        check_escrow_params(CkksParams.standard())


def test_encryption_to_the_holder_is_fresh_each_time(key: AttemptKey, public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    first, second = (encrypt_to_holder(grid, LAYOUT, PARAMS, public) for _ in range(2))
    assert not set(first.chunks) & set(second.chunks)
    assert first.key_id == second.key_id == public_key_id(public)
    assert key.public_key() != public


def test_another_key_another_attempt_and_a_damaged_sum_do_not_open(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    total = add([encrypt_to_holder(np.ones(LAYOUT.size, np.int64), LAYOUT, PARAMS, public)], (1,)).total()
    again = EscrowKey(secret=stored._secret).attempt_key(binding=BINDING, params=PARAMS)
    for same in (key, again):
        assert same.open_sum(total, coefficients=(1,)).tolist() == [1] * LAYOUT.size
    for other in (EscrowKey.generate().attempt_key(binding=BINDING, params=PARAMS), stored.attempt_key(binding=bytes(32), params=PARAMS)):
        with pytest.raises(DecryptionError):
            other.open_sum(total, coefficients=(1,))
    with pytest.raises(DecryptionError):
        key.open_sum(total, coefficients=(2,))
    coarse = CkksParams.escrow(weight_sum=64)
    with pytest.raises(ParametersMismatchError, match="other parameters than the key of this attempt; nothing was decrypted"):
        stored.attempt_key(binding=BINDING, params=coarse).open_sum(total, coefficients=(1,))
    with pytest.raises(ValueError, match="a binding of 32 bytes, got 16"):
        stored.attempt_key(binding=bytes(16), params=PARAMS)


def test_a_sum_with_a_ciphertext_of_another_attempt_in_it_does_not_open(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    """It opens where one key serves both, which is what a key of each attempt is for."""
    ones, earlier = np.ones(LAYOUT.size, np.int64), stored.attempt_key(binding=bytes(32), params=PARAMS)
    for old_key, opens in ((public, True), (earlier.public_key(), False)):
        old = replace(encrypt_to_holder(ones, LAYOUT, PARAMS, old_key), key_id=public_key_id(public))
        total = add([encrypt_to_holder(ones, LAYOUT, PARAMS, public), old], (1, 1)).total()
        if opens:
            assert key.open_sum(total, coefficients=(1, 1)).tolist() == [2] * LAYOUT.size
        else:
            with pytest.raises(DecryptionError):
                key.open_sum(total, coefficients=(1, 1))


def test_a_public_key_names_its_attempt(public: bytes) -> None:
    key = HolderKey(binding=BINDING, public_key=public, encryption_key=bytes(32))
    assert key.key_id == public_key_id(public)
    assert repr(key) == f"HolderKey({key.key_id.hex()})"
    with pytest.raises(ValueError, match="a binding of 32 bytes, got 3"):
        HolderKey(binding=b"abc", public_key=public, encryption_key=bytes(32))
    with pytest.raises(ValueError, match="expected an encryption key of 32 bytes, got 3"):
        HolderKey(binding=BINDING, public_key=public, encryption_key=b"abc")


def test_what_does_not_belong_together_is_not_added(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    vector = encrypt_to_holder(grid, LAYOUT, PARAMS, public)
    total = add([vector], (250,))
    other_layout = Layout(names=("other",), shapes=((9000,),))
    with pytest.raises(LayoutMismatchError):
        total.add(1, encrypt_to_holder(grid, other_layout, PARAMS, public))
    with pytest.raises(RoundMismatchError):
        total.add(1, encrypt_to_holder(grid, LAYOUT, PARAMS, key.public_key()))
    coarse = CkksParams.escrow(weight_sum=64)
    with pytest.raises(ParametersMismatchError):
        total.add(1, encrypt_to_holder(grid, LAYOUT, coarse, stored.attempt_key(binding=BINDING, params=coarse).public_key()))
    for coefficient in (0, 7, True):
        with pytest.raises(ValueError, match="coefficient"):
            total.add(coefficient, vector)
    with pytest.raises(ValueError, match="at least one vector"):
        RunningSum(layout=LAYOUT, params=PARAMS, key_id=vector.key_id).total()


def test_bytes_that_are_no_ciphertext_and_points_beyond_the_grid_are_refused(public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    for wrong in (grid[:-1], grid.astype(np.int32), grid + PARAMS.amplitude + 1):
        with pytest.raises(ValueError, match="expected"):
            encrypt_to_holder(wrong, LAYOUT, PARAMS, public)
    half = np.ones(PARAMS.poly_modulus_degree, np.uint64)
    transparent = pack_words(np.concatenate((half, 0 * half)), PARAMS)
    for chunk in (b"", public[:-1], transparent, b"\xff" * PARAMS.sum_chunk_bytes):
        with pytest.raises(InvalidMessageError):
            check_whole_chunk(chunk, PARAMS)
        with pytest.raises(RoundMismatchError):
            encrypt_to_holder(grid, LAYOUT, PARAMS, chunk)
    with pytest.raises(ValueError, match="key id"):
        WholeVector(layout=LAYOUT, params=PARAMS, key_id=b"", chunks=())
    with pytest.raises(ValueError, match="chunks for this layout"):
        WholeVector(layout=LAYOUT, params=PARAMS, key_id=bytes(16), chunks=())


def test_the_key_is_kept_in_a_file_of_its_owner_and_shows_nothing(stored: EscrowKey, key: AttemptKey, tmp_path: Path) -> None:
    path = tmp_path / "escrow.key"
    stored.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert EscrowKey.load(path).fingerprint == stored.fingerprint != EscrowKey.generate().fingerprint
    with pytest.raises(FileExistsError):
        stored.save(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        EscrowKey.load(path)
    path.chmod(0o600)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="expected an escrow key"):
        EscrowKey.load(path)
    assert (repr(stored), repr(key)) == ("EscrowKey(<secret>)", "AttemptKey(<secret>)")
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        for secret in (stored, key):
            with pytest.raises(TypeError, match="key material"):
                take(secret)
    with pytest.raises(ValueError, match="32 bytes"):
        EscrowKey(secret=b"")


def test_a_sealed_vector_opens_for_its_sender_attempt_and_places_alone(stored: EscrowKey, key: AttemptKey, public: bytes) -> None:
    holder_key = HolderKey(binding=BINDING, public_key=public, encryption_key=key.encryption_key)
    grid = np.arange(LAYOUT.size, dtype=np.int64)
    vector = encrypt_to_holder(grid, LAYOUT, PARAMS, public)
    sealed = seal_vector(vector, holder_key, sender="bank_0")
    assert key.unseal(sealed, sender="bank_0") == vector
    assert stored.attempt_key(binding=BINDING, params=PARAMS).unseal(sealed, sender="bank_0") == vector
    assert [len(chunk) for chunk in sealed.chunks] == [PARAMS.sum_chunk_bytes + 48] * 3
    assert repr(sealed) == "SealedVector(size=9000, chunks=3)"
    swapped = replace(sealed, chunks=(sealed.chunks[1], sealed.chunks[0], sealed.chunks[2]))
    damaged = replace(sealed, chunks=(*sealed.chunks[:2], sealed.chunks[2][:-1] + bytes([sealed.chunks[2][-1] ^ 1])))
    empty = replace(vector, chunks=(bytes(PARAMS.sum_chunk_bytes), *vector.chunks[1:]))
    hiding_nothing = seal_vector(empty, holder_key, sender="bank_0")
    # As one client's name ends where the place begins, no two bindings are the same bytes.
    for wrong, sender in ((sealed, "bank_1"), (sealed, "bank_0\0"), (swapped, "bank_0"), (damaged, "bank_0"), (hiding_nothing, "bank_0")):
        with pytest.raises(InvalidMessageError):
            key.unseal(wrong, sender=sender)
    for other in (stored.attempt_key(binding=bytes(32), params=PARAMS), EscrowKey.generate().attempt_key(binding=BINDING, params=PARAMS)):
        with pytest.raises(InvalidMessageError):
            other.unseal(sealed, sender="bank_0")
    with pytest.raises(ParametersMismatchError, match="other parameters than the key of this attempt; nothing was decrypted"):
        stored.attempt_key(binding=BINDING, params=CkksParams.escrow(bound=2.0)).unseal(sealed, sender="bank_0")
    with pytest.raises(RoundMismatchError, match="another key than it is to be sealed for; nothing was sealed"):
        seal_vector(replace(vector, key_id=bytes(16)), holder_key, sender="bank_0")
    with pytest.raises(ValueError, match="expected a key id of 16 bytes"):
        SealedVector(layout=LAYOUT, params=PARAMS, key_id=b"", chunks=())
    with pytest.raises(ValueError, match="expected chunk 0 to have 57392 bytes"):
        SealedVector(layout=LAYOUT, params=PARAMS, key_id=bytes(16), chunks=vector.chunks)
    with pytest.raises(ValueError, match="expected 3 chunks for this layout, got 2"):
        SealedVector(layout=LAYOUT, params=PARAMS, key_id=bytes(16), chunks=sealed.chunks[:2])

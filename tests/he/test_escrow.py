import copy
import pickle
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
from privfed.he.escrow import RunningSum, WholeVector, check_escrow_params, check_whole_chunk, public_key_id
from privfed.he.escrow_secret import EscrowKey, encrypt_to_holder
from privfed.he.params import CkksParams, asymmetric_noise_variance
from privfed.update import Layout

SESSION = b"session of tests"
LAYOUT = Layout(names=("weight",), shapes=((9000,),))
PARAMS = CkksParams.escrow()


@pytest.fixture(scope="module")
def key() -> EscrowKey:
    return EscrowKey.generate()


@pytest.fixture(scope="module")
def public(key: EscrowKey) -> bytes:
    return key.public_key(session=SESSION, params=PARAMS)


def add(vectors: list[WholeVector], coefficients: tuple[int, ...]) -> RunningSum:
    total = RunningSum(layout=LAYOUT, params=PARAMS, key_id=vectors[0].key_id)
    for coefficient, vector in zip(coefficients, vectors, strict=True):
        total.add(coefficient, vector)
    return total


@pytest.mark.parametrize("coefficients", [(128, 77, 51), (1, 1, 1), (256,), tuple(range(1, 11)), (2,) * 100])
def test_a_weighted_sum_of_what_was_encrypted_to_the_holder_opens_bit_for_bit(
    key: EscrowKey, public: bytes, coefficients: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    grids = rng.integers(-PARAMS.amplitude, PARAMS.amplitude, (len(coefficients), LAYOUT.size), endpoint=True)
    grids[:, :50], grids[:, 50:100] = PARAMS.amplitude, -PARAMS.amplitude
    total = add([encrypt_to_holder(grid, LAYOUT, PARAMS, public) for grid in grids], coefficients)
    assert total.coefficients == coefficients
    opened = key.open_sum(total.total(), session=SESSION, coefficients=coefficients)
    assert np.array_equal(opened, np.array(coefficients) @ grids)


def test_the_noise_has_the_variance_that_the_parameters_count_with(key: EscrowKey, public: bytes) -> None:
    """And another one is told apart: that of symmetric encryption, and half and twice of this one."""
    noise = _noise(key, public, chunks=20)
    expected = asymmetric_noise_variance(PARAMS.poly_modulus_degree)
    # The mean square of a chunk has a relative standard deviation of about 0.03: a key and a u of one length each.
    tolerance = 6 * 0.03 / np.sqrt(20)
    assert np.mean(noise**2) == pytest.approx(expected, rel=tolerance)
    for wrong in (expected / 2, 2 * expected, 21 / 2):
        assert np.mean(noise**2) != pytest.approx(wrong, rel=tolerance)
    assert np.abs(noise).max() < 10 * np.sqrt(expected)


def _noise(key: EscrowKey, public: bytes, *, chunks: int) -> NDArray[np.float64]:
    layout = Layout(names=("zeros",), shapes=((chunks * PARAMS.poly_modulus_degree,),))
    vector = encrypt_to_holder(np.zeros(layout.size, np.int64), layout, PARAMS, public)
    ring_key = key._ring_key(SESSION, PARAMS)
    return np.array([gather(ring_key.decrypt_unrounded(unpack_words(chunk, PARAMS)), PARAMS) for chunk in vector.chunks])


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


def test_encryption_to_the_holder_is_fresh_each_time(key: EscrowKey, public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    first, second = (encrypt_to_holder(grid, LAYOUT, PARAMS, public) for _ in range(2))
    assert not set(first.chunks) & set(second.chunks)
    assert first.key_id == second.key_id == public_key_id(public)
    assert key.public_key(session=SESSION, params=PARAMS) != public


def test_another_key_another_session_and_a_damaged_sum_do_not_open(key: EscrowKey, public: bytes) -> None:
    total = add([encrypt_to_holder(np.ones(LAYOUT.size, np.int64), LAYOUT, PARAMS, public)], (1,)).total()
    assert key.open_sum(total, session=SESSION, coefficients=(1,)).tolist() == [1] * LAYOUT.size
    with pytest.raises(DecryptionError):
        EscrowKey.generate().open_sum(total, session=SESSION, coefficients=(1,))
    with pytest.raises(DecryptionError):
        key.open_sum(total, session=bytes(16), coefficients=(1,))
    with pytest.raises(DecryptionError):
        key.open_sum(total, session=SESSION, coefficients=(2,))


def test_what_does_not_belong_together_is_not_added(key: EscrowKey, public: bytes) -> None:
    grid = np.zeros(LAYOUT.size, np.int64)
    vector = encrypt_to_holder(grid, LAYOUT, PARAMS, public)
    total = add([vector], (250,))
    other_layout = Layout(names=("other",), shapes=((9000,),))
    with pytest.raises(LayoutMismatchError):
        total.add(1, encrypt_to_holder(grid, other_layout, PARAMS, public))
    with pytest.raises(RoundMismatchError):
        total.add(1, encrypt_to_holder(grid, LAYOUT, PARAMS, key.public_key(session=SESSION, params=PARAMS)))
    coarse = CkksParams.escrow(weight_sum=64)
    with pytest.raises(ParametersMismatchError):
        total.add(1, encrypt_to_holder(grid, LAYOUT, coarse, key.public_key(session=SESSION, params=coarse)))
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
    with pytest.raises(ValueError, match="chunks of"):
        WholeVector(layout=LAYOUT, params=PARAMS, key_id=bytes(16), chunks=())


def test_the_key_is_kept_in_a_file_of_its_owner_and_shows_nothing(key: EscrowKey, tmp_path: Path) -> None:
    path = tmp_path / "escrow.key"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert EscrowKey.load(path).fingerprint == key.fingerprint != EscrowKey.generate().fingerprint
    with pytest.raises(FileExistsError):
        key.save(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        EscrowKey.load(path)
    path.chmod(0o600)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="expected an escrow key"):
        EscrowKey.load(path)
    assert repr(key) == "EscrowKey(<secret>)"
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="key material"):
            take(key)
    with pytest.raises(ValueError, match="32 bytes"):
        EscrowKey(secret=b"")

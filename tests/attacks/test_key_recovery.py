"""The attack against what others publish, against ourselves without the rounding, and against ourselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.attacks.key_recovery import (
    ADDITIVE,
    ADDITIVE_FLOAT32,
    FLARE,
    RecoveredKey,
    craft_sum,
    decrypt,
    read_crafted,
    read_upload,
    real_parts,
    recover_key,
    recover_peer_key,
    see_sum,
)
from privfed.attacks.observation import NotApplicable
from privfed.errors import DecryptionError, TamperedAggregateError
from privfed.he.additive import CkksVector, weighted_sum
from privfed.he.codec import gather, unpack_words
from privfed.he.params import CkksParams, ring_of
from privfed.he.peers import PeerSetting, hold_peer_round
from privfed.he.secret import RoundBinding, RoundKey, SharedKey, check_sum, encrypt, open_sum
from privfed.update import Layout

WEIGHTS = [0.5, 0.3, 0.2]
NAMES = ["bank_a", "bank_b", "bank_c"]
OURS = [
    replace(CkksParams.standard(), seeded_sums=False),
    replace(CkksParams.compact(), seeded_sums=False),
    replace(CkksParams.parity(clients=3), seeded_sums=False),
    CkksParams.compatible(clients=3),
]


def word_size(params: CkksParams) -> str:
    return f"{params.modulus.bit_length()} bits"


# ---- what others publish


@pytest.mark.parametrize(
    "setting",
    [FLARE, replace(FLARE, server_weights=False), ADDITIVE, ADDITIVE_FLOAT32, replace(FLARE, scale_bits=30, precision=np.float32)],
    ids=["FLARE", "FLARE, pre-scaled", "additions", "additions, float32", "FLARE at 2^30, float32"],
)
def test_the_key_of_others_is_recovered_and_reads_a_victims_update_in_seconds(setting: PeerSetting) -> None:
    slots = setting.poly_modulus_degree // 2
    updates = np.random.default_rng(1).normal(0, 0.01, (3, 2 * slots))
    seen = hold_peer_round(setting, updates, WEIGHTS)
    key = recover_peer_key(setting, seen)
    assert isinstance(key, RecoveredKey)
    assert key.seconds < 10
    assert set(np.unique(key.coefficients)) == {-1, 0, 1}
    for chunk in range(2):
        read = decrypt(setting.ring, key, seen.uploads[1][chunk]).real
        truth = updates[1, chunk * slots : (chunk + 1) * slots] * (1 if setting.server_weights else WEIGHTS[1])
        # An asymmetric encryption has a noise of 3.24 sqrt(4 N / 3 + 1) per coefficient, sqrt(N / 2) times that in a slot; 8 deviations.
        noise = 3.24 * np.sqrt(4 * setting.poly_modulus_degree / 3 + 1) * np.sqrt(slots)
        assert np.abs(read - truth).max() < 8 * noise / 2.0**setting.scale_bits


def test_the_attack_says_so_where_float32_swallowed_the_noise() -> None:
    """A positive control of the certificate: at a scale of 2^40, float32 keeps too few bits, and no wrong key is announced."""
    setting = replace(ADDITIVE, precision=np.float32)
    updates = np.random.default_rng(2).normal(0, 0.01, (3, 4096))
    outcome = recover_peer_key(setting, hold_peer_round(setting, updates, WEIGHTS))
    assert isinstance(outcome, NotApplicable)
    assert "the noise is not in what was published" in outcome.reason


def test_twice_the_same_ciphertext_gives_no_key() -> None:
    updates = np.random.default_rng(3).normal(0, 0.01, (3, 4096))
    seen = hold_peer_round(ADDITIVE, updates, WEIGHTS)
    outcome = recover_key(ADDITIVE.ring, [seen.sums[0]] * 2, [seen.published[:2048]] * 2)
    assert isinstance(outcome, NotApplicable)
    assert outcome.reason == "the two ciphertexts give the same equations"


# ---- what we publish


class Ours:
    """Three banks under our own parameters, and the sum of two chunks."""

    def __init__(self, params: CkksParams) -> None:
        self.params = params
        self.binding = RoundBinding(session=bytes(16), attempt=0, round=0, roster_digest=bytes(32), params=params)
        self.shared = SharedKey.generate()
        self.layout = Layout(names=("w",), shapes=((2 * params.chunk_coordinates,),))
        rng = np.random.default_rng(5)
        # Small updates, as they are: a published number then fits into double precision with all its noise.
        self.grids = [rng.integers(-1000, 1001, self.layout.size) for _ in NAMES]
        self.uploads = [self.upload(grid, name) for grid, name in zip(self.grids, NAMES, strict=True)]
        self.coefficients = list(params.multipliers([3, 2, 1]))
        self.total = weighted_sum(self.uploads, self.coefficients)

    def key(self) -> RoundKey:
        return self.shared.round_key(self.binding)

    def upload(self, grid: Any, name: str) -> CkksVector:
        return encrypt(grid, self.layout, self.params, self.key(), sender=name)

    def unrounded(self) -> list[Any]:
        """The private decryption, noise included, which no public function returns."""
        ring_key = self.key()._ring_key
        return [gather(ring_key.decrypt_unrounded(unpack_words(chunk, self.params)), self.params) for chunk in self.total.chunks]

    def opened(self, uploads: list[CkksVector] | None = None) -> Any:
        total = weighted_sum(uploads or self.uploads, self.coefficients)
        return open_sum(total, self.key(), coefficients=self.coefficients)

    def check(self, total: CkksVector) -> CkksVector:
        sealed = {name: upload.sealed_tags for name, upload in zip(NAMES, self.uploads, strict=True)}
        return check_sum(total, self.key(), sealed_tags=sealed, coefficients=self.coefficients)

    def attack(self, published: list[Any]) -> RecoveredKey | NotApplicable:
        ring = ring_of(self.params)
        return recover_key(ring, see_sum(self.total), [real_parts(numbers, self.params) for numbers in published])


@pytest.fixture(scope="module")
def ours() -> Callable[[CkksParams], Ours]:
    made: dict[CkksParams, Ours] = {}
    return lambda params: made.setdefault(params, Ours(params))


@pytest.mark.parametrize("params", OURS, ids=word_size)
def test_the_same_attack_recovers_our_key_if_the_rounding_is_taken_away(ours: Callable[..., Ours], params: CkksParams) -> None:
    round_ = ours(params)
    key = round_.attack(round_.unrounded())
    assert isinstance(key, RecoveredKey)
    for upload, grid in zip(round_.uploads, round_.grids, strict=True):
        assert np.array_equal(read_upload(upload, key), grid)


@pytest.mark.parametrize("params", OURS, ids=word_size)
def test_the_same_attack_fails_on_what_we_open(ours: Callable[..., Ours], params: CkksParams) -> None:
    round_ = ours(params)
    opened = round_.opened().reshape(2, -1) * 2.0**params.guard_bits
    assert np.array_equal(opened / 2.0**params.guard_bits, np.rint(np.array(round_.unrounded()) / 2.0**params.guard_bits))
    outcome = round_.attack(list(opened))
    assert isinstance(outcome, NotApplicable)
    assert "the noise is not in what was published" in outcome.reason


@pytest.mark.parametrize("params", OURS, ids=word_size)
def test_two_encryptions_of_equal_inputs_open_identically(ours: Callable[..., Ours], params: CkksParams) -> None:
    round_ = ours(params)
    again = [round_.upload(grid, name) for grid, name in zip(round_.grids, NAMES, strict=True)]
    assert all(mine.chunks != yours.chunks for mine, yours in zip(again, round_.uploads, strict=True))
    assert np.array_equal(round_.opened(again), round_.opened())


# ---- the active server


@pytest.mark.parametrize("params", OURS[:3], ids=word_size)
def test_without_tags_a_chosen_ciphertext_opens_to_the_key_and_tags_refuse_it(ours: Callable[..., Ours], params: CkksParams) -> None:
    round_ = ours(params)
    evil = craft_sum(round_.total, round_.coefficients, np.random.default_rng(6))
    # The positive control calls the secret layer without the check: its residual is that of an honest sum, and it opens.
    opened = open_sum(evil, round_.key(), coefficients=round_.coefficients)
    key = read_crafted(opened, params)
    assert isinstance(key, RecoveredKey)
    assert np.array_equal(read_upload(round_.uploads[0], key), round_.grids[0])
    with pytest.raises(TamperedAggregateError):
        round_.check(evil)
    assert round_.check(round_.total) == round_.total


def test_a_chosen_ciphertext_without_imitated_noise_does_not_pass_the_residual_check(ours: Callable[..., Ours]) -> None:
    round_ = ours(OURS[0])
    evil = craft_sum(round_.total, [1], np.random.default_rng(7))
    with pytest.raises(DecryptionError):
        open_sum(evil, round_.key(), coefficients=round_.coefficients)


def test_an_honest_opening_is_not_taken_for_a_crafted_one(ours: Callable[..., Ours]) -> None:
    round_ = ours(OURS[0])
    assert isinstance(read_crafted(round_.opened(), OURS[0]), NotApplicable)


def test_no_key_is_shown() -> None:
    key = RecoveredKey(coefficients=np.ones(4, np.int64), words=np.ones(4, np.uint64), seconds=0.0)
    assert "array" not in repr(key)

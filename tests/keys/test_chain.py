import hashlib
import hmac
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from privfed import files
from privfed.errors import KeyErasedError, KeyRefusedError
from privfed.he.secret import RoundBinding, SharedKey
from privfed.keys.chain import CHAIN_FILE_BYTES, ChainFacts, KeyChain, _packed, read_facts, shared_key_fingerprint
from privfed.keys.roster import PinnedRoster
from tests.hostile import mutated, mutations
from tests.keys.conftest import People

Bind = Callable[..., RoundBinding]


def expand(key: bytes, *fields: bytes) -> bytes:
    """RFC 5869, section 2.3, with SHA-512 and 32 bytes of output: half of one block."""
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.new(key, info + b"\1", hashlib.sha512).digest()[:32]


# ---- derivation


def test_each_round_key_is_that_of_a_shared_key_derived_along_the_chain(roster: PinnedRoster, bind: Bind) -> None:
    chain_key = bytes(range(32))
    chain = KeyChain.beginning(chain_key, roster=roster, session=bytes(16), epoch=1)
    for number in range(3):
        secret = expand(chain_key, b"privfed chain round secret v1")
        assert chain.round_key(bind(chain, number)).key_id == SharedKey.from_bytes(secret).round_key(bind(chain, number)).key_id
        chain_key = expand(chain_key, b"privfed next chain key v1")


def test_all_who_share_a_chain_derive_the_same_keys_wherever_they_stand(roster: PinnedRoster, bind: Bind) -> None:
    ahead, behind = (KeyChain.beginning(bytes(32), roster=roster, session=bytes(16), epoch=1) for _ in range(2))
    ahead.erase_through(4)
    for number, attempt in ((5, 0), (5, 1), (8, 0)):
        binding = bind(ahead, number, attempt=attempt)
        assert ahead.round_key(binding).key_id == behind.round_key(binding).key_id
    assert ahead.fingerprint == behind.fingerprint


def test_every_round_attempt_and_chain_has_another_key(chain: KeyChain, roster: PinnedRoster, bind: Bind) -> None:
    other = KeyChain.beginning(os.urandom(32), roster=roster, session=chain.facts.session, epoch=1)
    bindings = [bind(chain, 0), bind(chain, 1), bind(chain, 0, attempt=1)]
    assert len({each.round_key(binding).key_id for each in (chain, other) for binding in bindings}) == 6


def test_the_fingerprint_tells_key_session_roster_and_epoch_apart(people: People, roster: PinnedRoster) -> None:
    terms = {"roster": roster, "session": bytes(16), "epoch": 1}
    prints = {
        KeyChain.beginning(key, **(terms | change)).fingerprint
        for key, change in (
            (bytes(32), {}),
            (bytes(31) + b"\1", {}),
            (bytes(32), {"session": bytes(15) + b"\1"}),
            (bytes(32), {"epoch": 2}),
            (bytes(32), {"roster": people.roster(["bank_a", "bank_b"])}),
        )
    }
    assert len(prints) == 5


def test_keys_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch, roster: PinnedRoster) -> None:
    first, second = KeyChain.generate(roster), KeyChain.generate(roster)
    assert first.facts.session != second.facts.session
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    drawn = KeyChain.beginning(bytes(range(32)), roster=roster, session=bytes(range(16)), epoch=1)
    assert KeyChain.generate(roster).fingerprint == drawn.fingerprint


def test_a_successor_has_a_fresh_key_the_same_session_and_the_next_epoch(chain: KeyChain, people: People) -> None:
    chain.erase_through(3)
    after = KeyChain.generate(people.roster(["bank_a", "bank_f"]), after=chain.facts)
    assert (after.facts.session, after.facts.epoch, after.facts.next_round) == (chain.facts.session, 2, 0)
    again = KeyChain.generate(people.roster(["bank_a", "bank_f"]), after=chain.facts)
    assert after.fingerprint != again.fingerprint  # not derived from the old one


def test_a_round_of_another_session_or_roster_is_refused(chain: KeyChain, people: People, bind: Bind) -> None:
    other = people.roster(["bank_a", "bank_b"]).parties.digest
    for change in ({"session": bytes(16)}, {"roster_digest": other}):
        with pytest.raises(KeyRefusedError, match="another session or another roster than round 3; nothing was derived"):
            chain.round_key(bind(chain, 3, **change))


@pytest.mark.parametrize("change", [{"session": bytes(15)}, {"roster_digest": bytes(31)}, {"epoch": 0}, {"next_round": -1}])
def test_facts_out_of_range_are_refused(chain: KeyChain, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(chain.facts, **change)


def test_a_chain_key_of_another_length_is_refused(roster: PinnedRoster) -> None:
    with pytest.raises(ValueError, match="expected a chain key of 32 bytes, got 31"):
        KeyChain.beginning(bytes(31), roster=roster, session=bytes(16), epoch=1)
    for epoch in (0, -1, 2**32):
        with pytest.raises(ValueError, match="expected an epoch from 1"):
            KeyChain.beginning(bytes(32), roster=roster, session=bytes(16), epoch=epoch)


# ---- erasing


def test_the_key_of_an_erased_round_is_refused_with_a_way_out(chain: KeyChain, bind: Bind) -> None:
    chain.round_key(bind(chain, 2))
    chain.erase_through(2)
    for number in range(3):
        with pytest.raises(
            KeyErasedError, match="before 3 were erased when round 2 was stored; .* take the model of a client that opened it"
        ):
            chain.round_key(bind(chain, number))
    chain.round_key(bind(chain, 3))


def test_asking_for_a_later_round_erases_nothing(tmp_path: Path, chain: KeyChain, bind: Bind) -> None:
    chain.save(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    chain.round_key(bind(chain, 9))
    chain.round_key(bind(chain, 0))
    assert (tmp_path / "key").read_bytes() == before


def test_a_file_stolen_after_the_erasure_opens_no_earlier_round(tmp_path: Path, chain: KeyChain, roster: PinnedRoster, bind: Bind) -> None:
    path = tmp_path / "key"
    chain.save(path)
    stolen_before = path.read_bytes()
    wanted = chain.round_key(bind(chain, 4)).key_id
    chain.erase_through(4)
    files.create(tmp_path / "stolen", path.read_bytes())
    thief = KeyChain.load(tmp_path / "stolen", roster=roster)
    with pytest.raises(KeyErasedError):
        thief.round_key(bind(thief, 4))
    # What the thief has is one number of 32 bytes beside public facts: neither of the two that would open the round.
    secret, size = chain_key_in(path.read_bytes()), len(stolen_before)
    old = chain_key_in(stolen_before)
    for _ in range(4):
        old = expand(old, b"privfed next chain key v1")
    assert SharedKey.from_bytes(expand(old, b"privfed chain round secret v1")).round_key(bind(chain, 4)).key_id == wanted
    assert secret == expand(old, b"privfed next chain key v1")
    data = path.read_bytes()
    assert len(data) == size
    assert old not in data
    assert expand(old, b"privfed chain round secret v1") not in data
    # The positive control: the file as it was before opens the round.
    files.create(tmp_path / "before", stolen_before)
    assert KeyChain.load(tmp_path / "before", roster=roster).round_key(bind(chain, 4)).key_id == wanted


def chain_key_in(data: bytes) -> bytes:
    return data[-64:-32]


def test_an_erasure_is_on_disk_when_it_returns_and_survives_a_restart(
    tmp_path: Path, chain: KeyChain, roster: PinnedRoster, bind: Bind
) -> None:
    path = tmp_path / "key"
    chain.save(path)
    for number in (0, 0, 2, 1, 5):  # repeated, skipping and going back
        chain.erase_through(number)
    again = KeyChain.load(path, roster=roster)
    assert again.facts == chain.facts == read_facts(path)
    assert again.facts.next_round == 6
    assert again.round_key(bind(chain, 6)).key_id == chain.round_key(bind(chain, 6)).key_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_erasure_that_fails_leaves_the_key_as_it_was(
    tmp_path: Path, chain: KeyChain, roster: PinnedRoster, bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    path = tmp_path / "key"
    chain.save(path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        chain.erase_through(3)
    monkeypatch.undo()
    again = KeyChain.load(path, roster=roster)
    assert again.facts.next_round == 0
    again.round_key(bind(chain, 0))
    # Nor does the object believe that the file was moved on: the next attempt does it.
    chain.erase_through(3)
    assert read_facts(path).next_round == 4


def test_a_chain_that_another_process_moved_on_never_goes_back(tmp_path: Path, chain: KeyChain, roster: PinnedRoster, bind: Bind) -> None:
    path = tmp_path / "key"
    chain.save(path)
    other = KeyChain.load(path, roster=roster)
    other.erase_through(7)
    chain.erase_through(2)
    assert read_facts(path).next_round == 8
    with pytest.raises(KeyErasedError):
        chain.round_key(bind(chain, 5))
    assert chain.round_key(bind(chain, 8)).key_id == other.round_key(bind(chain, 8)).key_id


def test_an_erasure_waits_for_another_one_to_end(tmp_path: Path, chain: KeyChain) -> None:
    path = tmp_path / "key"
    chain.save(path)
    thread = threading.Thread(target=chain.erase_through, args=(0,))
    with files.locked(path):
        thread.start()
        thread.join(0.2)
        assert read_facts(path).next_round == 0
    thread.join()
    assert read_facts(path).next_round == 1


def test_a_file_that_holds_another_key_by_now_is_not_touched(tmp_path: Path, chain: KeyChain, roster: PinnedRoster) -> None:
    path = tmp_path / "key"
    chain.save(path)
    KeyChain.generate(roster, after=chain.facts).save(path)
    before = path.read_bytes()
    with pytest.raises(KeyRefusedError, match="key holds another key by now; nothing was erased"):
        chain.erase_through(0)
    assert path.read_bytes() == before


def test_a_round_number_out_of_all_proportion_is_refused_at_once(chain: KeyChain, bind: Bind) -> None:
    start = time.monotonic()
    for action in (lambda: chain.round_key(bind(chain, 2**32 - 1)), lambda: chain.erase_through(2**32 - 1)):
        with pytest.raises(ValueError, match="expected a round at most 100000 after round 0, got 42949672"):
            action()
    assert time.monotonic() - start < 1
    assert chain.facts.next_round == 0


# ---- files


def test_a_chain_survives_its_file(tmp_path: Path, chain: KeyChain, roster: PinnedRoster, bind: Bind) -> None:
    umask = os.umask(0)
    try:
        chain.save(tmp_path / "key")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    again = KeyChain.load(tmp_path / "key", roster=roster)
    assert again.facts == chain.facts
    assert again.round_key(bind(chain, 1)).key_id == chain.round_key(bind(chain, 1)).key_id


def test_a_key_is_loaded_with_the_roster_that_shares_it_alone(tmp_path: Path, chain: KeyChain, people: People) -> None:
    chain.save(tmp_path / "key")
    with pytest.raises(KeyRefusedError, match="shared among another roster than this one; nothing was done"):
        KeyChain.load(tmp_path / "key", roster=people.roster(["bank_a", "bank_b"]))


def test_a_key_takes_the_place_of_one_of_an_earlier_epoch_of_its_session_alone(
    tmp_path: Path, chain: KeyChain, roster: PinnedRoster, people: People
) -> None:
    path = tmp_path / "key"
    later = KeyChain.generate(people.roster(["bank_a", "bank_f"]), after=chain.facts)
    chain.save(path)
    later.save(path)
    assert read_facts(path) == later.facts
    same_epoch = KeyChain.beginning(bytes(32), roster=roster, session=chain.facts.session, epoch=2)
    for older in (chain, later, same_epoch):
        with pytest.raises(KeyRefusedError, match=r"key holds the key of epoch 2, and this one is of epoch [12]; nothing was done"):
            older.save(path)
    with pytest.raises(KeyRefusedError, match="key holds the key of another session"):
        KeyChain.generate(roster).save(path)
    assert read_facts(path) == later.facts


def test_a_key_is_never_saved_over_something_else(tmp_path: Path, chain: KeyChain) -> None:
    files.create(tmp_path / "file", b"mine")
    with pytest.raises(ValueError, match="expected a key chain in file"):
        chain.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path: Path, chain: KeyChain, roster: PinnedRoster, mode: int) -> None:
    path = tmp_path / "key"
    chain.save(path)
    path.chmod(mode)
    for action in (lambda: KeyChain.load(path, roster=roster), lambda: read_facts(path), lambda: chain.erase_through(0)):
        with pytest.raises(PermissionError, match="chmod 600"):
            action()


def test_every_flipped_bit_and_every_cut_of_a_file_is_refused(tmp_path: Path, chain: KeyChain) -> None:
    path = tmp_path / "key"
    chain.save(path)
    data = path.read_bytes()
    assert len(data) == CHAIN_FILE_BYTES
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(ValueError, match="expected a key chain in key, whole and unchanged"):
            read_facts(path)
        path.write_bytes(data[:place])
        with pytest.raises(ValueError, match="expected a key chain in key"):
            read_facts(path)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=mutations())
def test_a_changed_file_is_refused(tmp_path: Path, chain: KeyChain, mutation: tuple[int, int]) -> None:
    path = tmp_path / "key"
    data = _packed(chain.facts, chain._chain_key)
    path.write_bytes(mutated(data, *mutation))
    path.chmod(0o600)
    if path.read_bytes() == data:
        assert read_facts(path) == chain.facts
    else:
        with pytest.raises(ValueError, match="expected a key chain in key"):
            read_facts(path)


def test_the_facts_of_a_plain_shared_key_are_its_fingerprint(tmp_path: Path) -> None:
    key = SharedKey.generate()
    key.save(tmp_path / "key")
    assert shared_key_fingerprint(tmp_path / "key") == key.fingerprint


def test_facts_show_no_secret(chain: KeyChain) -> None:
    assert isinstance(chain.facts, ChainFacts)
    assert chain._chain_key.hex() not in repr(chain.facts).replace(" ", "")


def test_a_file_that_was_put_back_is_moved_on_by_the_next_erasing(chain: KeyChain, roster: PinnedRoster, tmp_path: Path) -> None:
    path = tmp_path / "shared.key"
    chain.save(path)
    before = path.read_bytes()
    chain.erase_through(4)
    path.write_bytes(before)
    chain.erase_through(2)  # rounds that were erased before are fine, and the file is not left behind
    assert chain.facts.next_round == read_facts(path).next_round == 5

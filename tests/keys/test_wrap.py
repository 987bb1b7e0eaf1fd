import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import HealthCheck, given, settings

from privfed.errors import InvalidMessageError, KeyRefusedError
from privfed.he.secret import RoundBinding
from privfed.identity import Identity
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.keys.roster import PinnedRoster
from privfed.keys.wrap import MOST_WRAP_BYTES, read_wrap, unwrap, wrap
from tests.hostile import mutated, mutations
from tests.keys.conftest import BANKS, People, new_party


@pytest.fixture
def message(people: People, roster: PinnedRoster, chain: KeyChain) -> bytes:
    return wrap(chain, sender=people["bank_a"], recipient=people["bank_b"].public, roster=roster)


def resigned(data: bytes, party: Party, change: Callable[[bytes], bytes] = lambda body: body) -> bytes:
    body = change(data[:-64])
    return body + party.sign(body)


def test_every_other_client_gets_the_same_key(
    people: People, roster: PinnedRoster, chain: KeyChain, bind: Callable[..., RoundBinding]
) -> None:
    expected = chain.round_key(bind(chain, 0)).key_id
    for name in BANKS[1:]:
        data = wrap(chain, sender=people["bank_a"], recipient=people[name].public, roster=roster)
        got = unwrap(data, recipient=people[name], roster=roster, epoch=1)
        assert got.facts == chain.facts
        assert got.round_key(bind(chain, 0)).key_id == expected
        assert len(data) <= MOST_WRAP_BYTES


def test_a_message_shows_nothing_of_the_key_and_is_another_one_each_time(
    people: People, roster: PinnedRoster, chain: KeyChain, message: bytes
) -> None:
    again = wrap(chain, sender=people["bank_a"], recipient=people["bank_b"].public, roster=roster)
    assert again[-144:-64] != message[-144:-64]
    assert chain._chain_key not in message


def test_a_message_is_sealed_as_rfc_9180_says(people: People, chain: KeyChain, message: bytes) -> None:
    """DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305, base mode, from the primitives alone (RFC 9180, sections 4 and 5)."""
    info, enc, sealed = message[:-144], message[-144:-112], message[-112:-64]
    private = people["bank_b"]._encryption_key

    def extract(suite: bytes, salt: bytes, label: bytes, key: bytes) -> bytes:
        return hmac.new(salt or bytes(32), b"HPKE-v1" + suite + label + key, hashlib.sha256).digest()

    def expand(suite: bytes, secret: bytes, label: bytes, about: bytes, length: int) -> bytes:
        text = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + about
        return hmac.new(secret, text + b"\1", hashlib.sha256).digest()[:length]

    kem, hpke = b"KEM" + struct.pack(">H", 0x20), b"HPKE" + struct.pack(">HHH", 0x20, 1, 3)
    shared = private.exchange(X25519PublicKey.from_public_bytes(enc))
    kem_context = enc + private.public_key().public_bytes_raw()
    secret = expand(kem, extract(kem, b"", b"eae_prk", shared), b"shared_secret", kem_context, 32)
    context = b"\0" + extract(hpke, b"", b"psk_id_hash", b"") + extract(hpke, b"", b"info_hash", info)
    prk = extract(hpke, secret, b"secret", b"")
    key, nonce = expand(hpke, prk, b"key", context, 32), expand(hpke, prk, b"base_nonce", context, 12)
    assert ChaCha20Poly1305(key).decrypt(nonce, sealed, b"") == chain._chain_key


# ---- what is not wrapped


def test_the_server_gets_no_key(people: People, roster: PinnedRoster, chain: KeyChain) -> None:
    for server in (people.server, people.roster().server):
        with pytest.raises(KeyRefusedError, match="'hub' is the server, which never gets a key"):
            wrap(chain, sender=people["bank_a"], recipient=server, roster=roster)
    # Nor does a client's identity alone, without the key to which something could be encrypted.
    with pytest.raises(KeyRefusedError, match="nothing was wrapped"):
        wrap(chain, sender=people["bank_a"], recipient=people["bank_b"].public.identity, roster=roster)


def test_strangers_oneself_and_keys_that_are_not_pinned_get_no_key(people: People, roster: PinnedRoster, chain: KeyChain) -> None:
    sender = people["bank_a"]
    with pytest.raises(KeyRefusedError, match="'bank_f' is not in the roster"):
        wrap(chain, sender=sender, recipient=people["bank_f"].public, roster=roster)
    exchanged = replace(people["bank_b"].public, encryption_key=people["bank_f"].public.encryption_key)
    for recipient in (sender.public, new_party("bank_b").public, exchanged):
        with pytest.raises(KeyRefusedError, match="expected another client than 'bank_a', with the keys that the roster pins"):
            wrap(chain, sender=sender, recipient=recipient, roster=roster)


def test_a_sender_that_is_not_pinned_as_it_is_wraps_nothing(people: People, roster: PinnedRoster, chain: KeyChain) -> None:
    recipient = people["bank_b"].public
    with pytest.raises(KeyRefusedError, match="'bank_f' is not in the roster"):
        wrap(chain, sender=people["bank_f"], recipient=recipient, roster=roster)
    with pytest.raises(KeyRefusedError, match="the roster pins other keys of 'bank_a' than its folder holds"):
        wrap(chain, sender=new_party("bank_a"), recipient=recipient, roster=roster)


def test_a_key_of_another_roster_or_with_erased_rounds_is_not_wrapped(people: People, roster: PinnedRoster, chain: KeyChain) -> None:
    a, b = people["bank_a"], people["bank_b"].public
    with pytest.raises(KeyRefusedError, match="shared among another roster; nothing was wrapped; rotate"):
        wrap(chain, sender=a, recipient=b, roster=people.roster(["bank_a", "bank_b"]))
    chain.erase_through(1)
    with pytest.raises(KeyRefusedError, match="rounds before 2 were erased here"):
        wrap(chain, sender=a, recipient=b, roster=roster)


# ---- what is not opened


@pytest.fixture
def sealed_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, decrypting anything fails the test."""
    monkeypatch.setattr(Party, "unseal", lambda *_, **__: pytest.fail("it was decrypted"))


def test_a_stranger_s_signature_is_refused_before_anything_is_decrypted(
    people: People, roster: PinnedRoster, message: bytes, sealed_box: None
) -> None:
    server = Identity.generate("hub")
    with_server = PinnedRoster(server=server.public, members=roster.members)
    by_server = message.replace(b"\x06bank_a", b"\x03hub")[:-64]
    cases = [
        (resigned(message, people["bank_f"]), roster),
        (resigned(message, people["bank_b"]), roster),
        (message[:-64] + bytes(64), roster),
        (by_server + server.sign(by_server), with_server),
        (resigned(message, people["bank_f"], lambda body: body.replace(b"\x06bank_a", b"\x06bank_f")), roster),
    ]
    for data, pinned in cases:
        with pytest.raises(InvalidMessageError):
            unwrap(data, recipient=people["bank_b"], roster=pinned, epoch=1)


def test_a_message_for_another_recipient_is_refused_before_anything_is_decrypted(
    people: People, roster: PinnedRoster, message: bytes, sealed_box: None
) -> None:
    with pytest.raises(KeyRefusedError, match="'bank_a' wrapped this key for 'bank_b', not for 'bank_c'; nothing was decrypted"):
        unwrap(message, recipient=people["bank_c"], roster=roster, epoch=1)


def test_a_message_among_another_roster_is_refused_before_anything_is_decrypted(people: People, message: bytes, sealed_box: None) -> None:
    members = tuple(people[name].public for name in BANKS)
    exchanged = replace(members[2], encryption_key=people["bank_f"].public.encryption_key)
    for other in (
        people.roster([*BANKS, "bank_f"]),
        people.roster(["bank_a", "bank_b"]),
        PinnedRoster(server=Identity.generate("hub").public, members=members),
        PinnedRoster(server=people.server, members=(*members[:2], exchanged, *members[3:])),  # one key of a third party
    ):
        with pytest.raises(KeyRefusedError, match="'bank_a' pins another roster than this one; nothing was decrypted"):
            unwrap(message, recipient=people["bank_b"], roster=other, epoch=1)


@pytest.mark.parametrize("epoch", [2, 7])
def test_another_epoch_is_refused_before_anything_is_decrypted(
    people: People, roster: PinnedRoster, message: bytes, sealed_box: None, epoch: int
) -> None:
    with pytest.raises(KeyRefusedError, match=f"wrapped a key of epoch 1, expected was epoch {epoch}; nothing was decrypted"):
        unwrap(message, recipient=people["bank_b"], roster=roster, epoch=epoch)


def test_an_old_epoch_never_comes_back(people: People, roster: PinnedRoster, chain: KeyChain, message: bytes) -> None:
    bank = people["bank_b"]
    first = unwrap(message, recipient=bank, roster=roster, epoch=1)
    second = KeyChain.generate(roster, after=chain.facts)
    rotated = wrap(second, sender=people["bank_c"], recipient=bank.public, roster=roster)
    held = unwrap(rotated, recipient=bank, roster=roster, epoch=2, held=first.facts).facts
    assert held == second.facts
    for data, epoch in ((message, 1), (rotated, 2), (message, 3), (rotated, 3)):
        with pytest.raises(KeyRefusedError, match="and epoch 2 is held here; nothing was decrypted"):
            unwrap(data, recipient=bank, roster=roster, epoch=epoch, held=held)


def test_another_session_than_the_held_one_is_refused(people: People, roster: PinnedRoster, message: bytes, sealed_box: None) -> None:
    held = KeyChain.generate(roster).facts
    with pytest.raises(KeyRefusedError, match="a key of another session than the one that is held here; nothing was decrypted"):
        unwrap(message, recipient=people["bank_b"], roster=roster, epoch=1, held=held)


def test_a_recipient_that_is_not_pinned_as_it_is_opens_nothing(
    people: People, roster: PinnedRoster, message: bytes, sealed_box: None
) -> None:
    with pytest.raises(KeyRefusedError, match="the roster pins other keys of 'bank_b'"):
        unwrap(message, recipient=new_party("bank_b"), roster=roster, epoch=1)
    with pytest.raises(KeyRefusedError, match="'bank_f' is not in the roster"):
        unwrap(message, recipient=people["bank_f"], roster=roster, epoch=1)


def test_a_member_cannot_pass_another_s_message_off_as_its_own(people: People, roster: PinnedRoster, message: bytes) -> None:
    """Taken apart and signed anew: the sealed key is bound to who sealed it, for whom, and to what."""
    thief, bank = people["bank_c"], people["bank_b"]

    def change(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
        return lambda body: body.replace(old, new)

    own_name = resigned(message, thief, change(b"\x06bank_a", b"\x06bank_c"))
    other_epoch = resigned(message, people["bank_a"], lambda body: body[:-84] + (2).to_bytes(4, "big") + body[-80:])
    other_session = resigned(message, people["bank_a"], lambda body: body[:-132] + bytes(16) + body[-116:])
    for_thief = resigned(message, thief, lambda body: body.replace(b"\x06bank_a", b"\x06bank_d").replace(b"\x06bank_b", b"\x06bank_c"))
    for data, epoch in ((own_name, 1), (other_epoch, 2), (other_session, 1)):
        with pytest.raises(InvalidMessageError):
            unwrap(data, recipient=bank, roster=roster, epoch=epoch)
    with pytest.raises(InvalidMessageError):
        unwrap(for_thief, recipient=thief, roster=roster, epoch=1)


def test_members_of_an_old_roster_cannot_rotate_the_key_of_the_new_one(people: People, roster: PinnedRoster, chain: KeyChain) -> None:
    new = people.roster(["bank_a", "bank_b", "bank_f"])
    left = wrap(KeyChain.generate(roster, after=chain.facts), sender=people["bank_e"], recipient=people["bank_b"].public, roster=roster)
    with pytest.raises(InvalidMessageError):
        unwrap(left, recipient=people["bank_b"], roster=new, epoch=2, held=chain.facts)


def test_every_flipped_bit_and_every_cut_is_refused(people: People, roster: PinnedRoster, message: bytes) -> None:
    bank = people["bank_b"]
    for place in range(len(message)):
        flipped = message[:place] + bytes([message[place] ^ 1 << place % 8]) + message[place + 1 :]
        for data in (flipped, message[:place]):
            with pytest.raises(InvalidMessageError):
                unwrap(data, recipient=bank, roster=roster, epoch=1)
    for data in (message + b"\0", bytes(MOST_WRAP_BYTES + 1), b"\xff" * MOST_WRAP_BYTES):
        with pytest.raises(InvalidMessageError):
            unwrap(data, recipient=bank, roster=roster, epoch=1)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=mutations())
def test_a_changed_message_is_refused_from_strangers_and_insiders(
    people: People, roster: PinnedRoster, message: bytes, mutation: tuple[int, int]
) -> None:
    bank = people["bank_b"]
    data = mutated(message, *mutation)
    if data != message:
        with pytest.raises(InvalidMessageError):
            unwrap(data, recipient=bank, roster=roster, epoch=1)
    body = mutated(message[:-64], *mutation)
    if body != message[:-64]:
        # Signed by the sender that it names: what stands behind the signature is reached, and nothing else than a refusal follows.
        with pytest.raises((InvalidMessageError, KeyRefusedError)):
            unwrap(body + people["bank_a"].sign(body), recipient=bank, roster=roster, epoch=1)


def test_no_more_of_a_file_is_read_than_a_message_can_have(tmp_path: Path, message: bytes) -> None:
    (tmp_path / "huge").write_bytes(message + bytes(10_000_000))
    assert len(read_wrap(tmp_path / "huge")) == MOST_WRAP_BYTES + 1


@pytest.mark.parametrize("length", [0, 10, 20, 25, 100, -1])
def test_a_file_that_holds_a_part_of_a_message_says_to_ask_for_it_again(tmp_path: Path, message: bytes, length: int) -> None:
    (tmp_path / "bank_b.wrap").write_bytes(message[:length])
    with pytest.raises(ValueError, match="whole message from privfed keys wrap in bank_b.wrap, .*; nothing was opened; ask for it again"):
        read_wrap(tmp_path / "bank_b.wrap")
    (tmp_path / "bank_b.wrap").write_bytes(message)
    assert read_wrap(tmp_path / "bank_b.wrap") == message


def test_the_longest_names_fit_a_message() -> None:
    sender, recipient = new_party("a" * 64), new_party("b" * 64)
    roster = PinnedRoster(server=Identity.generate("hub").public, members=(sender.public, recipient.public))
    chain = KeyChain.generate(roster)
    data = wrap(chain, sender=sender, recipient=recipient.public, roster=roster)
    assert len(data) == MOST_WRAP_BYTES
    assert unwrap(data, recipient=recipient, roster=roster, epoch=1).facts == chain.facts


def test_the_decryption_key_with_a_recorded_message_gives_the_whole_epoch_away(
    people: People, roster: PinnedRoster, chain: KeyChain, message: bytes, bind: Callable[..., RoundBinding]
) -> None:
    """Why docs/keys.md says to keep encryption.pem elsewhere: erasing rounds from the key file does not help against this."""
    wanted = chain.round_key(bind(chain, 0)).key_id
    chain.erase_through(5)
    thief = unwrap(message, recipient=people["bank_b"], roster=roster, epoch=1)
    assert thief.round_key(bind(chain, 0)).key_id == wanted
    signing_key_alone = Party(identity=people["bank_b"]._identity, encryption_key=X25519PrivateKey.generate())
    with pytest.raises(InvalidMessageError):
        signing_key_alone.unseal(message[-144:-64], info=message[:-144])

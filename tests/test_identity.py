import copy
import os
import pickle
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privfed.errors import InvalidMessageError
from privfed.identity import SIGNATURE_BYTES, Identity, PublicIdentity, Roster


def test_signatures_are_those_of_rfc_8032() -> None:
    # RFC 8032, section 7.1, test 2.
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    identity = Identity(name="bank", key=Ed25519PrivateKey.from_private_bytes(secret))
    assert identity.public.public_key.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert identity.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_a_signature_verifies_for_its_message_and_party_only() -> None:
    bank, other = Identity.generate("bank"), Identity.generate("other")
    signature = bank.sign(b"message")
    assert len(signature) == SIGNATURE_BYTES
    bank.public.verify(b"message", signature)
    for party, message, forged in (
        (other.public, b"message", signature),
        (bank.public, b"messagf", signature),
        (bank.public, b"message", bytes(64)),
        (bank.public, b"message", signature[:-1]),
        (bank.public, b"message", b""),
    ):
        with pytest.raises(InvalidMessageError):
            party.verify(message, forged)


def test_a_signature_with_a_shifted_scalar_is_refused() -> None:
    # RFC 8032, section 5.1.7: S must be below the group order, or every signature has a twin.
    order = 2**252 + 27742317777372353535851937790883648493
    bank = Identity.generate("bank")
    signature = bank.sign(b"message")
    twin = signature[:32] + (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    with pytest.raises(InvalidMessageError):
        bank.public.verify(b"message", twin)


def test_a_public_key_that_is_no_point_verifies_nothing() -> None:
    with pytest.raises(InvalidMessageError):
        PublicIdentity(name="bank", public_key=b"\xff" * 32).verify(b"message", bytes(64))


def test_two_identities_are_never_the_same() -> None:
    assert Identity.generate("bank").public != Identity.generate("bank").public


def test_an_identity_survives_save_and_load(tmp_path: Path) -> None:
    bank = Identity.generate("bank")
    bank.save(tmp_path / "bank.pem")
    loaded = Identity.load(tmp_path / "bank.pem", name="bank")
    assert loaded.public == bank.public
    bank.public.verify(b"message", loaded.sign(b"message"))


def test_the_key_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        Identity.generate("bank").save(tmp_path / "bank.pem")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "bank.pem").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    Identity.generate("bank").save(tmp_path / "bank.pem")
    (tmp_path / "bank.pem").chmod(mode)
    with pytest.raises(PermissionError, match="owner only"):
        Identity.load(tmp_path / "bank.pem", name="bank")


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    Identity.generate("bank").save(tmp_path / "bank.pem")
    before = (tmp_path / "bank.pem").read_bytes()
    with pytest.raises(FileExistsError):
        Identity.generate("bank").save(tmp_path / "bank.pem")
    assert (tmp_path / "bank.pem").read_bytes() == before


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    pem = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "bank.pem"
    path.write_bytes(pem)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="Ed25519"):
        Identity.load(path, name="bank")


def test_an_identity_cannot_be_printed_copied_or_pickled() -> None:
    key = Ed25519PrivateKey.generate()
    bank = Identity(name="bank", key=key)
    assert key.private_bytes_raw().hex() not in repr(bank)
    assert repr(bank) == "Identity(name='bank', key=<secret>)"
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="private key"):
            attempt(bank)
    with pytest.raises(TypeError, match="private key"):
        bank.__getstate__()


@pytest.mark.parametrize("name", ["", "a" * 65, "../bank", ".bank", "bank a", "bank\n", "bänk", "a/b", "-bank"])
def test_a_name_that_could_be_a_path_or_a_trick_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        PublicIdentity(name=name, public_key=bytes(32))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_public_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        PublicIdentity(name="bank", public_key=bytes(length))


def test_a_fingerprint_tells_name_and_key_apart() -> None:
    bank = Identity.generate("bank").public
    renamed = PublicIdentity(name="bonk", public_key=bank.public_key)
    rekeyed = PublicIdentity(name="bank", public_key=Identity.generate("bank").public.public_key)
    assert len({bank.fingerprint, renamed.fingerprint, rekeyed.fingerprint}) == 3
    assert [len(group) for group in bank.fingerprint.split()] == [8] * 8


def public(name: str) -> PublicIdentity:
    return Identity.generate(name).public


def test_a_roster_names_its_clients_in_order() -> None:
    assert Roster(server=public("server"), clients=(public("b"), public("a"))).names == ("b", "a")


def test_a_roster_knows_its_own_clients_only() -> None:
    bank = public("bank")
    roster = Roster(server=public("server"), clients=(bank,))
    assert roster.client("bank") == bank
    for stranger in ("server", "other"):
        with pytest.raises(InvalidMessageError):
            roster.client(stranger)


def test_a_roster_digest_changes_with_every_party_and_their_order() -> None:
    server, a, b, c = public("server"), public("a"), public("b"), public("c")
    rosters = [
        Roster(server=server, clients=(a, b)),
        Roster(server=server, clients=(b, a)),
        Roster(server=server, clients=(a, c)),
        Roster(server=server, clients=(a,)),
        Roster(server=a, clients=(server, b)),
        Roster(server=server, clients=(a, public("b"))),
    ]
    assert len({roster.digest for roster in rosters}) == len(rosters)


def test_a_roster_without_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        Roster(server=public("server"), clients=())


def test_a_name_or_a_key_occurs_once_in_a_roster() -> None:
    bank = public("bank")
    for clients in ((bank, bank), (bank, public("bank")), (bank, PublicIdentity(name="twin", public_key=bank.public_key))):
        with pytest.raises(ValueError, match="once in the roster"):
            Roster(server=public("server"), clients=clients)
    with pytest.raises(ValueError, match="once in the roster"):
        Roster(server=bank, clients=(bank,))

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privfed.errors import InvalidMessageError, KeyRefusedError
from privfed.hpke import SEALED_OVERHEAD_BYTES
from privfed.identity import Identity
from privfed.keys.party import Party, create_server, read_public, seal
from tests.hostile import mutated, mutations
from tests.keys.conftest import new_party


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    umask = os.umask(0)
    try:
        Party.create(tmp_path / "bank_a", name="bank_a")
    finally:
        os.umask(umask)
    return tmp_path / "bank_a"


def test_a_party_survives_its_folder(folder: Path) -> None:
    party = Party.load(folder)
    assert party.name == "bank_a"
    assert read_public(folder) == party.public == Party.load(folder).public
    party.public.identity.verify(b"message", party.sign(b"message"))
    assert party.unseal(seal(b"secret", party.public, info=b"test"), info=b"test") == b"secret"


def test_folder_and_files_are_readable_by_their_owner_only_under_any_umask(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        ("identity.pem", "encryption.pem", "public.txt"), 0o600
    )


def test_the_signing_key_is_the_identity_that_sessions_load(folder: Path) -> None:
    assert Identity.load(folder / "identity.pem", name="bank_a").public == Party.load(folder).public.identity


def test_a_folder_is_never_overwritten(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for create in (Party.create, create_server):
        with pytest.raises(FileExistsError):
            create(folder, name="bank_a")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_name_that_is_none_leaves_no_folder(tmp_path: Path) -> None:
    for create in (Party.create, create_server):
        with pytest.raises(ValueError, match="expected a name"):
            create(tmp_path / "folder", name="../bank")
    assert list(tmp_path.iterdir()) == []


def test_a_server_has_a_signing_key_alone_and_is_no_party(tmp_path: Path) -> None:
    public = create_server(tmp_path / "hub", name="hub")
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"identity.pem", "public.txt"}
    assert read_public(tmp_path / "hub") == public
    with pytest.raises(KeyRefusedError, match="'hub' is a server, which neither gives nor gets a key"):
        Party.load(tmp_path / "hub")


@pytest.mark.parametrize("name", ["identity.pem", "encryption.pem"])
def test_a_key_that_others_may_read_is_refused(folder: Path, name: str) -> None:
    (folder / name).chmod(0o640)
    for load in (Party.load, read_public):
        with pytest.raises(PermissionError, match="owner only"):
            load(folder)


def test_a_public_line_that_others_may_write_is_refused(folder: Path) -> None:
    (folder / "public.txt").chmod(0o666)
    with pytest.raises(PermissionError, match="owner only"):
        Party.load(folder)


@pytest.mark.parametrize("name", ["identity.pem", "encryption.pem", "public.txt"])
def test_keys_and_public_line_of_different_parties_are_refused(tmp_path: Path, folder: Path, name: str) -> None:
    Party.create(tmp_path / "other", name="bank_a")
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    for load in (Party.load, read_public):
        with pytest.raises(ValueError, match=r"expected public\.txt to name the keys? that"):
            load(folder)


def test_a_server_s_key_and_public_line_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    create_server(tmp_path / "hub", name="hub")
    create_server(tmp_path / "other", name="hub")
    (tmp_path / "hub" / "identity.pem").write_bytes((tmp_path / "other" / "identity.pem").read_bytes())
    with pytest.raises(ValueError, match=r"expected public\.txt to name the key"):
        read_public(tmp_path / "hub")


def test_a_decryption_key_of_another_kind_or_with_a_password_is_refused(folder: Path) -> None:
    key, pem, pkcs8 = Ed25519PrivateKey.generate(), serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    for data in (
        key.private_bytes(pem, pkcs8, serialization.NoEncryption()),
        key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"word")),
    ):
        (folder / "encryption.pem").write_bytes(data)
        with pytest.raises(ValueError, match="expected an X25519 private key without a password"):
            Party.load(folder)


def test_what_is_sealed_opens_for_its_recipient_and_its_purpose_alone() -> None:
    party = new_party("bank_a")
    sealed = seal(b"secret", party.public, info=b"purpose")
    assert len(sealed) == len(b"secret") + SEALED_OVERHEAD_BYTES
    assert seal(b"secret", party.public, info=b"purpose") != sealed
    for reader, data, info in (
        (new_party("bank_a"), sealed, b"purpose"),
        (party, sealed, b"another"),
        (party, sealed, b""),
        (party, sealed[:-1], b"purpose"),
        (party, sealed[:31], b"purpose"),
        (party, b"", b"purpose"),
        (party, bytes(32) + sealed[32:], b"purpose"),  # an encapsulated key of small order
    ):
        with pytest.raises(InvalidMessageError):
            reader.unseal(data, info=info)


@pytest.mark.parametrize("name", ["identity.pem", "encryption.pem", "public.txt"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=mutations())
def test_a_changed_file_is_refused_or_says_the_same(folder: Path, name: str, mutation: tuple[int, int]) -> None:
    public, path = read_public(folder), folder / name
    original = path.read_bytes()
    path.write_bytes(mutated(original, *mutation))
    try:
        loaded = Party.load(folder).public
    except (ValueError, KeyRefusedError):
        return
    finally:
        path.write_bytes(original)
    assert loaded == public


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_open_for_nobody(data: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        new_party("bank_a").unseal(data, info=b"")

import base64
import bz2
import gzip
import io
import lzma
import os
import pickle
import py_compile
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tenseal
import tenseal.sealapi as seal
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import privfed
from privfed.he import _seal_public
from privfed.he._seal_secret import RingKey
from privfed.he.escrow_secret import EscrowKey
from privfed.he.secret import SharedKey
from privfed.keys import compressed, marks, scan
from privfed.keys.chain import KeyChain
from privfed.keys.marks import AHEAD, SecretKind
from privfed.keys.party import Party, create_server
from privfed.keys.roster import PinnedRoster
from privfed.keys.streams import BLOCK_BYTES, Found, NotSearched
from privfed.keys.wrap import wrap
from tests.hostile import mutated, mutations
from tests.keys.conftest import People


def container(body: bytes, compression: int) -> bytes:
    """As SEAL writes it: 0 plain, 1 zlib, 2 zstd."""
    content = {0: bytes, 1: zlib.compress, 2: zstandard.ZstdCompressor().compress}[compression](body)
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, compression, 0, 16 + len(content)) + content


@pytest.fixture(scope="module")
def context() -> tenseal.Context:
    made = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40])
    made.global_scale = 2.0**40
    return made


@pytest.fixture(scope="module")
def tenseal_secret(context: tenseal.Context) -> bytes:
    return context.serialize(save_public_key=False, save_secret_key=True)


@pytest.fixture(scope="module")
def seal_secret() -> bytes:
    ring = _seal_public.chain_ring(4096, (54,), 256)
    return _seal_public.saved(RingKey(ring, bytes(range(64)))._key)


@pytest.fixture(scope="module")
def own_secrets(tmp_path_factory: pytest.TempPathFactory, roster: PinnedRoster) -> Mapping[SecretKind, bytes]:
    folder = tmp_path_factory.mktemp("own")
    KeyChain.generate(roster).save(folder / "chain")
    SharedKey.generate().save(folder / "shared")
    EscrowKey.generate().save(folder / "escrow")
    Party.create(folder / "bank_a", name="bank_a")
    files = {
        SecretKind.CHAIN: folder / "chain",
        SecretKind.SHARED_KEY: folder / "shared",
        SecretKind.ESCROW_KEY: folder / "escrow",
        SecretKind.SIGNING: folder / "bank_a" / "identity.pem",
        SecretKind.DECRYPTION: folder / "bank_a" / "encryption.pem",
    }
    return {kind: path.read_bytes() for kind, path in files.items()}


def kinds(path: Path) -> list[SecretKind]:
    results = list(scan.scan(path))
    assert all(isinstance(result, Found) for result in results), results
    return [result.kind for result in results if isinstance(result, Found)]


@pytest.fixture
def kinds_in(tmp_path: Path) -> Callable[[bytes], list[SecretKind]]:
    def look(data: bytes) -> list[SecretKind]:
        (tmp_path / "file").write_bytes(data)
        return kinds(tmp_path / "file")

    return look


Look = Callable[[bytes], list[SecretKind]]


# ---- what is found


def test_a_tenseal_context_with_its_secret_key_is_found_and_one_without_is_not(context: tenseal.Context, kinds_in: Look) -> None:
    assert kinds_in(context.serialize(save_secret_key=True)) == [SecretKind.TENSEAL]
    assert kinds_in(context.serialize(save_secret_key=True, save_public_key=False)) == [SecretKind.TENSEAL]
    assert kinds_in(context.serialize(save_secret_key=False)) == []
    context.generate_relin_keys()
    assert kinds_in(context.serialize(save_secret_key=False, save_relin_keys=True)) == []


def test_secret_keys_of_other_schemes_and_of_symmetric_contexts_are_found(kinds_in: Look) -> None:
    bfv = tenseal.context(tenseal.SCHEME_TYPE.BFV, 4096, 1032193)
    symmetric = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40], encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC
    )
    for made in (bfv, symmetric):
        assert kinds_in(made.serialize(save_secret_key=True)) == [SecretKind.TENSEAL]
        assert kinds_in(made.serialize(save_secret_key=False)) == []


@pytest.mark.parametrize("compression", [0, 1, 2])
def test_a_seal_secret_key_is_found_however_it_is_compressed(seal_secret: bytes, kinds_in: Look, compression: int) -> None:
    again = container(_seal_public.members(seal_secret), compression)
    assert kinds_in(again) == [SecretKind.SEAL]
    assert kinds_in(b"before" + again + b"after") == [SecretKind.SEAL]


def test_what_is_public_of_seal_is_not_found(context: tenseal.Context, kinds_in: Look) -> None:
    ring = _seal_public.chain_ring(4096, (54,), 256)
    values = np.linspace(-1, 1, 2048).astype(np.complex128)
    ciphertext = tenseal.ckks_vector(context, [1.0, 2.0]).serialize()
    generator = seal.KeyGenerator(ring.context)
    public_key = seal.PublicKey()
    generator.create_public_key(public_key)
    for data in (ciphertext, _seal_public.saved(public_key), _seal_public.saved(ring.plaintext(values, 2.0**30))):
        assert kinds_in(data) == []
    # A plaintext of BFV names no parameters.
    words = container((64).to_bytes(8, "little") + bytes(512), 0)
    for parms_id, expected in ((bytes(32), []), (bytes(31) + b"\1", [SecretKind.SEAL])):
        assert kinds_in(container(parms_id + struct.pack("<Qd", 64, 1.0) + words, 0)) == expected


def test_our_own_keys_are_found(own_secrets: Mapping[SecretKind, bytes], kinds_in: Look) -> None:
    for kind, data in own_secrets.items():
        assert kinds_in(data) == [kind]
        assert kinds_in(b"x" * 1000 + data + b"x" * 1000) == [kind]
    assert set(kinds_in(b"\0".join(own_secrets.values()))) == set(own_secrets)


def test_headers_are_those_that_the_library_writes() -> None:
    assert SharedKey._header() == marks.SHARED_KEY_HEADER
    assert EscrowKey._header() == marks.ESCROW_KEY_HEADER


def test_what_is_public_of_ours_is_not_found(tmp_path: Path, people: People, roster: PinnedRoster) -> None:
    create_server(tmp_path / "hub", name="hub")
    (tmp_path / "hub" / "identity.pem").unlink()
    message = wrap(KeyChain.generate(roster), sender=people["bank_a"], recipient=people["bank_b"].public, roster=roster)
    (tmp_path / "bank_b.wrap").write_bytes(message)
    (tmp_path / "roster.txt").write_text("\n".join(member.line for member in roster.members))
    assert kinds(tmp_path) == []


def test_the_package_itself_holds_no_key_compiled_or_not(tmp_path: Path) -> None:
    """The headers that are searched for stand in its modules."""
    package = Path(privfed.__file__).parent
    for name in ("he/secret", "keys/chain", "keys/marks"):
        compiled = Path(py_compile.compile(str(package / f"{name}.py"), cfile=str(tmp_path / f"{Path(name).name}.pyc"), doraise=True))
        assert b"privfed " in compiled.read_bytes()
    assert kinds(tmp_path) == kinds(package) == []


# ---- where it is found


def in_zip(compression: int) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as archive:
            archive.writestr("a/first.txt", "text " * 1000)
            archive.writestr("a/second.bin", data)
            archive.writestr("third", b"")
        return file.getvalue()

    return pack


def in_tar(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("deep/in/it")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def in_npz(data: bytes) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, weights=np.zeros(10), key=np.frombuffer(data, np.uint8))
    return file.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "zip, stored": in_zip(zipfile.ZIP_STORED),
    "zip, deflated": in_zip(zipfile.ZIP_DEFLATED),
    "zip, bzip2": in_zip(zipfile.ZIP_BZIP2),
    "npz": in_npz,
    "gzip": gzip.compress,
    "gzip of two members": lambda data: gzip.compress(b"first") + gzip.compress(data),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "tar": in_tar,
    "tar.gz": lambda data: gzip.compress(in_tar(data)),
    "pickle": lambda data: pickle.dumps({"context": data, "epoch": 3}),
    "zip in a pickle in a tar in xz": lambda data: lzma.compress(in_tar(pickle.dumps(in_zip(zipfile.ZIP_DEFLATED)(data)))),
    "gzip at an odd place": lambda data: b"header" + gzip.compress(data) + b"trailer",
    "a zip without its directory": lambda data: in_zip(zipfile.ZIP_DEFLATED)(data).partition(b"PK\x01\x02")[0],
}


@pytest.mark.parametrize("how", PACKED)
def test_a_key_is_found_in(
    kinds_in: Look, seal_secret: bytes, tenseal_secret: bytes, own_secrets: Mapping[SecretKind, bytes], how: str
) -> None:
    pack = PACKED[how]
    assert set(kinds_in(pack(seal_secret))) == {SecretKind.SEAL}
    assert set(kinds_in(pack(tenseal_secret))) == {SecretKind.TENSEAL}
    assert set(kinds_in(pack(own_secrets[SecretKind.CHAIN]))) == {SecretKind.CHAIN}
    assert kinds_in(pack(b"nothing to see" * 1000)) == []


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes, lambda data: base64.encodebytes(data).replace(b"\n", b"\r\n")])
def test_a_seal_key_is_found_in_base64(kinds_in: Look, seal_secret: bytes, shift: int, encode: Callable[[bytes], bytes]) -> None:
    for before in (shift, 56 + shift):  # lines end after 57 bytes: within the first bytes of the key, too
        data = encode(bytes(before) + seal_secret)
        assert kinds_in(b'{"context": "' + data + b'"}') == [SecretKind.SEAL_BASE64]
    assert kinds_in(encode(bytes(shift) + os.urandom(5000))) == []


def test_a_tenseal_context_in_base64_is_found(kinds_in: Look, tenseal_secret: bytes, context: tenseal.Context) -> None:
    """As tutorials write it to a text file."""
    assert kinds_in(base64.b64encode(tenseal_secret)) == [SecretKind.SEAL_BASE64]
    assert kinds_in(base64.b64encode(context.serialize(save_secret_key=False))) == []


@pytest.mark.parametrize("end", [BLOCK_BYTES, BLOCK_BYTES - AHEAD, 2 * BLOCK_BYTES])
def test_a_key_is_found_wherever_it_lies_between_two_blocks(
    kinds_in: Look, seal_secret: bytes, own_secrets: Mapping[SecretKind, bytes], end: int
) -> None:
    chain = own_secrets[SecretKind.CHAIN]
    for place in (end - len(chain), end - 100, end - 5, end - 1, end, end + 1):
        assert kinds_in(bytes(place) + chain) == [SecretKind.CHAIN]
    for place in (end - 10, end - 1, end):
        assert kinds_in(bytes(place) + seal_secret + bytes(AHEAD)) == [SecretKind.SEAL]
        assert kinds_in(bytes(place) + gzip.compress(chain) + bytes(AHEAD)) == [SecretKind.CHAIN]


def test_a_context_is_known_as_one_wherever_it_lies_between_two_blocks(kinds_in: Look, tenseal_secret: bytes) -> None:
    key = tenseal_secret.rindex(b"\x5e\xa1\x10", 0, 200)
    for place in range(-2, 3):  # where the key itself begins, as seen from what is searched with the first block
        assert kinds_in(bytes(BLOCK_BYTES - AHEAD - key + place) + tenseal_secret + bytes(AHEAD)) == [SecretKind.TENSEAL]


def test_what_is_said_names_file_and_place(tmp_path: Path, seal_secret: bytes) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.gz").write_bytes(gzip.compress(in_zip(zipfile.ZIP_DEFLATED)(seal_secret)))
    (tmp_path / "a.key").write_bytes(seal_secret)
    assert [(result.path.relative_to(tmp_path).as_posix(), result.inside) for result in scan.scan(tmp_path)] == [
        ("a.key", ""),
        ("b/x.gz", "gzip!a/second.bin"),
    ]


def test_links_are_not_followed_and_what_is_no_file_is_left_alone(tmp_path: Path, seal_secret: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "key").write_bytes(seal_secret)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "key")
    (tmp_path / "in" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "in" / "pipe")
    assert kinds(tmp_path / "in") == []
    (tmp_path / "top").symlink_to(tmp_path / "key")
    assert kinds(tmp_path / "top") == [SecretKind.SEAL]


def test_nothing_but_files_and_folders_is_scanned(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="to be a file or a folder"):
        list(scan.scan(tmp_path / "pipe"))
    with pytest.raises(FileNotFoundError):
        list(scan.scan(tmp_path / "nothing"))


# ---- what cannot be looked into does not pass for "nothing found"


def reasons(path: Path) -> list[str]:
    return [result.reason for result in scan.scan(path) if isinstance(result, NotSearched)]


def encrypted_zip() -> bytes:
    data = bytearray(in_zip(zipfile.ZIP_DEFLATED)(b"secret"))
    data[6] |= 1
    return bytes(data)


def unknown_zip() -> bytes:
    data = bytearray(in_zip(zipfile.ZIP_DEFLATED)(b"secret"))
    data[8] = 98
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encrypted_zip(), "a member of a zip archive is encrypted"),
        (unknown_zip(), "a member of a zip archive is compressed in a way that is not known here"),
        (gzip.compress(os.urandom(5000))[:2000], "it ends early"),
        (gzip.compress(os.urandom(5000))[:2000] + bytes(6000), "it is damaged, or cannot be expanded here"),
        (bz2.compress(os.urandom(5000))[:2000], "it ends early"),
        (bz2.compress(os.urandom(5000))[:2000] + bytes(5000), "it is damaged, or cannot be expanded here"),
        (lzma.compress(os.urandom(5000))[:2000], "it ends early"),
        (zstandard.ZstdCompressor().compress(b"secret" * 100), "zstd archives are not opened"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(100), "7z archives are not opened"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(100), "rar archives are not opened"),
    ],
    ids=[
        "encrypted zip",
        "unknown zip",
        "gzip cut",
        "gzip damaged",
        "bz2 cut",
        "bz2 damaged",
        "xz cut",
        "zstd",
        "7z",
        "rar",
    ],  # random bytes in names would differ from worker to worker
)
def test_what_cannot_be_looked_into_is_said(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(data)
    assert reasons(tmp_path) == [reason]


def test_an_archive_that_needs_too_much_memory_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(lzma.compress(bytes(1000)))
    assert reasons(tmp_path) == []
    monkeypatch.setattr(compressed, "_XZ_MEMORY_BYTES", 1 << 20)
    assert reasons(tmp_path) == ["it is damaged, or cannot be expanded here"]


def test_what_was_expanded_before_the_damage_is_searched(tmp_path: Path, own_secrets: Mapping[SecretKind, bytes]) -> None:
    whole = gzip.compress(own_secrets[SecretKind.SIGNING] + os.urandom(100_000))
    (tmp_path / "file").write_bytes(whole[:50_000])
    results = list(scan.scan(tmp_path))
    assert [result.kind for result in results if isinstance(result, Found)] == [SecretKind.SIGNING]
    assert [result.reason for result in results if isinstance(result, NotSearched)] == ["it ends early"]


def test_an_archive_behind_a_damaged_one_is_searched(kinds_in: Look, tmp_path: Path, own_secrets: Mapping[SecretKind, bytes]) -> None:
    damaged = gzip.compress(os.urandom(5000))[:2000]  # then the rest is zeros, and the checksum is not that of the first 5000 bytes
    (tmp_path / "file").write_bytes(damaged + bytes(BLOCK_BYTES + AHEAD) + gzip.compress(own_secrets[SecretKind.CHAIN]))
    results = list(scan.scan(tmp_path))
    assert [result.kind for result in results if isinstance(result, Found)] == [SecretKind.CHAIN]
    assert [result.reason for result in results if isinstance(result, NotSearched)] == ["it is damaged, or cannot be expanded here"]


def test_programs_that_know_how_archives_begin_are_no_archives(kinds_in: Look, own_secrets: Mapping[SecretKind, bytes]) -> None:
    no_name = b"PK\x03\x04\x14\0\1\0\x08\0" + bytes(16) + b"\4\0\0\0\0\1\2\3"
    assert kinds_in(no_name) == []  # it would be encrypted, if it were one
    beginnings = [
        b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(16) + b"\4\0\0\0name",
        gzip.compress(b"")[:10],
        b"BZh91AY&SY",
        lzma.compress(b"")[:12],
    ]
    for beginning in beginnings:
        assert kinds_in(b"text " + beginning + b" \xff\xff\xff more text" + bytes(10_000)) == []
        # Nor do they hide what follows.
        for between in (b"", b"\xff\xff\xff", bytes(3000), bytes(2 * BLOCK_BYTES)):
            assert kinds_in(b"text " + beginning + between + own_secrets[SecretKind.SIGNING]) == [SecretKind.SIGNING]


def test_a_stream_out_of_which_nothing_comes_hides_no_key(kinds_in: Look, own_secrets: Mapping[SecretKind, bytes]) -> None:
    """bzip2 gives nothing before a block of 900 kB has ended."""
    broken = bz2.compress(os.urandom(200_000))[:100_000]
    assert kinds_in(b"text " + broken + own_secrets[SecretKind.SIGNING] + bytes(300_000)) == [SecretKind.SIGNING]


def test_any_number_of_archives_one_after_the_other_is_searched(kinds_in: Look, own_secrets: Mapping[SecretKind, bytes]) -> None:
    members = [gzip.compress(f"member {number}".encode()) for number in range(50)]
    assert kinds_in(b"".join((*members, gzip.compress(b"x" * 1000 + own_secrets[SecretKind.CHAIN])))) == [SecretKind.CHAIN]


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seal_secret: bytes
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(seal_secret)
    original = Path.open

    def fail(path: Path, *arguments: object) -> object:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments)

    monkeypatch.setattr(Path, "open", fail)
    results = list(scan.scan(tmp_path))
    assert [(result.path.name, isinstance(result, Found)) for result in results] == [("a", True), ("b", False), ("c", True)]


def test_archives_inside_each_other_are_opened_up_to_a_depth(tmp_path: Path, own_secrets: Mapping[SecretKind, bytes]) -> None:
    data = b"x" * 2000 + own_secrets[SecretKind.CHAIN]  # not only random bytes, which would be stored as they are
    for depth in range(1, 10):
        data = gzip.compress(data)
        (tmp_path / "file").write_bytes(data)
        results = list(scan.scan(tmp_path))
        if depth <= 8:
            assert [type(result) for result in results] == [Found]
        else:
            assert [result.reason for result in results] == ["more than 8 compressed streams are inside each other"]


def test_a_bomb_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_EXPANDED_BYTES", 1 << 21)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 23)))
    assert reasons(tmp_path) == ["it expands to more than is reasonable"]
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(os.urandom(1 << 20)))
    assert reasons(tmp_path) == []


def test_memory_stays_bounded_whatever_the_size(tmp_path: Path) -> None:
    """A plain file of 24 MB, and 32 KB that expand to 32 MB, both within the memory of a few blocks."""
    with (tmp_path / "plain").open("wb") as file:
        file.truncate(24 << 20)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(bytes(32 << 20)))
    # A SEAL container that claims to be huge, and one whose first bytes expand to a gigabyte.
    (tmp_path / "claim").write_bytes(struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 0, 0, 2**63) + bytes(1000))
    (tmp_path / "bomb").write_bytes(container(bytes(1 << 26), 2))
    list(scan.scan(tmp_path / "claim"))  # what is imported and compiled once is not counted
    tracemalloc.start()
    try:
        assert kinds(tmp_path) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * BLOCK_BYTES


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    how=st.sampled_from(sorted(PACKED)),
    mutation=mutations(),
    which=st.sampled_from([SecretKind.CHAIN, SecretKind.SIGNING, SecretKind.SEAL]),
)
def test_damaged_files_of_all_kinds_are_survived(  # noqa: PLR0917
    tmp_path: Path, seal_secret: bytes, own_secrets: Mapping[SecretKind, bytes], how: str, mutation: tuple[int, int], which: SecretKind
) -> None:
    data = own_secrets.get(which, seal_secret)
    (tmp_path / "file").write_bytes(mutated(PACKED[how](data), *mutation))
    for result in scan.scan(tmp_path / "file"):
        assert isinstance(result, Found | NotSearched)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from([b"PK\x03\x04", b"\x1f\x8b\x08\0\0\0\0\0\0\x03", b"BZh91AY&SY", b"\xfd7zXZ\0\0\4", b"\x5e\xa1\x10\4\3\2\0\0"]),
            st.sampled_from(
                [b"XqEQ", b"6hEA", b"oRAE", marks.SHARED_KEY_HEADER, b"privfed key chain v1\n", b"-----BEGIN PRIVATE KEY-----\n"]
            ),
        ),
        max_size=40,
    )
)
def test_arbitrary_bytes_with_marks_in_them_are_survived(tmp_path: Path, pieces: list[bytes]) -> None:
    (tmp_path / "file").write_bytes(b"".join(pieces))
    for result in scan.scan(tmp_path / "file"):
        assert isinstance(result, Found | NotSearched)

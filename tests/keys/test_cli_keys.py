import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from privfed.cli import app
from privfed.he.secret import SharedKey
from privfed.keys.chain import KeyChain
from privfed.keys.roster import PinnedRoster

BANKS = ("bank_a", "bank_b", "bank_c")
NAMED = ("--roster", "roster.txt", "--key")


def keys(*arguments: str) -> Result:
    """The command in this process: the same code without the time that a new process takes to load it."""
    return CliRunner().invoke(app, ["keys", *arguments], env={"COLUMNS": "100"})


def refusal(*arguments: str) -> str:
    result = keys(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1].removeprefix("refused: ")


def values(*arguments: str) -> dict[str, object]:
    result = keys(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everybody's folders beside each other, and the roster."""
    monkeypatch.chdir(tmp_path)
    lines = [keys("init", name).stdout for name in BANKS]
    lines.append(keys("init", "hub", "--server").stdout)
    assert all(len(line.splitlines()) == 1 for line in lines)
    (tmp_path / "roster.txt").write_text("".join(lines))
    (tmp_path / "roster.txt").chmod(0o644)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_secrets_have_mode_0600_under_umask_000(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0)
    try:
        lines = [keys("init", name).stdout for name in ("bank_a", "bank_b")] + [keys("init", "hub", "--server").stdout]
        Path("roster.txt").write_text("".join(lines))
        Path("roster.txt").chmod(0o600)
        assert keys("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps").exit_code == 0
        assert keys("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key").exit_code == 0
        assert keys("rotate", "bank_a", *NAMED, "a.key", "--out", "wraps2").exit_code == 0
    finally:
        os.umask(umask)
    secrets = [tmp_path / "a.key", tmp_path / "b.key", *tmp_path.glob("*/*.pem")]
    assert len(secrets) == 7
    assert {mode(path) for path in secrets} == {0o600}
    assert {mode(tmp_path / name) for name in ("bank_a", "bank_b", "hub")} == {0o700}


def test_init_prints_the_line_that_show_compares_and_never_overwrites(folder: Path) -> None:
    line = (folder / "bank_a" / "public.txt").read_text().split()
    assert values("show", "bank_a") == {"role": "client", "name": "bank_a", "fingerprint": " ".join(line[-8:])}
    assert values("show", "hub")["role"] == "server"
    before = (folder / "bank_a" / "identity.pem").read_bytes()
    told = "your keys are there already, in bank_a; nothing was made or overwritten; privfed keys show bank_a prints the fingerprint"
    assert refusal("init", "bank_a") == told
    (folder / "other").mkdir()
    assert refusal("init", "bank_a", "--out", "other") == "other: File exists; nothing was done"
    assert (folder / "bank_a" / "identity.pem").read_bytes() == before
    assert keys("init", "bank_a", "--out", "another").exit_code == 0
    assert "expected a name" in refusal("init", "../bank")


def test_wrap_makes_the_key_once_and_wraps_it_for_every_other_client(folder: Path) -> None:
    first = values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    assert sorted(path.name for path in (folder / "wraps").iterdir()) == ["bank_b.wrap", "bank_c.wrap"]
    assert [Path(str(name)).name for name in first["messages"]] == ["bank_b.wrap", "bank_c.wrap"]
    again = values("wrap", "bank_a", *NAMED, "a.key", "--out", "again")
    assert again["fingerprint"] == first["fingerprint"]
    for name in ("bank_b", "bank_c"):
        got = values("unwrap", name, f"wraps/{name}.wrap", *NAMED, f"{name}.key")
        assert got == {key: value for key, value in first.items() if key != "messages"}
    assert "new or empty folder" in refusal("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")


def test_a_refused_wrap_leaves_neither_key_nor_message(folder: Path) -> None:
    assert "'hub' is a server, which neither gives nor gets a key" in refusal("wrap", "hub", *NAMED, "h.key", "--out", "wraps")
    keys("init", "bank_c", "--out", "twin")
    assert "the roster pins other keys of 'bank_c'" in refusal("wrap", "twin", *NAMED, "t.key", "--out", "wraps")
    for name in ("h.key", "t.key", "wraps"):
        assert not (folder / name).exists()


def test_unwrap_refuses_what_is_not_for_this_bank_and_now(folder: Path) -> None:
    values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    assert "'bank_a' wrapped this key for 'bank_c', not for 'bank_b'" in refusal("unwrap", "bank_b", "wraps/bank_c.wrap", *NAMED, "b.key")
    assert "expected was epoch 2" in refusal("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key", "--epoch", "2")
    assert "expected --epoch from 1" in refusal("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key", "--epoch", "0")
    told = "expected was epoch 2; nothing was decrypted; if the others told you epoch 1, give --epoch 1; else ask for a new message"
    assert told in refusal("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key", "--epoch", "2")
    data = (folder / "wraps" / "bank_b.wrap").read_bytes()
    (folder / "part").write_bytes(data[:-20])
    assert "a part of one; nothing was opened; ask for it again" in refusal("unwrap", "bank_b", "part", *NAMED, "b.key")
    (folder / "forged").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert refusal("unwrap", "bank_b", "forged", *NAMED, "b.key") == "the message is not valid; it was dropped and nothing happened"
    assert not (folder / "b.key").exists()
    values("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key")
    assert "you hold this key already: 'bank_a' wrapped a key of epoch 1, and epoch 1 is held here" in refusal(
        "unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key"
    )


def test_rotate_makes_a_fresh_key_of_the_next_epoch_and_old_messages_stay_refused(folder: Path) -> None:
    first = values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    values("unwrap", "bank_b", "wraps/bank_b.wrap", *NAMED, "b.key")
    text = (folder / "roster.txt").read_text()
    (folder / "roster2.txt").write_text("\n".join(line for line in text.splitlines() if "bank_c" not in line))
    (folder / "roster2.txt").chmod(0o644)
    new = ("--roster", "roster2.txt", "--key")
    assert "shared among another roster" in refusal("wrap", "bank_a", *new, "a.key", "--out", "wraps2")
    second = values("rotate", "bank_a", *new, "a.key", "--out", "wraps2")
    assert (second["epoch"], second["session"]) == (2, first["session"])
    assert second["fingerprint"] != first["fingerprint"]
    assert [path.name for path in (folder / "wraps2").iterdir()] == ["bank_b.wrap"]
    assert "pins another roster" in refusal("unwrap", "bank_b", "wraps2/bank_b.wrap", *NAMED, "b.key")
    assert "pins another roster" in refusal("unwrap", "bank_b", "wraps/bank_b.wrap", *new, "b.key")
    result = keys("unwrap", "bank_b", "wraps2/bank_b.wrap", *new, "b.key")
    assert "The key of epoch 1 is erased from b.key." in result.stdout
    assert "shared among another roster" in refusal("wrap", "bank_b", *NAMED, "b.key", "--out", "wraps3")


def test_rotate_needs_a_key_to_rotate(folder: Path) -> None:
    assert refusal("rotate", "bank_a", *NAMED, "a.key", "--out", "wraps") == "a.key: No such file or directory; nothing was done"
    assert not (folder / "wraps").exists()


def test_show_says_what_is_erased(folder: Path) -> None:
    values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    chain = KeyChain.load(folder / "a.key", roster=PinnedRoster.load(folder / "roster.txt"))
    for number, erased in ((None, "no round yet"), (0, "round 1"), (4, "rounds 1 to 5")):
        if number is not None:
            chain.erase_through(number)
        shown = keys("show", "a.key").stdout
        assert f"Erased: {erased}." in shown
        assert f"Fingerprint of the key: {chain.fingerprint}" in shown
    assert values("show", "a.key")["next_round"] == 5


def test_show_compares_rosters_by_one_fingerprint(folder: Path) -> None:
    shown = values("show", "roster.txt")
    assert shown["fingerprint"] == PinnedRoster.load(folder / "roster.txt").fingerprint
    assert [(party["role"], party["name"]) for party in shown["parties"]] == [("server", "hub"), *(("client", name) for name in BANKS)]
    assert f"Fingerprint of the roster: {shown['fingerprint']}" in keys("show", "roster.txt").stdout


def test_show_knows_a_plain_shared_key(folder: Path) -> None:
    key = SharedKey.generate()
    key.save(folder / "plain.key")
    assert values("show", "plain.key") == {"fingerprint": key.fingerprint}


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [("a.key", 0o640, "chmod 600"), ("roster.txt", 0o666, "chmod 644"), ("bank_a/identity.pem", 0o604, "chmod 600")],
)
def test_show_refuses_what_others_may_touch(folder: Path, name: str, wrong: int, reason: str) -> None:
    values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    (folder / name).chmod(wrong)
    assert reason in refusal("show", "bank_a" if name.startswith("bank_a") else name)


def test_show_refuses_what_it_does_not_know(folder: Path) -> None:
    (folder / "noise").write_bytes(bytes(range(256)))
    assert "expected a roster in noise" in refusal("show", "noise")
    assert "No such file or directory" in refusal("show", "nothing")
    assert f"expected the folder that privfed keys init made, and {folder} has no public.txt" in refusal("show", str(folder))
    told = "one of the private keys in a folder; nothing was shown; name the folder: privfed keys show bank_a"
    assert told in refusal("show", "bank_a/identity.pem")
    (folder / "bank_a" / "encryption.pem").unlink()
    assert "encryption.pem is missing in bank_a; nothing was done; put it back from where it is kept" in refusal("show", "bank_a")


def test_a_wrong_folder_is_refused_by_what_it_lacks_and_says_what_to_name(folder: Path) -> None:
    (folder / "empty").mkdir()
    for wrong, lack in (("empty", "has no public.txt"), ("roster.txt", "is no folder"), ("absent", "is not there")):
        told = f"and {wrong} {lack}; nothing was done; name the folder with your identity.pem and public.txt"
        assert told in refusal("wrap", wrong, *NAMED, "a.key", "--out", "wraps")
    assert not (folder / "wraps").exists()
    assert not (folder / "a.key").exists()


def test_a_key_for_one_client_alone_is_refused(folder: Path) -> None:
    lines = (folder / "roster.txt").read_text().splitlines()
    (folder / "roster.txt").write_text("\n".join(line for line in lines if "bank_b" not in line and "bank_c" not in line))
    told = "the roster has 1 client, and a key is shared by 2 or more; nothing was made or wrapped"
    assert told in refusal("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    assert not (folder / "wraps").exists()
    assert not (folder / "a.key").exists()
    assert "Roster of a server and 1 client\n" in keys("show", "roster.txt").stdout


def test_scan_says_what_it_found_in_its_exit_code(folder: Path) -> None:
    values("wrap", "bank_a", *NAMED, "a.key", "--out", "wraps")
    assert keys("scan", "wraps").exit_code == 0
    assert keys("scan", "wraps").stdout == "No secret key was found.\n"
    found = keys("scan", ".")
    assert found.exit_code == 3
    assert "a.key: privfed key chain\n" in found.stdout
    assert "bank_a/identity.pem: Ed25519 private key\n" in found.stdout
    assert "wrap" not in found.stdout
    listed = keys("scan", "a.key", "--json")
    assert listed.exit_code == 3
    assert json.loads(listed.stdout) == {"found": [{"path": "a.key", "inside": "", "kind": "privfed key chain"}], "not_searched": []}
    assert "No such file" in refusal("scan", "nothing")


def test_scan_does_not_take_what_it_cannot_open_for_nothing(folder: Path) -> None:
    (folder / "wraps").mkdir()
    (folder / "wraps" / "x\x1b[31m.7z").write_bytes(b"7z\xbc\xaf\x27\x1c")
    result = keys("scan", "wraps")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "\x1b" not in result.stderr
    assert "7z archives are not opened" in result.stderr
    assert "nothing is known about what could not be looked into (1 of it)" in result.stderr
    (folder / "wraps" / "key").write_bytes((folder / "bank_a" / "identity.pem").read_bytes())
    result = keys("scan", "wraps", "--json")
    assert result.exit_code == 3
    assert len(json.loads(result.stdout)["not_searched"]) == len(json.loads(result.stdout)["found"]) == 1


def test_the_command_exits_with_its_code_and_loads_no_torch(folder: Path) -> None:
    program = "import sys, privfed.cli; sys.modules['torch'] = None; sys.argv = ['privfed', 'keys', 'scan', '.']; privfed.cli.app()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 3, result.stderr
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 7


def test_the_server_cannot_load_what_holds_keys() -> None:
    program = (
        "import sys\n"
        "for name in ('privfed.he.secret', 'privfed.he._seal_secret'): sys.modules[name] = None\n"  # as the server's process does
        "import privfed.server, privfed.wire\n"
        "assert not [name for name in sys.modules if name.startswith('privfed.keys')]\n"
        "for name in ('chain', 'party', 'wrap'):\n"
        "    try: __import__('privfed.keys.' + name)\n"
        "    except ImportError: continue\n"
        "    raise SystemExit(name + ' was loaded')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

"""docs/keys.md, done by five banks and a server: every command of it is run, each in the folder of who runs it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from privfed.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
COMMAND = re.compile(r"(?P<who>[a-z_]+(?:, [a-z_]+)*)\$ (?P<what>.+?)(?:  # exit code (?P<code>\d))?")


class Consortium:
    """Each party has a folder of its own, and all of them have the same mail."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        (root / "mail").mkdir()
        self.printed: dict[tuple[str, str], str] = {}

    def folder(self, who: str) -> Path:
        if not (self.root / who).exists():
            (self.root / who).mkdir()
            (self.root / who / "mail").symlink_to(self.root / "mail")
        return self.root / who

    def run(self, who: str, command: str, code: int) -> None:
        self._monkeypatch.chdir(self.folder(who))
        words, _, target = command.replace("$BANK", who).partition(" > ")
        program, *arguments = shlex.split(words)
        if program == "privfed":
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == code, f"{who}: {command}: {result.output}"
            output = result.stdout
        elif program == "cat":
            output = "".join(Path(name).read_text() for name in arguments)
        else:
            assert program == "cp", program
            output = ""
            for name in arguments[:-1]:
                shutil.copy(name, arguments[-1])
        self.printed[who, command] = output
        if target:
            Path(target).write_text(output)
            Path(target).chmod(0o644)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        consortium = Consortium(tmp_path_factory.mktemp("consortium"), monkeypatch)
        for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
            for line in block.splitlines():
                command = COMMAND.fullmatch(line)
                assert command is not None, line
                for who in command["who"].split(", "):
                    consortium.run(who, command["what"], int(command["code"] or 0))
        yield consortium


def test_every_command_of_the_page_does_what_it_says(held: Consortium) -> None:
    assert len(held.printed) > 40
    assert {command.split()[2] for _, command in held.printed if command.startswith("privfed")} == {
        "init", "show", "wrap", "unwrap", "rotate", "scan",
    }  # fmt: skip


def test_all_see_the_same_fingerprints(held: Consortium) -> None:
    for command, banks in (("privfed keys show roster.txt", 5), ("privfed keys show fraud.key", 5), ("privfed keys show roster2.txt", 5)):
        shown = [output for (_, what), output in held.printed.items() if what == command]
        assert len(shown) == banks
        assert len(set(shown)) == 1
        assert "Fingerprint" in shown[0]


def test_after_the_change_those_who_are_in_share_one_key_and_who_left_does_not(held: Consortium) -> None:
    files = {name: (held.root / name / "fraud.key").read_bytes() for name in ("bank_a", "bank_b", "bank_c", "bank_d", "bank_e", "bank_f")}
    assert len({files[name] for name in files if name != "bank_e"}) == 1
    assert files["bank_e"] != files["bank_a"]
    assert not list((held.root / "hub").glob("*.key"))


def test_the_code_of_the_page_runs(held: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shutil.copy(held.root / "bank_a" / "fraud.key", tmp_path / "fraud.key")
    shutil.copy(held.root / "bank_a" / "roster2.txt", tmp_path / "roster.txt")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 # the page's own
    assert names["key"].facts.next_round == 1
    for other in others:
        exec(other, {})  # noqa: S102 # the page's own
    assert "Erased: round 1." in CliRunner().invoke(app, ["keys", "show", "fraud.key"]).stdout

"""`privfed history show`."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from privfed.cli import app
from privfed.data.transactions import generate_transactions
from privfed.engines.coordinator import coordinate
from privfed.phases import Step
from privfed.scenario import Scenario, run_scenario
from tests.engines.deployed import SERVER, Deployed, deploy
from tests.engines.exchanges import LocalExchange, dropping


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    deployed = deploy(tmp_path_factory.mktemp("history") / "parties")
    with LocalExchange(deployed, fault=dropping(("bank_1", Step.SETUP, 0), ("bank_2", Step.OPEN, 1))) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=3)
    return deployed


def show(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["history", "show", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_record_of_a_server_shows_rounds_that_were_held_and_those_that_were_not(deployed: Deployed) -> None:
    lines = show(str(deployed.folder(SERVER))).splitlines()
    first, second, third = (next(line for line in lines if line.startswith((f"│ {number} ", f"│ {number},"))) for number in (1, 2, 3))
    assert "not held" in first
    assert "bank_1 setup" in first
    assert "bank_0, bank_1, bank_2" in second
    assert "bank_2 opening" in second
    assert "opening" not in third


def test_the_record_of_a_bank_shows_what_its_ledger_had_spent(deployed: Deployed) -> None:
    text = show(str(deployed.folder("bank_0")))
    assert "Epsilon spent" in text
    assert "bank_0, bank_1, bank_2" in text


def test_the_folder_of_a_saved_simulation_shows_its_rounds(tmp_path: Path) -> None:
    table = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(0))
    run_scenario(table, Scenario(banks=3, rounds=2, steps=2), ledgers=tmp_path).save(tmp_path)
    assert show(str(tmp_path)).count("bank_1, bank_2, bank_3") == 2
    written = json.loads((tmp_path / "history.json").read_text())
    assert json.loads(show(str(tmp_path), "--json"))["rounds"] == [{"held": summary} for summary in written["rounds"]]
    (tmp_path / "model.npz").unlink()
    refused = CliRunner().invoke(app, ["history", "show", str(tmp_path)])
    assert refused.exit_code == 2
    assert "model.npz is missing" in refused.stderr


def test_json_is_what_stands_in_the_folder(deployed: Deployed) -> None:
    for name in (SERVER, "bank_0"):
        rounds = json.loads(show(str(deployed.folder(name)), "--json"))["rounds"]
        written = [json.loads(line) for line in (deployed.folder(name) / "rounds.jsonl").read_text().splitlines()]
        assert rounds == [entry for entry in written if entry.keys() & {"held", "failed", "opened"}]


def test_a_folder_without_a_round_yet_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text("")
    assert show(str(tmp_path)) == "No round yet.\n"


def test_a_party_before_its_first_round_is_said_to_have_none_yet(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    for name in (SERVER, "bank_0"):
        assert show(str(deployed.folder(name))) == "No round yet.\n"
        assert json.loads(show(str(deployed.folder(name)), "--json")) == {"rounds": []}
    with LocalExchange(deployed):  # every node has opened its folder, and was asked nothing
        pass
    assert show(str(deployed.folder("bank_0"))) == "No round yet.\n"


@pytest.mark.parametrize("name", [SERVER, "bank_0"])
def test_a_party_that_lost_its_record_of_rounds_is_not_said_to_have_had_none(deployed: Deployed, tmp_path: Path, name: str) -> None:
    shutil.copytree(deployed.folder(name), tmp_path / name)
    (tmp_path / name / "rounds.jsonl").unlink()
    result = CliRunner().invoke(app, ["history", "show", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "rounds.jsonl" in result.stderr


def records() -> list[dict[str, object]]:
    """Rounds of five banks in which everything happened that a record can hold."""
    banks = [f"bank_{letter}" for letter in "abcde"]
    there: dict[str, Any] = {
        "selected": banks,
        "refused": [],
        "silent": {},
        "history": "",
        "coefficients": dict.fromkeys(banks, 7),
        "bytes_up": dict.fromkeys(banks, 123_456),
        "bytes_down": dict.fromkeys(banks, 1_234_567),
        "seconds": {"training": 75.0},
    }
    all_in = there | {"round": 0}
    again = there | {"round": 1, "attempt": 1, "silent": {"bank_d": "OPENING"}}
    some = there | {"round": 2, "refused": ["bank_c"], "silent": {"bank_e": "APPROVAL"}, "coefficients": dict.fromkeys(banks[:2], 7)}
    failed = {"round": 3, "silent": {"bank_a": "UPLOAD", "bank_b": "SETUP"}, "reason": "too few clients answered, and nothing was opened"}
    return [*({"held": {"record": record}} for record in (all_in, again, some)), {"failed": failed}]


@pytest.mark.parametrize("rounds", [slice(0, 1), slice(0, 2), slice(0, 4)])
def test_five_banks_are_readable_in_80_columns(tmp_path: Path, rounds: slice) -> None:
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records()[rounds]))
    text = CliRunner().invoke(app, ["history", "show", str(tmp_path)], env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[\w.]+", text))
    assert {"Round", "aggregate", "Effective", "Down", "Time", *(f"bank_{letter}" for letter in "abcde")} <= words
    assert {word for word in words if word.startswith("b")} <= {*(f"bank_{letter}" for letter in "abcde"), "budget"}
    assert ("opening" in words) is (rounds.stop > 1)
    if rounds.stop == 4:
        assert {"approval", "attempt", "budget", "Silent"} <= words
        assert "Round 4 was not held: too few clients answered, and nothing was opened\n" in text


@pytest.mark.parametrize("text", ['{"held": 3}\n', '{"held": {"record": {}}}\n', '{"opened": {"round": "x"}}\n', "no JSON\n", "[]\n"])
def test_what_is_no_record_of_rounds_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "rounds.jsonl").write_text(text)
    result = CliRunner().invoke(app, ["history", "show", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("refused: ")
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "rounds.jsonl").read_text() == text


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["history", "show", str(tmp_path)])
    assert result.exit_code == 2
    assert "rounds.jsonl" in result.stderr

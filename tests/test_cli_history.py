"""`privfed history show`."""

import json
from pathlib import Path

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
    first, second, third = (next(line for line in lines if f"│ {number} " in line[:6]) for number in (1, 2, 3))
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

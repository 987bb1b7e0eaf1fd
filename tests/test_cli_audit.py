import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from privfed.data.paysim import NOBAL
from privfed.data.transactions import generate_transactions
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, PoissonSampledGaussian
from privfed.errors import LedgerError, UnsupportedDataError
from privfed.saved import SavedRun
from privfed.scenario import Scenario, run_scenario


def privfed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "privfed", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )


def run(folder: Path, budget: Budget) -> Path:
    table = generate_transactions(rows=4000, fraud_rate=0.02, rng=np.random.default_rng(2))
    scenario = Scenario(banks=3, rounds=2, steps=5, feature_set=NOBAL, budget=budget)
    folder.mkdir()
    run_scenario(table, scenario, ledgers=folder).save(folder)
    return folder


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "private", Budget(epsilon=3.0, delta=1e-5))


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "open", Budget.unlimited(delta=1e-5))


def test_a_saved_run_is_read_as_it_was(private_run: Path) -> None:
    saved = SavedRun.load(private_run)
    assert saved.history.private
    assert saved.feature_set == NOBAL
    assert len(saved.history.rounds) == 2
    for statement in saved.statements():
        assert statement.epsilon == pytest.approx(saved.history.epsilon[statement.population])
        assert statement.epsilon == pytest.approx(statement.recompute())


def test_the_audit_of_a_private_run_finds_nothing_where_its_control_finds_records(private_run: Path) -> None:
    process = privfed("audit", str(private_run), "--quick", "--json")
    assert process.returncode == 0, process.stderr
    findings = json.loads(process.stdout)["findings"]
    assert {finding["control"] for finding in findings} == {True, False}
    assert all(not finding["certified"] for finding in findings if not finding["control"])
    assert any(finding["certified"] for finding in findings if finding["control"])


def test_the_audit_of_a_run_without_noise_lets_a_client_with_the_server_read_records(open_run: Path) -> None:
    audit = SavedRun.load(open_run).audit(repeats=3)
    finding = audit.shown("another client together with the server")
    outcome = json.loads(json.dumps(finding.to_json()))
    assert outcome["score"] > outcome["baseline"] + 0.2
    assert math.isinf(SavedRun.load(open_run).history.epsilon["bank_1"])


def test_an_audit_charges_nothing(private_run: Path) -> None:
    def heads() -> list[bytes]:
        found = []
        for path in sorted(private_run.glob("*.ledger")):
            with Ledger.reopen(path) as ledger:
                found.append(ledger.head)
        return found

    before = heads()
    SavedRun.load(private_run).audit(repeats=2)
    assert heads() == before
    assert len(before) == 3


def test_the_report_is_written_beside_the_run(private_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    process = privfed("report", str(folder), "--no-audit")
    assert process.returncode == 0, process.stderr
    page = (folder / "report.html").read_text()
    assert "bank_1" in page
    assert "not audited" in page
    assert json.loads((folder / "report.json").read_text())["audit"] is None


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    process = privfed(command, str(tmp_path))
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.splitlines()[-1].startswith("refused: ")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("damage", ["{}", "[]", '{"features": []}', "not json"])
def test_a_damaged_history_is_refused(private_run: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    (folder / "history.json").write_text(damage)
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        SavedRun.load(folder)


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_ledger_of_another_bank_or_run_is_refused(private_run: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    for suffix in (".ledger", ".ledger.head"):
        shutil.copy(private_run / f"bank_2{suffix}", folder / f"bank_1{suffix}")
    process = privfed(command, str(folder), "--quick")
    assert process.returncode == 2
    assert "is not the ledger that this run charged" in process.stderr
    assert not (folder / "report.html").exists()


def test_a_ledger_that_was_charged_since_is_refused(private_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    with Ledger.reopen(folder / "bank_1.ledger") as ledger:
        ledger.reserve(PoissonSampledGaussian(noise_multiplier=50.0, sample_rate=0.01, steps=1), session=b"later", round=0, attempt=0)
    with pytest.raises(LedgerError, match="nothing was done"):
        SavedRun.load(folder).statements()

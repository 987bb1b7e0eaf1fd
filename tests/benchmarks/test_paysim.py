import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import experiment, paysim
from privfed.data.transactions import generate_transactions

ROOT = Path(paysim.__file__).parents[1]
APP = typer.Typer()
APP.command()(paysim.main)

RUN_FIELDS = {
    "feature_set",
    "seed",
    "central_pr_auc",
    "federated_pr_auc",
    "central_learning_rate",
    "federated_learning_rate",
    "weights",
    "exact",
    "grid_error_max",
    "bytes_up_per_parameter",
}
SUMMARY_FIELDS = {"feature_set", "seeds", "central", "federated", "ratio", "ratio_without_giveaways", "exact", "grid_error_max", "accepted"}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiment")


@pytest.fixture(scope="module")
def quick(output: Path) -> "subprocess.CompletedProcess[str]":
    """A quick run where the data file is not to be found."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.paysim", "--quick", "--json", "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PRIVFED_DATA": str(output)},
    )


@pytest.fixture(scope="module")
def lines(quick: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert quick.returncode == 0, quick.stderr
    return [json.loads(line) for line in quick.stdout.splitlines()]


def test_a_quick_run_without_the_file_prints_one_json_object_per_run_and_feature_set(lines: list[dict[str, Any]]) -> None:
    runs, summaries = ([line for line in lines if line["kind"] == kind] for kind in ("run", "summary"))
    assert [(run["feature_set"], run["seed"]) for run in runs] == [("nobal", 0), ("nobal", 1), ("pre", 0), ("pre", 1)]
    assert [summary["feature_set"] for summary in summaries] == ["nobal", "pre"]
    assert all(set(run) >= RUN_FIELDS for run in runs)
    assert all(set(summary) >= SUMMARY_FIELDS for summary in summaries)
    assert all(line["source"] == "generated transactions, 20,000 rows with 400 frauds" for line in lines)
    assert all(0 < score < 1 for run in runs for score in (*run["central_pr_auc"], *run["federated_pr_auc"]))


def test_the_encrypted_runs_equal_the_plaintext_runs(lines: list[dict[str, Any]]) -> None:
    assert all(line["exact"] is True and line["grid_error_max"] == 0 for line in lines)
    assert all(line["bytes_up_per_parameter"] > 7 for line in lines if line["kind"] == "run")


def test_a_quick_run_is_not_judged(lines: list[dict[str, Any]]) -> None:
    assert all(line["accepted"] is None for line in lines if line["kind"] == "summary")


def test_page_and_figure_say_what_made_them_and_what_they_are_not(lines: list[dict[str, Any]], output: Path) -> None:
    page = (output / "paysim.md").read_text(encoding="utf-8")
    assert "`python -m benchmarks.paysim --quick`" in page
    assert "not Kaggle's file" in page
    assert "for 4 of 4 pairs of runs" in page
    assert "not judged" in page
    assert str(output) not in page
    reached = [line["federated_pr_auc"][-1] for line in lines if line["kind"] == "run"]
    assert all(f"| {value:.3f} | yes |" in page for value in reached)
    assert (output / "paysim.svg").read_text(encoding="utf-8").count("<svg") == 1


def test_a_full_run_without_data_ends_at_once_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))
    result = CliRunner().invoke(APP, ["--output", str(tmp_path / "page")])
    assert result.exit_code == 2
    assert "set PRIVFED_DATA" in result.stderr
    assert "nothing was run" in result.stderr
    assert not (tmp_path / "page").exists()


def test_a_file_that_is_not_there_is_refused_even_in_a_quick_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["--quick", "--data", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "none.csv" in result.stderr


def test_a_missing_matplotlib_is_noticed_before_anything_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(paysim, "run", lambda *_, **__: pytest.fail("it ran"))
    result = CliRunner().invoke(APP, ["--quick", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "privfed[dev]" in result.stderr


def outcome(central: float, federated: float, **changes: Any) -> paysim.Outcome:
    fields: dict[str, Any] = {
        "feature_set": "pre",
        "seed": 0,
        "bank_records": (1,),
        "bank_frauds": (1,),
        "weights": (1,),
        "test_records": 1,
        "test_frauds": 1,
        "central_learning_rate": 1.0,
        "federated_learning_rate": 1.0,
        "central_pr_auc": (0.1, central),
        "federated_pr_auc": (0.1, federated),
        "central_without_giveaways": central,
        "federated_without_giveaways": federated,
        "exact": True,
        "grid_error_max": 0,
        "parameters": 1,
        "bytes_up_per_parameter": 1.0,
        "bytes_down_per_parameter": 1.0,
        "seconds_per_round": 1.0,
        "plaintext_seconds_per_round": 1.0,
    }
    return paysim.Outcome(**(fields | changes))


def test_the_verdict_is_on_the_ratio_of_the_means_after_the_last_round() -> None:
    passing = paysim.summarise([outcome(0.9, 0.85), outcome(0.8, 0.70)], judged=True)
    failing = paysim.summarise([outcome(0.9, 0.80), outcome(0.8, 0.70)], judged=True)
    assert passing.ratio.estimate == pytest.approx(1.55 / 1.7)
    assert passing.accepted is True
    assert failing.accepted is False
    assert "BELOW" in paysim.verdict(failing)


@pytest.mark.parametrize("broken", [{"exact": False}, {"grid_error_max": 1}, {"grid_error_max": None}])
def test_one_inexact_run_makes_the_summary_inexact(broken: dict[str, Any]) -> None:
    assert paysim.summarise([outcome(0.9, 0.9), outcome(0.8, 0.8)], judged=True).exact
    assert not paysim.summarise([outcome(0.9, 0.9), outcome(0.8, 0.8, **broken)], judged=True).exact


TABLE = generate_transactions(rows=200, fraud_rate=0.1, rng=np.random.default_rng(0))


def shown(capsys: pytest.CaptureFixture[str], *, judged: bool, origin: str = "Origin.") -> str:
    summary = paysim.summarise([outcome(0.9, 0.2), outcome(0.1, 0.7)], judged=judged)
    source = experiment.Source(name="table", origin=origin)
    report = paysim.Report(
        command="command", source=source, table=TABLE, size=paysim.QUICK, outcomes=(outcome(0.9, 0.2),), summaries=(summary,)
    )
    paysim.print_tables(report)
    return " ".join(capsys.readouterr().out.split())


def test_a_quick_run_shows_means_and_no_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    quick = shown(capsys, judged=False)
    assert "mean of 2 seeds (too few for an interval)" in quick
    assert "0.500 │" in quick
    assert "inf" not in quick
    assert " to " not in quick[: quick.index("Training is")]
    assert "(no interval)" in shown(capsys, judged=True)


def test_a_file_that_is_no_log_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("not a log")
    result = CliRunner().invoke(APP, ["--quick", "--data", str(tmp_path / "notes.csv")])
    assert result.exit_code == 2
    assert "nothing was run" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_page_in_the_repository_says_what_its_records_are() -> None:
    assert f"**{experiment._SIMULATED}** Training is" in (ROOT / "docs" / "experiments" / "paysim.md").read_text(encoding="utf-8")


def test_declared_weights_are_thousands_and_keep_to_the_policy() -> None:
    assert paysim.declared_weights([12_400, 12_600, 300, 5_000, 8_000]) == (12, 13, 1, 5, 8)
    weights = paysim.declared_weights([90_000, 1_000, 1_000, 1_000, 300])
    assert weights == (12, 1, 1, 1, 1)
    paysim.POLICY.check({str(number): weight for number, weight in enumerate(weights)})

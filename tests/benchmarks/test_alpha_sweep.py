import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import alpha_sweep
from benchmarks.alpha_sweep import ALPHAS, Outcome, Size
from benchmarks.drift import METHODS
from benchmarks.experiment import FinishedRuns, Source, load
from privfed.data.transactions import generate_transactions

torch.set_num_threads(1)
APP = typer.Typer()
APP.command()(alpha_sweep.main)
TINY = Size(seeds=(0, 1), rounds=2, local_steps=3)
TABLE = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(0))
SOURCE = Source(name="table", origin="Origin.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[Outcome]:
    return alpha_sweep.run(TABLE, SOURCE, TINY, FinishedRuns(folder=folder))


def test_methods_share_the_banks_of_an_alpha_and_seed_and_every_round_is_measured(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == len(TINY.seeds) * len(ALPHAS) * len(METHODS)
    assert all(len(run.pr_auc) == TINY.rounds for run in outcomes)
    for alpha in ALPHAS:
        for seed in TINY.seeds:
            here = [run for run in outcomes if (run.alpha, run.seed) == (alpha, seed)]
            assert len({(run.bank_records, run.bank_frauds, run.kl_divergence) for run in here}) == 1
            assert len({run.pr_auc for run in here}) == len(METHODS)


def test_divergences_are_those_of_the_banks_labels(outcomes: list[Outcome]) -> None:
    for run in outcomes:
        shares = np.array(run.bank_frauds) / np.array(run.bank_records)
        whole = sum(run.bank_frauds) / sum(run.bank_records)
        assert run.total_variation == pytest.approx(np.abs(shares - whole))
        assert all(value >= -1e-9 for value in run.kl_divergence)


def test_an_interrupted_sweep_goes_on_with_what_is_finished(outcomes: list[Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = sorted(folder.iterdir())
    assert len(kept) == len(outcomes)
    monkeypatch.setattr(alpha_sweep.drift, "train", lambda *_, **__: pytest.fail("it ran again"))
    assert alpha_sweep.run(TABLE, SOURCE, TINY, FinishedRuns(folder=folder)) == outcomes
    with pytest.raises(pytest.fail.Exception, match="it ran again"):
        alpha_sweep.run(TABLE, replace(SOURCE, name="another table"), TINY, FinishedRuns(folder=folder))


def test_a_gain_is_paired_by_seed_and_its_sign_decides_the_verdict(outcomes: list[Outcome]) -> None:
    changed = [
        replace(run, pr_auc=(0.1, 0.2 + 0.6 * run.seed + (0.1 if run.method == "FedProx" else -0.1 if run.method == "SCAFFOLD" else 0.0)))
        for run in outcomes
    ]
    _, better, worse, *_ = alpha_sweep.summarise(changed)
    assert better.gain.estimate == pytest.approx(0.1)
    assert "better than FedAvg by 0.100" in alpha_sweep.verdict(better)
    assert "worse than FedAvg by 0.100" in alpha_sweep.verdict(worse)
    assert "no difference from FedAvg" in alpha_sweep.verdict(replace(better, gain=replace(better.gain, low=-1.0)))


def test_the_page_and_the_figure_are_made_from_the_runs(outcomes: list[Outcome], tmp_path: Path) -> None:
    _, source = load(None, quick=True)
    page = alpha_sweep.dossier(alpha_sweep.summarise(outcomes), outcomes, TINY, source, "python -m benchmarks.alpha_sweep")
    assert page.count("| SCAFFOLD |") == len(ALPHAS)
    assert "not Kaggle's file" in page
    alpha_sweep.draw(outcomes, TINY, tmp_path / "alpha_sweep.svg")
    assert "SCAFFOLD" in (tmp_path / "alpha_sweep.svg").read_text()


def test_the_quick_form_needs_no_data_prints_json_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(alpha_sweep, "QUICK", TINY)
    monkeypatch.setattr("benchmarks.experiment.find_data", lambda: None)
    monkeypatch.setattr("benchmarks.experiment.QUICK_ROWS", 3000)
    monkeypatch.setattr(alpha_sweep, "DOSSIER", tmp_path)
    done = CliRunner().invoke(APP, ["--quick", "--json"])
    assert done.exit_code == 0
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert kinds.count("summary") == len(ALPHAS) * len(METHODS)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_is_refused_with_exit_code_2() -> None:
    assert CliRunner().invoke(APP, ["--quick", "--data", "nowhere.csv"]).exit_code == 2

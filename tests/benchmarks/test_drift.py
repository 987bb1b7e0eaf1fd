import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import drift
from benchmarks.drift import METHODS, Outcome, Size
from benchmarks.experiment import load
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.transactions import generate_transactions

torch.set_num_threads(1)
APP = typer.Typer()
APP.command()(drift.main)
TINY = Size(seeds=(0, 1), steps=6, local_steps=(3,))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return drift.run(generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(0)), TINY)


def test_methods_share_banks_and_seeds_and_differ_after_the_first_round(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == 2 * 2 * len(METHODS)
    for seed in TINY.seeds:
        here = [run for run in outcomes if run.seed == seed and not run.private]
        assert len({run.bank_records for run in here}) == 1
        fedavg, fedprox, scaffold = here
        assert len({run.pr_auc[-1] for run in here}) == 3
        # In its first round SCAFFOLD has nothing to correct; FedProx pulls from the second local step on.
        assert fedavg.pr_auc[0] == scaffold.pr_auc[0] != fedprox.pr_auc[0]


def test_every_private_run_states_what_it_spent(outcomes: list[Outcome]) -> None:
    assert all(np.isfinite(run.epsilon) is np.True_ for run in outcomes if run.private)
    assert all(np.isinf(run.epsilon) for run in outcomes if not run.private)


def test_a_gain_is_paired_by_seed_and_its_sign_decides_the_verdict(outcomes: list[Outcome]) -> None:
    def made(method: str, values: tuple[float, float]) -> list[Outcome]:
        (some,) = outcomes[:1]
        from dataclasses import replace

        return [replace(some, method=method, seed=seed, pr_auc=(value,)) for seed, value in enumerate(values)]

    runs = [*made("FedAvg", (0.2, 0.8)), *made("FedProx", (0.3, 0.9)), *made("SCAFFOLD", (0.8, 0.2))]
    _, better, unclear = drift.summarise(runs)
    assert better.gain.estimate == pytest.approx(0.1)
    assert better.gain.high - better.gain.low < 1e-9
    assert "better than FedAvg by 0.100" in drift.verdict(better)
    assert "no difference from FedAvg" in drift.verdict(unclear)
    _, worse, _ = drift.summarise([*made("FedAvg", (0.3, 0.9)), *made("FedProx", (0.2, 0.8)), *made("SCAFFOLD", (0.8, 0.2))])
    assert "worse than FedAvg by 0.100" in drift.verdict(worse)


def test_the_page_and_the_figure_are_made_from_the_runs(outcomes: list[Outcome], tmp_path: Path) -> None:
    _, source = load(None, quick=True)
    page = drift.dossier(drift.summarise(outcomes), outcomes, TINY, source, "python -m benchmarks.drift")
    assert page.count("| SCAFFOLD |") == 2
    drift.draw(outcomes, TINY, tmp_path / "drift.svg")
    assert (tmp_path / "drift.svg").read_text().count("SCAFFOLD") >= 1


def test_banks_of_an_extreme_deal_keep_every_record_once() -> None:
    table = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(0))
    training, _ = grouped_split(features(table, PRE), test_share=0.3, rng=np.random.default_rng(0))
    banks = drift.banks_of(training, np.random.default_rng(1))
    assert sum(len(bank) for bank in banks) == len(training)
    assert min(len(bank) for bank in banks) >= len(training) // 100


def test_the_quick_form_prints_json_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drift, "QUICK", TINY)
    monkeypatch.setattr("benchmarks.experiment.find_data", lambda: None)
    monkeypatch.setattr("benchmarks.experiment.QUICK_ROWS", 3000)
    monkeypatch.setattr(drift, "DOSSIER", tmp_path)
    done = CliRunner().invoke(APP, ["--quick", "--json"])
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["kind"] for line in lines].count("summary") == 2 * len(METHODS)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_is_refused_with_exit_code_2() -> None:
    assert CliRunner().invoke(APP, ["--quick", "--data", "nowhere.csv"]).exit_code == 2

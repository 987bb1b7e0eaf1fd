import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import configurations
from benchmarks.configurations import CENTRAL, CONFIGURATIONS, LOCAL, Configuration, Outcome, Results, Size
from benchmarks.experiment import FinishedRuns, Source, load
from privfed.data.transactions import generate_transactions
from privfed.training.mechanism import NonPrivate

torch.set_num_threads(1)
APP = typer.Typer()
APP.command()(configurations.main)
TINY = Size(seeds=(0, 1), rounds=2, steps=2, feature_sets=("pre",), plain_rates=(0.3,), private_rates=(2.0,))
TABLE = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(0))
SOURCE = Source(name="table", origin="Origin.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return configurations.run(TABLE, SOURCE, TINY, FinishedRuns(folder=folder))


@pytest.fixture(scope="module")
def outcomes(results: Results) -> list[Outcome]:
    return list(results.runs)


def of(outcomes: list[Outcome], name: str) -> list[Outcome]:
    return [run for run in outcomes if run.configuration == name]


def test_every_configuration_is_run_on_the_same_banks(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == len(TINY.seeds) * len(CONFIGURATIONS)
    for seed in TINY.seeds:
        assert len({run.bank_records for run in outcomes if run.seed == seed}) == 1


def test_encryption_changes_no_metric_and_proximal_training_does(outcomes: list[Outcome]) -> None:
    for plain, encrypted, proximal in zip(of(outcomes, "FedAvg"), of(outcomes, "FedAvg + HE"), of(outcomes, "FedProx"), strict=True):
        assert encrypted.pr_auc == plain.pr_auc != proximal.pr_auc
        assert encrypted.recall_at_1_percent_fpr == plain.recall_at_1_percent_fpr
        assert encrypted.bytes_up > 7 / 4 * plain.bytes_up > 0  # 7 bytes for each number, and 4 in the clear


def test_private_runs_spend_their_budget_and_no_more_and_others_promise_nothing(outcomes: list[Outcome]) -> None:
    for configuration in CONFIGURATIONS:
        for run in of(outcomes, configuration.name):
            if configuration.epsilon is None:
                assert math.isinf(run.epsilon)
            else:
                assert 0.9 * configuration.epsilon < run.epsilon <= configuration.epsilon


def test_central_training_takes_as_many_steps_as_all_banks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, int] = {}
    world = configurations.make_world(TABLE, "pre", seed=0, size=TINY)
    train = configurations.train
    for configuration in (CENTRAL, LOCAL):
        taken = 0

        def counted(*arguments: object, mechanism: NonPrivate, **named: object) -> object:
            nonlocal taken
            taken += mechanism.steps
            return train(*arguments, mechanism=mechanism, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(configurations, "train", counted)
        configurations.train_one(world, configuration, feature_set="pre", learning_rate=0.3, tick=lambda: None)
        steps[configuration.name] = taken
    assert steps["central"] == steps["local-only"] == TINY.rounds * TINY.steps * configurations.BANKS


def test_finished_runs_are_not_made_again(results: Results, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "train_one", lambda *_, **__: pytest.fail("it ran again"))
    assert configurations.run(TABLE, SOURCE, TINY, FinishedRuns(folder=folder)) == results
    with pytest.raises(pytest.fail.Exception, match="it ran again"):
        configurations.run(TABLE, SOURCE, replace(TINY, steps=3), FinishedRuns(folder=folder))


def test_page_and_figure_say_what_the_records_are_and_hold_every_configuration(results: Results, tmp_path: Path) -> None:
    _, source = load(None, quick=True)
    summaries = configurations.summarise(results.runs)
    page = configurations.dossier(summaries, results, TINY, source, "python -m benchmarks.configurations")
    assert "not Kaggle's file" in page
    assert all(page.count(f"| {configuration.name} |") == 2 for configuration in CONFIGURATIONS)
    assert "mean of 2 seeds" in page
    configurations.draw(summaries, TINY, tmp_path / "configurations.svg")
    assert "ThresholdKey" in (tmp_path / "configurations.svg").read_text()


def test_a_gain_is_paired_by_seed(outcomes: list[Outcome]) -> None:
    changed = [replace(run, pr_auc=0.2 + 0.5 * run.seed + (0.1 if run.configuration == "central" else 0.0)) for run in outcomes]
    central = next(summary for summary in configurations.summarise(changed) if summary.configuration == "central")
    assert central.gain.estimate == pytest.approx(0.1)
    assert central.gain.high - central.gain.low < 1e-9


def test_the_quick_form_needs_no_data_prints_json_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configurations, "QUICK", replace(TINY, rounds=1, steps=1))
    monkeypatch.setattr("benchmarks.experiment.find_data", lambda: None)
    monkeypatch.setattr("benchmarks.experiment.QUICK_ROWS", 3000)
    monkeypatch.setattr(configurations, "DOSSIER", tmp_path)
    done = CliRunner().invoke(APP, ["--quick", "--json"])
    assert done.exit_code == 0
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert kinds.count("summary") == len(CONFIGURATIONS)
    assert not list(tmp_path.iterdir())


def test_learning_rates_are_chosen_by_their_mean_on_a_split_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(world: configurations.World, configuration: Configuration, *, learning_rate: float, **_: object) -> dict[str, object]:
        better = 1.0 if configuration.epsilon is None else 6.0
        found = {"pr_auc": 1 / (1 + abs(learning_rate - better)), "recall_at_1_percent_fpr": 0.5, "recall_at_01_percent_fpr": 0.5}
        return found | {"epsilon": configuration.epsilon or math.inf, "bytes_up": 1.0, "bytes_down": 1.0, "seconds_per_round": 1.0}

    monkeypatch.setattr(configurations, "federated", pretended)
    size = replace(TINY, plain_rates=(0.3, 1.0), private_rates=(2.0, 6.0, 12.0))
    results = configurations.run(TABLE, SOURCE, size, FinishedRuns(folder=None))
    assert {run.learning_rate for run in results.runs if math.isinf(run.epsilon)} == {1.0}
    assert {run.learning_rate for run in results.runs if math.isfinite(run.epsilon)} == {6.0}
    assert {run.seed for run in results.tuning} == {configurations.TUNING_SEED}.difference(size.seeds)
    assert len(results.tuning) == 1 * 2 + 2 * 3
    page = configurations.dossier(configurations.summarise(results.runs), results, size, SOURCE, "command")
    assert "Without DP 1, with DP 6" in page

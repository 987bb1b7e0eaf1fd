import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import experiment
from benchmarks.experiment import FinishedRuns, first_model
from privfed.data.transactions import generate_transactions
from privfed.training.model import values_of

TABLE = generate_transactions(rows=200, fraud_rate=0.1, rng=np.random.default_rng(0))


def test_the_interval_of_a_mean_is_that_of_scipys_t_test() -> None:
    values = [0.83, 0.91, 0.88, 0.79, 0.95]
    interval = experiment.t_interval(values)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert interval.estimate == pytest.approx(np.mean(values))


def test_the_ends_of_a_ratios_interval_are_where_the_paired_t_test_turns() -> None:
    central, federated = np.array([0.91, 0.86, 0.93, 0.88, 0.97]), np.array([0.85, 0.83, 0.84, 0.80, 0.95])
    interval = experiment.ratio_interval(list(federated), list(central))
    assert interval.low < interval.estimate < interval.high
    for end in (interval.low, interval.high):
        assert stats.ttest_rel(federated, end * central).pvalue == pytest.approx(0.05, rel=1e-9)


def test_a_ratio_to_what_could_be_zero_has_an_infinite_interval() -> None:
    interval = experiment.ratio_interval([0.5, 0.4], [0.9, 0.1])
    assert (interval.low, interval.high) == (-math.inf, math.inf)


def test_an_interval_without_ends_is_not_shown_as_infinite() -> None:
    assert str(experiment.Interval(estimate=0.5, low=-math.inf, high=math.inf)) == "0.500 (no interval)"
    assert str(experiment.Interval(estimate=0.5, low=0.25, high=0.75)) == "0.500 (0.250 to 0.750)"


def test_the_origin_of_records_is_said_as_far_as_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))
    assert "made up" in experiment.load(None, quick=True)[1].origin
    TABLE.drop(columns="group").to_csv(tmp_path / "given.csv", index=False)
    given = experiment.load(tmp_path / "given.csv", quick=True)[1]
    assert given.origin.startswith("These are the records of a file that was given")
    assert "Kaggle" not in given.origin
    monkeypatch.setattr(experiment, "check_full_file", lambda _: None)
    assert experiment.load(tmp_path / "given.csv", quick=True)[1].origin == "These records have the published figures of Kaggle's file."
    with gzip.open(tmp_path / experiment.FILE, "wt") as file:
        TABLE.drop(columns="group").to_csv(file, index=False)
    assert "come from a simulator. They are not Kaggle's file" in experiment.load(None, quick=False)[1].origin


def test_finished_runs_are_found_by_their_setting_and_by_no_other(tmp_path: Path) -> None:
    finished = FinishedRuns(folder=tmp_path / "runs")
    assert finished.find("FedAvg", 0) is None
    finished.keep({"pr_auc": 0.5}, "FedAvg", 0)
    assert FinishedRuns(folder=tmp_path / "runs").find("FedAvg", 0) == {"pr_auc": 0.5}
    assert finished.find("FedAvg", 1) is None
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_whose_writing_was_interrupted_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = FinishedRuns(folder=tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        finished.keep({"pr_auc": 0.5}, "FedAvg")
    assert finished.find("FedAvg") is None


def test_without_a_folder_nothing_is_kept() -> None:
    finished = FinishedRuns(folder=None)
    finished.keep({}, "FedAvg")
    assert finished.find("FedAvg") is None


def test_runs_of_a_seed_start_from_one_network_whatever_was_drawn_before() -> None:
    first = values_of(first_model(["a", "b"], seed=1)).values
    torch.rand(3)
    assert np.array_equal(first, values_of(first_model(["a", "b"], seed=1)).values)
    assert not np.array_equal(first, values_of(first_model(["a", "b"], seed=2)).values)

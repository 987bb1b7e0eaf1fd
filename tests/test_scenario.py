import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.data.transactions import generate_transactions
from privfed.dp.mechanism import Budget
from privfed.errors import UnsupportedDataError
from privfed.scenario import Outcome, Scenario, run_scenario

torch.set_num_threads(1)

QUICK = Scenario(banks=3, rounds=1, steps=2, seed=3)
FREE = Budget.unlimited(delta=1e-5)


@pytest.fixture(scope="module")
def table():
    return generate_transactions(rows=2000, fraud_rate=0.03, rng=np.random.default_rng(1))


@pytest.fixture
def run(table, tmp_path):
    def run(scenario: Scenario, name: str = "run") -> Outcome:
        folder = tmp_path / name
        folder.mkdir()
        return run_scenario(table, scenario, ledgers=folder)

    return run


def test_a_seed_fixes_who_gets_what_and_never_the_noise(run):
    first, again, other = run(QUICK, "first"), run(QUICK, "again"), run(replace(QUICK, seed=4), "other")
    assert first.banks == again.banks
    assert [part.tolist() for part in first.partition.indices] == [part.tolist() for part in again.partition.indices]
    assert [part.tolist() for part in first.partition.indices] != [part.tolist() for part in other.partition.indices]
    assert np.array_equal(first.history.initial.values, again.history.initial.values)
    assert not np.array_equal(first.history.model.values, again.history.model.values)
    # Without noise the same seed gives the same model: what differed above was noise and sampling.
    free = replace(QUICK, budget=FREE)
    assert np.array_equal(run(free, "free").history.model.values, run(free, "free again").history.model.values)


def test_every_bank_has_a_fraud_and_a_tenth_of_an_even_share(run):
    outcome = run(replace(QUICK, banks=6, alpha=0.05, budget=FREE))
    records = sum(bank.records for bank in outcome.banks)
    assert all(bank.frauds >= 1 and bank.records >= records / 60 - 1 for bank in outcome.banks)
    assert outcome.partition.deviation > 0  # which is said


def test_banks_declare_thousands_and_not_what_they_have(run):
    outcome = run(QUICK)
    assert all(mechanism.max_records % 1000 == 0 for mechanism in outcome.history.training.values())
    assert {QUICK.training(records).max_records for records in (1, 999, 1000)} == {1000}


def test_too_few_frauds_are_refused_before_anything_is_written(tmp_path):
    table = generate_transactions(rows=500, fraud_rate=0.012, rng=np.random.default_rng(1))  # six rows, three frauds
    with pytest.raises(UnsupportedDataError, match="too few frauds for 3 banks: .* nothing was trained"):
        run_scenario(table, QUICK, ledgers=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"banks": 2}, {"rounds": 0}, {"steps": 0}, {"seed": -1}, {"alpha": 0.0}, {"alpha": float("inf")}])
def test_a_scenario_out_of_range_is_refused(change):
    with pytest.raises(ValueError, match="expected"):
        replace(QUICK, **change)


def test_an_outcome_is_json_without_infinities_and_is_never_written_twice(run, tmp_path: Path):
    outcome = run(replace(QUICK, budget=FREE))
    json.dumps(outcome.to_json(), allow_nan=False)
    outcome.save(tmp_path)
    with pytest.raises(FileExistsError):
        outcome.save(tmp_path)

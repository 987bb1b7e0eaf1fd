import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.data.paysim import NOBAL, features
from privfed.data.transactions import generate_transactions
from privfed.deal import deal
from privfed.errors import UnsupportedDataError
from privfed.scenario import Outcome, Scenario, default_delta, run_scenario

torch.set_num_threads(1)

QUICK = Scenario(banks=3, rounds=1, steps=2, seed=3)


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


def owners(outcome: Outcome) -> list[list[int]]:
    return [part.tolist() for part in outcome.deal.partition.indices]


def test_a_seed_fixes_who_gets_what_and_never_the_noise(run):
    first, again, other = run(QUICK, "first"), run(QUICK, "again"), run(replace(QUICK, seed=4), "other")
    assert first.banks == again.banks
    assert owners(first) == owners(again)
    assert owners(first) != owners(other)
    assert np.array_equal(first.history.initial.values, again.history.initial.values)
    assert not np.array_equal(first.history.model.values, again.history.model.values)
    # Without noise the same seed gives the same model: what differed above was noise and sampling.
    free = replace(QUICK, epsilon=math.inf)
    assert np.array_equal(run(free, "free").history.model.values, run(free, "free again").history.model.values)


def test_every_bank_has_a_fraud_and_a_tenth_of_an_even_share(run):
    outcome = run(replace(QUICK, banks=6, alpha=0.05, epsilon=math.inf))
    records = sum(bank.records for bank in outcome.banks)
    assert all(bank.frauds >= 1 and bank.records >= records / 60 - 1 for bank in outcome.banks)
    assert outcome.deal.partition.moved > 0
    assert outcome.deal.repairs in outcome.notes
    assert (outcome.to_json()["moved"], outcome.to_json()["redraws"]) == (outcome.deal.partition.moved, 100)


def test_a_scenario_deals_as_a_deal_does_whatever_the_features(table, run):
    outcome = run(replace(QUICK, epsilon=math.inf))
    assert owners(outcome) == [part.tolist() for part in deal(features(table, NOBAL), banks=3, alpha=0.5, seed=3).partition.indices]


def test_banks_declare_thousands_and_not_what_they_have(run):
    outcome = run(QUICK)
    assert all(mechanism.max_records % 1000 == 0 for mechanism in outcome.history.training.values())
    for bank, mechanism in zip(outcome.banks, outcome.history.training.values(), strict=True):
        assert bank.records <= mechanism.max_records < bank.records + 1000
    assert outcome.declared == max(mechanism.max_records for mechanism in outcome.history.training.values())


@pytest.mark.parametrize(("declared", "delta"), [(1, 1e-2), (1_000, 1e-5), (9_000, 1e-5), (10_000, 1e-6), (99_000, 1e-6), (100_000, 1e-7)])
def test_the_delta_that_is_taken_is_the_largest_power_of_ten_below_a_tenth_of_one_over_the_records(declared, delta):
    assert default_delta(declared) == delta
    assert delta < 1 / (10 * declared) <= 10 * delta * (1 + 1e-9)


def test_every_bank_gets_the_delta_that_the_largest_one_needs_unless_another_is_given(run):
    outcome = run(QUICK)
    assert set(outcome.history.delta.values()) == {default_delta(outcome.declared)} == {outcome.budget.delta}
    given = run(replace(QUICK, delta=1e-4), "given")
    assert set(given.history.delta.values()) == {1e-4}


def test_a_delta_of_no_use_is_refused_by_the_name_of_the_bank_before_a_ledger_is_made(table, tmp_path):
    with pytest.raises(ValueError, match="records that 'bank_1' declares at most, got 0.001, under which .* nothing was charged"):
        run_scenario(table, replace(QUICK, delta=1e-3), ledgers=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bank_with_fewer_records_than_a_batch_is_named(run):
    outcome = run(QUICK)
    small = [bank.name for bank in outcome.banks if bank.records < 512]
    assert 0 < len(small) < 3
    (note,) = (note for note in outcome.notes if "of a batch" in note)
    assert [name for name in ("bank_1", "bank_2", "bank_3") if name in note] == small


def test_too_few_frauds_are_refused_before_anything_is_written(tmp_path):
    table = generate_transactions(rows=500, fraud_rate=0.012, rng=np.random.default_rng(1))  # six rows, three frauds
    with pytest.raises(UnsupportedDataError, match="too few frauds for 3 banks: .* nothing was dealt or trained"):
        run_scenario(table, QUICK, ledgers=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"banks": 2},
        {"rounds": 0},
        {"steps": 0},
        {"seed": -1},
        {"alpha": 0.0},
        {"alpha": math.inf},
        {"epsilon": 0.0},
        {"epsilon": math.nan},
        {"delta": 1.0},
    ],
)
def test_a_scenario_out_of_range_is_refused(change):
    with pytest.raises(ValueError, match="expected"):
        replace(QUICK, **change)


def test_an_outcome_is_json_without_infinities_and_is_never_written_twice(run, tmp_path: Path):
    outcome = run(replace(QUICK, epsilon=math.inf))
    json.dumps(outcome.to_json(), allow_nan=False)
    outcome.save(tmp_path)
    with pytest.raises(FileExistsError):
        outcome.save(tmp_path)

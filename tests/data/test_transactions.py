import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neural_network import MLPClassifier

from privfed.data.paysim import MONEY_COLUMNS, NOBAL, PRE, TYPES, features, grouped_split, load_paysim
from privfed.data.transactions import DAYS, LIMIT, generate_transactions
from privfed.training.evaluate import average_precision


@pytest.fixture(scope="module")
def table():
    return generate_transactions(rows=60_000, fraud_rate=0.01, rng=np.random.default_rng(7))


def test_a_generated_table_is_what_the_loader_returns(table, tmp_path):
    first = table[:2000]
    first.drop(columns="group").to_csv(tmp_path / "log.csv", index=False)
    loaded = load_paysim(tmp_path / "log.csv")
    whole = first["group"].isin(loaded["group"]) & first["group"].isin(first.index)
    pd.testing.assert_frame_equal(loaded[whole], first[whole])


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), fraud_rate=st.floats(0, 0.5), seed=st.integers(0, 2**32 - 1))
def test_rows_and_frauds_are_exactly_as_many_as_asked(rows, fraud_rate, seed):
    table = generate_transactions(rows=rows, fraud_rate=fraud_rate, rng=np.random.default_rng(seed))
    assert len(table) == rows
    assert table["isFraud"].sum() == round(rows * fraud_rate)
    assert table["step"].is_monotonic_increasing
    assert table["step"].between(0, 24 * DAYS - 1).all()
    assert (table[list(MONEY_COLUMNS)] >= 0).all(axis=None)
    assert table["amount"].between(0.01, LIMIT).all()


def test_frauds_come_as_a_transfer_followed_by_a_cash_out_of_the_same_amount_and_step(table):
    frauds = table[table["isFraud"] == 1]
    assert len(frauds) == 600
    transfers, cash_outs = frauds[frauds["type"] == "TRANSFER"], frauds[frauds["type"] == "CASH_OUT"]
    assert len(transfers) == len(cash_outs) == 300
    pairs = transfers.merge(cash_outs, on="group", suffixes=("_in", "_out"))
    assert (pairs["amount_in"] == pairs["amount_out"]).all()
    assert (pairs["step_in"] == pairs["step_out"]).all()
    sizes = frauds.groupby("group").size()
    assert set(sizes) <= {2, 4}  # 4 where two frauds of one hour hit the limit
    assert (sizes == 2).sum() > 280
    assert set(frauds.drop_duplicates("group")["type"]) == {"TRANSFER"}


def test_an_odd_number_of_frauds_ends_in_a_lone_cash_out():
    table = generate_transactions(rows=100, fraud_rate=0.05, rng=np.random.default_rng(1))
    assert table[table["isFraud"] == 1]["type"].value_counts()[["CASH_OUT", "TRANSFER"]].tolist() == [3, 2]


def test_the_generator_decides_everything():
    first, again, other = (generate_transactions(rows=500, rng=np.random.default_rng(seed)) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, again)
    assert not first["amount"].equals(other["amount"])


def test_types_amounts_and_hours_are_shaped_as_documented(table):
    honest = table[table["isFraud"] == 0]
    shares = honest["type"].value_counts(normalize=True)[list(TYPES)].to_numpy()
    expected = np.array([0.22, 0.35, 0.01, 0.34, 0.08])
    assert np.abs((shares - expected) / np.sqrt(expected * (1 - expected) / len(honest))).max() < 4.5
    medians = honest.groupby("type", observed=True)["amount"].median()[list(TYPES)].to_numpy()
    # The median of n log-normals has a relative standard error of 1.25 spread / sqrt(n), at most 1.25 * 1.3 / sqrt(500).
    assert np.abs(np.log(medians / [120e3, 130e3, 3e3, 8e3, 300e3])).max() < 4.5 * 0.073
    hours = honest["step"].to_numpy() % 24
    assert np.isin(hours, [12, 18, 19]).mean() > 5 * np.isin(hours, [2, 3, 4]).mean()


def test_balances_follow_the_amount_to_the_cent(table):
    outward = table[(table["type"] != "CASH_IN") & (table["oldbalanceOrg"] >= table["amount"])]
    assert np.abs(outward["oldbalanceOrg"] - outward["amount"] - outward["newbalanceOrig"]).max() < 1e-6
    inward = table[table["type"] == "CASH_IN"]
    assert np.abs(inward["oldbalanceOrg"] + inward["amount"] - inward["newbalanceOrig"]).max() < 1e-6
    payments = table[table["type"] == "PAYMENT"]
    assert (payments[["oldbalanceDest", "newbalanceDest"]] == 0).all(axis=None)


def test_no_single_rule_solves_it(table):
    drained = table["amount"] == table["oldbalanceOrg"]
    fraud = table["isFraud"] == 1
    assert 0.5 < fraud[drained].mean() < 0.9
    assert 0.6 < drained[fraud].mean() < 0.9


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_frauds_can_be_learnt_from_what_is_known_before_but_not_trivially(table):
    scores = {}
    for feature_set in (PRE, NOBAL):
        train, test = grouped_split(features(table, feature_set), test_share=0.3, rng=np.random.default_rng(0))
        model = MLPClassifier((64, 32), max_iter=8, random_state=0, learning_rate_init=3e-3, batch_size=256).fit(
            train.features, train.labels
        )
        scores[feature_set] = average_precision(test.labels, model.predict_proba(test.features)[:, 1])
    assert 0.5 < scores[PRE] < 0.9
    assert 0.1 < scores[NOBAL] < 0.5  # guessing reaches 0.01


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"rows": -5}, {"rows": 9, "fraud_rate": -0.1}, {"rows": 9, "fraud_rate": 0.6}])
def test_impossible_tables_are_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        generate_transactions(**arguments, rng=np.random.default_rng(1))


def test_a_rate_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="fraud_rate"):
        generate_transactions(rows=9, fraud_rate=float("nan"), rng=np.random.default_rng(1))

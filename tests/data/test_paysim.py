import gzip
import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from privfed.data.divergence import divergence_table
from privfed.data.partition import CONSORTIUM, dirichlet_partition, partition_by
from privfed.data.paysim import (
    FILE_COLUMNS,
    FULL_FILE,
    MONEY_COLUMNS,
    MONEY_RANGE,
    MONEY_SPAN,
    NOBAL,
    PRE,
    RAW,
    TYPES,
    FeatureSet,
    check_full_file,
    features,
    grouped_split,
    load_column,
    load_paysim,
)
from privfed.data.transactions import generate_transactions
from privfed.errors import UnsupportedDataError

HEADER = "step,type,amount,nameOrig,oldbalanceOrg,newbalanceOrig,nameDest,oldbalanceDest,newbalanceDest,isFraud,isFlaggedFraud"
PAYMENT = "1,PAYMENT,9839.64,C1,170136.0,160296.36,M1,0.0,0.0,0,0"
TRANSFER = "5,TRANSFER,1.9E7,C2,1.9E7,0.0,C3,0.0,0.0,1,1"
CASH_OUT = "5,CASH_OUT,19000000.00,C4,19000000.0,0.0,C5,51513.44,0.0,1,0"
DEBIT = "6,DEBIT,0.0,C6,0,0.0,C7,181.0,181.0,0,0"
PACKED = gzip.compress("\n".join([HEADER, *[PAYMENT] * 500]).encode(), mtime=0)
ROWS = (PAYMENT, TRANSFER, CASH_OUT, DEBIT)


def written(folder, *lines, name="log.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))
    return path


def test_the_table_is_typed_and_holds_what_the_file_says(tmp_path):
    table = load_paysim(written(tmp_path, HEADER, *ROWS))
    assert tuple(table.columns) == (*FILE_COLUMNS, "group")
    assert table["step"].dtype == np.int32
    assert table["isFraud"].dtype == np.int8
    assert table["group"].dtype == np.int64
    assert all(table[name].dtype == np.float64 for name in MONEY_COLUMNS)
    assert tuple(table["type"].cat.categories) == TYPES
    assert table["type"].tolist() == ["PAYMENT", "TRANSFER", "CASH_OUT", "DEBIT"]
    assert table["amount"].tolist() == [9839.64, 1.9e7, 1.9e7, 0.0]
    assert table["newbalanceOrig"].tolist() == [160296.36, 0, 0, 0]
    assert table["isFraud"].tolist() == [0, 1, 1, 0]


def test_the_legs_of_a_fraud_share_a_group_however_their_amount_is_written(tmp_path):
    assert load_paysim(written(tmp_path, HEADER, *ROWS))["group"].tolist() == [0, 1, 1, 3]


def test_only_frauds_of_one_step_and_amount_are_grouped(tmp_path):
    honest = TRANSFER.replace(",1,1", ",0,0")
    later = CASH_OUT.replace("5,", "6,", 1)
    dearer = CASH_OUT.replace("19000000.00", "19000000.01")
    payment = TRANSFER.replace("TRANSFER", "PAYMENT")
    assert load_paysim(written(tmp_path, HEADER, TRANSFER, honest, later, dearer, payment))["group"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_byte_order_mark_and_line_ends_make_no_difference(tmp_path, encoding, end):
    text = end.join([HEADER, *ROWS, ""]).encode(encoding)
    plain, packed, misnamed = tmp_path / "a.csv", tmp_path / "a.csv.gz", tmp_path / "b.csv"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    misnamed.write_bytes(gzip.compress(text))
    expected = load_paysim(written(tmp_path, HEADER, *ROWS))
    for path in (plain, packed, misnamed, str(plain)):
        pd.testing.assert_frame_equal(load_paysim(path), expected)


def test_other_columns_and_their_order_are_ignored(tmp_path):
    expected = load_paysim(written(tmp_path, HEADER, *ROWS))
    frame = pd.read_csv(tmp_path / "log.csv", dtype=str)
    frame["src"] = 'some "quoted", text'
    frame[list(reversed(frame.columns))].drop(columns=["nameOrig", "isFlaggedFraud"]).to_csv(tmp_path / "other.csv", index=False)
    pd.testing.assert_frame_equal(load_paysim(tmp_path / "other.csv"), expected)


def test_a_comma_at_the_end_of_every_line_shifts_nothing(tmp_path):
    expected = load_paysim(written(tmp_path, HEADER, *ROWS))
    pd.testing.assert_frame_equal(load_paysim(written(tmp_path, HEADER, *(f"{row}," for row in ROWS), name="commas.csv")), expected)


def test_blank_lines_are_skipped(tmp_path):
    assert len(load_paysim(written(tmp_path, HEADER, PAYMENT, "", DEBIT, ""))) == 2


def test_a_missing_file_is_no_data_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_paysim(tmp_path / "absent.csv")


@pytest.mark.parametrize("name", FILE_COLUMNS)
def test_a_missing_column_is_named(tmp_path, name):
    frame = pd.read_csv(written(tmp_path, HEADER, *ROWS)).drop(columns=name)
    frame.to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(UnsupportedDataError, match=f"{name} is missing; nothing was loaded"):
        load_paysim(tmp_path / "less.csv")


@pytest.mark.parametrize(("right", "wrong"), [("oldbalanceOrg", "oldBalanceOrig"), ("isFraud", "is_fraud"), ("amount", " Amount")])
def test_a_column_of_another_spelling_is_named_with_the_remedy(tmp_path, right, wrong):
    with pytest.raises(UnsupportedDataError, match=f"{right} is missing \\('{wrong}' must be renamed to it\\)"):
        load_paysim(written(tmp_path, HEADER.replace(right, wrong), *ROWS))


def test_a_repeated_column_is_refused(tmp_path):
    with pytest.raises(UnsupportedDataError, match="amount occurs twice"):
        load_paysim(written(tmp_path, HEADER.replace("nameOrig", "amount"), *ROWS))


def test_a_file_without_a_header_is_refused_and_not_quoted(tmp_path):
    with pytest.raises(UnsupportedDataError, match="step is missing") as caught:
        load_paysim(written(tmp_path, *ROWS))
    assert "9839" not in str(caught.value)
    assert "C1" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEADER.encode() + b"\n", "no rows"),
        (HEADER.replace(",", ";").encode() + b"\n1;PAYMENT", "separated by ';'"),
        (HEADER.encode("utf-16"), "not text in UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "not text in UTF-8"),
        (HEADER.encode() + b"\n" + PAYMENT.replace("C1", "J\xe4n").encode("latin-1") + b"\n", "not text in UTF-8"),
        (b"PK\x03\x04rest", "zip archive or an .xlsx workbook; nothing was loaded; unpack it"),
        (PACKED[:-20], "damaged or cut-off gzip"),
        (PACKED[:-8] + bytes(8), "damaged or cut-off gzip"),
        (PACKED[:4], "damaged or cut-off gzip"),
        (b'"' + b"x" * 200_000, "line 1 of log.csv is longer than 65,536 bytes"),
        ((HEADER + "\n" + PAYMENT.replace("M1", '"M1') + "\n").encode(), "nothing was loaded"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, reason):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(UnsupportedDataError, match=reason):
        load_paysim(path)


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("amount", "secret", "expected a number"),
        ("amount", "", "expected a number"),
        ("amount", "nan", "expected a number"),
        ("amount", "-inf", "expected a number"),
        ("amount", "1e999", "expected a number"),
        ("amount", "1_000", "expected a number"),
        ("amount", '"9,839.64"', "expected a number"),
        ("amount", "-1.5", "at least 0"),
        ("oldbalanceDest", "0x10", "expected a number"),
        ("newbalanceDest", "12 EUR", "expected a number"),
        ("step", "1.5", "whole number of hours"),
        ("step", "-1", "whole number of hours"),
        ("step", "1e12", "whole number of hours"),
        ("type", "WIRE", "expected one of CASH_IN, CASH_OUT, DEBIT, PAYMENT, TRANSFER"),
        ("type", "", "expected one of"),
        ("type", "transfer", "expected one of"),
        ("isFraud", "2", "expected 0 or 1"),
        ("isFraud", "maybe", "expected a number"),
    ],
)
def test_a_bad_cell_is_named_by_line_and_column_and_not_quoted(tmp_path, column, cell, reason):
    cells = DEBIT.split(",")
    cells[HEADER.split(",").index(column)] = cell
    path = written(tmp_path, HEADER, PAYMENT, "", ",".join(cells), PAYMENT)
    with pytest.raises(UnsupportedDataError, match=f"line 4, column {column} of log.csv: .*{reason}.*; nothing was loaded") as caught:
        load_paysim(path)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "secret" not in str(caught.value)


def test_a_line_that_is_too_short_is_named(tmp_path):
    with pytest.raises(UnsupportedDataError, match="line 3 of log.csv has 7 cells where the header has 11: missing cells"):
        load_paysim(written(tmp_path, HEADER, PAYMENT, "1,DEBIT,5.0,C1,0.0,0.0,C2"))


def full_file_lookalike():
    rows = FULL_FILE["rows"]
    frauds = round(rows * FULL_FILE["fraud rate"])
    return pd.DataFrame(
        {"step": np.full(rows, 243.39724), "amount": np.full(rows, FULL_FILE["mean amount"]), "isFraud": np.arange(rows) < frauds}
    )


def test_the_full_file_is_recognised_by_its_published_figures():
    table = full_file_lookalike()
    assert table["isFraud"].sum() == 8213
    check_full_file(table)
    with pytest.raises(UnsupportedDataError, match="other rows"):
        check_full_file(table[:-1])
    with pytest.raises(UnsupportedDataError, match="other mean step;"):
        check_full_file(table.assign(step=243.3))
    with pytest.raises(UnsupportedDataError, match="other mean amount;"):
        check_full_file(table.assign(amount=179_862.0))
    with pytest.raises(UnsupportedDataError, match="other fraud rate;"):
        check_full_file(table.assign(isFraud=np.arange(len(table)) < 8214))
    with pytest.raises(UnsupportedDataError, match="other rows, mean step, mean amount, fraud rate;"):
        check_full_file(table[:0])
    with pytest.raises(UnsupportedDataError, match="lacks amount"):
        check_full_file(table[["step", "isFraud"]])


def test_feature_sets_differ_in_what_of_the_money_they_see():
    assert set(NOBAL.columns) < set(PRE.columns) < set(RAW.columns)
    assert set(RAW.columns) - set(PRE.columns) == {"log_newbalanceOrig", "log_newbalanceDest"}
    assert set(PRE.columns) - set(NOBAL.columns) == {"log_oldbalanceOrg", "log_oldbalanceDest"}
    for each in (RAW, PRE, NOBAL):
        assert not [name for name in each.columns if "step" in name or "Flagged" in name or "name" in name]


@pytest.mark.parametrize("money", [(), ("amount", "amount"), ("step",), ("isFraud",)])
def test_a_feature_set_of_other_columns_is_refused(money):
    with pytest.raises(ValueError, match="expected different columns"):
        FeatureSet(name="mine", money=money)


def test_features_are_fixed_functions_of_their_own_row(tmp_path):
    table = load_paysim(written(tmp_path, HEADER, *ROWS))
    samples = features(table, PRE)
    assert samples.columns == PRE.columns
    assert samples.labels.tolist() == [0, 1, 1, 0]
    assert samples.groups.tolist() == table["group"].tolist()
    assert samples.features[:, :5].tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    angle = 2 * np.pi * np.array([1, 5, 5, 6]) / 24
    assert samples.features[:, 5:7] == pytest.approx(np.column_stack([np.sin(angle), np.cos(angle)]), abs=1e-7)
    scaled = 2.0 * (2 * np.log1p(table["amount"]) / np.log1p(1e9) - 1)
    assert samples.features[:, 7] == pytest.approx(scaled.to_numpy(), abs=2e-7)  # one rounding to float32 of at most 2
    for row in range(4):
        assert features(table[row : row + 1], PRE).features.tolist() == samples.features[row : row + 1].tolist()


def test_features_stay_in_the_declared_ranges_whatever_the_money():
    table = generate_transactions(rows=4, fraud_rate=0, rng=np.random.default_rng(1))
    table = table.assign(amount=[0.0, MONEY_RANGE[1], 1e300, 5.0], oldbalanceOrg=[-1e9, -0.01, 0.0, 1e12])
    samples = features(table, PRE)
    assert samples.features[:3, 7].tolist() == [-MONEY_SPAN, MONEY_SPAN, MONEY_SPAN]
    assert samples.features[:, 8].tolist() == [-MONEY_SPAN, -MONEY_SPAN, -MONEY_SPAN, MONEY_SPAN]


def test_features_repeat_every_day_and_do_not_tell_the_day():
    table = generate_transactions(rows=50, fraud_rate=0, rng=np.random.default_rng(1))
    shifted = features(table.assign(step=table["step"] + 24 * 7), RAW)
    assert np.array_equal(shifted.features, features(table, RAW).features)


def test_features_refuse_other_tables_and_other_sets():
    table = generate_transactions(rows=10, fraud_rate=0.2, rng=np.random.default_rng(1))
    with pytest.raises(UnsupportedDataError, match="lacks amount, group"):
        features(table.drop(columns=["amount", "group"]), PRE)
    with pytest.raises(UnsupportedDataError, match="no rows"):
        features(table[:0], PRE)
    with pytest.raises(TypeError, match="FeatureSet"):
        features(table, "pre")


def test_groups_are_frauds_of_one_hour_and_amount_and_no_customers(tmp_path):
    rows = [  # hour, kind, amount, sender, receiver, fraud
        (1, "TRANSFER", 500.0, "C1", "C9", 1), (1, "CASH_OUT", 500.0, "C9", "C8", 1),  # the legs of a fraud
        (1, "PAYMENT", 20.0, "C1", "M1", 0), (2, "PAYMENT", 20.0, "C1", "M1", 0),  # the same customer
        (3, "TRANSFER", 70.0, "C2", "C9", 1), (4, "CASH_OUT", 70.0, "C9", "C8", 1),  # legs in two hours
        (5, "TRANSFER", 70.0, "C2", "C9", 1), (5, "CASH_OUT", 69.99, "C9", "C8", 1),  # legs of two amounts
        (6, "TRANSFER", 10.0, "C3", "C4", 0), (6, "CASH_OUT", 10.0, "C4", "C8", 0),  # no fraud
        (7, "TRANSFER", 1e7, "C5", "C9", 1), (7, "TRANSFER", 1e7, "C6", "C9", 1),  # two frauds at the limit of one transaction
    ]  # fmt: skip
    path = tmp_path / "log.csv"
    header = "step,type,amount,nameOrig,oldbalanceOrg,newbalanceOrig,nameDest,oldbalanceDest,newbalanceDest,isFraud,isFlaggedFraud"
    lines = [f"{step},{kind},{amount},{sender},0,0,{to},0,0,{fraud},0" for step, kind, amount, sender, to, fraud in rows]
    path.write_text("\n".join([header, *lines]) + "\n")
    samples = features(load_paysim(path), NOBAL)
    assert samples.groups.tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    # As the documentation says, senders in their place.
    customers = replace(samples, groups=np.unique(load_column(path, "nameOrig"), return_inverse=True)[1])
    senders = [row[3] for row in rows]
    for one, other in itertools.combinations(range(len(rows)), 2):
        assert (customers.groups[one] == customers.groups[other]) == (senders[one] == senders[other])


def test_grouped_split_keeps_twins_on_one_side_and_shares_out_every_class():
    samples = features(generate_transactions(rows=20_000, fraud_rate=0.01, rng=np.random.default_rng(1)), NOBAL)
    train, test = grouped_split(samples, test_share=0.3, rng=np.random.default_rng(2))
    assert not set(train.groups) & set(test.groups)
    assert len(train) + len(test) == len(samples)
    assert np.bincount(test.labels).tolist() == [5940, 60]
    again, other = (grouped_split(samples, test_share=0.3, rng=np.random.default_rng(seed))[1] for seed in (2, 3))
    assert np.array_equal(again.groups, test.groups)
    assert not np.array_equal(other.groups, test.groups)


@pytest.mark.parametrize("test_share", [0, 1, -0.1, 1.5, np.nan])
def test_grouped_split_refuses_what_is_no_share(test_share):
    samples = features(generate_transactions(rows=10, fraud_rate=0.2, rng=np.random.default_rng(1)), NOBAL)
    with pytest.raises(ValueError, match="expected test_share"):
        grouped_split(samples, test_share=test_share, rng=np.random.default_rng(1))


def test_grouped_split_refuses_an_empty_side():
    samples = features(generate_transactions(rows=10, fraud_rate=0, rng=np.random.default_rng(1)), NOBAL)
    with pytest.raises(UnsupportedDataError, match="one side of the split would be empty; nothing was split"):
        grouped_split(samples, test_share=0.01, rng=np.random.default_rng(1))


@pytest.fixture(scope="module")
def kaggle_rows(shared_data):
    return load_paysim(shared_data / "paysim_kaggle_rows.csv.gz")


def test_genuine_kaggle_rows_load_with_their_twins(kaggle_rows):
    assert len(kaggle_rows) == 77_555
    assert kaggle_rows["isFraud"].sum() == 2110
    sizes = kaggle_rows[kaggle_rows["isFraud"] == 1].groupby("group").size()
    assert sizes.value_counts().to_dict() == {2: 844, 1: 405, 9: 1, 8: 1}
    assert kaggle_rows[kaggle_rows["isFraud"] == 0]["group"].is_unique
    twins = kaggle_rows[kaggle_rows["group"].isin(sizes[sizes == 2].index)]
    pairs = twins.groupby("group")["type"].agg(lambda kinds: "+".join(sorted(kinds)))
    assert (pairs == "CASH_OUT+TRANSFER").sum() == 842


def test_genuine_kaggle_rows_show_why_raw_is_no_headline(kaggle_rows):
    drained = (kaggle_rows["amount"] == kaggle_rows["oldbalanceOrg"]) & (kaggle_rows["amount"] > 0)
    fraud = kaggle_rows["isFraud"] == 1
    assert fraud[drained].mean() > 0.99
    assert drained[fraud].mean() > 0.95


def test_genuine_kaggle_rows_are_not_the_full_file(kaggle_rows):
    with pytest.raises(UnsupportedDataError, match="not the full Kaggle file"):
        check_full_file(kaggle_rows)


def test_genuine_kaggle_rows_partition_with_guards(kaggle_rows):
    samples = features(kaggle_rows, PRE)
    partition = dirichlet_partition(samples, clients=5, alpha=CONSORTIUM, rng=np.random.default_rng(1), min_samples=1000, min_positive=20)
    clients = partition.split(samples)
    assert sum(len(client) for client in clients) == 77_555
    assert sum(int(client.labels.sum()) for client in clients) == 2110
    assert min(len(client) for client in clients) >= 1000
    assert min(client.labels.sum() for client in clients) >= 20
    assert len(set().union(*(set(client.groups) for client in clients))) == sum(len(set(client.groups)) for client in clients)
    table = divergence_table([client.labels for client in clients])
    assert (table["kl_divergence"] > 0).all()


def test_simulated_rows_load_from_hour_zero_with_negative_balances_and_split_by_bank(shared_data, tmp_path):
    frame = pd.read_csv(shared_data / "paysim2_banks_911k.csv.gz", nrows=60_000)
    frame.to_csv(tmp_path / "banks.csv", index=False)
    table = load_paysim(tmp_path / "banks.csv")
    assert table["step"].min() == 0
    assert table[list(MONEY_COLUMNS)].min().min() < 0
    assert np.array_equal(table[list(MONEY_COLUMNS)], frame[list(MONEY_COLUMNS)])
    banks = partition_by(frame["bankOrig"]).split(features(table, PRE))
    assert [len(bank) for bank in banks] == frame["bankOrig"].value_counts().sort_index().tolist()

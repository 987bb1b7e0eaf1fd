"""The PaySim transaction table: schema, a loader for the user's own file, features, and a split that keeps frauds whole.

PaySim (Lopez-Rojas et al., 2016) simulates mobile money. Its log is published on Kaggle as
`PS_20174392719_1491204439457_log.csv`; this package contains no row of it. In PaySim a fraud is two rows, a TRANSFER to an
account of the thief and a CASH_OUT of the same amount in the same hour. A model that trained on one leg recognises the other,
so both carry one number in the column `group`, and every split and partition keeps a group whole.

Nothing else is grouped. Names of accounts are not read, so a group is no customer: several transactions of one account, frauds in several
transfers or hours, and a fraud whose second leg has another amount, are groups of their own. A promise about customers, as `DpSgd` makes
with `records_per_customer`, needs groups that are customers: see `load_column`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privfed.data._paysim_file import FILE_COLUMNS, MONEY_COLUMNS, TYPES, check_column, check_header, check_lines, first_fault, parsed
from privfed.data.partition import stratified_partition
from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError

MONEY_RANGE = (0.0, 1e9)
"""Declared range of all amounts and balances: public, chosen by hand, never fitted. What lies outside is clipped to it."""

MONEY_SPAN = 2.0
"""Sums of money become features from -MONEY_SPAN to MONEY_SPAN. Public.

Chosen by training with DP-SGD on generated and simulated tables (noise multiplier 1, 300 steps): 1 learns too slowly, and from 3 on the
largest inputs use up the clipped gradient.
"""

FULL_FILE = {"rows": 6_362_620, "mean step": 243.3972, "mean amount": 179_861.9, "fraud rate": 0.00129082}
"""Published figures of the full Kaggle file, each to the digits given."""

_FULL_FILE_TOLERANCE = {"rows": 0.0, "mean step": 5e-5, "mean amount": 0.05, "fraud rate": 5e-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSet:
    """What a model may look at: the type (one-hot), the hour of the day (sine, cosine) and some sums of money (log1p). Public.

    Args:
        name: For reports.
        money: Names of the money columns in it, at least one, out of `MONEY_COLUMNS`.

    Raises:
        ValueError: If money is empty, repeats a column or names another.
    """

    name: str
    money: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.money or len(set(self.money)) != len(self.money) or not set(self.money) <= set(MONEY_COLUMNS):
            raise ValueError(f"expected different columns out of {', '.join(MONEY_COLUMNS)}, at least one, got {self.money}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the feature columns, in order."""
        return (*(f"type_{kind}" for kind in TYPES), "hour_sin", "hour_cos", *(f"log_{name}" for name in self.money))


RAW = FeatureSet(name="raw", money=MONEY_COLUMNS)
"""Everything, balances after the transaction included. Leaks: `amount == oldbalanceOrg` alone nearly solves Kaggle's file."""
PRE = FeatureSet(name="pre", money=("amount", "oldbalanceOrg", "oldbalanceDest"))
"""What is known before the transaction is booked: the realistic set."""
NOBAL = FeatureSet(name="nobal", money=("amount",))
"""No balances: type, hour and amount."""


def load_paysim(path: Path | str) -> pd.DataFrame:
    """Reads a PaySim log in Kaggle's columns, as .csv or gzipped, into a typed table. Private data.

    Other columns are ignored, names of accounts among them. Sums of money stay float64 here: float32 loses cents above 1.6e5.

    Args:
        path: A comma-separated UTF-8 file with a header line. Numbers may be written as 1.9E7.

    Returns:
        Columns step (int32, hours), type (categorical over `TYPES`), the `MONEY_COLUMNS` (float64), isFraud (int8, 0 or 1) and
        group (int64, see `fraud_groups`), one row per line.

    Raises:
        FileNotFoundError: If there is no such file.
        UnsupportedDataError: If a column is missing, repeated or spelled otherwise, the file has no rows, is not
            comma-separated text, or a cell holds what the column cannot; line and column are named, the content is not.
    """
    path = Path(path)
    check_header(path)
    check_lines(path)
    numbers = dict.fromkeys((name for name in FILE_COLUMNS if name != "type"), "float64")
    table = parsed(path, {**numbers, "type": "category"})
    if table.empty:
        raise UnsupportedDataError(f"{path.name} has a header but no rows; nothing was loaded")
    columns = {name: table[name].to_numpy() for name in numbers}
    step, fraud = columns["step"], columns["isFraud"]
    if not (
        set(table["type"].cat.categories) <= set(TYPES)
        and all(np.isfinite(values).all() for values in columns.values())
        and (columns["amount"] >= 0).all()
        and ((step >= 0) & (step == np.floor(step)) & (step <= np.iinfo(np.int32).max)).all()
        and ((fraud == 0) | (fraud == 1)).all()
    ):
        raise first_fault(path)
    return typed_table(columns | {"type": table["type"].to_numpy()})


def load_column(path: Path | str, column: str) -> NDArray[np.str_]:
    """One more column of a file that `load_paysim` loads, as text: a bank for `partition_by`, or customers. Private data.

    A customer of one bank is whoever its records have in common, the sender for example. Then the groups are customers, in place of frauds,
    and the legs of a fraud, which have different senders, may be torn apart:

    `dataclasses.replace(samples, groups=np.unique(load_column(path, "nameOrig"), return_inverse=True)[1])`

    That protects somebody as a sender. Whoever also receives is in groups of others, and is promised nothing about these records.

    Args:
        path: The file.
        column: Its name in the header.

    Returns:
        One value per row of the loaded table, of shape (rows,). Spaces around it are dropped.

    Raises:
        UnsupportedDataError: If the column is missing or repeated, or a cell in it is empty.
    """
    path = Path(path)
    check_column(path, column)
    check_lines(path)
    values = parsed(path, {column: "str"})[column].str.strip()
    if (values == "").any():
        raise UnsupportedDataError(
            f"column {column} of {path.name} has empty cells; nothing was loaded; fill them in or leave the rows out"
        )
    return values.to_numpy(dtype=np.str_)


def typed_table(columns: dict[str, NDArray[np.generic]]) -> pd.DataFrame:
    """The table that `load_paysim` returns, from valid values of all `FILE_COLUMNS`; adds the column group."""
    money = {name: np.asarray(columns[name], dtype=np.float64) for name in MONEY_COLUMNS}
    step, fraud = np.asarray(columns["step"]).astype(np.int32), np.asarray(columns["isFraud"]).astype(np.int8)
    kind = pd.Categorical(columns["type"], categories=TYPES)
    legs = (fraud == 1) & np.isin(kind.codes, [TYPES.index("TRANSFER"), TYPES.index("CASH_OUT")])
    group = fraud_groups(step, money["amount"], legs)
    return pd.DataFrame({"step": step, "type": kind, **money, "isFraud": fraud, "group": group}, copy=False)


def fraud_groups(step: NDArray[np.int32], amount: NDArray[np.float64], legs: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of the group of each row: the legs of one fraud share one, every other row has its own.

    Legs of equal step and amount (to the cent) count as one fraud, whoever takes part in them. Where several frauds of one hour
    hit the simulator's limit per transaction they become one group, because nothing in the table tells them apart.

    Args:
        step: Hour of each row, of shape (rows,).
        amount: Amount of each row, of shape (rows,).
        legs: Which rows are TRANSFERs or CASH_OUTs of a fraud, of shape (rows,).

    Returns:
        The position of the first row of each row's group, of shape (rows,): unique within this table only.
    """
    group = np.arange(len(step), dtype=np.int64)
    rows = np.flatnonzero(legs)
    keys = np.column_stack([step[rows].astype(np.float64), np.round(amount[rows], 2)])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    group[rows] = rows[first][inverse]
    return group


def check_full_file(table: pd.DataFrame) -> None:
    """Compares a table with the published figures of the full Kaggle file.

    Raises:
        UnsupportedDataError: If a figure is another; the message names which, not its value.
    """
    _require(table, ("step", "amount", "isFraud"))
    found = {"rows": len(table)}
    if len(table):
        found |= {"mean step": table["step"].mean(), "mean amount": table["amount"].mean(), "fraud rate": table["isFraud"].mean()}
    wrong = [name for name, value in FULL_FILE.items() if not abs(found.get(name, np.nan) - value) <= _FULL_FILE_TOLERANCE[name]]
    if wrong:
        raise UnsupportedDataError(f"this is not the full Kaggle file, which has other {', '.join(wrong)}; the table is unchanged")


def features(table: pd.DataFrame, feature_set: FeatureSet) -> Samples:
    """Feature columns, labels (1 is a fraud) and groups (the legs of a fraud) of a table that `load_paysim` or the generator made.

    Every feature is a fixed public function of its own row: the type 0 or 1, the hour from -1 to 1, and sums of money as log1p,
    mapped linearly from `MONEY_RANGE` to [-`MONEY_SPAN`, `MONEY_SPAN`]. Nothing is fitted, so nothing about other rows leaks
    through the scaling. `step` itself is no feature.

    Args:
        table: Private data.
        feature_set: `RAW`, `PRE` or `NOBAL`.

    Raises:
        TypeError: If feature_set is not a FeatureSet.
        UnsupportedDataError: If the table lacks a column or has no rows.

    Example:
        >>> from privfed.data.transactions import generate_transactions
        >>> table = generate_transactions(rows=100, fraud_rate=0.1, rng=np.random.default_rng(1))
        >>> features(table, NOBAL).columns[-3:]
        ('hour_sin', 'hour_cos', 'log_amount')
    """
    if not isinstance(feature_set, FeatureSet):
        raise TypeError("expected a FeatureSet: RAW, PRE or NOBAL")
    _require(table, (*FILE_COLUMNS, "group"))
    if table.empty:
        raise UnsupportedDataError("the table has no rows; no features were derived")
    angle = table["step"].to_numpy() % 24 * (2 * np.pi / 24)
    kinds = table["type"].to_numpy()
    low, high = np.log1p(MONEY_RANGE)
    columns = [(kinds == kind).astype(np.float64) for kind in TYPES]
    columns += [np.sin(angle), np.cos(angle)]
    for name in feature_set.money:
        logarithm = np.log1p(np.clip(table[name].to_numpy(), *MONEY_RANGE))
        columns.append(MONEY_SPAN * (2 * (logarithm - low) / (high - low) - 1))
    return Samples(
        features=np.column_stack(columns).astype(np.float32),
        labels=table["isFraud"].to_numpy().astype(np.int64),
        groups=table["group"].to_numpy(),
        columns=feature_set.columns,
    )


def grouped_split(samples: Samples, *, test_share: float, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """Splits into (train, test): groups stay whole, and each class is shared out within one group of `test_share`.

    Args:
        samples: What to split.
        test_share: Share of each class that goes to the test side, above 0 and below 1.
        rng: Decides which groups.

    Raises:
        TypeError: If `rng` is no generator, a bare seed for example.
        ValueError: If test_share is not between 0 and 1.
        UnsupportedDataError: If one side would be empty. Nothing was split.

    Example:
        >>> samples = Samples(features=np.zeros((80, 1)), labels=np.arange(80) % 2, groups=None, columns=("x",))
        >>> train, test = grouped_split(samples, test_share=0.25, rng=np.random.default_rng(1))
        >>> len(train), len(test), int(test.labels.sum())
        (60, 20, 10)
    """
    if not 0 < test_share < 1:
        raise ValueError(f"expected test_share between 0 and 1, got {test_share}")
    try:
        partition = stratified_partition(samples, shares=(1 - test_share, test_share), rng=rng)
    except UnsupportedDataError:
        raise UnsupportedDataError("one side of the split would be empty; nothing was split; use more data or another share") from None
    train, test = partition.split(samples)
    return train, test


def _require(table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise UnsupportedDataError(f"the table lacks {', '.join(missing)}; expected a table as load_paysim returns it; nothing was done")


def money_of(feature: float) -> float:
    """The sum of money behind a feature: what `features` did, undone. For people who read reports.

    Example:
        >>> round(money_of(-MONEY_SPAN)), round(money_of(MONEY_SPAN)) == MONEY_RANGE[1]
        (0, True)
    """
    low, high = np.log1p(MONEY_RANGE)
    return float(np.expm1(low + (feature / MONEY_SPAN + 1) / 2 * (high - low)))

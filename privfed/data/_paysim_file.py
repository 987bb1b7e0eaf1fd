"""The columns of a PaySim file, and what is wrong with a file that does not have them.

No message quotes a cell: a cell is private data.
"""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from privfed.data._csv_file import header, is_gzip, rows, survey
from privfed.errors import UnsupportedDataError

TYPES = ("CASH_IN", "CASH_OUT", "DEBIT", "PAYMENT", "TRANSFER")
"""Kinds of transaction, in the order of the one-hot feature columns. Public."""

MONEY_COLUMNS = ("amount", "oldbalanceOrg", "newbalanceOrig", "oldbalanceDest", "newbalanceDest")
"""Columns in the currency of the table, spelled as Kaggle does."""

FILE_COLUMNS = ("step", "type", *MONEY_COLUMNS, "isFraud")
"""What is read of a file. Names of accounts and isFlaggedFraud (a rule of the simulator, not a fact) are not."""

_OTHER_NAMES = {"type": ("action", "transactiontype"), "step": ("hour", "time"), "isFraud": ("fraud", "label", "class")}
_LONGEST_NAME = 40

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DAMAGE = {
    re.compile(r"#+"): "spreadsheets write ##### into columns that are too narrow",
    re.compile(r"[+-]?\d{1,3}([.,' \u00a0\u202f]\d{3})*([.,]\d+)?|[+-]?\d+,\d+"): "it has thousands separators or a decimal comma",
    re.compile(r"true|false", re.IGNORECASE): "spreadsheets make TRUE and FALSE of numbers",
    re.compile(r"\d{1,4}[-./:]\w{2,9}([-./:]\d{2,4})?|[a-z]{3}[-.]\d{2,4}", re.IGNORECASE): "spreadsheets make dates of numbers",
    re.compile(r"[+-]?(nan|inf|infinity|na|n/a|null|none)", re.IGNORECASE): "NaN, infinity and the like are not accepted",
    re.compile(r""): "the cell is empty",
}


def check_header(path: Path) -> list[str]:
    """The names in the header, if they hold every column once.

    Raises:
        UnsupportedDataError: If one is missing, repeated or spelled otherwise, or the file is no comma-separated text.
    """
    names = header(path)
    faults: list[str] = []
    for name in FILE_COLUMNS:
        if names.count(name) > 1:
            faults.append(f"{name} occurs twice")
        elif name not in names:
            similar = _similar(name, [other for other in names if other not in FILE_COLUMNS])
            faults.append(f"{name} is missing" + (f" ({similar!r} must be renamed to it)" if similar else ""))
    if faults:
        others = "; tables with other columns go through privfed.samples_from_frame, in Python" if len(faults) > 4 else ""
        raise UnsupportedDataError(
            f"the header of {path.name} does not fit: {'; '.join(faults)}; nothing was loaded; "
            f"expected comma-separated columns {', '.join(FILE_COLUMNS)}{others}"
        )
    return names


def check_column(path: Path, column: str) -> None:
    """Refuses a file whose header does not hold the column once."""
    names = header(path)
    if names.count(column) > 1:
        raise UnsupportedDataError(f"the header of {path.name} does not fit: {column} occurs twice; nothing was loaded")
    if column not in names:
        similar = _similar(column, names)
        advice = f"; {similar!r} is similar" if similar else ""
        raise UnsupportedDataError(f"the header of {path.name} has no column {column}{advice}; nothing was loaded")


def _similar(name: str, others: list[str]) -> str | None:
    """What resembles the name among the others: only that may be quoted, for without a header the first line is data."""
    known = {_spelling(other): other for other in reversed(others) if len(other) <= _LONGEST_NAME}
    wanted = [_spelling(name), *_OTHER_NAMES.get(name, ())]
    exact = next((known[spelling] for spelling in wanted if spelling in known), None)
    close = difflib.get_close_matches(wanted[0], list(known), n=1, cutoff=0.85)
    return exact or (known[close[0]] if close else None)


def _spelling(name: str) -> str:
    """The name without what versions of PaySim and hands that edit differ in: case, signs between words, Orig for Org."""
    return re.sub(r"[\W_]", "", name).casefold().replace("orig", "org")


def check_lines(path: Path) -> None:
    """Refuses a file in which a line has more or fewer cells than the header, or bytes that are no text."""
    if survey(path):
        return
    lines = rows(path)
    _, names = next(lines)
    for number, row in lines:
        if len(row) < len(names) or any(row[len(names) :]):  # empty cells at the end may be a comma too many
            long = "surplus cells, perhaps from a comma in a number or a name" if len(row) > len(names) else "missing cells"
            raise UnsupportedDataError(
                f"line {number} of {path.name} has {len(row)} cells where the header has {len(names)}: {long}; nothing was loaded; "
                "every line needs the same columns"
            )


def parsed(path: Path, types: dict[Hashable, Any]) -> pd.DataFrame:
    """The named columns of a file whose lines are sound, each of the type that is given for it.

    Raises:
        UnsupportedDataError: If a cell holds something else.
    """
    try:
        return pd.read_csv(
            path,
            usecols=list(types),
            dtype=types,
            index_col=False,
            keep_default_na=False,  # a bank may be called NA, and an empty sum is an error
            encoding="utf-8-sig",
            compression="gzip" if is_gzip(path) else None,
        )
    except ValueError:  # pandas' message quotes the cell, so it ends here
        raise first_fault(path) from None


def first_fault(path: Path) -> UnsupportedDataError:
    """The error for a file of sound lines with a bad cell: the first such cell by line and column, found by reading slowly."""
    lines = rows(path)
    _, names = next(lines)
    places = {name: names.index(name) for name in FILE_COLUMNS}
    for number, row in lines:
        for name, place in places.items():
            if fault := _cell_fault(name, row[place]):
                return UnsupportedDataError(f"line {number}, column {name} of {path.name}: {fault}; nothing was loaded")
    return UnsupportedDataError(f"{path.name} is not well-formed comma-separated text; nothing was loaded")


def _cell_fault(name: str, cell: str) -> str:
    if name == "type":
        return "" if cell in TYPES else f"expected one of {', '.join(TYPES)}"
    text = cell.strip()
    value = float(text) if _NUMBER.fullmatch(text) else np.nan
    if not np.isfinite(value):
        damage = next((what for pattern, what in _DAMAGE.items() if pattern.fullmatch(text)), "")
        return "expected a number such as 1234.50" + (f"; {damage}" if damage else "")
    if name == "amount" and value < 0:
        return "expected an amount of at least 0"
    if name == "step" and not (value.is_integer() and 0 <= value <= np.iinfo(np.int32).max):
        return "expected a whole number of hours from 0"
    if name == "isFraud" and value not in (0, 1):
        return "expected 0 or 1"
    return ""

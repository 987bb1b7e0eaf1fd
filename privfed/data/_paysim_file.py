"""The columns of a PaySim file, and what is wrong with a file that does not have them.

No message quotes a cell: a cell is private data.
"""

import csv
import difflib
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from privfed.errors import UnsupportedDataError

TYPES = ("CASH_IN", "CASH_OUT", "DEBIT", "PAYMENT", "TRANSFER")
"""Kinds of transaction, in the order of the one-hot feature columns. Public."""

MONEY_COLUMNS = ("amount", "oldbalanceOrg", "newbalanceOrig", "oldbalanceDest", "newbalanceDest")
"""Columns in the currency of the table, spelled as Kaggle does."""

FILE_COLUMNS = ("step", "type", *MONEY_COLUMNS, "isFraud")
"""What is read of a file. Names of accounts and isFlaggedFraud (a rule of the simulator, not a fact) are not."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file as text, unpacked if it is gzipped, with every fault of bytes or archive as one error."""
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(b"PK\x03\x04"):
        raise UnsupportedDataError(f"{path.name} is a zip archive; nothing was loaded; unpack it and load the .csv inside")
    opener = gzip.open if start.startswith(b"\x1f\x8b") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        raise UnsupportedDataError(f"{path.name} is not text in UTF-8; nothing was loaded; save it as comma-separated UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UnsupportedDataError(f"{path.name} is a damaged or cut-off gzip file; nothing was loaded; fetch it anew") from None


def check_header(path: Path) -> None:
    header: list[str] = []
    try:
        with opened(path) as file:
            header = next(csv.reader(file), [])
    except csv.Error:
        raise UnsupportedDataError(f"{path.name} is not comma-separated text; nothing was loaded") from None
    if not header:
        raise UnsupportedDataError(f"{path.name} is empty or starts with an empty line; nothing was loaded; expected a header line")
    faults: list[str] = []
    for name in FILE_COLUMNS:
        if header.count(name) > 1:
            faults.append(f"{name} occurs twice")
        elif name not in header:
            # Only what resembles an expected name is quoted: in a file without a header the first line is data.
            others = {other.strip().casefold(): other for other in header if other not in FILE_COLUMNS}
            close = difflib.get_close_matches(name.casefold(), list(others), n=1, cutoff=0.85)
            faults.append(f"{name} is missing" + (f" ({others[close[0]]!r} must be renamed to it)" if close else ""))
    if faults:
        raise UnsupportedDataError(
            f"the header of {path.name} does not fit: {'; '.join(faults)}; nothing was loaded; "
            f"expected comma-separated columns {', '.join(FILE_COLUMNS)}"
        )


def first_fault(path: Path) -> UnsupportedDataError:
    """The error for a file that did not load: its first bad cell by line and column, found by reading it again slowly."""
    try:
        with opened(path) as file:
            reader = csv.reader(file)
            places = {name: position for position, name in enumerate(next(reader)) if name in FILE_COLUMNS}
            for row in reader:
                for name, place in places.items():
                    fault = "the line is too short" if row and place >= len(row) else _cell_fault(name, row[place]) if row else ""
                    if fault:
                        return UnsupportedDataError(f"line {reader.line_num}, column {name} of {path.name}: {fault}; nothing was loaded")
    except csv.Error:
        return UnsupportedDataError(f"{path.name} is not comma-separated text; nothing was loaded")
    return UnsupportedDataError(f"{path.name} is not well-formed comma-separated text, perhaps a quote is open; nothing was loaded")


def _cell_fault(name: str, cell: str) -> str:
    text = cell.strip()
    if name == "type":
        return "" if cell in TYPES else f"expected one of {', '.join(TYPES)}"
    value = float(text) if _NUMBER.fullmatch(text) else np.nan
    if not np.isfinite(value):
        return "expected a number"
    if name == "amount" and value < 0:
        return "expected an amount of at least 0"
    if name == "step" and not (value.is_integer() and 0 <= value <= np.iinfo(np.int32).max):
        return "expected a whole number of hours from 0"
    if name == "isFraud" and value not in (0, 1):
        return "expected 0 or 1"
    return ""

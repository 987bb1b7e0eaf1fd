"""What people have in place of the file that the loader wants: each is refused by name, line and column, and never quoted."""

import gzip
import io
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from privfed.cli import app
from privfed.data import _csv_file
from privfed.data.paysim import FILE_COLUMNS, load_column, load_paysim
from privfed.errors import UnsupportedDataError

HEADER = "step,type,amount,nameOrig,oldbalanceOrg,newbalanceOrig,nameDest,oldbalanceDest,newbalanceDest,isFraud,isFlaggedFraud"
ROW = "1,PAYMENT,98765.43,SECRET,170136.0,160296.36,M1,0.0,0.0,0,0"
NAMES = HEADER.split(",")
PRIVATE = ("98765", "SECRET", "170136", "160296")
# Written by pandas with pyarrow, cut to its first bytes: nothing reads further.
PARQUET = b"PAR1\x15\x04\x15\x10\x15\x14L\x15\x02\x15\x00\x12"


def lines(*rows: str, end: str = "\n") -> bytes:
    return end.join([HEADER, *rows, ""]).encode()


def with_cell(column: str, cell: str) -> bytes:
    cells = ROW.split(",")
    cells[NAMES.index(column)] = cell
    return lines(ROW, ROW, ",".join(cells), ROW)


def renamed(old: str, new: str) -> bytes:
    return lines(ROW).replace(old.encode(), new.encode(), 1)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("log.csv", lines(ROW))
    return buffer.getvalue()


PACKED = gzip.compress(lines(*[ROW] * 500), mtime=0)

HEADERS = {
    "a missing column": (renamed(",amount", ""), "amount is missing;"),
    "a spelling variant oldbalanceOrig": (renamed("oldbalanceOrg", "oldbalanceOrig"), r"oldbalanceOrg is missing \('oldbalanceOrig' must"),
    "a spelling variant newbalanceOrg": (renamed("newbalanceOrig", "newbalanceOrg"), r"newbalanceOrig is missing \('newbalanceOrg' must"),
    "a spelling variant old_balance_org": (renamed("oldbalanceOrg", "old_balance_org"), r"oldbalanceOrg .*\('old_balance_org' must"),
    "the original simulator's action": (renamed("type", "action"), r"type is missing \('action' must"),
    "two that were both respelled": (
        lines(ROW).replace(b"oldbalanceOrg", b"oldBalanceOrig").replace(b"newbalanceOrig", b"newBalanceOrig"),
        r"oldbalanceOrg is missing \('oldBalanceOrig' .*newbalanceOrig is missing \('newBalanceOrig'",
    ),
    "a repeated column": (renamed("nameOrig", "amount"), "amount occurs twice"),
    "no header": (f"{ROW}\n{ROW}\n".encode(), "step is missing"),
    "semicolons": (lines(ROW).replace(b",", b";"), "separated by ';' and not by commas"),
    "tabulators": (lines(ROW).replace(b",", b"\t"), r"separated by '\\t' and not by commas"),
    "a spreadsheet's separator line": (b"sep=,\n" + lines(ROW), "sep= line; nothing was loaded; delete that line"),
    "another table": (b"a,b,c\n1,2,3\n", "step is missing; type is missing.*; tables with other columns go through privfed"),
    "an empty file": (b"", "is empty"),
    "blank lines first": (b"\r\n\r\n" + lines(ROW), "starts with an empty line"),
    "only a header": (lines(), "has a header but no rows"),
    "only a header without an end": (HEADER.encode(), "has a header but no rows"),
}

BYTES = {
    "a zip archive": (zipped(), "zip archive or an .xlsx workbook; nothing was loaded; unpack it"),
    "a Parquet file": (PARQUET, "Parquet"),
    "an .xls workbook": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "xls workbook"),
    "an SQLite database": (b"SQLite format 3\0" + bytes(84), "SQLite"),
    "bzip2": (b"BZh91AY&SY", "bzip2"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00", "zstd"),
    "text in UTF-16": (lines(ROW).decode().encode("utf-16"), "UTF-16"),
    "an image": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "line 1 of log.csv is not text in UTF-8"),
    "random bytes": (np.random.default_rng(1).bytes(5000), "not text in UTF-8|a byte that text has not"),
    "NUL bytes in the header": (renamed("type", "ty\0pe"), "line 1 of log.csv holds a byte"),
    "a NUL byte that ends a number": (with_cell("amount", "5\0000"), "line 4 of log.csv holds a byte"),
    "zeros": (bytes(100_000), "line 1 of log.csv holds a byte"),
    "latin-1 in a column that is not read": (lines(ROW, ROW.replace("M1", "MJ\xe4n")).decode().encode("latin-1"), "line 3 .*UTF-8"),
    "a letter cut off at the end": (lines(ROW)[:-1] + "\xe4".encode()[:1], "line 2 .*UTF-8"),
    "lone carriage returns": (lines(ROW, end="\r"), "line 1 of log.csv holds a byte"),
    "a carriage return in a line": (with_cell("nameDest", "a\rb"), "line 4 .*carriage return"),
    "a huge line": (lines(ROW, ROW.replace("M1", "M" * 70_000)), "line 3 of log.csv is longer than 65,536 bytes"),
    "a huge header": ((HEADER + "," + "x" * 70_000 + "\n").encode(), "line 1 of log.csv is longer than 65,536 bytes"),
    "a huge last line without an end": (lines(ROW, ROW, ROW + "0" * 70_000)[:-1], "line 4 of log.csv is longer"),
    "an open quote": (lines(ROW, ROW.replace("M1", '"M1'), ROW), "the quotes of line 3 of log.csv do not match"),
    "a cut-off gzip": (PACKED[:-20], "damaged or cut-off gzip"),
    "a gzip cut off in its header": (PACKED[:5], "damaged or cut-off gzip"),
    "a gzip with a wrong checksum": (PACKED[:-8] + bytes(8), "damaged or cut-off gzip"),
    "a gzip of a damaged stream": (PACKED[:40] + b"\xff" * 20 + PACKED[60:], "damaged or cut-off gzip"),
    "a gzip of something else": (gzip.compress(bytes(10_000)), "line 1 of log.csv holds a byte"),
    "an empty gzip": (gzip.compress(b""), "is empty"),
}

ROWS = {
    "a surplus cell": (lines(ROW, ROW + ",7"), "line 3 of log.csv has 12 cells where the header has 11: surplus cells"),
    "a comma as thousands separator": (lines(ROW.replace("98765.43", "98,765.43")), "line 2 .*12 cells .*a comma in a number"),
    "a missing cell": (lines(ROW, ROW.removesuffix(",0")), "line 3 of log.csv has 10 cells where the header has 11: missing cells"),
    "a surplus and a missing cell": (lines(ROW + ",7", ROW.removesuffix(",0")), "line 2 .*12 cells"),
    "a line of one digit": (lines(ROW, "7", ROW), "line 3 .*1 cells"),
    "a line cut off at the end": (lines(ROW, "1,PAYM")[:-1], "line 3 .*2 cells"),
    "a summary at the end": (lines(ROW, "Total: 1"), "line 3 .*1 cells"),
    "a line of commas at the end": (lines(ROW, "," * 10), "line 3, column step .*the cell is empty"),
    "a quoted cell with commas and too few others": (lines(ROW.replace("M1", '"M,1"').removesuffix(",0")), "line 2 .*10 cells"),
}

CELLS = {
    "a thousands separator": ("amount", '"1,234.50"', "thousands separators"),
    "a decimal comma": ("amount", '"1.234,50"', "decimal comma"),
    "a short decimal comma": ("amount", '"9839,64"', "decimal comma"),
    "a blank as thousands separator": ("amount", "1 234.50", "thousands separators"),
    "a column that was too narrow": ("oldbalanceDest", "#####", "##### into columns that are too narrow"),
    "a date": ("newbalanceOrig", "01-Feb", "make dates of numbers"),
    "another date": ("newbalanceOrig", "Feb-01", "make dates of numbers"),
    "an ISO date": ("step", "2024-02-01", "make dates of numbers"),
    "a time": ("step", "12:30", "make dates of numbers"),
    "a truth value": ("isFraud", "TRUE", "make TRUE and FALSE"),
    "an empty cell": ("amount", "", "the cell is empty"),
    "NaN": ("amount", "NaN", "NaN, infinity"),
    "NA": ("oldbalanceOrg", "NA", "NaN, infinity"),
    "infinity": ("amount", "inf", "NaN, infinity"),
    "an overflow": ("amount", "1e999", "expected a number such as 1234.50;"),
    "a word": ("amount", "SECRET", "expected a number such as 1234.50;"),
    "a currency": ("amount", "$98765.43", "expected a number such as 1234.50;"),
    "a formula": ("amount", "=A1*98765", "expected a number such as 1234.50;"),
    "a hexadecimal number": ("amount", "0x10", "expected a number such as 1234.50;"),
    "Arabic digits": ("amount", "\u0661\u0662", "expected a number such as 1234.50;"),
    "a negative amount": ("amount", "-98765.43", "at least 0"),
    "a negative step": ("step", "-1", "whole number of hours"),
    "half a step": ("step", "1.5", "whole number of hours"),
    "a huge step": ("step", "1e12", "whole number of hours"),
    "a label of 2": ("isFraud", "2", "expected 0 or 1"),
    "a label of -1": ("isFraud", "-1", "expected 0 or 1"),
    "half a label": ("isFraud", "0.5", "expected 0 or 1"),
    "an unknown type": ("type", "WIRE", "expected one of CASH_IN, CASH_OUT, DEBIT, PAYMENT, TRANSFER"),
    "a type in small letters": ("type", "transfer", "expected one of"),
    "a type with a blank": ("type", "PAYMENT ", "expected one of"),
    "an empty type": ("type", "", "expected one of"),
}

CORPUS = HEADERS | BYTES | ROWS
CORPUS |= {
    what: (with_cell(column, cell), f"line 4, column {column} of log.csv: .*{re.escape(reason)}")
    for what, (column, cell, reason) in CELLS.items()
}


@pytest.mark.parametrize("what", CORPUS)
def test_it_is_refused_by_name_and_not_quoted(what, tmp_path):
    content, reason = CORPUS[what]
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(UnsupportedDataError, match=reason) as caught:
        load_paysim(path)
    message = str(caught.value)
    assert "nothing was loaded" in message
    assert not [secret for secret in PRIVATE if secret in message]
    assert len(message) < 500
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("what", CORPUS)
def test_the_command_line_refuses_it_in_one_line(what, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(CORPUS[what][0])
    result = CliRunner().invoke(app, ["partition", str(path), "--json"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"refused: [^\n]+\n", result.stderr)
    assert not [secret for secret in PRIVATE if secret in result.stderr]


def good(tmp_path, content: bytes) -> pd.DataFrame:
    path = tmp_path / "good.csv"
    path.write_bytes(content)
    return load_paysim(path)


@pytest.mark.parametrize(
    "content",
    [
        lines(ROW, ROW, end="\r\n"),
        b"\xef\xbb\xbf" + lines(ROW, ROW),
        lines(ROW, ROW).removesuffix(b"\n"),
        lines(ROW, ROW) + b"\n\r\n\n",
        lines(ROW, ROW.replace("98765.43", "9.876543E4")),
        lines(ROW, ROW.replace("98765.43", "9.876543E+04")),
        lines(ROW, ROW.replace("98765.43", '"98765.43"').replace("PAYMENT", '"PAYMENT"')),
        lines(ROW, ROW.replace("M1", '"a ""quoted"", name"')),
        lines(ROW, ROW.replace("98765.43", " 98765.43 ")),
        lines(ROW + ",", ROW + ",,"),
        lines(ROW, ROW.replace("M1", "J\xe4n \u0661")),
        lines(ROW, ROW.replace("M1", "M" * 60_000)),
        gzip.compress(lines(ROW)) + gzip.compress((ROW + "\n").encode()),
    ],
    ids=[
        "CRLF",
        "BOM",
        "no last end",
        "blank lines",
        "1.9E7",
        "1.9E+07",
        "quotes",
        "quotes in quotes",
        "blanks",
        "commas",
        "UTF-8",
        "long",
        "two members",
    ],
)
def test_what_only_looks_odd_is_loaded(content, tmp_path):
    pd.testing.assert_frame_equal(good(tmp_path, content), good(tmp_path, lines(ROW, ROW)))


def test_the_line_is_that_of_the_file_whatever_blocks_it_is_read_in(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv_file, "_BLOCK_BYTES", 50)
    for number in (2, 3, 7, 40):
        rows = [ROW] * 60
        rows[number - 2] = ROW.replace("M1", "M\0")
        path = tmp_path / "log.csv"
        path.write_bytes(lines(*rows, end="\r\n"))
        with pytest.raises(UnsupportedDataError, match=f"^line {number} of"):
            load_paysim(path)


PIECES = st.lists(st.sampled_from([b",", b"\n", b"\r\n", b'"', b"ab", "\xe4".encode(), b"\0", b"\r", b"\xff"]), max_size=30)


@given(pieces=PIECES, block=st.integers(1, 8))
def test_a_survey_does_not_depend_on_its_blocks_and_knows_a_regular_file(pieces, block, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "survey.csv"
    content = b"".join(pieces)
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        answers = []
        for size in (block, 1 << 20):
            patch.setattr(_csv_file, "_BLOCK_BYTES", size)
            try:
                answers.append(_csv_file.survey(path))
            except UnsupportedDataError as error:
                answers.append(str(error))
    bare = content.replace(b"\r\n", b"\n")
    try:
        text = bare.decode()
    except UnicodeDecodeError:
        text = None
    if text is None or b"\0" in bare or b"\r" in bare:
        # Which of two faults is named depends on the block that it is in; that the file is refused does not.
        assert all(isinstance(answer, str) for answer in answers) or content.endswith(b"\r")
        return
    counts = {line.count(",") for line in text.split("\n") if line}
    assert answers == [len(counts) <= 1 and '"' not in text] * 2


def test_a_line_without_an_end_is_refused_in_bounded_memory(tmp_path):
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(lines(ROW) + b"1" * 64_000_000, compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedDataError, match="line 3 of log.csv.gz is longer"):
            load_paysim(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Blocks of a megabyte, and a few arrays of positions in one block, of 8 bytes each: far from 64 MB.
    assert peak < 20e6


def test_a_directory_and_a_missing_file_stay_what_the_system_calls_them(tmp_path):
    with pytest.raises(IsADirectoryError):
        load_paysim(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_paysim(tmp_path / "absent.csv")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "absent.csv", "No such file or directory")):
        result = CliRunner().invoke(app, ["partition", str(path)])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == f"refused: {path}: {reason}; nothing was done"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(UnsupportedDataError, match="is a pipe or a device"):
        load_paysim(tmp_path / "log.csv")
    with pytest.raises(UnsupportedDataError, match="is a pipe or a device"):
        load_paysim("/dev/zero")


def test_a_file_that_may_not_be_read_is_refused_by_the_command_line(tmp_path):
    path, readable = tmp_path / "log.csv", tmp_path / "readable.csv"
    path.write_bytes(lines(ROW))
    readable.write_bytes(lines(ROW))
    path.chmod(0)
    program = (
        "import os; from privfed.cli import app; from typer.testing import CliRunner; "
        f"CliRunner().invoke(app, ['partition', {str(readable)!r}]); "  # loads all modules, which others than root might not find
        f"os.geteuid() or os.setuid(65534); app(['partition', {str(path)!r}])"  # root may read everything
    )
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"refused: {path}: Permission denied; nothing was done"


def test_another_column_comes_row_by_row_with_the_table(tmp_path):
    path = tmp_path / "log.csv"
    rows = [f"{ROW},{bank}" for bank in ("NA", " north ", "0", "north")]
    path.write_text("\n".join([f"{HEADER},bank", rows[0], "", *rows[1:], ""]))
    assert load_column(path, "bank").tolist() == ["NA", "north", "0", "north"]
    assert len(load_paysim(path)) == 4


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("Bank", "x", "no column Bank; 'bank' is similar; nothing was loaded"),
        ("branch", "x", "no column branch; nothing was loaded"),
        ("nameOrig", "x", "nameOrig occurs twice"),
        ("bank", " ", "column bank of log.csv has empty cells"),
    ],
)
def test_another_column_that_is_not_there_or_not_filled_is_refused(column, cell, reason, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER},bank,nameOrig\n{ROW},{cell},x\n")
    with pytest.raises(UnsupportedDataError, match=reason):
        load_column(path, column)


def test_every_column_is_looked_for(tmp_path):
    for name in FILE_COLUMNS:
        path = tmp_path / "log.csv"
        path.write_bytes(renamed(name, "x" * len(name)))
        with pytest.raises(UnsupportedDataError, match=f"{name} is missing"):
            load_paysim(path)

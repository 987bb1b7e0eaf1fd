import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from privfed.errors import DamagedFileError
from privfed.table import Table

COLUMNS = "name TEXT PRIMARY KEY, number INTEGER"


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "things.sqlite", name="things", columns=COLUMNS)


def names(table: Table) -> list[str]:
    with table.transaction() as connection:
        return [name for (name,) in connection.execute("SELECT name FROM things")]


def test_what_a_transaction_wrote_is_there_for_the_next_object_and_what_failed_is_not(table: Table, tmp_path: Path) -> None:
    with table.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('kept', 1)")

    def write_and_stop() -> None:
        with table.transaction() as connection:
            connection.execute("INSERT INTO things VALUES ('lost', 2)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert names(Table(tmp_path / "things.sqlite", name="things", columns=COLUMNS)) == ["kept"]


def test_a_commit_is_on_disk_with_its_directory_before_it_returns(table: Table) -> None:
    with table.transaction() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_second_writer_waits_and_does_not_read_in_between(table: Table, tmp_path: Path) -> None:
    with table.transaction():
        other = sqlite3.connect(tmp_path / "things.sqlite", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_a_file_that_was_taken_away_does_not_come_back_empty(table: Table, tmp_path: Path) -> None:
    (tmp_path / "things.sqlite").unlink()
    with pytest.raises(DamagedFileError, match=r"things\.sqlite is missing, damaged"):
        names(table)
    assert not (tmp_path / "things.sqlite").exists()


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_a_file_that_holds_something_else_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "things.sqlite"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(DamagedFileError, match="nothing was done"):
        Table(path, name="things", columns=COLUMNS)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE things (other TEXT)", "CREATE TABLE more (other TEXT)", "CREATE INDEX quick ON things (number)", "DROP TABLE seal"],
)
def test_a_database_that_is_not_this_table_is_refused_and_stays(table: Table, tmp_path: Path, statement: str) -> None:
    path = tmp_path / ("other.sqlite" if "(other" in statement and "things" in statement else "things.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(DamagedFileError):
        Table(path, name="things", columns=COLUMNS)
    with pytest.raises(DamagedFileError):
        Table(tmp_path / "things.sqlite", name="others", columns=COLUMNS)
    assert path.read_bytes() == before


@pytest.mark.parametrize("statement", ["UPDATE things SET number = 2", "DELETE FROM things", "INSERT INTO things VALUES ('more', 3)"])
def test_rows_that_something_else_wrote_are_noticed_at_once(table: Table, tmp_path: Path, statement: str) -> None:
    with table.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('kept', 1)")
    with closing(sqlite3.connect(tmp_path / "things.sqlite")) as connection, connection:
        connection.execute(statement)
    with pytest.raises(DamagedFileError):
        names(table)


def test_no_flipped_bit_gives_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "things.sqlite"
    with Table(path, name="things", columns=COLUMNS).transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('kept', 77)")
        connection.execute("INSERT INTO things VALUES ('also', 78)")
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        if not whole[place] and place % 16:
            continue
        for bit in (1, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            try:
                with Table(path, name="things", columns=COLUMNS).transaction() as connection:
                    rows = connection.execute("SELECT name, number FROM things ORDER BY number").fetchall()
            except DamagedFileError:
                refused += 1
                continue
            assert rows == [("kept", 77), ("also", 78)]
    assert refused > 100


def test_a_disk_that_is_full_is_not_called_damage(table: Table) -> None:
    def write_too_much() -> None:
        with table.transaction() as connection:
            connection.execute("PRAGMA max_page_count = 1")
            connection.executemany("INSERT INTO things VALUES (?, 1)", [(f"{number:0500}",) for number in range(100)])

    with pytest.raises(OSError, match="cannot be written now"):
        write_too_much()
    assert names(table) == []


def test_the_file_is_for_its_owner_only_and_others_may_not_write_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        Table(tmp_path / "new.sqlite", name="things", columns=COLUMNS)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new.sqlite").stat().st_mode) == 0o600
    (tmp_path / "new.sqlite").chmod(0o620)
    with pytest.raises(PermissionError, match="writable by its owner only"):
        Table(tmp_path / "new.sqlite", name="things", columns=COLUMNS)

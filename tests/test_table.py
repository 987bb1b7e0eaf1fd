import os
import sqlite3
import stat
from pathlib import Path

import pytest

from privfed.errors import DamagedFileError
from privfed.table import Table

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY)"


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "things.sqlite", schema=SCHEMA)


def names(table: Table) -> list[str]:
    with table.transaction() as connection:
        return [name for (name,) in connection.execute("SELECT name FROM things")]


def test_what_a_transaction_wrote_is_there_for_the_next_object_and_what_failed_is_not(table: Table, tmp_path: Path) -> None:
    with table.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('kept')")

    def write_and_stop() -> None:
        with table.transaction() as connection:
            connection.execute("INSERT INTO things VALUES ('lost')")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert names(Table(tmp_path / "things.sqlite", schema=SCHEMA)) == ["kept"]


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
        Table(path, schema=SCHEMA)
    assert path.read_bytes() == content


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "things.sqlite"
    sqlite3.connect(path).execute("CREATE TABLE things (other TEXT)").connection.close()
    path.chmod(0o600)
    with pytest.raises(DamagedFileError):
        names(Table(path, schema=SCHEMA))


def test_a_disk_that_is_full_is_not_called_damage(table: Table) -> None:
    def write_too_much() -> None:
        with table.transaction() as connection:
            connection.execute("PRAGMA max_page_count = 1")
            connection.executemany("INSERT INTO things VALUES (?)", [(f"{number:0500}",) for number in range(100)])

    with pytest.raises(OSError, match="cannot be written now"):
        write_too_much()
    assert names(table) == []


def test_the_file_is_for_its_owner_only_and_others_may_not_write_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        Table(tmp_path / "new.sqlite", schema=SCHEMA)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new.sqlite").stat().st_mode) == 0o600
    (tmp_path / "new.sqlite").chmod(0o620)
    with pytest.raises(PermissionError, match="writable by its owner only"):
        Table(tmp_path / "new.sqlite", schema=SCHEMA)

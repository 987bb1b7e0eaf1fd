import math
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from privfed.dp import _chain
from privfed.dp._chain import Chain
from privfed.dp.accounting import epsilon
from privfed.dp.ledger import Ledger, Reservation
from privfed.dp.mechanism import Budget, Composition, Event, GaussianRelease, NonPrivateRelease, PoissonSampledGaussian, Unit, encode_event
from privfed.errors import BudgetExceededError, LedgerError, LedgerLockedError, LedgerTamperedError

BUDGET = Budget(epsilon=2.0, delta=1e-5)
SESSION = b"session 1"
EVENT = PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
CHEAP = GaussianRelease(noise_multiplier=50.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bank_a.ledger"


def open_ledger(path: Path) -> Ledger:
    return Ledger.open(path, population="bank_a", budget=BUDGET)


def files_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(path.name + "*"))


def snapshot(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in files_of(path)}


def restore(path: Path, contents: dict[Path, bytes]) -> None:
    for file in files_of(path):
        file.unlink()
    for file, content in contents.items():
        file.write_bytes(content)
        file.chmod(0o600)


def fill(path: Path, rounds: int = 5, event: Event = CHEAP) -> float:
    """Reserves and commits some rounds, and returns what is spent."""
    with open_ledger(path) as ledger:
        for number in range(rounds):
            ledger.commit(ledger.reserve(event, session=SESSION, round=number, attempt=0))
        return ledger.spent()


def edit(path: Path, *statements: str) -> None:
    """What somebody can do who may write the database, knows SQL, and removes the triggers first."""
    connection = sqlite3.connect(path)
    connection.executescript("DROP TRIGGER no_update; DROP TRIGGER no_delete;" + ";".join(statements))
    connection.close()


# --- charging -------------------------------------------------------------------------------------------------------------------


def test_a_reservation_is_charged_before_and_after_its_commit(path: Path) -> None:
    with open_ledger(path) as ledger:
        assert (ledger.spent(), ledger.events()) == (0.0, ())
        reservation = ledger.reserve(EVENT, session=SESSION, round=3, attempt=1)
        assert not reservation.committed
        assert (reservation.event, reservation.session, reservation.round, reservation.attempt) == (EVENT, SESSION, 3, 1)
        assert ledger.spent() == epsilon([EVENT], delta=1e-5)
        ledger.commit(reservation)
        assert ledger.events() == (EVENT,)
        assert ledger.spent() == epsilon([EVENT], delta=1e-5)
        assert ledger.spent(delta=1e-7) == epsilon([EVENT], delta=1e-7)


def test_a_reservation_can_be_looked_up_to_resume_after_a_crash(path: Path) -> None:
    with open_ledger(path) as ledger:
        first = ledger.reserve(EVENT, session=SESSION, round=0, attempt=0)
        second = ledger.reserve(CHEAP, session=SESSION, round=1, attempt=0)
        ledger.commit(first)
    with open_ledger(path) as ledger:
        assert ledger.reservation(session=SESSION, round=0, attempt=0) == replace(first, committed=True)
        assert ledger.reservation(session=SESSION, round=1, attempt=0) == second
        assert ledger.reservation(session=SESSION, round=1, attempt=1) is None
        assert ledger.reservation(session=b"other", round=1, attempt=0) is None
        ledger.commit(second)


def test_a_reservation_is_frozen(path: Path) -> None:
    with open_ledger(path) as ledger:
        reservation = ledger.reserve(EVENT, session=SESSION, round=0, attempt=0)
    with pytest.raises(FrozenInstanceError):
        reservation.committed = True  # type: ignore[misc]


def test_a_reopened_ledger_gives_the_same_epsilon(path: Path) -> None:
    spent = fill(path)
    for _ in range(2):
        with open_ledger(path) as ledger:
            assert ledger.spent() == spent
            ledger.verify()
    with Ledger.reopen(path) as ledger:
        assert (ledger.population, ledger.budget, ledger.unit, ledger.spent()) == ("bank_a", BUDGET, Unit.RECORD, spent)


def test_rows_show_what_happened_in_order(path: Path) -> None:
    fill(path, rounds=1)
    with open_ledger(path) as ledger:
        rows = ledger.rows()
        assert [(row.number, row.kind) for row in rows] == [(0, "open"), (1, "reserve"), (2, "commit")]
        assert rows[0].reservation is None
        assert [row.reservation.committed for row in rows if row.reservation] == [False, True]
        assert all(row.time.endswith("+00:00") for row in rows)


def test_an_event_over_budget_is_refused_before_anything_is_written(path: Path) -> None:
    with open_ledger(path) as ledger:
        assert ledger.rounds_possible(EVENT) > 1
        for number in range(ledger.rounds_possible(EVENT)):
            ledger.reserve(EVENT, session=SESSION, round=number, attempt=0)
        spent, rows, files = ledger.spent(), ledger.rows(), snapshot(path)
        assert spent <= 2.0
        with pytest.raises(BudgetExceededError, match="nothing was spent") as refusal:
            ledger.reserve(EVENT, session=SESSION, round=99, attempt=0)
        steps = ledger.rounds_possible(replace(EVENT, steps=1))
        assert 0 < steps < 100
        for words in ("budget of 2 at delta 1e-05", "0 more rounds", f"of its 100 steps, {steps} would still fit"):
            assert words in str(refusal.value)
        assert (ledger.spent(), ledger.rows(), snapshot(path)) == (spent, rows, files)
        assert ledger.reservation(session=SESSION, round=99, attempt=0) is None
        ledger.reserve(replace(EVENT, steps=steps), session=SESSION, round=99, attempt=0)


@pytest.mark.parametrize("composition", Composition)
@pytest.mark.parametrize("events", [1, 3])
def test_a_budget_is_spent_to_the_last_bit_and_not_a_bit_beyond(path: Path, composition: Composition, events: int) -> None:
    """A budget of exactly what some events cost covers them; one that is smaller by the last bit of a float does not."""
    with Ledger.open(path, population="free", budget=Budget(epsilon=1e6, delta=1e-5), composition=composition) as ledger:
        for number in range(events):
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
        cost = ledger.spent()
    for limit, covered in ((cost, events), (math.nextafter(cost, 0), events - 1), (cost / 1.005, events - 1)):
        other = path.with_name(f"{limit!r}.ledger")
        with Ledger.open(other, population="a", budget=Budget(epsilon=limit, delta=1e-5), composition=composition) as ledger:
            for number in range(covered):
                ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
            assert ledger.rounds_possible(CHEAP) == 0
            with pytest.raises(BudgetExceededError, match="nothing was spent or trained"):
                ledger.reserve(CHEAP, session=SESSION, round=covered, attempt=0)
            assert len(ledger.events()) == covered
            assert ledger.spent() <= limit


def test_the_number_of_releases_that_still_fit_is_named(path: Path) -> None:
    release = GaussianRelease(noise_multiplier=10.0, count=1000)
    with open_ledger(path) as ledger:
        fitting = ledger.rounds_possible(replace(release, count=1))
        with pytest.raises(BudgetExceededError, match=f"of its 1000 releases, {fitting} would still fit"):
            ledger.reserve(release, session=SESSION, round=0, attempt=0)


def test_a_non_private_release_is_refused_by_every_finite_budget(path: Path) -> None:
    with Ledger.open(path, population="bank_a", budget=Budget(epsilon=1e6, delta=1e-5)) as ledger:
        with pytest.raises(BudgetExceededError, match=r"nothing was spent or trained.*Budget\.unlimited"):
            ledger.reserve(NonPrivateRelease(), session=SESSION, round=0, attempt=0)
        assert ledger.events() == ()


def test_an_unlimited_budget_records_a_non_private_release(path: Path) -> None:
    with Ledger.open(path, population="bank_a", budget=Budget.unlimited(delta=1e-5)) as ledger:
        ledger.reserve(NonPrivateRelease(), session=SESSION, round=0, attempt=0)
        assert ledger.spent() == float("inf")
    with Ledger.open(path, population="bank_a", budget=Budget.unlimited(delta=1e-5)) as ledger:
        assert ledger.events() == (NonPrivateRelease(),)


def test_an_attempt_is_reserved_once(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
    with open_ledger(path) as ledger:
        with pytest.raises(LedgerError, match="reserved already; nothing was charged again"):
            ledger.reserve(EVENT, session=SESSION, round=0, attempt=0)
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=1)
        assert len(ledger.events()) == 2


def test_a_commit_of_an_unknown_or_a_foreign_reservation_is_refused(path: Path, tmp_path: Path) -> None:
    with open_ledger(path) as ledger, Ledger.open(tmp_path / "b", population="bank_b", budget=BUDGET) as other:
        foreign = other.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        made_up = Reservation(id="00" * 32, event=CHEAP, session=SESSION, round=0, attempt=0, committed=False)
        for reservation in (foreign, made_up):
            with pytest.raises(LedgerError, match="no such reservation; nothing was committed"):
                ledger.commit(reservation)
        assert len(ledger.rows()) == 2


def test_a_reservation_is_committed_once(path: Path) -> None:
    with open_ledger(path) as ledger:
        reservation = ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        ledger.commit(reservation)
        with pytest.raises(LedgerError, match="committed before; nothing was committed again"):
            ledger.commit(reservation)
        assert len(ledger.rows()) == 3


@pytest.mark.parametrize(
    "place",
    [
        {"session": b""},
        {"session": b"x" * 65},
        {"session": "text"},
        {"round": -1},
        {"round": 1.0},
        {"attempt": -1},
        {"attempt": None},
    ],
)
def test_a_place_outside_its_range_is_refused(path: Path, place: dict[str, object]) -> None:
    with open_ledger(path) as ledger:
        with pytest.raises(ValueError, match="expected"):
            ledger.reserve(CHEAP, **{"session": SESSION, "round": 0, "attempt": 0, **place})  # type: ignore[arg-type]
        assert ledger.events() == ()


def test_what_is_no_event_is_not_reserved(path: Path) -> None:
    with open_ledger(path) as ledger:
        with pytest.raises(TypeError, match="expected an event"):
            ledger.reserve("anything", session=SESSION, round=0, attempt=0)  # type: ignore[arg-type]
        assert len(ledger.rows()) == 1


def test_two_threads_cannot_both_take_the_last_of_the_budget(path: Path) -> None:
    half = GaussianRelease(noise_multiplier=3.5)  # 1.07 at delta 1e-5: one fits, and two do not
    outcomes: list[str] = []

    def reserve(number: int) -> None:
        try:
            ledger.reserve(half, session=SESSION, round=number, attempt=0)
            outcomes.append("charged")
        except BudgetExceededError:
            outcomes.append("refused")

    with Ledger.open(path, population="bank_a", budget=Budget(epsilon=1.5, delta=1e-5)) as ledger:
        threads = [threading.Thread(target=reserve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["charged", "refused", "refused", "refused"]
        ledger.verify()


# --- durability and crashes -------------------------------------------------------------------------------------------------------

RESERVE_AND_WAIT = """
import sys, time
from pathlib import Path
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, PoissonSampledGaussian
ledger = Ledger.open(Path(sys.argv[1]), population="bank_a", budget=Budget(epsilon=2.0, delta=1e-5))
ledger.reserve(PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100), session=b"session 1", round=0, attempt=0)
print("reserved", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has reserved round 0 and holds the ledger."""
    process = subprocess.Popen([sys.executable, "-c", RESERVE_AND_WAIT, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "reserved\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_a_kill_between_reserve_and_commit_stays_charged(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    with pytest.raises(LedgerLockedError, match=r"another process.*nothing was opened"):
        open_ledger(path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with open_ledger(path) as ledger:
        assert ledger.events() == (EVENT,)
        assert ledger.spent() == epsilon([EVENT], delta=1e-5)
        reservation = ledger.reservation(session=SESSION, round=0, attempt=0)
        assert reservation is not None
        assert not reservation.committed


def test_losing_the_write_ahead_file_after_a_kill_is_noticed(path: Path, holder: "subprocess.Popen[str]") -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    path.with_name(path.name + "-wal").unlink()
    with pytest.raises(LedgerTamperedError, match="restore"):
        open_ledger(path)


def test_rows_are_written_ahead_and_synchronised(path: Path) -> None:
    with open_ledger(path) as ledger:
        settings = [
            ledger._chain._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "locking_mode")
        ]
    assert settings == ["wal", 2, "exclusive"]


def test_every_row_is_synchronised_in_both_files_before_it_is_reported_as_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite synchronises its own file; the head, and the folder of new files, are synchronised here, after they were written."""
    done: list[str] = []
    synchronise, write = os.fsync, os.pwrite

    def recording_fsync(descriptor: int) -> None:
        done.append(f"synchronised {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        synchronise(descriptor)

    def recording_pwrite(descriptor: int, content: bytes, offset: int) -> int:
        done.append(f"wrote {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "pwrite", recording_pwrite)
    row = [f"wrote {path.name}.head", f"synchronised {path.name}.head"]
    with open_ledger(path) as ledger:
        assert done == [f"synchronised {path.parent.name}", *row, *row]  # that there is no row, and the first
        done.clear()
        reservation = ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        assert done == row
        ledger.commit(reservation)
        assert done == [*row, *row]


def test_a_crash_between_the_two_files_is_healed_and_stays_charged(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        head = path.with_name(path.name + ".head").read_bytes()
        ledger.reserve(CHEAP, session=SESSION, round=1, attempt=0)
    path.with_name(path.name + ".head").write_bytes(head)
    with open_ledger(path) as ledger:
        assert len(ledger.events()) == 2
        ledger.reserve(CHEAP, session=SESSION, round=2, attempt=0)
    with open_ledger(path) as ledger:
        assert len(ledger.events()) == 3


@pytest.mark.parametrize("crashes", [2, 3])
def test_crashes_between_the_two_files_one_after_the_other_are_healed_and_stay_charged(path: Path, crashes: int) -> None:
    for number in range(crashes):
        with open_ledger(path) as ledger:
            head = path.with_name(path.name + ".head").read_bytes()
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
        path.with_name(path.name + ".head").write_bytes(head)
    with open_ledger(path) as ledger:
        assert len(ledger.events()) == crashes


def test_a_torn_write_of_the_head_is_healed(path: Path) -> None:
    fill(path)
    head = path.with_name(path.name + ".head")
    content = bytearray(head.read_bytes())
    newest = 0 if int.from_bytes(content[:8], "big") > int.from_bytes(content[72:80], "big") else 72
    content[newest + 20] ^= 1
    head.write_bytes(content)
    with open_ledger(path) as ledger:
        assert len(ledger.events()) == 5


def test_a_failed_write_closes_the_ledger_and_what_was_written_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with open_ledger(path) as ledger:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(LedgerError, match="whatever was written counts as spent"):
            ledger.reserve(EVENT, session=SESSION, round=0, attempt=0)
        monkeypatch.undo()
        with pytest.raises(LedgerError, match="closed; nothing was written"):
            ledger.reserve(EVENT, session=SESSION, round=1, attempt=0)
    with open_ledger(path) as ledger:
        assert ledger.events() == (EVENT,)


def test_a_reservation_that_was_interrupted_after_it_was_written_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    half = GaussianRelease(noise_multiplier=3.5)  # 1.07 at delta 1e-5: one fits, and two do not
    with Ledger.open(path, population="bank_a", budget=Budget(epsilon=1.5, delta=1e-5)) as ledger:
        monkeypatch.setattr(os, "pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(half, session=SESSION, round=0, attempt=0)
        monkeypatch.undo()
        with pytest.raises(BudgetExceededError):
            ledger.reserve(half, session=SESSION, round=1, attempt=0)
        ledger.reserve(CHEAP, session=SESSION, round=1, attempt=0)
    with Ledger.reopen(path) as ledger:
        assert ledger.events() == (half, CHEAP)


# --- one holder at a time -----------------------------------------------------------------------------------------------------------


def test_a_second_ledger_in_the_same_process_is_refused_until_the_first_is_closed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.ledger"
    with open_ledger(path):
        link.symlink_to(path)
        for name in (path, link):
            with pytest.raises(LedgerLockedError, match="nothing was opened; close it there"):
                open_ledger(name)
            with pytest.raises(LedgerLockedError):
                Ledger.reopen(name)
        assert path.read_bytes()  # which drops SQLite's own lock, but not ours
        script = f"from privfed.dp.ledger import Ledger; Ledger.reopen({str(path)!r})"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert "LedgerLockedError" in result.stderr
    open_ledger(link).close()
    assert not link.with_name("link.ledger.head").exists()


def test_another_sqlite_program_cannot_read_or_write_an_open_ledger(path: Path) -> None:
    with open_ledger(path):
        result = subprocess.run(
            [sys.executable, "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM rows')", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert "database is locked" in result.stderr


def test_a_ledger_that_another_sqlite_program_holds_is_refused(path: Path) -> None:
    fill(path, rounds=1)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(LedgerLockedError):
            open_ledger(path)
    finally:
        connection.close()


def test_a_forked_child_cannot_spend(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger(path) as ledger:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(LedgerLockedError, match="nothing was written"):
            ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)


def test_closing_twice_is_harmless_and_a_closed_ledger_refuses(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
    with pytest.raises(LedgerError, match="closed"):
        ledger.verify()


# --- terms ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("population", "budget"),
    [
        ("bank_b", BUDGET),
        ("bank_a", Budget(epsilon=2.1, delta=1e-5)),
        ("bank_a", Budget(epsilon=1.9, delta=1e-5)),
        ("bank_a", Budget(epsilon=2.0, delta=1e-4)),
        ("bank_a", Budget.unlimited(delta=1e-5)),
    ],
)
def test_a_budget_cannot_be_changed_nor_moved_to_another_population(path: Path, population: str, budget: Budget) -> None:
    spent, before = fill(path), snapshot(path)
    with pytest.raises(LedgerError, match="nothing was opened or changed"):
        Ledger.open(path, population=population, budget=budget)
    assert snapshot(path) == before
    with open_ledger(path) as ledger:
        assert ledger.spent() == spent


@pytest.mark.parametrize("population", ["", "x" * 201])
def test_a_population_needs_a_name_of_reasonable_length(path: Path, population: str) -> None:
    with pytest.raises(ValueError, match="population"):
        Ledger.open(path, population=population, budget=BUDGET)
    assert files_of(path) == []


def test_a_ledger_in_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder .*absent to make the ledger in, found none; nothing was made"):
        Ledger.open(tmp_path / "absent" / "bank.ledger", population="bank", budget=BUDGET)
    assert not (tmp_path / "absent").exists()


def test_reopening_makes_no_ledger(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found none"):
        Ledger.reopen(path)
    assert files_of(path) == []


def customers(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")


NO_LEDGERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("not a ledger"),
    "empty": Path.touch,
    "another database": customers,
}


@pytest.mark.parametrize("way", [Ledger.reopen, Ledger.read])
@pytest.mark.parametrize("make", NO_LEDGERS.values(), ids=NO_LEDGERS)
def test_a_file_that_is_no_ledger_stays_as_it_is_and_gets_no_files_beside_it(
    path: Path, make: Callable[[Path], object], way: Callable[[Path], Ledger]
) -> None:
    make(path)
    before = snapshot(path)
    with pytest.raises(LedgerTamperedError, match="nothing was opened or spent"):
        way(path)
    assert snapshot(path) == before
    assert files_of(path) == [path]


@pytest.mark.parametrize("way", [open_ledger, Ledger.reopen, Ledger.read])
def test_a_head_that_is_missing_is_refused_by_name_and_not_made_again(path: Path, way: Callable[[Path], Ledger]) -> None:
    fill(path)
    path.with_name(path.name + ".head").unlink()
    for _ in range(2):
        with pytest.raises(LedgerTamperedError, match=r"the head file bank_a\.ledger\.head is missing or damaged.*restore it"):
            way(path)
    assert files_of(path) == [path]


def test_an_empty_file_becomes_a_ledger(path: Path) -> None:
    path.touch(mode=0o600)
    with open_ledger(path) as ledger:
        assert ledger.spent() == 0


def test_reading_sees_every_row_of_a_ledger_and_writes_to_no_file_even_after_a_crash(path: Path, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed" / path.name
    crashed.parent.mkdir()
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        head = path.with_name(path.name + ".head").read_bytes()
        ledger.reserve(CHEAP, session=SESSION, round=1, attempt=0)
        for file in files_of(path):
            shutil.copy(file, crashed.parent)
        expected = ledger.rows()
    crashed.with_name(path.name + ".head").write_bytes(head)  # one row behind, as a crash leaves it
    assert crashed.with_name(path.name + "-wal").stat().st_size > 0
    before = snapshot(crashed)
    for _ in range(2):
        with Ledger.read(crashed) as ledger:
            ledger.verify()
            assert ledger.rows() == expected
    assert snapshot(crashed) == before
    with Ledger.reopen(crashed) as ledger:  # whereas this takes the log into the file
        assert ledger.rows() == expected
    assert snapshot(crashed) != before


def test_a_ledger_that_is_read_cannot_be_charged_and_is_held_alone(path: Path) -> None:
    fill(path, rounds=1)
    with Ledger.read(path) as ledger:
        spent = ledger.spent()
        with pytest.raises(LedgerError, match="nothing was written or charged"):
            ledger.reserve(CHEAP, session=SESSION, round=7, attempt=0)
        with pytest.raises(LedgerLockedError):
            open_ledger(path)
    with open_ledger(path) as ledger:
        assert ledger.spent() == spent
        with pytest.raises(LedgerLockedError):
            Ledger.read(path)


def test_a_remembered_head_tells_growth_from_an_older_copy_and_from_another_ledger(path: Path, tmp_path: Path) -> None:
    fill(path, rounds=2)
    with Ledger.read(path) as ledger:
        remembered, rows = ledger.head, len(ledger.rows())
        assert ledger.rows_since(remembered) == 0
    copy = {file.name: file.read_bytes() for file in files_of(path)}
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=7, attempt=0)
        later = ledger.head
        assert ledger.rows_since(remembered) == len(ledger.rows()) - rows == 1
        assert ledger.rows_since(later) == 0
    for name, content in copy.items():
        path.with_name(name).write_bytes(content)
    other = tmp_path / "other.ledger"
    fill(other, rounds=2)
    with Ledger.read(path) as older, Ledger.read(other) as stranger:  # both hold, taken by themselves
        older.verify()
        stranger.verify()
        for ledger, head in ((older, later), (stranger, remembered), (older, bytes(32)), (older, b"")):
            with pytest.raises(LedgerTamperedError, match="does not extend the head that is remembered; nothing was changed"):
                ledger.rows_since(head)


def test_all_files_are_accessible_to_their_owner_only(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        assert [file.name for file in files_of(path)] == ["bank_a.ledger", "bank_a.ledger-wal", "bank_a.ledger.head"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files_of(path)} == {0o600}
    for file in (path, path.with_name(path.name + ".head")):
        file.chmod(0o640)
        with pytest.raises(LedgerError, match="chmod 600"):
            open_ledger(path)
        file.chmod(0o600)
    open_ledger(path).close()


# --- tampering --------------------------------------------------------------------------------------------------------------------


def cheaper(path: Path) -> None:
    edit(path, """UPDATE rows SET body = replace(body, '"noise_multiplier":50.0', '"noise_multiplier":90.0') WHERE number = 3""")


def cheaper_and_rehashed(path: Path) -> None:
    """Also recomputes the hash of the edited row, but not of those that follow."""
    connection = sqlite3.connect(path)
    (previous,) = connection.execute("SELECT digest FROM rows WHERE number = 2").fetchone()
    (body,) = connection.execute("SELECT body FROM rows WHERE number = 3").fetchone()
    connection.close()
    body = body.replace('"noise_multiplier":50.0', '"noise_multiplier":90.0')
    edit(path, f"UPDATE rows SET body = '{body}', digest = x'{_chain.extend(previous, (_chain.link(body),)).hex()}' WHERE number = 3")  # noqa: S608


TAMPERING: dict[str, Callable[[Path], None]] = {
    "edited row": cheaper,
    "edited and rehashed row": cheaper_and_rehashed,
    "edited budget": lambda path: edit(path, """UPDATE rows SET body = replace(body, '"epsilon":2.0', '"epsilon":9.0') WHERE number = 0"""),
    "last row deleted": lambda path: edit(path, "DELETE FROM rows WHERE number = 10"),
    "middle row deleted": lambda path: edit(path, "DELETE FROM rows WHERE number = 5"),
    "middle row deleted, rest renumbered": lambda path: edit(
        path, "DELETE FROM rows WHERE number = 5", "UPDATE rows SET number = number - 1 WHERE number > 5"
    ),
    "rows swapped": lambda path: edit(
        path,
        "UPDATE rows SET number = 99 WHERE number = 3",
        "UPDATE rows SET number = 3 WHERE number = 5",
        "UPDATE rows SET number = 5 WHERE number = 99",
    ),
    "last row renumbered": lambda path: edit(path, "UPDATE rows SET number = 99 WHERE number = 10"),
    "all rows deleted": lambda path: edit(path, "DELETE FROM rows"),
    "table dropped": lambda path: edit(path, "DROP TABLE rows"),
    "row of another kind": lambda path: edit(path, "UPDATE rows SET body = x'00' WHERE number = 3"),
    "file cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "file cut to nothing": lambda path: os.truncate(path, 0),
    "file removed": Path.unlink,
    "garbage": lambda path: Path.write_bytes(path, b"no database at all" * 500) and None,
    "head removed": lambda path: path.with_name(path.name + ".head").unlink(),
    "head overwritten": lambda path: path.with_name(path.name + ".head").write_bytes(bytes(144)) and None,
}


@pytest.mark.parametrize("tamper", TAMPERING.values(), ids=TAMPERING)
def test_a_ledger_that_is_not_what_was_written_is_refused(path: Path, tamper: Callable[[Path], None]) -> None:
    fill(path)
    tamper(path)
    if path.exists():
        path.chmod(0o600)
    for _ in range(2):  # and a refusal does not repair it
        with pytest.raises(LedgerTamperedError, match="nothing was opened or spent"):
            open_ledger(path)


def with_countersignatures(path: Path, rounds: int) -> int:
    """A ledger with one reservation, and more rounds whose heads peers have countersigned; returns its number of rows."""
    with open_ledger(path) as ledger:
        ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        for number in range(1, rounds + 1):
            ledger.commit(ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0))
            ledger.record_countersignatures(
                rows=len(ledger.rows()), context=SESSION, start=0, signature=b"", hashes=(), signatures={"bank_b": b"signed"}
            )
        return len(ledger.rows())


HEADS: dict[str, Callable[[bytearray, int], None]] = {
    "head intact": lambda content, slot: None,
    "newest slot flipped": lambda content, slot: content.__setitem__(slot + 20, content[slot + 20] ^ 1),
    "newest slot zeroed": lambda content, slot: content.__setitem__(slice(slot, slot + 72), bytes(72)),
    "newest slot from an older head": lambda content, slot: content.__setitem__(slice(slot, slot + 72), content[72 - slot : 144 - slot]),
}


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("spoil", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("renumbered", [False, True])
def test_no_single_row_can_be_taken_out_even_where_the_head_is_damaged_as_well(
    path: Path, spoil: Callable[[bytearray, int], None], renumbered: bool, rounds: int
) -> None:
    rows = with_countersignatures(path, rounds)
    whole = snapshot(path)
    head = path.with_name(path.name + ".head")
    for number in range(rows):
        restore(path, whole)
        rest = [f"UPDATE rows SET number = number - 1 WHERE number > {number}"] if renumbered else []  # noqa: S608
        edit(path, f"DELETE FROM rows WHERE number = {number}", *rest)  # noqa: S608
        content = bytearray(head.read_bytes())
        spoil(content, rows % 2 * 72)
        head.write_bytes(content)
        with pytest.raises(LedgerTamperedError, match="nothing was opened or spent"):
            open_ledger(path)


def test_a_damaged_slot_that_no_crash_leaves_is_refused(path: Path) -> None:
    """The slot that a crash tears is one row behind what is in the database. The other one, or both, are not torn by a crash."""
    fill(path)
    head = path.with_name(path.name + ".head")
    whole = head.read_bytes()
    older = 72 if int.from_bytes(whole[:8], "big") > int.from_bytes(whole[72:80], "big") else 0
    content = bytearray(whole)
    content[older + 20] ^= 1
    head.write_bytes(content)
    with pytest.raises(LedgerTamperedError, match="head file"):
        open_ledger(path)
    head.write_bytes(whole)
    open_ledger(path).close()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_torn_write_of_the_head_is_healed_from_the_first_row_on(path: Path, rows: int) -> None:
    with open_ledger(path) as ledger:
        for number in range(rows - 1):
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
    head = path.with_name(path.name + ".head")
    content = bytearray(head.read_bytes())
    content[rows % 2 * 72 + 20] ^= 1
    head.write_bytes(content)
    for _ in range(2):
        with open_ledger(path) as ledger:
            assert len(ledger.rows()) == rows


@pytest.mark.parametrize("position", [0.3, 0.5, 0.7, 0.9])
def test_a_changed_byte_never_makes_a_ledger_cheaper(path: Path, position: float) -> None:
    spent = fill(path, rounds=12)
    content = bytearray(path.read_bytes())
    for offset in range(int(position * len(content)), int(position * len(content)) + 400, 40):
        changed = bytearray(content)
        changed[offset] ^= 0x15
        path.write_bytes(changed)
        try:
            with open_ledger(path) as ledger:  # the byte lay in free space
                assert ledger.spent() == spent
        except LedgerTamperedError:
            pass
        for extra in ("-wal", "-shm"):
            path.with_name(path.name + extra).unlink(missing_ok=True)


def test_garbage_that_never_was_a_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b"no database at all" * 500)
    path.chmod(0o600)
    with pytest.raises(LedgerTamperedError, match="not a database"):
        open_ledger(path)


@pytest.mark.parametrize("which", ["", ".head"])
def test_one_file_replaced_by_an_older_copy_is_noticed(path: Path, which: str) -> None:
    fill(path, rounds=2)
    file = path.with_name(path.name + which)
    older = file.read_bytes()
    with open_ledger(path) as ledger:
        for number in range(2, 4):
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
    file.write_bytes(older)
    with pytest.raises(LedgerTamperedError, match=r"head file|rows"):
        open_ledger(path)


def test_a_database_with_as_many_rows_but_other_ones_is_noticed(path: Path) -> None:
    fill(path, rounds=2)
    other = path.with_name("other.ledger")
    fill(other, rounds=2, event=GaussianRelease(noise_multiplier=900.0))
    shutil.copy(other, path)
    with pytest.raises(LedgerTamperedError, match="other rows"):
        open_ledger(path)


def test_all_files_replaced_by_an_older_copy_are_noticed_by_who_remembers_the_head_and_by_nobody_else(path: Path) -> None:
    fill(path, rounds=2)
    older = snapshot(path)
    with open_ledger(path) as ledger:
        ledger.reserve(EVENT, session=SESSION, round=2, attempt=0)
        remembered = ledger.head
    restore(path, older)
    with open_ledger(path) as ledger:  # this is the limit that the module states
        ledger.verify()
        assert ledger.head != remembered
        assert len(ledger.events()) == 2


def test_the_head_follows_every_row_and_survives_reopening(path: Path) -> None:
    heads: list[bytes] = []
    with open_ledger(path) as ledger:
        heads.append(ledger.head)
        reservation = ledger.reserve(CHEAP, session=SESSION, round=0, attempt=0)
        heads.append(ledger.head)
        ledger.commit(reservation)
        heads.append(ledger.head)
    assert len(set(heads)) == 3
    assert {len(head) for head in heads} == {32}
    with open_ledger(path) as ledger:
        assert ledger.head == heads[-1]


def test_rows_cannot_be_changed_by_accident(path: Path) -> None:
    fill(path, rounds=1)
    connection = sqlite3.connect(path)
    for statement in ("UPDATE rows SET body = ''", "DELETE FROM rows"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()
    open_ledger(path).close()


def test_verify_notices_files_that_changed_while_the_ledger_was_open(path: Path) -> None:
    with open_ledger(path) as ledger:
        for number in range(3):
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
        ledger.verify()
        log = path.with_name(path.name + "-wal")
        log.write_bytes(log.read_bytes().replace(b'"noise_multiplier":50.0', b'"noise_multiplier":90.0'))
        with pytest.raises(LedgerTamperedError):
            ledger.verify()


def test_verify_notices_a_head_that_changed_while_the_ledger_was_open(path: Path) -> None:
    with open_ledger(path) as ledger:
        for number in range(3):
            ledger.reserve(CHEAP, session=SESSION, round=number, attempt=0)
        with path.with_name(path.name + ".head").open("r+b") as head:
            head.write(bytes(144))
        with pytest.raises(LedgerTamperedError):
            ledger.verify()


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "refund", "time": "now"},
        {"kind": "open", "time": "now"},
        {"kind": "commit", "reservation": "00", "time": "now"},
        {"kind": "reserve", "time": "now"},
        {"kind": "reserve", "event": {"kind": "laplace", "scale": 1.0}, "session": "00", "round": 9, "attempt": 0, "time": "now"},
        {"kind": "reserve", "event": {"kind": "gaussian release", "noise_multiplier": -1.0, "count": 1}, "session": "00", "round": 9}
        | {"attempt": 0, "time": "now"},
        {"kind": "reserve", "event": encode_event(CHEAP), "session": SESSION.hex(), "round": 0, "attempt": 0, "time": "now"},
    ],
)
def test_a_row_that_this_version_does_not_understand_is_refused_and_is_not_called_tampering(path: Path, row: dict[str, object]) -> None:
    fill(path, rounds=1)
    chain = Chain(path, create=False)
    chain.append(row)
    chain.close()
    with pytest.raises(LedgerError, match="does not understand everything") as refusal:
        open_ledger(path)
    assert not isinstance(refusal.value, LedgerTamperedError)
    with pytest.raises(LedgerError):  # and it is not left locked
        Ledger.reopen(path)


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_ledger(tmp_path / "missing" / "ledger")


def test_ten_thousand_events_open_verified_in_less_than_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger(path) as ledger:
        ledger._chain._connection.execute("PRAGMA synchronous=OFF")  # makes this test quick
        monkeypatch.setattr(os, "fsync", lambda _: None)
        encoded = encode_event(GaussianRelease(noise_multiplier=1000.0))
        for number in range(10_000):
            place = {"session": SESSION.hex(), "round": number, "attempt": 0}
            ledger._chain.append({"kind": "reserve", "event": encoded, **place, "time": "2026-01-01T00:00:00+00:00"})
        monkeypatch.undo()
    copy = path.with_name("copy.ledger")
    shutil.copy(path, copy)
    shutil.copy(path.with_name(path.name + ".head"), copy.with_name(copy.name + ".head"))
    start = time.process_time()
    with open_ledger(copy) as ledger:
        assert time.process_time() - start < 1.5  # 0.35 s where this was written
        assert len(ledger.rows()) == 10_001
        assert len(ledger.events()) == 10_000
        start = time.process_time()
        ledger.reserve(CHEAP, session=SESSION, round=10_000, attempt=0)
        assert time.process_time() - start < 0.1  # the charges are kept added up

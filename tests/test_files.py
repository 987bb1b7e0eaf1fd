import gc
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from privfed import files
from privfed.errors import FolderInUseError


@pytest.fixture
def open_umask():
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.mark.usefixtures("open_umask")
def test_a_new_file_and_a_replaced_one_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    files.create(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files.replace(path, b"two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files.read_private(path, most=10) == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_a_file_is_never_created_over_another_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        files.create(path, b"other")
    assert path.read_bytes() == b"mine"


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    files.create(tmp_path / "key", bytes(1000))
    assert files.read_private(tmp_path / "key", most=7) == bytes(7)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_secret_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    files.create(tmp_path / "key", b"secret")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        files.read_private(tmp_path / "key", most=10)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_public_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    files.create(tmp_path / "roster", b"public")
    (tmp_path / "roster").chmod(0o644)
    assert files.read_pinned(tmp_path / "roster", most=10) == b"public"
    (tmp_path / "roster").chmod(mode)
    with pytest.raises(PermissionError, match="chmod 644"):
        files.read_pinned(tmp_path / "roster", most=10)


def test_a_named_pipe_or_a_folder_in_place_of_a_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="expected pipe to be a file"):
        files.read_private(tmp_path / "pipe", most=10)
    with pytest.raises(IsADirectoryError):
        files.read_private(tmp_path, most=10)


def test_a_replaced_link_takes_the_content_away_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    files.create(tmp_path / "disk" / "key", b"old")
    (tmp_path / "key").symlink_to(tmp_path / "disk" / "key")
    files.replace(tmp_path / "key", b"new")
    assert (tmp_path / "disk" / "key").read_bytes() == b"new"
    assert (tmp_path / "key").is_symlink()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_while_a_file_is_replaced_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    files.create(tmp_path / "key", b"old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        files.replace(tmp_path / "key", b"new")
    monkeypatch.undo()
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"key": b"old"}


def test_files_of_a_folder_are_replaced_together_and_others_stay(tmp_path: Path) -> None:
    for name in ("history", "notes"):
        files.create(tmp_path / name, b"old")
    with files.replacements(tmp_path) as fresh:
        files.create(fresh / "history", b"new")
        files.create(fresh / "model", b"new")
        assert (tmp_path / "history").read_bytes() == b"old"
        assert [path.name for path in tmp_path.iterdir() if not files.is_bookkeeping(path)] in (["history", "notes"], ["notes", "history"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"history": b"new", "notes": b"old", "model": b"new"}


def test_what_fails_while_a_folder_is_filled_leaves_the_old_files_and_nothing_else(tmp_path: Path) -> None:
    files.create(tmp_path / "history", b"old")

    def fill() -> None:
        with files.replacements(tmp_path) as fresh:
            files.create(fresh / "history", b"new")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fill()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"history": b"old"}


def test_file_and_folder_are_synchronised_before_a_replacement_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.create(tmp_path / "key", b"old")
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def note_replace(source: str, target: Path) -> None:
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    files.replace(tmp_path / "key", b"new")
    assert done == ["file", "replace", "folder"]


def test_a_lock_keeps_others_waiting(tmp_path: Path) -> None:
    entered, left = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        with files.locked(tmp_path / "key"):
            entered.set()
            left.wait(0.2)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(5)
    with files.locked(tmp_path / "key"):  # another file description, as another process has
        order.append("second")
    left.set()
    thread.join()
    assert order == ["first", "second"]


def test_a_folder_is_held_by_one_object_until_it_is_let_go(tmp_path: Path) -> None:
    first = files.FolderLock(tmp_path)
    with pytest.raises(FolderInUseError, match="in use by another process, or by another object"):
        files.FolderLock(tmp_path)
    first.check()
    first.release()
    first.release()
    with pytest.raises(FolderInUseError, match="not held here any more"):
        first.check()
    second = files.FolderLock(tmp_path)
    second.check()


def test_a_folder_is_let_go_when_its_holder_is_gone(tmp_path: Path) -> None:
    held = files.FolderLock(tmp_path)
    del held
    gc.collect()
    files.FolderLock(tmp_path).check()


def test_a_forked_child_neither_works_in_the_folder_nor_keeps_or_lets_it_go(tmp_path: Path) -> None:
    lock = files.FolderLock(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            lock.check()
            answer = b"worked"
        except FolderInUseError:
            answer = b"refused"
        lock.release()
        os.write(writing, answer)
        time.sleep(30)
        os._exit(0)
    try:
        assert os.read(reading, 10) == b"refused"
        lock.check()
        with pytest.raises(FolderInUseError):
            files.FolderLock(tmp_path)
        lock.release()
        files.FolderLock(tmp_path).check()  # though the child still has the descriptor
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_new_folders_are_private_and_their_names_are_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}")), sync(descriptor)))
    files.make_folder(tmp_path / "a" / "b")
    assert synchronised == [str(tmp_path), str(tmp_path / "a")]
    files.make_folder(tmp_path / "a" / "b")
    assert len(synchronised) == 2
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_new_file_that_could_not_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    for step in ("fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(OSError, match="the disk is gone"):
                files.create(tmp_path / "key", b"secret")
        assert list(tmp_path.iterdir()) == []


def test_who_holds_a_folder_notices_that_its_lock_was_taken_away(tmp_path: Path) -> None:
    lock = files.FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(FolderInUseError, match="not held here any more"):
        lock.check()
    files.FolderLock(tmp_path)
    with pytest.raises(FolderInUseError):
        lock.check()

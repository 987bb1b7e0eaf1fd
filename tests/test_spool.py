import os
import stat
from pathlib import Path

import pytest

from privfed.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "deep" / "spool")


def test_what_was_put_is_there_for_a_new_process(spool: Spool, tmp_path: Path) -> None:
    spool.put("upload-a", b"bytes")
    again = Spool(tmp_path / "deep" / "spool")
    assert again.has("upload-a")
    assert again.get("upload-a") == b"bytes"
    assert not again.has("upload-b")
    with pytest.raises(FileNotFoundError):
        again.get("upload-b")


def test_files_and_directory_are_for_their_owner_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        spool = Spool(tmp_path / "spool")
        spool.put("a", b"bytes")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    assert stat.S_IMODE(spool.path("a").stat().st_mode) == 0o600


def test_the_same_bytes_again_are_fine_and_others_change_nothing(spool: Spool) -> None:
    spool.put("a", b"bytes")
    spool.put("a", b"bytes")
    with pytest.raises(FileExistsError):
        spool.put("a", b"other")
    assert spool.get("a") == b"bytes"


def test_a_crash_before_the_file_is_whole_leaves_no_file(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            spool.put("a", b"bytes")
    assert not spool.has("a")
    assert spool.names("") == ()
    spool.put("a", b"bytes")
    assert spool.get("a") == b"bytes"


def test_file_and_directory_are_synchronised_before_put_returns(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[tuple[bool, bool]] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synchronised.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), spool.has("a")))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    spool.put("a", b"bytes")
    assert synchronised == [(False, False), (True, True)]  # the content before it has its name, the name after


def test_names_are_listed_by_prefix_and_sorted(spool: Spool) -> None:
    for name in ("upload-b", "upload-a", "setup-c"):
        spool.put(name, b"")
    assert spool.names("upload-") == ("a", "b")

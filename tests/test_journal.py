import itertools
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.agreement import RoundContext
from privfed.errors import AlreadyOpenedError, OpeningRefusedError
from privfed.journal import Journal

DIGEST, OTHER_DIGEST = b"d" * 32, b"D" * 32
AGGREGATE, OTHER_AGGREGATE = b"a" * 32, b"A" * 32


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "bank.journal")


@pytest.fixture
def context(parties: Any) -> RoundContext:
    return RoundContext(agreement=parties.agreement, round=3)


def test_a_digest_may_be_approved_again_and_another_not(journal: Journal, context: RoundContext) -> None:
    journal.approve(context, DIGEST)
    journal.approve(context, DIGEST)
    with pytest.raises(AlreadyOpenedError, match="round 3 is promised to another digest, of attempt 0; nothing was approved"):
        journal.approve(context, OTHER_DIGEST)
    journal.approve(context, DIGEST)


@pytest.mark.parametrize("attempts", [(0, 1), (1, 0)])
def test_one_promise_holds_for_all_attempts_of_a_round(journal: Journal, context: RoundContext, attempts: tuple[int, int]) -> None:
    first, second = (replace(context, attempt=attempt) for attempt in attempts)
    journal.approve(first, DIGEST)
    with pytest.raises(AlreadyOpenedError, match=f"of attempt {attempts[0]}"):
        journal.approve(second, OTHER_DIGEST)
    with pytest.raises(AlreadyOpenedError):
        journal.begin(second, OTHER_DIGEST, aggregate=AGGREGATE)


def test_another_round_or_session_is_free(journal: Journal, context: RoundContext) -> None:
    journal.approve(context, DIGEST)
    journal.approve(replace(context, round=4), OTHER_DIGEST)
    journal.approve(replace(context, agreement=replace(context.agreement, session=bytes(16))), OTHER_DIGEST)


def test_an_opening_may_begin_again_with_the_same_aggregate_until_it_is_finished(journal: Journal, context: RoundContext) -> None:
    journal.approve(context, DIGEST)
    journal.begin(context, DIGEST, aggregate=AGGREGATE)
    journal.begin(context, DIGEST, aggregate=AGGREGATE)
    journal.finish(context, aggregate=AGGREGATE)
    for aggregate in (AGGREGATE, OTHER_AGGREGATE):
        with pytest.raises(AlreadyOpenedError, match="already opened; nothing was decrypted"):
            journal.begin(context, DIGEST, aggregate=aggregate)


def test_another_aggregate_never_begins(journal: Journal, context: RoundContext) -> None:
    journal.begin(context, DIGEST, aggregate=AGGREGATE)
    with pytest.raises(AlreadyOpenedError, match="with another aggregate; nothing was decrypted"):
        journal.begin(context, DIGEST, aggregate=OTHER_AGGREGATE)
    journal.begin(context, DIGEST, aggregate=AGGREGATE)


def test_an_opening_promises_the_round_to_its_digest(journal: Journal, context: RoundContext) -> None:
    journal.begin(context, DIGEST, aggregate=AGGREGATE)
    with pytest.raises(AlreadyOpenedError):
        journal.approve(context, OTHER_DIGEST)
    with pytest.raises(AlreadyOpenedError):
        journal.approve(replace(context, attempt=1), OTHER_DIGEST)


def test_what_was_not_begun_or_is_finished_cannot_be_finished(journal: Journal, context: RoundContext) -> None:
    with pytest.raises(OpeningRefusedError, match="no opening of round 3 is under way"):
        journal.finish(context, aggregate=AGGREGATE)
    journal.approve(context, DIGEST)
    with pytest.raises(OpeningRefusedError):
        journal.finish(context, aggregate=AGGREGATE)
    journal.begin(context, DIGEST, aggregate=AGGREGATE)
    with pytest.raises(OpeningRefusedError):
        journal.finish(context, aggregate=OTHER_AGGREGATE)
    journal.finish(context, aggregate=AGGREGATE)
    with pytest.raises(OpeningRefusedError):
        journal.finish(context, aggregate=AGGREGATE)


def test_a_new_process_remembers(tmp_path: Path, context: RoundContext) -> None:
    Journal(tmp_path / "bank.journal").begin(context, DIGEST, aggregate=AGGREGATE)
    again = Journal(tmp_path / "bank.journal")
    with pytest.raises(AlreadyOpenedError):
        again.approve(context, OTHER_DIGEST)
    again.finish(context, aggregate=AGGREGATE)
    with pytest.raises(AlreadyOpenedError):
        Journal(tmp_path / "bank.journal").begin(context, DIGEST, aggregate=AGGREGATE)


def test_what_was_recorded_survives_a_killed_process(tmp_path: Path) -> None:
    # The row is written by a process that is killed right after `_claim` returned from its transaction, with no chance to clean up.
    script = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from privfed.journal import Journal
context = SimpleNamespace(agreement=SimpleNamespace(session=b"s" * 16), round=3, attempt=0)
Journal(Path(sys.argv[1])).begin(context, b"d" * 32, aggregate=b"a" * 32)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "bank.journal"
    root = Path(__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", script, str(path)], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    rows = sqlite3.connect(path).execute("SELECT session, round, attempt, digest, aggregate, finished FROM rounds").fetchall()
    assert rows == [(b"s" * 16, 3, 0, DIGEST, AGGREGATE, 0)]


def test_of_two_digests_that_race_one_wins(tmp_path: Path, context: RoundContext) -> None:
    path = tmp_path / "bank.journal"
    Journal(path)
    for number in range(5):
        barrier = threading.Barrier(4)
        won: list[bytes] = []

        def run(digest: bytes, number: int = number, barrier: threading.Barrier = barrier, won: list[bytes] = won) -> None:
            barrier.wait()
            try:
                Journal(path).approve(replace(context, round=number), digest)
            except AlreadyOpenedError:
                return
            won.append(digest)

        threads = [threading.Thread(target=run, args=(bytes([index]) * 32,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


def test_the_file_is_for_its_owner_and_holds_digests_only(tmp_path: Path, context: RoundContext) -> None:
    umask = os.umask(0)
    try:
        Journal(tmp_path / "bank.journal").begin(context, DIGEST, aggregate=AGGREGATE)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "bank.journal").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "bank.journal"
    Journal(path)
    path.chmod(mode)
    with pytest.raises(PermissionError, match="writable by its owner only"):
        Journal(path)


NAMES = ("a", "b", "c", "d")
PROPOSALS = st.lists(st.tuples(st.sets(st.sampled_from(NAMES), min_size=2), st.integers(0, 3)), min_size=2, max_size=4)


@settings(deadline=None, max_examples=15)
@given(PROPOSALS, st.randoms(use_true_random=False))
def test_two_digests_of_one_round_that_share_a_participant_are_never_both_openable(
    people: Any, proposals: list[tuple[set[str], int]], random: Any
) -> None:
    """Whatever digests a server announces, in whatever attempts and order, and to whomever it shows them first."""
    with tempfile.TemporaryDirectory() as directory:
        agreement = people.meet(Path(directory)).agreement
        journals = {name: Journal(Path(directory) / name) for name in NAMES}
        shown = [(index, name) for index, (participants, _) in enumerate(proposals) for name in participants]
        random.shuffle(shown)
        approvals: dict[int, set[str]] = {index: set() for index in range(len(proposals))}
        for index, name in shown:
            try:
                journals[name].approve(RoundContext(agreement=agreement, round=0, attempt=proposals[index][1]), bytes([index]) * 32)
            except AlreadyOpenedError:
                continue
            approvals[index].add(name)
    openable = [participants for index, (participants, _) in enumerate(proposals) if approvals[index] == participants]
    assert all(not first & second for first, second in itertools.combinations(openable, 2))
    assert all(len([index for index in approvals if name in approvals[index]]) <= 1 for name in NAMES)


def test_settling_finishes_an_opening_that_began_and_nothing_else(journal: Journal, context: RoundContext) -> None:
    journal.approve(context, DIGEST)
    journal.settle(context)
    journal.begin(context, DIGEST, aggregate=AGGREGATE)  # the promise alone was not finished
    journal.settle(context)
    with pytest.raises(AlreadyOpenedError):
        journal.begin(context, DIGEST, aggregate=AGGREGATE)


def test_the_journal_says_which_rounds_were_begun_and_finished(journal: Journal, context: RoundContext) -> None:
    journal.approve(replace(context, round=1), DIGEST)
    for number in (5, 3):
        journal.begin(replace(context, round=number), DIGEST, aggregate=AGGREGATE)
    journal.finish(replace(context, round=5), aggregate=AGGREGATE)
    assert list(journal.opened(context.agreement.session).items()) == [(3, False), (5, True)]
    assert journal.opened(bytes(16)) == {}
    assert journal.promised(replace(context, round=1))
    assert not journal.promised(replace(context, round=1, attempt=1))
    assert not journal.promised(replace(context, round=2))


def test_an_approval_is_kept_for_its_own_digest_and_attempt(journal: Journal, context: RoundContext) -> None:
    assert journal.approval(context, DIGEST) is None
    journal.approve(context, DIGEST)
    assert journal.approval(context, DIGEST) is None
    journal.keep_approval(context, b"signed")
    assert journal.approval(context, DIGEST) == b"signed"
    assert journal.approval(context, OTHER_DIGEST) is None
    assert journal.approval(replace(context, attempt=1), DIGEST) is None

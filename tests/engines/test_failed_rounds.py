"""A run in which rounds failed says so to whoever started it: which rounds, and why."""

from pathlib import Path

import pytest

from privfed.engines.coordinator import CoordinatedRun, coordinate
from privfed.engines.server_log import ServerLog
from privfed.errors import CohortError
from privfed.phases import Step
from privfed.round_record import FailedRound
from tests.engines.deployed import SERVER, deploy
from tests.engines.exchanges import LocalExchange, dropping


def test_a_run_in_which_rounds_failed_says_which_and_why_and_one_that_holds_its_rounds_is_in_order(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    server = deployed.folder(SERVER)
    with LocalExchange(deployed, fault=dropping(("bank_1", Step.APPROVE, 1), ("bank_2", Step.SETUP, 2))) as exchange:
        coordinate(server, exchange, rounds=1).check_held()
        run = coordinate(server, exchange, rounds=4)
        with pytest.raises(CohortError, match=r"2 of 4 rounds were not held.*: round 1: .*; round 2: .*; what was held stays") as raised:
            run.check_held()
        assert all(failed.reason in str(raised.value) for failed in run.failed)
        # Asked again for the same rounds, nothing is done, and that is not called a success.
        with pytest.raises(CohortError, match="2 of 4 rounds were not held"):
            coordinate(server, exchange, rounds=4).check_held()
        coordinate(server, exchange, rounds=5).check_held()


def test_a_run_without_a_round_that_was_held_says_why_each_was_not(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    with (
        LocalExchange(deployed, names=("bank_0", "bank_1")) as exchange,
        pytest.raises(CohortError, match=r"none of 2 rounds could be held: round 0: .*; round 1: "),
    ):
        coordinate(deployed.folder(SERVER), exchange, rounds=2)


def test_of_many_failed_rounds_the_last_ones_are_named_and_the_others_counted() -> None:
    failed = tuple(FailedRound(round=number, silent={}, reason=f"reason {number}") for number in range(12))
    with pytest.raises(CohortError, match=r"12 of 12 rounds .*: 7 earlier ones; round 7: reason 7; .*round 11: reason 11; what") as raised:
        CoordinatedRun(rounds=(), failed=failed, first=0).check_held()
    assert "reason 6;" not in str(raised.value)


def test_a_client_whose_approvals_did_not_come_rests_for_at_most_7_rounds_however_often_that_was(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "rounds.jsonl", used=False)
    number, rests = 0, []
    for _ in range(6):
        log.add_stalled(number, ["bank_1"])
        rests.append(next(after for after in range(1, 1000) if not log.resting(number + after)) - 1)
        number += rests[-1] + 1
    assert rests == [1, 3, 7, 7, 7, 7]
    again = ServerLog(tmp_path / "rounds.jsonl", used=False)  # also after a restart
    assert [again.resting(number - 8 + after) for after in (0, 1, 7, 8)] == [set(), {"bank_1"}, {"bank_1"}, set()]

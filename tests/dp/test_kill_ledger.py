import shutil
from pathlib import Path

import pytest

from privfed.dp.ledger import Ledger
from privfed.errors import LedgerTamperedError
from tests.dp import kill_ledger


def test_ten_kills_at_random_moments_lose_no_charge() -> None:
    found = kill_ledger.main(["--quick"])
    assert found["kills"] == 10
    assert found["charges"] > kill_ledger.UNDISTURBED
    assert found["charged_but_not_said"] >= 0


@pytest.mark.nightly
def test_two_hundred_kills_at_random_moments_lose_no_charge() -> None:
    assert kill_ledger.main(["--kills", "200"])["kills"] == 200


def test_the_check_notices_a_charge_that_was_forgotten_and_an_epsilon_that_fell(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.open(path, population="bank_a", budget=kill_ledger.BUDGET) as ledger:
        ledger.reserve(kill_ledger.EVENT, session=kill_ledger.SESSION, round=0, attempt=0)
        spent = ledger.spent()
    assert kill_ledger.check(path, ["reserved 0"], spent) == (1, spent)
    for said, before in ((["reserved 0", "reserved 1"], 0.0), (["committed 0"], 0.0), ([], 2 * spent)):
        with pytest.raises(AssertionError, match="forgotten|fell"):
            kill_ledger.check(path, said, before)
    older = tmp_path / "older"
    shutil.copy(path, older)
    with Ledger.open(path, population="bank_a", budget=kill_ledger.BUDGET) as ledger:
        for number in range(1, 4):
            ledger.reserve(kill_ledger.EVENT, session=kill_ledger.SESSION, round=number, attempt=0)
    shutil.copy(older, path)
    with pytest.raises(LedgerTamperedError):
        kill_ledger.check(path, [], 0.0)

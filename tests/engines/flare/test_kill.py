"""Processes that are killed while they work, and started again."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from privfed.deploy.plan import Plan
from privfed.engines.deployments import write_deployment
from privfed.files import FolderLock
from tests.engines.flare.loopback import Loopback, free_port
from tests.engines.flare.plans import PAYSIM_SITE, PLAN, write_plan
from tests.engines.flare.runs import model_at, records, reference, spent

pytestmark = pytest.mark.nightly

BANKS = ("bank_a", "bank_b", "bank_c")
COMPLETED = "FINISHED:COMPLETED"
SECONDS = 400  # 100 s measured for the longest, on two busy cores


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Loopback]:
    plan = f"min_clients = 2\nmax_share = 0.9\n{PLAN}"
    write_deployment(Plan.load(write_plan(tmp_path, port=free_port(), site=PAYSIM_SITE, plan=plan)), tmp_path / "out")
    with Loopback(tmp_path / "out") as loopback:
        loopback.start()
        yield loopback


def check_models(running: Loopback, expected: np.ndarray, *, rounds: int) -> None:
    for name in BANKS:
        values, opened = model_at(running.folder / name)
        assert opened == list(range(rounds)), name
        assert np.array_equal(values, expected), name


def test_a_bank_that_was_killed_while_it_trained_catches_up_exactly(running: Loopback, tmp_path: Path) -> None:
    bank = running.folder / "bank_c"
    (bank / "hold-1").touch()
    submitting = running.submitting(
        running.job("first", rounds=3, training=30)
    )  # that it is gone, FLARE says long before the 900 s for its next answer are over
    running.wait_until((bank / "holding").exists, "bank_c to train in round 1", seconds=SECONDS)
    running.kill("bank_c")
    assert submitting.communicate(timeout=SECONDS)[0].splitlines()[-1] == COMPLETED
    assert model_at(bank)[1] == [0]
    (bank / "hold-1").unlink()
    running.start("bank_c")
    assert running.submit(running.job("second", rounds=4), seconds=SECONDS) == COMPLETED
    expected, epsilon = reference(tmp_path / "alone", running.folder, rounds=4, away={1: "bank_c", 2: "bank_c"})
    check_models(running, expected, rounds=4)
    assert spent(running.folder / "bank_a") == (epsilon["bank_a"], 4)
    assert spent(bank)[1] == 3  # rounds 0 and 3, and the one in which it was killed: charged, though nothing of it was sent


def test_a_server_that_was_killed_within_a_round_goes_on_in_a_new_job(running: Loopback, tmp_path: Path) -> None:
    bank = running.folder / "bank_a"
    (bank / "hold-1").touch()
    submitting = running.submitting(running.job("first", rounds=3))
    running.wait_until((bank / "holding").exists, "bank_a to train in round 1", seconds=SECONDS)
    running.kill("server")
    submitting.kill()
    submitting.wait()
    (bank / "hold-1").unlink()
    running.start("server")
    assert running.submit(running.job("second", rounds=3), seconds=SECONDS) == COMPLETED
    expected, epsilon = reference(tmp_path / "alone", running.folder, rounds=3)
    check_models(running, expected, rounds=3)
    for name in BANKS:
        assert spent(running.folder / name) == (epsilon[name], 3)


def test_a_server_that_was_killed_between_rounds_goes_on_in_a_new_job(running: Loopback, tmp_path: Path) -> None:
    assert running.submit(running.job("first", rounds=2), seconds=SECONDS) == COMPLETED
    running.kill("server")
    running.start("server")
    assert running.submit(running.job("second", rounds=3), seconds=SECONDS) == COMPLETED
    expected, epsilon = reference(tmp_path / "alone", running.folder, rounds=3)
    check_models(running, expected, rounds=3)
    assert {name: spent(running.folder / name) for name in BANKS} == {name: (epsilon[name], 3) for name in BANKS}
    assert len([entry for entry in records(running.folder / "server") if "held" in entry]) == 3


def test_a_job_that_is_refused_at_its_start_ends_with_the_reason_and_the_next_one_is_held(running: Loopback) -> None:
    lock = FolderLock(running.folder / "server")
    try:
        assert "is in use" in running.failure(running.job("in_use", rounds=1), seconds=SECONDS)
    finally:
        lock.release()
    running.failure(running.job("none", rounds=0), seconds=SECONDS)
    assert running.submit(running.job("right", rounds=1), seconds=SECONDS) == COMPLETED
    assert all(model_at(running.folder / name)[1] == [0] for name in BANKS)

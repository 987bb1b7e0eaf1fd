"""A provisioned server and three banks, in processes of their own, over mutual TLS on this machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from typer.testing import CliRunner

from privfed.cli import app
from tests.engines.canary import KEEPING, check_server_is_blind, commands
from tests.engines.flare.loopback import Loopback, free_port
from tests.engines.flare.plans import PAYSIM_SITE, write_plan
from tests.engines.flare.runs import model_at, reference, spent

BANKS = ("bank_a", "bank_b", "bank_c")
SECONDS = 200


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Loopback, "subprocess.Popen[str]"]]:
    """A run of three rounds from `privfed deploy init` on, of which two were held; in the third, bank_c still trains."""
    folder = tmp_path_factory.mktemp("flare")
    plan = write_plan(folder, port=free_port(), site=f"{PAYSIM_SITE}{KEEPING}")
    made = CliRunner().invoke(app, ["deploy", "init", str(plan), "--out", str(folder / "out")])
    assert made.exit_code == 0, made.output
    with Loopback(folder / "out") as loopback:
        bank = folder / "out" / "bank_c"
        (bank / "hold-2").touch()
        loopback.start()
        operator = loopback.submitting()
        loopback.wait_until((bank / "holding").exists, "bank_c to train in the third round", seconds=SECONDS)
        yield loopback, operator
        operator.kill()


@pytest.fixture(scope="module")
def finished(held: tuple[Loopback, "subprocess.Popen[str]"]) -> Loopback:
    """The same run after its end."""
    loopback, operator = held
    (loopback.folder / "bank_c" / "hold-2").unlink(missing_ok=True)
    assert operator.communicate(timeout=SECONDS)[0].strip().splitlines()[-1] == "FINISHED:COMPLETED", loopback.output("server")
    return loopback


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_an_update_in_the_clear_is_nowhere_in_the_memory_or_the_files_of_the_server(held: tuple[Loopback, object]) -> None:
    loopback, _ = held
    server, bank = (loopback.processes[name].pid for name in ("server", "bank_a"))
    assert any("runner_process" in command for command in commands(server))
    check_server_is_blind(
        server=server, servers_folder=loopback.folder / "server", bank=bank, banks_folder=loopback.folder / "bank_a", rounds=(0, 1)
    )


def test_three_rounds_end_with_the_weights_of_the_same_run_in_one_process_to_the_last_bit(finished: Loopback, tmp_path: Path) -> None:
    expected, epsilon = reference(tmp_path, finished.folder, rounds=3)
    for name in BANKS:
        values, rounds = model_at(finished.folder / name)
        assert rounds == [0, 1, 2]
        assert np.array_equal(values, expected), name
        assert spent(finished.folder / name) == (epsilon[name], 3)
    assert not np.array_equal(reference(tmp_path / "two", finished.folder, rounds=2)[0], expected)


def test_a_running_deployment_has_nothing_wrong(finished: Loopback) -> None:
    for name in ("server", *BANKS):
        result = CliRunner().invoke(app, ["deploy", "check", str(finished.folder / name)])
        assert (result.exit_code, result.stdout.startswith("Nothing is wrong")) == (0, True), result.stdout


def test_a_job_that_is_submitted_again_when_all_rounds_are_held_ends_at_once_and_leaves_the_banks_free(finished: Loopback) -> None:
    """A bank that still waited for that job would not be in the next one."""
    assert finished.submit(seconds=SECONDS) == "FINISHED:COMPLETED", finished.output("server")
    assert [model_at(finished.folder / name)[1] for name in BANKS] == 3 * [[0, 1, 2]]
    for name in BANKS:
        pid = finished.processes[name].pid
        finished.wait_until(lambda pid=pid: len(commands(pid)) == 1, f"the job at {name} to end", seconds=SECONDS)

"""A provisioned server and three banks, in processes of their own, over mutual TLS on this machine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from typer.testing import CliRunner

from privfed.cli import app
from tests.engines.flare.loopback import Loopback, free_port
from tests.engines.flare.plans import PAYSIM_SITE, write_plan
from tests.engines.flare.runs import model_at, reference, spent

BANKS = ("bank_a", "bank_b", "bank_c")
SECONDS = 200


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """A run of three rounds, from `privfed deploy init` to the end of the job."""
    folder = tmp_path_factory.mktemp("flare")
    made = CliRunner().invoke(
        app, ["deploy", "init", str(write_plan(folder, port=free_port(), site=PAYSIM_SITE)), "--out", str(folder / "out")]
    )
    assert made.exit_code == 0, made.output
    with Loopback(folder / "out") as loopback:
        loopback.start()
        assert loopback.submit(seconds=SECONDS) == "FINISHED:COMPLETED", loopback.output("server")
        yield loopback


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

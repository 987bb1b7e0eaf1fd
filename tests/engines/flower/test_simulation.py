"""The parties of a deployment in the workers of Flower's simulation engine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")
if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install privfed[simulation]", allow_module_level=True)

from tests.engines.deployed import deploy, simulated

pytestmark = pytest.mark.nightly

PROGRAM = """
import sys
from pathlib import Path
from privfed.engines.flower.simulation import simulate
run = simulate(Path(sys.argv[1]), rounds=int(sys.argv[2]))
print("HELD", len(run.rounds), "FAILED", len(run.failed))
"""


def run(folder: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": ":".join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])}
    # A process of its own: ray leaves workers and signal handlers behind in the one that it was started in.
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(rounds)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_simulation_on_flower_ends_with_the_integers_of_the_local_engine_also_in_two_parts(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    for rounds in (1, 2):
        done = run(deployed.root, rounds)
        assert f"HELD {rounds} FAILED 0" in done.stdout, done.stderr[-3000:]
    history = simulated(deployed, tmp_path / "local", rounds=2)
    assert not np.array_equal(history.model.values, history.initial.values)
    for name in deployed.names:
        assert np.array_equal(deployed.state(name).values.values, history.model.values)


def test_a_simulation_whose_rounds_cannot_be_held_fails(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    (deployed.folder("bank_0") / "shared.key").unlink()
    done = run(deployed.root, 1)
    assert done.returncode != 0
    assert "CohortError" in done.stderr

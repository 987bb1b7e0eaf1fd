"""With --json a benchmark prints JSON on standard output, and no library prints there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.encrypted_gram import tenseal_dot

ROOT = Path(__file__).parents[2]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


COMMANDS = {name_of(path): path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
WITH_JSON = [name for name, text in COMMANDS.items() if "typer.run(" in text and re.search(r"as_json: (AsJson|Annotated)", text)]


def test_what_tenseal_has_to_say_of_long_vectors_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    tenseal_dot(clients=2, size=5000)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "The input does not fit in a single ciphertext" in printed.err


def test_every_benchmark_with_json_is_among_those_that_are_run() -> None:
    offering = {name for name, text in COMMANDS.items() if '"--json"' in text} - {"benchmarks.experiment"}  # whose option others take
    assert offering <= set(WITH_JSON)
    assert {"benchmarks.contribution", "benchmarks.he", "benchmarks.round", "benchmarks.paysim", "benchmarks.attacks"} <= set(WITH_JSON)


@pytest.mark.nightly
@pytest.mark.parametrize("module", WITH_JSON)
def test_a_quick_run_prints_nothing_but_json(module: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    try:
        json.loads(done.stdout)
    except json.JSONDecodeError:  # an object per line, then
        assert [json.loads(line) for line in done.stdout.splitlines()]

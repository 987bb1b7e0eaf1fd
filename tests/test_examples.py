import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    result = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_every_example_is_tested_and_short() -> None:
    scripts = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert scripts == ["auditor", "benchmarker", "integrator"]
    for name in scripts:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40


def test_the_integrator_trains_within_its_budget_and_beats_guessing() -> None:
    output = run("integrator")
    quality = json.loads(re.search(r"PR-AUC per round: (\[.*\]) \(guessing: 0\.020\)", output).group(1))
    assert len(quality) == 6
    assert quality[-1] > 2 * 0.02  # a constant score has 0.02
    spent = [float(value) for value in re.findall(r"'bank_.': ([\d.]+)", output)]
    assert len(spent) == 3
    assert all(3.9 < value <= 4.0 for value in spent)
    sent = float(re.search(r"sent: +([0-9.]+) bytes per parameter", output)[1])
    one_ciphertext = (4096 * 7 + 64) / 3873  # for 3873 parameters; signed headers and sealed tags are the rest
    assert one_ciphertext < sent < 1.06 * one_ciphertext


def test_the_auditor_finds_the_epsilon_that_was_claimed() -> None:
    output = run("auditor")
    assert "ledger verified: 10 charges" in output
    claimed, recomputed, at, renyi = (float(value) for value in re.findall(r"\b\d\.\d{4}\b", output))
    assert recomputed == claimed
    assert at == pytest.approx(claimed, rel=0.002)  # privfed's stated accuracy; dp-accounting with its own grid
    assert claimed < renyi < 1.25 * claimed  # Renyi accounting is a looser upper bound


def test_the_benchmarker_opens_the_same_model_and_counts_the_bytes() -> None:
    output = run("benchmarker")
    assert "same model, bit for bit: True" in output
    plain, up, parameters = (
        re.search(pattern, output).group(1) for pattern in (r"Plaintext: ([\d.]+) s", r"([1-9][\d.]+) up", r"parameters: (\d+)")
    )
    assert float(plain) > 0
    chunks = -(-int(parameters) // 4096)
    assert float(up) == pytest.approx(chunks * (4096 * 7 + 64) / int(parameters), rel=0.01)

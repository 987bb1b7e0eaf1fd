import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest

from privfed.data.transactions import generate_transactions

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    return python(str(EXAMPLES / f"{name}.py"), *arguments)


def python(*arguments: str, folder: Path | None = None) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_every_example_is_tested_and_short() -> None:
    scripts = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert scripts == ["auditor", "benchmarker", "integrator", "scorer"]
    for name in scripts:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40


def test_the_integrator_trains_within_its_budget_and_beats_guessing() -> None:
    output = run("integrator")
    quality = json.loads(re.search(r"PR-AUC per round: (\[.*\]) \(guessing: 0\.020\)", output).group(1))
    assert len(quality) == 10
    assert quality[-1] > 10 * 0.02  # a constant score has 0.02
    spent = [float(value) for value in re.findall(r"'bank_.': ([\d.]+)", output)]
    assert len(spent) == 3
    assert all(3.9 < value <= 4.0 for value in spent)
    found = int(re.search(r"frauds among the 20 most suspicious: (\d+)", output)[1])
    assert found > 5  # at random, one in fifty is a fraud: more than 5 of 20 have a probability below 1e-5
    sent = float(re.search(r"sent: +([0-9.]+) bytes per parameter", output)[1])
    update = 7 + 64 / 3873  # for 3873 parameters; signed headers, sealed tags and heads of ledgers are the rest
    assert update < sent < 1.08 * update


def test_the_recipe_in_the_readme_runs_on_the_banks_of_the_integrator_and_learns(tmp_path: Path) -> None:
    recipe = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)[1]
    integrator = (EXAMPLES / "integrator.py").read_text()
    data = integrator[: integrator.index("budget =")] + "banks = dict(zip(declared, partition.split(train), strict=True))\n"
    scored = "print(history.pr_auc[-1], len(model(torch.tensor(test.features))) == len(test))\n"
    (tmp_path / "recipe.py").write_text(data + recipe + scored)
    quality, every = python(str(tmp_path / "recipe.py"), folder=tmp_path).split()
    assert float(quality) > 10 * 0.02
    assert every == "True"
    assert {path.name for path in tmp_path.glob("*.ledger")} == {"bank_a.ledger", "bank_b.ledger", "bank_c.ledger"}


@pytest.mark.parametrize("features", ["pre", "nobal"])
def test_the_scorer_scores_with_the_model_that_simulate_saved(tmp_path: Path, features: str) -> None:
    log, out = tmp_path / "log.csv", tmp_path / "run1"
    transactions = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(5))
    transactions.to_csv(log, index=False)
    python(
        "-m",
        "privfed",
        "simulate",
        str(log),
        "--quick",
        "--banks",
        "3",
        "--features",
        features,
        "--out",
        str(out),
        "--json",
        "--non-private",
    )
    output = run("scorer", str(out / "model.npz"), str(log))
    lines = [int(line) for line in re.findall(r"^line (\d+): ", output, re.MULTILINE)]
    frauds = int(re.search(r"frauds among the 20 most suspicious: (\d+)", output)[1])
    assert frauds == sum(int(log.read_text().splitlines()[line - 1].split(",")[transactions.columns.get_loc("isFraud")]) for line in lines)
    assert frauds > 6  # at random, one in 33 is a fraud: more than 6 of 20 have a probability below 1e-5

    def refused(*files: Path) -> str:
        result = subprocess.run(
            [sys.executable, str(EXAMPLES / "scorer.py"), *map(str, files)], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout) == (1, "")
        assert "Traceback" not in result.stderr
        return result.stderr

    absent, misspelled = tmp_path / "absent.csv", tmp_path / "misspelled.csv"
    transactions.rename(columns={"amount": "amuont"}).to_csv(misspelled, index=False)
    assert refused(out / "model.npz", absent) == f"there is no file {absent}\n"
    assert refused(tmp_path / "absent.npz", absent) == f"there is no file {tmp_path / 'absent.npz'} and no file {absent}\n"
    assert "refused: the header of misspelled.csv does not fit: amount is missing" in refused(out / "model.npz", misspelled)


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
    assert float(up) == pytest.approx(7 + chunks * 64 / int(parameters), rel=0.01)


def test_the_notebook_runs_as_it_stands_and_learns_within_its_budget() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    notebook = nbformat.read(EXAMPLES / "consortium.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are made, not kept
    question = "print(history.pr_auc[-1], test.labels.mean(), max(history.epsilon.values()))"
    notebook.cells.append(nbformat.v4.new_code_cell(question))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    quality, guessing, spent = map(float, notebook.cells[-1].outputs[0].text.split())
    assert quality > 5 * guessing
    assert 3.9 < spent <= 4.0
    refusal = next(cell for cell in notebook.cells if "except pf.PrivFedError" in cell.source)
    assert "budget" in refusal.outputs[0].text

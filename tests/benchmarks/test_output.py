"""With --json a benchmark prints JSON on standard output, and nothing else gets there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "typer.run(" in path.read_text(encoding="utf-8")]
WARNING = "The input does not fit in a single ciphertext"

PROGRAM = """
import subprocess
import sys
from benchmarks.encrypted_gram import tenseal_dot
from benchmarks.output import keep_stdout

def work():
    tenseal_dot(clients=2, size=5000)
    subprocess.run([sys.executable, "-c", "print('from a process of its own')"], check=True)
    print('{"of": "the benchmark"}')

if "guarded" in sys.argv:
    keep_stdout()
work()
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def test_what_tenseal_and_other_processes_print_goes_to_standard_error() -> None:
    bare = run("-c", PROGRAM)
    assert WARNING in bare.stdout  # else there is nothing to keep away
    guarded = run("-c", PROGRAM, "guarded")
    assert guarded.returncode == 0, guarded.stderr
    assert guarded.stdout == '{"of": "the benchmark"}\n'
    assert WARNING in guarded.stderr
    assert "from a process of its own" in guarded.stderr


def test_a_benchmark_that_ends_early_prints_what_it_said() -> None:
    program = "from benchmarks.output import keep_stdout\nkeep_stdout()\nprint('said', end='')\nraise SystemExit(3)"
    ended = run("-c", program)
    assert (ended.returncode, ended.stdout) == (3, "said")


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_every_benchmark_keeps_standard_output_for_itself(path: Path) -> None:
    ending = 'if __name__ == "__main__":\n    keep_stdout()\n    typer.run(main)\n'
    text = path.read_text(encoding="utf-8")
    assert text.endswith(ending)
    assert text.count("typer.run(") == 1


def test_all_benchmarks_are_found() -> None:
    assert {"benchmarks.contribution", "benchmarks.he", "benchmarks.round", "benchmarks.engines"} <= set(map(name_of, COMMANDS))


def check_json(module: str) -> None:
    done = run("-m", module, "--quick", "--json")
    assert done.returncode == 0, done.stderr
    try:
        json.loads(done.stdout)
    except json.JSONDecodeError:  # an object per line, then
        assert [json.loads(line) for line in done.stdout.splitlines()]


def test_a_quick_run_prints_nothing_but_json() -> None:
    check_json("benchmarks.dp_sgd")


def has_json(path: Path) -> bool:
    return bool(re.search(r"as_json: (AsJson|Annotated)", path.read_text(encoding="utf-8")))


@pytest.mark.nightly
@pytest.mark.parametrize("path", filter(has_json, COMMANDS), ids=name_of)
def test_every_quick_run_prints_nothing_but_json(path: Path) -> None:
    check_json(name_of(path))

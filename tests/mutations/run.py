"""Plants each fault of the catalogue in a copy of the sources, and shows that the suite notices: `python -m tests.mutations.run`.

A fault that no test notices, and one whose place in the source has changed, end it with exit status 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.catalogue import CATALOGUE, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("privfed", "tests", "benchmarks", "examples", "stubs", "docs", "pyproject.toml", "README.md", "SECURITY.md", "CHANGELOG.md")
TESTS_FAILED = 1


def noticed(mutation: Mutation, copy: Path) -> str:
    """Plants one fault, runs its tests, takes it away again; says what happened."""
    path = copy / mutation.path
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.before) != 1:
        return f"STALE: its text occurs {source.count(mutation.before)} times in {mutation.path}"
    path.write_text(source.replace(mutation.before, mutation.after), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *mutation.tests]
    # The copy must come before an editable installation of the original.
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source, encoding="utf-8")
    if done.returncode == TESTS_FAILED:
        return "noticed"
    return "SURVIVED" if done.returncode == 0 else f"BROKEN: pytest ended with {done.returncode}"


def run(mutations: Sequence[Mutation]) -> bool:
    """Prints a line for each fault; whether all were noticed."""
    with tempfile.TemporaryDirectory(prefix="privfed-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build", ".hypothesis"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        fine = True
        for mutation in mutations:
            outcome = noticed(mutation, copy)
            fine = fine and outcome == "noticed"
            print(f"{outcome:10} {mutation.name} ({mutation.path})", flush=True)
    return fine


def main() -> int:
    """All faults, about eight minutes; with --quick one of them, in ten seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one fault only")
    arguments = parser.parse_args()
    return 0 if run(CATALOGUE[:1] if arguments.quick else CATALOGUE) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whether a hot path became slower: its processor time in units of a reference operation of the same run, against a stored one.

`python -m benchmarks.hot_paths` runs the suite of `test_hot_paths.py`, prints the table, and says what drifted by more than a factor of
two. A ratio of two times of one run is nearly the same on another machine or beside other work; a time is not.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parents[1]
SUITE, BASELINE = ROOT / "benchmarks" / "test_hot_paths.py", ROOT / "benchmarks" / "hot_paths.json"
REFERENCE = "test_reference"
LARGEST_DRIFT = 2.0
DRIFTED, UNUSABLE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPath:
    """A hot path. `drift` is its ratio over that of the baseline: above 1 it became slower; NaN if one of the two is not there."""

    name: str
    ratio: float
    baseline: float
    drift: float

    @property
    def verdict(self) -> str:
        """What the drift says."""
        if math.isnan(self.drift):
            return "not measured" if math.isnan(self.ratio) else "no baseline"
        if self.drift > LARGEST_DRIFT:
            return "SLOWER"
        return "faster: store a new baseline" if self.drift < 1 / LARGEST_DRIFT else "as before"


def ratios(report: Mapping[str, list[dict[str, object]]]) -> dict[str, float]:
    """The fastest time of each benchmark in units of the fastest of the reference: other work on a machine only ever adds.

    Args:
        report: What pytest-benchmark wrote as JSON.

    Raises:
        ValueError: If the reference is not in it.
    """
    fastest = {str(entry["name"]): float(entry["stats"]["min"]) for entry in report["benchmarks"]}  # type: ignore[index]
    if REFERENCE not in fastest:
        raise ValueError(f"expected {REFERENCE} among the benchmarks, got {', '.join(fastest) or 'none'}")
    reference = fastest.pop(REFERENCE)
    return {name: seconds / reference for name, seconds in fastest.items()}


def compare(measured: Mapping[str, float], baseline: Mapping[str, float]) -> list[HotPath]:
    """Every path that was measured or has a baseline, by name."""
    paths: list[HotPath] = []
    for name in sorted({*measured, *baseline}):
        ratio, known = measured.get(name, math.nan), baseline.get(name, math.nan)
        paths.append(HotPath(name=name, ratio=ratio, baseline=known, drift=ratio / known))
    return paths


def run_suite(*, quick: bool) -> dict[str, float]:
    """Runs the suite in a process of its own, on one thread.

    Raises:
        RuntimeError: If it fails.
    """
    with tempfile.TemporaryDirectory(prefix="privfed-hot-paths-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", str(SUITE), "--benchmark-enable", "--benchmark-only", f"--benchmark-json={report}"]
        # Processor time: with other work on the machine, the ratio of two wall-clock times is off by a factor of three.
        command += ["--benchmark-timer=time.process_time"]
        command += ["--benchmark-max-time=0.05", "--benchmark-min-rounds=1"] if quick else ["--benchmark-min-rounds=10"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the suite failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return ratios(json.loads(report.read_text(encoding="utf-8")))


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="One round of each: shows that all run; drift is shown and not judged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line and nothing else.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Store what is measured as the new baseline.")] = False,
    report: Annotated[Path | None, typer.Option(help="What pytest-benchmark wrote before; left out, the suite is run.")] = None,
) -> None:
    """Compares the hot paths with their baseline, as ratios to a reference operation of the same run.

    Exit status: 1 if a path became slower by more than a factor of 2, was not measured, or has no baseline; 2 if the suite fails.
    """
    try:
        measured = run_suite(quick=quick) if report is None else ratios(json.loads(report.read_text(encoding="utf-8")))
    except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        typer.echo(f"{error}; nothing was compared", err=True)
        raise typer.Exit(UNUSABLE) from error
    if update:
        BASELINE.write_text(
            json.dumps({name: round(ratio, 4) for name, ratio in sorted(measured.items())}, indent=2) + "\n", encoding="utf-8"
        )
    paths = compare(measured, json.loads(BASELINE.read_text(encoding="utf-8")))
    if as_json:
        for path in paths:
            line = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in asdict(path).items()}
            typer.echo(json.dumps(line | {"verdict": path.verdict}))
    else:
        shown = Table(title="Hot paths, in units of the reference operation")
        for name in ("path", "ratio", "baseline", "drift", ""):
            shown.add_column(name)
        for path in paths:
            shown.add_row(escape(path.name), f"{path.ratio:.3g}", f"{path.baseline:.3g}", f"{path.drift:.2f}", path.verdict)
        Console().print(shown)
    if not quick and any(math.isnan(path.drift) or path.drift > LARGEST_DRIFT for path in paths):
        raise typer.Exit(DRIFTED)


if __name__ == "__main__":
    typer.run(main)

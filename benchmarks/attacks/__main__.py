"""What our attacks read and how long they take, each beside what somebody says who saw nothing, and beside `breaching` where it runs.

Every attack works on one thread. `python -m benchmarks.attacks --help` says the rest.
"""

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.attacks.cases import cases
from benchmarks.attacks.images import PeerError, find_images, image_cases, peer_case
from benchmarks.attacks.outcome import Case, Missing, Outcome, outcome
from benchmarks.attacks.servers import server_cases

NOT_REACHED = 1
PEER = "breaching"
_INSTALL_SECONDS = 1200


def measure(case: Case, *, quick: bool) -> Outcome:
    """Runs all attempts of a case; in the quick form nothing is judged."""
    return outcome(case, [case.run(seed) for seed in range(case.quick if quick else case.repeats)], judge=not quick)


def results(*, quick: bool, alone: bool, only: str) -> Iterator[Outcome | Missing]:
    """Outcomes, as they come."""
    path = find_images()
    chosen = [case for case in (*cases(), *server_cases(), *([] if path is None else image_cases(path))) if only in case.attack]
    for case in chosen:
        if not quick or case.quick:
            yield measure(case, quick=quick)
    if path is None:
        yield Missing(attack="images", missing="no cifar10_12k.npz at PRIVFED_DATA, nor in ../shared/data beside the repository")
    elif quick or alone or only not in PEER:
        yield Missing(attack=PEER, missing="not asked for; the full form installs it into a throw-away environment")
    else:
        yield beside(path)


def beside(path: Path) -> Outcome | Missing:
    """The peer on the same photos, in a throw-away environment; why not, where it does not run."""
    with tempfile.TemporaryDirectory(prefix="privfed-bench-") as folder:
        python = Path(folder) / "bin" / "python"
        try:
            venv.create(folder, with_pip=True)
            command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", PEER]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            return measure(peer_case(path, python), quick=False)
        except subprocess.CalledProcessError as error:
            return Missing(attack=PEER, missing=f"it could not be installed: {(error.stderr.strip() or 'no reason').splitlines()[-1]}")
        except (subprocess.TimeoutExpired, OSError, PeerError) as error:
            return Missing(attack=PEER, missing=str(error))


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds, nothing is judged or installed: does it run?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help=f"Do not install {PEER}, which takes gigabytes.")] = False,
    only: Annotated[str, typer.Option(help="Only attacks whose name contains this.")] = "",
) -> None:
    """Measures the attacks. Exit status 1 if a promise is not kept."""
    torch.set_num_threads(1)
    found = list[Outcome | Missing]()
    for result in results(quick=quick, alone=alone, only=only):
        found.append(result)
        if as_json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print(".", end="", file=sys.stderr, flush=True)
    if not as_json:
        show(found)
    if any(isinstance(result, Outcome) and result.kept is False for result in found):
        raise typer.Exit(NOT_REACHED)


def show(found: list[Outcome | Missing]) -> None:
    """Prints a table."""
    table = Table("attack", "setting", "score", "95 % interval", "guessing", "seeds", "seconds", "false", "promised", "kept")
    for result in found:
        if isinstance(result, Missing):
            table.add_row(result.attack, f"does not run: {result.missing}", *[""] * 8)
            continue
        reach = "" if result.low is None or result.high is None else f"{result.low:.3f} to {result.high:.3f}"
        kept = {True: "yes", False: "NO", None: ""}[result.kept]
        score, guess, took = f"{result.score:.3f} {result.measure}", f"{result.baseline:.3f}", f"{result.seconds:.3f}"
        table.add_row(result.attack, result.setting, score, reach, guess, str(result.seeds), took, str(result.false), result.promised, kept)
    Console(width=None if sys.stdout.isatty() else 220).print(table)


if __name__ == "__main__":
    typer.run(main)

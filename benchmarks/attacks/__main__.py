"""What our attacks read and how long they take, each beside what somebody says who saw nothing, and beside `breaching` where it runs.

Every attack works on one thread. `python -m benchmarks.attacks --help` says the rest.
"""

import json
import math
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
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
    output: Annotated[Path | None, typer.Option(help="Folder for the results as a page.")] = None,
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
    if output is not None:
        (output / "attacks.md").write_text(dossier(found), encoding="utf-8")
    if any(isinstance(result, Outcome) and result.kept is False for result in found):
        raise typer.Exit(NOT_REACHED)


_HEAD = ("attack", "setting", "score", "95 % interval", "guessing", "seeds", "seconds", "false", "promised", "kept")


def cells(result: Outcome | Missing) -> tuple[str, ...]:
    """A result as a row of `_HEAD`."""
    if isinstance(result, Missing):
        return result.attack, f"does not run: {result.missing}", *[""] * 8
    most = math.inf if "dB" in result.measure else 1.0
    reach = "" if result.low is None or result.high is None else f"{max(0.0, result.low):.3f} to {min(most, result.high):.3f}"
    kept = {True: "yes", False: "NO", None: ""}[result.kept]
    score, took = f"{result.score:.3f} {result.measure}", f"{result.seconds:.3f}"
    told = (score, reach, f"{result.baseline:.3f}", str(result.seeds), took, str(result.false), result.promised, kept)
    return result.attack, result.setting, *told


def show(found: Sequence[Outcome | Missing]) -> None:
    """Prints a table."""
    table = Table(*_HEAD)
    for result in found:
        table.add_row(*cells(result))
    Console(width=None if sys.stdout.isatty() else 220).print(table)


def dossier(found: Sequence[Outcome | Missing]) -> str:
    """The results as a Markdown page."""
    lines = [
        "# What the attacks read, and how long they take",
        "",
        "Made by `python -m benchmarks.attacks --output docs/experiments`, which writes this page; do not edit it.",
        "",
        "Mean scores over seeds, with their 95 % interval (exact where every attempt is right or wrong, else Student's), beside what "
        "somebody reaches who saw nothing of the round. Seconds are the median of one attempt, on one thread, attack alone. False: "
        "rows certified over all attempts that are no true row. Every attack gets an observation that cannot contain the truth.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(cells(result))} |" for result in found),
        "",
        "* SPEAR, analytic and unmixing: tables of 50 inputs, updates in float32. The trained networks learnt from 3,000 rows.",
        f"* `{PEER}` (`invertinggradients`) is given the same photos, networks and iterations, in a throw-away environment of its own.",
        "* Epsilons are those of a single release at delta 1e-5. A bound on picks is that of reconstruction robustness (Hayes et al., "
        "2023, arXiv:2302.07225), the most that any attack reaches, and may be exceeded by three standard errors.",
        "* Audits with Dirac rows score 1 where a client that trains right passes, and where a planted fault is flagged.",
        "",
        f"Versions: {', '.join(f'{name} {version(name)}' for name in ('privfed', 'torch', 'numpy'))}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)

"""`privfed demo`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson, folder_to_write
from privfed.cli.audit import show_audit
from privfed.cli.outcome import show_outcome, show_written
from privfed.cli.terminal import print_json, round_progress, use_one_core


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rows, rounds and repeats of the attacks: seconds less, coarser numbers.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New or empty folder, or that of an earlier demo, which is replaced.")] = Path(
        "privfed-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Three banks train a fraud model: DP-SGD at each bank, encrypted updates, a server without a key.

    The transactions are made up. At the end you see the model's quality per round, what each bank spent of its privacy budget, what
    travelled, whether a key was found in the server's memory, and what attacks on made-up records could read. All of it stands in
    a report, as HTML, Markdown and JSON. DIR also holds what `privfed simulate --out` leaves, for `privfed audit`, `report`, `history show`
    and `ledger`.

    ```
    privfed demo --quick
    ```
    """
    folder_to_write(out)
    with round_progress(quiet=as_json) as progress:
        from privfed.demo import BANKS, FULL, QUICK, run_demo  # noqa: PLC0415 # --help must not wait for torch

        use_one_core()
        size = QUICK if quick else FULL
        progress.training(size.rounds, banks=BANKS)
        result = run_demo(
            size,
            out,
            command=shlex.join(["privfed", *sys.argv[1:]]),
            progress=progress.round,
            auditing=lambda done: progress.preparing(f"Attacking canaries, {done} of {size.repeats}"),
        )
    report = out / "report.html"
    if as_json:
        print_json(result.to_json() | {"report": str(report)})
        return
    show_outcome(result.outcome)
    found = {True: "[red]a key was found[/red]", False: "no key was found", None: "could not be searched on this system"}
    Console().print(f"The server is a process of its own. Its memory: {found[result.server_has_secret_key]}.\n")
    show_audit(result.audit)
    typer.echo(f"\nReport: {report} (and .md, .json).")
    show_written(result.outcome, out, also="audit.json, ")
    typer.echo("With transactions of your own:\n  privfed simulate your_paysim.csv --out run1")

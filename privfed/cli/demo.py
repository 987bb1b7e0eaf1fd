"""`privfed demo`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel

from privfed.cli.arguments import AsJson, folder_to_write
from privfed.cli.audit import show_audit
from privfed.cli.terminal import epsilon_of, number, print_json, round_progress, table, use_one_core

if TYPE_CHECKING:
    from privfed.demo import DemoResult


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rows, rounds and repeats of the attacks: seconds less, coarser numbers.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report; one that is there is replaced.")] = Path("privfed-demo"),
    as_json: AsJson = False,
) -> None:
    """Three banks train a fraud model: DP-SGD at each bank, encrypted updates, a server without a key.

    The transactions are made up. At the end you see the model's quality per round, what each bank spent of its privacy budget, what
    travelled, whether a key was found in the server's memory, and what attacks on made-up records could read. All of it stands in
    a report, as HTML, Markdown and JSON.

    ```
    privfed demo --quick
    ```
    """
    folder_to_write(out)
    if (out / "history.json").exists():
        raise ValueError(
            f"expected a folder without a simulation in it, got {out}, whose report would be replaced; nothing was run; take another --out"
        )
    with round_progress(quiet=as_json) as progress:
        from privfed.demo import BANKS, FULL, QUICK, run_demo  # noqa: PLC0415 # --help must not wait for torch

        use_one_core()
        size = QUICK if quick else FULL
        progress.training(size.rounds, banks=len(BANKS))
        result = run_demo(
            size, progress=progress.round, auditing=lambda done: progress.preparing(f"Attacking canaries, {done} of {size.repeats}")
        )
        report = result.write_report(out, command=shlex.join(["privfed", *sys.argv[1:]]))
    if as_json:
        print_json(result.to_json() | {"report": str(report)})
    else:
        _show(result)
        typer.echo(f"\nReport: {report} (and .md, .json). Next, with transactions of your own:")
        typer.echo("  privfed simulate your_paysim.csv --out run1")


def _show(result: "DemoResult") -> None:
    from privfed.demo import BUDGET  # noqa: PLC0415
    from privfed.training.mechanism import DpSgd  # noqa: PLC0415

    history = result.history
    console = Console()
    rounds = (
        (
            str(summary.record.round + 1),
            str(len(summary.record.participants)),
            f"{summary.record.effective_clients:.2f}",
            number(summary.evaluation.pr_auc) if summary.evaluation else "-",
            "-" if summary.grid_error_max is None else f"{summary.grid_error_max} steps",
        )
        for summary in history.rounds
    )
    console.print(
        table(
            "The model, round by round",
            ("round", "banks in sum", "equal banks", "PR-AUC", "sum's error"),
            rows=rounds,
            left=0,
            caption="Equal banks: so many banks of equal weight would hide one another as well (the effective number of clients). PR-AUC: "
            "on held-out transactions (simulation only). Sum's error: of the decrypted sum against the exact one, in steps of the grid to "
            "which updates are rounded before encryption.",
        )
    )
    spent = (
        (
            name,
            epsilon_of(epsilon),
            f"{BUDGET.epsilon:g}",
            f"{BUDGET.delta:g}",
            f"{mechanism.noise_multiplier:.2f}" if isinstance(mechanism := history.training[name], DpSgd) else "-",
        )
        for name, epsilon in result.epsilon.items()
    )
    console.print()
    console.print(
        table(
            "What each bank spent of its privacy budget",
            ("bank", "epsilon spent", "of", "at delta", "noise multiplier"),
            rows=spent,
            caption="Epsilon and delta bound what anyone can learn about one record. Noise multiplier: standard deviation over the "
            "clipping norm.",
        )
    )
    found = {True: "[red]a key was found[/red]", False: "no key was found", None: "could not be searched on this system"}
    console.print()
    console.print(
        Panel(
            f"Every update travelled encrypted: {history.bytes_up_per_parameter:.2f} bytes per parameter up, "
            f"{history.bytes_down_per_parameter:.2f} down ({history.model.layout.size} parameters).\n"
            f"The server is a process of its own. Its memory: {found[result.server_has_secret_key]}.\n"
            f"Trust mode {history.mode}: every bank holds the key, so a bank together with the server could read another bank's "
            "update; differential privacy bounds what that says about one record.",
            title="What travelled, and who could read it",
            title_align="left",
        )
    )
    console.print()
    show_audit(result.audit)

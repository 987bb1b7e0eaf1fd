"""The `privfed` command. It parses, calls and prints; what it calls is in the library."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from privfed.errors import PrivFedError

if TYPE_CHECKING:
    from privfed.demo import DemoResult

app = typer.Typer(
    help="Privacy-first federated learning for consortia. Start with `privfed demo`.", no_args_is_help=True, add_completion=False
)
REFUSED = 2


@app.callback()
def _main() -> None:
    """Privacy-first federated learning for consortia. Start with `privfed demo`."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and rounds: half a minute instead of two.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Three banks train a fraud model: DP-SGD at each bank, encrypted updates, a server without a key.

    The transactions are made up and nothing is written outside a temporary folder. At the end you see the model's quality per
    round, what each bank spent of its privacy budget, what travelled, and whether a key was found in the server's memory.
    """
    from privfed.demo import FULL, QUICK, run_demo  # noqa: PLC0415 # --help must not wait for torch

    size = QUICK if quick else FULL
    console = Console(stderr=True, quiet=as_json)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[quality]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("Encrypted rounds", total=size.rounds, quality="")
            result = run_demo(
                size,
                progress=lambda summary: bar.update(
                    task, advance=1, quality="" if summary.evaluation is None else f"PR-AUC {summary.evaluation.pr_auc:.3f}"
                ),
            )
    except PrivFedError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _print_demo(result)


def _print_demo(result: "DemoResult") -> None:
    from privfed.demo import BUDGET  # noqa: PLC0415
    from privfed.training.mechanism import DpSgd  # noqa: PLC0415

    history = result.history
    console = Console()
    quality = Table(title="The model, round by round", caption=f"PR-AUC on held-out transactions ({result.to_json()['pr_auc_scope']})")
    for column in ("round", "banks in the sum", "effective", "PR-AUC", "largest error of the encrypted sum"):
        quality.add_column(column, justify="right")
    for number, summary in enumerate(history.rounds, start=1):
        pr_auc = "-" if summary.evaluation is None else f"{summary.evaluation.pr_auc:.3f}"
        record = summary.record
        quality.add_row(
            str(number), str(len(record.participants)), f"{record.effective_clients:.2f}", pr_auc, f"{summary.grid_error_max} grid steps"
        )
    console.print(quality)
    privacy = Table(
        title="What each bank spent of its privacy budget", caption="epsilon and delta bound what anyone can learn about one record"
    )
    for column in ("bank", "epsilon spent", "epsilon budget", "delta", "noise multiplier"):
        privacy.add_column(column, justify="right" if column != "bank" else "left")
    for name, epsilon in result.epsilon.items():
        mechanism = history.training[name]
        noise = f"{mechanism.noise_multiplier:.2f}" if isinstance(mechanism, DpSgd) else "-"
        privacy.add_row(name, f"{epsilon:.2f}", f"{BUDGET.epsilon:g}", f"{BUDGET.delta:g}", noise)
    console.print(privacy)
    found = {True: "[red]a key was found[/red]", False: "no key was found", None: "could not be searched on this system"}
    console.print(
        Panel(
            f"Every update travelled encrypted: {history.bytes_up_per_parameter:.2f} bytes per parameter up, "
            f"{history.bytes_down_per_parameter:.2f} down ({history.model.layout.size} parameters).\n"
            f"The server is a process of its own. Its memory: {found[result.server_has_secret_key]}.\n"
            f"Trust mode {history.mode}: every bank holds the key, so a bank together with the server could read another bank's "
            "update; differential privacy bounds what that says about one record.",
            title="What travelled, and who could read it",
        )
    )

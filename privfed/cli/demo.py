"""`privfed demo`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel

from privfed.cli.terminal import AsJson, number, print_json, round_progress, table

if TYPE_CHECKING:
    from privfed.demo import DemoResult


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and rounds: some seconds instead of a minute.")] = False,
    as_json: AsJson = False,
) -> None:
    """Three banks train a fraud model: DP-SGD at each bank, encrypted updates, a server without a key.

    The transactions are made up and nothing is written outside a temporary folder. At the end you see the model's quality per
    round, what each bank spent of its privacy budget, what travelled, and whether a key was found in the server's memory.

    Example: [bold]privfed demo --quick[/bold]
    """
    with round_progress(rounds=1, quiet=True) if as_json else round_progress(rounds=1, quiet=False):
        pass

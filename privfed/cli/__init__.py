"""The `privfed` command: it parses, calls and prints; what it calls is in the library.

A command is a function in the module of its group, and one line here. What the library refuses is caught in
`privfed.cli.refusals` and nowhere else, so a command has no `try`.
"""

from typing import Annotated

import typer

from privfed import __version__
from privfed.cli import deploy, history, keys, ledger
from privfed.cli.audit import audit, report
from privfed.cli.demo import demo
from privfed.cli.partition import partition
from privfed.cli.refusals import SUGGEST_COMMANDS, Refusing
from privfed.cli.simulate import simulate

# Tracebacks stay plain: pretty ones print local variables, which are private tables.
app = typer.Typer(
    cls=Refusing,
    no_args_is_help=True,
    suggest_commands=SUGGEST_COMMANDS,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"privfed {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)] = False,
) -> None:
    """Privacy-first federated learning for consortia. Start with `privfed demo`.

    What is refused is said in one line on stderr, with exit code 2. Progress goes to stderr, results to stdout.
    """


app.command()(demo)
app.command()(simulate)
app.command()(partition)
app.command()(audit)
app.command()(report)
app.add_typer(history.app, name="history")
app.add_typer(ledger.app, name="ledger")
app.add_typer(keys.app, name="keys")
app.add_typer(deploy.app, name="deploy")

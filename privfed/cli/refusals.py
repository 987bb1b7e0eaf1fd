"""The one place where what the library refuses becomes a line on stderr and an exit code."""

import typer
from typer.core import TyperGroup

from privfed.errors import PrivFedError

REFUSED = 2
"""Exit code of a refusal; click has the same one for options it does not know."""
SUGGEST_COMMANDS = not any(base.__module__.startswith("click.") for base in TyperGroup.__mro__)
"""Whether typer has to suggest the command that was meant: where it stands on click, click does, and both would say it twice."""


class Refusing(TyperGroup):
    """A group of commands that ends with one line, "refused: ...", where the library refuses: no traceback, exit code 2."""

    def invoke(self, ctx: typer.Context) -> object:  # pyright: ignore[reportIncompatibleMethodOverride] -- typer's is a click.Context
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read stdout has seen enough
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}; nothing was done" if error.strerror and error.filename else str(error)
        except (PrivFedError, ValueError) as error:
            reason = str(error)
        typer.echo(f"refused: {' '.join(reason.split())}", err=True)
        raise typer.Exit(REFUSED)

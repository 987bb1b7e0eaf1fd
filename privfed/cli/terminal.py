"""How results look: progress on stderr, tables on stdout, numbers to the digits that mean something."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from privfed.history import RoundSummary

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


class RoundProgress:
    """A bar on stderr that first names what is prepared, then counts rounds.

    Args:
        bar: Where it shows.
        rounds: How many rounds there will be.
    """

    def __init__(self, bar: Progress, *, rounds: int) -> None:
        self._bar = bar
        self._rounds = rounds
        self._task: TaskID = bar.add_task("", total=None, quality="")

    def preparing(self, what: str) -> None:
        """Shows what happens before the first round."""
        self._bar.update(self._task, description=escape(what))

    def training(self) -> None:
        """Starts to count."""
        self._bar.update(self._task, description="Encrypted rounds", total=self._rounds, quality=f"0/{self._rounds}")

    def round(self, summary: "RoundSummary") -> None:
        """Counts one round."""
        quality = f"{summary.record.round + 1}/{self._rounds}"
        if summary.evaluation is not None:
            quality += f"  PR-AUC {summary.evaluation.pr_auc:.3f}"
        self._bar.update(self._task, completed=summary.record.round + 1, quality=quality)


@contextmanager
def round_progress(*, rounds: int, quiet: bool) -> Iterator[RoundProgress]:
    """Progress of a run, gone from the screen when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[quality]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=quiet), transient=True) as bar:
        yield RoundProgress(bar, rounds=rounds)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str | None = None, left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers. Cells are shown as they are, without markup."""
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for position, column in enumerate(columns):
        result.add_column(column, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        result.add_row(*(escape(printable(cell)) for cell in row))
    return result


def printable(text: str) -> str:
    """The text without what could command a terminal, cut off where it gets long."""
    clean = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return clean if len(clean) <= 80 else clean[:79] + "\u2026"


def number(value: float) -> str:
    """Three decimals; a dash where there is no number."""
    return "-" if value != value else f"{value:.3f}"  # noqa: PLR0124 -- NaN alone differs from itself


def bytes_of(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def print_json(values: Mapping[str, object]) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(values, allow_nan=False))

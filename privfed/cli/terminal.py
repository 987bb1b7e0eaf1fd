"""How results look: progress on stderr, tables on stdout, numbers to the digits that mean something."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from privfed.history import RoundSummary


_MOST_IN_CELL = 400  # characters: what attacks found is a sentence
_LONGEST_WORD = 16


class RoundProgress:
    """A bar on stderr that first names what is prepared, then counts rounds and says how long the others will take.

    Args:
        bar: Where it shows.
    """

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._rounds = 0
        self._started = 0.0
        self._task = bar.add_task("Loading torch", total=None, state="")

    def preparing(self, what: str) -> None:
        """Shows what happens before the first round."""
        self._bar.update(self._task, description=escape(printable(what)))

    def training(self, rounds: int, *, banks: int) -> None:
        """Starts to count the rounds."""
        self._rounds = rounds
        self._started = time.monotonic()
        self._bar.update(self._task, description=f"Training {banks} banks in rounds", total=rounds, state=f"0/{rounds}")

    def round(self, summary: "RoundSummary") -> None:
        """Counts one round."""
        done = summary.record.round + 1
        state = f"{done}/{self._rounds}"
        if summary.evaluation is not None:
            state += f"  PR-AUC {number(summary.evaluation.pr_auc)}"
        if done < self._rounds:
            state += f"  {duration((time.monotonic() - self._started) / done * (self._rounds - done))} left"
        self._bar.update(self._task, completed=done, state=state)


@contextmanager
def round_progress(*, quiet: bool) -> Iterator[RoundProgress]:
    """Progress of a run, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        yield RoundProgress(bar)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str | None = None, left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers. All text is shown as it is, without markup, and wrapped.

    Numbers with their units are kept whole, and so are words, as long as they are no longer than a name usually is.
    """
    titles = list(columns)
    cells = [[printable(cell, most=_MOST_IN_CELL) for cell in row] for row in rows]
    result = Table(
        title=escape(printable(title)), caption=escape(caption) if caption else None, title_justify="left", caption_justify="left"
    )
    for position, title_above in enumerate(titles):
        content = [row[position] for row in cells]
        whole = [*title_above.split(), *(" ".join(content).split() if position < left else content)]
        width = min(max(map(len, whole), default=1), _LONGEST_WORD)
        result.add_column(title_above, justify="left" if position < left else "right", overflow="fold", min_width=width)
    for row in cells:
        result.add_row(*map(escape, row))
    return result


def printable(text: str, *, most: int = 80) -> str:
    """The text without what could command a terminal, cut off after so many characters."""
    clean = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return clean if len(clean) <= most else clean[: most - 1] + "\u2026"


def use_one_core() -> None:
    """Keeps torch to one core in this process: batches of a small network are so short that cores mostly wait for each other."""
    import torch  # noqa: PLC0415 # --help must not wait for torch

    torch.set_num_threads(1)


def number(value: float) -> str:
    """Three decimals; a dash where there is no number."""
    return "-" if value != value else f"{value:.3f}"  # noqa: PLR0124 -- NaN alone differs from itself


def epsilon_of(value: float) -> str:
    """Two decimals, and two digits that are not 0 where it is small; infinity in words."""
    if value == float("inf"):
        return "infinite"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """About how long something takes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


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
